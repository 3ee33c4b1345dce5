// Norms quantized to NVFP4, by two kernels: norm_loop_kernel computes the statistics of the rows, then
// quantize_nv_source_kernel (quantize/cuda/nvfp4/runtime_options.cuh) quantizes tiles of 128x128 of the
// normalised values. The input is read twice; no intermediate values are written.
#include "norm/norm_quantize.h"
#include "quantize/cuda/nvfp4/runtime_options.cuh"
#include "quantize/cuda/tile/tile_fragment.cuh"

namespace transformer_plugin::norm {
namespace {

using quantize::kColsPerThread;
using quantize::kRowsPerThread;

// Four values of a vector of parameters; `missing` past its end or if there is none.
template <typename T>
__device__ __forceinline__ void read_parameters(const void* vector, int64_t first, int count, float missing,
                                                float (&floats)[kColsPerThread]) {
#pragma unroll
  for (int c = 0; c < kColsPerThread; ++c) {
    floats[c] = vector && c < count ? to_float(static_cast<const T*>(vector)[first + c]) : missing;
  }
}

template <typename T>
struct NormSource {
  using Value = T;

  NormArgs norm;  // with the statistics

  template <typename Args>
  __device__ __forceinline__ void load(const Args&, const quantize::Tile& tile, int warp, int lane,
                                       quantize::TileFragment<T>& values) const {
    const quantize::FragmentReader<T> input(norm.input, norm.cols, tile, warp, lane);
    const int own_row = warp * kRowsPerThread + lane;
    const bool has_row = lane < kRowsPerThread && own_row < tile.rows;
    const float own_rstd = has_row ? norm.rstd[tile.row + own_row] : 0.0f;
    const float own_mean = has_row && norm.centered ? norm.mean[tile.row + own_row] : 0.0f;
    const int64_t first = tile.col + lane * kColsPerThread;
    float gamma[kColsPerThread], beta[kColsPerThread];
    read_parameters<T>(norm.weight, first, input.count, 0.0f, gamma);
    read_parameters<T>(norm.bias, first, input.count, 0.0f, beta);
    constexpr int kBatch = quantize::kRowsInFlight<T>;
#pragma unroll
    for (int start = 0; start < kRowsPerThread; start += kBatch) {
      quantize::Vector4<T> rows[kBatch];
      input.read(start, 0, rows);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float mean = __shfl_sync(0xffffffffu, own_mean, start + i);
        const float rstd = __shfl_sync(0xffffffffu, own_rstd, start + i);
        quantize::Floats4<T> y(rows[i]);
#pragma unroll
        for (int c = 0; c < kColsPerThread; ++c) {
          y.at[c] = (y.at[c] - mean) * rstd;
          if (norm.weight) y.at[c] = y.at[c] * gamma_of(gamma[c], norm.zero_centered);
          if (norm.bias) y.at[c] = y.at[c] + beta[c];
          if (start + i >= input.rows || c >= input.count) y.at[c] = 0.0f;  // outside of the matrix
        }
        values.at[start + i][0] = quantize::two_from_floats<T>(y.at[0], y.at[1]);
        values.at[start + i][1] = quantize::two_from_floats<T>(y.at[2], y.at[3]);
      }
    }
  }
};

}  // namespace

void launch_norm_quantize_nv(const NormArgs& args, const NvArgs& output, void* stream) {
  if (args.rows == 0) return;
  launch_norm_loop(args, nullptr, {}, stream);
  quantize::launch_quantize_nv_source(
      output, [&](auto type) { return NormSource<decltype(type)>{args}; }, stream);
}

}  // namespace transformer_plugin::norm

// The general norm kernel: any width, dtype and alignment; the result is stored or quantized to FP8 or MXFP8.
// Formulas: norm.h.
//
// Input: [rows, cols]. Grid: one block of 128 threads per row. A row is read once for each sum and once more
// for the result, from the cache if it fits. A thread processes 8 neighbouring columns at a time; 16 lanes
// share a 1x128 block, 4 lanes a 1x32 block.
// Shared memory: partial sums of 4 warps.
#include "norm/norm_quantize.h"
#include "norm/norm_row.cuh"
#include "norm/scales.cuh"
#include "quantize/cuda/tile/common.cuh"

namespace transformer_plugin::norm {
namespace {

// The mean and the reciprocal standard deviation of a row, in every thread.
template <typename T>
__device__ __forceinline__ float2 stats_of_row(const NormArgs& args, const Columns<T>& input,
                                               SumBuffers& buffers) {
  int parity = 0;
  float mean = 0.0f;
  const float n = static_cast<float>(args.cols);
  if (args.centered) {
    float partials[kUnit] = {};
    for_each_unit(args.cols, [&](int64_t first, int count) {
      float x[kUnit];
      input.read(first, count, x);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) partials[i] = partials[i] + x[i];
    });
    mean = sum_of_partials(partials, buffers, parity) / n;
  }
  float partials[kUnit] = {};
  for_each_unit(args.cols, [&](int64_t first, int count) {
    float x[kUnit];
    input.read(first, count, x);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      const float difference = i < count ? x[i] - mean : 0.0f;
      partials[i] = fmaf(difference, difference, partials[i]);
    }
  });
  return make_float2(mean, reciprocal_root(sum_of_partials(partials, buffers, parity) / n, args.eps));
}

// Quantizes and stores a unit of 8 columns; called by all threads of the row.
struct UnitQuantizer {
  const QuantizeArgs& output;
  int64_t row;
  int lane;

  __device__ __forceinline__ float max_over(float value, int lanes) const {
    for (int distance = 1; distance < lanes; distance *= 2) {
      value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    return value;
  }

  // 1x128 blocks.
  __device__ __forceinline__ float block_scale(int64_t first, int count, float largest) const {
    const float scale = quantize::encode_scale(max_over(largest, 16), output.rule);
    if (lane % 16 == 0 && count > 0) {
      output.scale[first / quantize::kTile * output.layout.scale_width(false) + row] = 1.0f / scale;
    }
    return scale;
  }

  // 1x32 blocks, four exponents per word.
  __device__ __forceinline__ float mx_scale(int64_t first, int count, float largest) const {
    const uint8_t exponent = e8m0_of_amax(max_over(largest, 4), output.rule.largest);
    uint32_t word = static_cast<uint32_t>(exponent) << (8 * (lane % 16 / 4));
    word |= __shfl_xor_sync(0xffffffffu, word, 4);
    word |= __shfl_xor_sync(0xffffffffu, word, 8);
    if (lane % 16 == 0 && count > 0) {
      const int64_t place = matrix_scale_words(output.layout)
                                .at(static_cast<int>(row), static_cast<int>(first / quantize::kTile));
      *reinterpret_cast<uint32_t*>(output.exponents + place) = word;
    }
    return e8m0_multiplier(exponent);
  }

  __device__ __forceinline__ float scale_of(int64_t first, int count, float largest) const {
    switch (output.layout.granularity) {
      case quantize::ScaleGranularity::kPerTensor: return quantize::tensor_scale(output, 0);
      case quantize::ScaleGranularity::k1x32: return mx_scale(first, count, largest);
      default: return block_scale(first, count, largest);
    }
  }

  template <DType element>
  __device__ __forceinline__ void store(int64_t first, int count, const float (&y)[kUnit],
                                        float scale) const {
    uint8_t* target = output.data + row * output.layout.cols + first;
#pragma unroll
    for (int i = 0; i < kUnit; i += 4) {
      const quantize::Bytes4 bytes =
          quantize::encode4<element>(y[i] * scale, y[i + 1] * scale, y[i + 2] * scale, y[i + 3] * scale);
      quantize::store_bytes(target + i, bytes, count - i, output.layout.cols % 4 == 0);
    }
  }

  __device__ __forceinline__ void write(int64_t first, int count, const float (&y)[kUnit]) const {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) largest = fmaxf(largest, i < count ? fabsf(y[i]) : 0.0f);
    const float scale = scale_of(first, count, largest);
    if (output.element == DType::kFloat8E5M2) return store<DType::kFloat8E5M2>(first, count, y, scale);
    store<DType::kFloat8E4M3>(first, count, y, scale);
  }
};

// One block per row.
template <typename T>
__global__ void __launch_bounds__(kThreads) norm_loop_kernel(const __grid_constant__ NormArgs args, T* values,
                                                             const __grid_constant__ QuantizeArgs output) {
  __shared__ SumBuffers buffers;
  const int64_t row = blockIdx.x;
  const Columns<T> input(args.input, row, args.cols), weight(args.weight, 0, args.cols),
      bias(args.bias, 0, args.cols);
  const float2 stats = stats_of_row(args, input, buffers);
  const float mean = stats.x, rstd = stats.y;
  if (threadIdx.x == 0) {
    if (args.mean) args.mean[row] = mean;
    if (args.rstd) args.rstd[row] = rstd;
  }
  if (!values && !output.data) return;  // statistics only
  const UnitQuantizer quantizer{output, row, static_cast<int>(threadIdx.x % kWarpSize)};
  for_each_unit(args.cols, [&](int64_t first, int count) {
    float y[kUnit], factors[kUnit];
    input.read(first, count, y);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) y[i] = (y[i] - mean) * rstd;
    if (weight.begin) {
      weight.read(first, count, factors);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) y[i] = y[i] * gamma_of(factors[i], args.zero_centered);
    }
    if (bias.begin) {
      bias.read(first, count, factors);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) y[i] = y[i] + factors[i];
    }
    if (values) return store_unit(values + row * args.cols + first, count, args.cols % kUnit == 0, y);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) y[i] = to_float(from_float<T>(y[i]));
    quantizer.write(first, count, y);
  });
  if (!values && row == args.rows - 1) zero_scales_past_rows(output);
}

}  // namespace

void launch_norm_loop(const NormArgs& args, void* values, const QuantizeArgs& output, void* stream) {
  visit_device_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    norm_loop_kernel<T><<<static_cast<unsigned>(args.rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        args, static_cast<T*>(values), output);
  });
  check_launch("norm_loop_kernel");
}

}  // namespace transformer_plugin::norm

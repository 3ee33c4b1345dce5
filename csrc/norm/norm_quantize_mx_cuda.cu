// Launches the norm kernel (norm/norm_kernel.cuh) with a sink that quantizes to MXFP8.
#include "norm/norm_sinks.cuh"
#include "norm/scales.cuh"
#include "quantize/cuda/mxfp8/tile.cuh"

namespace transformer_plugin::norm {
namespace {

constexpr int kLanesPerBlock = quantize::kMxBlock / kUnit;  // 1x32
constexpr int kLanesPerWord = quantize::kTile / kUnit;      // four blocks
static_assert(kLanesPerBlock == 4 && kLanesPerWord == 16, "exponents meet over lanes 4 and 8 away");

// Sink for MXFP8: 1x32 blocks with E8M0 scales, four per word.
template <int kUnits>
struct MxSink {
  struct Shared {};

  uint8_t* data;       // [rows, cols]
  uint8_t* exponents;  // [up128(rows), 4 * ceil(cols / 128)]
  quantize::Layout layout;
  quantize::ScaleWords scale_words;
  int words;  // per row

  __device__ __forceinline__ void begin(Shared&) const {}

  template <typename Reload>
  __device__ __forceinline__ void write(Shared&, const Units<kUnits>& x, const RowFragment<kUnits>& part,
                                        int64_t row, int, Reload&& reload) const {
    const int lane = threadIdx.x % kWarpSize;
    using Maxima = UnitMaxima<kLanesPerBlock>;
    const Maxima maxima(x, lane);
    float multipliers[Maxima::kCount];
#pragma unroll
    for (int i = 0; i < Maxima::kCount; ++i) {
      const uint8_t exponent = quantize::exponent_of<kElement>(maxima.at[i]);
      multipliers[i] = e8m0_multiplier(exponent);
      uint32_t word = static_cast<uint32_t>(exponent) << (8 * (lane % kLanesPerWord / kLanesPerBlock));
      word |= __shfl_xor_sync(0xffffffffu, word, kLanesPerBlock);
      word |= __shfl_xor_sync(0xffffffffu, word, 2 * kLanesPerBlock);
      const int index = (Maxima::first_of(lane) + i) * (kThreads / kLanesPerWord) +
                        static_cast<int>(threadIdx.x) / kLanesPerWord;
      if (lane % kLanesPerWord < kLanesPerBlock && index < words) {
        *reinterpret_cast<uint32_t*>(exponents + scale_words.at(static_cast<int>(row), index)) = word;
      }
    }
    const int quad = lane & ~(kLanesPerBlock - 1);
    store_encoded(
        data, x, part, row,
        [&](int k) {
          return __shfl_sync(0xffffffffu, multipliers[k % Maxima::kCount], quad + Maxima::lane_of(k));
        },
        reload);
  }

  // The block of the last rows zeroes the scales after the matrix.
  __device__ __forceinline__ void finish(Shared&, int64_t first, int rows) const {
    if (first + rows == layout.rows) zero_scale_words_past_rows(layout, exponents);
  }
};

}  // namespace

void launch_norm_quantize_mx(const NormArgs& args, const QuantizeArgs& output, void* stream) {
  if (args.rows == 0) return;
  if (!fits_registers(args, output)) return launch_norm_loop(args, nullptr, output, stream);
  visit_units(args.cols, [&](auto units) {
    constexpr int kUnits = decltype(units)::value;
    const quantize::Layout& layout = output.layout;
    const MxSink<kUnits> sink{output.data, output.exponents, layout, matrix_scale_words(layout),
                              static_cast<int>(layout.col_tiles())};
    launch_rows<kUnits>(args, sink, stream);
  });
}

}  // namespace transformer_plugin::norm

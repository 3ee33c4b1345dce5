#include "norm/norm_sinks.cuh"
#include "norm/scales.cuh"
#include "quantize/cuda/mxfp8/tile.cuh"

namespace transformer_plugin::norm {
namespace {

constexpr int kLanesPerBlock = quantize::kMxBlock / kUnit;  // 1x32
constexpr int kLanesPerWord = quantize::kTile / kUnit;      // four blocks
static_assert(kLanesPerBlock == 4 && kLanesPerWord == 16, "exponents meet over lanes 4 and 8 away");

// 1x32 blocks with E8M0 scales, four to a word.
template <int kUnits>
struct MxSink {
  struct Shared {};

  uint8_t* data;       // [rows, cols]
  uint8_t* exponents;  // [up128(rows), 4 * ceil(cols / 128)]
  quantize::Layout layout;
  quantize::WordLines lines;
  int words;  // of a row

  __device__ __forceinline__ void begin(Shared&) const {}

  template <typename Reload>
  __device__ __forceinline__ void write(Shared&, const Units<kUnits>& x, const Part<kUnits>& part,
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
        *reinterpret_cast<uint32_t*>(exponents + lines.at(static_cast<int>(row), index)) = word;
      }
    }
    const int quad = lane & ~(kLanesPerBlock - 1);
    write_codes(
        data, x, part, row,
        [&](int k) {
          return __shfl_sync(0xffffffffu, multipliers[k % Maxima::kCount], quad + Maxima::lane_of(k));
        },
        reload);
  }

  // Lines past the matrix, by the block of the last rows.
  __device__ __forceinline__ void finish(Shared&, int64_t first, int rows) const {
    if (first + rows == layout.rows) zero_lines_past(layout, exponents);
  }
};

}  // namespace

void launch_norm_quantize_mx(const NormArgs& args, const QuantizeArgs& output, void* stream) {
  if (args.rows == 0) return;
  if (!fits_registers(args, output)) return launch_norm_loop(args, nullptr, output, stream);
  visit_units(args.cols, [&](auto units) {
    constexpr int kUnits = decltype(units)::value;
    const quantize::Layout& layout = output.layout;
    const MxSink<kUnits> sink{output.data, output.exponents, layout, lines_of_matrix(layout),
                              static_cast<int>(layout.col_tiles())};
    launch_rows<kUnits>(args, sink, stream);
  });
}

}  // namespace transformer_plugin::norm

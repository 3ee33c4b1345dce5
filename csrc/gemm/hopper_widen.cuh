// The rows of a product of microscaled codes to bfloat16, in the order in which hopper_decoded.cuh multiplies them.
//
// A thread of four that have one line of the product's other operand holds every fourth pair of values that a product takes; so
// that these come from one chunk of 16 codes, the values of 64 codes lie as pieces of four pairs, piece j of the j-th pairs of
// the four chunks.
#pragma once

#include <cstddef>

#include "gemm/byte_scales.h"
#include "gemm/hopper_decode.cuh"
#include "gemm/hopper_tiles.cuh"

namespace transformer_plugin::gemm::hopper {

inline constexpr int kStepCodes = kStep<__nv_bfloat16>, kChunks = kStepCodes / kChunk;  // of a line in a step
static_assert(kChunks == 4, "the threads that have a line of the left operand");

template <typename Format>
inline constexpr int kStepBytes = kChunks * static_cast<int>(sizeof(typename Format::Codes));
template <typename Format>
inline constexpr int kLineSteps =
    kLine / kStepBytes<Format>;  // of the bytes of a line that are copied at once

// A row's 64 codes for each thread, to bfloat16 in the order above; past k, zeros. Values go through shared memory, so that a
// warp stores whole lines.
inline constexpr int kWidenThreads = 256;
template <typename Format>
__global__ void __launch_bounds__(kWidenThreads)
    widen_rows_kernel(const uint8_t* codes, const __grid_constant__ ByteScales scales, uint4* values,
                      const int32_t* end, int rows, int k) {
  using Codes = typename Format::Codes;
  constexpr int kStepScales = kStepCodes >> Format::kScaleShift, kWordSteps = 4 / kStepScales;
  constexpr int kPieces = kChunk / 2;
  __shared__ uint4 shared[kWidenThreads / kWarpSize][kWarpSize * kPieces];
  wait_for_the_kernel_before();
  let_the_next_kernel_start();
  const int steps = (k + kStepCodes - 1) / kStepCodes, lane = threadIdx.x % kWarpSize;
  uint4* own_shared = shared[threadIdx.x / kWarpSize];
  const int64_t count = static_cast<int64_t>(end ? *end : rows) * steps;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kWidenThreads + threadIdx.x - lane,
                i = first + lane;
  if (first >= count) return;
  Values decoded[kChunks] = {};
  if (i < count) {
    const int64_t row = i / steps;
    const int step = static_cast<int>(i - row * steps), left = (k - step * kStepCodes) / kChunk;  // chunks
    const uint8_t* own = codes + row * (k / kChunk * static_cast<int>(sizeof(Codes))) +
                         static_cast<int64_t>(step) * kStepBytes<Format>;
    const uint8_t* own_scales =
        scales.line(row) + step / kWordSteps * scales.word_stride() + step % kWordSteps * kStepScales;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk >= left) continue;
      const Codes piece = *reinterpret_cast<const Codes*>(own + chunk * sizeof(Codes));
      Format::decode(piece, own_scales[chunk * kChunk >> Format::kScaleShift], decoded[chunk]);
    }
  }
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    own_shared[lane * kPieces + (j ^ lane % kPieces)] = {decoded[0][j], decoded[1][j], decoded[2][j],
                                                         decoded[3][j]};
  }
  __syncwarp();
  const int64_t stored = (count - first) * kPieces;
#pragma unroll
  for (int turn = 0; turn < kPieces; ++turn) {
    const int at = turn * kWarpSize + lane, line = at / kPieces;
    if (at < stored)
      values[first * kPieces + at] = own_shared[line * kPieces + (at % kPieces ^ line % kPieces)];
  }
}

// Bytes of a line of scales.
template <typename Format>
int64_t scale_width(int64_t k) {
  constexpr int64_t kScaled = int64_t{1} << Format::kScaleShift;
  return ((k + kScaled - 1) / kScaled + 3) / 4 * 4;
}

// Format is that of the rows.
template <typename Format>
void launch_widen_rows(const GroupedKernelArgs& args, cudaStream_t stream) {
  const ByteScales scales{static_cast<const uint8_t*>(args.a_scale), scale_width<Format>(args.k),
                          args.a_tiled};
  launch_early(widen_rows_kernel<Format>,
               grid_size(args.rows * (widened_columns(args.k) / kStepCodes), kWidenThreads), kWidenThreads, 0,
               stream, static_cast<const uint8_t*>(args.a), scales, static_cast<uint4*>(args.a_values),
               args.offsets ? args.offsets + args.groups : nullptr, static_cast<int>(args.rows),
               static_cast<int>(args.k));
  check_launch("widen_rows_kernel");
}

}  // namespace transformer_plugin::gemm::hopper

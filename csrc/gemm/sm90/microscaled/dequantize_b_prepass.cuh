// The rows of a product of microscaled codes to bfloat16, in the order in which hopper_decoded.cuh multiplies them.
//
// A thread of four that have one line of the product's other operand holds every fourth pair of values that a product takes; so
// that these come from one chunk of 16 codes, the values of 64 codes lie as pieces of four pairs, piece j of the j-th pairs of
// the four chunks.
#pragma once

#include <cstddef>
#include <type_traits>

#include "gemm/sm90/microscaled/dequantize.cuh"
#include "gemm/sm90/microscaled/scale_layout.h"
#include "gemm/sm90/pipeline.cuh"

namespace transformer_plugin::gemm::sm90 {

inline constexpr int kStepCodes = kStep<__nv_bfloat16>, kChunks = kStepCodes / kChunk;  // of a line in a step
static_assert(kChunks == 4, "the threads that have a line of the left operand");

template <typename Format>
inline constexpr int kStepBytes = kChunks * static_cast<int>(sizeof(typename Format::Codes));
template <typename Format>
inline constexpr int kLineSteps =
    kLine / kStepBytes<Format>;  // of the bytes of a line that are copied at once

// The rows of a product: codes, and room for their values, [rows, dequantized_columns(k)].
struct CodeRows {
  const uint8_t* codes;
  ByteScales scales;
  uint4* values;
};

// A warp widens 8 steps of 4 rows at a time, in blocks of 64 rows: four lanes a step, 16 codes each, in the order above; past k
// zeros.
inline constexpr int kBlockRows = 64, kUnitRows = 4, kUnitSteps = kWarpSize / kChunks;

__device__ __forceinline__ uint32_t steps_of(int k) {
  return (static_cast<uint32_t>(k) + kStepCodes - 1) / kStepCodes;
}
// Of a line of blocks' units.
__device__ __forceinline__ uint32_t unit_columns(int k) {
  return (steps_of(k) + kUnitSteps - 1) / kUnitSteps;
}
__device__ __forceinline__ uint32_t units_of_block(int k) { return kBlockRows / kUnitRows * unit_columns(k); }

// Word i of lane q of four becomes word q of lane i.
__device__ __forceinline__ void turn_words(uint32_t* words) {
#pragma unroll
  for (int distance = 1; distance < kChunks; distance *= 2) {
    const bool second = threadIdx.x & distance;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int low = distance == 1 ? pair * 2 : pair, high = low + distance;
      const uint32_t other = __shfl_xor_sync(~0u, second ? words[low] : words[high], distance);
      if (second) {
        words[low] = other;
      } else {
        words[high] = other;
      }
    }
  }
}

template <typename Format>
__device__ __forceinline__ void widen_unit(const CodeRows& rows, uint32_t block, uint32_t unit, int end,
                                           int k) {
  using Codes = typename Format::Codes;
  constexpr int kStepScales = kStepCodes >> Format::kScaleShift, kWordSteps = 4 / kStepScales;
  const uint32_t columns = unit_columns(k), steps = steps_of(k), lane = threadIdx.x % kWarpSize;
  const uint32_t chunk = lane % kChunks, step = unit % columns * kUnitSteps + lane / kChunks;
  const int64_t first = block * kBlockRows + unit / columns * kUnitRows;
  const uint32_t of_row = static_cast<uint32_t>(k) / kChunk, own = step * kChunks + chunk;
  const uint32_t own_scale = step / kWordSteps * static_cast<uint32_t>(rows.scales.word_stride()) +
                             step % kWordSteps * kStepScales + (chunk * kChunk >> Format::kScaleShift);
  const int there = end - static_cast<int>(first);  // rows
  Codes codes[kUnitRows] = {};
  uint32_t scales[kUnitRows] = {};
  const Codes* from = reinterpret_cast<const Codes*>(rows.codes) + first * of_row + own;
  const uint8_t* scale = rows.scales.line(first) + own_scale;
#pragma unroll
  for (int i = 0; i < kUnitRows; ++i, from += of_row, scale += rows.scales.line_stride()) {
    if (i >= there || own >= of_row) continue;
    codes[i] = *from;
    scales[i] = *scale;
  }
  uint4* to = rows.values + (first * steps + step) * (2 * kChunks) + chunk;
#pragma unroll
  for (int i = 0; i < kUnitRows; ++i, to += steps * (2 * kChunks)) {
    Values values;
    Format::decode(codes[i], scales[i], values);
    turn_words(values);
    turn_words(values + kChunks);
    if (i >= there || step >= steps) continue;
    to[0] = {values[0], values[1], values[2], values[3]};
    to[kChunks] = {values[4], values[5], values[6], values[7]};
  }
}

inline constexpr int kWidenThreads = 256;
template <typename Format>
__global__ void __launch_bounds__(kWidenThreads)
    widen_rows_kernel(const __grid_constant__ CodeRows rows, const int32_t* end_of_rows, int count, int k) {
  constexpr uint32_t kWarps = kWidenThreads / kWarpSize;
  pdl_wait();
  pdl_launch_dependents();
  const uint32_t warp = threadIdx.x / kWarpSize, number = blockIdx.x * kWarps + warp;
  const uint32_t units = units_of_block(k);
  const int end = end_of_rows ? *end_of_rows : count;
  const uint32_t block = number / units;
  if (static_cast<int64_t>(block) * kBlockRows >= end) return;
  widen_unit<Format>(rows, block, number % units, end, k);
}

// ---- Beside the products, by warps that have nothing else to do. They take tasks in the order of rows, so that whoever waits
// for a row waits for warps that run; how many of a block's tasks are done is counted in memory.

inline constexpr uint32_t kTaskUnits = 4;

struct RowsBeside {
  CodeRows rows;
  // Tasks taken, and from kReadyBlocks on those done of each block of rows; null where all is widened before.
  uint32_t* ready;
  bool is_e5m2;  // MXFP8

  static constexpr int kReadyBlocks = 32;  // in another line of memory
  static __device__ __forceinline__ uint32_t tasks_of_block(int k) {
    return (units_of_block(k) + kTaskUnits - 1) / kTaskUnits;
  }

  // By a whole warp, until no task is left. Format is the weights': that of rows in NVFP4, and in MXFP8 but for the element.
  template <typename Format>
  __device__ __forceinline__ void widen(int end, int k) const {
    const uint32_t units = units_of_block(k), of_block = tasks_of_block(k);
    while (true) {
      const uint32_t task = take(), block = task / of_block, first = task % of_block * kTaskUnits;
      if (block * kBlockRows >= static_cast<uint32_t>(end)) return;
      const uint32_t last = min(first + kTaskUnits, units);
#pragma unroll 1
      for (uint32_t unit = first; unit < last; ++unit) {
        if constexpr (std::is_same_v<Format, NvCodes>) {
          widen_unit<NvCodes>(rows, block, unit, end, k);
        } else if (is_e5m2) {
          widen_unit<MxCodes<DType::kFloat8E5M2>>(rows, block, unit, end, k);
        } else {
          widen_unit<MxCodes<DType::kFloat8E4M3>>(rows, block, unit, end, k);
        }
      }
      fence_for_copies_of_memory();
      __syncwarp();
      if (threadIdx.x % kWarpSize == 0) add_released(ready + kReadyBlocks + block, 1);
    }
  }

  // By a whole warp, until these rows may be copied.
  __device__ __forceinline__ void wait(int row, int end_row, int k) const {
    const uint32_t of_block = tasks_of_block(k), lane = threadIdx.x % kWarpSize;
    const uint32_t block = static_cast<uint32_t>(row) / kBlockRows + lane;
    const bool is_own = block <= static_cast<uint32_t>(end_row - 1) / kBlockRows;
    while (!__all_sync(~0u, !is_own || load_acquired(ready + kReadyBlocks + block) >= of_block)) {
      __nanosleep(100);
    }
    fence_for_copies_of_memory();
    __syncwarp();
  }

 private:
  __device__ __forceinline__ uint32_t take() const {
    uint32_t task = 0;
    if (threadIdx.x % kWarpSize == 0) task = atomicAdd(ready, 1u);
    return __shfl_sync(~0u, task, 0);
  }
};
static_assert(kTileColumns / kBlockRows + 1 <= kWarpSize, "a lane for each block of a tile's rows");
static_assert(ready_counters(kBlockRows) == RowsBeside::kReadyBlocks + 1 &&
                  ready_counters(kBlockRows + 1) == RowsBeside::kReadyBlocks + 2,
              "room for all words");

static __global__ void __launch_bounds__(kWidenThreads) clear_ready_kernel(uint32_t* ready, int64_t words) {
  pdl_wait();
  pdl_launch_dependents();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kWidenThreads + threadIdx.x;
  if (i < words) ready[i] = 0;
}

// Bytes of a line of scales.
template <typename Format>
int64_t scale_width(int64_t k) {
  constexpr int64_t kScaled = int64_t{1} << Format::kScaleShift;
  return ((k + kScaled - 1) / kScaled + 3) / 4 * 4;
}

// Format is that of the rows.
template <typename Format>
CodeRows code_rows(const GroupedGemmArgs& args) {
  const ByteScales scales{static_cast<const uint8_t*>(args.a_scale), scale_width<Format>(args.k),
                          args.a_tiled};
  return {static_cast<const uint8_t*>(args.a), scales, static_cast<uint4*>(args.a_dequantized)};
}

template <typename Format>
void launch_widen_rows(const GroupedGemmArgs& args, cudaStream_t stream) {
  const int64_t steps = dequantized_columns(args.k) / kStepCodes,
                blocks = (args.rows + kBlockRows - 1) / kBlockRows;
  const int64_t units = blocks * (kBlockRows / kUnitRows) * ((steps + kUnitSteps - 1) / kUnitSteps);
  launch_pdl(widen_rows_kernel<Format>, grid_size(units, kWidenThreads / kWarpSize), kWidenThreads, 0, stream,
             code_rows<Format>(args), args.offsets ? args.offsets + args.groups : nullptr,
             static_cast<int>(args.rows), static_cast<int>(args.k));
  check_launch("widen_rows_kernel");
}

inline void launch_clear_ready(const GroupedGemmArgs& args, cudaStream_t stream) {
  const int64_t words = ready_counters(args.rows);
  launch_pdl(clear_ready_kernel, grid_size(words, kWidenThreads), kWidenThreads, 0, stream,
             static_cast<uint32_t*>(args.a_ready_rows), words);
  check_launch("clear_ready_kernel");
}

}  // namespace transformer_plugin::gemm::sm90

// The B operand of grouped_gemm_mx_nv.cuh, the ragged rows (activations): dequantized once to BF16 in global
// memory.
//
//   dequantized[i, j] = data[i, j] * scale[i, j / 32 or j / 16]   for the rows i of all groups
//
// as [rows, dequantized_columns(k)], with zeros past k.
//
// There are two ways. dequantize_rows_kernel does it before the GEMM: one warp for each unit of 4 rows x 8
// steps of 64 elements, 256 threads a block, no shared memory. OverlappedDequantize does it within the GEMM
// kernel, by warps that are otherwise idle. overlaps_dequantize (config.cpp) chooses.
//
// Order of K: the A operand of WGMMA is in registers, and a thread passes the 16 consecutive elements of its
// chunk where WGMMA expects every fourth pair. So the elements of each step of 64 are permuted to match: word
// j of the four chunks (2 elements each) form 16 bytes, for j = 0 .. 7. Four lanes exchange words to write
// that order.
#pragma once

#include <cstddef>
#include <type_traits>

#include "common/ptx/memory.cuh"
#include "gemm/sm90/microscaled/dequantize.cuh"
#include "gemm/sm90/microscaled/scale_layout.h"
#include "gemm/sm90/pipeline.cuh"

namespace transformer_plugin::gemm::sm90 {

// Elements and chunks of a row in one step of K.
inline constexpr int kStepElements = kTileK<__nv_bfloat16>, kChunks = kStepElements / kChunk;
static_assert(kChunks == 4, "the four lanes that have a row of A in WGMMA");

template <typename Format>
inline constexpr int kStepBytes = kChunks * static_cast<int>(sizeof(typename Format::Packed));
// Steps whose quantized elements are in one TMA box of A.
template <typename Format>
inline constexpr int kStepsPerBox = kSwizzleBytes / kStepBytes<Format>;

struct QuantizedRows {
  const uint8_t* data;
  ByteScales scales;
  uint4* dequantized;  // output
};

// Rows are divided into blocks of 64, blocks into units. A warp dequantizes one unit: four lanes a step, a
// chunk each, 4 rows.
inline constexpr int kBlockRows = 64, kUnitRows = 4, kUnitSteps = kWarpSize / kChunks;

__device__ __forceinline__ uint32_t k_steps(int k) {
  return (static_cast<uint32_t>(k) + kStepElements - 1) / kStepElements;
}
// Units that cover all steps of the same 4 rows.
__device__ __forceinline__ uint32_t units_per_row(int k) {
  return (k_steps(k) + kUnitSteps - 1) / kUnitSteps;
}
__device__ __forceinline__ uint32_t units_per_block(int k) {
  return kBlockRows / kUnitRows * units_per_row(k);
}

// Transposes words among four lanes: word i of lane q becomes word q of lane i.
__device__ __forceinline__ void transpose_4x4_words(uint32_t* words) {
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

// Dequantizes unit `unit` of a block of rows, by one warp. `end`: the rows of all groups.
template <typename Format>
__device__ __forceinline__ void dequantize_unit(const QuantizedRows& rows, uint32_t block, uint32_t unit,
                                                int end, int k) {
  using Packed = typename Format::Packed;
  constexpr int kStepScales = kStepElements >> Format::kScaleShift, kWordSteps = 4 / kStepScales;
  const uint32_t columns = units_per_row(k), steps = k_steps(k), lane = threadIdx.x % kWarpSize;
  const uint32_t chunk = lane % kChunks, step = unit % columns * kUnitSteps + lane / kChunks;
  const int64_t first_row = block * kBlockRows + unit / columns * kUnitRows;
  const uint32_t row_chunks = static_cast<uint32_t>(k) / kChunk, row_chunk = step * kChunks + chunk;
  const uint32_t scale_offset = step / kWordSteps * static_cast<uint32_t>(rows.scales.word_stride()) +
                                step % kWordSteps * kStepScales + (chunk * kChunk >> Format::kScaleShift);
  const int rows_left = end - static_cast<int>(first_row);
  Packed packed[kUnitRows] = {};
  uint32_t scales[kUnitRows] = {};
  const Packed* from = reinterpret_cast<const Packed*>(rows.data) + first_row * row_chunks + row_chunk;
  const uint8_t* scale = rows.scales.row(first_row) + scale_offset;
#pragma unroll
  for (int i = 0; i < kUnitRows; ++i, from += row_chunks, scale += rows.scales.row_stride()) {
    if (i >= rows_left || row_chunk >= row_chunks) continue;
    packed[i] = *from;
    scales[i] = *scale;
  }
  uint4* to = rows.dequantized + (first_row * steps + step) * (2 * kChunks) + chunk;
#pragma unroll
  for (int i = 0; i < kUnitRows; ++i, to += steps * (2 * kChunks)) {
    DequantizedChunk values;
    Format::dequantize(packed[i], scales[i], values);
    transpose_4x4_words(values);
    transpose_4x4_words(values + kChunks);
    if (i >= rows_left || step >= steps) continue;
    to[0] = {values[0], values[1], values[2], values[3]};
    to[kChunks] = {values[4], values[5], values[6], values[7]};
  }
}

inline constexpr int kDequantizeThreads = 256;
// `end_of_rows`: the end of the last group, on the device, or null for `count` rows.
template <typename Format>
__global__ void __launch_bounds__(kDequantizeThreads)
    dequantize_rows_kernel(const __grid_constant__ QuantizedRows rows, const int32_t* end_of_rows, int count,
                           int k) {
  constexpr uint32_t kWarps = kDequantizeThreads / kWarpSize;
  pdl_wait();
  pdl_launch_dependents();
  const uint32_t warp = threadIdx.x / kWarpSize, warp_index = blockIdx.x * kWarps + warp;
  const uint32_t units = units_per_block(k);
  const int end = end_of_rows ? *end_of_rows : count;
  const uint32_t block = warp_index / units;
  if (static_cast<int64_t>(block) * kBlockRows >= end) return;
  dequantize_unit<Format>(rows, block, warp_index % units, end, k);
}

// ---- Overlapped with the GEMM

inline constexpr uint32_t kTaskUnits = 4;

// Warps of all CTAs take tasks (4 units) from a counter in the order of rows, so a CTA that waits for rows
// waits only for warps that are running. Completed tasks are counted for each block of rows.
struct OverlappedDequantize {
  QuantizedRows rows;
  // ready[0]: tasks taken. ready[kReadyBlocks + b]: tasks of block b that are complete. Null if the rows were
  // dequantized before.
  uint32_t* ready;
  bool is_e5m2;  // MXFP8: the elements of the rows

  static constexpr int kReadyBlocks = 32;  // in another 128-byte line
  static __device__ __forceinline__ uint32_t tasks_per_block(int k) {
    return (units_per_block(k) + kTaskUnits - 1) / kTaskUnits;
  }

  // Dequantizes until no task is left, by a whole warp. Format is that of the weights; the rows have the same
  // one, except that MXFP8 rows may have the other element type.
  template <typename Format>
  __device__ __forceinline__ void run(int end, int k) const {
    const uint32_t units = units_per_block(k), block_tasks = tasks_per_block(k);
    while (true) {
      const uint32_t task = take(), block = task / block_tasks, first = task % block_tasks * kTaskUnits;
      if (block * kBlockRows >= static_cast<uint32_t>(end)) return;
      const uint32_t last = min(first + kTaskUnits, units);
#pragma unroll 1
      for (uint32_t unit = first; unit < last; ++unit) {
        if constexpr (std::is_same_v<Format, NvFormat>) {
          dequantize_unit<NvFormat>(rows, block, unit, end, k);
        } else if (is_e5m2) {
          dequantize_unit<MxFormat<DType::kFloat8E5M2>>(rows, block, unit, end, k);
        } else {
          dequantize_unit<MxFormat<DType::kFloat8E4M3>>(rows, block, unit, end, k);
        }
      }
      fence_proxy_async_global();  // TMA reads what the threads wrote
      __syncwarp();
      if (threadIdx.x % kWarpSize == 0) red_release_gpu_add(ready + kReadyBlocks + block, 1);
    }
  }

  // Waits until rows `row` .. `end_row` - 1 can be loaded by TMA, by a whole warp.
  __device__ __forceinline__ void wait_rows(int row, int end_row, int k) const {
    const uint32_t block_tasks = tasks_per_block(k), lane = threadIdx.x % kWarpSize;
    const uint32_t block = static_cast<uint32_t>(row) / kBlockRows + lane;  // a lane for each block
    const bool needed = block <= static_cast<uint32_t>(end_row - 1) / kBlockRows;
    while (!__all_sync(~0u, !needed || ld_acquire_gpu(ready + kReadyBlocks + block) >= block_tasks)) {
      __nanosleep(100);
    }
    fence_proxy_async_global();
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
static_assert(ready_counters(kBlockRows) == OverlappedDequantize::kReadyBlocks + 1 &&
                  ready_counters(kBlockRows + 1) == OverlappedDequantize::kReadyBlocks + 2,
              "ready_counters() counts all words of `ready`");

// Zeroes the counters before the GEMM.
static __global__ void __launch_bounds__(kDequantizeThreads)
    clear_ready_kernel(uint32_t* ready, int64_t words) {
  pdl_wait();
  pdl_launch_dependents();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kDequantizeThreads + threadIdx.x;
  if (i < words) ready[i] = 0;
}

// Scales of a row, padded to words of four.
template <typename Format>
int64_t scale_width(int64_t k) {
  constexpr int64_t kScaled = int64_t{1} << Format::kScaleShift;
  return ((k + kScaled - 1) / kScaled + 3) / 4 * 4;
}

// Format is that of the rows.
template <typename Format>
QuantizedRows make_quantized_rows(const GroupedGemmArgs& args) {
  const ByteScales scales{static_cast<const uint8_t*>(args.a_scale), scale_width<Format>(args.k),
                          args.a_tiled};
  return {static_cast<const uint8_t*>(args.a), scales, static_cast<uint4*>(args.a_dequantized)};
}

template <typename Format>
void launch_dequantize_rows(const GroupedGemmArgs& args, cudaStream_t stream) {
  const int64_t steps = dequantized_columns(args.k) / kStepElements,
                blocks = (args.rows + kBlockRows - 1) / kBlockRows;
  const int64_t units = blocks * (kBlockRows / kUnitRows) * ((steps + kUnitSteps - 1) / kUnitSteps);
  launch_pdl(dequantize_rows_kernel<Format>, grid_size(units, kDequantizeThreads / kWarpSize),
             kDequantizeThreads, 0, stream, make_quantized_rows<Format>(args),
             args.offsets ? args.offsets + args.groups : nullptr, static_cast<int>(args.rows),
             static_cast<int>(args.k));
  check_launch("dequantize_rows_kernel");
}

inline void launch_clear_ready(const GroupedGemmArgs& args, cudaStream_t stream) {
  const int64_t words = ready_counters(args.rows);
  launch_pdl(clear_ready_kernel, grid_size(words, kDequantizeThreads), kDequantizeThreads, 0, stream,
             static_cast<uint32_t*>(args.a_ready_rows), words);
  check_launch("clear_ready_kernel");
}

}  // namespace transformer_plugin::gemm::sm90

// Weight gradients on Hopper: out[g] = grad_g^T @ input_g * alpha[g], or added to what is there. What the products sum over
// are the rows of a group, so both operands lie by columns.
#pragma once

#include "common/shared_memory.cuh"
#include "gemm/hopper_map.h"
#include "gemm/hopper_tiles.cuh"

namespace transformer_plugin::gemm::hopper {

struct WeightGradArgs {
  const int32_t* offsets;
  const float* alpha;
  float* sum;  // what threads add to, else null
  int64_t group_stride, row_stride;
  int groups, m, n;
  bool accumulate;
};

inline constexpr int kRowsAtOnce = kBoxLines;  // rows of the operands in a stage

// Zeroes the rows of a stage that are past the group's end, by all that multiply.
__device__ __forceinline__ void zero_rows(Stage& stage, int left) {
  const int pieces = (kRowsAtOnce - left) * (kLine / 16);  // of a box
  constexpr int kBoxes = kLeftBoxes + kRightBoxes;
  for (int i = static_cast<int>(threadIdx.x) - kWarpgroup; i < pieces * kBoxes;
       i += kMultipliers * kWarpgroup) {
    const int box = i / pieces;
    uint8_t* to = box < kLeftBoxes ? stage.left[box] : stage.right[box - kLeftBoxes];
    *reinterpret_cast<uint4*>(to + left * kLine + i % pieces * 16) = uint4{};
  }
  fence_for_copies();
  sync_threads(1 + kMultipliers, kMultipliers * kWarpgroup);
}

// Adds a warpgroup's sums to those in memory, `rows` by `columns` of its 64 by 256 at `to`. What is there for the first boxes
// is sent for while the products run.
class Adder {
 public:
  __device__ __forceinline__ Adder(float* to, int64_t row_stride, int rows, int columns)
      : to_(to + threadIdx.x % kWarpgroup / kPieces * row_stride + threadIdx.x % kPieces * 4),
        step_(kRowsApart * row_stride),
        rows_(rows - static_cast<int>(threadIdx.x % kWarpgroup / kPieces)),
        columns_(columns - static_cast<int>(threadIdx.x % kPieces * 4)) {}

  __device__ __forceinline__ void send() {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) fetch(i);
  }
  __device__ __forceinline__ void add(const float (&sums)[kSums], uint8_t (&boxes)[2][kBoxBytes],
                                      int number) {
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      uint8_t* box = boxes[i % 2];
      write_box<float>(sums, i, box);
      sync_threads(1 + number, kWarpgroup);
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const int row = threadIdx.x % kWarpgroup / kPieces + j * kRowsApart;
        const float4 sum = *reinterpret_cast<const float4*>(swizzled(box, row, threadIdx.x % kPieces));
        const float4 old = old_[i % kAhead][j];
        if (has(i, j)) {
          __stcs(at(i, j), make_float4(old.x + sum.x, old.y + sum.y, old.z + sum.z, old.w + sum.w));
        }
      }
      if (i + kAhead < kBoxes) fetch(i + kAhead);
    }
    sync_threads(1 + number, kWarpgroup);  // boxes have been read
  }

 private:
  static constexpr int kColumns = kLine / static_cast<int>(sizeof(float)), kBoxes = kTileColumns / kColumns;
  static constexpr int kPieces = kLine / 16;  // of a row of a box
  static constexpr int kRowsApart = kWarpgroup / kPieces, kRows = kBoxLines / kRowsApart;  // of a thread
  static constexpr int kAhead = 4;

  __device__ __forceinline__ bool has(int i, int j) const {
    return j * kRowsApart < rows_ && i * kColumns < columns_;
  }
  __device__ __forceinline__ float4* at(int i, int j) const {
    return reinterpret_cast<float4*>(to_ + j * step_ + i * kColumns);
  }
  __device__ __forceinline__ void fetch(int i) {
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (has(i, j)) old_[i % kAhead][j] = __ldcs(at(i, j));
    }
  }

  float* to_;
  int64_t step_;
  int rows_, columns_;
  float4 old_[kAhead][kRows];
};

template <typename T, typename Out>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    hopper_weight_grad_kernel(const __grid_constant__ CUtensorMap grad_map,
                              const __grid_constant__ CUtensorMap input_map,
                              const __grid_constant__ CUtensorMap out_map,
                              const __grid_constant__ WeightGradArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  const int block = static_cast<int>(block_in_cluster());
  if (threadIdx.x == 0) {
    prefetch(grad_map);
    prefetch(input_map);
    prefetch(out_map);
  }
  init_stages(shared);
  wait_for_the_kernel_before();
  const int clusters = static_cast<int>(gridDim.x) / kCluster;
  const int first = static_cast<int>(blockIdx.x) / kCluster;
  const Pairs pairs{(args.m + kTileRows - 1) / kTileRows, (args.n + kTileColumns - 1) / kTileColumns};
  const int of_group = pairs.count(), count = args.groups * of_group;
  const auto find = [&](int index) {
    Tile tile = tile_of(pairs, index % of_group, block);
    tile.group = index / of_group;
    return tile;
  };
  Place place;
  if (warpgroup == 0) {
    fewer_registers<kCopierRegisters>();
    if (threadIdx.x == 0) {
      for (int index = first; index < count; index += clusters) {
        const Tile tile = find(index);
        const int end = args.offsets[tile.group + 1];
        for (int row = args.offsets[tile.group]; row < end; row += kRowsAtOnce) {
          fill_stage(
              shared, place, block, tile.same_columns,
              [&](void* to, int box, uint64_t* barrier, bool for_both) {
                load(for_both, to, grad_map, barrier, tile.row * kTileRows + box * kBoxLines, row, 0);
              },
              [&](void* to, int box, uint64_t* barrier, bool for_both) {
                load(for_both, to, input_map, barrier, tile.column * kTileColumns + box * kBoxLines, row, 0);
              });
        }
      }
    }
    __syncwarp();
  } else {
    more_registers<kMultiplierRegisters>();
    const int number = warpgroup - 1;
    for (int index = first; index < count; index += clusters) {
      const Tile tile = find(index);
      const int begin = args.offsets[tile.group], end = args.offsets[tile.group + 1];
      if (begin >= end && args.accumulate) continue;
      const int line = tile.row * kTileRows + number * kBoxLines, column = tile.column * kTileColumns;
      const bool adds = sizeof(Out) == 4 && args.sum;
      Adder adder(args.sum + tile.group * args.group_stride + line * args.row_stride + column,
                  args.row_stride, args.m - line, args.n - column);
      if (adds) adder.send();
      float sums[kSums] = {};
      int read = -1;  // the stage of the step before
      for (int row = begin; row < end; row += kRowsAtOnce, place.next()) {
        wait(&shared.full[place.stage], place.parity);
        Stage& stage = shared.stages[place.stage];
        if (end - row < kRowsAtOnce) zero_rows(stage, end - row);
        const uint64_t a = by_columns(stage.left[number], kBoxBytes), b = by_columns(stage.right, kBoxBytes);
        begin_products();
#pragma unroll
        for (int i = 0; i < kRowsAtOnce / 16; ++i) {  // descriptors count 16 bytes
          multiply<T, true, true>(sums, a + i * kLine, b + i * kLine);
        }
        commit_products();
        wait_for_products<1>();
        if (read >= 0) release(shared, read);
        read = place.stage;
      }
      wait_for_products<0>();
      if (read >= 0) release(shared, read);
      if (args.alpha) {
        const float alpha = args.alpha[tile.group];
#pragma unroll
        for (float& sum : sums) sum = sum * alpha;
      }
      if (adds) {
        adder.add(sums, shared.out[number], number);
        continue;
      }
      store_sums<Out>(sums, shared.out[number], number, [&](uint8_t* box, int offset) {
        if (threadIdx.x % kWarpgroup != 0 || line >= args.m || column + offset >= args.n) return;
        args.accumulate ? add_box(out_map, box, column + offset, line, tile.group)
                        : store_box(out_map, box, column + offset, line, tile.group);
      });
    }
    if (threadIdx.x % kWarpgroup == 0) wait_until_stored<0>();
  }
  sync_cluster();  // neither block leaves while the other may arrive at its
                   // barriers
#endif
}

// Sums in memory are added to by the copy engine, in the second level cache, which takes 1.2 TB/s and lets the next tile begin;
// or by threads, which takes what memory gives and their time. With few rows for a group there is less to hide the first behind.
inline bool threads_add(const GroupedKernelArgs& args) {
  constexpr int64_t kFewRows = 768;  // of a group, on average
  return args.rows < kFewRows * args.groups;
}

template <typename T, typename Out>
void launch_weight_grad(const GroupedKernelArgs& args, cudaStream_t stream) {
  constexpr auto kernel = hopper_weight_grad_kernel<T, Out>;
  static DynamicSharedMemory shared_memory;
  shared_memory.allow(kernel, sizeof(Shared));
  const CUtensorMap grad =
      tensor_map({args.a, args.dtype, args.m, args.rows, 1, args.m, args.rows * args.m}, kRowsAtOnce);
  const CUtensorMap input =
      tensor_map({args.b, args.dtype, args.n, args.rows, 1, args.n, args.rows * args.n}, kRowsAtOnce);
  const CUtensorMap out = tensor_map(
      {args.out, args.out_dtype, args.n, args.m, args.groups, args.out_row_stride, args.out_group_stride},
      kBoxLines);
  const WeightGradArgs own{args.offsets,
                           args.alpha,
                           args.accumulate && threads_add(args) ? static_cast<float*>(args.out) : nullptr,
                           args.out_group_stride,
                           args.out_row_stride,
                           static_cast<int>(args.groups),
                           static_cast<int>(args.m),
                           static_cast<int>(args.n),
                           args.accumulate};
  launch_early(kernel, cluster_grid(), kThreads, sizeof(Shared), stream, grad, input, out, own);
  check_launch("hopper_weight_grad_kernel");
}

}  // namespace transformer_plugin::gemm::hopper

// Weight gradients on Hopper: out[g] = grad_g^T @ input_g * alpha[g], or added to what is there, or to beta[g] times that. What
// the products sum over are the rows of a group, so both operands lie by columns.
#pragma once

#include "common/shared_memory.cuh"
#include "gemm/hopper_held.cuh"
#include "gemm/hopper_weight_grad_operands.cuh"

namespace transformer_plugin::gemm::hopper {

// Adds a warpgroup's sums to those in memory, 32 columns at a time: those that have a bit in args.thread_boxes by threads, the
// others by the copy engine. What threads add to is sent for before.
class Adder {
 public:
  __device__ __forceinline__ explicit Adder(const Held<float>& to) : to_(to) {}

  // add_box(box, column): of the copy engine, by one thread.
  template <int kOutBoxes, typename AddBox>
  __device__ __forceinline__ void add(const float (&sums)[kSums], uint8_t (&boxes)[kOutBoxes][kBoxBytes],
                                      int number, uint32_t thread_boxes, AddBox add_box) {
    const bool first = threadIdx.x % kWarpgroup == 0;
    int copied = 0;
    fetch(__ffs(thread_boxes) - 1);
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      if (thread_boxes >> i & 1) {
        add_own(sums, i);
        fetch(__ffs(thread_boxes & ~((2u << i) - 1)) - 1);
        continue;
      }
      uint8_t* box = boxes[copied++ % kOutBoxes];
      if (first) wait_until_stored<kOutBoxes - 1>();
      sync_threads(1 + number, kWarpgroup);
      write_box<float>(sums, i, box);
      fence_for_copies();
      sync_threads(1 + number, kWarpgroup);
      if (first && i * kColumns < to_.columns && to_.rows > 0) add_box(box, i * kColumns);
      if (first) commit_stores();
    }
  }

 private:
  static constexpr int kColumns = kLine / static_cast<int>(sizeof(float)), kBoxes = kTileColumns / kColumns;

  // A thread's sums of a box are pairs: of two rows, in four places 8 columns apart.
  template <typename Use>
  __device__ __forceinline__ void each_pair(int box, Use use) const {
    const int lane = threadIdx.x % kWarpSize;
    const int row = threadIdx.x % kWarpgroup / kWarpSize * 16 + lane / 4,
              column = box * kColumns + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* line = to_.at + (row + half * 8) * to_.row_stride + column;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool has = row + half * 8 < to_.rows && column + j * 8 < to_.columns;
        use(j * 2 + half, reinterpret_cast<float2*>(line + j * 8), has);
      }
    }
  }
  __device__ __forceinline__ void fetch(int box) {  // or none, of -1
    each_pair(box,
              [&](int pair, float2* at, bool has) { old_[pair] = box >= 0 && has ? __ldcs(at) : float2{}; });
  }
  __device__ __forceinline__ void add_own(const float (&sums)[kSums], int box) const {
    each_pair(box, [&](int pair, float2* at, bool has) {
      const float* own = &sums[box * 16 + pair * 2];
      if (has)
        __stcs(at, make_float2(add_as_copies(old_[pair].x, own[0]), add_as_copies(old_[pair].y, own[1])));
    });
  }

  Held<float> to_;
  float2 old_[8];
};

// Kind is one of hopper_weight_grad_operands.cuh.
template <typename Kind, typename Out>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    hopper_weight_grad_kernel(const __grid_constant__ WeightGradMaps maps,
                              const __grid_constant__ WeightGradArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shared = typename Kind::Shared;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  const int block = static_cast<int>(block_in_cluster());
  if (threadIdx.x == 0) {
    prefetch(maps.grad);
    prefetch(maps.input);
    prefetch(maps.out);
  }
  init_stages(shared);
  wait_for_the_kernel_before();
  const int clusters = static_cast<int>(gridDim.x) / kCluster;
  const Pairs pairs{(args.m + kTileRows - 1) / kTileRows, (args.n + kTileColumns - 1) / kTileColumns};
  const int of_group = pairs.count(), count = args.groups * of_group;
  const auto find = [&](int index) {
    Tile tile = tile_of(pairs, index % of_group, block);
    tile.group = index / of_group;
    return tile;
  };
  const auto rows_of = [&](int group) {
    return args.offsets ? Rows{args.offsets[group], args.offsets[group + 1], 0} : Rows{0, args.rows, 0};
  };
  Place<Shared> place;
  if (warpgroup == 0) {
    fewer_registers<kCopierRegisters>();
    if (threadIdx.x == 0) {
      RowTiles<Kind::kRows> row_tiles;
      for (int index = cluster_in_grid(); index < count; index += clusters) {
        const Tile tile = find(index);
        Rows rows = rows_of(tile.group);
        rows.first_tile = row_tiles.before(args.offsets, tile.group);
        for (int row = rows.begin; row < rows.end; row += Kind::kRows, place.next()) {
          Kind::fill(maps, args, shared, place, block, tile, rows, row);
        }
      }
    }
    __syncwarp();
  } else {
    more_registers<kMultiplierRegisters>();
    const int number = warpgroup - 1;
    for (int index = cluster_in_grid(); index < count; index += clusters) {
      const Tile tile = find(index);
      const Rows rows = rows_of(tile.group);
      if (rows.begin >= rows.end && args.accumulate) continue;
      const int line = tile.row * kTileRows + number * kBoxLines, column = tile.column * kTileColumns;
      const auto held = [&] {
        Out* out = args.outs ? static_cast<Out*>(args.outs[tile.group])
                             : static_cast<Out*>(args.out) + tile.group * args.group_stride;
        return Held<Out>{out + line * args.row_stride + column, args.row_stride, args.m - line,
                         args.n - column};
      };
      const CUtensorMap& out_map = args.out_maps ? args.out_maps[tile.group] : maps.out;
      const int matrix = args.out_maps ? 0 : tile.group;
      if (args.out_maps && threadIdx.x % kWarpgroup == 0) acquire(&out_map);
      if (args.accumulate) held().send(args.thread_boxes);
      if (beta_of(args, tile.group) != 0.0f) held().send(~0u);
      float sums[kSums] = {};
      Kind::sum(shared, place, rows, number, sums);
      if (Kind::group_scales || args.alpha) {
        const float factor = factor_of<Kind::group_scales>(args, tile.group);
#pragma unroll
        for (float& sum : sums) sum = sum * factor;
      }
      if constexpr (sizeof(Out) == 4) {
        if (args.accumulate) {
          Adder(held()).add(
              sums, shared.out[number], number, args.thread_boxes,
              [&](uint8_t* box, int offset) { add_box(out_map, box, column + offset, line, matrix); });
          continue;
        }
      }
      if (const float beta = beta_of(args, tile.group); beta != 0.0f) held().add(sums, beta);
      store_sums<Out>(sums, shared.out[number], number, [&](uint8_t* box, int offset) {
        if (threadIdx.x % kWarpgroup != 0 || line >= args.m || column + offset >= args.n) return;
        store_box(out_map, box, column + offset, line, matrix);
      });
    }
    if (threadIdx.x % kWarpgroup == 0) wait_until_stored<0>();
  }
  sync_cluster();  // neither block leaves while the other may arrive at its
                   // barriers
#endif
}

template <typename Kind, typename Out>
void launch_weight_grad(const GroupedKernelArgs& args, const HopperPlan& plan, cudaStream_t stream) {
  constexpr auto kernel = hopper_weight_grad_kernel<Kind, Out>;
  constexpr int kShared = sizeof(typename Kind::Shared);
  static DynamicSharedMemory shared_memory;
  shared_memory.allow(kernel, kShared);
  WeightGradMaps maps{};
  Kind::encode(maps, args);
  const bool listed = args.list.addresses != nullptr;
  maps.out = tensor_map({args.out, args.out_dtype, args.n, args.m, listed ? 1 : args.groups,
                         args.out_row_stride, args.out_group_stride},
                        kBoxLines);
  const CUtensorMap* out_maps = launch_matrix_list(args.list, args.groups, &maps.out, stream);
  const WeightGradArgs own{args.offsets,
                           args.alpha,
                           args.beta,
                           args.out,
                           static_cast<const float*>(args.a_scale),
                           static_cast<const float*>(args.b_scale),
                           args.out_group_stride,
                           args.out_row_stride,
                           static_cast<int>((args.m + 3) / 4 * 4),
                           static_cast<int>((args.n + 3) / 4 * 4),
                           static_cast<int>(args.groups),
                           static_cast<int>(args.rows),
                           static_cast<int>(args.m),
                           static_cast<int>(args.n),
                           plan.thread_boxes,
                           args.accumulate,
                           args.all_moved,
                           out_maps,
                           listed ? static_cast<void* const*>(args.list.room) : nullptr};
  launch_early(kernel, grid_of(plan), kThreads, kShared, stream, maps, own);
  check_launch("hopper_weight_grad_kernel");
}

}  // namespace transformer_plugin::gemm::hopper

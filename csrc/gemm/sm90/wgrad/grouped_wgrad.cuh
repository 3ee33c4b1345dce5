// Weight gradients on Hopper: out[g] = grad_g^T @ input_g * alpha[g], or added to what is there, or to beta[g] times that. What
// the products sum over are the rows of a group, so both operands lie by columns.
#pragma once

#include "common/shared_memory.cuh"
#include "gemm/sm90/epilogue/beta_source.cuh"
#include "gemm/sm90/wgrad/mainloop.cuh"

namespace transformer_plugin::gemm::sm90 {

// Adds a warpgroup's sums to those in memory, 32 columns at a time: those that have a bit in `thread_boxes` (as sm90_config.h
// names them) by threads, the others, and all where not all rows and columns are there, by the copy engine. What threads add
// to is sent for before.
class Adder {
 public:
  __device__ __forceinline__ Adder(const Held<float>& to, uint32_t thread_boxes)
      : to_(to), thread_boxes_(to.rows >= kBoxLines && to.columns >= kTileColumns ? thread_boxes : 0) {}

  // add_box(box, column): of the copy engine, by one thread.
  template <int kOutBoxes, typename AddBox>
  __device__ __forceinline__ void add(const float (&sums)[kSums], uint8_t (&boxes)[kOutBoxes][kBoxBytes],
                                      int number, AddBox add_box) const {
    switch (thread_boxes_) {  // each of its own code, in which no register waits for what may be
      case kMostBoxes: return add_by<kMostBoxes>(sums, boxes, number, add_box);
      case kHalfOfBoxes: return add_by<kHalfOfBoxes>(sums, boxes, number, add_box);
      default: return add_by<0>(sums, boxes, number, add_box);
    }
  }

 private:
  static constexpr int kColumns = kLine / static_cast<int>(sizeof(float)), kBoxes = kTileColumns / kColumns;
  // A thread's sums of a box are pairs: of two rows, in four places 8 columns apart.
  static constexpr int kPairs = 8;
  // Boxes whose old values are on their way to a thread, in the registers that products leave free.
  static constexpr int kAhead = 4;

  template <uint32_t thread_boxes, int kOutBoxes, typename AddBox>
  __device__ __forceinline__ void add_by(const float (&sums)[kSums], uint8_t (&boxes)[kOutBoxes][kBoxBytes],
                                         int number, AddBox add_box) const {
    const bool first = threadIdx.x % kWarpgroup == 0;
    const int lane = threadIdx.x % kWarpSize, row = threadIdx.x % kWarpgroup / kWarpSize * 16 + lane / 4;
    float* low = to_.at + row * to_.row_stride + lane % 4 * 2;
    float* high = low + 8 * to_.row_stride;
    const auto at = [&](int box, int pair) {
      return reinterpret_cast<float2*>((pair % 2 ? high : low) + box * kColumns + pair / 2 * 8);
    };
    float2 old[kAhead][kPairs];
    const auto fetch = [&](int box) {
      if (!(thread_boxes >> box & 1)) return;
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) old[box % kAhead][pair] = __ldcs(at(box, pair));
    };
    int copied = 0;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) fetch(i);
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      if (thread_boxes >> i & 1) {
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          const float* own = &sums[i * 16 + pair * 2];
          const float2 before = old[i % kAhead][pair];
          __stcs(at(i, pair), make_float2(add_as_copies(before.x, own[0]), add_as_copies(before.y, own[1])));
        }
      } else {
        uint8_t* box = boxes[copied++ % kOutBoxes];
        if (first) wait_until_stored<kOutBoxes - 1>();
        sync_threads(1 + number, kWarpgroup);
        write_box<float>(sums, i, box);
        fence_for_copies();
        sync_threads(1 + number, kWarpgroup);
        if (first && i * kColumns < to_.columns && to_.rows > 0) add_box(box, i * kColumns);
        if (first) commit_stores();
      }
      if (i + kAhead < kBoxes) fetch(i + kAhead);
    }
  }

  Held<float> to_;
  uint32_t thread_boxes_;
};

// Kind is one of hopper_weight_grad_operands.cuh.
template <typename Kind, typename Out>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    sm90_grouped_wgrad_kernel(const __grid_constant__ WeightGradMaps maps,
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
  pdl_wait();
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
  // Nothing is added to what an empty group has.
  const auto is_left_out = [&](const Rows& rows) { return rows.begin >= rows.end && args.accumulate; };
  Place<Shared> place;
  if (warpgroup == 0) {
    fewer_registers<kCopierRegisters>();
    if (threadIdx.x == 0) {
      RowTiles<Kind::kRows> row_tiles;
      for (int index = cluster_in_grid(); index < count; index += clusters) {
        const Tile tile = find(index);
        Rows rows = rows_of(tile.group);
        if constexpr (Kind::kIsTold) {
          if (is_left_out(rows)) continue;
          tell(shared, place,
               FoundTile::of(tile.group, false, tile.row * kTileRows, tile.column * kTileColumns,
                             rows.end - rows.begin));
          if (rows.begin >= rows.end) {  // a stage of nothing
            arrive_here(&shared.full[place.stage]);
            place.next();
            continue;
          }
        }
        rows.first_tile = row_tiles.before(args.offsets, tile.group);
        for (int row = rows.begin; row < rows.end; row += Kind::kRows, place.next()) {
          Kind::fill(maps, args, shared, place, block, tile, rows, row);
        }
      }
      if constexpr (Kind::kIsTold) {
        tell(shared, place, FoundTile::none());
        arrive_here(&shared.full[place.stage]);
      }
    }
    __syncwarp();
  } else {
    more_registers<kMultiplierRegisters>();
    const int number = warpgroup - 1;
    // The tile of a group whose first row and column these are; row_count of the group.
    const auto take = [&](int group, int row, int column, int row_count) {
      const int line = row + number * kBoxLines;
      const auto held = [&] {
        Out* out = args.outs ? static_cast<Out*>(args.outs[group])
                             : static_cast<Out*>(args.out) + group * args.group_stride;
        return Held<Out>{out + line * args.row_stride + column, args.row_stride, args.m - line,
                         args.n - column};
      };
      const CUtensorMap& out_map = args.out_maps ? args.out_maps[group] : maps.out;
      const int matrix = args.out_maps ? 0 : group;
      if (args.out_maps && threadIdx.x % kWarpgroup == 0) acquire(&out_map);
      if (args.accumulate) held().send(args.thread_boxes);
      if (beta_of(args, group) != 0.0f) held().send(~0u);
      float sums[kSums] = {};
      Kind::sum(shared, place, row_count, number, sums);
      // A group without rows has a gradient of zero, whatever its factor is.
      if ((Kind::group_scales || args.alpha) && row_count > 0) {
        const float factor = factor_of<Kind::group_scales>(args, group);
#pragma unroll
        for (float& sum : sums) sum = sum * factor;
      }
      if constexpr (sizeof(Out) == 4) {
        if (args.accumulate) {
          const Adder adder(held(), args.thread_boxes);
          adder.add(sums, shared.out[number], number,
                    [&](uint8_t* box, int offset) { add_box(out_map, box, column + offset, line, matrix); });
          return;
        }
      }
      if (const float beta = beta_of(args, group); beta != 0.0f) held().add(sums, beta);
      store_sums<Out>(sums, shared.out[number], number, [&](uint8_t* box, int offset) {
        if (threadIdx.x % kWarpgroup != 0 || line >= args.m || column + offset >= args.n) return;
        store_box(out_map, box, column + offset, line, matrix);
      });
    };
    if constexpr (Kind::kIsTold) {
      FoundTile tile;
      while (hear(shared, place, tile)) take(tile.group(), tile.row, tile.column, tile.rows);
    } else {
      for (int index = cluster_in_grid(); index < count; index += clusters) {
        const Tile tile = find(index);
        const Rows rows = rows_of(tile.group);
        if (is_left_out(rows)) continue;
        take(tile.group, tile.row * kTileRows, tile.column * kTileColumns, rows.end - rows.begin);
      }
    }
    if (threadIdx.x % kWarpgroup == 0) wait_until_stored<0>();
  }
  sync_cluster();  // neither block leaves while the other may arrive at its
                   // barriers
#endif
}

template <typename Kind, typename Out>
void launch_grouped_wgrad(const GroupedGemmArgs& args, const Sm90Config& config, void* stream) {
  constexpr auto kernel = sm90_grouped_wgrad_kernel<Kind, Out>;
  constexpr int kShared = sizeof(typename Kind::Shared);
  static DynamicSharedMemory shared_memory;
  shared_memory.allow(kernel, kShared);
  WeightGradMaps maps{};
  Kind::encode(maps, args);
  const bool listed = args.list.addresses != nullptr;
  maps.out = tensor_map({args.out, args.out_dtype, args.n, args.m, listed ? 1 : args.groups,
                         args.out_row_stride, args.out_group_stride},
                        kBoxLines);
  const CUtensorMap* out_maps = launch_pointer_array(args.list, args.groups, &maps.out, stream);
  const WeightGradArgs own{args.offsets,
                           args.alpha,
                           args.beta,
                           args.out,
                           static_cast<const float*>(args.a_scale),
                           static_cast<const float*>(args.b_scale),
                           args.out_group_stride,
                           args.out_row_stride,
                           static_cast<int>(args.groups),
                           static_cast<int>(args.rows),
                           static_cast<int>(args.m),
                           static_cast<int>(args.n),
                           config.thread_boxes,
                           args.accumulate,
                           args.all_realigned,
                           out_maps,
                           listed ? static_cast<void* const*>(args.list.room) : nullptr};
  launch_pdl(kernel, grid_of(config), kThreads, kShared, static_cast<cudaStream_t>(stream), maps, own);
  check_launch("sm90_grouped_wgrad_kernel");
}

}  // namespace transformer_plugin::gemm::sm90

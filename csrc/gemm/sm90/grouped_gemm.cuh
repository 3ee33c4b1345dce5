// Products of ragged rows on Hopper: out[i] = a[i] @ B_g * alpha[g] + bias_scale[i] * bias[g] + beta[g] * out[i] for the rows i
// of group g.
#pragma once

#include "common/shared_memory.cuh"
#include "gemm/sm90/epilogue/beta_source.cuh"
#include "gemm/sm90/mainloop.cuh"
#include "gemm/sm90/tensor_map.h"
#include "gemm/sm90/tile_scheduler.cuh"

namespace transformer_plugin::gemm::sm90 {

// What the output holds in the place of a part's sums: of the rows and columns that are its own.
template <typename Out, typename AnyPart>
__device__ __forceinline__ Held<Out> held_by(const RowsArgs& args, const AnyPart& part) {
  return {static_cast<Out*>(args.out) + part.row * args.out_row_stride + part.column, args.out_row_stride,
          part.end_row - part.row, part.end_column - part.column};
}

// 64 rows of a box to a matrix, row by row: those of the part's group, and columns before `columns`.
template <typename Out>
__device__ __forceinline__ void store_own_rows(uint8_t* box, void* out, int64_t stride, int column,
                                               int columns, const Part& part) {
  constexpr int kPieces = kLine / 16, kPiece = 16 / sizeof(Out);
  for (int i = threadIdx.x % kWarpgroup; i < kBoxLines * kPieces; i += kWarpgroup) {
    const int own = i / kPieces, at = column + i % kPieces * kPiece;
    if (part.row + own < part.end_row && at < columns) {
      Out* to = static_cast<Out*>(out) + (part.row + own) * stride + at;
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(swizzled(box, own, i % kPieces));
    }
  }
}

// Sums to their rows and columns of the output, rounded.
template <typename Out, int kBoxes>
__device__ __forceinline__ void store_rows(const RowsArgs& args, const CUtensorMap& out_map, const Part& part,
                                           const float (&sums)[kSums], uint8_t (&boxes)[kBoxes][kBoxBytes]) {
  const bool whole = part.row + kBoxLines <= part.end_row;
  store_sums<Out>(sums, boxes, part.number, [&](uint8_t* box, int offset) {
    if (whole) {
      // Not by leaving the loop over boxes: what comes after is slower then, as the compiler loses uniform registers.
      if (threadIdx.x % kWarpgroup == 0 && part.column + offset < part.end_column) {
        store_box(out_map, box, part.column + offset, part.row, 0);
      }
      return;
    }
    // Rows of the next group follow.
    store_own_rows<Out>(box, args.out, args.out_row_stride, part.column + offset, part.end_column, part);
  });
}

// Rows past the groups become zero, in so many columns, by so many warps of every block.
template <typename Out>
__device__ __forceinline__ void zero_tail_rows(const RowsArgs& args, Out* out, int64_t stride, int columns,
                                               int warps, int warp) {
  constexpr int kPiece = 16 / sizeof(Out);
  const int step = static_cast<int>(gridDim.x) * warps;
  for (int row = args.offsets[args.groups] + static_cast<int>(blockIdx.x) * warps + warp; row < args.rows;
       row += step) {
    Out* own = out + row * stride;
    for (int i = threadIdx.x % kWarpSize * kPiece; i < columns; i += kWarpSize * kPiece) {
      *reinterpret_cast<uint4*>(own + i) = uint4{};
    }
  }
}
template <typename Out>
__device__ __forceinline__ void zero_tail_rows(const RowsArgs& args, int warps, int warp) {
  if (!args.zero_tail) return;
  zero_tail_rows(args, static_cast<Out*>(args.out), args.out_row_stride, args.n, warps, warp);
}

inline CUtensorMap out_map(const GroupedGemmArgs& args) {
  return tensor_map(
      {args.out, args.out_dtype, args.n, args.rows, 1, args.out_row_stride, args.rows * args.out_row_stride},
      kBoxLines);
}

// What becomes of sums, all by the warpgroup that has them: an epilogue says which lines of b are the columns of a tile, and
// brings the sums to memory. This one adds what is held there, rounds and stores them. The others are in hopper_swiglu*.cuh.
template <typename Out>
struct StoreRows {
  static constexpr bool kTakesHalves = true;  // of a tile's columns
  CUtensorMap out;

  using Args = GroupedGemmArgs;
  static const GroupedGemmArgs& problem(const Args& args) { return args; }
  static StoreRows of(const Args& args) { return {out_map(args)}; }

  __device__ __forceinline__ void prefetch_maps() const { prefetch(out); }
  // By one thread, before the barriers of stages are published.
  template <typename Shared>
  static __device__ __forceinline__ void init(Shared&) {}
  // The first line of b in a box of the tiles of this column.
  static __device__ __forceinline__ int line(const RowsArgs&, int tile_column, int box) {
    return tile_column * kTileColumns + box * kBoxLines;
  }
  // That of the j-th 8 columns of a part: with the 7 after it, as n is a multiple of 8.
  static __device__ __forceinline__ int line_of_sums(const RowsArgs&, const Part& part, int j) {
    return part.column + j * 8;
  }
  // Before the products of a part.
  template <typename Shared>
  __device__ __forceinline__ void begin(const RowsArgs& args, const Part& part, Shared&) const {
    if (beta_of(args, part.group) != 0.0f) held_by<Out>(args, part).send(~0u);
  }
  template <typename Shared>
  __device__ __forceinline__ void finish(const RowsArgs& args, const Part& part, float (&sums)[kSums],
                                         Shared& shared) const {
    if (const float beta = beta_of(args, part.group); beta != 0.0f) held_by<Out>(args, part).add(sums, beta);
    store_rows<Out>(args, out, part, sums, shared.out[part.number]);
  }
  // By the copier's other warps, so many of every block.
  __device__ __forceinline__ void zero_tail_rows(const RowsArgs& args, int warps, int warp) const {
    sm90::zero_tail_rows<Out>(args, warps, warp);
  }
  // After the last part: until shared memory is free.
  static __device__ __forceinline__ void drain() {
    if (threadIdx.x % kWarpgroup == 0) wait_until_stored<0>();
  }
};

// The scales of the rows of both operands (rowwise_scales.h).
template <typename Epilogue>
__device__ __forceinline__ void scale_rows(const RowsArgs& args, const Part& part, float (&sums)[kSums]) {
  const int lane = threadIdx.x % kWarpSize;
  const int low = part.row + threadIdx.x % kWarpgroup / kWarpSize * 16 + lane / 4, high = low + 8;
  const float scale_low = low < part.end_row ? args.a_scale[low] : 0.0f;
  const float scale_high = high < part.end_row ? args.a_scale[high] : 0.0f;
  const float* b_scale = args.b_scale + static_cast<int64_t>(part.group) * args.n;
#pragma unroll
  for (int j = 0; j < kTileColumns / 8; ++j) {
    const int own = Epilogue::line_of_sums(args, part, j) + lane % 4 * 2;
    if (own < args.n) {
      const float2 scale = *reinterpret_cast<const float2*>(b_scale + own);  // n is a multiple of 8
      sums[j * 4] = sums[j * 4] * (scale_low * scale.x);
      sums[j * 4 + 1] = sums[j * 4 + 1] * (scale_low * scale.y);
      sums[j * 4 + 2] = sums[j * 4 + 2] * (scale_high * scale.x);
      sums[j * 4 + 3] = sums[j * 4 + 3] * (scale_high * scale.y);
    }
  }
}

// The one rounding comes after this.
template <typename Kind, typename Epilogue = StoreRows<typename Kind::Out>>
__device__ __forceinline__ void scale_and_add_bias(const RowsArgs& args, const Part& part,
                                                   float (&sums)[kSums]) {
  if constexpr (Kind::row_scales) scale_rows<Epilogue>(args, part, sums);
  if (Kind::group_scales || args.alpha) {
    const float factor = factor_of<Kind::group_scales>(args, part.group);
#pragma unroll
    for (float& sum : sums) sum = sum * factor;
  }
  if (!args.bias) return;
  const int lane = threadIdx.x % kWarpSize;
  const int low = part.row + threadIdx.x % kWarpgroup / kWarpSize * 16 + lane / 4, high = low + 8;
  const float scale_low = args.bias_scale && low < part.end_row ? args.bias_scale[low] : 1.0f;
  const float scale_high = args.bias_scale && high < part.end_row ? args.bias_scale[high] : 1.0f;
  const float* bias = args.bias + static_cast<int64_t>(part.group) * args.n;
#pragma unroll
  for (int j = 0; j < kTileColumns / 8; ++j) {
    const int own = Epilogue::line_of_sums(args, part, j) + lane % 4 * 2;
    if (own < args.n) {
      const float x = bias[own], y = bias[own + 1];
      sums[j * 4] = fmaf(scale_low, x, sums[j * 4]);
      sums[j * 4 + 1] = fmaf(scale_low, y, sums[j * 4 + 1]);
      sums[j * 4 + 2] = fmaf(scale_high, x, sums[j * 4 + 2]);
      sums[j * 4 + 3] = fmaf(scale_high, y, sums[j * 4 + 3]);
    }
  }
}

// All that a warpgroup does that multiplies, the `number`-th of those.
template <typename Kind, typename Epilogue, typename Shared>
__device__ __forceinline__ void multiply_tiles(const RowsArgs& args, const Epilogue& epilogue, Shared& shared,
                                               Place<Shared>& place, int steps, int number) {
  const auto take = [&](const FoundTile& tile, auto halves) {
    using Own = decltype(halves);
    const Part part{tile.group(),
                    number,
                    tile.row + number * kBoxLines,
                    tile.row + tile.rows,
                    tile.column,
                    Own::kCount == 2 ? args.n : min(tile.column + Own::kBoxes * kBoxLines, args.n)};
    if (part.row >= part.end_row || part.column >= args.n) {  // nothing of this warpgroup's
#pragma unroll 1
      for (int step = 0; step < steps; ++step, place.next()) {
        wait(&shared.full[place.stage], place.parity);
        release(&shared.empty[place.stage]);
      }
      return;
    }
    epilogue.begin(args, part, shared);
    float sums[kSums] = {};
    Kind::template sum<Own::kCount>(args, shared, place, steps, part, sums);
    scale_and_add_bias<Kind, Epilogue>(args, part, sums);
    epilogue.finish(args, part, sums, shared);
  };
  FoundTile tile;
  bool found = hear(shared, place, tile);
  for (; found && is_whole<Epilogue::kTakesHalves>(tile); found = hear(shared, place, tile)) {
    take(tile, Halves<2>{});
  }
  if (Epilogue::kTakesHalves && found) take(tile, Halves<1>{});  // one at most, the last
  Epilogue::drain();
}

// Kind is one of hopper_operands.cuh. `b_maps` are those of a list of matrices, one for each group, in place of `b_map`; or
// null.
template <typename Kind, typename Epilogue>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    sm90_grouped_gemm_kernel(const __grid_constant__ CUtensorMap a_map,
                             const __grid_constant__ CUtensorMap b_map,
                             const __grid_constant__ typename Kind::ScaleMaps scale_maps,
                             const __grid_constant__ Epilogue epilogue, const __grid_constant__ RowsArgs args,
                             const CUtensorMap* b_maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Element = typename Kind::Element;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  using Shared = typename Kind::Shared;
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  const int block = static_cast<int>(block_in_cluster());
  if (threadIdx.x == 0) {
    prefetch(a_map);
    prefetch(b_map);
    epilogue.prefetch_maps();
    Epilogue::init(shared);
  }
  init_stages(shared);
  pdl_wait();
  const int steps = (args.k + kStep<Element> - 1) / kStep<Element>;
  Place<Shared> place;
  if (warpgroup == 0) {
    fewer_registers<kCopierRegisters>();
    if (threadIdx.x >= kWarpSize) {
      epilogue.zero_tail_rows(args, kWarpgroup / kWarpSize - 1, threadIdx.x / kWarpSize - 1);
    } else {
      RowsWalk walk(args, block);
      int entered = -1;  // the group of the tile before
      take_tiles<Epilogue::kTakesHalves>(walk, [&](const Tile& tile, auto halves) {
        const int row = walk.begin_row + tile.row * kTileRows;
        if (threadIdx.x == 0) {
          tell(shared, place, found_tile(walk, tile, halves));
          const bool listed = b_maps != nullptr;
          const CUtensorMap& own_map = listed ? b_maps[tile.group] : b_map;
          const int matrix = listed ? 0 : tile.group;
          if (listed && tile.group != entered) acquire(&own_map);
          entered = tile.group;
#pragma unroll 1
          for (int step = 0; step < steps; ++step, place.next()) {
            const int k = step * kStep<Element>;
            fill_stage<decltype(halves)::kBoxes>(
                shared, place, block, tile.same_columns,
                [&](void* to, int box, uint64_t* barrier, bool for_both) {
                  load(for_both, to, a_map, barrier, k, row + box * kBoxLines, 0);
                },
                [&](void* to, int box, uint64_t* barrier, bool for_both) {
                  const int line = Epilogue::line(args, tile.column, halves.first_box() + box);
                  Kind::b_by_columns ? load(for_both, to, own_map, barrier, line, k, matrix)
                                     : load(for_both, to, own_map, barrier, k, line, matrix);
                },
                Kind::ScaleMaps::kBytes);
            scale_maps.load_stage(shared, place, tile.group, row, halves.column(tile), step);
          }
        }
        __syncwarp();
      });
      if (threadIdx.x == 0) {
        tell(shared, place, FoundTile::none());
        arrive_here(&shared.full[place.stage]);
      }
    }
  } else {
    more_registers<kMultiplierRegisters>();
    multiply_tiles<Kind>(args, epilogue, shared, place, steps, warpgroup - 1);
  }
  sync_cluster();  // neither block leaves while the other may arrive at its
                   // barriers
#endif
}

inline RowsArgs rows_args(const GroupedGemmArgs& args) {
  return {args.offsets,
          args.out,
          args.alpha,
          args.beta,
          args.bias,
          args.bias_scale,
          static_cast<const float*>(args.a_scale),
          static_cast<const float*>(args.b_scale),
          args.out_row_stride,
          static_cast<int>(args.groups),
          static_cast<int>(args.rows),
          static_cast<int>(args.n),
          static_cast<int>(args.k),
          args.zero_tail};
}

// Of the stack, or of the first matrix of a list.
template <typename Kind>
CUtensorMap matrices_map(const GroupedGemmArgs& args) {
  const int64_t columns = Kind::b_by_columns ? args.n : args.k, rows = Kind::b_by_columns ? args.k : args.n;
  const int64_t count = args.list.addresses ? 1 : args.groups;
  return tensor_map({args.b, args.dtype, columns, rows, count, columns, rows * columns}, kBoxLines);
}

template <typename Kind, typename Epilogue = StoreRows<typename Kind::Out>>
void launch_grouped_gemm(const typename Epilogue::Args& all_args, const Sm90Config& config, void* stream) {
  constexpr auto kernel = sm90_grouped_gemm_kernel<Kind, Epilogue>;
  constexpr int kShared = sizeof(typename Kind::Shared);
  static DynamicSharedMemory shared_memory;
  shared_memory.allow(kernel, kShared);
  const GroupedGemmArgs& args = Epilogue::problem(all_args);
  const CUtensorMap a =
      tensor_map({args.a, args.dtype, args.k, args.rows, 1, args.k, args.rows * args.k}, kBoxLines);
  const CUtensorMap b = matrices_map<Kind>(args);
  const CUtensorMap* b_maps = launch_pointer_array(args.list, args.groups, &b, stream);
  launch_pdl(kernel, grid_of(config), kThreads, kShared, static_cast<cudaStream_t>(stream), a, b,
             Kind::ScaleMaps::of(args), Epilogue::of(all_args), rows_args(args), b_maps);
  check_launch("sm90_grouped_gemm_kernel");
}

}  // namespace transformer_plugin::gemm::sm90

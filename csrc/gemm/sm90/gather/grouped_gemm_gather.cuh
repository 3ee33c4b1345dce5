// Products of rows that an index names: hopper_rows.cuh with another way in for the left operand.
//
// The copy engine takes boxes of rows that lie one below the other. Rows from anywhere come in pieces of 16 bytes, for which
// all threads of the first warpgroup are wanted; one of them starts the boxes of the right operand besides. Pieces are not
// told to a barrier when they come: a thread waits for those of the step before while those of this step are under way.
#pragma once

#include "common/row_index.cuh"
#include "gemm/sm90/gather/gather.h"
#include "gemm/sm90/grouped_gemm.cuh"

namespace transformer_plugin::gemm::sm90 {

inline constexpr int kCopyWarps = kWarpgroup / kWarpSize;
inline constexpr int kPieces = kLine / 16;                  // of a line
inline constexpr int kLinesAtOnce = kWarpgroup / kPieces;   // a warp reads four whole lines
inline constexpr int kOwnLines = kTileRows / kLinesAtOnce;  // of a thread
static_assert(kLinesAtOnce % 8 == 0, "the swizzle of a thread's lines is one");

// A thread's part of the left operand: the same piece of every 16th line of a tile.
class LeftPieces {
 public:
  __device__ __forceinline__ LeftPieces(const TakenRows& from)
      : from_(from), line_(threadIdx.x / kPieces), piece_(threadIdx.x % kPieces) {}

  // The rows at the places from `first` on, of those before `end`.
  __device__ __forceinline__ void find(int first, int end, bool tell_wrong) {
    from_.index.is_int64 ? find_in<int64_t>(first, end, tell_wrong)
                         : find_in<int32_t>(first, end, tell_wrong);
  }

  // Columns k and on, of which those from args.k on are zero, as are rows that are not there.
  __device__ __forceinline__ void start(Stage& stage, const RowsArgs& args, int k) const {
    const int column = k + piece_ * 8;
    const bool before_end = column < args.k;
    const auto* matrix = static_cast<const uint8_t*>(from_.matrix) + (before_end ? column * 2 : 0);
    const uint32_t to = shared_address(swizzled(stage.left[0], line_, piece_));
#pragma unroll
    for (int i = 0; i < kOwnLines; ++i) {
      load_piece(to + i * kLinesAtOnce * kLine, matrix + max(rows_[i], 0) * from_.stride_bytes,
                 before_end && rows_[i] >= 0);
    }
  }

 private:
  template <typename Entry>
  __device__ __forceinline__ void find_in(int first, int end, bool tell_wrong) {
    Entry entries[kOwnLines];
#pragma unroll
    for (int i = 0; i < kOwnLines; ++i) {
      const int place = first + line_ + i * kLinesAtOnce;
      entries[i] = place < end ? static_cast<const Entry*>(from_.index.entries)[place] : 0;
    }
#pragma unroll
    for (int i = 0; i < kOwnLines; ++i) {
      const int place = first + line_ + i * kLinesAtOnce;
      const bool is_row = is_inside(from_.index, entries[i]);
      rows_[i] = place < end && is_row ? static_cast<int>(entries[i]) : -1;
      if (tell_wrong && place < end && !is_row && piece_ == 0) tell_wrong_row(from_.word, from_.index, place);
    }
  }

  const TakenRows& from_;
  int line_, piece_;
  int rows_[kOwnLines];  // -1 for zeros
};

// A warp's pieces of a stage have come: products may read them.
template <typename Shared>
__device__ __forceinline__ void hand_over(Shared& shared, int stage) {
  fence_for_copies();
  __syncwarp();
  if (threadIdx.x % kWarpSize == 0) arrive_here(&shared.full[stage]);
}

// All that the warpgroup does that copies.
template <typename Kind, typename Epilogue, typename Shared>
__device__ __forceinline__ void gather_tiles(const RowsArgs& args, const TakenRows& rows,
                                             const CUtensorMap& b_map, const CUtensorMap* b_maps,
                                             Shared& shared, Place<Shared>& place, int steps, int block) {
  RowsWalk walk(args, block);
  LeftPieces left(rows);
  int entered = -1;  // the group of the tile before
  int filled = -1;   // the stage of the step before
  take_tiles<Epilogue::kTakesHalves>(walk, [&](const Tile& tile, auto halves) {
    const int row = walk.begin_row + tile.row * kTileRows, column = halves.column(tile);
    // What is past the last column wants no rows; each row is in one tile of the first columns, which tells of it.
    left.find(row, column < args.n ? walk.end_row : row, column == 0);
    const CUtensorMap& own_map = b_maps ? b_maps[tile.group] : b_map;
    const int matrix = b_maps ? 0 : tile.group;
    if (threadIdx.x == 0 && b_maps && tile.group != entered) acquire(&own_map);
    entered = tile.group;
#pragma unroll 1
    for (int step = 0; step < steps; ++step, place.next()) {
      const int k = step * kStep<typename Kind::Element>;
      Stage& stage = shared.stages[place.stage];
      wait(&shared.empty[place.stage], place.parity ^ 1);
      if (threadIdx.x == 0) {
        if (step == 0) tell_of(shared, place.stage, found_tile(walk, tile, halves));
        fill_right<decltype(halves)::kBoxes>(
            stage.right, &shared.full[place.stage], block, tile.same_columns,
            [&](void* to, int box, uint64_t* barrier, bool for_both) {
              const int line = Epilogue::line(args, tile.column, halves.first_box() + box);
              Kind::b_by_columns ? load(for_both, to, own_map, barrier, line, k, matrix)
                                 : load(for_both, to, own_map, barrier, k, line, matrix);
            });
      }
      left.start(stage, args, k);
      commit_pieces();
      if (filled >= 0) {
        wait_for_pieces<1>();
        hand_over(shared, filled);
      }
      filled = place.stage;
    }
  });
  if (filled >= 0) {
    wait_for_pieces<0>();
    hand_over(shared, filled);
  }
  // All warps, lest one arrives for the stage's turn before, which another has yet to hand over.
  wait(&shared.empty[place.stage], place.parity ^ 1);
  if (threadIdx.x == 0) {
    tell_of(shared, place.stage, FoundTile::none());
    arrive_here(&shared.full[place.stage]);
  }
  if (threadIdx.x % kWarpSize == 0) arrive_here(&shared.full[place.stage]);
}

// As sm90_grouped_gemm_kernel, whose multiplying half it has.
template <typename Kind, typename Epilogue>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    sm90_grouped_gemm_gather_kernel(const __grid_constant__ TakenRows rows,
                                    const __grid_constant__ CUtensorMap b_map,
                                    const __grid_constant__ Epilogue epilogue,
                                    const __grid_constant__ RowsArgs args, const CUtensorMap* b_maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Element = typename Kind::Element;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  using Shared = typename Kind::Shared;
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  const int block = static_cast<int>(block_in_cluster());
  if (threadIdx.x == 0) {
    prefetch(b_map);
    epilogue.prefetch_maps();
    Epilogue::init(shared);
  }
  init_stages(shared, kCopyWarps);
  pdl_wait();
  const int steps = (args.k + kStep<Element> - 1) / kStep<Element>;
  Place<Shared> place;
  if (warpgroup == 0) {
    fewer_registers<kCopierRegisters>();
    gather_tiles<Kind, Epilogue>(args, rows, b_map, b_maps, shared, place, steps, block);
    zero_tail_rows<typename Kind::Out>(args, kCopyWarps, threadIdx.x / kWarpSize);
  } else {
    more_registers<kMultiplierRegisters>();
    multiply_tiles<Kind>(args, epilogue, shared, place, steps, warpgroup - 1);
  }
  sync_cluster();  // neither block leaves while the other may arrive at its barriers
#endif
}

template <typename Kind>
void launch_grouped_gemm_gather(const GroupedGemmArgs& args, const TakenRows& rows, const Sm90Config& config,
                                void* stream) {
  using Epilogue = StoreRows<typename Kind::Out>;
  constexpr auto kernel = sm90_grouped_gemm_gather_kernel<Kind, Epilogue>;
  static DynamicSharedMemory shared_memory;
  constexpr int kShared = sizeof(typename Kind::Shared);
  shared_memory.allow(kernel, kShared);
  const Epilogue epilogue{out_map(args)};
  const CUtensorMap b = matrices_map<Kind>(args);
  const CUtensorMap* b_maps = launch_pointer_array(args.list, args.groups, &b, stream);
  launch_pdl(kernel, grid_of(config), kThreads, kShared, static_cast<cudaStream_t>(stream), rows, b, epilogue,
             rows_args(args), b_maps);
  check_launch("sm90_grouped_gemm_gather_kernel");
}

}  // namespace transformer_plugin::gemm::sm90

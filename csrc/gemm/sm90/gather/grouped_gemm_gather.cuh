// Grouped GEMM with ragged rows that gathers its A operand: sm90_grouped_gemm_kernel with a[index[i]] in
// place of a[i].
//
// Formula, shapes, grid, shared memory and consumers are those of grouped_gemm.cuh; operands are 16-bit. Only
// the producer differs. TMA loads boxes of consecutive rows, so it cannot load A here (a TMA load for each row
// takes 2.7 times as long). All 128 threads of the producer warpgroup copy A with cp.async, 16 bytes at a time,
// and one thread of each warp starts the TMA load of a box of B.
//
// Between the time a stage is free and the time its copies must have arrived there is little more than their
// latency, so a thread does as little as possible then: it keeps the addresses of its copies, and advances them
// afterwards. With addresses computed from rows at that time the kernel was 7 % slower, and with all boxes of B
// started by one thread 2 %.
//
// A thread arrives at the `full` barrier of a stage by cp.async.mbarrier.arrive, which waits for its copies and
// not for the thread, so as many stages are in flight as with TMA alone. `full` expects one arrival of the
// thread that announces the bytes of B, and one for the copies of each thread. cp.async writes through the
// generic proxy and WGMMA reads through the async proxy, so the consumers fence after they have waited
// (Mainloop16Bit).
#pragma once

#include "common/ptx/barrier.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/row_index.cuh"
#include "gemm/sm90/gather/gather.h"
#include "gemm/sm90/gather/producer_warps.cuh"
#include "gemm/sm90/grouped_gemm.cuh"

namespace transformer_plugin::gemm::sm90 {

inline constexpr int kRowChunks = kSwizzleBytes / 16;             // 16-byte chunks of a row of a stage
inline constexpr int kRowsPerPass = kWarpgroupSize / kRowChunks;  // 8 threads copy the 128 bytes of a row
inline constexpr int kRowsPerThread = kTileRows / kRowsPerPass;
static_assert(kRowsPerPass % 8 == 0, "the swizzle is the same for all rows of a thread");

// The part of A that a thread copies: the same chunk of every 16th row of a tile.
class GatheredA {
 public:
  __device__ __forceinline__ GatheredA(const GatheredRows& from)
      : from_(from), row_(threadIdx.x / kRowChunks), chunk_(threadIdx.x % kRowChunks) {}

  // Reads the index entries of a tile: `begin` is its first entry, `end` the end of the group.
  __device__ __forceinline__ void load_indices(int begin, int end, bool report_invalid) {
    from_.index.is_int64 ? load_indices_as<int64_t>(begin, end, report_invalid)
                         : load_indices_as<int32_t>(begin, end, report_invalid);
  }

  // Starts the copies of the next kTileK columns, of which k is the first. Rows past the group, entries that are
  // no row (-1: on purpose) and columns past the end are zeros.
  __device__ __forceinline__ void load_async(Stage& stage, const GroupedGemmParams& args, int k) const {
    const uint32_t are_rows = k + chunk_ * 8 < args.k ? are_rows_ : 0;
    const uint32_t to = shared_address(swizzled(stage.a[0], row_, chunk_));
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      cp_async_zfill(to + i * kRowsPerPass * kSwizzleBytes, next_[i], are_rows >> i & 1);
    }
  }
  // Goes on to the next kTileK columns.
  __device__ __forceinline__ void advance() {
#pragma unroll
    for (const uint8_t*& next : next_) next += kSwizzleBytes;
  }

 private:
  template <typename Entry>
  __device__ __forceinline__ void load_indices_as(int begin, int end, bool report_invalid) {
    Entry entries[kRowsPerThread];
    are_rows_ = 0;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int position = begin + row_ + i * kRowsPerPass;
      entries[i] = position < end ? static_cast<const Entry*>(from_.index.entries)[position] : 0;
    }
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int position = begin + row_ + i * kRowsPerPass;
      const bool is_row = is_inside(from_.index, entries[i]);
      const bool copies = position < end && is_row;
      are_rows_ |= static_cast<uint32_t>(copies) << i;
      next_[i] = static_cast<const uint8_t*>(from_.matrix) +
                 (copies ? entries[i] * from_.stride_bytes + chunk_ * 16 : 0);
      if (report_invalid && position < end && !is_row && entries[i] != -1 && chunk_ == 0) {
        report_wrong_row(from_.word, from_.index, position);
      }
    }
  }

  const GatheredRows& from_;
  int row_, chunk_;
  const uint8_t* next_[kRowsPerThread];  // sources of the next copies
  uint32_t are_rows_;  // bit i: whether next_[i] is in a row of A; otherwise zeros are written
};

// Producer warpgroup: loads all stages of all tiles of this CTA.
template <typename Mainloop, typename Epilogue, typename SharedStorage>
__device__ __forceinline__ void gather_producer_loop(const GroupedGemmParams& args, const GatheredRows& rows,
                                                     const CUtensorMap& b_map, const CUtensorMap* b_maps,
                                                     SharedStorage& shared,
                                                     PipelineState<SharedStorage>& state, int steps,
                                                     int cta_rank) {
  TileScheduler scheduler(args, cta_rank);
  GatheredA gathered_a(rows);
  int last_group = -1;
  for_each_tile<Epilogue::kAllowsHalfN>(scheduler, [&](const CtaTile& tile, auto halves) {
    const int row = scheduler.group_begin + tile.tile_row * kTileRows, column = halves.column(tile);
    // A tile past the last column reads no rows. Invalid entries are reported once, by the tile of the first
    // columns.
    gathered_a.load_indices(row, column < args.n ? scheduler.group_end : row, column == 0);
    const CUtensorMap& group_map = b_maps ? b_maps[tile.group] : b_map;
    const int matrix = b_maps ? 0 : tile.group;
    constexpr int kBoxes = decltype(halves)::kBoxes;
    if (threadIdx.x % kWarpSize == 0 && b_maps && tile.group != last_group) {
      fence_tensormap_acquire(&group_map);
    }
    last_group = tile.group;
#pragma unroll 1
    for (int step = 0; step < steps; ++step, state.advance()) {
      const int k = step * kTileK<typename Mainloop::Element>;
      Stage& stage = shared.stages[state.stage];
      mbarrier_wait(&shared.empty[state.stage], state.phase ^ 1);
      uint64_t* full = &shared.full[state.stage];
      if (threadIdx.x == 0) {
        if (step == 0) store_tile_info(shared, state.stage, make_tile_info(scheduler, tile, halves));
        mbarrier_arrive_expect_tx(full, kBoxes * kBoxBytes);
      }
      load_box_of_warp<kBoxes>(
          stage, full, cta_rank, tile.shares_b, [&](void* to, int box, uint64_t* barrier, bool multicast) {
            const int b_row = Epilogue::b_row(args, tile.tile_column, halves.first_box() + box);
            Mainloop::kBMnMajor ? tma_load_or_multicast(multicast, to, group_map, barrier, b_row, k, matrix)
                                : tma_load_or_multicast(multicast, to, group_map, barrier, k, b_row, matrix);
          });
      gathered_a.load_async(stage, args, k);
      cp_async_arrive(full);
      gathered_a.advance();
    }
  });
  publish_copied_end(shared, state);
}

template <typename Mainloop, typename Epilogue>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    sm90_grouped_gemm_gather_kernel(const __grid_constant__ GatheredRows rows,
                                    const __grid_constant__ CUtensorMap b_map,
                                    const __grid_constant__ Epilogue epilogue,
                                    const __grid_constant__ GroupedGemmParams args,
                                    const CUtensorMap* b_maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Element = typename Mainloop::Element;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  using SharedStorage = typename Mainloop::SharedStorage;
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupSize, 0);
  const int cta_rank = static_cast<int>(cluster_ctarank());
  if (threadIdx.x == 0) {
    prefetch_tensormap(b_map);
    epilogue.prefetch_tensormaps();
    Epilogue::init_barriers(shared);
  }
  init_pipeline(shared, kWarpgroupSize);
  pdl_wait();
  const int steps = (args.k + kTileK<Element> - 1) / kTileK<Element>;
  PipelineState<SharedStorage> state;
  if (warpgroup == 0) {
    warpgroup_reg_dealloc<kProducerRegisters>();
    gather_producer_loop<Mainloop, Epilogue>(args, rows, b_map, b_maps, shared, state, steps, cta_rank);
    epilogue.zero_tail_rows(args, kProducerWarps, threadIdx.x / kWarpSize);
    __syncwarp();  // cluster_sync() needs converged warps
  } else {
    warpgroup_reg_alloc<kConsumerRegisters>();
    consumer_loop<Mainloop>(args, epilogue, shared, state, steps, warpgroup - 1);
  }
  cluster_sync();  // a CTA must not exit while the other may still arrive at its mbarriers
#endif
}

template <typename Mainloop, typename Epilogue = StoreEpilogue<typename Mainloop::Out>>
void launch_grouped_gemm_gather(const typename Epilogue::Args& epilogue_args, const GatheredRows& rows,
                                const Sm90Config& config, void* stream) {
  const GroupedGemmArgs& args = Epilogue::gemm_args(epilogue_args);
  constexpr auto kernel = sm90_grouped_gemm_gather_kernel<Mainloop, Epilogue>;
  static DynamicSharedMemory shared_memory;
  constexpr int kSharedBytes = sizeof(typename Mainloop::SharedStorage);
  shared_memory.allow(kernel, kSharedBytes);
  const CUtensorMap b = b_tensor_map<Mainloop>(args);
  const CUtensorMap* b_maps = launch_pointer_array(args.list, args.groups, &b, stream);
  launch_pdl(kernel, grid_blocks(config), kThreads, kSharedBytes, static_cast<cudaStream_t>(stream), rows, b,
             Epilogue::make(epilogue_args), make_params(args), b_maps);
  check_launch("sm90_grouped_gemm_gather_kernel");
}

}  // namespace transformer_plugin::gemm::sm90

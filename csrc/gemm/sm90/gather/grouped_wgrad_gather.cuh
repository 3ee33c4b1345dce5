// Grouped GEMM of weight gradients that gathers the rows of grad: sm90_grouped_wgrad_kernel with grad[index[i]]
// in place of grad[i].
//
// Formula, shapes, grid, shared memory and consumers are those of grouped_wgrad.cuh; operands are 16-bit, the
// index is int32. Only the producer differs: all 128 threads of its warpgroup copy grad with cp.async, as in
// grouped_gemm_gather.cuh. K is the rows here, so each stage has its own index entries. A thread starts to load
// those of the next stage before it waits for the current one, and computes the addresses from them after it has
// started the current stage's copies.
#pragma once

#include "common/ptx/barrier.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/row_index.cuh"
#include "gemm/sm90/gather/gather.h"
#include "gemm/sm90/gather/producer_warps.cuh"
#include "gemm/sm90/wgrad/grouped_wgrad.cuh"

namespace transformer_plugin::gemm::sm90 {

// A stage of this CTA; advance() goes through those of all of its tiles. A group without tokens has one stage
// without operands. All 128 threads run it alike.
template <int tokens_per_stage>
class WgradStages {
 public:
  __device__ __forceinline__ WgradStages(const WgradParams& params, const WgradTileScheduler& tile_scheduler)
      : args_(params), scheduler_(tile_scheduler), index_(clusterid_x()) {
    find_tile();
  }
  __device__ __forceinline__ bool exists() const { return index_ < scheduler_.count; }
  __device__ __forceinline__ bool begins_tile() const { return token == tokens.begin; }
  // __all_sync() shows the compiler that a result is the same in all lanes of a warp; otherwise it does not keep the
  // addresses of the stage in uniform registers.
  __device__ __forceinline__ bool ends_tile() const {
    return __all_sync(~0u, token + tokens_per_stage >= tokens.end);
  }
  __device__ __forceinline__ bool is_empty() const { return __all_sync(~0u, tokens.begin >= tokens.end); }
  __device__ __forceinline__ TileInfo tile_info() const {
    return TileInfo::make(tile.group, false, tile.tile_row * kTileRows, tile.tile_column * kTileColumns,
                          tokens.end - tokens.begin);
  }
  __device__ __forceinline__ void advance() {
    const bool has_more = !ends_tile();
    token += tokens_per_stage;
    if (has_more) return;
    index_ += scheduler_.clusters;
    find_tile();
  }

  CtaTile tile;
  GroupTokens tokens;
  int token;  // the first one of the stage

 private:
  __device__ __forceinline__ void find_tile() {
    for (; exists(); index_ += scheduler_.clusters) {
      tile = scheduler_.tile(index_);
      tokens = tokens_of_group(args_, tile.group);
      token = tokens.begin;
      if (!is_skipped(args_, tokens)) return;
    }
  }

  const WgradParams& args_;
  const WgradTileScheduler& scheduler_;
  int index_;
};

// The part of grad that a thread copies: the same chunk of 16 bytes of every 8th row of a stage.
template <int tokens_per_stage>
class GatheredGrad {
 public:
  __device__ __forceinline__ GatheredGrad(const GatheredRows& from, const WgradParams& args)
      : from_(from), args_(args), row_(threadIdx.x / kChunks), chunk_(threadIdx.x % kChunks) {}

  // Starts to load the index entries of a stage, two for each lane. Tokens past the group have rows of zeros.
  __device__ __forceinline__ void load_entries(const WgradStages<tokens_per_stage>& stage) {
#pragma unroll
    for (int i = 0; i < kEntriesPerLane; ++i) {
      const int token = stage.token + static_cast<int>(threadIdx.x % kWarpSize) + i * kWarpSize;
      entries_[i] =
          token < stage.tokens.end ? static_cast<const int32_t*>(from_.index.entries)[token] : kRowOfZeros;
    }
  }
  // Computes the addresses of that stage's copies. An address that is in no row is not read.
  __device__ __forceinline__ void compute_addresses(const WgradStages<tokens_per_stage>& stage) {
    const int column = stage.tile.tile_row * kTileRows + chunk_ * 8;
    const auto* in_column = static_cast<const uint8_t*>(from_.matrix) + column * 2;
    const auto rows = static_cast<uint32_t>(from_.index.rows);
    const auto stride = static_cast<int32_t>(from_.stride_bytes);
    are_rows_ = 0;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int entry = entry_of(i);
      are_rows_ |= static_cast<uint32_t>(static_cast<uint32_t>(entry) < rows) << i;
      sources_[i] = in_column + int64_t{entry} * stride;
    }
    report_wrong_entries(stage);
    // Columns past the end are zeros, and a tile past the last column of input reads nothing.
    if (column >= args_.m || stage.tile.tile_column * kTileColumns >= args_.n) are_rows_ = 0;
  }
  // Starts the copies.
  __device__ __forceinline__ void load_async(Stage& stage) const {
    constexpr int kBoxChunks = kSwizzleBytes / 16;
    const uint32_t to = shared_address(swizzled(stage.a[chunk_ / kBoxChunks], row_, chunk_ % kBoxChunks));
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      cp_async_zfill(to + i * kRowsPerPass * kSwizzleBytes, sources_[i], are_rows_ >> i & 1);
    }
  }

 private:
  static constexpr int kChunks = kTileRows * 2 / 16;  // of a row of a stage
  static constexpr int kRowsPerPass = kWarpgroupSize / kChunks;
  static constexpr int kRowsPerThread = tokens_per_stage / kRowsPerPass;
  static constexpr int kEntriesPerLane = tokens_per_stage / kWarpSize;
  static_assert(kRowsPerPass % 8 == 0, "the swizzle is the same for all rows of a thread");
  static_assert(kWarpSize % kRowsPerPass == 0, "a row's entry is in the same register of every lane");

  // The entry of the thread's i-th row. Called by all lanes of a warp.
  __device__ __forceinline__ int entry_of(int i) const {
    const int row = row_ + i * kRowsPerPass;
    return __shfl_sync(~0u, entries_[i * kRowsPerPass / kWarpSize], row % kWarpSize);
  }
  // Each entry is reported once, by one lane of the first tile of its group.
  __device__ __forceinline__ void report_wrong_entries(const WgradStages<tokens_per_stage>& stage) const {
    if (stage.tile.tile_row != 0 || stage.tile.tile_column != 0 || threadIdx.x >= kWarpSize) return;
#pragma unroll
    for (int i = 0; i < kEntriesPerLane; ++i) {
      if (entries_[i] == kRowOfZeros || is_inside(from_.index, entries_[i])) continue;
      report_wrong_row(from_.word, from_.index, stage.token + static_cast<int>(threadIdx.x) + i * kWarpSize);
    }
  }

  const GatheredRows& from_;
  const WgradParams& args_;
  int row_, chunk_;
  int entries_[kEntriesPerLane];
  const uint8_t* sources_[kRowsPerThread];  // of the copies
  uint32_t are_rows_;  // bit i: whether sources_[i] is in a row of grad; otherwise zeros are written
};

// Producer warpgroup: loads all stages of all tiles of this CTA.
template <typename Mainloop, typename SharedStorage>
__device__ __forceinline__ void wgrad_gather_producer_loop(const WgradTensorMaps& maps,
                                                           const WgradParams& args, const GatheredRows& rows,
                                                           const WgradTileScheduler& scheduler,
                                                           SharedStorage& shared,
                                                           PipelineState<SharedStorage>& state) {
  constexpr int kTokens = Mainloop::kTokensPerStage;
  WgradStages<kTokens> next(args, scheduler);
  GatheredGrad<kTokens> grad(rows, args);
  if (next.exists()) {
    grad.load_entries(next);
    grad.compute_addresses(next);
  }
#pragma unroll 1
  while (next.exists()) {
    const WgradStages<kTokens> now = next;
    const bool ends_tile = now.ends_tile(), is_empty = now.is_empty();
    const auto go_on = [&] {
      next.advance();
      if (next.exists()) grad.load_entries(next);
    };
    // The next tile is searched for later: that may take long, and the consumers of this one wait.
    if (!ends_tile) go_on();
    Stage& stage = shared.stages[state.stage];
    uint64_t* full = &shared.full[state.stage];
    mbarrier_wait(&shared.empty[state.stage], state.phase ^ 1);
    if (threadIdx.x == 0) {
      if (now.begins_tile()) store_tile_info(shared, state.stage, now.tile_info());
      mbarrier_arrive_expect_tx(full, is_empty ? 0 : kBBoxes * kBoxBytes);
    }
    if (is_empty) {
      mbarrier_arrive(full);
    } else {
      load_box_of_warp<kBBoxes>(stage, full, scheduler.cta_rank, now.tile.shares_b,
                                [&](void* to, int box, uint64_t* barrier, bool multicast) {
                                  tma_load_or_multicast(multicast, to, maps.input, barrier,
                                                        now.tile.tile_column * kTileColumns + box * kBoxRows,
                                                        now.token, 0);
                                });
      grad.load_async(stage);
      cp_async_arrive(full);
    }
    state.advance();
    if (ends_tile) go_on();
    if (next.exists()) grad.compute_addresses(next);
  }
  publish_copied_end(shared, state);
}

template <typename Mainloop, typename Out>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    sm90_grouped_wgrad_gather_kernel(const __grid_constant__ GatheredRows rows,
                                     const __grid_constant__ WgradTensorMaps maps,
                                     const __grid_constant__ WgradParams args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using SharedStorage = typename Mainloop::SharedStorage;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupSize, 0);
  const int cta_rank = static_cast<int>(cluster_ctarank());
  if (threadIdx.x == 0) {
    prefetch_tensormap(maps.input);
    prefetch_tensormap(maps.out);
  }
  init_pipeline(shared, kWarpgroupSize);
  pdl_wait();
  const WgradTileScheduler scheduler(args, cta_rank);
  PipelineState<SharedStorage> state;
  if (warpgroup == 0) {
    warpgroup_reg_dealloc<kProducerRegisters>();
    wgrad_gather_producer_loop<Mainloop>(maps, args, rows, scheduler, shared, state);
    __syncwarp();  // cluster_sync() needs converged warps
  } else {
    warpgroup_reg_alloc<kConsumerRegisters>();
    wgrad_consumer_loop<Mainloop, Out>(maps, args, scheduler, shared, state, warpgroup - 1);
  }
  cluster_sync();  // a CTA must not exit while the other may still arrive at its mbarriers
#endif
}

template <typename T, typename Out>
void launch_grouped_wgrad_gather(const GroupedGemmArgs& args, const GatheredRows& rows,
                                 const Sm90Config& config, void* stream) {
  using Mainloop = WgradMainloop16Bit<T, true>;
  constexpr auto kernel = sm90_grouped_wgrad_gather_kernel<Mainloop, Out>;
  constexpr int kSharedBytes = sizeof(typename Mainloop::SharedStorage);
  static DynamicSharedMemory shared_memory;
  shared_memory.allow(kernel, kSharedBytes);
  const WgradTensorMaps maps = make_wgrad_maps<Mainloop>(args);
  const CUtensorMap* out_maps = launch_pointer_array(args.list, args.groups, &maps.out, stream);
  launch_pdl(kernel, grid_blocks(config), kThreads, kSharedBytes, static_cast<cudaStream_t>(stream), rows,
             maps, make_wgrad_params(args, config, out_maps));
  check_launch("sm90_grouped_wgrad_gather_kernel");
}

}  // namespace transformer_plugin::gemm::sm90

// Grouped GEMM of weight gradients that gathers the rows of grad: sm90_grouped_wgrad_kernel with grad[index[i]] in place of
// grad[i].
//
// Formula, shapes, grid, shared memory and consumers are those of grouped_wgrad.cuh; operands are 16-bit, the index is int32.
// Only the producer differs: all 128 threads of its warpgroup copy grad with cp.async, as in grouped_gemm_gather.cuh. The rows
// are K here, so every stage has other ones. Their addresses are made while the stage before is on its way: its
// producers start to load the index entries before they wait for it, and use them after its copies.
#pragma once

#include "common/row_index.cuh"
#include "gemm/sm90/gather/gather.h"
#include "gemm/sm90/gather/producer_warps.cuh"
#include "gemm/sm90/wgrad/grouped_wgrad.cuh"

namespace transformer_plugin::gemm::sm90 {

// A stage of this CTA; advance() goes through those of all of its tiles. A group without tokens has one stage without
// operands.
template <int tokens_per_stage>
class WgradStages {
 public:
  __device__ __forceinline__ WgradStages(const WgradParams& params, const WgradTileScheduler& tile_scheduler)
      : args_(params), scheduler_(tile_scheduler), index_(clusterid_x()) {
    find_tile();
  }
  __device__ __forceinline__ bool exists() const { return index_ < scheduler_.count; }
  __device__ __forceinline__ bool begins_tile() const { return token == tokens.begin; }
  __device__ __forceinline__ bool is_empty() const { return tokens.begin >= tokens.end; }
  __device__ __forceinline__ TileInfo tile_info() const {
    return TileInfo::make(tile.group, false, tile.tile_row * kTileRows, tile.tile_column * kTileColumns,
                          tokens.end - tokens.begin);
  }
  __device__ __forceinline__ void advance() {
    token += tokens_per_stage;
    if (token < tokens.end) return;
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
  __device__ __forceinline__ GatheredGrad(const GatheredRows& from, int columns)
      : from_(from), columns_(columns), row_(threadIdx.x / kChunks), chunk_(threadIdx.x % kChunks) {}

  // Starts to load the index entries of a stage. Tokens past the group have rows of zeros.
  __device__ __forceinline__ void load_entries(const WgradStages<tokens_per_stage>& stage) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int token = stage.token + row_ + i * kRowsPerPass;
      entries_[i] =
          token < stage.tokens.end ? static_cast<const int32_t*>(from_.index.entries)[token] : kRowOfZeros;
    }
  }
  // Makes the addresses of the copies of that stage. Invalid entries are reported once, by the first tile of a group.
  __device__ __forceinline__ void make_addresses(const WgradStages<tokens_per_stage>& stage) {
    const int column = stage.tile.tile_row * kTileRows + chunk_ * 8;
    const bool reports = stage.tile.tile_row == 0 && stage.tile.tile_column == 0 && chunk_ == 0;
    are_rows_ = 0;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int entry = entries_[i];
      const bool is_row = is_inside(from_.index, entry), copies = is_row && column < columns_;
      are_rows_ |= static_cast<uint32_t>(copies) << i;
      next_[i] =
          static_cast<const uint8_t*>(from_.matrix) + (copies ? entry * from_.stride_bytes + column * 2 : 0);
      if (reports && !is_row && entry != kRowOfZeros) {
        report_wrong_row(from_.word, from_.index, stage.token + row_ + i * kRowsPerPass);
      }
    }
  }
  // Starts the copies.
  __device__ __forceinline__ void load_async(Stage& stage) const {
    constexpr int kBoxChunks = kSwizzleBytes / 16;
    const uint32_t to = shared_address(swizzled(stage.a[chunk_ / kBoxChunks], row_, chunk_ % kBoxChunks));
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      cp_async_zfill(to + i * kRowsPerPass * kSwizzleBytes, next_[i], are_rows_ >> i & 1);
    }
  }

 private:
  static constexpr int kChunks = kTileRows * 2 / 16;  // of a row of a stage
  static constexpr int kRowsPerPass = kWarpgroupSize / kChunks;
  static constexpr int kRowsPerThread = tokens_per_stage / kRowsPerPass;
  static_assert(kRowsPerPass % 8 == 0, "the swizzle is the same for all rows of a thread");

  const GatheredRows& from_;
  int columns_, row_, chunk_;
  int entries_[kRowsPerThread];
  const uint8_t* next_[kRowsPerThread];  // sources of the copies
  uint32_t are_rows_;  // bit i: whether next_[i] is in a row of grad; otherwise zeros are written
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
  GatheredGrad<kTokens> grad(rows, args.m);
  if (next.exists()) {
    grad.load_entries(next);
    grad.make_addresses(next);
  }
#pragma unroll 1
  while (next.exists()) {
    const WgradStages<kTokens> now = next;
    next.advance();
    if (next.exists()) grad.load_entries(next);
    Stage& stage = shared.stages[state.stage];
    uint64_t* full = &shared.full[state.stage];
    mbarrier_wait(&shared.empty[state.stage], state.phase ^ 1);
    if (threadIdx.x == 0) {
      if (now.begins_tile()) store_tile_info(shared, state.stage, now.tile_info());
      mbarrier_arrive_expect_tx(full, now.is_empty() ? 0 : kBBoxes * kBoxBytes);
    }
    if (!now.is_empty()) {
      load_box_of_warp<kBBoxes>(stage, full, scheduler.cta_rank, now.tile.shares_b,
                                [&](void* to, int box, uint64_t* barrier, bool multicast) {
                                  tma_load_or_multicast(multicast, to, maps.input, barrier,
                                                        now.tile.tile_column * kTileColumns + box * kBoxRows,
                                                        now.token, 0);
                                });
      grad.load_async(stage);
    }
    cp_async_arrive(full);
    state.advance();
    if (next.exists()) grad.make_addresses(next);
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

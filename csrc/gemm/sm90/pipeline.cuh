// The producer/consumer pipeline of the Hopper GEMM kernels: tile sizes, shared memory, mbarriers, tile
// information.
//
// A CTA has three warpgroups. Warpgroup 0 is the producer: one of its threads starts all TMA loads, or, where rows are
// gathered (gather/), all of its threads copy them and one of each warp starts a TMA load.
// Warpgroups 1 and 2 are the consumers: each multiplies 64 rows of the CTA tile with WGMMA and stores its
// accumulators. Two CTAs form a cluster (tile_order.cuh).
//
// Shared memory is a ring of stages. A stage holds kTileK of A (128 rows) and B (256 columns), as boxes of 64
// rows x 128 bytes (MN-major: 64 of K x 64 columns) with the 128-byte swizzle. Each stage has two mbarriers:
//   full   the producer has announced the stage's bytes and all of them have arrived;
//   empty  all consumer warps of both CTAs have read the stage (both, because of multicast).
//
// Multicast. Each CTA announces all bytes of its own stage, also those that the other CTA loads for it.
// - The other CTA's bytes may arrive before this CTA announces them. The transaction count is then negative;
//   the phase cannot complete, because the producer's arrival is still missing.
// - They cannot arrive a phase early: the other producer first waits for its `empty`, which this CTA's
//   consumers arrive at too.
// - Both CTAs of a cluster must run the same number of stages, also for tiles outside of the output.
#pragma once

#include <cstddef>
#include <cstring>

#include "common/launch.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "gemm/sm90/launch.h"
#include "gemm/sm90/tile_order.cuh"

namespace transformer_plugin::gemm::sm90 {

using namespace ptx;  // these kernels call PTX wrappers (common/ptx/) by their names alone

inline constexpr int kWarpgroupSize = 128;  // threads
inline constexpr int kConsumerWarpgroups = 2;
inline constexpr int kThreads = kWarpgroupSize * (1 + kConsumerWarpgroups);
inline constexpr int kSwizzleBytes = 128;  // bytes of a row in shared memory
inline constexpr int kBoxRows = 64;        // rows of a TMA box of an operand or of the output
inline constexpr int kBoxBytes = kBoxRows * kSwizzleBytes;
inline constexpr int kABoxes = kTileRows / kBoxRows, kBBoxes = kTileColumns / kBoxRows;
inline constexpr int kAccumulators = kTileColumns / 2;  // FP32 accumulators of a thread: 64 x 256 / 128
static_assert(kTileRows == kConsumerWarpgroups * kBoxRows, "a consumer warpgroup has one box of A");
static_assert(kCluster == 2 && kABoxes == kCluster, "CTAs that share A load one box of it each");

// Named barriers (bar.sync). Barrier 0 is that of __syncthreads.
//   1, 2   the threads of one consumer warpgroup (kBarrierOfConsumer + consumer)
//   3      the threads of both, in weight gradients (kBarrierOfBothConsumers)
//   3, 4   MXFP8 and NVFP4: the turn of consumer 0 and of consumer 1 (microscaled/mma_dequantized.cuh)
inline constexpr int kBarrierOfConsumer = 1;
inline constexpr int kBarrierOfBothConsumers = kBarrierOfConsumer + kConsumerWarpgroups;

// Registers of a thread after setmaxnreg. The CTA starts with 168 for each of its threads: 65536 / 384,
// rounded down to a multiple of 8.
inline constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
static_assert(kProducerRegisters + kConsumerWarpgroups * kConsumerRegisters ==
                  168 * (1 + kConsumerWarpgroups),
              "no more registers than the launch allocates");

// K of one stage, in elements.
template <typename T>
inline constexpr int kTileK = kSwizzleBytes / static_cast<int>(sizeof(T));

// From the operands of one WGMMA to those of the next K, in units of descriptors (16 bytes). MN-major: 16
// rows of 128 bytes. K-major: 32 bytes of each row (16 elements of 2 bytes, or 32 of 1 byte).
inline constexpr int kMnMajorDescStep = kWgmmaK * kSwizzleBytes / 16;
inline constexpr int kKMajorDescStep = 32 / 16;

struct Stage {
  alignas(1024) uint8_t a[kABoxes][kBoxBytes];
  alignas(1024) uint8_t b[kBBoxes][kBoxBytes];
};

// The output tile that the next stages belong to. The producer warp runs the tile scheduler and publishes
// each tile together with the tile's first stage, so consumers do not search for tiles. TileInfo::end(),
// published with one more stage, ends the consumers' loop. It is 16 bytes, so that one st.async writes it.
struct alignas(16) TileInfo {
  int packed_group;  // 2 * group + is_half_n, or -1 for the end
  int row, column;   // first row and column of the tile in the output
  int rows;          // GEMM: rows of the group from `row` on, above 0 (may exceed the tile).
                     // Weight gradient: rows (K) of the group, may be 0.

  static __device__ __forceinline__ TileInfo end() { return {-1, 0, 0, 0}; }
  static __device__ __forceinline__ TileInfo make(int group, bool is_half_n, int row, int column, int rows) {
    return {group * 2 + is_half_n, row, column, rows};
  }
  __device__ __forceinline__ bool is_end() const { return packed_group < 0; }
  __device__ __forceinline__ int group() const { return packed_group >> 1; }
  // Whether the CTA computes only half of the tile's columns (tile_scheduler.cuh).
  __device__ __forceinline__ bool is_half_n() const { return packed_group & 1; }
};
static_assert(sizeof(TileInfo) == sizeof(int4), "written by one st.async");

// ---- StageData: what shared memory has for each stage in addition to the operands.

// A TileInfo, valid for the first stage of a tile.
template <int stages>
class TileInfoStages {
 public:
  __device__ __forceinline__ TileInfo& tile(int stage) { return tiles_[stage]; }

 private:
  TileInfo tiles_[stages];
};

// A TileInfo and FP32 block scales (MainloopFp8Block). TMA boxes begin at multiples of 4 scales
// (tensor_map.h).
//   a_scales()  132 scales of A, from the multiple of 4 at or before the tile's first row.
//   b_scales()  [2 blocks of 128 columns][4 steps of K], from the multiple of 4 at or before the step. A
//               stage uses one of the four steps, and each stage loads all four again.
template <int stages>
class BlockScaleStages {
 public:
  static constexpr int kRows = kTileRows + 4, kSteps = 4;
  static constexpr int kBytes = (kRows + 2 * kSteps) * sizeof(float);  // of one stage
  using BScales = float[2][kSteps];

  __device__ __forceinline__ float* a_scales(int stage) { return a_scales_[stage].scales; }
  __device__ __forceinline__ BScales& b_scales(int stage) {
    return *reinterpret_cast<BScales*>(b_scales_ + stage * kBScalesStride);
  }
  __device__ __forceinline__ TileInfo& tile(int stage) { return a_scales_[stage].tile; }

 private:
  // sizeof(SharedStorageFp8Block), rounded up to 1024, is exactly kMaxSharedBytes: hence the TileInfo in the
  // padding, and no padding after the last stage's scales of B.
  static constexpr int kBScalesStride = 32;  // floats: 128 bytes
  struct AScales {
    alignas(16) float scales[kRows];
    TileInfo tile;
    float unused[24];
  };
  static_assert(sizeof(AScales) % 128 == 0, "TMA destinations are 128-byte aligned");

  AScales a_scales_[stages];
  float b_scales_[(stages - 1) * kBScalesStride + 2 * kSteps];
};

// FP8 block scales of a weight gradient, one for each row of A and column of B. There is no TileInfo: in FP8
// weight gradients all warps compute the tile order (kPublishesTiles in wgrad/mainloop.cuh says why).
struct WgradBlockScales {
  alignas(128) float a[kTileRows], b[kTileColumns];
};

struct NoStageData {};

// Shared memory of a CTA.
template <typename StageData, int stage_count, int box_count>
struct PipelineSharedStorage {
  static constexpr int kStages = stage_count;
  // Output boxes of a consumer warpgroup: used in turn, or all at once if they hold a whole tile.
  static constexpr int kOutBoxes = box_count;

  Stage stages[kStages];
  alignas(1024) uint8_t out[kConsumerWarpgroups][kOutBoxes][kBoxBytes];
  StageData stage_data;
  uint64_t full[kStages], empty[kStages];

  __device__ __forceinline__ TileInfo& tile(int stage) { return stage_data.tile(stage); }
};
using SharedStorageNoScales = PipelineSharedStorage<TileInfoStages<4>, 4, 2>;
using SharedStorageFp8Block = PipelineSharedStorage<BlockScaleStages<4>, 4, 2>;
using SharedStorageWgradFp8Tensor = PipelineSharedStorage<NoStageData, 4, 2>;

// A 16-bit output is stored fastest when all four boxes of a warpgroup's tile have room, at the cost of one
// stage. An FP32 output has one box: threads and TMA add to memory in turn. FP32 outputs that are not
// accumulated have the same storage, so their boxes are stored one after the other.
template <typename Out>
struct WgradFp8BlockCounts {
  static constexpr int kStages = sizeof(Out) == 4 ? 4 : 3, kOutBoxes = sizeof(Out) == 4 ? 1 : 4;
};
template <typename Out>
using SharedStorageWgradFp8Block =
    PipelineSharedStorage<WgradBlockScales[WgradFp8BlockCounts<Out>::kStages],
                          WgradFp8BlockCounts<Out>::kStages, WgradFp8BlockCounts<Out>::kOutBoxes>;

inline constexpr size_t kMaxSharedBytes = 232448;  // of a CTA on sm_90
static_assert(sizeof(SharedStorageFp8Block) <= kMaxSharedBytes &&
                  sizeof(SharedStorageWgradFp8Block<float>) <= kMaxSharedBytes,
              "shared memory of a CTA");
static_assert(offsetof(SharedStorageFp8Block, stage_data) % 128 == 0,
              "TMA destinations are 128-byte aligned");

// Position of a thread in a ring of kStages stages.
template <typename SharedStorage>
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == SharedStorage::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Initializes the mbarriers and synchronizes the cluster. `full` expects one arrival of the thread that
// announces the bytes of TMA loads and `extra_arrivals` more.
template <typename SharedStorage>
__device__ __forceinline__ void init_pipeline(SharedStorage& shared, uint32_t extra_arrivals = 0) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < SharedStorage::kStages; ++stage) {
      mbarrier_init(&shared.full[stage], 1 + extra_arrivals);
      mbarrier_init(&shared.empty[stage], kCluster * kConsumerWarpgroups * kWarpgroupSize / kWarpSize);
    }
    fence_mbarrier_init();
  }
  cluster_sync();
}

// ---- Tile information

// Producer thread: writes the TileInfo of a stage that is empty, before it arrives at the stage's `full`. The
// store is asynchronous and counted as bytes of the stage, so it is complete when the phase is. (An ordinary
// store would be ordered by the arrival too, but compute-sanitizer does not model that when TMA completes the
// phase.)
template <typename SharedStorage>
__device__ __forceinline__ void store_tile_info(SharedStorage& shared, int stage, const TileInfo& tile) {
  uint64_t* full = &shared.full[stage];
  mbarrier_expect_tx(full, sizeof(tile));
  st_async(full, &shared.tile(stage), {tile.packed_group, tile.row, tile.column, tile.rows});
}
// Producer thread: waits until the stage is empty, then writes its TileInfo.
template <typename SharedStorage>
__device__ __forceinline__ void publish_tile(SharedStorage& shared, const PipelineState<SharedStorage>& state,
                                             const TileInfo& tile) {
  mbarrier_wait(&shared.empty[state.stage], state.phase ^ 1);
  store_tile_info(shared, state.stage, tile);
}
// Producer thread: publishes the end of the tiles.
template <typename SharedStorage>
__device__ __forceinline__ void publish_end(SharedStorage& shared,
                                            const PipelineState<SharedStorage>& state) {
  publish_tile(shared, state, TileInfo::end());
  mbarrier_arrive(&shared.full[state.stage]);
}
// Consumer warps: waits for the first stage of the next tile and reads its TileInfo. Returns false at the
// end. The vote tells the compiler that the result is uniform in the warp; without it WGMMA descriptors leave
// the uniform registers.
template <typename SharedStorage>
__device__ __forceinline__ bool fetch_tile(SharedStorage& shared, const PipelineState<SharedStorage>& state,
                                           TileInfo& tile) {
  mbarrier_wait(&shared.full[state.stage], state.phase);
  tile = shared.tile(state.stage);
  __syncwarp();  // all lanes have read it before one of them releases the stage
  return __any_sync(~0u, !tile.is_end());
}

// ---- Loads (producer)

__device__ __forceinline__ void tma_load_or_multicast(bool multicast, void* to, const CUtensorMap& map,
                                                      uint64_t* barrier, int x, int y, int z) {
  multicast ? tma_load_multicast((1 << kCluster) - 1, to, map, barrier, x, y, z)
            : tma_load(to, map, barrier, x, y, z);
}

// Waits until the stage is empty, then loads all of its boxes; called by one thread. load_a and load_b(to,
// box, barrier, multicast) start the TMA load of one box. Of the operand that the CTAs share, each CTA loads
// half with multicast. `b_boxes`: boxes of B to load, from the first on. `extra_bytes` are announced too; the
// caller loads them.
template <int b_boxes = kBBoxes, typename SharedStorage, typename LoadA, typename LoadB>
__device__ __forceinline__ void producer_load(SharedStorage& shared,
                                              const PipelineState<SharedStorage>& state, int cta_rank,
                                              bool shares_b, LoadA load_a, LoadB load_b,
                                              uint32_t extra_bytes = 0) {
  uint64_t* full = &shared.full[state.stage];
  auto& stage = shared.stages[state.stage];
  mbarrier_wait(&shared.empty[state.stage], state.phase ^ 1);
  mbarrier_arrive_expect_tx(full, sizeof(stage.a) + b_boxes * kBoxBytes + extra_bytes);
  if (shares_b) {
#pragma unroll
    for (int box = 0; box < kABoxes; ++box) load_a(stage.a[box], box, full, false);
#pragma unroll
    for (int i = 0; i < b_boxes / kCluster; ++i) {
      const int box = cta_rank * (b_boxes / kCluster) + i;
      load_b(stage.b[box], box, full, true);
    }
  } else {
    load_a(stage.a[cta_rank], cta_rank, full, true);
#pragma unroll
    for (int box = 0; box < b_boxes; ++box) load_b(stage.b[box], box, full, false);
  }
}
// The same for B alone. The caller has waited for `empty`.
template <int b_boxes = kBBoxes, typename LoadB>
__device__ __forceinline__ void producer_load_b(uint8_t (&boxes)[kBBoxes][kBoxBytes], uint64_t* full,
                                                int cta_rank, bool shares_b, LoadB load_b) {
  mbarrier_arrive_expect_tx(full, b_boxes * kBoxBytes);
  const int count = shares_b ? b_boxes / kCluster : b_boxes;
  const int first_box = shares_b ? cta_rank * count : 0;
#pragma unroll 1
  for (int box = first_box; box < first_box + count; ++box) load_b(boxes[box], box, full, shares_b);
}

// ---- Consumers

// Called by all lanes of a consumer warp when it has read a stage: arrives at the `empty` barrier of both
// CTAs. The arrival needs no .release.cluster: an `empty` barrier hands over shared memory that WGMMA has
// finished reading. Stages that threads also read (scales, TileInfo: only the own producer overwrites them)
// or wrote (zero_tokens_past_group: fenced by fence_proxy_async and read by WGMMA since) need no more.
__device__ __forceinline__ void consumer_release(uint64_t* empty) {
  const uint32_t lane = threadIdx.x % kWarpSize;
  if (lane < kCluster) mbarrier_arrive_cluster(empty, lane);
}

// Address of a 16-byte chunk of a row of a box, under the 128-byte swizzle.
__device__ __forceinline__ uint8_t* swizzled(uint8_t* box, int row, int chunk) {
  return box + row * kSwizzleBytes + (chunk ^ row % 8) * 16;
}

// The first of the two rows of a thread's accumulators, of 64 rows that begin at `first_row`; the other is 8
// further (accumulator layout: common/ptx/wgmma.cuh).
__device__ __forceinline__ int thread_row(int first_row, int lane) {
  return first_row + threadIdx.x % kWarpgroupSize / kWarpSize * 16 + lane / 4;
}
// The same for callers without `lane`. One form for all would change the registers of some kernels.
__device__ __forceinline__ int thread_row(int first_row) {
  return first_row + threadIdx.x % kWarpgroupSize / kWarpSize * 16 + threadIdx.x % kWarpSize / 4;
}

// Zero, as a value that the compiler does not know to be uniform in the warp. The compiler would otherwise
// copy a value loaded from a warp-uniform address into a uniform register at once and stall on the load.
__device__ __forceinline__ int per_thread_zero() {
  int zero;
  asm("shr.u32 %0, %1, 31;" : "=r"(zero) : "r"(threadIdx.x));
  return zero;
}

// FP8: partial = A B over the K of one stage, for the consumer's 64 rows and one half (128 columns) of B. a
// and b are K-major descriptors.
template <DType a_type>
__device__ __forceinline__ void wgmma_fp8_stage(float (&partial)[kAccumulators / 2], uint64_t a, uint64_t b,
                                                int half) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kSwizzleBytes / 32; ++i) {  // K = 32 elements
    wgmma_fp8<a_type>(partial, a + i * kKMajorDescStep,
                      b + half * (kTileColumns / 2 * kSwizzleBytes / 16) + i * kKMajorDescStep, i > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
}

// FP8: acc += A B over the K of one stage. The sum of the stage is promoted: added to the FP32 accumulators
// outside of the tensor cores, which accumulate FP8 products with about 14 bits. Calls release() when the
// stage has been read.
template <DType a_type, int half_count = 2, typename Release>
__device__ __forceinline__ void accumulate_fp8_stage(float (&acc)[kAccumulators], uint64_t a, uint64_t b,
                                                     Release release) {
#pragma unroll
  for (int half = 0; half < half_count; ++half) {
    float partial[kAccumulators / 2];
    wgmma_fp8_stage<a_type>(partial, a, b, half);
    if (half == half_count - 1) release();
#pragma unroll
    for (int i = 0; i < kAccumulators / 2; ++i) acc[half * (kAccumulators / 2) + i] += partial[i];
  }
}

}  // namespace transformer_plugin::gemm::sm90

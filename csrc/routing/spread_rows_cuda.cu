// gather_rows on Hopper with the map from tokens to slots: tokens [tokens, H], slot [tokens, topk], output [capacity, H].
//
// Each warp is a block. It loads a piece of a token into shared memory by a bulk copy (TMA without a tensor map) and
// stores it to all slots of the token by other bulk copies, one per lane. So a token is read once, and every store is a
// whole piece: up to kMostPieceBytes in a row of memory, which DRAM takes faster than the same bytes in small parts.
// A ring of kStages pieces keeps two loads in flight while the slots of a third are written. Then the warps fill the
// rows that no token has.
#include <algorithm>

#include "common/ptx/mbarrier.cuh"
#include "common/ptx/memory.cuh"
#include "common/ptx/tma.cuh"
#include "common/shared_memory.cuh"
#include "routing/copy_words.cuh"

namespace transformer_plugin::routing {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kStages = 3;
constexpr int kRowsPerWarp = 8;
constexpr int64_t kMostPieceBytes = 16384;
constexpr int kBlocksPerSm = 16;  // as many as shared memory holds, if a row has at most 4 KiB

// The pieces of this block: unit `first` + i * `step` is piece `unit % pieces` of token `unit / pieces`.
struct Units {
  int64_t first, step, count, pieces;

  __device__ __forceinline__ Units(int64_t tokens, int64_t pieces_of_token)
      : first(blockIdx.x), step(gridDim.x), pieces(pieces_of_token) {
    const int64_t all = tokens * pieces_of_token;
    count = first < all ? (all - first + step - 1) / step : 0;
  }
  __device__ __forceinline__ int64_t token(int64_t i) const { return (first + i * step) / pieces; }
  __device__ __forceinline__ int64_t piece(int64_t i) const { return (first + i * step) % pieces; }
};

// The slot of a token that the lane writes, or -1.
__device__ __forceinline__ int32_t slot_of_lane(const GatherRowsArgs& args, int64_t token) {
  const int lane = threadIdx.x;
  const int32_t s = lane < args.topk ? args.slot[token * args.topk + lane] : -1;
  return s >= 0 && s < args.capacity && args.source[s] == token ? s : -1;
}

// Writes the output rows that no token writes, kRowsPerWarp of them at a time: one for each of the first lanes.
class RowsWithoutToken {
 public:
  __device__ __forceinline__ explicit RowsWithoutToken(const GatherRowsArgs& args)
      : args_(args), end_(args.written_rows()), begin_(static_cast<int64_t>(blockIdx.x) * kRowsPerWarp) {}

  // Returns false when all have been written.
  __device__ __forceinline__ bool next() {
    if (begin_ >= end_) return false;
    const int64_t s = begin_ + threadIdx.x;
    const bool exists = threadIdx.x < kRowsPerWarp && s < end_;
    const int32_t n = exists ? args_.source[s] : -1;
    const bool found = n >= 0 && n < args_.tokens;
    const bool written = found && find_slot(args_.slot + n * args_.topk, args_.topk, s) >= 0;
    const int64_t words = args_.row_bytes / static_cast<int64_t>(sizeof(uint4));
    for (unsigned left = __ballot_sync(kAllLanes, exists && !written); left != 0; left &= left - 1) {
      const int from = __ffs(left) - 1;
      const int64_t token = __shfl_sync(kAllLanes, found ? n : -1, from);
      const uint4* row = token >= 0 ? static_cast<const uint4*>(args_.rows) + token * words : nullptr;
      uint4* output = static_cast<uint4*>(args_.output) + (begin_ + from) * words;
      for (int64_t w = threadIdx.x; w < words; w += kWordsOfSlot * kWarpSize) {
        copy_words(row, output, w, words);
      }
    }
    begin_ += static_cast<int64_t>(gridDim.x) * kRowsPerWarp;
    return true;
  }

 private:
  const GatherRowsArgs& args_;
  int64_t end_, begin_;
};

__global__ void __launch_bounds__(kWarpSize)
    spread_rows_kernel(const __grid_constant__ GatherRowsArgs args, uint32_t piece_bytes, int64_t pieces) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char ring[];
  __shared__ __align__(8) uint64_t full[kStages];
  const int lane = threadIdx.x;
  if (lane == 0) {
    for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(&full[i], 1);
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  const Units units(args.tokens, pieces);
  const auto bytes_of = [&](int64_t i) {
    const int64_t left = args.row_bytes - units.piece(i) * piece_bytes;
    return static_cast<uint32_t>(left < piece_bytes ? left : piece_bytes);
  };
  const auto load = [&](int64_t i) {
    if (lane != 0 || i >= units.count) return;
    const int stage = static_cast<int>(i % kStages);
    const char* from =
        static_cast<const char*>(args.rows) + units.token(i) * args.row_bytes + units.piece(i) * piece_bytes;
    const uint32_t bytes = bytes_of(i);
    ptx::mbarrier_arrive_expect_tx(&full[stage], bytes);
    ptx::cp_async_bulk_load(ring + stage * piece_bytes, from, bytes, &full[stage]);
  };
  RowsWithoutToken fill(args);
  // The L2 cache evicts what is stored before anything else: the tokens stay, and copies leave in the order
  // in which they were written (2 to 4 % faster).
  const uint64_t policy = ptx::createpolicy_evict_first();
  for (int i = 0; i < kStages - 1; ++i) load(i);
  int32_t next = units.count > 0 ? slot_of_lane(args, units.token(0)) : -1;
  for (int64_t i = 0; i < units.count; ++i) {
    const int stage = static_cast<int>(i % kStages);
    const int32_t slot = next;
    if (i + 1 < units.count) next = slot_of_lane(args, units.token(i + 1));
    fill.next();  // while the piece arrives
    ptx::mbarrier_wait(&full[stage], static_cast<uint32_t>(i / kStages % 2));
    if (slot >= 0) {
      char* to = static_cast<char*>(args.output) + slot * args.row_bytes + units.piece(i) * piece_bytes;
      ptx::cp_async_bulk_store(to, ring + stage * piece_bytes, bytes_of(i), policy);
    }
    ptx::cp_async_bulk_commit_group();
    // The stores of the step before have read its stage, which the next load fills.
    ptx::cp_async_bulk_wait_group_read<1>();
    __syncwarp();
    load(i + kStages - 1);
  }
  while (fill.next()) {
  }
  ptx::cp_async_bulk_wait_group<0>();
#endif
}

}  // namespace

bool launch_spread_rows(const GatherRowsArgs& args, void* stream) {
  if (!args.slot || args.topk < 2 || args.topk > kWarpSize) return false;
  int device = 0, major = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (major < 9) return false;
  const int64_t pieces = ceil_div(args.row_bytes, kMostPieceBytes);
  const int64_t piece_bytes = ceil_div(ceil_div(args.row_bytes, pieces), 16) * 16;
  const int64_t most = std::max(args.tokens * pieces, ceil_div(args.capacity, kRowsPerWarp));
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(most, int64_t{kBlocksPerSm} * multiprocessors));
  const auto shared = static_cast<unsigned>(kStages * piece_bytes);
  static DynamicSharedMemory shared_memory;
  shared_memory.allow(spread_rows_kernel, static_cast<int>(kStages * kMostPieceBytes));
  spread_rows_kernel<<<blocks, kWarpSize, shared, static_cast<cudaStream_t>(stream)>>>(
      args, static_cast<uint32_t>(piece_bytes), pieces);
  check_launch("spread_rows_kernel");
  return true;
}

}  // namespace transformer_plugin::routing

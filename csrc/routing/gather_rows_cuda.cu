// CUDA kernels of gather_rows (routing/rows_args.h): rows [tokens, H], source [capacity], output
// [capacity, H]. Rows are copied as words, the widest that sizes and addresses allow. Blocks of 256 threads.
//   gather_rows_kernel   One warp per 128 words of an output row.
//   spread_rows_kernel   With the map from tokens to slots [tokens, topk], words of 16 bytes: the first
//                        blocks have one warp per 64 words of a token. They read them once and write them to
//                        all slots of the token. The other blocks have one warp per 8 output rows: they write
//                        the rows that no token writes. So each row is read once from memory, however large
//                        all rows are; gather_rows_kernel reads it once per slot.
#include <algorithm>

#include "routing/rows_cuda.cuh"

namespace transformer_plugin::routing {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kWordsOfSlot = 4;   // that a lane of gather_rows_kernel copies at once
constexpr int kWordsOfToken = 2;  // that a lane of spread_rows_kernel copies at once
constexpr int kRowsPerWarp = 8;

// Stores a word that leaves the caches early: the output is larger than they are, and the input shall stay.
template <typename Word>
__device__ __forceinline__ void store_once(Word* address, Word word) {
  if constexpr (std::is_same_v<Word, uint4>) {
    __stcs(address, word);
  } else {
    *address = word;
  }
}

// Copies the words first, first + 32, ... of a row, all loads before the stores; zeros without a row.
template <typename Word>
__device__ __forceinline__ void copy_words(const Word* row, Word* output, int64_t first, int64_t words) {
  Word values[kWordsOfSlot];
#pragma unroll
  for (int u = 0; u < kWordsOfSlot; ++u) {
    const int64_t w = first + u * kWarpSize;
    values[u] = row && w < words ? row[w] : Word{};
  }
#pragma unroll
  for (int u = 0; u < kWordsOfSlot; ++u) {
    const int64_t w = first + u * kWarpSize;
    if (w < words) store_once(output + w, values[u]);
  }
}

// output[s] = rows[source[s]]. `warps_per_row` warps copy a row.
template <typename Word>
__global__ void __launch_bounds__(kThreads) gather_rows_kernel(GatherRowsArgs args, int64_t warps_per_row) {
  const int64_t words = args.row_bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t units = args.capacity * warps_per_row;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t unit = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize; unit < units;
       unit += step) {
    const int64_t s = unit / warps_per_row;
    const int64_t first = (unit - s * warps_per_row) * kWordsOfSlot * kWarpSize + threadIdx.x % kWarpSize;
    const int64_t n = args.source[s];
    const bool found = n >= 0 && n < args.tokens;
    const Word* row = found ? static_cast<const Word*>(args.rows) + n * words : nullptr;
    copy_words(row, static_cast<Word*>(args.output) + s * words, first, words);
  }
}

// Writes the words first, first + 32, ... of token `n` to the token's slots in which `source` has the token.
__device__ __forceinline__ void spread_words(const GatherRowsArgs& args, int64_t n, int64_t first,
                                             int64_t words) {
  const int lane = threadIdx.x % kWarpSize;
  uint4 values[kWordsOfToken];
#pragma unroll
  for (int u = 0; u < kWordsOfToken; ++u) {
    const int64_t w = first + u * kWarpSize;
    if (w < words) values[u] = load_once(static_cast<const uint4*>(args.rows) + n * words + w);
  }
  const int32_t s = lane < args.topk ? args.slot[n * args.topk + lane] : -1;
  const bool placed = s >= 0 && s < args.capacity && args.source[s] == n;
  for (unsigned left = __ballot_sync(kAllLanes, placed); left != 0; left &= left - 1) {
    const int64_t row = __shfl_sync(kAllLanes, s, __ffs(left) - 1);
    uint4* output = static_cast<uint4*>(args.output) + row * words;
#pragma unroll
    for (int u = 0; u < kWordsOfToken; ++u) {
      const int64_t w = first + u * kWarpSize;
      if (w < words) store_once(output + w, values[u]);
    }
  }
}

// Writes those of the kRowsPerWarp output rows from `begin` on that spread_words does not write.
__device__ __forceinline__ void fill_rows(const GatherRowsArgs& args, int64_t begin, int64_t words) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t s = begin + lane;
  const bool exists = lane < kRowsPerWarp && s < args.capacity;
  const int32_t n = exists ? args.source[s] : -1;
  const bool found = n >= 0 && n < args.tokens;
  const bool written = found && find_slot(args.slot + n * args.topk, args.topk, s) >= 0;
  for (unsigned left = __ballot_sync(kAllLanes, exists && !written); left != 0; left &= left - 1) {
    const int from = __ffs(left) - 1;
    const int64_t token = __shfl_sync(kAllLanes, found ? n : -1, from);
    const uint4* row = token >= 0 ? static_cast<const uint4*>(args.rows) + token * words : nullptr;
    uint4* output = static_cast<uint4*>(args.output) + (begin + from) * words;
    for (int64_t w = lane; w < words; w += kWordsOfSlot * kWarpSize) copy_words(row, output, w, words);
  }
}

// The same copy, if tokens write to their slots. `token_blocks` blocks write tokens, the others fill rows.
__global__ void __launch_bounds__(kThreads)
    spread_rows_kernel(GatherRowsArgs args, unsigned token_blocks, int64_t warps_per_token) {
  const int warp = threadIdx.x / kWarpSize;
  const int64_t words = args.row_bytes / static_cast<int64_t>(sizeof(uint4));
  if (blockIdx.x < token_blocks) {
    const int64_t units = args.tokens * warps_per_token;
    const int64_t step = static_cast<int64_t>(token_blocks) * kWarps;
    for (int64_t unit = static_cast<int64_t>(blockIdx.x) * kWarps + warp; unit < units; unit += step) {
      const int64_t n = unit / warps_per_token;
      const int64_t first = (unit - n * warps_per_token) * kWordsOfToken * kWarpSize;
      spread_words(args, n, first + threadIdx.x % kWarpSize, words);
    }
    return;
  }
  const int64_t step = static_cast<int64_t>(gridDim.x - token_blocks) * kWarps * kRowsPerWarp;
  for (int64_t begin = (static_cast<int64_t>(blockIdx.x - token_blocks) * kWarps + warp) * kRowsPerWarp;
       begin < args.capacity; begin += step) {
    fill_rows(args, begin, words);
  }
}

bool fits(const GatherRowsArgs& args, uint64_t bytes) {
  return static_cast<uint64_t>(args.row_bytes) % bytes == 0 &&
         reinterpret_cast<uint64_t>(args.rows) % bytes == 0 &&
         reinterpret_cast<uint64_t>(args.output) % bytes == 0;
}

template <typename Word>
void gather(const GatherRowsArgs& args, cudaStream_t stream) {
  const int64_t words = args.row_bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t warps_per_row = ceil_div(words, kWordsOfSlot * kWarpSize);
  const unsigned blocks = grid_size(args.capacity * warps_per_row, kWarps);
  gather_rows_kernel<Word><<<blocks, kThreads, 0, stream>>>(args, warps_per_row);
  check_launch("gather_rows_kernel");
}

void spread(const GatherRowsArgs& args, cudaStream_t stream) {
  const int64_t words = args.row_bytes / static_cast<int64_t>(sizeof(uint4));
  const int64_t warps_per_token = ceil_div(words, kWordsOfToken * kWarpSize);
  // Half of the largest grid each, so that the sum is a grid.
  constexpr unsigned kMostBlocks = 0x3fffffffu;
  const unsigned token_blocks = std::min(grid_size(args.tokens * warps_per_token, kWarps), kMostBlocks);
  const unsigned row_blocks = std::min(grid_size(args.capacity, kWarps * kRowsPerWarp), kMostBlocks);
  spread_rows_kernel<<<token_blocks + row_blocks, kThreads, 0, stream>>>(args, token_blocks, warps_per_token);
  check_launch("spread_rows_kernel");
}

}  // namespace

void launch_gather_rows(const GatherRowsArgs& args, void* stream) {
  if (args.capacity == 0 || args.row_bytes == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (!fits(args, 16)) {
    fits(args, 4) ? gather<uint32_t>(args, cuda_stream) : gather<uint8_t>(args, cuda_stream);
  } else if (args.slot && args.topk > 1 && args.topk <= kWarpSize) {
    spread(args, cuda_stream);
  } else {
    gather<uint4>(args, cuda_stream);
  }
}

}  // namespace transformer_plugin::routing

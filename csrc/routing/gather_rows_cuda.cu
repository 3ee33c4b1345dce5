// gather_rows on CUDA (routing/rows_args.h): rows [tokens, H], source [capacity], output [capacity, H]. Rows
// are copied as words, the widest that sizes and addresses allow. Blocks of 256 threads; one warp per 128
// words of an output row, or a thread per row of one word. Where each token is read once, and not once per slot: spread_rows_cuda.cu.
#include "routing/copy_words.cuh"

namespace transformer_plugin::routing {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

// output[s] = rows[source[s]]. `warps_per_row` warps copy a row.
template <typename Word>
__global__ void __launch_bounds__(kThreads) gather_rows_kernel(GatherRowsArgs args, int64_t warps_per_row) {
  const int64_t words = args.row_bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t units = args.written_rows() * warps_per_row;
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

template <typename Word>
__global__ void __launch_bounds__(kThreads) gather_words_kernel(GatherRowsArgs args) {
  const int64_t rows = args.written_rows(), step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t s = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; s < rows; s += step) {
    const int64_t n = args.source[s];
    const bool found = n >= 0 && n < args.tokens;
    static_cast<Word*>(args.output)[s] = found ? static_cast<const Word*>(args.rows)[n] : Word{};
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

template <typename Word>
void gather_words(const GatherRowsArgs& args, cudaStream_t stream) {
  gather_words_kernel<Word><<<grid_size(args.capacity, kThreads), kThreads, 0, stream>>>(args);
  check_launch("gather_words_kernel");
}

}  // namespace

void launch_gather_rows(const GatherRowsArgs& args, void* stream) {
  if (args.capacity == 0 || args.row_bytes == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.row_bytes == 4 && fits(args, 4)) return gather_words<uint32_t>(args, cuda_stream);
  if (args.row_bytes == 8 && fits(args, 8)) return gather_words<uint64_t>(args, cuda_stream);
  if (!fits(args, 16)) {
    fits(args, 4) ? gather<uint32_t>(args, cuda_stream) : gather<uint8_t>(args, cuda_stream);
  } else if (!launch_spread_rows(args, stream)) {
    gather<uint4>(args, cuda_stream);
  }
}

}  // namespace transformer_plugin::routing

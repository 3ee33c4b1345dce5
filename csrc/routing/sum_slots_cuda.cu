// CUDA kernels of sum_slots (routing/rows_args.h): rows [capacity, H], slot and weights [tokens, topk],
// output [tokens, H]. Blocks of 256 threads.
//   sum_slots_kernel        topk <= 32. A warp has 32 vectors of 16 bytes of one token; 256 single elements
//                           if widths or addresses do not allow vectors. Its lanes sort the token's slots by
//                           shuffles, then load their columns of up to 8 slots at once. Shared memory: the
//                           sorted slots and weights of each warp. Warps do not wait for each other.
//   sum_many_slots_kernel   topk > 32. One block per token; shared memory for its slots
#include "routing/rows_cuda.cuh"

namespace transformer_plugin::routing {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kRowsAtOnce = 8;

// How many words of a token a lane sums, one after the other.
template <int N>
constexpr int kWordsPerLane = N == 1 ? 8 : 1;

// A token's slots in ascending order, with their weights.
template <typename T>
struct SortedSlots {
  const int32_t* slots;
  const Sum<T>* scales;
  int count;
};

// Sorts the valid slots of token `n`, at most one per lane, into `slots` and `scales`, by counting for each
// how many come before it. Called by all lanes of a warp. Returns their number.
template <typename T>
__device__ __forceinline__ int sort_slots(const SumSlotsArgs& args, int64_t n, int32_t* slots,
                                          Sum<T>* scales) {
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = threadIdx.x % kWarpSize;
  const int topk = static_cast<int>(args.topk);
  const int64_t i = n * topk + lane;
  const int32_t s = lane < topk ? args.slot[i] : -1;
  const Sum<T> scale = lane < topk && args.weights ? static_cast<const Sum<T>*>(args.weights)[i] : Sum<T>(1);
  const bool valid = s >= 0 && s < args.capacity;
  const unsigned key = valid ? static_cast<unsigned>(s) : kAll;
  int rank = 0;
  for (int j = 0; j < topk; ++j) {
    const unsigned other = __shfl_sync(kAll, key, j);
    rank += other < key || (other == key && j < lane);
  }
  __syncwarp();  // all lanes have read the slots of the token before
  if (valid) {
    slots[rank] = s;
    scales[rank] = scale;
  }
  __syncwarp();
  return __popc(__ballot_sync(kAll, valid));
}

// The sum of the words at `column` of a token's slots.
template <typename T, int N>
__device__ __forceinline__ void sum_words(const SumSlotsArgs& args, int64_t n, int64_t column,
                                          SortedSlots<T> sorted) {
  using Word = typename Elements<T, N>::Word;
  const T* rows = static_cast<const T*>(args.rows) + column;
  const int64_t place = n * args.width + column;
  Elements<T, N> sum;
#pragma unroll
  for (int i = 0; i < N; ++i) sum.at[i] = 0;
  for (int first = 0; first < sorted.count; first += kRowsAtOnce) {
    Word words[kRowsAtOnce];
#pragma unroll
    for (int u = 0; u < kRowsAtOnce; ++u) {
      if (first + u >= sorted.count) continue;
      words[u] = load_once(reinterpret_cast<const Word*>(rows + sorted.slots[first + u] * args.width));
    }
#pragma unroll
    for (int u = 0; u < kRowsAtOnce; ++u) {
      if (first + u >= sorted.count) continue;
      const Elements<T, N> row(words[u]);
      const Sum<T> scale = sorted.scales[first + u];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        sum.at[i] = args.weights ? fused(scale, row.at[i], sum.at[i]) : sum.at[i] + row.at[i];
      }
    }
  }
  *reinterpret_cast<Word*>(static_cast<T*>(args.output) + place) = sum.rounded();
}

// `warps_per_token` warps sum the words of a token.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads) sum_slots_kernel(SumSlotsArgs args, int64_t warps_per_token) {
  __shared__ int32_t slots[kWarps][kWarpSize];
  __shared__ Sum<T> scales[kWarps][kWarpSize];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int64_t units = args.tokens * warps_per_token;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t unit = static_cast<int64_t>(blockIdx.x) * kWarps + warp; unit < units; unit += step) {
    const int64_t n = unit / warps_per_token;
    const int count = sort_slots<T>(args, n, slots[warp], scales[warp]);
    const int64_t first = (unit - n * warps_per_token) * kWordsPerLane<N> * kWarpSize + lane;
    for (int i = 0; i < kWordsPerLane<N>; ++i) {
      const int64_t column = (first + i * kWarpSize) * N;
      if (column < args.width) sum_words<T, N>(args, n, column, {slots[warp], scales[warp], count});
    }
  }
}

// One block per token: it sorts the token's slots by counting, then every thread sums its own columns.
template <typename T>
__global__ void sum_many_slots_kernel(SumSlotsArgs args) {
  __shared__ int32_t slots[kMaxTopk];
  __shared__ Sum<T> scales[kMaxTopk];
  __shared__ int count;
  for (int64_t n = blockIdx.x; n < args.tokens; n += gridDim.x) {
    __syncthreads();
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    const int32_t* own = args.slot + n * args.topk;
    for (int64_t k = threadIdx.x; k < args.topk; k += kThreads) {
      const int32_t s = own[k];
      if (s < 0 || s >= args.capacity) continue;
      int rank = 0;
      for (int64_t j = 0; j < args.topk; ++j) rank += own[j] >= 0 && (own[j] < s || (own[j] == s && j < k));
      slots[rank] = s;
      scales[rank] = args.weights ? static_cast<const Sum<T>*>(args.weights)[n * args.topk + k] : Sum<T>(1);
      atomicAdd(&count, 1);
    }
    __syncthreads();
    for (int64_t h = threadIdx.x; h < args.width; h += kThreads) {
      sum_words<T, 1>(args, n, h, {slots, scales, count});
    }
  }
}

template <typename T>
bool takes_vectors(const SumSlotsArgs& args) {
  return args.width % kVectorSize<T> == 0 && is_vector_aligned(args.rows) && is_vector_aligned(args.output);
}

template <typename T, int N>
void launch_words(const SumSlotsArgs& args, cudaStream_t stream) {
  const int64_t warps_per_token = ceil_div(args.width, int64_t{N} * kWordsPerLane<N> * kWarpSize);
  const unsigned blocks = grid_size(args.tokens * warps_per_token, kWarps);
  sum_slots_kernel<T, N><<<blocks, kThreads, 0, stream>>>(args, warps_per_token);
  check_launch("sum_slots_kernel");
}

template <typename T>
void launch(const SumSlotsArgs& args, cudaStream_t stream) {
  if (args.topk > kWarpSize) {
    sum_many_slots_kernel<T><<<grid_size(args.tokens, 1), kThreads, 0, stream>>>(args);
    return check_launch("sum_many_slots_kernel");
  }
  takes_vectors<T>(args) ? launch_words<T, kVectorSize<T>>(args, stream) : launch_words<T, 1>(args, stream);
}

}  // namespace

void launch_sum_slots(const SumSlotsArgs& args, void* stream) {
  if (args.tokens == 0 || args.width == 0) return;
  visit_device_real(
      args.dtype, [&](auto element) { launch<decltype(element)>(args, static_cast<cudaStream_t>(stream)); });
}

}  // namespace transformer_plugin::routing

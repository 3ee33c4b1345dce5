// Copies of rows by the words of a warp's lanes.
#pragma once

#include "routing/rows_cuda.cuh"

namespace transformer_plugin::routing {

inline constexpr int kWordsOfSlot = 4;  // that a lane copies at once

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

}  // namespace transformer_plugin::routing

// Element types of the row kernels on CUDA (routing/rows_args.h), and the elements that a lane loads at once.
#pragma once

#include <cstring>
#include <type_traits>

#include "common/device_types.cuh"
#include "common/launch.cuh"
#include "common/vectors.cuh"
#include "routing/rows_args.h"

namespace transformer_plugin::routing {

// The type of sums of T.
template <typename T>
using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
__device__ __forceinline__ Sum<T> load(T value) {
  if constexpr (std::is_same_v<T, double>) {
    return value;
  } else {
    return to_float(value);
  }
}

template <typename T>
__device__ __forceinline__ T round_once(Sum<T> value) {
  if constexpr (std::is_same_v<T, double>) {
    return value;
  } else {
    return from_float<T>(value);
  }
}

template <typename Fn>
void visit_device_real(DType dtype, Fn&& fn) {
  return dtype == DType::kFloat64 ? fn(double{}) : visit_device_float(dtype, fn);
}

// N neighboring elements of a row: 16 bytes, or one element where widths or addresses do not allow more.
template <typename T, int N>
struct Elements {
  static_assert(N == 1 || N == kVectorSize<T>);
  using Word = std::conditional_t<N == 1, T, uint4>;

  Sum<T> at[N];

  Elements() = default;
  __device__ __forceinline__ explicit Elements(Word word) {
    if constexpr (N == 1) {
      at[0] = load(word);
    } else if constexpr (std::is_same_v<T, double>) {
      memcpy(at, &word, sizeof(word));
    } else {
      const Floats<T> floats(word);
#pragma unroll
      for (int i = 0; i < N; ++i) at[i] = floats.at[i];
    }
  }

  __device__ __forceinline__ Word rounded() const {
    if constexpr (N == 1) {
      return round_once<T>(at[0]);
    } else if constexpr (std::is_same_v<T, double>) {
      Word word;
      memcpy(&word, at, sizeof(word));
      return word;
    } else {
      Floats<T> floats;
#pragma unroll
      for (int i = 0; i < N; ++i) floats.at[i] = at[i];
      return floats.rounded();
    }
  }
};

// Loads a word that no thread reads again.
template <typename Word>
__device__ __forceinline__ Word load_once(const Word* word) {
  if constexpr (std::is_same_v<Word, uint4>) {
    return __ldcs(word);
  } else {
    return *word;
  }
}

}  // namespace transformer_plugin::routing

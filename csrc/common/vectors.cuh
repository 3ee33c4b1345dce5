// 16-byte vectors of a float type, and their values as floats.
#pragma once

#include <cstring>

#include "common/device_types.cuh"

namespace transformer_plugin {

template <typename T>
inline constexpr int kVectorSize = 16 / sizeof(T);

inline bool is_vector_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <typename T>
struct Floats {
  float at[kVectorSize<T>];

  Floats() = default;
  __device__ __forceinline__ explicit Floats(uint4 vector) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {  // the upper half of a float: one instruction each
      const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        at[2 * i] = __uint_as_float(words[i] << 16);
        at[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      }
    } else {
      T values[kVectorSize<T>];
      memcpy(values, &vector, sizeof(vector));
#pragma unroll
      for (int i = 0; i < kVectorSize<T>; ++i) at[i] = to_float(values[i]);
    }
  }

  // Rounds to nearest, two values per instruction where there is one.
  __device__ __forceinline__ uint4 rounded() const {
    uint4 vector;
    if constexpr (std::is_same_v<T, float>) {
      memcpy(&vector, at, sizeof(vector));
    } else {
      using Two = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
      Two twos[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (std::is_same_v<T, __half>) twos[i] = __floats2half2_rn(at[2 * i], at[2 * i + 1]);
        if constexpr (std::is_same_v<T, __nv_bfloat16>)
          twos[i] = __floats2bfloat162_rn(at[2 * i], at[2 * i + 1]);
      }
      memcpy(&vector, twos, sizeof(vector));
    }
    return vector;
  }
};

}  // namespace transformer_plugin

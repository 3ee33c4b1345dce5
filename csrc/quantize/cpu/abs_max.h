// Largest magnitudes computed on the bits of floats, which order like the floats; twice as many 16-bit values
// fit a vector.
#pragma once

#include <cstring>
#include <limits>
#include <type_traits>

#include "quantize/cpu/tile.h"

namespace transformer_plugin::quantize {

template <typename T>
using Bits = std::conditional_t<sizeof(T) == 2, int16_t, int32_t>;

// The bits of |value|; 0 for NaN.
template <typename T>
TP_HOST_DEVICE Bits<T> bits_of(T value) {
  constexpr int32_t infinity = std::is_same_v<T, float>       ? 0x7f800000
                               : std::is_same_v<T, c10::Half> ? 0x7c00
                                                              : 0x7f80;
  Bits<T> bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits &= std::numeric_limits<Bits<T>>::max();
  return bits > infinity ? Bits<T>{0} : bits;
}

template <typename T>
float float_of_bits(Bits<T> bits) {
  T value;
  std::memcpy(static_cast<void*>(&value), &bits, sizeof(value));
  return static_cast<float>(value);
}

// Inlined into loops that are compiled for each instruction set.
template <typename T>
TP_HOST_DEVICE Bits<T> largest_bits(const T* values, int64_t count) {
  Bits<T> largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, bits_of(values[i]));
  return largest;
}

}  // namespace transformer_plugin::quantize

// Largest magnitudes of floats as they lie in memory: they order like their bits, and those of 16-bit floats fit twice as
// many into a vector.
#pragma once

#include <cstring>
#include <limits>
#include <type_traits>

#include "quantize/cpu/tile.h"

namespace transformer_plugin::quantize {

template <typename T>
using Bits = std::conditional_t<sizeof(T) == 2, int16_t, int32_t>;

// Of |value|; 0 of a NaN.
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

// For loops that are compiled for each instruction set.
template <typename T>
TP_HOST_DEVICE Bits<T> largest_bits(const T* values, int64_t count) {
  Bits<T> largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, bits_of(values[i]));
  return largest;
}

}  // namespace transformer_plugin::quantize

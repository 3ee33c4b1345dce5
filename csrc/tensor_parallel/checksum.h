#pragma once

#include <cstdint>

namespace transformer_plugin::tensor_parallel {

// FNV-1a over 64-bit numbers, without the sign bit.
class Checksum {
 public:
  void add(int64_t number) { value_ = (value_ ^ static_cast<uint64_t>(number)) * 1099511628211u; }
  int64_t value() const { return static_cast<int64_t>(value_ >> 1); }

 private:
  uint64_t value_ = 14695981039346656037u;
};

}  // namespace transformer_plugin::tensor_parallel

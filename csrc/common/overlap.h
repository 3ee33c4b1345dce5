// Whether tensors share memory (common/buffers.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace transformer_plugin {

struct Bytes {
  uintptr_t begin, end;
};

// From the first to the last element; empty for a tensor without elements.
Bytes bytes_of(const at::Tensor& tensor);
// Whether two matrices are different columns of one buffer.
bool side_by_side(const at::Tensor& x, const at::Tensor& y);
inline bool have_none_in_common(const Bytes& x, const Bytes& y) {
  return x.end <= y.begin || y.end <= x.begin;
}

}  // namespace transformer_plugin

// A tensor [..., K] as a matrix, and back.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

namespace transformer_plugin::gemm {

// `like`'s leading dimensions, then `columns`.
inline c10::SymDimVector with_columns(const at::Tensor& like, const c10::SymInt& columns) {
  c10::SymDimVector sizes(like.sym_sizes());
  sizes.back() = columns;
  return sizes;
}

// All leading dimensions as one.
inline at::Tensor as_matrix(const at::Tensor& tensor) {
  if (tensor.dim() == 2) return tensor;
  c10::SymInt rows = 1;
  for (int64_t d = 0; d + 1 < tensor.dim(); ++d) rows = rows * tensor.sym_size(d);
  return tensor.reshape_symint({rows, tensor.sym_size(-1)});
}

inline at::Tensor from_matrix(const at::Tensor& matrix, const at::Tensor& like) {
  return like.dim() == 2 ? matrix : matrix.view_symint(with_columns(like, matrix.sym_size(1)));
}

}  // namespace transformer_plugin::gemm

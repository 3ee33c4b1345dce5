// A quantized matrix, as ops and layers pass it on.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "common/format.h"

namespace transformer_plugin {

// A matrix, a stack of matrices or a ragged matrix in a number format.
struct Quantized {
  at::Tensor data;
  at::Tensor scale;  // scale_inv; undefined where the format has none
  at::Tensor amax;   // NVFP4; otherwise undefined
  Format format = {};
  std::string_view key = "none";  // what `format` was parsed from
  bool transposed = false;        // columnwise: `data` holds the transposed matrix
  // Row i of the matrix is row_index[i] of `data`; undefined: row i. Not where quantized.
  at::Tensor row_index = {};

  // Sizes of the matrix in elements. Of a ragged matrix with aligned groups, `rows` are those of the aligned data.
  c10::SymInt rows() const { return transposed ? row_length() : data.sym_size(-2); }
  c10::SymInt columns() const { return transposed ? data.sym_size(-2) : row_length(); }
  // The elements in a row of `data`; packed formats store several in a byte.
  c10::SymInt row_length() const {
    const c10::SymInt size = data.sym_size(-1);
    return format.packing() > 1 ? size * format.packing() : size;
  }
};

// As the dispatcher passes `Tensor[]?`.
using OptionalList = std::optional<at::TensorList>;
inline at::TensorList list_or_none(OptionalList list) { return list.value_or(at::TensorList()); }

}  // namespace transformer_plugin

// The sizes and dtypes of a quantized matrix's data and scales.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/SmallVector.h>

#include <optional>

#include "common/format.h"
#include "quantize/args/layout.h"

namespace transformer_plugin::quantize {

using SymSizes = c10::SmallVector<c10::SymInt, 3>;
using OptionalTensor = std::optional<at::Tensor>;
inline const OptionalTensor kNoTensor = std::nullopt;

// The shape of a matrix, of a stack of matrices (3-D), or of a ragged matrix, before quantization.
struct MatrixShape {
  std::optional<c10::SymInt> matrices;  // of a stack
  c10::SymInt rows;
  c10::SymInt cols;
  std::optional<c10::SymInt> groups;  // of a ragged matrix

  SymSizes value_sizes() const;
  SymSizes data_sizes(const Format& format, bool transposed) const;
  SymSizes scale_sizes(const Format& format, bool transposed) const;
  // Of the amax argument, for formats that take one.
  SymSizes amax_sizes(const Format& format, bool transposed) const;
};

// The shape of a tensor of sizes [rows, cols] or [matrices, rows, cols]; [cols, rows] with `transposed`.
MatrixShape matrix_shape(const at::Tensor& tensor, bool transposed, const at::Tensor* group_sizes);
// The shape of a computed matrix, ragged with group sizes.
MatrixShape matrix_shape(const c10::SymInt& rows, const c10::SymInt& cols, const OptionalTensor& group_sizes);
// The shape of the matrix that was quantized to this data.
MatrixShape shape_of_data(const at::Tensor& data, const Format& format, bool transposed,
                          const at::Tensor* group_sizes);

// Elements in a row of transposed data of a ragged matrix with aligned groups.
c10::SymInt length_of_aligned(const c10::SymInt& rows, const c10::SymInt& groups);

// The tensor, or null.
inline const at::Tensor* pointer_to(const OptionalTensor& tensor) { return tensor ? &*tensor : nullptr; }

// The dtypes of data and scales.
at::ScalarType element_dtype(const Format& format);
at::ScalarType scale_dtype(const Format& format);
// E8M0 scales may come as bytes: torch's compiler cannot trace an op that writes an argument and takes that dtype.
at::Tensor typed_scale(const at::Tensor& scale, const Format& format);
// Of a format with row scales k1x128, as which it is dequantized; the kernels that quantize to it have no tiles.
ScaleGranularity scale_granularity(const Format& format);
// Whether the format scales by a per-tensor or per-row amax, which the caller may pass.
bool takes_amax(const Format& format);

}  // namespace transformer_plugin::quantize

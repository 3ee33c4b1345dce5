// The checks of the tensors that quantize ops read: matrices, quantized data, scales and amaxes.
#pragma once

#include <string_view>

#include "common/check.h"
#include "quantize/ops/matrix_shape.h"

namespace transformer_plugin::quantize {

// The format of a key, which must have `trait`; square blocks only if `allow_square`.
Format quantized_format(const char* op, const char* argument, std::string_view key, bool allow_square,
                        bool FormatFamilyTraits::*trait = &FormatFamilyTraits::has_scales);
// The format of a key for an op that computes and quantizes.
inline Format fused_format(const char* op, const char* argument, std::string_view key, bool allow_square) {
  return quantized_format(op, argument, key, allow_square, &FormatFamilyTraits::has_fused_ops);
}
// Refuses columns of a ragged matrix in a format where one scale for each column would span the groups.
void check_group_columns(const char* op, const char* argument, const Format& format, bool columns,
                         const at::Tensor* group_sizes);

// Kernels count rows, columns, matrices and tiles in 32 bits. Symbolic sizes are not checked.
void check_tile_count(const Argument& argument, const MatrixShape& shape);
// The input of an op: 2 or 3 dimensions, or 2 with group sizes; a float dtype; a width that is a multiple of
// the format's block, and for transposed data such a number of rows.
void check_matrix(const Argument& input, const at::Tensor* group_sizes, const Format& format,
                  bool transposed = false);
inline constexpr const char* kPad = "Pad it with zeros, for example with torch.nn.functional.pad";
// The number of rows for transposed data.
void check_block_rows(const Argument& input, const Format& format, const char* advice = kPad);
// The row length of transposed data in the `aligned` layout.
void check_aligned(const Argument& data, const Format& format, const at::Tensor* group_sizes);
// A whole number of blocks in the last dimension of packed data.
void check_packing(const Argument& data, const Format& format);
// Quantized data of 2 or 3 dimensions, or 2 with group sizes, in the format's dtype.
void check_data(const Argument& data, const at::Tensor* group_sizes, const Format& format,
                bool transposed = false);
// Checks dtype, device and sizes of the scales of `data`.
void check_scale(const Argument& scale, const Argument& data, const Format& format, const SymSizes& sizes);

// The amax argument of a format that takes one: float32, with certain sizes, on the device of the data.
struct AmaxArgument {
  const char* name;
  const OptionalTensor& tensor;
  bool transposed;  // of the columns
  bool required;
  // For an op that quantizes an intermediate result: text for errors that says what it is and how to do
  // without its amax. Or null.
  const char* intermediate = nullptr;
};
void check_amax(const Argument& data, const AmaxArgument& amax, std::string_view key, const SymSizes& sizes);
// Refuses an argument that the format does not use.
void check_unused(const char* op, const char* name, const OptionalTensor& tensor, std::string_view key);

// A flag: float32 [1] on the device of the data.
void check_noop(const Argument& noop, const Argument& data);

}  // namespace transformer_plugin::quantize

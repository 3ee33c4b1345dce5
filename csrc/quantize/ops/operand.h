// The shapes of a quantized operand's data and scales, the checks of its tensors, and the layout that kernels
// use.
#pragma once

#include <c10/core/SymInt.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <string_view>

#include "common/check.h"
#include "common/format.h"
#include "quantize/args/layout.h"

namespace transformer_plugin::quantize {

using SymSizes = c10::SmallVector<c10::SymInt, 3>;
using OptionalTensor = std::optional<at::Tensor>;
inline const OptionalTensor kNotGiven = std::nullopt;

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
// The shape of the matrix that was quantized to this data.
MatrixShape shape_of_data(const at::Tensor& data, const Format& format, bool transposed,
                          const at::Tensor* group_sizes);

// The format of a key, which must have scales; square blocks only if `allow_square`.
Format quantized_format(const char* op, const char* argument, std::string_view key, bool allow_square);

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

// The table of row tiles of a ragged matrix, on the device of the data. Undefined without groups.
struct GroupTables {
  at::Tensor storage;                    // int32: the table of RowTile, the strips, and the offsets
  int64_t groups = 0;                    // 1 if the table is merged
  const int32_t* offsets = nullptr;      // [groups + 1] in `storage`: first rows of groups
  const RowStrip* row_strips = nullptr;  // in `storage`, as in Layout
};

// What the table must distinguish.
enum class GroupUse {
  kEach,  // the result depends on the group of a row: each group begins a row tile
  kAll,   // it does not: row tiles are those of one group that holds all rows of groups
};
// For row-wise data of this format, and for transposed data with or without it.
GroupUse group_use(const Format& format, bool transposed);

// Group sizes must be multiples of `multiple`; checked on CPU only.
GroupTables group_tables(const Argument& data, const at::Tensor* group_sizes, int64_t rows,
                         int64_t multiple = 1, GroupUse use = GroupUse::kEach);
// That multiple, for transposed data or for row-wise data only.
int64_t group_multiple(const Format& format, bool transposed);
// Checks the values of group sizes on a CPU, before anything is written; on a GPU, the errors that earlier
// calls reported.
void check_group_values(const Argument& data, const at::Tensor& group_sizes, int64_t multiple);
// The same for a buffer of `rows` rows, which transposed data does not determine.
void check_group_values_of(const Argument& data, int64_t rows, const at::Tensor& group_sizes,
                           int64_t multiple);
// The dtypes of data and scales.
at::ScalarType element_dtype(const Format& format);
at::ScalarType scale_dtype(const Format& format);

// Checks dtype, device and sizes of the scales of `data`.
void check_scale(const Argument& scale, const Argument& data, const Format& format, const SymSizes& sizes);

// Whether the format scales by a per-tensor or per-row amax, which the caller may pass.
bool takes_amax(const Format& format);
// The amax argument of such a format: float32, with the given sizes, on the device of the data.
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
void check_not_given(const char* op, const char* name, const OptionalTensor& tensor, std::string_view key);

// A flag: float32 [1] on the device of the data.
void check_noop(const Argument& noop, const Argument& data);

// For NVFP4: elements times the scales of their blocks, which is exact in bfloat16, without the global
// factor. Checked operands on a CPU or a GPU (dequantize.cpp).
at::Tensor dequantize_without_amax(const at::Tensor& data, const at::Tensor& scale_inv,
                                   const at::Tensor* group_sizes, const Format& format, at::ScalarType dtype,
                                   bool transposed);
// The values of one matrix of a stack, into `values` [rows, columns], contiguous. Checked operands on a CPU;
// callable from any thread.
void dequantize_matrix(const at::Tensor& data, const at::Tensor& scale_inv, const OptionalTensor& amax,
                       const Format& format, int64_t matrix, const at::Tensor& values);

Layout make_layout(const MatrixShape& shape, const Format& format, const GroupTables& tables);

}  // namespace transformer_plugin::quantize

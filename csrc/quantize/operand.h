// The torch side of a quantized operand: its format, the sizes of its data and scales, the layout kernels
// walk.
#pragma once

#include <c10/core/SymInt.h>

#include <optional>
#include <string_view>
#include <vector>

#include "common/check.h"
#include "common/format.h"
#include "quantize/tiles.h"

namespace transformer_plugin::quantize {

using SymSizes = std::vector<c10::SymInt>;
using OptionalTensor = std::optional<at::Tensor>;
inline const OptionalTensor kNotGiven = std::nullopt;

// A matrix, a stack of matrices, or a ragged matrix, before quantization.
struct Operand {
  std::optional<c10::SymInt> members;  // of a stack
  c10::SymInt rows;
  c10::SymInt cols;
  std::optional<c10::SymInt> groups;  // of a ragged matrix

  SymSizes data_sizes(bool transposed) const;
  SymSizes scale_sizes(const Format& format, bool transposed) const;
  // Of the largest magnitudes that the format scales by, where it takes them from outside.
  SymSizes amax_sizes(const Format& format, bool transposed) const;
};

// The operand of sizes [rows, cols] or [members, rows, cols]; [cols, rows] with `transposed`.
Operand operand_of(const at::Tensor& tensor, bool transposed, const at::Tensor* group_sizes);

// A format with scales; square blocks only when `square` is allowed.
Format quantized_format(const char* op, const char* argument, std::string_view key, bool allow_square);

// The input of an op: 2 or 3 dimensions, or 2 with group sizes; a float dtype; a width that the format takes.
void check_matrix(const Argument& input, const at::Tensor* group_sizes, const Format& format);

// The row tiles of a ragged matrix, on the device of the data. Undefined without groups.
struct GroupTables {
  at::Tensor storage;  // int32: the table of RowTile, then what it was made from
};

GroupTables group_tables(const Argument& data, const at::Tensor* group_sizes, int64_t rows);
// What data and scales are kept in.
at::ScalarType element_dtype(const Format& format);
at::ScalarType scale_dtype(const Format& format);

// Dtype, device and sizes of the scales of `data`.
void check_scale(const Argument& scale, const Argument& data, const Format& format, const SymSizes& sizes);

// Whether the format scales by largest magnitudes of more than a block, which may come from outside.
bool takes_amax(const Format& format);
// The amax argument of such a format: float32, of these sizes, on the device of the data. May be missing.
void check_amax(const Argument& data, const char* name, const OptionalTensor& amax, std::string_view key,
                const SymSizes& sizes);
// An argument that the format has no use for.
void check_not_given(const char* op, const char* name, const OptionalTensor& tensor, std::string_view key);

// A flag: float32 [1] on the device of the data.
void check_noop(const Argument& noop, const Argument& data);

Layout make_layout(const Operand& operand, const Format& format, const GroupTables& tables);

}  // namespace transformer_plugin::quantize

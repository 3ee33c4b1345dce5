// The torch side of a quantized operand: its format, the sizes of its data and scales, the layout kernels
// walk.
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

// A matrix, a stack of matrices, or a ragged matrix, before quantization.
struct Operand {
  std::optional<c10::SymInt> members;  // of a stack
  c10::SymInt rows;
  c10::SymInt cols;
  std::optional<c10::SymInt> groups;  // of a ragged matrix

  SymSizes value_sizes() const;
  SymSizes data_sizes(const Format& format, bool transposed) const;
  SymSizes scale_sizes(const Format& format, bool transposed) const;
  // Of the largest magnitudes that the format scales by, where it takes them from outside.
  SymSizes amax_sizes(const Format& format, bool transposed) const;
};

// The operand of sizes [rows, cols] or [members, rows, cols]; [cols, rows] with `transposed`.
Operand operand_of(const at::Tensor& tensor, bool transposed, const at::Tensor* group_sizes);
// The one that became this data.
Operand operand_of_data(const at::Tensor& data, const Format& format, bool transposed,
                        const at::Tensor* group_sizes);

// A format with scales; square blocks only when `square` is allowed.
Format quantized_format(const char* op, const char* argument, std::string_view key, bool allow_square);

// Kernels count rows, columns, matrices and tiles in 32 bits. Of sizes that are numbers.
void check_walk(const Argument& argument, const Operand& operand);
// The input of an op: 2 or 3 dimensions, or 2 with group sizes; a float dtype; a width that the format takes, and as
// many rows where there is to be transposed data.
void check_matrix(const Argument& input, const at::Tensor* group_sizes, const Format& format,
                  bool transposed = false);
inline constexpr const char* kPad = "Pad it with zeros, for example with torch.nn.functional.pad";
// As many rows as transposed data takes.
void check_block_rows(const Argument& input, const Format& format, const char* advice = kPad);
// Transposed data of aligned groups: as long as a line of them can be.
void check_aligned(const Argument& data, const Format& format, const at::Tensor* group_sizes);
// A whole number of blocks in the last dimension, where elements are packed.
void check_packing(const Argument& data, const Format& format);
// Quantized data of 2 or 3 dimensions, or 2 with group sizes, in the format's dtype.
void check_data(const Argument& data, const at::Tensor* group_sizes, const Format& format,
                bool transposed = false);

// The row tiles of a ragged matrix, on the device of the data. Undefined without groups.
struct GroupTables {
  at::Tensor storage;                // int32: the table of RowTile, then what it was made from
  int64_t groups = 0;                // one for all of them where the table is merged
  const int32_t* offsets = nullptr;  // in it, [groups + 1]: rows where groups begin
  const Window* windows = nullptr;   // in it, as in Layout
};

// What a table is for.
enum class GroupUse {
  kEach,  // something depends on which group a row is in: each begins a row tile
  kAll,   // nothing does: row tiles are those of one group that holds all rows of groups
};
// Of rows in this format, beside transposed data of them or by themselves.
GroupUse group_use(const Format& format, bool transposed);

// `multiple` is what sizes must be a multiple of, which only a CPU can see.
GroupTables group_tables(const Argument& data, const at::Tensor* group_sizes, int64_t rows,
                         int64_t multiple = 1, GroupUse use = GroupUse::kEach);
// What it is for transposed data, or else.
int64_t group_multiple(const Format& format, bool transposed);
// The values of group sizes on a CPU, before anything is written; of a GPU, what it noticed in earlier calls.
void check_group_values(const Argument& data, const at::Tensor& group_sizes, int64_t multiple);
// The same of a buffer of so many rows, which data that lie along columns do not say.
void check_group_values_of(const Argument& data, int64_t rows, const at::Tensor& group_sizes,
                           int64_t multiple);
// What data and scales are kept in.
at::ScalarType element_dtype(const Format& format);
at::ScalarType scale_dtype(const Format& format);

// Dtype, device and sizes of the scales of `data`.
void check_scale(const Argument& scale, const Argument& data, const Format& format, const SymSizes& sizes);

// Whether the format scales by largest magnitudes of more than a block, which may come from outside.
bool takes_amax(const Format& format);
// The amax argument of such a format: float32, of these sizes, on the device of the data.
struct AmaxArgument {
  const char* name;
  const OptionalTensor& tensor;
  bool transposed;  // of the columns
  bool required;
  // For an op that quantizes what it makes: what that is, and what to do without an amax of it. Or null.
  const char* made = nullptr;
};
void check_amax(const Argument& data, const AmaxArgument& amax, std::string_view key, const SymSizes& sizes);
// An argument that the format has no use for.
void check_not_given(const char* op, const char* name, const OptionalTensor& tensor, std::string_view key);

// A flag: float32 [1] on the device of the data.
void check_noop(const Argument& noop, const Argument& data);

// Of NVFP4: elements times their blocks' scales, which is exact in bfloat16, without what the amax stands for. Checked
// operands on a CPU or a GPU (dequantize.cpp).
at::Tensor dequantize_without_amax(const at::Tensor& data, const at::Tensor& scale_inv,
                                   const at::Tensor* group_sizes, const Format& format, at::ScalarType dtype,
                                   bool transposed);
// The values of one matrix of a stack, into `values` [rows, columns], contiguous. Checked operands on a CPU; from any
// thread.
void dequantize_member(const at::Tensor& data, const at::Tensor& scale_inv, const OptionalTensor& amax,
                       const Format& format, int64_t member, const at::Tensor& values);

Layout make_layout(const Operand& operand, const Format& format, const GroupTables& tables);

}  // namespace transformer_plugin::quantize

// Checks of matrices and of quantized data (quantize/ops/checks.h).
#include "quantize/ops/checks.h"

#include <limits>

#include "quantize/ops/group_tables.h"

namespace transformer_plugin::quantize {
namespace {

void check_matrix_dim(const Argument& matrix, const at::Tensor* group_sizes) {
  if (group_sizes) {
    check_dim(matrix, 2);
    check_group_sizes({matrix.op, "group_sizes", *group_sizes}, matrix);
  } else {
    TP_CHECK_VALUE(matrix.tensor.dim() == 2 || matrix.tensor.dim() == 3, matrix.op, matrix.name,
                   "2 or 3 dimensions", describe(matrix.tensor), "Reshape it first");
  }
}

}  // namespace

Format quantized_format(const char* op, const char* argument, std::string_view key, bool allow_square,
                        bool FormatFamilyTraits::*trait) {
  const Format format = parse_format(op, argument, key);
  TP_CHECK_VALUE(format.is_quantized(), op, argument, "a format with scales, " << families_with(trait),
                 "'" << key << "'", "Use the unquantized tensor, or convert it with .to()");
  TP_CHECK_VALUE(format.traits().*trait, op, argument, families_with(trait), "'" << key << "'",
                 "Call quantize, which takes " << format.traits().name);
  TP_CHECK_VALUE(allow_square || !format.square_blocks, op, argument,
                 "blocks along a row for a ragged matrix, whose groups do not end on square blocks",
                 "'" << key << "'", "Leave out 'square'");
  return format;
}

void check_group_columns(const char* op, const char* argument, const Format& format, bool columns,
                         const at::Tensor* group_sizes) {
  TP_CHECK_VALUE(format.traits().has_group_columns || !columns || !group_sizes, op, argument,
                 "False for " << format.traits().name << " with group sizes", "True",
                 "Compute weight gradients from the unquantized matrix, or quantize it to another format");
}

void check_tile_count(const Argument& argument, const MatrixShape& shape) {
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  double tiles = 1;  // a double: the product may not fit 64 bits
  const auto count = [&](const c10::SymInt& size, const char* what, int64_t of_each, int64_t more) {
    const auto number = size.maybe_as_int();
    if (!number) return;  // symbolic while tracing: checked when the trace runs
    TP_CHECK_VALUE(*number >= 0 && *number <= most, argument.op, argument.name, "at most 2^31 - 1 " << what,
                   describe(argument.tensor), "Split the call");
    tiles *= static_cast<double>(ceil_div(*number, of_each) + more);
  };
  if (shape.matrices) count(*shape.matrices, "matrices", 1, 0);
  count(shape.rows, "rows", kTile, shape.groups ? shape.groups->maybe_as_int().value_or(0) : 0);
  count(shape.cols, "columns", kTile, 0);
  TP_CHECK_VALUE(tiles <= static_cast<double>(most), argument.op, argument.name,
                 "at most 2^31 - 1 tiles of " << kTile << " rows and columns", describe(argument.tensor),
                 "Split the call");
}

void check_matrix(const Argument& input, const at::Tensor* group_sizes, const Format& format,
                  bool transposed) {
  check_dtype(input, kFloatTypes);
  check_matrix_dim(input, group_sizes);
  check_tile_count(input, matrix_shape(input.tensor, false, group_sizes));
  const int64_t block = format.block_size();
  if (block == 1) return;
  TP_CHECK_VALUE(input.tensor.sym_size(-1) % block == 0, input.op, input.name,
                 "a last dimension that is a multiple of " << block << ", the block of "
                                                           << (format.is_nv() ? "nvfp4" : "mxfp8"),
                 describe(input.tensor), kPad);
  if (transposed) check_block_rows(input, format);
}

void check_block_rows(const Argument& input, const Format& format, const char* advice) {
  const int64_t multiple = group_multiple(format, true);
  if (multiple == 1) return;
  TP_CHECK_VALUE(
      input.tensor.sym_size(-2) % multiple == 0, input.op, input.name,
      "a number of rows that is a multiple of " << multiple << ", the block of nvfp4 in transposed data",
      describe(input.tensor), advice);
}

void check_data(const Argument& data, const at::Tensor* group_sizes, const Format& format, bool transposed) {
  check_dtype(data, {element_dtype(format)});
  check_matrix_dim(data, group_sizes);
  check_packing(data, format);
  if (transposed) check_aligned(data, format, group_sizes);
  check_tile_count(data, shape_of_data(data.tensor, format, transposed, group_sizes));
}

void check_aligned(const Argument& data, const Format& format, const at::Tensor* group_sizes) {
  if (!format.aligned_groups || !group_sizes) return;
  const c10::SymInt length = data.tensor.sym_size(-1), least = length_of_aligned(0, group_sizes->sym_size(0));
  TP_CHECK_VALUE(
      length >= least && length % kAlignedRows == 0, data.op, data.name,
      "rows of aligned groups, a multiple of " << kAlignedRows << " elements and at least " << least,
      describe(data.tensor), "Pass data as the quantize ops return it for the same format");
}

void check_packing(const Argument& data, const Format& format) {
  TP_CHECK_VALUE(!format.is_nv() || data.tensor.sym_size(-1) % (kNvBlock / 2) == 0, data.op, data.name,
                 "a last dimension that is a multiple of 8 bytes, the block of nvfp4", describe(data.tensor),
                 "Pass data as the quantize ops return it");
}

void check_scale(const Argument& scale, const Argument& data, const Format& format, const SymSizes& sizes) {
  check_dtype(scale, {scale_dtype(format)});
  check_same_device(scale, data);
  check_dim(scale, static_cast<int64_t>(sizes.size()));
  for (size_t d = 0; d < sizes.size(); ++d) {
    check_size(scale, static_cast<int64_t>(d), sizes[d], "what the format gives data of this size");
  }
}

void check_amax(const Argument& data, const AmaxArgument& amax, std::string_view key, const SymSizes& sizes) {
  if (!amax.tensor && !amax.required) return;
  const auto wanted = [&] {
    std::ostringstream text;
    text << "sizes " << c10::SymIntArrayRef(sizes) << ", the largest magnitudes that '" << key
         << "' scales by";
    return text.str();
  };
  const auto advice = [&] {
    return std::string("Compute it with transformer_plugin.ops.amax") +
           (amax.transposed ? " and columnwise=True" : "") +
           (amax.intermediate ? std::string(" of ") + amax.intermediate : "");
  };
  TP_CHECK_VALUE(amax.tensor, data.op, amax.name, "a float32 tensor of " << wanted(), "None", advice());
  const Argument argument{data.op, amax.name, *amax.tensor};
  check_dtype(argument, {at::kFloat});
  check_same_device(argument, data);
  bool fits = amax.tensor->dim() == static_cast<int64_t>(sizes.size());
  for (size_t d = 0; fits && d < sizes.size(); ++d) {
    fits = amax.tensor->sym_size(static_cast<int64_t>(d)) == sizes[d];
  }
  TP_CHECK_VALUE(fits, data.op, amax.name, wanted(), describe(*amax.tensor), advice());
}

void check_unused(const char* op, const char* name, const OptionalTensor& tensor, std::string_view key) {
  TP_CHECK_VALUE(!tensor, op, name, "None for '" << key << "', which has no use for it", describe(*tensor),
                 "Leave it out");
}

void check_noop(const Argument& noop, const Argument& data) {
  check_dtype(noop, {at::kFloat});
  check_same_device(noop, data);
  check_dim(noop, 1);
  check_size(noop, 0, 1, "one flag: 1 leaves every byte unchanged");
}

}  // namespace transformer_plugin::quantize

// Shapes, checks and layouts of quantized operands (quantize/ops/operand.h).
#include "quantize/ops/operand.h"

#include <limits>

#include "common/group_offsets.h"
#include "common/tensor.h"

namespace transformer_plugin::quantize {
namespace {

// Arithmetic on SymInts is slow even if they hold plain integers.
c10::SymInt blocks(const c10::SymInt& size) {
  if (const auto number = size.maybe_as_int()) return ceil_div(*number, kTile);
  return (size + (kTile - 1)) / kTile;
}
c10::SymInt up_to_4(const c10::SymInt& size) {
  if (const auto number = size.maybe_as_int()) return round_up_4(*number);
  return (size + 3) / 4 * 4;
}

c10::SymInt length_of_aligned(const c10::SymInt& rows, const c10::SymInt& groups) {
  const auto number = rows.maybe_as_int(), count = groups.maybe_as_int();
  if (number && count) return aligned_length(*number, *count);
  return (rows + (kAlignedRows - 1)) / kAlignedRows * kAlignedRows + (groups + 1) * kAlignedRows;
}

ScaleGranularity scale_granularity(const Format& format) {
  if (format.family == FormatFamily::kFp8Tensor) return ScaleGranularity::kPerTensor;
  if (format.family == FormatFamily::kMxFp8) return ScaleGranularity::k1x32;
  if (format.is_nv()) return ScaleGranularity::k1x16;
  return format.square_blocks ? ScaleGranularity::k128x128 : ScaleGranularity::k1x128;
}

}  // namespace

SymSizes MatrixShape::value_sizes() const {
  SymSizes sizes = {rows, cols};
  if (matrices) sizes.insert(sizes.begin(), *matrices);
  return sizes;
}

SymSizes MatrixShape::data_sizes(const Format& format, bool transposed) const {
  SymSizes sizes = transposed ? SymSizes{cols, rows} : SymSizes{rows, cols};
  if (transposed && groups && format.aligned_groups) sizes[1] = length_of_aligned(rows, *groups);
  if (format.packing() > 1) sizes[1] = sizes[1] / format.packing();
  if (matrices) sizes.insert(sizes.begin(), *matrices);
  return sizes;
}

SymSizes MatrixShape::scale_sizes(const Format& format, bool transposed) const {
  const ScaleGranularity granularity = scale_granularity(format);
  if (granularity == ScaleGranularity::kPerTensor) return amax_sizes(format, transposed);
  const c10::SymInt& length = transposed ? rows : cols;  // the dimension along which blocks lie
  const c10::SymInt& other = transposed ? cols : rows;
  SymSizes sizes;
  if (granularity == ScaleGranularity::k1x128) {
    sizes = {blocks(length), up_to_4(other)};
    if (groups && transposed) sizes[0] = sizes[0] + *groups;
  } else if (granularity == ScaleGranularity::k1x32) {
    const c10::SymInt tiles = groups && transposed ? blocks(length) + *groups : blocks(length);
    sizes = {blocks(other) * kTile, tiles * kMxBlocksPerRow};
  } else if (granularity == ScaleGranularity::k1x16) {
    const c10::SymInt width = groups && transposed ? (blocks(length) + *groups) * kNvBlocksPerRow
                                                   : up_to_4((length + (kNvBlock - 1)) / kNvBlock);
    sizes = {blocks(other) * kTile, width};
  } else {
    sizes = {blocks(other), up_to_4(blocks(length))};
  }
  if (matrices) sizes.insert(sizes.begin(), *matrices);
  return sizes;
}

SymSizes MatrixShape::amax_sizes(const Format& format, bool transposed) const {
  if (!format.row_scaled) return {groups ? *groups : (matrices ? *matrices : c10::SymInt(1))};
  const c10::SymInt& scaled_rows = transposed ? cols : rows;
  if (matrices) return {*matrices, scaled_rows};
  return groups && transposed ? SymSizes{*groups, scaled_rows} : SymSizes{scaled_rows};
}

MatrixShape matrix_shape(const at::Tensor& tensor, bool transposed, const at::Tensor* group_sizes) {
  const int64_t dim = tensor.dim();
  MatrixShape shape{std::nullopt, tensor.sym_size(dim - 2), tensor.sym_size(dim - 1), std::nullopt};
  if (transposed) std::swap(shape.rows, shape.cols);
  if (dim == 3) shape.matrices = tensor.sym_size(0);
  if (group_sizes) shape.groups = group_sizes->sym_size(0);
  return shape;
}

MatrixShape shape_of_data(const at::Tensor& data, const Format& format, bool transposed,
                          const at::Tensor* group_sizes) {
  MatrixShape shape = matrix_shape(data, transposed, group_sizes);
  c10::SymInt& packed = transposed ? shape.rows : shape.cols;
  if (format.packing() > 1) packed = packed * format.packing();
  // An upper bound of the rows of the buffer: rounding to whole sectors cannot be undone.
  if (transposed && group_sizes && format.aligned_groups) {
    shape.rows = shape.rows - length_of_aligned(0, *shape.groups);
  }
  return shape;
}

Format quantized_format(const char* op, const char* argument, std::string_view key, bool allow_square) {
  const Format format = parse_format(op, argument, key);
  TP_CHECK_VALUE(format.is_quantized(), op, argument,
                 "a format with scales, fp8_tensor, fp8_block, mxfp8 or nvfp4", "'" << key << "'",
                 "Use the tensor as it is, or convert it with .to()");
  TP_CHECK_VALUE(allow_square || !format.square_blocks, op, argument,
                 "blocks along a row for a ragged matrix, whose groups do not end on square blocks",
                 "'" << key << "'", "Leave out 'square'");
  return format;
}

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

void check_multiples(const int32_t* offsets, int64_t groups, int64_t multiple, const char* op) {
  for (int64_t g = 0; g < groups; ++g) {
    const int32_t size = offsets[g + 1] - offsets[g];
    TP_CHECK_VALUE(size % multiple == 0, op, "group_sizes",
                   "sizes that are multiples of " << multiple << ", the block of nvfp4 in transposed data",
                   size << " for group " << g, "Pad the rows of each group with zeros");
  }
}

}  // namespace

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
      "lines of aligned groups, a multiple of " << kAlignedRows << " elements and at least " << least,
      describe(data.tensor), "Pass data as the quantize ops return it for the same format");
}

void check_packing(const Argument& data, const Format& format) {
  TP_CHECK_VALUE(!format.is_nv() || data.tensor.sym_size(-1) % (kNvBlock / 2) == 0, data.op, data.name,
                 "a last dimension that is a multiple of 8 bytes, the block of nvfp4", describe(data.tensor),
                 "Pass data as the quantize ops return it");
}

int64_t group_multiple(const Format& format, bool transposed) {
  return format.is_nv() && transposed ? kNvBlock : 1;
}

void check_group_values(const Argument& data, const at::Tensor& group_sizes, int64_t multiple) {
  if (has_memory(data.tensor)) check_group_values_of(data, data.tensor.size(0), group_sizes, multiple);
}

void check_group_values_of(const Argument& data, int64_t rows, const at::Tensor& group_sizes,
                           int64_t multiple) {
  if (!has_memory(data.tensor) || !has_memory(group_sizes)) return;
  if (data.tensor.is_cuda()) check_earlier_sizes(data.op);
  if (!data.tensor.is_cpu()) return;
  const HostOffsets offsets = host_offsets({data.op, "group_sizes", group_sizes}, data, rows);
  check_multiples(offsets.data(), group_sizes.numel(), multiple, data.op);
}

GroupUse group_use(const Format& format, bool transposed) {
  const bool scale_per_group =
      format.family == FormatFamily::kFp8Tensor || (format.is_nv() && !format.row_scaled);
  return transposed || scale_per_group ? GroupUse::kEach : GroupUse::kAll;
}

GroupTables group_tables(const Argument& data, const at::Tensor* group_sizes, int64_t rows, int64_t multiple,
                         GroupUse use) {
  if (!group_sizes) return {};
  const Argument sizes{data.op, "group_sizes", *group_sizes};
  const bool merged = use == GroupUse::kAll;
  const int64_t given_groups = group_sizes->numel(), groups = merged ? 1 : given_groups;
  const bool row_strips = !merged && data.tensor.is_cuda();
  const int64_t words = Layout::row_tiles(rows, groups) * (sizeof(RowTile) / sizeof(int32_t));
  const int64_t strip_words =
      row_strips ? Layout::row_strip_count(rows) * static_cast<int64_t>(sizeof(RowStrip) / sizeof(int32_t))
                 : 0;
  const at::Tensor storage = empty(data.tensor, {words + strip_words + 2 * (groups + 1)}, at::kInt);
  int32_t* begin = storage.mutable_data_ptr<int32_t>();
  const RowTables tables{groups,
                         rows,
                         reinterpret_cast<RowTile*>(begin),
                         begin + words + strip_words,
                         merged,
                         row_strips ? reinterpret_cast<RowStrip*>(begin + words) : nullptr};
  if (data.tensor.is_cpu()) {
    const HostOffsets offsets = host_offsets(sizes, data, rows);
    check_multiples(offsets.data(), given_groups, multiple, data.op);
    row_tiles_cpu(offsets.data(), given_groups, tables);
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (data.tensor.is_cuda()) {
    const DeviceSizes device = device_sizes(sizes, data, rows);
    const CudaScope scope(data.tensor);
    launch_row_tiles(device.sizes, device.is_int64, given_groups, tables, device.word, scope.stream());
  }
#endif
  return {storage, groups, tables.offsets, tables.row_strips};
}

Layout make_layout(const MatrixShape& shape, const Format& format, const GroupTables& tables) {
  const bool grouped = tables.storage.defined();
  return {shape.matrices ? shape.matrices->expect_int() : 1,
          shape.rows.expect_int(),
          shape.cols.expect_int(),
          tables.groups,
          grouped ? reinterpret_cast<const RowTile*>(tables.storage.const_data_ptr<int32_t>()) : nullptr,
          scale_granularity(format),
          format.square_blocks,
          format.tiled_scales,
          format.aligned_groups ? nullptr : tables.row_strips,
          grouped && format.aligned_groups};
}

at::ScalarType element_dtype(const Format& format) {
  if (format.is_nv()) return at::kFloat4_e2m1fn_x2;
  return format.element == DType::kFloat8E5M2 ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn;
}

at::ScalarType scale_dtype(const Format& format) {
  if (format.is_nv()) return at::kFloat8_e4m3fn;
  return format.family == FormatFamily::kMxFp8 ? at::kFloat8_e8m0fnu : at::kFloat;
}

void check_scale(const Argument& scale, const Argument& data, const Format& format, const SymSizes& sizes) {
  check_dtype(scale, {scale_dtype(format)});
  check_same_device(scale, data);
  check_dim(scale, static_cast<int64_t>(sizes.size()));
  for (size_t d = 0; d < sizes.size(); ++d) {
    check_size(scale, static_cast<int64_t>(d), sizes[d], "what the format gives data of this size");
  }
}

bool takes_amax(const Format& format) { return format.family == FormatFamily::kFp8Tensor || format.is_nv(); }

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
           (amax.transposed ? "_transposed" : "") +
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

void check_not_given(const char* op, const char* name, const OptionalTensor& tensor, std::string_view key) {
  TP_CHECK_VALUE(!tensor, op, name, "None for '" << key << "', which has no use for it", describe(*tensor),
                 "Leave it out");
}

void check_noop(const Argument& noop, const Argument& data) {
  check_dtype(noop, {at::kFloat});
  check_same_device(noop, data);
  check_dim(noop, 1);
  check_size(noop, 0, 1, "one flag: 1 leaves every byte as it is");
}

}  // namespace transformer_plugin::quantize

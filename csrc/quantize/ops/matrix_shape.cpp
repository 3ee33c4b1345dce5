// The sizes of quantized data and scales (quantize/ops/matrix_shape.h).
#include "quantize/ops/matrix_shape.h"

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

}  // namespace

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
  const c10::SymInt& length = transposed ? rows : cols;  // the dimension along which blocks lie
  const c10::SymInt& other = transposed ? cols : rows;
  if (format.traits().has_row_scales) return matrices ? SymSizes{*matrices, other} : SymSizes{other};
  const ScaleGranularity granularity = scale_granularity(format);
  if (granularity == ScaleGranularity::kPerTensor) return amax_sizes(format, transposed);
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

MatrixShape matrix_shape(const c10::SymInt& rows, const c10::SymInt& cols,
                         const OptionalTensor& group_sizes) {
  MatrixShape shape{std::nullopt, rows, cols, std::nullopt};
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

bool takes_amax(const Format& format) { return format.family == FormatFamily::kFp8Tensor || format.is_nv(); }

at::ScalarType element_dtype(const Format& format) {
  if (format.is_nv()) return at::kFloat4_e2m1fn_x2;
  return format.element == DType::kFloat8E5M2 ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn;
}

at::ScalarType scale_dtype(const Format& format) {
  if (format.is_nv()) return at::kFloat8_e4m3fn;
  return format.family == FormatFamily::kMxFp8 ? at::kFloat8_e8m0fnu : at::kFloat;
}

at::Tensor typed_scale(const at::Tensor& scale, const Format& format) {
  const at::ScalarType dtype = scale_dtype(format);
  const bool are_bytes = dtype == at::kFloat8_e8m0fnu && scale.defined() && scale.scalar_type() == at::kByte;
  return are_bytes ? scale.view(dtype) : scale;
}

}  // namespace transformer_plugin::quantize

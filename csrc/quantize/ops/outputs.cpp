// Outputs and kernel arguments of ops that quantize (quantize/ops/outputs.h).
#include "quantize/ops/outputs.h"

#include <limits>

#include "common/autograd.h"
#include "common/check.h"
#include "common/tensor.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;

float largest_finite(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16: return 3.38953139e38f;
    case at::kHalf: return 65504.0f;
    default: return std::numeric_limits<float>::max();
  }
}

uint8_t* bytes(const Tensor& tensor) {
  return tensor.defined() ? static_cast<uint8_t*>(tensor.mutable_data_ptr()) : nullptr;
}

float* floats(const Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr; }

}  // namespace

void check_directions(const char* op, const Directions& directions) {
  TP_CHECK_VALUE(directions.rowwise || directions.columnwise, op, "rowwise",
                 "True unless 'columnwise' is, so that there is a result", "False for both",
                 "Pass True for one of them");
}

ScaleRule scale_rule(const Format& format, at::ScalarType dtype) {
  const bool in_blocks = format.has_blocks();
  return {format.max(), format.epsilon, in_blocks ? largest_finite(dtype) : std::numeric_limits<float>::max(),
          format.power_of_two_scales};
}

Outputs make_outputs(const Tensor& like, const MatrixShape& shape, const Format& format,
                     const Directions& directions) {
  const at::ScalarType element = element_dtype(format), scale = scale_dtype(format);
  Outputs outputs;
  if (directions.rowwise) {
    outputs.data = empty(like, shape.data_sizes(format, false), element);
    outputs.scale = empty(like, shape.scale_sizes(format, false), scale);
  }
  if (directions.columnwise) {
    outputs.data_t = empty(like, shape.data_sizes(format, true), element);
    outputs.scale_t = empty(like, shape.scale_sizes(format, true), scale);
    zero_empty_aligned_rows(like, shape, format, outputs);
  }
  return outputs;
}

void zero_empty_aligned_rows(const Tensor& like, const MatrixShape& shape, const Format& format,
                             const Outputs& outputs, const OptionalTensor& noop) {
  if (!shape.groups || !format.aligned_groups || like.is_meta()) return;
  if (shape.rows != 0 && shape.cols != 0) return;
  const BelowAutograd guard;
  const Tensor bytes = outputs.data_t.view(at::kByte);
  if (noop) {
    bytes.mul_(noop->eq(1));
  } else {
    bytes.zero_();
  }
}

QuantizeArgs quantize_args(const Tensor& input, const Outputs& outputs, const Layout& layout,
                           const Format& format, const Tensor& amax) {
  const bool mx = format.family == FormatFamily::kMxFp8;
  return {input.const_data_ptr(),
          bytes(outputs.data),
          mx ? nullptr : floats(outputs.scale),
          bytes(outputs.data_t),
          mx ? nullptr : floats(outputs.scale_t),
          mx ? bytes(outputs.scale) : nullptr,
          mx ? bytes(outputs.scale_t) : nullptr,
          amax.defined() ? amax.const_data_ptr<float>() : nullptr,
          layout,
          scale_rule(format, input.scalar_type()),
          to_dtype(input.scalar_type()),
          format.element,
          outputs.data.defined(),
          outputs.data_t.defined()};
}

}  // namespace transformer_plugin::quantize

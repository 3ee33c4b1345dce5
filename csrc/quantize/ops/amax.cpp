// amax: the largest magnitudes that a format scales by, so that ranks can exchange them before they quantize.
#include "quantize/args/amax.h"

#include "common/ops/quantize.h"
#include "common/register.h"
#include "common/tensor.h"
#include "quantize/ops/checks.h"
#include "quantize/ops/group_tables.h"
#include "quantize/ops/outputs.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;
using Key = std::string_view;

constexpr const char* kOp = "amax";

struct AmaxCall {
  const Tensor& input;
  Key key;
  const OptionalTensor& group_sizes;
  Directions directions;

  Argument argument() const { return {kOp, "input", input}; }
  const Tensor* groups() const { return pointer_to(group_sizes); }
  MatrixShape shape() const { return matrix_shape(input, false, groups()); }
};

struct AmaxOutputs {
  Tensor amax, amax_t;  // undefined in a direction that is not requested

  Tensors list() && {
    Tensors list;
    list.reserve(2);
    if (amax.defined()) list.push_back(std::move(amax));
    if (amax_t.defined()) list.push_back(std::move(amax_t));
    return list;
  }
};

Format check_arguments(const AmaxCall& call) {
  check_directions(kOp, call.directions);
  const Format format = quantized_format(kOp, "format", call.key, !call.group_sizes);
  TP_CHECK_VALUE(takes_amax(format), kOp, "format",
                 "a format whose ops take an amax as an argument, fp8_tensor or nvfp4",
                 "'" << call.key << "'", "For other formats quantize computes every scale itself");
  check_matrix(call.argument(), call.groups(), format, call.directions.columnwise);
  return format;
}

AmaxOutputs make_outputs(const AmaxCall& call, const MatrixShape& shape, const Format& format) {
  AmaxOutputs outputs;
  if (call.directions.rowwise) outputs.amax = empty(call.input, shape.amax_sizes(format, false), at::kFloat);
  if (call.directions.columnwise) {
    outputs.amax_t = empty(call.input, shape.amax_sizes(format, true), at::kFloat);
  }
  return outputs;
}

float* floats(const Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr; }

void launch(const AmaxArgs& args, const Tensor& input) {
  if (input.is_cpu()) return amax_cpu(args);
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(input);
  launch_amax(args, scope.stream());
#endif
}

Tensors amax(const Tensor& input, Key key, OptionalTensorArg group_sizes, bool rowwise, bool columnwise) {
  const AmaxCall call{input, key, group_sizes, {rowwise, columnwise}};
  const Format format = check_arguments(call);
  const MatrixShape shape = call.shape();
  const GroupTables tables =
      group_tables(call.argument(), call.groups(), input.size(0), group_multiple(format, columnwise),
                   GroupUse::kEach, /*zero_tail=*/false);
  AmaxOutputs outputs = make_outputs(call, shape, format);
  const Tensor x = input.contiguous();
  // A per-tensor amax is the same in both directions, unless one of them is transformed.
  const bool shared = !format.row_scaled && !format.random_hadamard;
  launch({x.const_data_ptr(), floats(rowwise || !shared ? outputs.amax : outputs.amax_t),
          shared ? nullptr : floats(outputs.amax_t), make_layout(shape, format, tables),
          to_dtype(x.scalar_type()), format.row_scaled, format.random_hadamard},
         x);
  if (shared && rowwise && columnwise) outputs.amax_t.copy_(outputs.amax);
  return std::move(outputs).list();
}

Tensors amax_meta(const Tensor& input, Key key, OptionalTensorArg group_sizes, bool rowwise,
                  bool columnwise) {
  const AmaxCall call{input, key, group_sizes, {rowwise, columnwise}};
  const Format format = check_arguments(call);
  return make_outputs(call, call.shape(), format).list();
}

}  // namespace

Tensor amax_of(const Tensor& input, const Layout& layout) {
  const Tensor amax = empty(input, {layout.tensor_scales()}, at::kFloat);
  launch({input.const_data_ptr(), amax.mutable_data_ptr<float>(), nullptr, layout,
          to_dtype(input.scalar_type()), false, false},
         input);
  return amax;
}

// Exact: a maximum does not depend on the order, and the amax of a row is one of its values. The input is read
// once, however many rows of the matrix are the same row of it.
Tensor amax_of_rows(const Tensor& input, const RowIndex& index, const Layout& layout) {
  const Tensor row_amax = empty(input, {input.size(0)}, at::kFloat);
  const Tensor amax = empty(input, {layout.tensor_scales()}, at::kFloat);
  Layout rows{};
  rows.matrices = 1;
  rows.rows = input.size(0);
  rows.cols = input.size(1);
  launch({input.const_data_ptr(), row_amax.mutable_data_ptr<float>(), nullptr, rows,
          to_dtype(input.scalar_type()), true, false},
         input);
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(input);
  launch_indexed_amax({row_amax.const_data_ptr<float>(), index, amax.mutable_data_ptr<float>(), layout},
                      scope.stream());
#endif
  return amax;
}

// An amax is used for scales, which have no gradient.
TP_IMPL_NO_GRADIENT(amax, amax, amax_meta);

}  // namespace transformer_plugin::quantize

// quantize_out: the results of quantize, written into buffers of the caller.
#include "common/buffers.h"
#include "common/ops/quantize.h"
#include "common/register.h"
#include "common/tensor.h"
#include "quantize/ops/quantize_call.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;
using Key = std::string_view;

constexpr const char* kOp = "quantize_out";

void check_buffer(const Argument& buffer, const Argument& input, at::ScalarType dtype,
                  const SymSizes& sizes) {
  TP_CHECK_TYPE(buffer.tensor.scalar_type() == dtype, buffer.op, buffer.name,
                "one of the dtypes " << dtype_name(dtype), dtype_name(buffer.tensor.scalar_type()),
                "Allocate it as quantize does");
  check_same_device(buffer, input);
  const Tensor& tensor = buffer.tensor;
  bool fits = tensor.dim() == static_cast<int64_t>(sizes.size()) && tensor.is_contiguous();
  for (size_t d = 0; fits && d < sizes.size(); ++d)
    fits = tensor.sym_size(static_cast<int64_t>(d)) == sizes[d];
  TP_CHECK_VALUE(fits, buffer.op, buffer.name, "a contiguous tensor of sizes " << c10::SymIntArrayRef(sizes),
                 describe(tensor) << " with strides " << tensor.sym_strides(),
                 "Allocate it as quantize does");
  check_written(buffer);
}

void check_buffers(const QuantizeCall& call, at::TensorList out, const Format& format) {
  static constexpr const char* kNames[] = {"out[0]", "out[1]", "out[2]", "out[3]"};
  const auto& [rowwise, columnwise] = call.directions;
  const size_t expected = rowwise && columnwise ? 4 : 2;
  TP_CHECK_VALUE(out.size() == expected, kOp, "out", expected << " tensors, data and scale of each direction",
                 out.size(), "Pass the tensors that quantize returns for the same directions");
  const Argument input = call.argument();
  const MatrixShape shape = call.shape();
  size_t next = 0;
  for (const bool columns : {false, true}) {
    if (!(columns ? columnwise : rowwise)) continue;
    check_buffer({kOp, kNames[next], out[next]}, input, element_dtype(format),
                 shape.data_sizes(format, columns));
    check_buffer({kOp, kNames[next + 1], out[next + 1]}, input, scale_dtype(format),
                 shape.scale_sizes(format, columns));
    next += 2;
  }
}

Format check_all(const QuantizeCall& call, at::TensorList out, OptionalTensorArg noop) {
  const Format format = check_arguments(call);
  check_buffers(call, out, format);
  if (noop) check_noop({kOp, "noop", *noop}, call.argument());
  return format;
}

void quantize_out(const Tensor& input, Key key, at::TensorList out, OptionalTensorArg group_sizes,
                  OptionalTensorArg amax, OptionalTensorArg amax_t, OptionalTensorArg seed,
                  OptionalTensorArg noop, bool rowwise, bool columnwise) {
  const QuantizeCall call{kOp, input, key, group_sizes, {amax, amax_t, seed}, {rowwise, columnwise}};
  const Format format = check_all(call, out, noop);
  check_apart(kOp, "out", out,
              {{"input", input},
               {"group_sizes", group_sizes},
               {"amax", amax},
               {"amax_t", amax_t},
               {"seed", seed},
               {"noop", noop}});
  if (group_sizes) check_group_values(call.argument(), *group_sizes, group_multiple(format, columnwise));
  const Outputs outputs = outputs_of(out, call.directions);
  if (columnwise) zero_empty_aligned_rows(input, call.shape(), format, outputs, noop);
  run_quantize(call, format, outputs, noop ? noop->const_data_ptr<float>() : nullptr);
}

void quantize_out_meta(const Tensor& input, Key key, at::TensorList out, OptionalTensorArg group_sizes,
                       OptionalTensorArg amax, OptionalTensorArg amax_t, OptionalTensorArg seed,
                       OptionalTensorArg noop, bool rowwise, bool columnwise) {
  check_all({kOp, input, key, group_sizes, {amax, amax_t, seed}, {rowwise, columnwise}}, out, noop);
}

}  // namespace

TP_IMPL_NO_GRADIENT(quantize_out, quantize_out, quantize_out_meta);

}  // namespace transformer_plugin::quantize

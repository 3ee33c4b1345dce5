// quantize: values to data and scales, along rows, along columns, or both.
#include "quantize/args/quantize.h"

#include "common/autograd.h"
#include "common/ops/quantize.h"
#include "common/register.h"
#include "common/tensor.h"
#include "quantize/args/amax.h"
#include "quantize/args/quantize_rows.h"
#include "quantize/args/select_launcher.h"
#include "quantize/ops/quantize_call.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;
using Key = std::string_view;

constexpr const char* kOp = "quantize";

// NVFP4 kernels store 8 bytes at once. Only buffers of the caller can begin elsewhere.
void check_alignment(const QuantizeCall& call, const Outputs& outputs) {
  for (const Tensor& buffer : {outputs.data, outputs.scale, outputs.data_t, outputs.scale_t}) {
    const void* begin = buffer.defined() ? buffer.mutable_data_ptr() : nullptr;
    TP_CHECK_VALUE(reinterpret_cast<uintptr_t>(begin) % 8 == 0, call.op, "out", "8-byte-aligned buffers",
                   describe(buffer), "Allocate them as quantize does");
  }
}

// One scale per row. The kernels read rows only: columns are transposed into a temporary first.
void quantize_rows(const QuantizeCall& call, const Format& format, const Outputs& outputs,
                   const float* noop) {
  const BelowAutograd guard;
  for (const bool columns : {false, true}) {
    const Tensor& data = columns ? outputs.data_t : outputs.data;
    const Tensor& scale = columns ? outputs.scale_t : outputs.scale;
    if (!data.defined()) continue;
    GroupTables tables;
    if (call.groups()) {
      const int64_t rows = call.shape().rows.expect_int();
      tables = group_tables(call.argument(), call.groups(), rows, 1, GroupUse::kAll, call.zero_tail);
    }
    const Tensor x = columns ? call.input.mT().contiguous() : matrix_of(call, tables);
    const QuantizeRowsArgs args{x.const_data_ptr(),
                                static_cast<uint8_t*>(data.mutable_data_ptr()),
                                scale.mutable_data_ptr<float>(),
                                scale.numel(),
                                x.size(-1),
                                scale_rule(format, x.scalar_type()),
                                to_dtype(x.scalar_type()),
                                format.element,
                                tables.offsets ? tables.offsets + tables.groups : nullptr,
                                noop,
                                tables.with_tail};
    if (x.is_cpu()) {
      quantize_rows_cpu(args);
      continue;
    }
#ifdef TRANSFORMER_PLUGIN_CUDA
    const CudaScope scope(x);
    launch_quantize_rows(args, scope.stream());
#endif
  }
}

}  // namespace

Format check_arguments(const QuantizeCall& call) {
  check_directions(call.op, call.directions);
  const Format format = quantized_format(call.op, "format", call.key, !call.group_sizes);
  check_group_columns(call.op, "columnwise", format, call.directions.columnwise, call.groups());
  check_matrix(call.argument(), call.groups(), format, call.directions.columnwise && !call.rows);
  if (call.rows) check_rows(call, format);
  check_quantize_params({call.argument(), call.shape()}, format, call.key, call.directions, call.params);
  return format;
}

void run_quantize(const QuantizeCall& call, const Format& format, const Outputs& outputs, const float* noop) {
  if (format.traits().has_row_scales) return quantize_rows(call, format, outputs, noop);
  const bool columnwise = call.directions.columnwise;
  const GroupTables tables =
      group_tables(call.argument(), call.groups(), call.shape().rows.expect_int(),
                   group_multiple(format, columnwise), group_use(format, columnwise), call.zero_tail);
  if (quantize_by_index(call, format, outputs, tables, noop)) return;
  const Tensor x = matrix_of(call, tables);
  const Layout layout = make_layout(call.shape(), format, tables);
  if (format.is_nv()) {
    const NvArgsOwner owner(x, outputs, layout, format, call.params);
    NvArgs args = owner.get();
    args.noop = noop;
    if (x.is_cpu()) return quantize_nv_cpu(args);
#ifdef TRANSFORMER_PLUGIN_CUDA
    check_alignment(call, outputs);
    const CudaScope scope(x);
    select_nv_launcher(args.dtype)(args, scope.stream());
#endif
    return;
  }
  Tensor amax;
  if (takes_amax(format)) amax = call.params.amax ? call.params.amax->contiguous() : amax_of(x, layout);
  QuantizeArgs args = quantize_args(x, outputs, layout, format, amax);
  args.noop = noop;
  if (x.is_cpu()) return quantize_cpu(args);
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(x);
  select_launcher(args)(args, scope.stream());
#endif
}

namespace {

Tensors quantize(const Tensor& input, Key key, OptionalTensorArg group_sizes, OptionalTensorArg amax,
                 OptionalTensorArg amax_t, OptionalTensorArg seed, bool rowwise, bool columnwise,
                 OptionalTensorArg rows, bool zero_tail) {
  const QuantizeCall call{kOp,  input,    key, group_sizes, {amax, amax_t, seed}, {rowwise, columnwise},
                          rows, zero_tail};
  const Format format = check_arguments(call);
  Outputs outputs = make_outputs(input, call.shape(), format, call.directions);
  run_quantize(call, format, outputs, nullptr);
  return as_list(std::move(outputs));
}

Tensors quantize_meta(const Tensor& input, Key key, OptionalTensorArg group_sizes, OptionalTensorArg amax,
                      OptionalTensorArg amax_t, OptionalTensorArg seed, bool rowwise, bool columnwise,
                      OptionalTensorArg rows, bool zero_tail) {
  const QuantizeCall call{kOp,  input,    key, group_sizes, {amax, amax_t, seed}, {rowwise, columnwise},
                          rows, zero_tail};
  return as_list(make_outputs(input, call.shape(), check_arguments(call), call.directions));
}

}  // namespace

// Rounding has no gradient; the gemm ops that quantize their operands define their own gradients.
TP_IMPL_NO_GRADIENT(quantize, quantize, quantize_meta);

}  // namespace transformer_plugin::quantize

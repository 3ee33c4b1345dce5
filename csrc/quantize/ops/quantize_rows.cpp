// quantize for fp8_row: one FP32 scale per row. Columns are transposed into a temporary and quantized along
// its rows.
#include "quantize/args/quantize_rows.h"

#include "common/autograd.h"
#include "common/tensor.h"
#include "quantize/ops/quantize_call.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;

// `end` is the number of rows in groups, and may be null.
void launch(const Tensor& x, const Format& format, const Tensor& data, const Tensor& scale,
            const int32_t* end, const float* noop) {
  const QuantizeRowsArgs args{x.const_data_ptr(),
                              static_cast<uint8_t*>(data.mutable_data_ptr()),
                              scale.mutable_data_ptr<float>(),
                              scale.numel(),
                              x.size(-1),
                              scale_rule(format, x.scalar_type()),
                              to_dtype(x.scalar_type()),
                              format.element,
                              end,
                              noop};
  if (x.is_cpu()) return quantize_rows_cpu(args);
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(x);
  launch_quantize_rows(args, scope.stream());
#endif
}

}  // namespace

void run_quantize_rows(const Argument& input, const Tensor* group_sizes, const Format& format,
                       const Outputs& outputs, const float* noop) {
  const BelowAutograd guard;
  const Tensor& x = input.tensor;
  if (outputs.data.defined()) {
    const GroupTables tables = group_tables(input, group_sizes, x.size(0), 1, GroupUse::kAll);
    const int32_t* end = group_sizes ? tables.offsets + tables.groups : nullptr;
    launch(x.contiguous(), format, outputs.data, outputs.scale, end, noop);
  }
  if (outputs.data_t.defined()) {
    launch(x.mT().contiguous(), format, outputs.data_t, outputs.scale_t, nullptr, noop);
  }
}

}  // namespace transformer_plugin::quantize

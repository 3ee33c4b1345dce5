// The argument `rows` of quantize: its checks, the copy of the rows, and the kernels that need none
// (quantize/ops/quantize_call.h, quantize/ops/indexed_rows.h).
#include "quantize/ops/indexed_rows.h"

#include "common/row_index.h"
#include "common/tensor.h"
#include "quantize/args/amax.h"
#include "quantize/args/select_launcher.h"
#include "quantize/ops/quantize_call.h"

namespace transformer_plugin::quantize {

using at::Tensor;

bool quantizes_by_index(const Format& format, at::ScalarType dtype, c10::Device device) {
  return device.is_cuda() && format.aligned_groups && dtype != at::kFloat;
}

void check_rows(const QuantizeCall& call, const Format& format) {
  TP_CHECK_VALUE(call.group_sizes, call.op, "rows", "None without 'group_sizes'", describe(*call.rows),
                 "Pass the sizes of the groups of rows");
  const Argument rows = call.rows_argument();
  check_row_index(rows, call.argument());
  check_tile_count(rows, call.shape());
  const int64_t multiple = group_multiple(format, call.directions.columnwise);
  TP_CHECK_VALUE(
      multiple == 1 || rows.tensor.sym_size(0) % multiple == 0, rows.op, rows.name,
      "a number of entries that is a multiple of " << multiple << ", the block of nvfp4 in transposed data",
      describe(rows.tensor), "Append entries of -1, rows of zeros");
}

Tensor matrix_of(const QuantizeCall& call, const GroupTables& tables) {
  if (!call.rows) return call.input.contiguous();
  const Tensor offsets = tables.offset_tensor();
  check_row_entries(call.rows_argument(), call.argument(), offsets);
  return take_rows(call.input, *call.rows, offsets);
}

bool quantize_by_index(const QuantizeCall& call, const Format& format, const Outputs& outputs,
                       const GroupTables& tables, const float* noop) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  const MatrixShape shape = call.shape();
  if (!call.rows || !call.directions.columnwise ||
      !quantizes_by_index(format, call.input.scalar_type(), call.input.device())) {
    return false;
  }
  const Tensor x = call.input.contiguous();
  const Layout layout = make_layout(shape, format, tables);
  QuantizeArgs args = quantize_args(x, outputs, layout, format, Tensor());
  if (!supports_row_index(args)) return false;
  const GatheredRows rows = rows_by_index(x, *call.rows, tables.offset_tensor());
  args.row_index = rows.index;
  args.wrong_row = rows.word;
  args.noop = noop;
  Tensor amax;
  if (takes_amax(format)) {
    amax = call.params.amax ? call.params.amax->contiguous() : amax_of_rows(x, rows.index, layout);
    args.amax = amax.const_data_ptr<float>();
  }
  const CudaScope scope(x);
  select_launcher(args)(args, scope.stream());
  return true;
#else
  return false;
#endif
}

}  // namespace transformer_plugin::quantize

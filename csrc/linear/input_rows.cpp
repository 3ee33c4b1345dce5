#include "linear/input_rows.h"

#include "common/ops/tensor_parallel.h"
#include "linear/nonfinite.h"
#include "sharded/gather_weight.h"
#include "tensor_parallel/exchange.h"

namespace transformer_plugin::linear {
namespace {

using at::Tensor;

// Whether each row has its own scales, and nothing of the whole matrix.
bool rows_travel_quantized(const Tensor& rows, const Format& format, std::string_view key) {
  return format.has_blocks() && !format.is_nv() && !format.square_blocks && !format.tiled_scales &&
         !format.row_scaled && !format.stochastic_rounding && !marks_nonfinite(key) &&
         !rows.sym_size(0).is_symbolic();
}

Quantized gathered(const Quantized& part, int64_t rows, const InputRanks& ranks) {
  sharded::WeightShard shard{
      .rows = rows * ranks.ranks, .ranks = ranks.ranks, .group = std::string(ranks.group)};
  shard.key = "rows=" + std::to_string(shard.rows) + ",ranks=" + std::to_string(shard.ranks) +
              ",group=" + shard.group;
  return sharded::gather_weight(part, shard, false);
}

}  // namespace

void check_input_ranks(const Argument& input, const InputRanks& ranks, const CallerBuffers& buffers) {
  TP_CHECK_VALUE(ranks.ranks >= 1, input.op, "input_ranks", "at least 1", ranks.ranks, "Pass group.size()");
  if (!ranks.is_sharded()) return;
  TP_CHECK_VALUE(input.tensor.dim() >= 2, input.op, input.name,
                 "at least 2 dimensions with input_ranks, of which the first is gathered",
                 describe(input.tensor), "Pass rows");
  TP_CHECK_VALUE(!buffers.given(), input.op, "dgrad_out",
                 "None with input_ranks, as the gradient comes from other ranks", "a buffer", "Leave it out");
}

Tensor all_gather_rows(const Tensor& input, const InputRanks& ranks) {
  return ops::all_gather(input, ranks.ranks, ranks.group, -1, -1);
}

Tensor reduce_scatter_rows(const Tensor& grad, const InputRanks& ranks) {
  return ops::reduce_scatter(grad, ranks.ranks, ranks.group, -1, -1);
}

QuantizedOperand all_gather_operand(const Tensor& rows, const InputRanks& ranks,
                                    const std::optional<Tensor>& column_sizes, const Format& format,
                                    std::string_view key, bool rowwise, bool columnwise) {
  if (rowwise && !columnwise && rows_travel_quantized(rows, format, key)) {
    QuantizedOperand own = quantize_operand(rows, std::nullopt, format, key, true, false);
    own.rowwise = gathered(own.rowwise, rows.size(0), ranks);
    return own;
  }
  return quantize_operand(all_gather_rows(rows, ranks), column_sizes, format, key, rowwise, columnwise);
}

}  // namespace transformer_plugin::linear

#include "linear/sequence_parallel_input.h"

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

Quantized gathered(const Quantized& rows_of_rank, int64_t rows, const SequenceParallel& sequence) {
  sharded::WeightShard shard{
      .rows = rows * sequence.size, .ranks = sequence.size, .group = std::string(sequence.group)};
  shard.key = "rows=" + std::to_string(shard.rows) + ",ranks=" + std::to_string(shard.ranks) +
              ",group=" + shard.group;
  return sharded::gather_weight(rows_of_rank, shard, false);
}

}  // namespace

void check_sequence_parallel(const Argument& input, const SequenceParallel& sequence,
                             const CallerBuffers& buffers) {
  TP_CHECK_VALUE(sequence.size >= 1, input.op, "sequence_parallel_size", "at least 1", sequence.size,
                 "Pass group.size()");
  if (!sequence.is_sharded()) return;
  TP_CHECK_VALUE(input.tensor.dim() >= 2, input.op, input.name,
                 "at least 2 dimensions with sequence_parallel_size, of which the first is gathered",
                 describe(input.tensor), "Pass rows");
  TP_CHECK_VALUE(!buffers.given(), input.op, "dgrad_out",
                 "None with sequence_parallel_size, as the gradient comes from other ranks", "a buffer",
                 "Leave it out");
}

Tensor all_gather_rows(const Tensor& input, const SequenceParallel& sequence) {
  return ops::all_gather(input, sequence.size, sequence.group, -1, -1);
}

Tensor reduce_scatter_rows(const Tensor& grad, const SequenceParallel& sequence) {
  return ops::reduce_scatter(grad, sequence.size, sequence.group, -1, -1);
}

QuantizedOperand all_gather_operand(const Tensor& rows, const SequenceParallel& sequence,
                                    const std::optional<Tensor>& column_sizes, const Format& format,
                                    std::string_view key, bool rowwise, bool columnwise) {
  if (rowwise && !columnwise && rows_travel_quantized(rows, format, key)) {
    QuantizedOperand own = quantize_operand(rows, std::nullopt, format, key, true, false);
    own.rowwise = gathered(own.rowwise, rows.size(0), sequence);
    return own;
  }
  return quantize_operand(all_gather_rows(rows, sequence), column_sizes, format, key, rowwise, columnwise);
}

}  // namespace transformer_plugin::linear

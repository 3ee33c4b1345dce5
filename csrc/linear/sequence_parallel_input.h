// An input whose rows are sharded over ranks, as sequence parallelism has it: the layer gathers them before the product, and
// divides the gradient of the input among the ranks. The backward gathers again, so that only this rank's rows are kept.
#pragma once

#include <string_view>

#include "linear/operands.h"

namespace transformer_plugin::linear {

void check_sequence_parallel(const Argument& input, const SequenceParallel& sequence,
                             const CallerBuffers& buffers);
// All rows along the first dimension of an input [n, ..., K].
at::Tensor all_gather_rows(const at::Tensor& input, const SequenceParallel& sequence);
// This rank's rows of the sum over ranks.
at::Tensor reduce_scatter_rows(const at::Tensor& grad, const SequenceParallel& sequence);
// The operand that quantizing all rows gives, of a matrix [n, K] that is this rank's rows. Rows whose scales are their own
// travel quantized.
QuantizedOperand all_gather_operand(const at::Tensor& rows, const SequenceParallel& sequence,
                                    const std::optional<at::Tensor>& column_sizes, const Format& format,
                                    std::string_view key, bool rowwise, bool columnwise);

}  // namespace transformer_plugin::linear

// Rows of tokens: which row of each group holds which token, as assign_slots returns it (routing/slots_args.h). With it a
// layer takes tokens [T, H] instead of rows [S, H], and returns for each token the sum of its rows.
#pragma once

#include "linear/operands.h"

namespace transformer_plugin::linear {

struct TokenRows {
  at::Tensor slot = {};    // int32 [T, K]: rows of a token, or -1
  at::Tensor source = {};  // int32 [S]: the token of a row, or -1 for a row of zeros

  bool given() const { return source.defined(); }
  // The rows of groups, copied; the rows past the last group have any bits.
  at::Tensor gather(const at::Tensor& tokens, const at::Tensor& group_sizes) const;
  // For each token the sum of its rows, in `out` if there is one.
  at::Tensor sum(const at::Tensor& rows, const std::optional<at::Tensor>& out) const;
};

// The result, copied into `out` if there is one.
at::Tensor written_to(const at::Tensor& result, const std::optional<at::Tensor>& out);

// Checks both, which are None or not together. `input`: the tokens. The rows of `slot` are for the caller to check.
void check_token_rows(const Argument& input, const TokenRows& rows);

// Whether products read an operand in a format from the tokens, by their index, and not from a copy of rows. True where
// nothing depends on the rows as such: no scales of rows or columns, and no mark of values that are not finite.
bool reads_tokens(const Format& format, std::string_view key);
// Whether both products of a gradient can and should read it from the tokens on this GPU, if its rows are contiguous and
// the widths are multiples of 8. Otherwise a copy of the rows serves both. `activation`: the input of the weight gradient.
bool reads_gradient(const at::Tensor& grad, const at::Tensor& activation, const Format& format,
                    std::string_view key);
// quantize_operand() of the rows; without zeros in those past the last group if tokens are given. Where a kernel quantizes rows
// by their index, they are not copied. `copies`: of rows that are copied, even if products could read the tokens.
QuantizedOperand rows_operand(const at::Tensor& tokens, const TokenRows& rows, const at::Tensor& group_sizes,
                              const Format& format, std::string_view key, bool rowwise, bool columnwise,
                              bool copies = false);

}  // namespace transformer_plugin::linear

// The torch side of the ops that quantize what they compute.
#pragma once

#include "quantize/outputs.h"

namespace transformer_plugin::quantize {

// A matrix that is computed, ragged when group sizes are given.
inline Operand matrix_operand(const c10::SymInt& rows, const c10::SymInt& cols,
                              const OptionalTensor& group_sizes) {
  Operand operand{std::nullopt, rows, cols, std::nullopt};
  if (group_sizes) operand.groups = group_sizes->sym_size(0);
  return operand;
}

// A format whose scales depend on a block alone, so that one pass finds them. `advice` for the others.
inline Format block_format(const char* op, std::string_view key, const OptionalTensor& group_sizes,
                           const char* advice) {
  const Format format = quantized_format(op, "format", key, !group_sizes);
  TP_CHECK_VALUE(format.family == FormatFamily::kFp8Block || format.family == FormatFamily::kMxFp8, op,
                 "format", "a format whose scales are found block by block, fp8_block or mxfp8",
                 "'" << key << "'", advice);
  return format;
}

}  // namespace transformer_plugin::quantize

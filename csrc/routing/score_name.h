// The names of score functions, for host files.
#pragma once

#include <string_view>

#include "common/check.h"
#include "routing/score.h"

namespace transformer_plugin::routing {

inline ScoreFunction parse_score_function(const char* op, std::string_view name) {
  if (name == "softmax") return ScoreFunction::kSoftmax;
  if (name == "sigmoid") return ScoreFunction::kSigmoid;
  TP_CHECK_VALUE(name == "sqrtsoftplus", op, "score_function", "softmax, sigmoid or sqrtsoftplus", name,
                 "Pass one of the three names");
  return ScoreFunction::kSqrtSoftplus;
}

// float32, bfloat16 or float16 [tokens, experts].
inline void check_logits(const Argument& logits, int64_t max_experts) {
  check_dtype(logits, kFloatTypes);
  check_dim(logits, 2);
  TP_CHECK_VALUE(logits.tensor.sym_size(1) <= max_experts, logits.op, logits.name,
                 "at most " << max_experts << " columns, one for each expert", describe(logits.tensor),
                 "Use fewer experts");
}

}  // namespace transformer_plugin::routing

#include "linear/weights.h"

#include "gemm/dispatch/checks.h"

namespace transformer_plugin::linear {

void check_grouped_weight(const WeightArgument& weight, const Argument& input) {
  const bool single = weight.tensors.size() == 1;
  if (!single) gemm::check_list(weight.op, weight.name, weight.tensors);
  const std::string name = weight.first_name();
  gemm::check_pair({weight.op, name.c_str(), weight.first()}, input, single ? 3 : 2);
}

void check_weight_size(const WeightArgument& weight, int64_t dim, const c10::SymInt& expected,
                       const char* meaning) {
  if (weight.is_list() && dim == 0) {
    TP_CHECK_VALUE(weight.groups() == expected, weight.op, weight.name,
                   expected << " matrices (" << meaning << ")", weight.tensors.size() << " of them",
                   "Pass a matrix for each group");
    return;
  }
  const std::string name = weight.first_name();
  check_size({weight.op, name.c_str(), weight.first()}, weight.is_list() ? dim - 1 : dim, expected, meaning);
}

c10::SymInt unsharded_size(const at::Tensor& weight, const sharded::WeightShard& shard) {
  return shard.is_sharded() ? c10::SymInt(shard.rows) : weight.sym_size(0);
}

c10::SymInt unsharded_rows(const WeightArgument& weight, const sharded::WeightShard& shard) {
  return shard.is_list ? c10::SymInt(shard.rows) : weight.rows();
}

}  // namespace transformer_plugin::linear

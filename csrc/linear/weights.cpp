#include "linear/weights.h"

#include "gemm/dispatch/checks.h"
#include "sharded/weight_shard.h"

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

c10::SymInt whole_size(const at::Tensor& weight, const MainGrad& gradient) {
  if (gradient.weight_shard.empty()) return weight.sym_size(0);
  return sharded::parse_weight_shard("linear", gradient.weight_shard).rows;
}

c10::SymInt whole_rows(const WeightArgument& weight, const MainGrad& gradient) {
  return is_cut_list(gradient) ? whole_size(weight.first(), gradient) : weight.rows();
}

bool is_cut_list(const MainGrad& gradient) {
  return !gradient.weight_shard.empty() && sharded::parse_weight_shard("linear", gradient.weight_shard).each;
}

}  // namespace transformer_plugin::linear

#include "linear/nonfinite.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/logical_or.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/where.h>

#include <limits>

namespace transformer_plugin::linear {

using at::Tensor;

bool marks_nonfinite(std::string_view key) {
  return key.find(":nan") != std::string_view::npos || key.find(",nan") != std::string_view::npos;
}

Tensor nonfinite_factor(const Tensor& x, const std::optional<Tensor>& group_sizes) {
  Tensor finite = at::isfinite(x);
  if (group_sizes) {
    const Tensor rows = at::arange(c10::Scalar(x.sym_size(0)), group_sizes->options().dtype(at::kLong));
    finite = at::logical_or(finite, rows.ge(group_sizes->sum()).unsqueeze(1));
  }
  const auto options = x.options().dtype(at::kFloat);
  return at::where(finite.all(), at::full({}, 1.0, options),
                   at::full({}, std::numeric_limits<float>::quiet_NaN(), options));
}

Tensor nonfinite_factor(at::TensorList tensors) {
  Tensor factor = nonfinite_factor(tensors[0], std::nullopt);
  for (const Tensor& x : tensors.slice(1)) factor = at::mul(factor, nonfinite_factor(x, std::nullopt));
  return factor;
}

}  // namespace transformer_plugin::linear

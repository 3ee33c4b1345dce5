// connect_gradient: the gradient of one tensor is passed on to another that stands for the same numbers. A value of
// transformer_plugin/tensor/ over a plain tensor, and the plain tensor inside a value, get their gradients so; a
// torch.autograd.Function in Python does the same in twice the host time.

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "common/autograd.h"
#include "common/check.h"
#include "common/ops/common.h"
#include "common/register.h"
#include "common/torch_version.h"

namespace transformer_plugin {
namespace {

using at::Tensor;
using torch::autograd::variable_list;

class PassOn : public torch::autograd::Node {
 public:
  static constexpr const char* kName = "connect_gradient";

  std::string name() const override { return "transformer_plugin::connect_gradient_backward_node"; }

  // The gradient may be a value itself, whose numbers view(-1) gives.
  variable_list apply(variable_list&& grads) override {
    Tensor& grad = grads[0];
    if (grad.defined() && grad.key_set().has(c10::DispatchKey::Python)) {
      grad = grad.view({-1}).view_symint(grad.sym_sizes());
    }
    return std::move(grads);
  }
};

constexpr const char* kOp = PassOn::kName;

void check_connected(const Tensor& value, const Tensor& source) {
  const Argument to{kOp, "value", value}, from{kOp, "source", source};
  check_defined(to);
  check_defined(from);
  check_strided(to);
  check_strided(from);
  check_dtype(from, {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble});
  check_same_dtype(to, from);
  TP_CHECK_VALUE(value.sym_sizes() == source.sym_sizes(), kOp, "value",
                 "the sizes " << source.sym_sizes() << " of 'source'", describe(value),
                 "Pass the tensor that stands for the same numbers");
  check_same_device(to, from);
  TP_CHECK_VALUE(!value.requires_grad(), kOp, "value", "a tensor without a gradient",
                 describe(value) << " with requires_grad=True", "Detach it first");
}

void connect_gradient(const Tensor& value, const Tensor& source) { check_connected(value, source); }

void connect_gradient_autograd(const Tensor& value, const Tensor& source) {
  check_connected(value, source);
  if (!any_requires_grad(source)) return;
  TP_CHECK_VALUE(!value.is_view(), kOp, "value", "a new tensor, which is no view", describe(value),
                 "Detach it first");
  const auto node = make_node<PassOn>();
  node->set_next_edges(torch::autograd::collect_next_edges(source));
  torch::autograd::set_history(value, node);
}

}  // namespace

TP_IMPL(connect_gradient, connect_gradient, connect_gradient, connect_gradient_autograd);

}  // namespace transformer_plugin

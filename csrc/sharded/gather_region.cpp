// enter_gather_region and leave_gather_region: the input unchanged, at the borders of what is captured in CUDA graphs of its
// own, such as one layer. In a capture weights are gathered early only between the two, and nothing is left in flight after
// the second. Each is the gradient of the other, so that the backward has the same borders in reverse.
#include <ATen/ops/empty_like.h>

#include "common/autograd.h"
#include "common/check.h"
#include "common/ops/sharded.h"
#include "common/register.h"
#include "common/tensor.h"
#include "sharded/group_weights.h"

namespace transformer_plugin::sharded {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Enter {
  static constexpr auto op = ops::enter_gather_region;
  static constexpr const char* kName = "enter_gather_region";
  static constexpr const char* kArgument = "input";
  static void note(GatherCache& gathers, const StreamContext& context) { gathers.enter_region(context); }
};

struct Leave {
  static constexpr auto op = ops::leave_gather_region;
  static constexpr const char* kName = "leave_gather_region";
  static constexpr const char* kArgument = "output";
  static void note(GatherCache& gathers, const StreamContext& context) { gathers.leave_region(context); }
};

// An op returns no alias of its argument, so the input is copied.
template <typename Border>
Tensor kernel(const Tensor& input, std::string_view group_name) {
  check_strided({Border::kName, Border::kArgument, input});
  distributed::RankGroup group(Border::kName, group_name, -1, input);
  Border::note(GroupWeights::of(group.state()).gathers, distributed::current_stream_context(input.device()));
  return input.clone();
}

template <typename Border>
Tensor meta(const Tensor& input, std::string_view) {
  check_strided({Border::kName, Border::kArgument, input});
  return at::empty_like(input);
}

template <typename Border, typename Other>
class BorderFunction : public CheckedFunction<BorderFunction<Border, Other>> {
 public:
  static constexpr const char* kName = Border::kName;
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, std::string_view group_name) {
    ctx->saved_data["group_name"] = std::string(group_name);
    const BelowAutograd guard;
    return Border::op(input, group_name);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {Other::op(grads[0], ctx->saved_data["group_name"].toStringRef()), Tensor()};
  }
};

template <typename Border, typename Other>
Tensor autograd(const Tensor& input, std::string_view group_name) {
  if (any_requires_grad(input)) return BorderFunction<Border, Other>::apply(input, group_name);
  const BelowAutograd guard;
  return Border::op(input, group_name);
}

Tensor enter_autograd(const Tensor& input, std::string_view group_name) {
  return autograd<Enter, Leave>(input, group_name);
}

Tensor leave_autograd(const Tensor& input, std::string_view group_name) {
  return autograd<Leave, Enter>(input, group_name);
}

}  // namespace

TP_IMPL(enter_gather_region, kernel<Enter>, meta<Enter>, enter_autograd);
TP_IMPL(leave_gather_region, kernel<Leave>, meta<Leave>, leave_autograd);

}  // namespace transformer_plugin::sharded

// start_all_gather and finish_all_gather, start_reduce_scatter and finish_reduce_scatter: the collectives in two steps. The first
// begins one on a side stream and returns a work tensor, the second gives the result, for which the current stream then waits. On a
// CPU the first does it all. The gradient is that of the collective as a whole and belongs to the second step.
#include <ATen/ops/zeros.h>

#include <mutex>
#include <string_view>

#include "common/ops/tensor_parallel.h"
#include "common/register.h"
#include "common/tensor.h"
#include "distributed/pending_collectives.h"
#include "tensor_parallel/exchange.h"

namespace transformer_plugin::tensor_parallel {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The collectives of a group that were begun and not finished.
class StartedCollectives {
 public:
  explicit StartedCollectives(distributed::ProcessGroupState& state)
      : pending_(state.extension<distributed::PendingCollectives>()) {}
  static StartedCollectives& of(distributed::ProcessGroupState& state) {
    return state.extension<StartedCollectives>(state);
  }

  // Runs `exchange`, which reads `operand` and writes `out`, for the op `start`. Returns the work tensor.
  template <typename Exchange>
  Tensor begin(const char* start, const Tensor& operand, const Tensor& out, Exchange&& exchange) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const distributed::StreamContext context = distributed::current_stream_context(operand.device());
    pending_.free_discarded(context);
    const Tensor work = at::zeros({1}, operand.options().dtype(at::kLong).requires_grad(false));
    const distributed::StreamEvent done = stream_.run(operand.device(), std::forward<Exchange>(exchange));
    pending_.add({this, start, {operand}, {out}, done, context}, work);
    return work;
  }

  // The result of `operand`, for which the current stream waits; undefined if `work` is of none. Raises for the work of
  // another op, or of an operand of other sizes or dtype, which is still running then.
  Tensor finish(const char* op, const char* start, const Tensor& work, const Argument& operand) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = pending_.find(this, work);
    if (!found) return {};
    const distributed::StartedCollective& started = found->collective;
    TP_CHECK_VALUE(std::string_view(started.op) == start, op, "work", "what " << start << " returned",
                   "what " << started.op << " returned",
                   "Finish each collective with the op that belongs to its start");
    const Tensor& taken = started.operands[0];
    TP_CHECK_VALUE(
        taken.sizes() == operand.tensor.sizes() && taken.scalar_type() == operand.tensor.scalar_type(), op,
        operand.name, "what " << start << " took, " << describe(taken), describe(operand.tensor),
        "Pass the arguments that the work was begun with");
    return pending_.finish(found->number)[0];
  }

 private:
  std::mutex mutex_;  // guards the stream
  distributed::PendingCollectives& pending_;
  distributed::SideStream stream_;
};

// What the two collectives differ in.
struct AllGather {
  static constexpr auto start_op = ops::start_all_gather;
  static constexpr auto finish_op = ops::finish_all_gather;
  static constexpr const char* kName = "finish_all_gather";
  static constexpr const char *kStart = start_op.name, *kOperand = "input";
  static constexpr Phase kPhase = phases::kStartAllGather;
  static constexpr auto in_one_step = ops::all_gather;
  static constexpr auto gradient = ops::reduce_scatter;

  static std::vector<c10::SymInt> sizes(const Argument& input, int64_t num_ranks, int64_t timeout_ms) {
    check_exchange(input, num_ranks, timeout_ms);
    std::vector<c10::SymInt> result(input.tensor.sym_sizes().begin(), input.tensor.sym_sizes().end());
    result[0] = result[0] * num_ranks;
    return result;
  }
  static void run(const RankGroup& group, const Tensor& input, const Tensor& out) {
    group.collectives().all_gather_list({input}, {out}, kPhase).wait();
  }
};

struct ReduceScatter {
  static constexpr auto start_op = ops::start_reduce_scatter;
  static constexpr auto finish_op = ops::finish_reduce_scatter;
  static constexpr const char* kName = "finish_reduce_scatter";
  static constexpr const char *kStart = start_op.name, *kOperand = "input";
  static constexpr Phase kPhase = phases::kStartReduceScatter;
  static constexpr auto in_one_step = ops::reduce_scatter;
  static constexpr auto gradient = ops::all_gather;
  static constexpr auto sizes = reduced_sizes;

  static void run(const RankGroup& group, const Tensor& input, const Tensor& out) {
    reduce_scatter_into(group, input, kPhase, out, false, 1);
  }
};

template <typename Op>
Tensor start(const Tensor& operand, int64_t num_ranks, std::string_view group_name, int64_t timeout_ms,
             int64_t needs_grad) {
  const auto sizes = Op::sizes({Op::kStart, Op::kOperand, operand}, num_ranks, timeout_ms);
  const BelowAutograd guard;
  const auto group = std::make_shared<RankGroup>(Op::kStart, group_name, timeout_ms, operand);
  check_ranks(Op::kStart, *group, num_ranks);
  const Tensor values = operand.detach();
  const Tensor out = empty(values, sizes, values.scalar_type());
  return StartedCollectives::of(group->state()).begin(Op::kStart, values, out, [&] {
    if (num_ranks == 1) {
      out.copy_(values);
      return;
    }
    group->begin_call(exchange_call(Op::kPhase, Op::kOperand, values, needs_grad > 0), 1);
    Op::run(*group, values, out);
  });
}

template <typename Op>
Tensor start_meta(const Tensor& operand, int64_t num_ranks, std::string_view, int64_t timeout_ms, int64_t) {
  Op::sizes({Op::kStart, Op::kOperand, operand}, num_ranks, timeout_ms);
  return empty(operand, {1}, at::kLong);
}

// The work tensor has no gradient. The ranks compare whether the second step will have one.
template <typename Op>
Tensor start_autograd(const Tensor& operand, int64_t num_ranks, std::string_view group_name,
                      int64_t timeout_ms, int64_t needs_grad) {
  // In a compiled graph `needs_grad` holds the value from the time of tracing.
  if (any_requires_grad(operand)) needs_grad = 1;
  const BelowAutograd guard;
  return Op::start_op(operand, num_ranks, group_name, timeout_ms, needs_grad);
}

void check_work(const char* op, const Tensor& work, const Argument& operand) {
  check_defined(operand);
  check_dtype({op, "work", work}, {at::kLong});
  check_same_device({op, "work", work}, operand);
}

// A work tensor that is not known, such as a copy, is made up for by the collective as a whole, on all ranks alike.
template <typename Op>
Tensor finish(const Tensor& work, const Tensor& operand, int64_t num_ranks, std::string_view group_name,
              int64_t timeout_ms, const std::optional<Tensor>&) {
  const Argument argument{Op::kName, Op::kOperand, operand};
  check_work(Op::kName, work, argument);
  Op::sizes(argument, num_ranks, timeout_ms);
  const BelowAutograd guard;
  const RankGroup group(Op::kName, group_name, timeout_ms, operand);
  check_ranks(Op::kName, group, num_ranks);
  const Tensor out = StartedCollectives::of(group.state()).finish(Op::kName, Op::kStart, work, argument);
  return out.defined() ? out : Op::in_one_step(operand, num_ranks, group_name, timeout_ms, -1);
}

template <typename Op>
Tensor finish_meta(const Tensor& work, const Tensor& operand, int64_t num_ranks, std::string_view,
                   int64_t timeout_ms, const std::optional<Tensor>&) {
  const Argument argument{Op::kName, Op::kOperand, operand};
  check_work(Op::kName, work, argument);
  return empty(operand, Op::sizes(argument, num_ranks, timeout_ms), operand.scalar_type());
}

template <typename Op>
class FinishFunction : public CheckedFunction<FinishFunction<Op>> {
 public:
  static constexpr const char* kName = Op::kName;
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& work, const Tensor& operand, int64_t num_ranks,
                        std::string_view group_name, int64_t timeout_ms,
                        const std::optional<Tensor>& depends_on) {
    ctx->saved_data["num_ranks"] = num_ranks;
    ctx->saved_data["group_name"] = std::string(group_name);
    ctx->saved_data["timeout_ms"] = timeout_ms;
    const BelowAutograd guard;
    return Op::finish_op(work, operand, num_ranks, group_name, timeout_ms, depends_on);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    auto& saved = ctx->saved_data;
    const Tensor grad = Op::gradient(grads[0], saved["num_ranks"].toInt(), saved["group_name"].toStringRef(),
                                     saved["timeout_ms"].toInt(), -1);
    variable_list result(6);
    result[1] = grad;
    return result;
  }
};

template <typename Op>
Tensor finish_autograd(const Tensor& work, const Tensor& operand, int64_t num_ranks,
                       std::string_view group_name, int64_t timeout_ms,
                       const std::optional<Tensor>& depends_on) {
  if (any_requires_grad(operand)) {
    return FinishFunction<Op>::apply(work, operand, num_ranks, group_name, timeout_ms, depends_on);
  }
  const BelowAutograd guard;
  return Op::finish_op(work, operand, num_ranks, group_name, timeout_ms, depends_on);
}

}  // namespace

TP_IMPL(start_all_gather, start<AllGather>, start_meta<AllGather>, start_autograd<AllGather>);
TP_IMPL(finish_all_gather, finish<AllGather>, finish_meta<AllGather>, finish_autograd<AllGather>);
TP_IMPL(start_reduce_scatter, start<ReduceScatter>, start_meta<ReduceScatter>, start_autograd<ReduceScatter>);
TP_IMPL(finish_reduce_scatter, finish<ReduceScatter>, finish_meta<ReduceScatter>,
        finish_autograd<ReduceScatter>);

}  // namespace transformer_plugin::tensor_parallel

// vocab_parallel_cross_entropy: checks, the one collective of the forward, and the gradient, which has none
// (tensor_parallel/vocab_parallel_cross_entropy.h).
#include "tensor_parallel/vocab_parallel_cross_entropy.h"

#include <bit>

#include "common/ops/tensor_parallel.h"
#include "common/register.h"
#include "common/tensor.h"
#include "tensor_parallel/checksum.h"
#include "tensor_parallel/exchange.h"

namespace transformer_plugin::tensor_parallel {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "vocab_parallel_cross_entropy";
constexpr const char* kForward = "vocab_parallel_cross_entropy_forward";
constexpr const char* kBackward = "vocab_parallel_cross_entropy_backward";

struct Options {
  int64_t vocabulary;
  int64_t num_ranks;
  double label_smoothing;
  int64_t ignore_index;
};

struct LossCall {
  const char* op;
  const Tensor& logits;
  const Tensor& target;
  Options options;
  std::string_view group_name;
  int64_t timeout_ms;
};

struct Losses {
  Tensor losses, stats;
};

// All that does not need the group.
void check_loss(const LossCall& call) {
  const auto& [vocabulary, num_ranks, label_smoothing, ignore_index] = call.options;
  const Argument logits{call.op, "logits", call.logits}, target{call.op, "target", call.target};
  check_dtype(logits, kFloatTypes);
  check_exchange(logits, num_ranks, call.timeout_ms);
  check_dtype(target, {at::kLong, at::kInt});
  check_same_device(target, logits);
  const auto sizes = call.logits.sym_sizes();
  TP_CHECK_VALUE(call.target.sym_sizes() == sizes.slice(0, sizes.size() - 1), call.op, "target",
                 "an index for each row of 'logits', " << describe(call.logits), describe(call.target),
                 "Flatten both in the same way");
  TP_CHECK_VALUE(vocabulary >= 1, call.op, "vocabulary", "at least 1", vocabulary,
                 "Pass the number of columns of all ranks without padding");
  TP_CHECK_VALUE(sizes[sizes.size() - 1] >= (vocabulary - 1) / num_ranks + 1, call.op, "logits",
                 "at least " << (vocabulary - 1) / num_ranks + 1 << " columns, a vocabulary of " << vocabulary
                             << " over " << num_ranks << " ranks",
                 describe(call.logits), "Pad the columns of every rank to the same number");
  TP_CHECK_VALUE(label_smoothing >= 0.0 && label_smoothing < 1.0, call.op, "label_smoothing",
                 "at least 0 and below 1", label_smoothing, "Pass 0.0 for none");
}

// Checks and outputs, the same for every backend.
Losses loss_outputs(const LossCall& call) {
  check_loss(call);
  std::vector<c10::SymInt> sizes(call.target.sym_sizes().begin(), call.target.sym_sizes().end());
  const Tensor losses = empty(call.logits, sizes, at::kFloat);
  sizes.emplace_back(2);
  return {losses, empty(call.logits, sizes, at::kFloat)};
}

CrossEntropyTargets targets_of(const Tensor& target, const Options& options) {
  return {target.const_data_ptr(), target.scalar_type() == at::kLong, options.ignore_index,
          options.vocabulary};
}

CrossEntropyLogits logits_of(const Tensor& logits, int64_t rows, int64_t rank, const Options& options) {
  const int64_t stride = logits.size(-1), first = rank * stride;
  const int64_t cols = std::clamp<int64_t>(options.vocabulary - first, 0, stride);
  return {logits.const_data_ptr(), rows, stride, cols, first, to_dtype(logits.scalar_type())};
}

// The options in one number.
int64_t loss_checksum(double label_smoothing, int64_t ignore_index) {
  Checksum options;
  options.add(std::bit_cast<int64_t>(label_smoothing));
  options.add(ignore_index);
  return options.value();
}

// What the ranks must agree on.
distributed::Call loss_call(const Tensor& logits, int64_t rows, const Options& options) {
  Call call(phases::kCrossEntropy, fields::kAll);
  call.set(fields::kDtype, static_cast<int64_t>(logits.scalar_type()), "logits")
      .set(fields::kRows, rows, "logits")
      .set(fields::kWidth, logits.size(-1), "logits")
      .set(fields::kVocabulary, options.vocabulary, "vocabulary")
      .set(fields::kLossOptions, loss_checksum(options.label_smoothing, options.ignore_index),
           "label_smoothing");
  return call;
}

// Calls `on_cpu`, or `launch` with the stream.
template <typename Args>
void run_on(const Tensor& like, const Args& args, void (*on_cpu)(const Args&),
            [[maybe_unused]] void (*launch)(const Args&, void*)) {
  if (like.is_cpu()) return on_cpu(args);
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(like);
  launch(args, scope.stream());
#endif
}

Losses run_loss(const LossCall& call) {
  const Losses result = loss_outputs(call);
  const Options& options = call.options;
  RankGroup group(call.op, call.group_name, call.timeout_ms, call.logits);
  check_ranks(call.op, group, options.num_ranks);
  const BelowAutograd guard;
  const Tensor logits = call.logits.contiguous(), target = call.target.contiguous();
  const int64_t rows = target.numel();
  const CrossEntropyTargets targets = targets_of(target, options);
  if (logits.is_cpu()) {
    const std::optional<int64_t> wrong = wrong_target_cpu(targets, rows);
    TP_CHECK_VALUE(!wrong, call.op, "target",
                   "indices of the vocabulary, 0 to " << options.vocabulary - 1 << ", or the ignore_index "
                                                      << options.ignore_index,
                   *wrong, "Pass the same target on every rank");
  }
  const int width = options.label_smoothing > 0.0 ? kPartWidth : kPartWidth - 1;
  Tensor parts = empty(logits, {rows, width}, at::kFloat);
  const RowPartArgs of_rank{logits_of(logits, rows, group.rank(), options), targets,
                            parts.mutable_data_ptr<float>(), width};
  run_on(logits, of_rank, row_parts_cpu, launch_row_parts);
  group.begin_call(loss_call(logits, rows, options), 1);
  parts = group.collectives().all_gather(parts, phases::kCrossEntropy).wait();
  const CombineArgs of_all{targets,
                           parts.const_data_ptr<float>(),
                           result.losses.mutable_data_ptr<float>(),
                           result.stats.mutable_data_ptr<float>(),
                           options.num_ranks,
                           rows,
                           logits.size(-1),
                           width,
                           static_cast<float>(options.label_smoothing),
                           static_cast<float>(1.0 - options.label_smoothing)};
  run_on(logits, of_all, combine_cpu, launch_combine);
  return result;
}

struct BackwardCall {
  const Tensor& grad;
  const Tensor& logits;
  const Tensor& target;
  const Tensor& stats;
  Options options;
  std::string_view group_name;
};

Tensor backward_output(const BackwardCall& call) {
  check_loss({kBackward, call.logits, call.target, call.options, call.group_name, -1});
  const Argument logits{kBackward, "logits", call.logits}, grad{kBackward, "grad", call.grad},
      stats{kBackward, "stats", call.stats};
  check_dtype(grad, {at::kFloat});
  check_same_device(grad, logits);
  TP_CHECK_VALUE(call.grad.sym_sizes() == call.target.sym_sizes(), kBackward, "grad",
                 "the sizes of 'target', " << describe(call.target), describe(call.grad),
                 "Pass the gradient of the losses");
  check_dtype(stats, {at::kFloat});
  check_same_device(stats, logits);
  std::vector<c10::SymInt> sizes(call.target.sym_sizes().begin(), call.target.sym_sizes().end());
  sizes.emplace_back(2);
  TP_CHECK_VALUE(call.stats.sym_sizes() == c10::SymIntArrayRef(sizes), kBackward, "stats",
                 "two numbers for each row of 'logits', " << describe(call.logits), describe(call.stats),
                 "Pass what vocab_parallel_cross_entropy_forward returned");
  return empty(call.logits, call.logits.sym_sizes(), call.logits.scalar_type());
}

// Of a mean or a sum, the gradient is one number for all rows.
bool is_one_number(const Tensor& grad) {
  return std::all_of(grad.strides().begin(), grad.strides().end(),
                     [](int64_t stride) { return stride == 0; });
}

Tensor run_backward(const BackwardCall& call) {
  const Tensor result = backward_output(call);
  const Options& options = call.options;
  const RankGroup group(kBackward, call.group_name, -1, call.logits);
  check_ranks(kBackward, group, options.num_ranks);
  const BelowAutograd guard;
  const Tensor logits = call.logits.contiguous(), target = call.target.contiguous();
  const Tensor stats = call.stats.contiguous();
  const bool one = is_one_number(call.grad);
  const Tensor grad = one ? call.grad : call.grad.contiguous();
  const CrossEntropyBackwardArgs args{
      logits_of(logits, target.numel(), group.rank(), options),
      targets_of(target, options),
      grad.const_data_ptr<float>(),
      one ? 0 : 1,
      stats.const_data_ptr<float>(),
      result.mutable_data_ptr(),
      static_cast<float>(1.0 - options.label_smoothing),
      static_cast<float>(options.label_smoothing / static_cast<double>(options.vocabulary))};
  run_on(logits, args, cross_entropy_backward_cpu, launch_cross_entropy_backward);
  return result;
}

// The registered functions. `run` is that of the devices or of Meta.

template <Losses (*run)(const LossCall&)>
Tensor loss(const Tensor& logits, const Tensor& target, int64_t vocabulary, int64_t num_ranks,
            std::string_view group_name, double label_smoothing, int64_t ignore_index, int64_t timeout_ms) {
  const Options options{vocabulary, num_ranks, label_smoothing, ignore_index};
  return run({kOp, logits, target, options, group_name, timeout_ms}).losses;
}

template <Losses (*run)(const LossCall&)>
std::tuple<Tensor, Tensor> loss_forward(const Tensor& logits, const Tensor& target, int64_t vocabulary,
                                        int64_t num_ranks, std::string_view group_name,
                                        double label_smoothing, int64_t ignore_index, int64_t timeout_ms) {
  const Options options{vocabulary, num_ranks, label_smoothing, ignore_index};
  const Losses result = run({kForward, logits, target, options, group_name, timeout_ms});
  return {result.losses, result.stats};
}

template <Tensor (*run)(const BackwardCall&)>
Tensor loss_backward(const Tensor& grad, const Tensor& logits, const Tensor& target, const Tensor& stats,
                     int64_t vocabulary, int64_t num_ranks, std::string_view group_name,
                     double label_smoothing, int64_t ignore_index) {
  const Options options{vocabulary, num_ranks, label_smoothing, ignore_index};
  return run({grad, logits, target, stats, options, group_name});
}

class CrossEntropyFunction : public DifferentiableOnce<CrossEntropyFunction> {
 public:
  static constexpr const char* kName = "vocab_parallel_cross_entropy";
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& logits, const Tensor& target, int64_t vocabulary,
                        int64_t num_ranks, std::string_view group_name, double label_smoothing,
                        int64_t ignore_index, int64_t timeout_ms) {
    const BelowAutograd guard;
    const auto [losses, stats] = ops::vocab_parallel_cross_entropy_forward(
        logits, target, vocabulary, num_ranks, group_name, label_smoothing, ignore_index, timeout_ms);
    ctx->save_for_backward({logits, target, stats});
    ctx->set_materialize_grads(false);
    ctx->saved_data["vocabulary"] = vocabulary;
    ctx->saved_data["num_ranks"] = num_ranks;
    ctx->saved_data["group_name"] = std::string(group_name);
    ctx->saved_data["label_smoothing"] = label_smoothing;
    ctx->saved_data["ignore_index"] = ignore_index;
    return losses;
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(8);
    if (!grads[0].defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    auto& options = ctx->saved_data;
    result[0] = ops::vocab_parallel_cross_entropy_backward(
        grads[0], saved[0], saved[1], saved[2], options["vocabulary"].toInt(), options["num_ranks"].toInt(),
        options["group_name"].toStringRef(), options["label_smoothing"].toDouble(),
        options["ignore_index"].toInt());
    return result;
  }
};

Tensor loss_autograd(const Tensor& logits, const Tensor& target, int64_t vocabulary, int64_t num_ranks,
                     std::string_view group_name, double label_smoothing, int64_t ignore_index,
                     int64_t timeout_ms) {
  if (any_requires_grad(logits)) {
    return CrossEntropyFunction::apply(logits, target, vocabulary, num_ranks, group_name, label_smoothing,
                                       ignore_index, timeout_ms);
  }
  const BelowAutograd guard;
  return ops::vocab_parallel_cross_entropy(logits, target, vocabulary, num_ranks, group_name, label_smoothing,
                                           ignore_index, timeout_ms);
}

}  // namespace

TP_IMPL(vocab_parallel_cross_entropy, loss<run_loss>, loss<loss_outputs>, loss_autograd);

// These have no Autograd registration.
TP_IMPL_CPU_CUDA(vocab_parallel_cross_entropy_forward, loss_forward<run_loss>);
TP_IMPL_FOR(Meta, vocab_parallel_cross_entropy_forward, loss_forward<loss_outputs>);
TP_IMPL_CPU_CUDA(vocab_parallel_cross_entropy_backward, loss_backward<run_backward>);
TP_IMPL_FOR(Meta, vocab_parallel_cross_entropy_backward, loss_backward<backward_output>);

}  // namespace transformer_plugin::tensor_parallel

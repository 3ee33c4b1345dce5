// assign_slots, assign_weighted_slots and count_tokens_per_expert: checks, outputs and kernel arguments (routing/slots.h).
#include "routing/slots.h"

#include <algorithm>
#include <limits>

#include "common/autograd.h"
#include "common/expert_index.h"
#include "common/ops/routing.h"
#include "common/register.h"
#include "common/tensor.h"

namespace transformer_plugin::routing {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();

void check_experts(const char* op, int64_t experts) {
  TP_CHECK_VALUE(experts >= 0 && experts <= kMaxExperts, op, "num_experts", "from 0 to " << kMaxExperts,
                 experts, "Give each rank fewer experts");
}

// A multiple of the 1024 threads that assign a chunk. There are at most 128 chunks, fewer with many experts:
// the block of each chunk reads the counts of all.
[[maybe_unused]] int64_t chunk_size(int64_t items, int64_t experts) {
  constexpr int64_t kThreads = 1024;
  constexpr int64_t kMostCounts = 16384;
  const int64_t most_chunks = std::clamp<int64_t>(kMostCounts / std::max<int64_t>(1, experts), 16, 128);
  return std::max<int64_t>(1, ceil_div(ceil_div(items, most_chunks), kThreads)) * kThreads;
}

}  // namespace

Slots empty_slots(const Argument& indices, int64_t first, int64_t experts, const c10::SymInt& capacity,
                  int64_t alignment, bool with_k) {
  check_dtype(indices, {at::kInt, at::kLong});
  check_dim(indices, 2);
  check_experts(indices.op, experts);
  TP_CHECK_VALUE(first >= 0, indices.op, "first_expert", "an expert's number, 0 or more", first,
                 "Pass the number of the first expert that gets rows");
  TP_CHECK_VALUE(capacity >= 0 && capacity <= kMaxRows, indices.op, "capacity", "from 0 to 2^31 - 1 rows",
                 capacity,
                 "Pass the rows of the buffer, for example tokens * topk + num_experts * (alignment - 1)");
  TP_CHECK_VALUE(alignment >= 1 && alignment <= kMaxRows, indices.op, "alignment", "from 1 to 2^31 - 1",
                 alignment, "Pass 1 for no padding");
  const Tensor& like = indices.tensor;
  TP_CHECK_VALUE(like.sym_numel() <= kMaxRows, indices.op, indices.name, "at most 2^31 - 1 elements",
                 describe(like), "Split the call");
  return {empty(like, like.sym_sizes(), at::kInt),
          empty(like, {capacity}, at::kInt),
          with_k ? empty(like, {capacity}, at::kInt) : Tensor(),
          empty(like, {experts}, at::kLong),
          empty(like, {1}, at::kLong),
          Tensor()};
}

Slots assign_slots(const Argument& indices, int64_t first, int64_t experts, int64_t capacity,
                   int64_t alignment, bool with_k, const std::optional<NamedExperts>& named,
                   const std::optional<Tensor>& weights) {
  Slots slots = empty_slots(indices, first, experts, capacity, alignment, with_k);
  const Tensor input = indices.tensor.contiguous();
  ExpertRange range{first + experts, nullptr};
  if (named) range = check_expert_indices({indices.op, indices.name, input}, named->all, named->advice);
  Tensor w;
  if (weights) {
    TORCH_INTERNAL_ASSERT(weights->scalar_type() == at::kFloat && weights->sizes() == input.sizes());
    w = weights->contiguous();
    slots.probs = empty(input, {capacity}, at::kFloat);
  }
  AssignSlotsArgs args{input.const_data_ptr(),
                       input.scalar_type() == at::kLong,
                       input.size(0),
                       input.size(1),
                       first,
                       experts,
                       capacity,
                       alignment,
                       slots.slot.mutable_data_ptr<int32_t>(),
                       slots.source.mutable_data_ptr<int32_t>(),
                       with_k ? slots.source_k.mutable_data_ptr<int32_t>() : nullptr,
                       slots.group_sizes.mutable_data_ptr<int64_t>(),
                       slots.total.mutable_data_ptr<int64_t>(),
                       weights ? w.const_data_ptr<float>() : nullptr,
                       weights ? slots.probs.mutable_data_ptr<float>() : nullptr,
                       nullptr,
                       0,
                       0,
                       range};
  if (input.is_cpu()) {
    assign_slots_cpu(args);
    return slots;
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(input);
  Tensor chunk_counts;
  if (!args.are_few()) {
    args.chunk_size = chunk_size(input.numel(), experts);
    args.chunks = ceil_div(input.numel(), args.chunk_size);
    chunk_counts = empty(input, {args.chunks, experts}, at::kInt);
    args.chunk_counts = chunk_counts.mutable_data_ptr<int32_t>();
  }
  launch_assign_slots(args, scope.stream());
#endif
  return slots;
}

namespace {

using SlotTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

SlotTensors as_tuple(const Slots& slots) {
  return {slots.slot, slots.source, slots.source_k, slots.group_sizes, slots.total};
}

// `total`: the experts of all ranks, or -1, where the layout has the last of them.
NamedExperts named_experts(const char* op, int64_t first, int64_t experts, int64_t total) {
  int64_t end;
  if (__builtin_add_overflow(first, experts, &end)) end = std::numeric_limits<int64_t>::max();
  TP_CHECK_VALUE(total == -1 || total >= end, op, "total_experts",
                 "at least " << end << ", which are those up to the last of the layout, or -1", total,
                 "Pass the number of experts of all ranks");
  return {total == -1 ? end : total,
          "Name an expert, or pass -1 for none; with more experts on other ranks pass the number of all as "
          "total_experts"};
}

SlotTensors assign_slots_meta(const Tensor& indices, int64_t first, int64_t experts, c10::SymInt capacity,
                              int64_t alignment, int64_t total_experts) {
  const Argument argument{"assign_slots", "indices", indices};
  named_experts(argument.op, first, experts, total_experts);
  return as_tuple(empty_slots(argument, first, experts, capacity, alignment, true));
}

SlotTensors assign_slots_op(const Tensor& indices, int64_t first, int64_t experts, int64_t capacity,
                            int64_t alignment, int64_t total_experts) {
  const Argument argument{"assign_slots", "indices", indices};
  const NamedExperts named = named_experts(argument.op, first, experts, total_experts);
  return as_tuple(assign_slots(argument, first, experts, capacity, alignment, true, named));
}

constexpr const char* kWeighted = "assign_weighted_slots";

// The checks that assign_slots does not make.
void check_slot_weights(const Argument& weights, const Argument& indices) {
  check_dim(indices, 2);
  check_dtype(weights, {at::kFloat});
  check_dim(weights, 2);
  check_same_device(weights, indices);
  check_size(weights, 0, indices.tensor.sym_size(0), "the rows of 'indices'");
  check_size(weights, 1, indices.tensor.sym_size(1), "the columns of 'indices'");
}

SlotTensors with_probs(const Slots& slots) {
  return {slots.slot, slots.source, slots.group_sizes, slots.total, slots.probs};
}

SlotTensors assign_weighted_slots_meta(const Tensor& indices, const Tensor& weights, int64_t first,
                                       int64_t experts, c10::SymInt capacity, int64_t alignment,
                                       int64_t total_experts) {
  const Argument argument{kWeighted, "indices", indices};
  check_slot_weights({kWeighted, "weights", weights}, argument);
  named_experts(kWeighted, first, experts, total_experts);
  Slots slots = empty_slots(argument, first, experts, capacity, alignment, false);
  slots.probs = empty(indices, {capacity}, at::kFloat);
  return with_probs(slots);
}

SlotTensors assign_weighted_slots(const Tensor& indices, const Tensor& weights, int64_t first,
                                  int64_t experts, int64_t capacity, int64_t alignment,
                                  int64_t total_experts) {
  const Argument argument{kWeighted, "indices", indices};
  check_slot_weights({kWeighted, "weights", weights}, argument);
  const NamedExperts named = named_experts(kWeighted, first, experts, total_experts);
  return with_probs(assign_slots(argument, first, experts, capacity, alignment, false, named, weights));
}

class WeightedSlotsFunction : public DifferentiableOnce<WeightedSlotsFunction> {
 public:
  static constexpr const char* kName = "assign_weighted_slots";
  static constexpr bool is_traceable = true;

  static SlotTensors call(const Tensor& indices, const Tensor& weights, int64_t first, int64_t experts,
                          const c10::SymInt& capacity, int64_t alignment, int64_t total_experts) {
    return ops::assign_weighted_slots(indices, weights, first, experts, capacity, alignment, total_experts);
  }

  static variable_list forward(AutogradContext* ctx, const Tensor& indices, const Tensor& weights,
                               int64_t first, int64_t experts, const c10::SymInt& capacity, int64_t alignment,
                               int64_t total_experts) {
    const BelowAutograd guard;
    const auto [slot, source, group_sizes, total, probs] =
        call(indices, weights, first, experts, capacity, alignment, total_experts);
    ctx->save_for_backward({slot, source});
    ctx->mark_non_differentiable({slot, source, group_sizes, total});
    ctx->set_materialize_grads(false);
    return {slot, source, group_sizes, total, probs};
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(7);
    if (!grads[4].defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &slot = saved[0], &source = saved[1];
    // Rows of one column, by the inverse of the map.
    const Tensor values = ops::permute_rows(grads[4].unsqueeze(1), source.unsqueeze(1),
                                            slot.contiguous().view_symint({slot.sym_numel()}), std::nullopt);
    result[1] = values.view_symint(slot.sym_sizes());
    return result;
  }
};

SlotTensors assign_weighted_slots_autograd(const Tensor& indices, const Tensor& weights, int64_t first,
                                           int64_t experts, c10::SymInt capacity, int64_t alignment,
                                           int64_t total_experts) {
  if (any_requires_grad(weights)) {
    const variable_list out =
        WeightedSlotsFunction::apply(indices, weights, first, experts, capacity, alignment, total_experts);
    return {out[0], out[1], out[2], out[3], out[4]};
  }
  const BelowAutograd guard;
  return WeightedSlotsFunction::call(indices, weights, first, experts, capacity, alignment, total_experts);
}

Tensor count_output(const Tensor& indices, int64_t experts) {
  constexpr const char* op = "count_tokens_per_expert";
  check_dtype({op, "indices", indices}, {at::kInt, at::kLong});
  check_experts(op, experts);
  TP_CHECK_VALUE(indices.sym_numel() <= kMaxRows, op, "indices", "at most 2^31 - 1 elements",
                 describe(indices), "Split the call");
  return empty(indices, {experts}, at::kLong);
}

Tensor count_tokens(const Tensor& indices, int64_t experts) {
  const Tensor counts = count_output(indices, experts);
  const Tensor input = indices.contiguous();
  const CountTokensArgs args{input.const_data_ptr(),
                             input.scalar_type() == at::kLong,
                             input.numel(),
                             experts,
                             counts.mutable_data_ptr<int64_t>(),
                             check_expert_indices({"count_tokens_per_expert", "indices", input}, experts)};
  if (input.is_cpu()) {
    count_tokens_cpu(args);
    return counts;
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(input);
  launch_count_tokens(args, scope.stream());
#endif
  return counts;
}

}  // namespace

TP_IMPL(assign_weighted_slots, assign_weighted_slots, assign_weighted_slots_meta,
        assign_weighted_slots_autograd);

// The results of the others are integers: no Autograd registration.
TP_IMPL_CPU_CUDA(assign_slots, assign_slots_op);
TP_IMPL_FOR(Meta, assign_slots, assign_slots_meta);
TP_IMPL_CPU_CUDA(count_tokens_per_expert, count_tokens);
TP_IMPL_FOR(Meta, count_tokens_per_expert, count_output);

}  // namespace transformer_plugin::routing

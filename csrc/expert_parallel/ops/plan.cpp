// plan: gathers the expert indices of all ranks and computes which tokens this rank receives, and the row of each (token, k) in
// the layout of its experts. Counts and drops are the same on every rank. Token t of rank r has the number r * max_tokens + t.
// compact_plan: the same, where of the tokens of all ranks only those are kept that have a row, and not more than a bound; or a
// plan by records, for which ranks exchange counts in place of indices (record_plan.h).

#include "expert_parallel/one_sided/plan.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "common/expert_index.h"
#include "common/ops/distributed.h"
#include "common/ops/expert_parallel.h"
#include "common/register.h"
#include "common/tensor.h"
#include "distributed/watched_work.h"
#include "expert_parallel/one_sided/channel.h"
#include "expert_parallel/ops/checks.h"
#include "expert_parallel/plan_args.h"
#include "expert_parallel/received_rows.h"
#include "expert_parallel/record_plan.h"
#include "routing/rows_args.h"
#include "routing/slots.h"

namespace transformer_plugin::expert_parallel {
namespace {

using at::Tensor;
using c10::SymInt;
// slot, source, tokens_per_expert, required, overflow
using Plan = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
// The same and received, position, required_tokens.
using CompactPlan = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

constexpr const char *kOp = "plan", *kCompactOp = "compact_plan";

struct Sizes {
  const char* op;
  SymInt max_tokens;
  SymInt capacity;
  int64_t experts;
  int64_t alignment;
  int64_t ranks;
  bool compact = false;
  std::optional<SymInt> max_received_tokens = std::nullopt;
  bool records = false;

  SymInt tokens() const { return max_tokens * ranks; }
  int64_t row_multiple() const { return std::max<int64_t>(1, alignment); }
  std::optional<int64_t> bound() const {
    return max_received_tokens ? std::optional(max_received_tokens->expect_int()) : std::nullopt;
  }
  // Of a compact plan: not more tokens than may be received, nor than there are rows of the experts.
  SymInt received_rows() const {
    const SymInt rows = capacity < tokens() ? capacity : tokens();
    return max_received_tokens && *max_received_tokens < rows ? *max_received_tokens : rows;
  }
};

constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();  // indices and counts are int32

void check_sizes(const Sizes& sizes) {
  TP_CHECK_VALUE(sizes.ranks >= 1 && sizes.ranks <= kLargest, sizes.op, "num_ranks", "1 or more", sizes.ranks,
                 "Pass the size of the group");
  TP_CHECK_VALUE(sizes.experts >= sizes.ranks, sizes.op, "num_experts",
                 "at least one expert for each of the " << sizes.ranks << " ranks", sizes.experts,
                 "Use more experts or a smaller group");
  TP_CHECK_VALUE(sizes.experts % sizes.ranks == 0, sizes.op, "num_experts",
                 "a multiple of the " << sizes.ranks << " ranks", sizes.experts,
                 "Give every rank the same number of experts");
  TP_CHECK_VALUE(sizes.experts / sizes.ranks <= routing::kMaxExperts, sizes.op, "num_experts",
                 "at most " << routing::kMaxExperts << " for each rank", sizes.experts, "Use more ranks");
  TP_CHECK_VALUE(sizes.alignment >= 0 && (sizes.alignment & (sizes.alignment - 1)) == 0, sizes.op,
                 "alignment", "0, 1 or a power of two", sizes.alignment, "Pass 1 for no padding");
  TP_CHECK_VALUE(sizes.alignment <= std::numeric_limits<int32_t>::max(), sizes.op, "alignment",
                 "at most 2^30", sizes.alignment, "Pass 1 for no padding");
  TP_CHECK_VALUE(sizes.capacity >= 0, sizes.op, "capacity", "0 or more rows", sizes.capacity,
                 "Pass the rows that the experts of one rank can take");
  TP_CHECK_VALUE(sizes.capacity <= kLargest, sizes.op, "capacity", "at most 2^31 - 1 rows", sizes.capacity,
                 "Split the call");
  TP_CHECK_VALUE(sizes.max_tokens >= 0, sizes.op, "max_tokens", "0 or more", sizes.max_tokens,
                 "Pass the most tokens that any rank brings");
  TP_CHECK_VALUE(sizes.max_tokens <= kLargest, sizes.op, "max_tokens", "at most 2^31 - 1", sizes.max_tokens,
                 "Split the call");
  if (!sizes.max_received_tokens) return;
  TP_CHECK_VALUE(*sizes.max_received_tokens >= 1 && *sizes.max_received_tokens <= kLargest, sizes.op,
                 "max_received_tokens", "from 1 to 2^31 - 1, or None", *sizes.max_received_tokens,
                 "Pass None for room for the tokens of all ranks");
}

// `topk_idx` is [..., K].
void check_arguments(const Tensor& topk_idx, const Sizes& sizes, int64_t timeout_ms) {
  check_timeout(sizes.op, timeout_ms);
  check_sizes(sizes);
  const Argument argument{sizes.op, "topk_idx", topk_idx};
  check_dtype(argument, {at::kInt, at::kLong});
  TP_CHECK_VALUE(topk_idx.dim() >= 2, sizes.op, "topk_idx", "2 dimensions or more, [..., K]",
                 describe(topk_idx), "Reshape it first");
  check_contiguous(argument);
  const SymInt topk = topk_idx.sym_size(-1);
  TP_CHECK_VALUE(topk >= 1 && topk <= routing::kMaxTopk, sizes.op, "topk_idx",
                 "from 1 to " << routing::kMaxTopk << " columns", describe(topk_idx),
                 "Choose at least one expert for each token");
  TP_CHECK_VALUE(topk_idx.sym_numel() <= sizes.max_tokens * topk, sizes.op, "topk_idx",
                 "at most " << sizes.max_tokens << " tokens (max_tokens)", describe(topk_idx),
                 "Pass a larger max_tokens on every rank");
  const SymInt rows = sizes.tokens();
  TP_CHECK_VALUE(rows <= kLargest && rows * topk <= kLargest, sizes.op, "max_tokens",
                 "at most 2^31 - 1 (token, k) pairs in the group", rows << " tokens", "Split the call");
}

// Checks the arguments and allocates the outputs.
Plan plan_outputs(const Tensor& topk_idx, const Sizes& sizes, int64_t timeout_ms) {
  check_arguments(topk_idx, sizes, timeout_ms);
  const SymInt topk = topk_idx.sym_size(-1), rows = sizes.tokens();
  return {empty(topk_idx, {sizes.compact ? sizes.received_rows() : rows, topk}, at::kInt),
          empty(topk_idx, {sizes.capacity}, at::kInt),
          empty(topk_idx, {sizes.experts / sizes.ranks}, at::kLong),
          empty(topk_idx, {sizes.ranks}, at::kLong), empty(topk_idx, {1}, at::kInt)};
}

CompactPlan compact_plan_outputs(const Tensor& topk_idx, const Sizes& sizes, int64_t timeout_ms) {
  Plan plan = plan_outputs(topk_idx, sizes, timeout_ms);
  const Tensor required_tokens = empty(topk_idx, {sizes.ranks}, at::kLong);
  if (!sizes.records) {
    return std::tuple_cat(plan, std::tuple(empty(topk_idx, {sizes.received_rows()}, at::kInt),
                                           empty(topk_idx, {sizes.tokens()}, at::kInt), required_tokens));
  }
  const SymInt most = std::min(topk_idx.sym_size(-1), SymInt(sizes.ranks));
  return std::tuple_cat(plan,
                        std::tuple(empty(topk_idx, {4, sizes.ranks + 1}, at::kInt),
                                   empty(topk_idx, {3, sizes.max_tokens, most}, at::kInt), required_tokens));
}

// This rank's indices in the form in which they are sent: [max_tokens, K] int32, padded with -1.
Tensor pack_indices(const Tensor& topk_idx, const Sizes& sizes, int64_t max_tokens) {
  const int64_t topk = topk_idx.size(-1);
  const Tensor packed = empty(topk_idx, {max_tokens, topk}, at::kInt);
  const PackIndicesArgs args{topk_idx.const_data_ptr(),
                             topk_idx.scalar_type() == at::kLong,
                             topk_idx.numel() / topk,
                             max_tokens,
                             topk,
                             packed.mutable_data_ptr<int32_t>()};
  if (topk_idx.is_cpu()) {
    pack_indices_cpu(args);
    return packed;
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(topk_idx);
  launch_pack_indices(args, scope.stream());
#endif
  return packed;
}

// Checks the indices of all ranks, so that all ranks raise the same error.
ExpertRange check_indices(const Tensor& indices, const Sizes& sizes) {
  const Tensor of_ranks = indices.view({sizes.ranks, indices.size(0) / sizes.ranks, indices.size(1)});
  return check_expert_indices({sizes.op, "topk_idx", of_ranks}, sizes.experts,
                              "Name an expert, or pass -1 for none; the position is [rank, token, k]");
}

void count_rows(const Tensor& indices, const Sizes& sizes, int64_t capacity, int64_t* report,
                const Tensor& required, const Tensor& overflow) {
  CountRowsArgs args{indices.const_data_ptr<int32_t>(),
                     indices.numel(),
                     sizes.experts,
                     sizes.ranks,
                     capacity,
                     sizes.row_multiple(),
                     required.mutable_data_ptr<int64_t>(),
                     overflow.mutable_data_ptr<int32_t>(),
                     report,
                     nullptr,
                     check_indices(indices, sizes)};
  if (indices.is_cpu()) return count_rows_cpu(args);
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(indices);
  const Tensor counts = empty(indices, {sizes.experts}, at::kInt);
  args.counts = counts.mutable_data_ptr<int32_t>();
  launch_count_rows(args, scope.stream());
#endif
}

// Raises the error of too many received tokens: on a CPU here, on CUDA in a later call of the group.
void report_tokens(const Tensor& required_tokens, int64_t bound, const ExpertParallelGroup& group) {
  if (required_tokens.is_cpu())
    return check_room(kCompactOp, required_tokens, bound, "max_received_tokens", "tokens");
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(required_tokens);
  launch_report_tokens(
      {required_tokens.const_data_ptr<int64_t>(), required_tokens.size(0), bound, group.overflow_report()},
      scope.stream());
#endif
}

void check_group(const Tensor& topk_idx, const Sizes& sizes, const ExpertParallelGroup& group,
                 int64_t timeout_ms) {
  TP_CHECK_VALUE(group.size() == sizes.ranks, sizes.op, "num_ranks",
                 group.size() << ", the size of group '" << group.state().name << "'", sizes.ranks,
                 "Pass group.size()");
  check_arguments(topk_idx, sizes, timeout_ms);
}

// Compares the calls of the ranks, of which `collectives` follow.
void begin_plan(const Tensor& topk_idx, const Sizes& sizes, ExpertParallelGroup& group,
                bool raise_on_overflow, int64_t collectives) {
  group.begin_call(make_call(sizes.compact ? phases::kCompactPlanIndices : phases::kPlanIndices)
                       .set(fields::kTopk, topk_idx.size(-1), "topk_idx")
                       .set(fields::kMaxTokens, sizes.max_tokens.expect_int(), "max_tokens")
                       .set(fields::kExperts, sizes.experts, "num_experts")
                       .set(fields::kCapacity, sizes.capacity.expect_int(), "capacity")
                       .set(fields::kAlignment, sizes.row_multiple(), "alignment")
                       .set(fields::kRaise, raise_on_overflow, "raise_on_overflow")
                       .set(fields::kMaxReceived, sizes.bound().value_or(0), "max_received_tokens")
                       .set(fields::kRecords, sizes.records, "records"),
                   collectives);
}

// What both ops do. `compact`: where there is one, also its last three tensors.
Plan make_plan(const Tensor& topk_idx, const Sizes& sizes, std::string_view group_name,
               bool raise_on_overflow, int64_t timeout_ms, CompactPlan* compact) {
  check_sizes(sizes);
  ExpertParallelGroup group(sizes.op, group_name, timeout_ms, topk_idx);
  check_group(topk_idx, sizes, group, timeout_ms);
  const Tensor packed = pack_indices(topk_idx, sizes, sizes.max_tokens.expect_int());
  begin_plan(topk_idx, sizes, group, raise_on_overflow, 1);
  const int64_t capacity = sizes.capacity.expect_int();
  const std::optional<int64_t> bound = sizes.bound();
  const Tensor required = empty(topk_idx, {sizes.ranks}, at::kLong),
               overflow = empty(topk_idx, {1}, at::kInt);
  Tensor indices = group.collectives().all_gather(packed, phases::kPlanIndices).wait();
  int64_t* report = raise_on_overflow ? group.overflow_report() : nullptr;
  count_rows(indices, sizes, capacity, report, required, overflow);
  const int64_t local = sizes.experts / sizes.ranks, first = group.rank() * local;
  Tensor required_tokens;
  if (sizes.compact) {
    required_tokens = count_distinct_tokens(indices, sizes.experts, sizes.ranks);
    if (bound) {
      overflow.bitwise_or_(required_tokens.gt(*bound).any());
      if (raise_on_overflow) report_tokens(required_tokens, *bound, group);
      indices = drop_tokens_past(indices, first, local, *bound);
    }
  }
  if (raise_on_overflow && topk_idx.is_cpu()) check_room(sizes.op, required, capacity, "capacity", "rows");
  const routing::Slots slots = routing::assign_slots({sizes.op, "topk_idx", indices}, first, local, capacity,
                                                     sizes.row_multiple(), false, std::nullopt);
  Tensor slot = slots.slot, source = slots.source;
  OptionalTensor position;
  if (sizes.compact) {
    CompactRows rows = compact_rows(slot, source, sizes.received_rows().expect_int());
    slot = rows.slot;
    source = rows.source;
    position = rows.position;
    *compact = {slot,     source,        slots.group_sizes, required,
                overflow, rows.received, rows.position,     required_tokens};
  }
  group.remember_plan(slot, topk_idx.numel() / topk_idx.size(-1), source, position);
  return {slot, source, slots.group_sizes, required, overflow};
}

#ifdef TRANSFORMER_PLUGIN_CUDA
// By puts into the memory of the other ranks, in the channel of the group.
RecordPlan plan_in_channel(const Tensor& topk_idx, const Sizes& sizes, const RecordPlanSizes& record_sizes,
                           ExpertParallelGroup& group) {
  const auto channel = one_sided::channel_of(sizes.op, group);
  const int64_t topk = topk_idx.size(-1);
  TP_CHECK_VALUE(
      sizes.experts <= channel->sizes().experts &&
          record_sizes.received_rows * topk <= channel->sizes().planned_rows * channel->sizes().topk,
      sizes.op, "group_name",
      "a channel for " << sizes.experts << " experts and " << record_sizes.received_rows << " rows",
      channel->sizes().experts << " experts and " << channel->sizes().planned_rows << " rows",
      "Make the EpContext with the largest sizes of its calls");
  const CudaScope scope(topk_idx);
  int64_t* const report = record_sizes.raise_on_overflow ? group.overflow_report() : nullptr;
  const one_sided::ChannelTurn turn(*channel, topk_idx.device());
  const distributed::WatchedWork watched(group.shared_state(), phases::kCompactPlanCounts, group.timeout(),
                                         std::nullopt);
  one_sided::PlanCall call =
      one_sided::make_plan_call(topk_idx, sizes.max_tokens.expect_int(), record_sizes,
                                {channel->plan_layout(), channel->peers(), channel->plan_state(),
                                 one_sided::kernel_timeout_ns(group), watched.marks(), channel->failure()},
                                report);
  one_sided::launch_plan(call.args, one_sided::PlanStep::kAll, scope.stream());
  return std::move(call.plan);
}
#endif

CompactPlan plan_by_records(const Tensor& topk_idx, const Sizes& sizes, std::string_view group_name,
                            bool raise_on_overflow, int64_t timeout_ms) {
  check_sizes(sizes);
  ExpertParallelGroup group(sizes.op, group_name, timeout_ms, topk_idx);
  const RecordPlanSizes record_sizes{sizes.op,
                                     sizes.experts,
                                     sizes.capacity.expect_int(),
                                     sizes.row_multiple(),
                                     sizes.bound(),
                                     sizes.received_rows().expect_int(),
                                     raise_on_overflow};
  check_group(topk_idx, sizes, group, timeout_ms);
  const auto make = [&] {
#ifdef TRANSFORMER_PLUGIN_CUDA
    if (topk_idx.is_cuda() && group.channel()) {
      begin_plan(topk_idx, sizes, group, raise_on_overflow, 1);
      return plan_in_channel(topk_idx, sizes, record_sizes, group);
    }
#endif
    check_host_may_read(sizes.op, "topk_idx", topk_idx);
    const Tensor packed = pack_indices(topk_idx, sizes, sizes.max_tokens.expect_int());
    begin_plan(topk_idx, sizes, group, raise_on_overflow, record_sizes.collectives());
    return make_record_plan(packed, record_sizes, group);
  };
  RecordPlan plan = make();
  group.remember_plan(plan.slot, topk_idx.numel() / topk_idx.size(-1), plan.source, plan.records);
  return {plan.slot,     plan.source,    plan.tokens_per_expert, plan.required,
          plan.overflow, plan.peer_rows, plan.records,           plan.required_tokens};
}

Plan plan(const Tensor& topk_idx, int64_t num_experts, int64_t max_tokens, int64_t capacity,
          int64_t alignment, int64_t num_ranks, std::string_view group_name, bool raise_on_overflow,
          int64_t timeout_ms) {
  const Sizes sizes{kOp, max_tokens, capacity, num_experts, alignment, num_ranks};
  return make_plan(topk_idx, sizes, group_name, raise_on_overflow, timeout_ms, nullptr);
}

CompactPlan compact_plan(const Tensor& topk_idx, int64_t num_experts, int64_t max_tokens, int64_t capacity,
                         int64_t alignment, int64_t num_ranks, std::string_view group_name,
                         bool raise_on_overflow, int64_t timeout_ms,
                         std::optional<int64_t> max_received_tokens, bool records) {
  const Sizes sizes{kCompactOp, max_tokens,          capacity, num_experts, alignment, num_ranks,
                    true,       max_received_tokens, records};
  if (records) return plan_by_records(topk_idx, sizes, group_name, raise_on_overflow, timeout_ms);
  CompactPlan result;
  make_plan(topk_idx, sizes, group_name, raise_on_overflow, timeout_ms, &result);
  return result;
}

Plan plan_meta(const Tensor& topk_idx, int64_t num_experts, SymInt max_tokens, SymInt capacity,
               int64_t alignment, int64_t num_ranks, std::string_view, bool, int64_t timeout_ms) {
  return plan_outputs(topk_idx, {kOp, max_tokens, capacity, num_experts, alignment, num_ranks}, timeout_ms);
}

CompactPlan compact_plan_meta(const Tensor& topk_idx, int64_t num_experts, SymInt max_tokens, SymInt capacity,
                              int64_t alignment, int64_t num_ranks, std::string_view, bool,
                              int64_t timeout_ms, std::optional<SymInt> max_received_tokens, bool records) {
  return compact_plan_outputs(topk_idx,
                              {kCompactOp, max_tokens, capacity, num_experts, alignment, num_ranks, true,
                               std::move(max_received_tokens), records},
                              timeout_ms);
}

// Makes the comparison of a new kind of call on CUDA, for a dispatch of `width` columns, but on any device.
void compare_header(std::string_view group_name, at::ScalarType dtype, int64_t width, int64_t timeout_ms) {
  RankGroup("compare_header", group_name, timeout_ms, Tensor())
      .compare_through_store(make_call(phases::kDispatchTokens)
                                 .set(fields::kDtype, static_cast<int64_t>(dtype), "dtype")
                                 .set(fields::kWidth, width, "width"));
}

}  // namespace

TP_IMPL_CPU_CUDA(plan, plan);
TP_IMPL_FOR(Meta, plan, plan_meta);
TP_IMPL_CPU_CUDA(compact_plan, compact_plan);
TP_IMPL_FOR(Meta, compact_plan, compact_plan_meta);
TP_IMPL_FOR(CompositeExplicitAutograd, compare_header, compare_header);

}  // namespace transformer_plugin::expert_parallel

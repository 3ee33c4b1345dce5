// plan: gathers the expert indices of all ranks and computes, identically on every rank, the row of each
// (token, k) in the layout of the rank that holds its expert. Row r * max_tokens + t of `slot` is token t of
// rank r.

#include <bit>
#include <limits>

#include "common/expert_index.h"
#include "common/register.h"
#include "common/tensor.h"
#include "expert_parallel/exchange.h"
#include "expert_parallel/exchange_args.h"
#include "routing/rows_args.h"
#include "routing/slots.h"

namespace transformer_plugin::expert_parallel {
namespace {

using at::Tensor;
using c10::SymInt;
// slot, source, tokens_per_expert, required, overflow
using Plan = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

constexpr const char* kOp = "plan";

struct Sizes {
  SymInt max_tokens;
  SymInt capacity;
  int64_t experts;
  int64_t alignment;
  int64_t ranks;
};

constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();  // indices and counts are int32

void check_sizes(const Sizes& sizes) {
  TP_CHECK_VALUE(sizes.ranks >= 1 && sizes.ranks <= kLargest, kOp, "num_ranks", "1 or more", sizes.ranks,
                 "Pass the size of the group");
  TP_CHECK_VALUE(sizes.experts >= sizes.ranks, kOp, "num_experts",
                 "at least one expert for each of the " << sizes.ranks << " ranks", sizes.experts,
                 "Use more experts or a smaller group");
  TP_CHECK_VALUE(sizes.experts % sizes.ranks == 0, kOp, "num_experts",
                 "a multiple of the " << sizes.ranks << " ranks", sizes.experts,
                 "Give every rank the same number of experts");
  TP_CHECK_VALUE(sizes.experts / sizes.ranks <= routing::kMaxExperts, kOp, "num_experts",
                 "at most " << routing::kMaxExperts << " for each rank", sizes.experts, "Use more ranks");
  TP_CHECK_VALUE(sizes.alignment >= 0 && (sizes.alignment & (sizes.alignment - 1)) == 0, kOp, "alignment",
                 "0, 1 or a power of two", sizes.alignment, "Pass 1 for no padding");
  TP_CHECK_VALUE(sizes.alignment <= std::numeric_limits<int32_t>::max(), kOp, "alignment", "at most 2^30",
                 sizes.alignment, "Pass 1 for no padding");
  TP_CHECK_VALUE(sizes.capacity >= 0, kOp, "capacity", "0 or more rows", sizes.capacity,
                 "Pass the rows that the experts of one rank can take");
  TP_CHECK_VALUE(sizes.capacity <= kLargest, kOp, "capacity", "at most 2^31 - 1 rows", sizes.capacity,
                 "Split the call");
  TP_CHECK_VALUE(sizes.max_tokens >= 0, kOp, "max_tokens", "0 or more", sizes.max_tokens,
                 "Pass the most tokens that any rank brings");
  TP_CHECK_VALUE(sizes.max_tokens <= kLargest, kOp, "max_tokens", "at most 2^31 - 1", sizes.max_tokens,
                 "Split the call");
}

// Checks the arguments and allocates the outputs, for all backends. `topk_idx` is [..., K].
Plan plan_outputs(const Tensor& topk_idx, const Sizes& sizes, int64_t timeout_ms) {
  check_timeout(kOp, timeout_ms);
  check_sizes(sizes);
  const Argument argument{kOp, "topk_idx", topk_idx};
  check_dtype(argument, {at::kInt, at::kLong});
  TP_CHECK_VALUE(topk_idx.dim() >= 2, kOp, "topk_idx", "2 dimensions or more, [..., K]", describe(topk_idx),
                 "Reshape it first");
  check_contiguous(argument);
  const SymInt topk = topk_idx.sym_size(-1);
  TP_CHECK_VALUE(topk >= 1 && topk <= routing::kMaxTopk, kOp, "topk_idx",
                 "from 1 to " << routing::kMaxTopk << " columns", describe(topk_idx),
                 "Choose at least one expert for each token");
  TP_CHECK_VALUE(topk_idx.sym_numel() <= sizes.max_tokens * topk, kOp, "topk_idx",
                 "at most " << sizes.max_tokens << " tokens (max_tokens)", describe(topk_idx),
                 "Pass a larger max_tokens on every rank");
  const SymInt rows = sizes.max_tokens * sizes.ranks;
  TP_CHECK_VALUE(rows <= kLargest && rows * topk <= kLargest, kOp, "max_tokens",
                 "at most 2^31 - 1 (token, k) pairs in the group", rows << " tokens", "Split the call");
  return {empty(topk_idx, {rows, topk}, at::kInt), empty(topk_idx, {sizes.capacity}, at::kInt),
          empty(topk_idx, {sizes.experts / sizes.ranks}, at::kLong),
          empty(topk_idx, {sizes.ranks}, at::kLong), empty(topk_idx, {1}, at::kInt)};
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
  return check_expert_indices({kOp, "topk_idx", of_ranks}, sizes.experts,
                              "Name an expert, or pass -1 for none; the position is [rank, token, k]");
}

void count_rows(const Tensor& indices, const Sizes& sizes, int64_t capacity, int64_t* report,
                const Tensor& required, const Tensor& overflow) {
  CountRowsArgs args{indices.const_data_ptr<int32_t>(),
                     indices.numel(),
                     sizes.experts,
                     sizes.ranks,
                     capacity,
                     sizes.alignment,
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

Plan plan(const Tensor& topk_idx, int64_t num_experts, int64_t max_tokens, int64_t capacity,
          int64_t alignment, int64_t num_ranks, std::string group_name, bool raise_on_overflow,
          int64_t timeout_ms) {
  Sizes sizes{max_tokens, capacity, num_experts, alignment, num_ranks};
  check_sizes(sizes);
  ExpertParallelGroup group(kOp, group_name, timeout_ms, topk_idx);
  TP_CHECK_VALUE(group.size() == num_ranks, kOp, "num_ranks",
                 group.size() << ", the size of group '" << group_name << "'", num_ranks,
                 "Pass group.size()");
  auto [slot, source, tokens_per_expert, required, overflow] = plan_outputs(topk_idx, sizes, timeout_ms);
  sizes.alignment = std::max<int64_t>(1, alignment);
  const Tensor packed = pack_indices(topk_idx, sizes, max_tokens);
  group.begin_call(make_call(phases::kPlanIndices)
                       .set(fields::kTopk, topk_idx.size(-1), "topk_idx")
                       .set(fields::kMaxTokens, max_tokens, "max_tokens")
                       .set(fields::kExperts, num_experts, "num_experts")
                       .set(fields::kCapacity, capacity, "capacity")
                       .set(fields::kAlignment, sizes.alignment, "alignment")
                       .set(fields::kRaise, raise_on_overflow, "raise_on_overflow"),
                   1);
  const Tensor indices = group.all_gather(packed, phases::kPlanIndices);
  int64_t* report = raise_on_overflow ? group.overflow_report() : nullptr;
  count_rows(indices, sizes, capacity, report, required, overflow);
  if (raise_on_overflow && topk_idx.is_cpu() && *overflow.const_data_ptr<int32_t>()) {
    const int64_t* rows = required.const_data_ptr<int64_t>();
    const int64_t rank = std::max_element(rows, rows + num_ranks) - rows;
    TP_CHECK_VALUE(false, kOp, "capacity",
                   "room for " << rows[rank] << " rows, which rank " << rank << " needs", capacity,
                   "Raise the capacity on every rank, or use the overflow policy \"drop\"");
  }
  const int64_t local = num_experts / num_ranks;
  const routing::Slots slots = routing::assign_slots({kOp, "topk_idx", indices}, group.rank() * local, local,
                                                     capacity, sizes.alignment, false, std::nullopt);
  group.remember_plan(slots.slot, topk_idx.numel() / topk_idx.size(-1));
  return {slots.slot, slots.source, slots.group_sizes, required, overflow};
}

Plan plan_meta(const Tensor& topk_idx, int64_t num_experts, SymInt max_tokens, SymInt capacity,
               int64_t alignment, int64_t num_ranks, std::string group_name, bool raise_on_overflow,
               int64_t timeout_ms) {
  return plan_outputs(topk_idx, {max_tokens, capacity, num_experts, alignment, num_ranks}, timeout_ms);
}

// Makes the comparison of a new kind of call on CUDA, for a dispatch of `width` columns, but on any device.
void compare_call(std::string group_name, at::ScalarType dtype, int64_t width, int64_t timeout_ms) {
  RankGroup("compare_call", group_name, timeout_ms, Tensor())
      .compare_through_store(make_call(phases::kDispatchTokens)
                                 .set(fields::kDtype, static_cast<int64_t>(dtype), "dtype")
                                 .set(fields::kWidth, width, "width"));
}

}  // namespace

TP_IMPL_CPU_CUDA("plan", plan);
TP_IMPL_FOR(Meta, "plan", plan_meta);
TP_IMPL_FOR(CompositeExplicitAutograd, "compare_call", compare_call);

}  // namespace transformer_plugin::expert_parallel

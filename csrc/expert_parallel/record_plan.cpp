#include "expert_parallel/record_plan.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <vector>

#include "common/check.h"
#include "common/expert_index.h"
#include "common/tensor.h"
#include "expert_parallel/plan_args.h"

namespace transformer_plugin::expert_parallel {
namespace {

using at::Tensor;

// Where the numbers of one rank are: a count for each expert, the tokens that it sends to each rank, and its wrong indices.
struct CountsLayout {
  int64_t experts, ranks;

  int64_t tokens_to(int64_t rank) const { return experts + rank; }
  int64_t wrong_count() const { return experts + ranks; }
  int64_t wrong_place() const { return experts + ranks + 1; }
  int64_t wrong_index() const { return experts + ranks + 2; }
  int64_t width() const { return experts + ranks + 3; }
};

// The indices of one rank, on the host.
struct HostIndices {
  int32_t* values;  // [tokens, topk]
  int64_t tokens, topk;
  CountsLayout layout;

  int64_t experts_of_rank() const { return layout.experts / layout.ranks; }
  bool is_expert(int32_t index) const { return index >= 0 && index < layout.experts; }

  // Calls visit(rank) for each rank that has an expert of the token, in ascending order.
  template <typename Visit>
  void visit_ranks(int64_t token, std::vector<int64_t>& scratch, Visit&& visit) const {
    scratch.clear();
    for (int64_t k = 0; k < topk; ++k) {
      const int32_t index = values[token * topk + k];
      if (is_expert(index)) scratch.push_back(index / experts_of_rank());
    }
    std::sort(scratch.begin(), scratch.end());
    const auto end = std::unique(scratch.begin(), scratch.end());
    for (auto rank = scratch.begin(); rank != end; ++rank) visit(*rank);
  }
};

Tensor count(const HostIndices& indices) {
  const CountsLayout& layout = indices.layout;
  Tensor counts = at::full({1, layout.width()}, 0, at::kInt);
  int32_t* const numbers = counts.mutable_data_ptr<int32_t>();
  std::vector<int64_t> scratch;
  for (int64_t i = indices.tokens * indices.topk - 1; i >= 0; --i) {
    const int32_t index = indices.values[i];
    if (indices.is_expert(index)) {
      ++numbers[index];
    } else if (index != kNoExpert) {
      ++numbers[layout.wrong_count()];
      numbers[layout.wrong_place()] = static_cast<int32_t>(i);
      numbers[layout.wrong_index()] = index;
    }
  }
  for (int64_t t = 0; t < indices.tokens; ++t)
    indices.visit_ranks(t, scratch, [&](int64_t rank) { ++numbers[layout.tokens_to(rank)]; });
  return counts;
}

// The numbers of all ranks.
struct Counts {
  Tensor table;  // int32 [R, width]
  CountsLayout layout;

  int64_t at(int64_t rank, int64_t column) const {
    return table.const_data_ptr<int32_t>()[rank * layout.width() + column];
  }
  // Of all ranks before `end`.
  int64_t sum(int64_t column, int64_t end) const {
    int64_t result = 0;
    for (int64_t rank = 0; rank < end; ++rank) result += at(rank, column);
    return result;
  }
  int64_t sum(int64_t column) const { return sum(column, layout.ranks); }
};

void check_indices(const Counts& counts, const RecordPlanSizes& sizes, int64_t topk,
                   const ExpertParallelGroup& group) {
  const CountsLayout& layout = counts.layout;
  const int64_t wrong = counts.sum(layout.wrong_count());
  if (wrong == 0) return;
  group.collectives().cancel_call();
  int64_t rank = 0;
  while (counts.at(rank, layout.wrong_count()) == 0) ++rank;
  const int64_t place = counts.at(rank, layout.wrong_place());
  TP_CHECK_VALUE(false, sizes.op, "topk_idx", describe(ExpertRange{sizes.experts, nullptr}),
                 counts.at(rank, layout.wrong_index())
                     << " at [" << rank << ", " << place / topk << ", " << place % topk << "]"
                     << (wrong > 1 ? " and " + std::to_string(wrong - 1) + " more that are neither" : ""),
                 "Name an expert, or pass -1 for none; the position is [rank, token, k]");
}

// int64 [R]: the rows that each rank's experts need, or the tokens.
Tensor required_rows(const Counts& counts, const RecordPlanSizes& sizes) {
  const int64_t ranks = counts.layout.ranks, local = sizes.experts / ranks;
  Tensor required = at::full({ranks}, 0, at::kLong);
  for (int64_t e = 0; e < sizes.experts; ++e)
    required.mutable_data_ptr<int64_t>()[e / local] += padded_rows(counts.sum(e), sizes.alignment);
  return required;
}

Tensor required_tokens(const Counts& counts) {
  Tensor required = at::full({counts.layout.ranks}, 0, at::kLong);
  for (int64_t rank = 0; rank < counts.layout.ranks; ++rank)
    required.mutable_data_ptr<int64_t>()[rank] = counts.sum(counts.layout.tokens_to(rank));
  return required;
}

// Drops the experts of each rank in those of this rank's tokens that are past the bound there.
void drop_tokens_past(const HostIndices& indices, const Counts& counts, int64_t bound, int64_t own_rank) {
  std::vector<int64_t> left, scratch;
  for (int64_t rank = 0; rank < counts.layout.ranks; ++rank)
    left.push_back(bound - counts.sum(counts.layout.tokens_to(rank), own_rank));
  for (int64_t t = 0; t < indices.tokens; ++t) {
    int32_t* const of_token = indices.values + t * indices.topk;
    indices.visit_ranks(t, scratch, [&](int64_t rank) {
      if (left[rank]-- > 0) return;
      for (int64_t k = 0; k < indices.topk; ++k) {
        if (indices.is_expert(of_token[k]) && of_token[k] / indices.experts_of_rank() == rank)
          of_token[k] = kNoExpert;
      }
    });
  }
}

// The first slot of each expert in the layout of its rank, and after the last expert of the rank.
class FirstSlots {
 public:
  FirstSlots(const Counts& counts, const RecordPlanSizes& sizes)
      : local_(sizes.experts / counts.layout.ranks), capacity_(sizes.capacity) {
    for (int64_t e = 0; e < sizes.experts; ++e) {
      const int64_t begin = e % local_ == 0 ? 0 : end_.back();
      begin_.push_back(begin);
      end_.push_back(begin + padded_rows(counts.sum(e), sizes.alignment));
    }
  }
  int64_t operator[](int64_t expert) const { return begin_[expert]; }
  // Of the slots of the expert, with padding.
  int64_t kept(int64_t expert) const {
    return std::min(end_[expert], capacity_) - std::min(begin_[expert], capacity_);
  }

 private:
  int64_t local_, capacity_;
  std::vector<int64_t> begin_, end_;
};

// What this rank sends.
struct SentRecords {
  Tensor records;               // as in RecordPlan
  Tensor slots;                 // [records, K]
  std::vector<int64_t> counts;  // of each rank
};

// The slots of this rank's (token, k) at the ranks of their experts; -1 if dropped.
std::vector<int32_t> slots_of(const HostIndices& indices, const Counts& counts, const FirstSlots& first,
                              const RecordPlanSizes& sizes, int64_t own_rank) {
  std::vector<int64_t> next;
  for (int64_t e = 0; e < sizes.experts; ++e) next.push_back(first[e] + counts.sum(e, own_rank));
  std::vector<int32_t> slots(indices.tokens * indices.topk, -1);
  for (size_t i = 0; i < slots.size(); ++i) {
    if (!indices.is_expert(indices.values[i])) continue;
    const int64_t slot = next[indices.values[i]]++;
    if (slot < sizes.capacity) slots[i] = static_cast<int32_t>(slot);
  }
  return slots;
}

SentRecords send_records(const HostIndices& indices, const std::vector<int32_t>& slots) {
  const int64_t ranks = indices.layout.ranks, topk = indices.topk, most = std::min(topk, ranks);
  const auto is_kept = [&](int64_t i, int64_t rank) {
    return slots[i] >= 0 && indices.values[i] / indices.experts_of_rank() == rank;
  };
  std::vector<std::vector<int64_t>> tokens_to(ranks);
  std::vector<int64_t> scratch;
  for (int64_t t = 0; t < indices.tokens; ++t) {
    indices.visit_ranks(t, scratch, [&](int64_t rank) {
      for (int64_t k = 0; k < topk; ++k) {
        if (!is_kept(t * topk + k, rank)) continue;
        tokens_to[rank].push_back(t);
        break;
      }
    });
  }
  SentRecords sent;
  sent.records = at::full({3, indices.tokens, most}, -1, at::kInt);
  int32_t* const of_tokens = sent.records.mutable_data_ptr<int32_t>();
  int32_t* const tokens = of_tokens + indices.tokens * most;
  int32_t* const first_slots = tokens + indices.tokens * most;
  std::vector<int64_t> used(indices.tokens);
  int64_t record = 0;
  for (const auto& each : tokens_to) {
    sent.counts.push_back(static_cast<int64_t>(each.size()));
    for (const int64_t t : each) {
      of_tokens[t * most + used[t]++] = static_cast<int32_t>(record);
      tokens[record++] = static_cast<int32_t>(t);
    }
  }
  sent.slots = at::full({record, topk}, -1, at::kInt);
  int32_t* row = sent.slots.mutable_data_ptr<int32_t>();
  record = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    for (const int64_t t : tokens_to[rank]) {
      for (int64_t k = 0; k < topk; ++k)
        if (is_kept(t * topk + k, rank)) row[k] = slots[t * topk + k];
      first_slots[record++] = *std::find_if(row, row + topk, [](int32_t slot) { return slot >= 0; });
      row += topk;
    }
  }
  return sent;
}

// Of `counts` [R, R]: how many rows each rank sends to each rank.
Tensor peer_rows(const Tensor& counts, int64_t own_rank) {
  const int64_t ranks = counts.size(0);
  const int32_t* const numbers = counts.const_data_ptr<int32_t>();
  const auto from_to = [&](int64_t from, int64_t to) { return numbers[from * ranks + to]; };
  Tensor rows = at::full({4, ranks + 1}, 0, at::kInt);
  int32_t* const out = rows.mutable_data_ptr<int32_t>();
  for (int64_t r = 0; r < ranks; ++r) {
    out[kReceived * (ranks + 1) + r + 1] = out[kReceived * (ranks + 1) + r] + from_to(r, own_rank);
    out[kSent * (ranks + 1) + r + 1] = out[kSent * (ranks + 1) + r] + from_to(own_rank, r);
    for (int64_t before = 0; before < own_rank; ++before) {
      if (before == r || r == own_rank) continue;  // a rank's own rows do not travel
      out[kPut * (ranks + 1) + r] += from_to(before, r);
      out[kReturned * (ranks + 1) + r] += from_to(r, before);
    }
  }
  return rows;
}

std::vector<int64_t> column(const Tensor& counts, int64_t rank) {
  std::vector<int64_t> result;
  for (int64_t r = 0; r < counts.size(0); ++r)
    result.push_back(counts.const_data_ptr<int32_t>()[r * counts.size(1) + rank]);
  return result;
}

}  // namespace

void check_room(const char* op, const Tensor& needed, int64_t bound, const char* argument, const char* what) {
  const int64_t* counts = needed.const_data_ptr<int64_t>();
  const int64_t rank = std::max_element(counts, counts + needed.size(0)) - counts;
  TP_CHECK_VALUE(counts[rank] <= bound, op, argument,
                 "room for " << counts[rank] << ' ' << what << ", which rank " << rank << " needs", bound,
                 "Raise the " << argument << " on every rank, or use the overflow policy \"drop\"");
}

void check_host_may_read(const char* op, const char* argument, const Tensor& tensor) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (!tensor.is_cuda()) return;
  const CudaScope scope(tensor);
  TP_CHECK_VALUE(!distributed::stream_is_captured(scope.stream()), op, argument,
                 "a stream that is not captured, because the host reads how many rows the ranks send",
                 "a stream from which a CUDA graph is captured",
                 "Use the transport \"all_gather\" in CUDA graphs");
#endif
}

RecordPlan make_record_plan(const Tensor& given, const RecordPlanSizes& sizes,
                            const ExpertParallelGroup& group) {
  const CountsLayout layout{sizes.experts, group.size()};
  const int64_t own_rank = group.rank(), local = sizes.experts / group.size();
  const Tensor host = given.to(at::kCPU, at::kInt, /*non_blocking=*/false, /*copy=*/true);
  const HostIndices indices{host.mutable_data_ptr<int32_t>(), host.size(0), host.size(1), layout};
  // Collectives take tensors on the device of the group.
  const auto to_device = [&](const Tensor& tensor) { return tensor.to(given.device()); };
  const auto gather_counts = [&](const Tensor& mine) {
    return group.collectives().all_gather(to_device(mine), phases::kCompactPlanCounts).wait().cpu();
  };
  Counts counts{gather_counts(count(indices)), layout};
  check_indices(counts, sizes, indices.topk, group);
  RecordPlan plan;
  plan.required = required_rows(counts, sizes);
  plan.required_tokens = required_tokens(counts);
  const auto exceeds = [](const Tensor& needed, int64_t bound) {
    return needed.gt(bound).any().item<bool>();
  };
  const bool past_bound = sizes.bound && exceeds(plan.required_tokens, *sizes.bound);
  const bool overflow = exceeds(plan.required, sizes.capacity) || past_bound;
  plan.overflow = at::full({1}, overflow, at::kInt);
  if (sizes.raise_on_overflow && overflow) {
    group.collectives().cancel_call();
    if (past_bound) check_room(sizes.op, plan.required_tokens, *sizes.bound, "max_received_tokens", "tokens");
    check_room(sizes.op, plan.required, sizes.capacity, "capacity", "rows");
  }
  if (sizes.bound) {
    drop_tokens_past(indices, counts, *sizes.bound, own_rank);
    counts.table = gather_counts(count(indices));
  }
  const FirstSlots first(counts, sizes);
  const SentRecords sent = send_records(indices, slots_of(indices, counts, first, sizes, own_rank));
  const Tensor mine = at::full({1, layout.ranks}, 0, at::kInt);
  std::copy(sent.counts.begin(), sent.counts.end(), mine.mutable_data_ptr<int32_t>());
  const Tensor from_to = gather_counts(mine);
  const Tensor received = group.collectives()
                              .all_to_all_rows(to_device(sent.slots), sent.counts, column(from_to, own_rank),
                                               phases::kCompactPlanSlots)
                              .wait()
                              .cpu();
  plan.slot = at::full({sizes.received_rows, indices.topk}, -1, at::kInt);
  plan.slot.narrow(0, 0, received.size(0)).copy_(received);
  plan.source = at::full({sizes.capacity}, -1, at::kInt);
  const int32_t* const slots = received.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < received.numel(); ++i) {
    if (slots[i] >= 0)
      plan.source.mutable_data_ptr<int32_t>()[slots[i]] = static_cast<int32_t>(i / indices.topk);
  }
  plan.tokens_per_expert = at::full({local}, 0, at::kLong);
  for (int64_t e = 0; e < local; ++e)
    plan.tokens_per_expert.mutable_data_ptr<int64_t>()[e] = first.kept(own_rank * local + e);
  plan.records = sent.records;
  plan.peer_rows = peer_rows(from_to, own_rank);
  for (Tensor* tensor : {&plan.slot, &plan.source, &plan.tokens_per_expert, &plan.required, &plan.overflow,
                         &plan.peer_rows, &plan.records, &plan.required_tokens})
    *tensor = to_device(*tensor);
  return plan;
}

Tensor records_of_tokens(const Tensor& records) { return records.select(0, 0); }

Tensor tokens_of_records(const Tensor& records) { return records.select(0, 1).flatten(); }

}  // namespace transformer_plugin::expert_parallel

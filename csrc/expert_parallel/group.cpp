// Plans of a process group: the records that ranks compare, and the report of one whose rows did not fit.
#include "expert_parallel/group.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include "common/check.h"
#include "common/tensor.h"
#include "expert_parallel/plan_args.h"

namespace transformer_plugin::expert_parallel {

using at::Tensor;

// Of one process group, from its first plan until the group is destroyed.
struct GroupPlans {
  std::mutex mutex;  // guards `records`
  std::vector<PlanRecord> records;

  // In pinned host memory, because the host reads it while the device may write. Null before the first plan on CUDA.
  std::atomic<int64_t*> overflow{nullptr};
  std::once_flag overflow_once;
};

ExpertParallelGroup::ExpertParallelGroup(const char* op, std::string_view name, int64_t timeout_ms,
                                         const Tensor& like)
    : RankGroup(op, name, timeout_ms, like), like_(like), plans_(state().extension<GroupPlans>()) {
  const int64_t required = take_overflow_report();
  TP_CHECK_VALUE(required >= 0, "plan", "max_received_tokens",
                 "room for " << -required << " tokens, which a rank of the group needed",
                 "less, in an earlier call on this GPU",
                 "Raise the max_received_tokens, or use the overflow policy \"drop\"");
  TP_CHECK_VALUE(
      required == 0, "plan", "capacity", "room for " << required << " rows, which a rank of the group needed",
      "less, in an earlier call on this GPU", "Raise the capacity, or use the overflow policy \"drop\"");
}

const void* memory_of(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->storage().unsafeGetStorageImpl() : nullptr;
}

void ExpertParallelGroup::remember_plan(const Tensor& plan, int64_t tokens, const Tensor& source,
                                        const std::optional<Tensor>& position) const {
  if (size() == 1 || like_.is_cuda()) return;
  const std::lock_guard<std::mutex> lock(plans_.mutex);
  std::erase_if(plans_.records, [](const PlanRecord& record) { return record.storage.expired(); });
  plans_.records.push_back({plan.storage().getWeakStorageImpl(), state().call_count, tokens,
                            memory_of(source), memory_of(position)});
}

std::optional<PlanRecord> ExpertParallelGroup::find_plan(const Tensor& plan) const {
  if (size() == 1 || like_.is_cuda()) return std::nullopt;
  const c10::StorageImpl* storage = plan.storage().unsafeGetStorageImpl();
  const std::lock_guard<std::mutex> lock(plans_.mutex);
  const auto found =
      std::find_if(plans_.records.rbegin(), plans_.records.rend(), [&](const PlanRecord& record) {
        return !record.storage.expired() && record.storage._unsafe_get_target() == storage;
      });
  return found == plans_.records.rend() ? std::nullopt : std::optional<PlanRecord>(*found);
}

int64_t* ExpertParallelGroup::overflow_report() const {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (like_.is_cuda()) {
    std::call_once(plans_.overflow_once, [&] {
      const CudaScope scope(like_);
      plans_.overflow = new_overflow_report();
    });
    return plans_.overflow;
  }
#endif
  return nullptr;
}

int64_t ExpertParallelGroup::take_overflow_report() const {
  volatile int64_t* const report = plans_.overflow.load();
  if (!like_.is_cuda() || !report) return 0;
  const int64_t rows = *report;
  if (rows != 0) *report = 0;
  return rows;
}

void check_planned_tokens(const Call& call, const int64_t* headers, int64_t ranks) {
  std::string mismatches;
  for (int64_t r = 0; r < ranks; ++r) {
    const int64_t* header = headers + r * Call::kHeaderLength;
    const int64_t tokens = header[fields::kTokens.index];
    const int64_t planned = header[fields::kPlannedTokens.index];
    if (tokens < 0 || planned < 0 || tokens == planned) continue;
    mismatches += (mismatches.empty() ? "" : ", ") + std::to_string(tokens) + " on rank " +
                  std::to_string(r) + ", whose plan has " + std::to_string(planned);
  }
  TP_CHECK_VALUE(mismatches.empty(), call.phase().op, fields::kTokens.name,
                 "the tokens that the plan was made for", mismatches, "Pass the plan of these tokens");
}

}  // namespace transformer_plugin::expert_parallel

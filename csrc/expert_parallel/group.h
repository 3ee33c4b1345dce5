// The process group of expert parallelism, with what it knows of plans.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "distributed/rank_group.h"
#include "expert_parallel/phases.h"

namespace transformer_plugin::expert_parallel {

using distributed::RankGroup;

// A plan is a tensor that one call of a group makes and later calls use. Its record lets ranks check that
// they use the same one.
struct PlanRecord {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  int64_t call;        // number of the call in the group that made it
  int64_t tokens;      // of this rank, that it was made for
  const void* source;  // memory_of() its other tensors; of `position` null where the plan is not compact
  const void* position;
};

// Identifies the memory of a tensor; null without one. Only compared.
const void* memory_of(const std::optional<at::Tensor>& tensor);

struct GroupPlans;

// The group of one call. The constructor also raises the ValueError of an earlier plan on this GPU whose rows or tokens
// did not fit, which the host could not know at that time.
class ExpertParallelGroup : public RankGroup {
 public:
  ExpertParallelGroup(const char* op, std::string_view name, int64_t timeout_ms, const at::Tensor& like);

  bool on_cuda() const { return like_.is_cuda(); }

  // Records that this call has made `plan` for `tokens` tokens of this rank, and finds the record in later
  // calls. Only on a CPU; on CUDA no plan is found.
  void remember_plan(const at::Tensor& plan, int64_t tokens, const at::Tensor& source,
                     const std::optional<at::Tensor>& position) const;
  std::optional<PlanRecord> find_plan(const at::Tensor& plan) const;

  // Where the kernels of a plan store how many rows it needs, if they do not fit, or the negative of how many received tokens, for
  // a later call of the group; null on a CPU.
  int64_t* overflow_report() const;

 private:
  // What was stored there, and clears it; 0: none.
  int64_t take_overflow_report() const;

  at::Tensor like_;
  GroupPlans& plans_;
};

}  // namespace transformer_plugin::expert_parallel

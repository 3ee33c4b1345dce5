// Checks of expert indices (common/expert_index.h).
#include "common/expert_index.h"

#include <atomic>
#include <vector>

namespace transformer_plugin {
namespace {

#ifdef TRANSFORMER_PLUGIN_CUDA
// Set by the first call with indices on a GPU, so that checking starts no CUDA context.
std::atomic<bool> has_word = false;
#endif

// "[3, 1]", of an element of a contiguous tensor.
std::string describe_place(const at::Tensor& tensor, int64_t place) {
  std::vector<int64_t> position(static_cast<size_t>(tensor.dim()));
  for (int64_t d = tensor.dim() - 1; d >= 0; --d) {
    position[static_cast<size_t>(d)] = place % tensor.size(d);
    place /= tensor.size(d);
  }
  std::ostringstream text;
  for (size_t d = 0; d < position.size(); ++d) text << (d == 0 ? "[" : ", ") << position[d];
  text << (position.empty() ? "[]" : "]");
  return text.str();
}

template <typename Index>
void check_values(const Argument& indices, const ExpertRange& range, const char* advice) {
  const Index* values = indices.tensor.const_data_ptr<Index>();
  const int64_t numel = indices.tensor.numel();
  int64_t wrong = 0, first = 0;
  for (int64_t i = numel - 1; i >= 0; --i) {
    if (range.allows(static_cast<int64_t>(values[i]))) continue;
    ++wrong;
    first = i;
  }
  if (wrong == 0) return;
  TP_CHECK_VALUE(
      false, indices.op, indices.name, describe(range),
      values[first] << " at " << describe_place(indices.tensor, first)
                    << (wrong > 1 ? " and " + std::to_string(wrong - 1) + " more that are neither" : ""),
      advice);
}

}  // namespace

std::string describe(const ExpertRange& range) {
  if (range.experts <= 0) return "-1 for no expert, where there are none";
  return "experts from 0 to " + std::to_string(range.experts - 1) + ", or -1 for none";
}

ExpertRange check_expert_indices(const Argument& indices, int64_t experts, const char* advice) {
  ExpertRange range{experts, nullptr};
  if (indices.tensor.is_cpu()) {
    indices.tensor.scalar_type() == at::kLong ? check_values<int64_t>(indices, range, advice)
                                              : check_values<int32_t>(indices, range, advice);
    return range;
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  check_earlier_experts(indices.op);
  has_word = true;
  range.word = wrong_experts_word();
#endif
  return range;
}

void check_earlier_experts(const char* op) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (!has_word) return;
  WrongExpertsWord* word = wrong_experts_word();
  const uint32_t count = *const_cast<volatile uint32_t*>(&word->count);
  if (count == 0) return;
  const int64_t place = word->place;
  const ExpertRange range{word->experts, nullptr};
  *const_cast<volatile uint32_t*>(&word->count) = 0;
  TP_CHECK_VALUE(false, op, "indices", describe(range) << ", in the calls before this one",
                 count << " that are neither, one of them element " << place << " of its call",
                 "They were treated as -1: fix what chooses the experts");
#endif
}

}  // namespace transformer_plugin

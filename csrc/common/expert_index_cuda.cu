// The memory in which kernels report wrong expert indices (common/expert_index_args.h).
#include "common/expert_index_args.h"
#include "common/pinned.cuh"

namespace transformer_plugin {

WrongExpertsWord* wrong_experts_word() {
  static WrongExpertsWord* const word = new_in_pinned_memory<WrongExpertsWord>();
  return word;
}

}  // namespace transformer_plugin

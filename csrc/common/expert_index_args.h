// Indices of experts, in kernels.
//
// An index names an expert, or is kNoExpert. On a CPU any other is an error. On a GPU, where the host reads no index,
// kernels treat it as kNoExpert and count it in pinned host memory, like wrong group sizes (offsets.h); a later
// call reads the count without synchronizing and raises.
#pragma once

#include <cstdint>

#include "common/math.h"

namespace transformer_plugin {

inline constexpr int kNoExpert = -1;

// What kernels report. One per process, because CUDA graphs keep its address.
struct WrongExpertsWord {
  volatile int64_t place;    // of a wrong index in its tensor
  volatile int64_t experts;  // of that call
  uint32_t count;            // of wrong indices since the last error; changed after `place` and `experts`
};

// Allocated at the first call, which creates a CUDA context if there is none.
WrongExpertsWord* wrong_experts_word();

// The experts that the indices of a call may name: all below `experts`.
struct ExpertRange {
  int64_t experts;
  WrongExpertsWord* word;  // null on a CPU, and where another kernel reports

  TP_HOST_DEVICE bool allows(int64_t index) const { return index >= kNoExpert && index < experts; }
};

}  // namespace transformer_plugin

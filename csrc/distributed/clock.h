// Time in milliseconds of the steady clock, as all waits of this folder count it.
#pragma once

#include <chrono>
#include <cstdint>

namespace transformer_plugin::distributed {

using Milliseconds = std::chrono::milliseconds;

inline int64_t steady_now_ms() {
  return std::chrono::duration_cast<Milliseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace transformer_plugin::distributed

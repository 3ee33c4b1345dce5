// Launch options of a grouped GEMM. They change its speed, never its result.
#pragma once

#include <cstdint>

namespace transformer_plugin::gemm {

struct LaunchOptions {
  int64_t max_sms = 0;         // SMs to use at most, rounded down to a multiple of 2; 0 for all
  int64_t expected_rows = -1;  // rows of all groups together; -1 if unknown
};

}  // namespace transformer_plugin::gemm

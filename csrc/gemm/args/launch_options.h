// What a caller of a grouped product asks of its launch. It changes when the product is done, never its bits.
#pragma once

#include <cstdint>

namespace transformer_plugin::gemm {

struct LaunchOptions {
  int64_t max_sms = 0;         // multiprocessors at most, counted in twos; 0 for all
  int64_t expected_rows = -1;  // of all groups together; -1 where it is not known
};

}  // namespace transformer_plugin::gemm

// The points at which an op waits for other ranks. Each family of ops defines its phases in a table and
// registers it.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace transformer_plugin::distributed {

struct Phase {
  // Unique in the library, because a CUDA kernel writes only this number to host memory (progress.h).
  // Ranges: 0-99 this folder, 100-199 expert parallelism, 200-299 tensor parallelism, 300-399 quantize,
  // 400-499 sharded weights.
  int32_t id;
  const char* op;    // as errors name it
  const char* name;  // what the op waits for, as errors name it
};

inline constexpr Phase kConfigurationPhase{0, "all_gather_text", "configuration"};

// Registers a family's phases when the library is loaded: a global variable in one of the family's source
// files. The table must be static.
class PhaseRegistration {
 public:
  explicit PhaseRegistration(std::span<const Phase> phases);
};

// The phase with this id. A phase with the op "unknown op" where no family has registered the id.
const Phase& find_phase(int32_t id);

// "dispatch (tokens)".
std::string phase_text(const Phase& phase);

}  // namespace transformer_plugin::distributed

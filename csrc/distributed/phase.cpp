// The table of all phases. It is written while the library is loaded and only read afterwards.
#include "distributed/phase.h"

#include <c10/util/Exception.h>

#include <map>

namespace transformer_plugin::distributed {
namespace {

// A function-local static, because the order in which globals of different files are constructed is not
// defined.
std::map<int32_t, Phase>& phases_by_id() {
  static std::map<int32_t, Phase> phases;
  return phases;
}

constexpr Phase kPhases[] = {kConfigurationPhase};
const PhaseRegistration registration(kPhases);

}  // namespace

PhaseRegistration::PhaseRegistration(std::span<const Phase> phases) {
  for (const Phase& phase : phases) {
    const bool is_new = phases_by_id().emplace(phase.id, phase).second;
    TORCH_INTERNAL_ASSERT(is_new, "two phases have the id ", phase.id);
  }
}

const Phase& find_phase(int32_t id) {
  static constexpr Phase kUnknown{-1, "unknown op", "unknown phase"};
  const auto found = phases_by_id().find(id);
  return found == phases_by_id().end() ? kUnknown : found->second;
}

std::string phase_text(const Phase& phase) { return std::string(phase.op) + " (" + phase.name + ")"; }

}  // namespace transformer_plugin::distributed

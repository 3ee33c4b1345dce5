// A separate Gloo backend over the ranks of a group, so that the program's own collectives on the group never
// mix with those of this library, even if a rank leaves out a call.
#pragma once

#include "distributed/process_group_state.h"

namespace transformer_plugin::distributed {

// Connects the ranks within the timeout; collective, in the first call of the group on a CPU. If the group's
// CPU backend is not Gloo, returns that backend itself.
c10::intrusive_ptr<c10d::Backend> connect_cpu_backend(ProcessGroupState& state,
                                                      const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                      const Phase& phase, Milliseconds timeout);

}  // namespace transformer_plugin::distributed

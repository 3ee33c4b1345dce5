// Connections of our own between the ranks of a Gloo group.
#pragma once

#include "distributed/group_state.h"

namespace transformer_plugin::expert_parallel {

// Makes them, within the timeout: all ranks of the group do so in their first call on a CPU. Collectives that the
// program makes on its group then never meet ours, whatever a rank leaves out. A backend other than Gloo is used as it is.
c10::intrusive_ptr<c10d::Backend> open_transport(GroupState& state,
                                                 const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                 Phase phase, Milliseconds timeout);

}  // namespace transformer_plugin::expert_parallel

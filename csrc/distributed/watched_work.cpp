#ifdef TRANSFORMER_PLUGIN_CUDA
#include "distributed/watched_work.h"

#include "distributed/collective_label.h"

namespace transformer_plugin::distributed {

WatchedWork::WatchedWork(const std::shared_ptr<ProcessGroupState>& state, const Phase& phase,
                         Milliseconds timeout, void* stream)
    : state_(*state), progress_(group_progress(*state)), stream_(stream) {
  state_.timeout_ms = timeout.count();
  watch_group(state);
  const int32_t label = state_.number_of_label(CollectiveLabel::current());
  launch_begin_collective(progress_, phase.id, label, stream);
  sequence_ = ++state_.host_sequence;
  state_.host_phase_id = phase.id;
  state_.host_label = label;
  state_.host_begin_ms = steady_now_ms();
}

WatchedWork::~WatchedWork() {
  state_.host_begin_ms = 0;
  if (state_.first_call_end_ms == 0) state_.first_call_end_ms = steady_now_ms();
  try {
    launch_end_collective(progress_, stream_);
  } catch (const std::exception&) {  // the error of the work itself is more useful
  }
}

}  // namespace transformer_plugin::distributed
#endif

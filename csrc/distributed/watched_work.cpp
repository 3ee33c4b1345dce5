#ifdef TRANSFORMER_PLUGIN_CUDA
#include "distributed/watched_work.h"

#include "distributed/collective_label.h"

namespace transformer_plugin::distributed {

WatchedWork::WatchedWork(const std::shared_ptr<ProcessGroupState>& state, const Phase& phase,
                         Milliseconds timeout, std::optional<void*> stream)
    : state_(*state), stream_(stream) {
  state_.timeout_ms = timeout.count();
  watch_group(state);
  const int32_t label = state_.number_of_label(CollectiveLabel::current());
  marks_ = {group_progress(*state), phase.id, label};
  if (stream_) launch_begin_collective(marks_, *stream_);
  sequence_ = ++state_.host_sequence;
  state_.host_phase_id = phase.id;
  state_.host_label = label;
  state_.host_begin_ms = steady_now_ms();
}

WatchedWork::~WatchedWork() {
  state_.host_begin_ms = 0;
  if (state_.first_call_end_ms == 0) state_.first_call_end_ms = steady_now_ms();
  try {
    if (stream_) launch_end_collective(marks_, *stream_);
  } catch (const std::exception&) {  // the error of the work itself is more useful
  }
}

}  // namespace transformer_plugin::distributed
#endif

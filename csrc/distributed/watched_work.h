// Work of a stream that waits for other ranks, as the watchdog sees it (process_group_state.h).
#pragma once

#ifdef TRANSFORMER_PLUGIN_CUDA
#include <memory>

#include "distributed/process_group_state.h"

namespace transformer_plugin::distributed {

// From the construction to the destruction the caller enqueues the work on the stream of the current device. Marks it as begun and
// ended on the progress page and on the host, also when an error is raised between.
class WatchedWork {
 public:
  WatchedWork(const std::shared_ptr<ProcessGroupState>& state, const Phase& phase, Milliseconds timeout,
              void* stream);
  ~WatchedWork();
  WatchedWork(const WatchedWork&) = delete;
  WatchedWork& operator=(const WatchedWork&) = delete;

  int64_t sequence() const { return sequence_; }

 private:
  ProcessGroupState& state_;
  const StreamProgress& progress_;
  void* stream_;
  int64_t sequence_ = 0;
};

}  // namespace transformer_plugin::distributed
#endif

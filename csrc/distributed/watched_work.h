// Work of a stream that waits for other ranks, as the watchdog sees it (process_group_state.h).
#pragma once

#ifdef TRANSFORMER_PLUGIN_CUDA
#include <memory>
#include <optional>

#include "distributed/process_group_state.h"

namespace transformer_plugin::distributed {

// From the construction to the destruction the caller enqueues the work. It is marked as begun and ended on the host, also when an
// error is raised between, and on the progress page: by kernels around it on the stream, or without one by its own kernels,
// which get marks().
class WatchedWork {
 public:
  WatchedWork(const std::shared_ptr<ProcessGroupState>& state, const Phase& phase, Milliseconds timeout,
              std::optional<void*> stream);
  ~WatchedWork();
  WatchedWork(const WatchedWork&) = delete;
  WatchedWork& operator=(const WatchedWork&) = delete;

  int64_t sequence() const { return sequence_; }
  const WorkMarks& marks() const { return marks_; }

 private:
  ProcessGroupState& state_;
  WorkMarks marks_;
  std::optional<void*> stream_;
  int64_t sequence_ = 0;
};

}  // namespace transformer_plugin::distributed
#endif

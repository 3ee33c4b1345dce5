// Work on a stream beside that of the caller.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "distributed/progress.h"

namespace transformer_plugin::distributed {

// Events of one device, which are used again: to make and destroy one takes the host longer than to record it.
class EventPool {
 public:
  // One that nothing refers to any more. What was made to wait for its last record still does.
  std::shared_ptr<c10::Event> take(c10::Device device) {
    std::unique_ptr<c10::Event> event;
    {
      const std::lock_guard<std::mutex> lock(free_->mutex);
      if (free_->device != device) {
        free_->events.clear();
        free_->device = device;
      }
      if (!free_->events.empty()) {
        event = std::move(free_->events.back());
        free_->events.pop_back();
      }
    }
    if (!event) event = std::make_unique<c10::Event>(device.type());
    return {event.release(), [free = free_, device](c10::Event* used) {
              std::unique_ptr<c10::Event> owned(used);
              const std::lock_guard<std::mutex> lock(free->mutex);
              if (free->device == device) free->events.push_back(std::move(owned));
            }};
  }

 private:
  struct Free {
    std::mutex mutex;
    std::optional<c10::Device> device;
    std::vector<std::unique_ptr<c10::Event>> events;
  };
  std::shared_ptr<Free> free_ = std::make_shared<Free>();
};

// A point that a stream reaches; on a CPU, the time at which this was made.
class StreamEvent {
 public:
  // The current stream waits. Nothing to wait for on a CPU.
  void wait() const {
    if (event_) event_->block(c10::impl::VirtualGuardImpl(event_->device_type()).getStream(event_->device()));
  }

 private:
  friend class SideStream;
  explicit StreamEvent(c10::Device device) : device_(device) {}
  c10::Device device_;
  std::shared_ptr<c10::Event> event_;
};

// One stream of a GPU, of high priority, so that a collective is not queued behind products. On a CPU there is none: work
// runs at once.
class SideStream {
 public:
  // Where the current stream is.
  StreamEvent record(c10::Device device) {
    StreamEvent event(device);
    if (device.is_cpu()) return event;
    event.event_ = events_.take(device);
    event.event_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    return event;
  }
  // Runs `work` on the stream, after `event`. Returns when it is done.
  template <typename Work>
  StreamEvent run_after(const StreamEvent& event, Work&& work) {
    StreamEvent done(event.device_);
    const c10::Device device = event.device_;
    if (device.is_cpu()) {
      std::forward<Work>(work)();
      return done;
    }
    if (!stream_ || stream_->device() != device) {
      stream_ =
          c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
    }
    const c10::Stream side = *stream_;
    event.event_->block(side);
    {
      const c10::StreamGuard guard(side);
      std::forward<Work>(work)();
    }
    done.event_ = events_.take(device);
    done.event_->record(side);
    return done;
  }
  // The same after everything that the current stream has.
  template <typename Work>
  StreamEvent run(c10::Device device, Work&& work) {
    return run_after(record(device), std::forward<Work>(work));
  }

 private:
  std::optional<c10::Stream> stream_;
  EventPool events_;
};

// What the current stream of a device is, and which capture it is part of. Work that began in another context is not
// ordered before work in this one.
struct StreamContext {
  c10::StreamId stream = 0;
  uint64_t capture = 0;  // 0: none

  bool operator==(const StreamContext&) const = default;
};

inline StreamContext current_stream_context(c10::Device device) {
  StreamContext context;
  if (device.is_cpu()) return context;
  const c10::impl::VirtualGuardImpl streams(device.type());
  const c10::Stream stream = streams.getStream(device);
  context.stream = stream.id();
#ifdef TRANSFORMER_PLUGIN_CUDA
  context.capture = capture_of(streams.getStreamNativeHandle(stream));
#endif
  return context;
}

}  // namespace transformer_plugin::distributed

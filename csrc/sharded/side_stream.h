// Work on a stream beside that of the caller.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <optional>
#include <utility>

#include "distributed/progress.h"

namespace transformer_plugin::sharded {

// A point that the current stream reaches; on a CPU, now.
class Ready {
 public:
  explicit Ready(c10::Device device) : device_(device) {
    if (device.is_cpu()) return;
    event_ = std::make_shared<c10::Event>(device.type());
    event_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }

 private:
  friend class SideStream;
  c10::Device device_;
  std::shared_ptr<c10::Event> event_;
};

// When work on a side stream is done.
class Done {
 public:
  // The current stream waits. Nothing to wait for on a CPU.
  void wait() const {
    if (event_) event_->block(c10::impl::VirtualGuardImpl(event_->device_type()).getStream(event_->device()));
  }

 private:
  friend class SideStream;
  std::shared_ptr<c10::Event> event_;
};

// One stream of a GPU, of high priority, so that a collective is not queued behind products. On a CPU there is none: work
// runs at once.
class SideStream {
 public:
  // Runs `work` on the stream, after `ready`.
  template <typename Work>
  Done run_after(const Ready& ready, Work&& work) {
    Done done;
    const c10::Device device = ready.device_;
    if (device.is_cpu()) {
      std::forward<Work>(work)();
      return done;
    }
    if (!stream_ || stream_->device() != device) {
      stream_ =
          c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
    }
    const c10::Stream side = *stream_;
    ready.event_->block(side);
    {
      const c10::StreamGuard guard(side);
      std::forward<Work>(work)();
    }
    done.event_ = std::make_shared<c10::Event>(device.type());
    done.event_->record(side);
    return done;
  }
  // The same after everything that the current stream has.
  template <typename Work>
  Done run(c10::Device device, Work&& work) {
    return run_after(Ready(device), std::forward<Work>(work));
  }

 private:
  std::optional<c10::Stream> stream_;
};

// What the current stream of a device is, and which capture it is part of. Work that began in another place is not
// ordered before work in this one.
struct Place {
  c10::StreamId stream = 0;
  uint64_t capture = 0;  // 0: none

  bool operator==(const Place&) const = default;
};

inline Place current_place(c10::Device device) {
  Place place;
  if (device.is_cpu()) return place;
  const c10::impl::VirtualGuardImpl streams(device.type());
  const c10::Stream stream = streams.getStream(device);
  place.stream = stream.id();
#ifdef TRANSFORMER_PLUGIN_CUDA
  place.capture = distributed::capture_of(streams.getStreamNativeHandle(stream));
#endif
  return place;
}

}  // namespace transformer_plugin::sharded

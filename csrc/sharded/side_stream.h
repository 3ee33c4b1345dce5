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

// When work on a side stream is done.
class Done {
 public:
  // The current stream waits. Nothing to wait for on a CPU, or if the work ran on the current stream.
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
  // Runs `work` on the stream, after everything that the current stream has. `work` gets a function to call when it is about to
  // enqueue a collective. The current stream waits for that point, so that the collective gets multiprocessors before a product
  // that fills the GPU for its whole duration.
  template <typename Work>
  Done run(c10::Device device, Work&& work) {
    Done done;
    if (device.is_cpu()) {
      std::forward<Work>(work)([] {});
      return done;
    }
    const c10::impl::VirtualGuardImpl streams(device.type());
    if (!stream_ || stream_->device() != device) {
      stream_ = streams.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
    }
    c10::Event before(device.type());
    before.record(streams.getStream(device));
    before.block(*stream_);
    const c10::Stream caller = streams.getStream(device), side = *stream_;
    {
      const c10::StreamGuard guard(side);
      std::forward<Work>(work)([&] {
        c10::Event begun(device.type());
        begun.record(side);
        begun.block(caller);
      });
    }
    done.event_ = std::make_shared<c10::Event>(device.type());
    done.event_->record(*stream_);
    return done;
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

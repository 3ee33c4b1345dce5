// A c10d group, with its collectives, which are bounded in time.
//
// Before payload moves, each rank describes its call in a header (call.h); if the headers differ, all ranks
// raise an error.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>

#include "distributed/collectives.h"

namespace transformer_plugin::distributed {

// A c10d group, given by its name, as one call of an op uses it. "" is the group of this process alone. Layers pass
// "<name>#rank=<r>" with the rank that this process had when they were made: another rank is an error; after that "#channel=<c>"
// where they use a channel of the group (expert_parallel/one_sided/channel.h), and "#max_sms=<n>" where its exchanges may use so
// many multiprocessors.
class RankGroup {
 public:
  // `timeout_ms` <= 0: the timeout of the group. `like`: a tensor on the device of the payload; undefined: no
  // payload.
  RankGroup(const char* op, std::string_view name, int64_t timeout_ms, const at::Tensor& like);
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  ProcessGroupState& state() const { return *state_; }
  const std::shared_ptr<ProcessGroupState>& shared_state() const { return state_; }
  int64_t size() const { return state_->size; }
  int64_t rank() const { return state_->rank; }
  // The number in the name that was given, or none.
  std::optional<int64_t> channel() const { return channel_; }
  // Likewise; 0: all.
  int64_t max_sms() const { return max_sms_; }
  // Of each wait for other ranks.
  Milliseconds timeout() const { return timeout_; }

  // Compares the ranks' headers; raises ValueError on every rank where they differ. To be called once, after
  // all checks that need no other rank and before the first of the call's `collectives` collectives.
  void begin_call(const Call& call, int64_t collectives) { collectives_->begin_call(call, collectives); }
  // Those of this call.
  Collectives& collectives() const { return *collectives_; }

  // Every rank's text in ascending order of ranks, through the group's store.
  std::vector<std::string> all_gather_text(const std::string& text) const;
  // The comparison that begin_call() makes on CUDA, on any device.
  void compare_through_store(const Call& call) const;

 private:
  std::shared_ptr<ProcessGroupState> state_;
  Milliseconds timeout_;
  std::optional<int64_t> channel_;
  int64_t max_sms_;
  std::shared_ptr<Collectives> collectives_;
};

// Raises ValueError for a timeout that a clock in nanoseconds cannot represent; 0 or less is allowed.
void check_timeout(const char* op, int64_t timeout_ms);

}  // namespace transformer_plugin::distributed

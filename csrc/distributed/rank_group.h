// The two exchanges of expert parallelism over c10d, bounded in time: Gloo on a CPU, NCCL on CUDA. Payload
// travels as bytes. Several may be under way; every rank starts them, and waits for them, in the same order. On CUDA
// they run on the current stream, read nothing on the host and can be captured.
//
// Before payload moves the ranks meet: each says which call it makes, and where these differ all raise. On a CPU that is
// a small message before each call, because Gloo ends the process when a message is longer than the memory for it. It
// travels, as the payload does, over connections of our own, so that the group's other collectives never meet ours.
// On CUDA a kind of call is compared once, through the store.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

#include "distributed/group_state.h"

namespace transformer_plugin::expert_parallel {

// A collective under way.
class Pending {
 public:
  // What arrives. On a CPU this waits, within the timeout, and raises PeerTimeoutError; on CUDA the collective is
  // queued already and the stream waits.
  at::Tensor wait();

 private:
  friend class RankGroup;
  at::Tensor output_;
  std::function<void()> wait_;  // empty when there is nothing to wait for
};

// A c10d group by its name, as seen from this rank; "" is the group of this process alone.
class RankGroup {
 public:
  // `timeout_ms` <= 0: the timeout of the group itself. A failure that a plan under the "raise" policy left
  // behind on CUDA is raised here.
  RankGroup(const char* op, const std::string& name, int64_t timeout_ms, const at::Tensor& like);
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  int64_t size() const { return state_->size; }
  int64_t rank() const { return state_->rank; }

  // To be called once, after all checks that a rank makes alone and before the `exchanges` that follow. ValueError, on
  // every rank, where the others make another call.
  void meet(Call call, int64_t exchanges);
  // For the calls that follow: `slot` is of the plan that this call makes for `tokens` tokens.
  void remember_plan(const at::Tensor& slot, int64_t tokens) const;
  // Sets the fields of the plan that `slot` belongs to, where that is known.
  void recall_plan(Call& call, const at::Tensor& slot) const;

  // [n, ...] of each rank -> [size * n, ...], by ascending rank.
  at::Tensor all_gather(const at::Tensor& part, Phase phase) const {
    return start_all_gather(part, phase).wait();
  }
  Pending start_all_gather(const at::Tensor& part, Phase phase) const;
  // [size * n, ...]: the r-th n rows go to rank r -> [size * n, ...]: the r-th n rows came from rank r.
  Pending start_all_to_all(const at::Tensor& parts, Phase phase) const;
  // Every rank's text, by ascending rank, through the group's store.
  std::vector<std::string> agree(const std::string& text) const;
  // The comparison that meet() makes on CUDA, whatever the device.
  void compare(const Call& call) const;
  // Where a CUDA kernel reports rows that it had no room for; null on a CPU.
  int64_t* overflow_report() const;

 private:
  struct Connection;
  void meet_on_cpu(const Call& call);
  template <typename Start>
  Pending exchange(Phase phase, const at::Tensor& output, Start&& start) const;

  std::shared_ptr<GroupState> state_;
  std::shared_ptr<Connection> connection_;
  std::unique_lock<std::mutex> call_;  // on a CPU, from meet() on
};

// A positive timeout that a clock can hold, or one of 0 or less.
void check_timeout(const char* op, int64_t timeout_ms);

}  // namespace transformer_plugin::expert_parallel

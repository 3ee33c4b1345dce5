// The two exchanges of expert parallelism over c10d, bounded in time: Gloo on a CPU, NCCL on CUDA. Payload
// travels as bytes. Several may be under way; every rank starts them, and waits for them, in the same order. On CUDA
// they run on the current stream, read nothing on the host and can be captured.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

#include "expert_parallel/watch.h"

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

  int64_t size() const { return state_->size; }
  int64_t rank() const { return state_->rank; }

  // [n, ...] of each rank -> [size * n, ...], by ascending rank.
  at::Tensor all_gather(const at::Tensor& part, Phase phase) const {
    return start_all_gather(part, phase).wait();
  }
  Pending start_all_gather(const at::Tensor& part, Phase phase) const;
  // [size * n, ...]: the r-th n rows go to rank r -> [size * n, ...]: the r-th n rows came from rank r.
  Pending start_all_to_all(const at::Tensor& parts, Phase phase) const;
  // Every rank's text, by ascending rank, through the group's store.
  std::vector<std::string> agree(const std::string& text) const;
  // Where a CUDA kernel reports rows that it had no room for; null on a CPU.
  int64_t* overflow_report() const;

 private:
  struct Connection;
  template <typename Start>
  Pending exchange(Phase phase, const at::Tensor& output, Start&& start) const;

  std::shared_ptr<GroupState> state_;
  std::shared_ptr<Connection> connection_;
};

}  // namespace transformer_plugin::expert_parallel

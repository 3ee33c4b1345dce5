// Gradients that ranks add while the backward goes on.
#pragma once

#include <deque>
#include <functional>
#include <mutex>

#include "sharded/side_stream.h"

namespace transformer_plugin::sharded {

// The sums of one group on their way, oldest first. What they read is kept until they are done. At most two are on their way,
// so that memory is bounded; at the end of the backward, none.
//
// A sum is enqueued after the next gather, because collectives of one group run one after the other: the gather is needed soon,
// the sum only at the end.
class Reductions {
 public:
  // Takes `sum`, which reads `parts` and writes `out`, for a side stream. Called in a backward.
  void submit(const at::Tensor& parts, const at::Tensor& out, std::function<void()> sum);
  // Enqueues what was submitted.
  void enqueue();

 private:
  struct Running {
    at::Tensor parts, out;
    std::function<void()> sum;  // empty: it is enqueued
    Ready ready;
    Done done;
  };

  void enqueue_locked();
  void finish_oldest();
  void finish();

  std::mutex mutex_;
  std::deque<Running> running_;
  SideStream stream_;
  int backward_ = -1;  // torch's number of the backward whose end is waited for
};

}  // namespace transformer_plugin::sharded

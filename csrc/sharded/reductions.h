// Gradients that ranks add while the backward goes on.
#pragma once

#include <deque>
#include <functional>
#include <mutex>

#include "sharded/side_stream.h"

namespace transformer_plugin::sharded {

// The sums of one group on their way, oldest first. What they read is kept until they are done. At most two are on their way,
// so that memory is bounded; at the end of the backward, none.
class Reductions {
 public:
  // Runs `sum`, which reads `parts` and writes `out`, on a side stream. Called in a backward.
  void submit(const at::Tensor& parts, const at::Tensor& out, const std::function<void()>& sum);

 private:
  struct Running {
    at::Tensor parts, out;
    Done done;
  };

  void finish_oldest();
  void finish();

  std::mutex mutex_;
  std::deque<Running> running_;
  SideStream stream_;
  int backward_ = -1;  // torch's number of the backward whose end is waited for
};

}  // namespace transformer_plugin::sharded

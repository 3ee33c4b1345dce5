// Reduce-scatters of gradients that overlap with the backward.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "distributed/pending_collectives.h"

namespace transformer_plugin::sharded {

// The asynchronous reduce-scatters of one process group, oldest first. Their operands are kept until they have completed. At
// most two are in flight, which bounds the memory; at the end of the backward, none.
//
// A sum is enqueued after the next gather, because collectives of one group run one after the other: the gather is needed soon,
// the sum only at the end. A sum with a work tensor is needed before the gather, and is enqueued at once.
class Reductions {
 public:
  explicit Reductions(distributed::PendingCollectives& pending) : pending_(pending) {}
  // Takes `sum`, which reads `unsharded_grad` and writes `out`, for a side stream. `work`: by which it is found again, or none.
  // `deliver` is called when the current stream has waited for the sum.
  void submit(const at::Tensor& unsharded_grad, const at::Tensor& out, std::function<void()> sum,
              std::function<void()> deliver = {}, const at::Tensor& work = {});
  // Enqueues what was submitted. Outside of a backward it drops what one has left that an error has ended.
  void enqueue();
  // The result of the sum with this work tensor, for which the current stream waits; undefined if there is none.
  at::Tensor finish(const at::Tensor& work);

 private:
  struct Submitted {
    at::Tensor unsharded_grad, out, work;
    std::function<void()> sum;
    std::function<void()> deliver;
    std::weak_ptr<int> backward;  // gone when the backward that submitted it has ended; of none that is never
    distributed::StreamEvent ready;
    distributed::StreamContext context;
  };
  struct Running {
    int64_t number;  // in `pending_`
    bool has_work;
    std::function<void()> deliver;
    std::weak_ptr<int> backward;
  };

  void enqueue_locked();
  void drop_left_over();
  void finish_oldest();
  void finish_all();

  std::mutex mutex_;
  distributed::PendingCollectives& pending_;
  std::optional<Submitted> submitted_;  // the newest, until it is enqueued
  std::deque<Running> running_;
  std::vector<int64_t> unclaimed_;  // have completed, with a work tensor that has not come yet
  distributed::SideStream stream_;
  std::shared_ptr<int> outside_ = std::make_shared<int>(-1);
  // whose end is waited for: torch's number, which the callback at the end holds
  std::weak_ptr<int> backward_;
};

}  // namespace transformer_plugin::sharded

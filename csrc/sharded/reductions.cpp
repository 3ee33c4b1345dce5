// Reduce-scatters of gradients that overlap with the backward (sharded/reductions.h).
#include "sharded/reductions.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "common/autograd.h"

namespace transformer_plugin::sharded {

namespace {

constexpr const char* kOp = "start_reduce_gradient";
constexpr size_t kMostRunning = 2;

}  // namespace

void Reductions::submit(const at::Tensor& unsharded_grad, const at::Tensor& out, std::function<void()> sum,
                        std::function<void()> deliver, const at::Tensor& work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const distributed::StreamContext context = distributed::current_stream_context(unsharded_grad.device());
  pending_.free_discarded(context);
  drop_left_over();
  enqueue_locked();
  while (running_.size() >= kMostRunning) finish_oldest();
  const int number = torch::autograd::get_current_graph_task_id();
  std::shared_ptr<int> backward = number < 0 ? outside_ : backward_.lock();
  if (number >= 0 && (!backward || *backward != number)) {
    backward = std::make_shared<int>(number);
    backward_ = backward;
    torch::autograd::Engine::get_default_engine().queue_callback([this, backward] { finish_all(); });
  }
  submitted_.emplace(Submitted{unsharded_grad, out, work, std::move(sum), std::move(deliver), backward,
                               stream_.record(unsharded_grad.device()), context});
  if (work.defined()) enqueue_locked();
}

// Of a backward that an error has ended: torch frees its callbacks without a call.
void Reductions::drop_left_over() {
  if (submitted_ && submitted_->backward.expired()) submitted_.reset();
  std::erase_if(running_, [&](const Running& running) {
    if (!running.backward.expired()) return false;
    pending_.discard(running.number);
    return true;
  });
}

void Reductions::enqueue() {
  const std::lock_guard<std::mutex> lock(mutex_);
  drop_left_over();
  enqueue_locked();
}

at::Tensor Reductions::finish(const at::Tensor& work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  enqueue_locked();
  const auto found = pending_.find(this, work);
  if (!found) return {};
  std::erase_if(running_, [&](const Running& running) { return running.number == found->number; });
  std::erase(unclaimed_, found->number);
  return pending_.finish(found->number)[0];
}

void Reductions::enqueue_locked() {
  if (!submitted_) return;
  const BelowAutograd guard;
  // A sum that raises is gone: the group stays usable, and nobody tries it again.
  Submitted next = *std::exchange(submitted_, std::nullopt);
  const distributed::StreamEvent done = stream_.run_after(next.ready, next.sum);
  const int64_t number =
      pending_.add({this, kOp, {next.unsharded_grad}, {next.out}, done, next.context}, next.work);
  running_.push_back({number, next.work.defined(), std::move(next.deliver), next.backward});
}

void Reductions::finish_oldest() {
  Running& oldest = running_.front();
  pending_.wait(oldest.number);
  if (oldest.deliver) oldest.deliver();
  if (oldest.has_work) {
    unclaimed_.push_back(oldest.number);
  } else {
    pending_.take(oldest.number);
  }
  running_.pop_front();
}

void Reductions::finish_all() {
  const std::lock_guard<std::mutex> lock(mutex_);
  enqueue_locked();
  while (!running_.empty()) finish_oldest();
  for (const int64_t number : unclaimed_) pending_.take(number);  // of a backward that an error has ended
  unclaimed_.clear();
}

}  // namespace transformer_plugin::sharded

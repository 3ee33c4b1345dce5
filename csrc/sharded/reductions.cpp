// Reduce-scatters of gradients that overlap with the backward (sharded/reductions.h).
#include "sharded/reductions.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "common/autograd.h"

namespace transformer_plugin::sharded {

namespace {

constexpr size_t kMostRunning = 2;

}  // namespace

void Reductions::submit(const at::Tensor& parts, const at::Tensor& out, std::function<void()> sum,
                        std::function<void()> deliver, const at::Tensor& token) {
  const std::lock_guard<std::mutex> lock(mutex_);
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
  running_.push_back(
      {parts, out, token, std::move(sum), std::move(deliver), backward, stream_.here(parts.device()), {}});
  if (token.defined()) enqueue_locked();
}

// Of a backward that an error has ended: torch frees its callbacks without a call.
void Reductions::drop_left_over() {
  std::erase_if(running_, [](const Running& running) {
    if (!running.backward.expired()) return false;
    if (!running.sum) running.done.wait();
    return true;
  });
}

void Reductions::enqueue() {
  const std::lock_guard<std::mutex> lock(mutex_);
  drop_left_over();
  enqueue_locked();
}

at::Tensor Reductions::finish(const at::Tensor& token) {
  const std::lock_guard<std::mutex> lock(mutex_);
  enqueue_locked();
  const auto has_token = [&](const Running& running) {
    return running.token.defined() && running.token.const_data_ptr() == token.const_data_ptr();
  };
  for (std::deque<Running>* queue : {&running_, &finished_}) {
    const auto found = std::find_if(queue->begin(), queue->end(), has_token);
    if (found == queue->end()) continue;
    found->done.wait();
    const at::Tensor out = found->out;
    queue->erase(found);
    return out;
  }
  return {};
}

void Reductions::enqueue_locked() {
  if (running_.empty() || !running_.back().sum) return;
  const BelowAutograd guard;
  // A sum that raises is gone: the group stays usable, and nobody tries it again.
  Running next = std::move(running_.back());
  running_.pop_back();
  next.done = stream_.run_after(next.ready, [&] { next.sum(); });
  next.sum = nullptr;
  running_.push_back(std::move(next));
}

void Reductions::finish_oldest() {
  Running& oldest = running_.front();
  oldest.done.wait();
  if (oldest.deliver) oldest.deliver();
  if (oldest.token.defined()) {
    oldest.parts = at::Tensor();
    finished_.push_back(std::move(oldest));
  }
  running_.pop_front();
}

void Reductions::finish_all() {
  const std::lock_guard<std::mutex> lock(mutex_);
  enqueue_locked();
  while (!running_.empty()) finish_oldest();
  finished_.clear();  // of a backward that an error has ended
}

}  // namespace transformer_plugin::sharded

// Gradients that ranks add while the backward goes on (sharded/reductions.h).
#include "sharded/reductions.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "common/autograd.h"

namespace transformer_plugin::sharded {

namespace {

constexpr size_t kMostRunning = 2;

}  // namespace

void Reductions::submit(const at::Tensor& parts, const at::Tensor& out, std::function<void()> sum) {
  const std::lock_guard<std::mutex> lock(mutex_);
  enqueue_locked();
  while (running_.size() >= kMostRunning) finish_oldest();
  running_.push_back({parts, out, std::move(sum), Ready(parts.device()), {}});
  const int backward = torch::autograd::get_current_graph_task_id();
  if (backward == backward_) return;
  backward_ = backward;
  torch::autograd::Engine::get_default_engine().queue_callback([this] { finish(); });
}

void Reductions::enqueue() {
  const std::lock_guard<std::mutex> lock(mutex_);
  enqueue_locked();
}

void Reductions::enqueue_locked() {
  if (running_.empty() || !running_.back().sum) return;
  const BelowAutograd guard;
  Running& next = running_.back();
  next.done = stream_.run_after(next.ready, [&] { next.sum(); });
  next.sum = nullptr;
}

void Reductions::finish_oldest() {
  running_.front().done.wait();
  running_.pop_front();
}

void Reductions::finish() {
  const std::lock_guard<std::mutex> lock(mutex_);
  enqueue_locked();
  while (!running_.empty()) finish_oldest();
}

}  // namespace transformer_plugin::sharded

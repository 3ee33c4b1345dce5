#include "linear/deferred_wgrad_queue.h"

#include "common/ops/linear.h"
#include "common/register.h"

namespace transformer_plugin::linear {

// Never destroyed: when the process ends, the allocator of the tensors may be gone.
WgradQueues& WgradQueues::instance() {
  static auto& queues = *new WgradQueues;
  return queues;
}

int64_t WgradQueues::create() {
  const std::lock_guard lock(mutex_);
  queues_[++next_];
  return next_;
}

// What it holds is freed outside the lock.
void WgradQueues::release(int64_t id) {
  std::deque<DeferredWgrad> dropped;
  const std::lock_guard lock(mutex_);
  dropped.swap(find("release_wgrad_queue", id));
  queues_.erase(id);
}

bool WgradQueues::contains(int64_t id) {
  const std::lock_guard lock(mutex_);
  return queues_.find(id) != queues_.end();
}

std::deque<DeferredWgrad>& WgradQueues::find(const char* op, int64_t id) {
  const auto found = queues_.find(id);
  TP_CHECK_VALUE(found != queues_.end(), op, "queue",
                 "the id of a queue that new_wgrad_queue() made and nobody released", id,
                 "Make a queue, and keep it while a layer uses it");
  return found->second;
}

int64_t WgradQueues::count(int64_t id) {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(find("count_deferred_wgrads", id).size());
}

void WgradQueues::push(const char* op, int64_t id, DeferredWgrad&& wgrad) {
  const std::lock_guard lock(mutex_);
  find(op, id).push_back(std::move(wgrad));
}

std::deque<DeferredWgrad> WgradQueues::take_all(const char* op, int64_t id) {
  std::deque<DeferredWgrad> taken;
  const std::lock_guard lock(mutex_);
  taken.swap(find(op, id));
  return taken;
}

void WgradQueues::put_back(int64_t id, std::deque<DeferredWgrad>&& wgrads) {
  const std::lock_guard lock(mutex_);
  const auto found = queues_.find(id);
  if (found == queues_.end()) return;
  std::deque<DeferredWgrad>& queue = found->second;
  queue.insert(queue.begin(), std::make_move_iterator(wgrads.begin()), std::make_move_iterator(wgrads.end()));
}

namespace {

int64_t new_wgrad_queue() { return WgradQueues::instance().create(); }
void release_wgrad_queue(int64_t queue) { WgradQueues::instance().release(queue); }
int64_t count_deferred_wgrads(int64_t queue) { return WgradQueues::instance().count(queue); }

}  // namespace

TP_IMPL_FOR(CompositeExplicitAutograd, new_wgrad_queue, new_wgrad_queue);
TP_IMPL_FOR(CompositeExplicitAutograd, release_wgrad_queue, release_wgrad_queue);
TP_IMPL_FOR(CompositeExplicitAutograd, count_deferred_wgrads, count_deferred_wgrads);

}  // namespace transformer_plugin::linear

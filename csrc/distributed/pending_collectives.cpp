// Collectives in flight (distributed/pending_collectives.h).
#include "distributed/pending_collectives.h"

#include <utility>

namespace transformer_plugin::distributed {

using at::Tensor;

bool PendingCollectives::Entry::wait_at(const StreamContext& here) const {
  if (collective.context.capture != here.capture) return here.capture == 0;  // a capture joins its streams
  collective.done.wait();
  return true;
}

int64_t PendingCollectives::add(StartedCollective collective, const Tensor& work) {
  Entry entry{std::move(collective), std::nullopt};
  if (work.defined()) entry.work = work.storage().getWeakStorageImpl();
  const std::lock_guard<std::mutex> lock(mutex_);
  entries_.emplace(++count_, std::move(entry));
  return count_;
}

std::optional<PendingCollectives::Found> PendingCollectives::find(const void* owner,
                                                                  const Tensor& work) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [number, entry] : entries_) {
    if (entry.collective.owner != owner || entry.discarded || !entry.work) continue;
    const auto storage = entry.work->lock();
    if (storage && storage->data() == work.storage().data()) return Found{number, entry.collective};
  }
  return std::nullopt;
}

void PendingCollectives::wait(int64_t number) {
  std::vector<Tensor> freed;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entries_.find(number);
  if (found == entries_.end()) return;
  found->second.collective.done.wait();
  freed.swap(found->second.collective.operands);
}

std::vector<Tensor> PendingCollectives::take(int64_t number) {
  decltype(entries_)::node_type taken;
  const std::lock_guard<std::mutex> lock(mutex_);
  taken = entries_.extract(number);
  return taken ? std::move(taken.mapped().collective.outputs) : std::vector<Tensor>();
}

std::vector<Tensor> PendingCollectives::finish(int64_t number) {
  wait(number);
  return take(number);
}

void PendingCollectives::discard(int64_t number) {
  decltype(entries_)::node_type freed;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entries_.find(number);
  if (found == entries_.end()) return;
  Entry& entry = found->second;
  entry.discarded = true;
  if (entry.wait_at(current_stream_context(entry.collective.outputs[0].device())))
    freed = entries_.extract(found);
}

void PendingCollectives::free_discarded(const StreamContext& here) {
  std::vector<decltype(entries_)::node_type> freed;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto each = entries_.begin(); each != entries_.end();) {
    const auto entry = each++;
    if (entry->second.is_discarded() && entry->second.wait_at(here)) freed.push_back(entries_.extract(entry));
  }
}

}  // namespace transformer_plugin::distributed

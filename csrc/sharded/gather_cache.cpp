// Gathers of weights that are begun before they are needed (sharded/gather_cache.h).
#include "sharded/gather_cache.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "common/autograd.h"
#include "tensor_parallel/exchange.h"

namespace transformer_plugin::sharded {
namespace {

using at::Tensor;

constexpr const char* kOp = "gather_weight";

// Where a gather waits for other ranks.
constexpr distributed::Phase kPhases[] = {{400, kOp, "input"}};
const distributed::PhaseRegistration registration(kPhases);

// What NCCL takes to start on an H100 after a product that ends, and the events between streams (docs/notes/experiments.md).
[[maybe_unused]] constexpr int64_t kStartNanoseconds = 15000;
constexpr int64_t kAny = -2;             // in place of the use before the last one
constexpr int64_t kRegionBoundary = -3;  // of a region, among the uses

// The header contains the name of the weight: ranks that gather different weights of one shape raise an error.
distributed::Call call_of(const Gather& gather, at::TensorList shards) {
  distributed::Call call = tensor_parallel::list_call(kPhases[0], "data", shards);
  const size_t name = std::hash<std::string>()(gather.shard.name) >> 2;
  call.set(tensor_parallel::fields::kWeight, static_cast<int64_t>(name) * 2 + gather.backward, "shard");
  return call;
}

std::atomic<int64_t> announced_changes{0};

// The current stream does nothing for as long as a collective on another stream takes to start. A product that starts first
// would fill all multiprocessors for its whole duration, and the collective would not run beside it but after it.
void let_collective_start(c10::Device device) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (!device.is_cuda()) return;
  const c10::impl::VirtualGuardImpl streams(device.type());
  distributed::launch_hold(streams.getStreamNativeHandle(streams.getStream(device)), kStartNanoseconds);
#endif
}

// Each matrix is received in its place of a stack, which is the result if no rows are padding.
Gathered prepare_list(const Gather& gather) {
  const Tensor& local = gather.shards[0];
  const auto count = static_cast<int64_t>(gather.shards.size());
  const int64_t held = local.size(0) * gather.shard.ranks, rows = gather.shard.rows;
  const Tensor stack = at::empty({count, held, local.size(1)}, local.options());
  const Tensor unsharded = rows == held ? stack : at::empty({count, rows, local.size(1)}, local.options());
  return {{unsharded}, stack.unbind(0), stack};
}

}  // namespace

void invalidate_prefetched() { ++announced_changes; }

GatherCache::ShardRef::ShardRef(const Tensor& local)
    : storage(local.storage().getWeakStorageImpl()),
      version(local.is_inference() ? c10::VariableVersion() : local.unsafeGetTensorImpl()->version_counter()),
      sizes(local.sizes().vec()),
      offset(local.storage_offset()),
      dtype(local.scalar_type()) {}

bool GatherCache::ShardRef::refers_to(const Tensor& local) const {
  const auto memory = storage.lock();
  return memory && memory.get() == local.storage().unsafeGetStorageImpl();
}

Tensor GatherCache::ShardRef::lock(c10::Device device) const {
  const auto memory = storage.lock();
  if (!memory) return {};
  const auto keys = device.is_cpu() ? c10::DispatchKeySet(c10::DispatchKey::CPU)
                                    : c10::DispatchKeySet(c10::DispatchKey::CUDA);
  Tensor local =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(memory), keys, c10::scalarTypeToTypeMeta(dtype));
  local.unsafeGetTensorImpl()->set_storage_offset(offset);
  local.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return local;
}

void GatherCache::configure(int64_t distance, bool in_graphs) {
  const std::lock_guard<std::mutex> lock(mutex_);
  distance_ = distance;
  in_graphs_ = in_graphs;
}

void GatherCache::clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  while (!early_.empty()) drop(early_.begin()->first);
  ids_.clear();
  sources_.clear();
  named_.clear();
  next_.clear();
  last_ = last_but_one_ = -1;
  region_ = 0;
}

GatherCounts GatherCache::counts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

void GatherCache::forget_dead_sources() {
  std::erase_if(ids_, [&](const auto& item) {
    const auto source = sources_.find(item.second);
    if (!source->second.shards[0].storage.expired()) return false;
    sources_.erase(source);
    std::erase_if(next_, [&](const auto& pair) { return pair.second == item.second; });
    return true;
  });
  std::erase_if(named_, [&](const auto& item) { return sources_.count(item.second) == 0; });
}

void GatherCache::forget(int64_t id) {
  if (sources_.count(id) == 0) return;
  drop(id);
  sources_.erase(id);
  std::erase_if(ids_, [&](const auto& item) { return item.second == id; });
  std::erase_if(next_, [&](const auto& pair) { return pair.second == id; });
}

// Numbers are given in the order of first use, which is that of the program, and never again. Where a weight of this name had
// other memory, that is forgotten: only some ranks may still have it. Both weights of grouped_mlp have one name, and other sizes.
int64_t GatherCache::identify(const Gather& gather) {
  const Tensor& first = gather.shards[0];
  const std::pair<const void*, bool> key(first.const_data_ptr(), gather.backward);
  const auto found = ids_.find(key);
  if (found != ids_.end()) {
    const Source& known = sources_.at(found->second);
    const auto same = [](const ShardRef& local, const Tensor& given) { return local.refers_to(given); };
    if (known.columnwise == gather.columnwise && known.is_list == gather.is_list &&
        std::equal(known.shards.begin(), known.shards.end(), gather.shards.begin(), gather.shards.end(),
                   same)) {
      return found->second;
    }
    drop(found->second);
    sources_.erase(found->second);
    ids_.erase(found);
  }
  const WeightShard& shard = gather.shard;
  const int64_t id = sources_made_++;
  if (!shard.name.empty()) {
    const auto [named, is_new] =
        named_.try_emplace({shard.param_group, shard.name, gather.backward, first.sizes().vec()}, id);
    if (!is_new) forget(std::exchange(named->second, id));
  }
  if ((id & 255) == 255) forget_dead_sources();
  std::vector<ShardRef> shards(gather.shards.begin(), gather.shards.end());
  ids_[key] = id;
  sources_.emplace(id, Source{std::move(shards), gather.format, gather.columnwise, gather.backward,
                              gather.shard, gather.is_list});
  return id;
}

// Versions only grow, so the sum changes with each of them.
int64_t GatherCache::stamp_of(const Source& source) const {
  int64_t stamp = announced_changes.load();
  for (const ShardRef& local : source.shards) {
    if (local.version.enabled()) stamp += local.version.current_version();
  }
  return stamp;
}

// Allocates, on the current stream.
Gathered GatherCache::prepare(const Gather& gather, std::vector<BufferLayout>& layouts) const {
  if (gather.is_list) return prepare_list(gather);
  const int64_t ranks = gather.shard.ranks;
  if (layouts.empty())
    layouts = buffer_layouts(gather.shards[0], gather.shards.size(), gather.format, gather.columnwise,
                             gather.shard.rows, ranks);
  Gathered into;
  for (size_t i = 0; i < layouts.size(); ++i) {
    const BufferLayout& layout = layouts[i];
    const Tensor& local = gather.shards[i];
    if (!layout.is_gathered()) {
      into.received.emplace_back();
      into.unsharded.push_back(local);
      continue;
    }
    std::vector<int64_t> sizes = layout.shard;
    sizes[0] *= ranks;
    const Tensor received = at::empty(sizes, local.options());
    into.received.push_back(received);
    if (!layout.is_joined()) {
      into.unsharded.push_back(at::empty(layout.unsharded, local.options()));
    } else {
      into.unsharded.push_back(layout.unsharded[0] == sizes[0] ? received
                                                               : received.narrow(0, 0, layout.unsharded[0]));
    }
  }
  return into;
}

// The collective and what follows it, on the current stream.
void GatherCache::collect(const Gather& gather, const std::vector<BufferLayout>& layouts, Gathered& into) {
  const WeightShard& shard = gather.shard;
  std::vector<Tensor> shards, received;
  for (size_t i = 0; i < into.received.size(); ++i) {
    if (!into.received[i].defined()) continue;
    shards.push_back(gather.shards[i]);
    received.push_back(into.received[i]);
    counts_.bytes_sent += static_cast<int64_t>(gather.shards[i].nbytes()) * (shard.ranks - 1);
  }
  ++counts_.gathers;
  shard.run([&] {
    distributed::RankGroup group(kOp, shard.group, shard.timeout_ms, shards[0]);
    tensor_parallel::check_ranks(kOp, group, shard.ranks);
    group.begin_call(call_of(gather, shards), 1);
    group.collectives().all_gather_list(shards, received, kPhases[0]).wait();
  });
  if (gather.is_list && into.unsharded[0].size(1) != into.stack.size(1)) {
    into.unsharded[0].copy_(into.stack.narrow(1, 0, shard.rows));
  }
  for (size_t i = 0; i < layouts.size(); ++i) {
    if (layouts[i].is_gathered() && !layouts[i].is_joined()) {
      assemble(layouts[i], into.received[i], shard.ranks, into.unsharded[i]);
    }
  }
}

void GatherCache::drop(int64_t id) {
  const auto early = early_.find(id);
  if (early == early_.end()) return;
  pending_.discard(early->second.number);
  early_.erase(early);
  ++counts_.dropped;
}

std::vector<Tensor> GatherCache::take(Gather gather) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const BelowAutograd guard;
  const c10::Device device = gather.shards[0].device();
  const StreamContext context = distributed::current_stream_context(device);
  pending_.free_discarded(context);
  const int64_t id = identify(gather);
  ++uses_;
  std::vector<Tensor> unsharded;
  const auto early = early_.find(id);
  if (early != early_.end() && early->second.stamp == stamp_of(sources_.at(id)) &&
      early->second.context == context) {
    unsharded = pending_.finish(early->second.number);
    early_.erase(early);
    ++counts_.hits;
  } else {
    drop(id);
    std::vector<BufferLayout> layouts;
    Gathered into = prepare(gather, layouts);
    collect(gather, layouts, into);
    unsharded = std::move(into.unsharded);
  }
  // Without a param group it may be gone on some ranks, and is never next.
  note_use(gather.shard.param_group == 0 ? -1 : id);
  gather_ahead(id, device, context);
  return unsharded;
}

void GatherCache::note_use(int64_t id) {
  next_[Pair(last_but_one_, last_)] = next_[Pair(kAny, last_)] = id;
  last_but_one_ = last_;
  last_ = id;
}

int64_t GatherCache::after(const Pair& pair) const {
  auto found = next_.find(pair);
  if (found == next_.end()) found = next_.find(Pair(kAny, pair.second));
  return found == next_.end() ? -1 : found->second;
}

void GatherCache::enter_region(const StreamContext& context) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // The end of one region and the start of the next are one boundary.
  if (last_ != kRegionBoundary) note_use(kRegionBoundary);
  if (context.capture != 0) region_ = context.capture;
}

void GatherCache::leave_region(const StreamContext& context) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (last_ != kRegionBoundary) note_use(kRegionBoundary);
  if (context.capture == 0) return;
  region_ = 0;
  std::vector<int64_t> left;
  for (const auto& [id, early] : early_) {
    if (early.context.capture == context.capture) left.push_back(id);
  }
  for (const int64_t id : left) drop(id);
}

// A backward is followed by a change of the weights, so nothing is gathered across its end.
void GatherCache::gather_ahead(int64_t id, c10::Device device, const StreamContext& context) {
  std::vector<int64_t> outdated;
  for (const auto& [other, early] : early_) {
    if (early.due < uses_) outdated.push_back(other);
  }
  for (const int64_t other : outdated) drop(other);
  const bool in_region = context.capture != 0 && region_ == context.capture;
  if (context.capture != 0 && !in_region && !in_graphs_) return;
  Pair pair(last_but_one_, id);
  int64_t last = id;  // the weight before the next one
  for (int64_t step = 0; step < distance_; ++step) {
    int64_t next = after(pair);
    if (next == kRegionBoundary && !in_region) {
      pair = Pair(pair.second, next);
      next = after(pair);
    }
    const auto known = sources_.find(next);
    if (known == sources_.end() || next == id) return;
    const Source& source = known->second;
    const Source& before = sources_.at(last);
    if (before.shard.param_group == 0 || before.shard.param_group != source.shard.param_group) return;
    if (before.backward && !source.backward) return;
    pair = Pair(pair.second, next);
    last = next;
    if (early_.count(next) > 0) continue;
    Gather gather{{}, source.format, source.columnwise, source.backward, source.shard, source.is_list};
    for (const ShardRef& local : source.shards) {
      if (!local.version.enabled()) return;
      gather.shards.push_back(local.lock(device));
      if (!gather.shards.back().defined()) return;
    }
    std::vector<BufferLayout>& layouts = known->second.layouts;  // the same as before
    Gathered into = prepare(gather, layouts);
    const int64_t stamp = stamp_of(source);
    const distributed::StreamEvent done = stream_.run(device, [&] { collect(gather, layouts, into); });
    let_collective_start(device);
    ++counts_.early;
    std::vector<Tensor> memory = std::move(into.received);
    memory.push_back(std::move(into.stack));
    // What is not gathered is this rank's tensor itself.
    const int64_t number =
        pending_.add({this, kOp, std::move(memory), std::move(into.unsharded), done, context});
    early_.emplace(next, Early{number, stamp, context, uses_ + step + 1});
  }
}

}  // namespace transformer_plugin::sharded

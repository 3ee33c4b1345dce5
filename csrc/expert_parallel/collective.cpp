#include "expert_parallel/collective.h"

#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "common/check.h"
#include "common/tensor.h"

namespace transformer_plugin::expert_parallel {
namespace {

using at::Tensor;

c10::intrusive_ptr<c10d::ProcessGroup> resolve(const char* op, const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const std::exception&) {
    TP_CHECK_VALUE(false, op, "group_name", "the name of a c10d process group of this process, or \"\"",
                   "'" << name << "'", "Pass group.group_name, and do not use a group after it is destroyed");
  }
}

Milliseconds group_timeout(c10d::ProcessGroup& group, at::DeviceType device) {
  try {
    return group.getBackend(device)->getBackendOptions()->timeout;
  } catch (const std::exception&) {
    return kProcessGroupDefaultTimeout;
  }
}

Tensor as_bytes(const Tensor& tensor) { return tensor.view({-1}).view(at::kByte); }

}  // namespace

struct RankGroup::Connection {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  bool on_cuda;
  Milliseconds timeout;
};

RankGroup::RankGroup(const char* op, const std::string& name, int64_t timeout_ms, const Tensor& like)
    : connection_(std::make_shared<Connection>()) {
  Connection& to = *connection_;
  to.on_cuda = like.defined() && like.is_cuda();
  to.timeout = Milliseconds(timeout_ms);
  if (name.empty()) {
    state_ = group_state(name, nullptr, 0, 1);
  } else {
    to.group = resolve(op, name);
    state_ = group_state(name, to.group.get(), to.group->getRank(), to.group->getSize());
    if (timeout_ms <= 0) to.timeout = group_timeout(*to.group, to.on_cuda ? at::kCUDA : at::kCPU);
  }
  const Board* board = state_->board.load();
  if (!to.on_cuda || !board || board->required == 0) return;
  const int64_t required = board->required;
  state_->board.load()->required = 0;
  TP_CHECK_VALUE(
      false, "plan", "capacity", "room for " << required << " rows, which a rank of the group needed",
      "less, in an earlier call on this GPU", "Raise the capacity, or use the overflow policy \"drop\"");
}

#ifdef TRANSFORMER_PLUGIN_CUDA
namespace {

// Tells the board that the collective is over, also when it was refused.
struct Leave {
  GroupState& state;
  const BoardMemory& memory;
  void* stream;
  ~Leave() {
    state.host_since = 0;
    if (state.settled == 0) state.settled = steady_ms();
    try {
      launch_end_turn(memory, stream);
    } catch (const std::exception&) {  // the error of the collective is the one to hear of
    }
  }
};

}  // namespace
#endif

Tensor Pending::wait() {
  if (wait_) std::exchange(wait_, nullptr)();
  return output_;
}

template <typename Start>
Pending RankGroup::exchange(Phase phase, const Tensor& output, Start&& start) const {
  Connection& to = *connection_;
  Pending pending;
  pending.output_ = output;
  if (!to.on_cuda) {
    c10::intrusive_ptr<c10d::Work> work;
    try {
      work = start();
    } catch (const c10::DistError& error) {
      Roll roll(state_->line, state_->keys + "cpu/", state_->rank, state_->size);
      raise_peer_error(*state_, roll, ++state_->cpu_turn, phase, to.timeout, cause_of(error));
    }
    pending.wait_ = [state = state_, work, phase, timeout = to.timeout] {
      wait_on_cpu(*state, *work, phase, timeout);
    };
    return pending;
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(output);
  const BoardMemory& memory = group_board(*state_);
  state_->timeout_ms = to.timeout.count();
  watch_group(state_);
  void* stream = scope.stream();
  launch_begin_turn(memory, phase, stream);
  const int64_t turn = ++state_->host_turn;
  state_->host_phase = static_cast<int32_t>(phase);
  state_->host_since = steady_ms();
  const Leave leave{*state_, memory, stream};
  try {
    const c10::intrusive_ptr<c10d::Work> work = start();
    if (work) work->wait();  // orders streams; does not block
  } catch (const c10::DistError& error) {
    Roll roll(state_->line, state_->keys + "host/", state_->rank, state_->size);
    raise_peer_error(*state_, roll, turn, phase, to.timeout, cause_of(error));
  }
#endif
  return pending;
}

Pending RankGroup::start_all_gather(const Tensor& part, Phase phase) const {
  Pending pending;
  pending.output_ = part;
  if (size() == 1) return pending;
  const Tensor input = part.contiguous();
  std::vector<c10::SymInt> sizes(input.sym_sizes().begin(), input.sym_sizes().end());
  sizes[0] = sizes[0] * size();
  pending.output_ = empty(input, sizes, input.scalar_type());
  if (input.numel() == 0) return pending;
  return exchange(phase, pending.output_, [&] {
    Tensor to = as_bytes(pending.output_);
    Tensor from = as_bytes(input);
    c10d::AllgatherOptions options;
    options.timeout = connection_->timeout;
    options.asyncOp = !connection_->on_cuda;
    return connection_->group->_allgather_base(to, from, options);
  });
}

Pending RankGroup::start_all_to_all(const Tensor& parts, Phase phase) const {
  Pending pending;
  pending.output_ = parts;
  if (size() == 1) return pending;
  const Tensor input = parts.contiguous();
  pending.output_ = empty(input, input.sym_sizes(), input.scalar_type());
  if (input.numel() == 0) return pending;
  return exchange(phase, pending.output_, [&] {
    Tensor to = as_bytes(pending.output_);
    Tensor from = as_bytes(input);
    std::vector<int64_t> equal_splits;
    c10d::AllToAllOptions options;
    options.timeout = connection_->timeout;
    options.asyncOp = !connection_->on_cuda;
    return connection_->group->alltoall_base(to, from, equal_splits, equal_splits, options);
  });
}

std::vector<std::string> RankGroup::agree(const std::string& text) const {
  if (size() == 1) return {text};
  struct Round {
    std::string prefix;
    std::string text;
    int64_t rank;
    int64_t size;
    int64_t end;
    std::vector<std::string> texts;
    std::vector<int64_t> missing;
  };
  const std::string prefix = state_->keys + "agree/" + std::to_string(state_->agreements++) + "/";
  const int64_t limit = connection_->timeout.count();
  const auto round =
      std::make_shared<Round>(Round{prefix, text, rank(), size(), steady_ms() + limit, {}, {}});
  const auto talk = [round](c10d::Store& store) {
    store.set(round->prefix + std::to_string(round->rank), round->text);
    for (int64_t r = 0; r < round->size; ++r) {
      const std::string key = round->prefix + std::to_string(r);
      bool here = store.check({key});
      for (; !here && steady_ms() < round->end; here = store.check({key})) {
        std::this_thread::sleep_for(Milliseconds(10));
      }
      if (!here) round->missing.push_back(r);
      round->texts.push_back(here ? store.get_to_str(key) : "");
    }
  };
  Verdict verdict;
  verdict.store_error = state_->line->ask(connection_->timeout + kInquest, talk);
  if (verdict.store_error.empty()) verdict.missing = round->missing;
  if (verdict.store_error.empty() && verdict.missing.empty()) return round->texts;
  C10_THROW_ERROR(DistBackendError, peer_error(Phase::kConfiguration, state_->name, rank(), size(),
                                               connection_->timeout, verdict, ""));
}

int64_t* RankGroup::overflow_report() const {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (connection_->on_cuda) return const_cast<int64_t*>(&group_board(*state_).board->required);
#endif
  return nullptr;
}

}  // namespace transformer_plugin::expert_parallel

#include "distributed/rank_group.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "common/check.h"
#include "common/tensor.h"
#include "distributed/gloo_connection.h"

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

constexpr int64_t kLongestMs = 1'000'000'000'000;  // 31 years; a clock counts nanoseconds in 64 bits

Milliseconds group_timeout(c10d::ProcessGroup& group, at::DeviceType device) {
  try {
    return std::clamp(group.getBackend(device)->getBackendOptions()->timeout, Milliseconds(1),
                      Milliseconds(kLongestMs));
  } catch (const std::exception&) {
    return kProcessGroupDefaultTimeout;
  }
}

Tensor as_bytes(const Tensor& tensor) { return tensor.view({-1}).view(at::kByte); }

}  // namespace

void check_timeout(const char* op, int64_t timeout_ms) {
  TP_CHECK_VALUE(timeout_ms <= kLongestMs, op, "timeout_ms", "at most 10^12 milliseconds", timeout_ms,
                 "Pass 0 or less for the timeout of the group");
}

struct RankGroup::Connection {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  Tensor like;
  bool on_cuda;
  Milliseconds timeout;
  // Exchanges that the others still expect of this call.
  int64_t due = 0;
};

RankGroup::RankGroup(const char* op, const std::string& name, int64_t timeout_ms, const Tensor& like)
    : connection_(std::make_shared<Connection>()) {
  check_timeout(op, timeout_ms);
  Connection& to = *connection_;
  to.like = like;
  to.on_cuda = like.defined() && like.is_cuda();
  to.timeout = Milliseconds(timeout_ms);
  if (name.empty()) {
    state_ = group_state(name, {});
  } else {
    to.group = resolve(op, name);
    state_ = group_state(name, to.group);
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

// A call that ends before its exchanges, for want of memory perhaps: what this rank sent next would be taken for them.
RankGroup::~RankGroup() {
  if (connection_->due <= 0 || connection_->on_cuda) return;
  const std::lock_guard<std::mutex> lock(state_->failing);
  if (!state_->failed) state_->failed = Verdict{{rank()}, "", ""};
}

void RankGroup::meet(Call call, int64_t exchanges) {
  if (size() == 1) return;
  Connection& to = *connection_;
  if (to.on_cuda) {
#ifdef TRANSFORMER_PLUGIN_CUDA
    const CudaScope scope(to.like);
    if (stream_is_captured(scope.stream())) return;
    const bool first = state_->settled == 0;
    compare_signature(*state_, call, first ? std::max(to.timeout, Milliseconds(kFirstCallMs)) : to.timeout);
#endif
    return;
  }
  call_ = std::unique_lock<std::mutex>(state_->calling);
  refuse_failed(*state_, call.phase(), to.timeout);
  if (!state_->transport) state_->transport = open_transport(*state_, to.group, call.phase(), to.timeout);
  if (state_->transport->getBackendName() == "fake") return;  // sends nothing
  ++state_->calls;
  meet_on_cpu(call);
  to.due = exchanges;
}

void RankGroup::meet_on_cpu(const Call& call) {
  const Connection& to = *connection_;
  Tensor mine = at::empty({Call::kFields}, at::kLong);
  Tensor all = at::empty({size() * Call::kFields}, at::kLong);
  std::copy(call.numbers().begin(), call.numbers().end(), mine.mutable_data_ptr<int64_t>());
  c10d::AllgatherOptions options;
  options.timeout = to.timeout;
  options.asyncOp = true;
  c10::intrusive_ptr<c10d::Work> work;
  try {
    work = state_->transport->_allgather_base(all, mine, options);
  } catch (const c10::DistError& error) {
    raise_peer_error(*state_, state_->roll("cpu"), ++state_->cpu_turn, call.phase(), to.timeout,
                     cause_of(error));
  }
  wait_on_cpu(*state_, work, call.phase(), to.timeout);
  call.compare(all.const_data_ptr<int64_t>(), size(), state_->name);
}

void RankGroup::remember_plan(const Tensor& slot, int64_t tokens) const {
  if (size() == 1 || connection_->on_cuda) return;
  std::vector<KnownPlan>& plans = state_->plans;
  std::erase_if(plans, [](const KnownPlan& plan) { return plan.slot.expired(); });
  plans.push_back({slot.storage().getWeakStorageImpl(), state_->calls, tokens});
}

void RankGroup::recall_plan(Call& call, const Tensor& slot) const {
  if (size() == 1 || connection_->on_cuda) return;
  const std::lock_guard<std::mutex> lock(state_->calling);
  for (const KnownPlan& plan : state_->plans) {
    if (plan.slot.expired() || plan.slot._unsafe_get_target() != slot.storage().unsafeGetStorageImpl())
      continue;
    call.set(Field::kPlan, plan.call, "slot").set(Field::kPlanned, plan.tokens, "tokens");
  }
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
      raise_peer_error(*state_, state_->roll("cpu"), ++state_->cpu_turn, phase, to.timeout, cause_of(error));
    }
    pending.wait_ = [state = state_, to = connection_, work, phase] {
      wait_on_cpu(*state, work, phase, to->timeout);
      --to->due;
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
    raise_peer_error(*state_, state_->roll("host"), turn, phase, to.timeout, cause_of(error));
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
  if (input.numel() == 0) {
    --connection_->due;
    return pending;
  }
  return exchange(phase, pending.output_, [&] {
    Tensor to = as_bytes(pending.output_);
    Tensor from = as_bytes(input);
    c10d::AllgatherOptions options;
    options.timeout = connection_->timeout;
    options.asyncOp = !connection_->on_cuda;
    return connection_->on_cuda ? connection_->group->_allgather_base(to, from, options)
                                : state_->transport->_allgather_base(to, from, options);
  });
}

Pending RankGroup::start_all_to_all(const Tensor& parts, Phase phase) const {
  Pending pending;
  pending.output_ = parts;
  if (size() == 1) return pending;
  const Tensor input = parts.contiguous();
  pending.output_ = empty(input, input.sym_sizes(), input.scalar_type());
  if (input.numel() == 0) {
    --connection_->due;
    return pending;
  }
  return exchange(phase, pending.output_, [&] {
    Tensor to = as_bytes(pending.output_);
    Tensor from = as_bytes(input);
    std::vector<int64_t> equal_splits;
    c10d::AllToAllOptions options;
    options.timeout = connection_->timeout;
    options.asyncOp = !connection_->on_cuda;
    return connection_->on_cuda
               ? connection_->group->alltoall_base(to, from, equal_splits, equal_splits, options)
               : state_->transport->alltoall_base(to, from, equal_splits, equal_splits, options);
  });
}

std::vector<std::string> RankGroup::agree(const std::string& text) const {
  if (size() == 1) return {text};
  refuse_failed(*state_, Phase::kConfiguration, connection_->timeout);
  return exchange_texts(*state_, "agree", state_->agreements++, text, Phase::kConfiguration,
                        place_of(Phase::kConfiguration), connection_->timeout);
}

void RankGroup::compare(const Call& call) const {
  if (size() > 1) compare_signature(*state_, call, connection_->timeout);
}

int64_t* RankGroup::overflow_report() const {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (connection_->on_cuda) return const_cast<int64_t*>(&group_board(*state_).board->required);
#endif
  return nullptr;
}

}  // namespace transformer_plugin::expert_parallel

// Collectives of a group on a CPU (Gloo) and on CUDA (NCCL), with their headers and timeouts.
#include "distributed/rank_group.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <charconv>
#include <string_view>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "common/check.h"
#include "common/tensor.h"
#include "distributed/gloo_connection.h"
#include "distributed/subject.h"

namespace transformer_plugin::distributed {
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

// "<name>#rank=<r>": the group of the name, in which this process must have the rank r.
constexpr std::string_view kRankMark = "#rank=";

std::string without_rank(const std::string& given) { return given.substr(0, given.rfind(kRankMark)); }

// A world that is destroyed and created again has the same name, and may have the processes in another order.
void check_rank(const char* op, const std::string& given, const GroupState& state) {
  if (given.size() == state.name.size()) return;
  const char* const first = given.data() + state.name.size() + kRankMark.size();
  int64_t rank = -1;
  const auto [end, error] = std::from_chars(first, given.data() + given.size(), rank);
  TP_CHECK_VALUE(error == std::errc() && end == given.data() + given.size(), op, "group_name",
                 "a name, or a name with '#rank=' and a number", "'" << given << "'",
                 "Pass group.group_name");
  TP_CHECK_VALUE(rank == state.rank, op, "group_name",
                 "the group '" << state.name << "' in which this process is rank " << rank
                               << ", as when the layer was made",
                 "one in which it is rank " << state.rank,
                 "Make the layer again with the new group, and load its state_dict()");
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

// Of a contiguous tensor. Where a dimension has one element, its stride may be any.
Tensor as_bytes(const Tensor& tensor) { return tensor.as_strided({tensor.numel()}, {1}).view(at::kByte); }

// What a backend takes to move a contiguous tensor without reading it: NCCL also takes most dtypes, which saves the host views.
Tensor as_payload(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
    case at::kBFloat16:
    case at::kHalf:
    case at::kByte:
    case at::kInt:
    case at::kLong: return tensor.is_cuda() ? tensor : as_bytes(tensor);
    default: return as_bytes(tensor);
  }
}

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
  // Collectives of this call that the other ranks still expect.
  int64_t remaining = 0;

  // Its methods, called without the dispatcher, which would look up the same backend.
  c10d::Backend& backend(const GroupState& state) const {
    return on_cuda ? *group->getBackend(at::kCUDA) : *state.cpu_backend;
  }
};

RankGroup::RankGroup(const char* op, const std::string& given, int64_t timeout_ms, const Tensor& like)
    : connection_(std::make_shared<Connection>()) {
  check_timeout(op, timeout_ms);
  Connection& to = *connection_;
  to.like = like;
  to.on_cuda = like.defined() && like.is_cuda();
  to.timeout = Milliseconds(timeout_ms);
  const std::string name = without_rank(given);
  if (name.empty()) {
    state_ = group_state(name, {});
  } else {
    to.group = resolve(op, name);
    state_ = group_state(name, to.group);
    if (timeout_ms <= 0) to.timeout = group_timeout(*to.group, to.on_cuda ? at::kCUDA : at::kCPU);
  }
  check_rank(op, given, *state_);
}

// If a call ends before its collectives, for example because an allocation failed, the other ranks would take
// this rank's next message for the missing one. So the group is marked as failed.
RankGroup::~RankGroup() {
  if (connection_->remaining <= 0 || connection_->on_cuda) return;
  const std::lock_guard<std::mutex> lock(state_->failure_mutex);
  if (!state_->failure) state_->failure = LivenessReport{{rank()}, "", ""};
}

void RankGroup::begin_call(const Call& call, int64_t collectives) {
  if (size() == 1) return;
  Connection& to = *connection_;
  if (to.on_cuda) {
#ifdef TRANSFORMER_PLUGIN_CUDA
    const CudaScope scope(to.like);
    if (stream_is_captured(scope.stream())) return;
    const bool first = state_->first_call_end_ms == 0;
    compare_signature(*state_, call, first ? std::max(to.timeout, Milliseconds(kFirstCallMs)) : to.timeout);
#endif
    return;
  }
  call_lock_ = std::unique_lock<std::mutex>(state_->call_mutex);
  check_not_failed(*state_, call.phase(), to.timeout);
  if (!state_->cpu_backend)
    state_->cpu_backend = connect_cpu_backend(*state_, to.group, call.phase(), to.timeout);
  if (state_->cpu_backend->getBackendName() == "fake")
    return;  // torch's backend for tests, which sends nothing
  ++state_->call_count;
  exchange_headers(call);
  to.remaining = collectives;
}

void RankGroup::exchange_headers(const Call& call) {
  const Connection& to = *connection_;
  Tensor mine = at::empty({Call::kHeaderLength}, at::kLong);
  Tensor all = at::empty({size() * Call::kHeaderLength}, at::kLong);
  std::copy(call.header().begin(), call.header().end(), mine.mutable_data_ptr<int64_t>());
  c10d::AllgatherOptions options;
  options.timeout = to.timeout;
  options.asyncOp = true;
  c10::intrusive_ptr<c10d::Work> work;
  try {
    work = state_->cpu_backend->_allgather_base(all, mine, options);
  } catch (const c10::DistError& error) {
    raise_peer_error(*state_, state_->heartbeat("cpu"), ++state_->cpu_sequence, call.phase(), to.timeout,
                     first_line(error));
  }
  wait_on_cpu(*state_, work, call.phase(), to.timeout);
  call.compare(all.const_data_ptr<int64_t>(), size(), state_->name);
}

#ifdef TRANSFORMER_PLUGIN_CUDA
namespace {

// Marks the collective as ended on the progress page and on the host, also when NCCL has raised an error.
struct EndCollective {
  GroupState& state;
  const StreamProgress& progress;
  void* stream;
  ~EndCollective() {
    state.host_begin_ms = 0;
    if (state.first_call_end_ms == 0) state.first_call_end_ms = steady_now_ms();
    try {
      launch_end_collective(progress, stream);
    } catch (const std::exception&) {  // the error of the collective itself is more useful
    }
  }
};

}  // namespace
#endif

Tensor PendingCollective::wait() {
  if (wait_) std::exchange(wait_, nullptr)();
  return output_;
}

template <typename Start>
PendingCollective RankGroup::run(const Phase& phase, const Tensor& output, Start&& start) const {
  Connection& to = *connection_;
  PendingCollective pending;
  pending.output_ = output;
  if (!to.on_cuda) {
    c10::intrusive_ptr<c10d::Work> work;
    try {
      work = start();
    } catch (const c10::DistError& error) {
      raise_peer_error(*state_, state_->heartbeat("cpu"), ++state_->cpu_sequence, phase, to.timeout,
                       first_line(error));
    }
    pending.wait_ = [state = state_, to = connection_, work, phase] {
      wait_on_cpu(*state, work, phase, to->timeout);
      --to->remaining;
    };
    return pending;
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(output);
  const StreamProgress& progress = group_progress(*state_);
  state_->timeout_ms = to.timeout.count();
  watch_group(state_);
  void* stream = scope.stream();
  const int32_t subject = state_->number_of_subject(Subject::current());
  launch_begin_collective(progress, phase.id, subject, stream);
  const int64_t sequence = ++state_->host_sequence;
  state_->host_phase_id = phase.id;
  state_->host_subject = subject;
  state_->host_begin_ms = steady_now_ms();
  const EndCollective end{*state_, progress, stream};
  try {
    const c10::intrusive_ptr<c10d::Work> work = start();
    if (work) work->wait();  // orders streams; does not block
  } catch (const c10::DistError& error) {
    raise_peer_error(*state_, state_->heartbeat("host"), sequence, phase, to.timeout, first_line(error));
  }
#endif
  return pending;
}

PendingCollective RankGroup::start_all_gather(const Tensor& part, const Phase& phase) const {
  PendingCollective pending;
  pending.output_ = part;
  if (size() == 1) return pending;
  const Tensor input = part.contiguous();
  std::vector<c10::SymInt> sizes(input.sym_sizes().begin(), input.sym_sizes().end());
  sizes[0] = sizes[0] * size();
  pending.output_ = empty(input, sizes, input.scalar_type());
  if (input.numel() == 0) {
    --connection_->remaining;
    return pending;
  }
  return run(phase, pending.output_, [&] {
    Tensor to = as_payload(pending.output_);
    Tensor from = as_payload(input);
    c10d::AllgatherOptions options;
    options.timeout = connection_->timeout;
    options.asyncOp = !connection_->on_cuda;
    return connection_->backend(*state_)._allgather_base(to, from, options);
  });
}

void RankGroup::all_gather_list(at::TensorList parts, at::TensorList out, const Phase& phase) const {
  std::vector<Tensor> from, to;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].numel() == 0) continue;
    from.push_back(as_payload(parts[i].contiguous()));
    to.push_back(as_payload(out[i]));
  }
  if (from.empty()) {
    --connection_->remaining;
    return;
  }
  run(phase, to.front(), [&] {
    c10d::AllgatherOptions options;
    options.timeout = connection_->timeout;
    options.asyncOp = !connection_->on_cuda;
    c10d::Backend& backend = connection_->backend(*state_);
    if (from.size() == 1 && connection_->on_cuda) {  // takes the host less time
      return backend._allgather_base(to[0], from[0], options);
    }
    return backend.allgather_into_tensor_coalesced(to, from, options);
  }).wait();
}

PendingCollective RankGroup::start_all_to_all(const Tensor& parts, const Phase& phase) const {
  PendingCollective pending;
  pending.output_ = parts;
  if (size() == 1) return pending;
  const Tensor input = parts.contiguous();
  pending.output_ = empty(input, input.sym_sizes(), input.scalar_type());
  if (input.numel() == 0) {
    --connection_->remaining;
    return pending;
  }
  return run(phase, pending.output_, [&] {
    Tensor to = as_bytes(pending.output_);
    Tensor from = as_bytes(input);
    std::vector<int64_t> equal_splits;
    c10d::AllToAllOptions options;
    options.timeout = connection_->timeout;
    options.asyncOp = !connection_->on_cuda;
    return connection_->backend(*state_).alltoall_base(to, from, equal_splits, equal_splits, options);
  });
}

Tensor RankGroup::exchange_with_others(const Tensor& parts, const Phase& phase) const {
  TORCH_INTERNAL_ASSERT(connection_->on_cuda);  // Gloo has no exchange of lists
  std::vector<c10::SymInt> sizes(parts.sym_sizes().begin(), parts.sym_sizes().end());
  sizes[0] = parts.size(0) / size() * (size() - 1);
  const Tensor output = empty(parts, sizes, parts.scalar_type());
  if (output.numel() == 0) return output;
  return run(phase, output,
             [&] {
               const Tensor from = as_bytes(parts), to = as_bytes(output);
               const int64_t bytes = from.size(0) / size();
               std::vector<Tensor> sent, received;
               for (int64_t r = 0, place = 0; r < size(); ++r) {
                 const int64_t moved = r == rank() ? 0 : bytes;
                 sent.push_back(from.narrow(0, r * bytes, moved));
                 received.push_back(to.narrow(0, place, moved));
                 place += moved;
               }
               c10d::AllToAllOptions options;
               options.timeout = connection_->timeout;
               options.asyncOp = false;
               return connection_->backend(*state_).alltoall(received, sent, options);
             })
      .wait();
}

std::vector<std::string> RankGroup::all_gather_text(const std::string& text) const {
  if (size() == 1) return {text};
  const Phase& phase = kConfigurationPhase;
  check_not_failed(*state_, phase, connection_->timeout);
  return all_gather_texts(*state_, "text", state_->text_sequence++, text, phase, phase_text(phase),
                          connection_->timeout);
}

void RankGroup::compare_through_store(const Call& call) const {
  if (size() > 1) compare_signature(*state_, call, connection_->timeout);
}

}  // namespace transformer_plugin::distributed

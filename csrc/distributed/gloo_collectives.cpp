// Collectives on a CPU, with their headers and timeouts.
#include "distributed/gloo_collectives.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <thread>

#include "distributed/gloo_connection.h"

namespace transformer_plugin::distributed {
namespace {

using at::Tensor;

// Waits for a collective. Raises the error of peer_error() if a rank is lost or does not join within `timeout`.
void wait_for_work(ProcessGroupState& state, const c10::intrusive_ptr<c10d::Work>& work, const Phase& phase,
                   Milliseconds timeout) {
  const int64_t sequence = ++state.cpu_sequence;
  const int64_t end = steady_now_ms() + timeout.count();
  bool has_report = false;
  for (;;) {
    const int64_t left = std::max<int64_t>(1, end - steady_now_ms());
    const std::string reason = has_report ? "another rank has given up" : "no answer";
    try {
      work->wait(std::min(Milliseconds(left), kHeartbeatInterval));
      break;
    } catch (const std::exception& error) {
      // Work::wait raises both when the interval is over and when the collective has failed.
      if (work->isCompleted()) {
        if (work->isSuccess()) break;
        raise_peer_error(state, state.heartbeat("cpu"), sequence, phase, timeout, first_line(error));
      }
    }
    if (has_report || steady_now_ms() >= end)
      raise_peer_error(state, state.heartbeat("cpu"), sequence, phase, timeout, reason);
    has_report = state.heartbeat("cpu").send(sequence, phase_text(phase));
  }
  // Gloo's thread releases the work, and with it the tensors, shortly after completion. If it held the last
  // reference to a tensor that Python knows while Python shuts down, the process would abort, so this thread
  // waits up to 100 ms for it.
  for (int64_t i = 0; i < 1000 && work.use_count() > 1; ++i)
    std::this_thread::sleep_for(std::chrono::microseconds(i < 100 ? 1 : 100));
}

}  // namespace

void GlooCollectives::begin_call(const Call& call, int64_t collectives) {
  ProcessGroupState& state = *to_.state;
  call_lock_ = std::unique_lock<std::mutex>(state.call_mutex);
  check_not_failed(state, call.phase(), to_.timeout);
  if (!state.cpu_backend)
    state.cpu_backend = connect_cpu_backend(state, to_.group, call.phase(), to_.timeout);
  // torch's backend for tests, which sends nothing
  if (state.cpu_backend->getBackendName() == "fake") return;
  ++state.call_count;
  compare_headers(call);
  remaining_ = collectives;
}

void GlooCollectives::end_call() {
  if (remaining_ > 0) {
    ProcessGroupState& state = *to_.state;
    const std::lock_guard<std::mutex> lock(state.failure_mutex);
    if (!state.failure) state.failure = LivenessReport{{state.rank}, "", ""};
  }
  if (call_lock_) call_lock_.unlock();
}

void GlooCollectives::compare_headers(const Call& call) {
  ProcessGroupState& state = *to_.state;
  Tensor mine = at::empty({Call::kHeaderLength}, at::kLong);
  Tensor all = at::empty({state.size * Call::kHeaderLength}, at::kLong);
  std::copy(call.header().begin(), call.header().end(), mine.mutable_data_ptr<int64_t>());
  const auto work = start_work(call.phase(), [&] {
    return state.cpu_backend->_allgather_base(all, mine, options<c10d::AllgatherOptions>(true));
  });
  wait_for_work(state, work, call.phase(), to_.timeout);
  call.compare(all.const_data_ptr<int64_t>(), state.size, state.name);
}

template <typename Start>
c10::intrusive_ptr<c10d::Work> GlooCollectives::start_work(const Phase& phase, Start&& start) {
  try {
    return start();
  } catch (const c10::DistError& error) {
    ProcessGroupState& state = *to_.state;
    raise_peer_error(state, state.heartbeat("cpu"), ++state.cpu_sequence, phase, to_.timeout,
                     first_line(error));
  }
}

template <typename Start>
PendingCollective GlooCollectives::run(const Tensor& out, const Phase& phase, Start&& start) {
  if (out.numel() == 0) {
    --remaining_;
    return PendingCollective(out);
  }
  return run_always(out, phase, std::forward<Start>(start));
}

template <typename Start>
PendingCollective GlooCollectives::run_always(const Tensor& out, const Phase& phase, Start&& start) {
  const auto work = start_work(phase, std::forward<Start>(start));
  return PendingCollective(out, [self = shared_from_this(), work, phase] {
    wait_for_work(*self->to_.state, work, phase, self->to_.timeout);
    --self->remaining_;
  });
}

PendingCollective GlooCollectives::all_gather(const Tensor& rows, const Phase& phase) {
  const Tensor input = rows.contiguous(), out = empty_rows(input, input.sym_size(0) * to_.state->size);
  return run(out, phase, [&] {
    Tensor from = as_bytes(input), to = as_bytes(out);
    return to_.state->cpu_backend->_allgather_base(to, from, options<c10d::AllgatherOptions>(true));
  });
}

PendingCollective GlooCollectives::all_gather_list(at::TensorList inputs, at::TensorList out,
                                                   const Phase& phase) {
  const GatheredTensors gathered = with_elements(inputs, out);
  return run(gathered.out.empty() ? out[0] : gathered.out[0], phase, [&] {
    std::vector<Tensor> from, to;
    for (const Tensor& tensor : gathered.inputs) from.push_back(as_bytes(tensor));
    for (const Tensor& each : gathered.out) to.push_back(as_bytes(each));
    return to_.state->cpu_backend->allgather_into_tensor_coalesced(to, from,
                                                                   options<c10d::AllgatherOptions>(true));
  });
}

PendingCollective GlooCollectives::all_to_all(const Tensor& rows, const Phase& phase) {
  const Tensor input = rows.contiguous(), out = empty_rows(input, input.sym_size(0));
  return run(out, phase, [&] {
    Tensor from = as_bytes(input), to = as_bytes(out);
    std::vector<int64_t> equal_splits;
    return to_.state->cpu_backend->alltoall_base(to, from, equal_splits, equal_splits,
                                                 options<c10d::AllToAllOptions>(true));
  });
}

PendingCollective GlooCollectives::all_to_all_rows(const Tensor& rows, at::IntArrayRef sent,
                                                   at::IntArrayRef received, const Phase& phase) {
  const Tensor input = rows.contiguous(), out = empty_rows(input, sum_of(received));
  return run_always(out, phase, [&] {
    Tensor from = as_bytes(input), to = as_bytes(out);
    std::vector<int64_t> sent_bytes = in_bytes(sent, input), received_bytes = in_bytes(received, input);
    return to_.state->cpu_backend->alltoall_base(to, from, received_bytes, sent_bytes,
                                                 options<c10d::AllToAllOptions>(true));
  });
}

PendingCollective GlooCollectives::exchange_with_others(const Tensor&, const Phase&) {
  TORCH_INTERNAL_ASSERT(false, "only on CUDA");
}

}  // namespace transformer_plugin::distributed

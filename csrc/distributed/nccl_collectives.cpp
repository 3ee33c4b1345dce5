// Collectives on CUDA, between kernels that report the stream's progress to the watchdog.
#ifdef TRANSFORMER_PLUGIN_CUDA
#include "distributed/nccl_collectives.h"

#include <algorithm>

#include "common/tensor.h"
#include "distributed/watched_work.h"

namespace transformer_plugin::distributed {
namespace {

using at::Tensor;

// What NCCL takes to move a contiguous tensor without reading it. It takes most dtypes, which saves the host views.
Tensor as_payload(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
    case at::kBFloat16:
    case at::kHalf:
    case at::kByte:
    case at::kInt:
    case at::kLong: return tensor;
    default: return as_bytes(tensor);
  }
}

}  // namespace

void NcclCollectives::begin_call(const Call& call, int64_t) {
  ProcessGroupState& state = *to_.state;
  const CudaScope scope(to_.like);
  if (stream_is_captured(scope.stream())) return;
  const bool first = state.first_call_end_ms == 0;
  compare_signature(state, call, first ? std::max(to_.timeout, Milliseconds(kFirstCallMs)) : to_.timeout);
}

// Its methods are called without the dispatcher, which would look up the same backend.
c10d::Backend& NcclCollectives::backend() const { return *to_.group->getBackend(at::kCUDA); }

template <typename Start>
PendingCollective NcclCollectives::run(const Tensor& out, const Phase& phase, Start&& start) {
  if (out.numel() == 0) return PendingCollective(out);
  return run_always(out, phase, std::forward<Start>(start));
}

template <typename Start>
PendingCollective NcclCollectives::run_always(const Tensor& out, const Phase& phase, Start&& start) {
  ProcessGroupState& state = *to_.state;
  const CudaScope scope(out);
  const WatchedWork watched(to_.state, phase, to_.timeout, scope.stream());
  try {
    const c10::intrusive_ptr<c10d::Work> work = start();
    if (work) work->wait();  // orders streams; does not block
  } catch (const c10::DistError& error) {
    raise_peer_error(state, state.heartbeat("host"), watched.sequence(), phase, to_.timeout,
                     first_line(error));
  }
  return PendingCollective(out);
}

PendingCollective NcclCollectives::all_gather(const Tensor& rows, const Phase& phase) {
  const Tensor input = rows.contiguous(), out = empty_rows(input, input.sym_size(0) * to_.state->size);
  return run(out, phase, [&] {
    Tensor from = as_payload(input), to = as_payload(out);
    return backend()._allgather_base(to, from, options<c10d::AllgatherOptions>(false));
  });
}

PendingCollective NcclCollectives::all_gather_list(at::TensorList inputs, at::TensorList out,
                                                   const Phase& phase) {
  const GatheredTensors gathered = with_elements(inputs, out);
  return run(gathered.out.empty() ? out[0] : gathered.out[0], phase, [&] {
    std::vector<Tensor> from, to;
    for (const Tensor& tensor : gathered.inputs) from.push_back(as_payload(tensor));
    for (const Tensor& each : gathered.out) to.push_back(as_payload(each));
    const auto how = options<c10d::AllgatherOptions>(false);
    // That of one tensor takes the host less time.
    return to.size() == 1 ? backend()._allgather_base(to[0], from[0], how)
                          : backend().allgather_into_tensor_coalesced(to, from, how);
  });
}

PendingCollective NcclCollectives::all_to_all(const Tensor& rows, const Phase& phase) {
  const Tensor input = rows.contiguous(), out = empty_rows(input, input.sym_size(0));
  return run(out, phase, [&] {
    Tensor from = as_bytes(input), to = as_bytes(out);
    std::vector<int64_t> equal_splits;
    return backend().alltoall_base(to, from, equal_splits, equal_splits,
                                   options<c10d::AllToAllOptions>(false));
  });
}

PendingCollective NcclCollectives::all_to_all_rows(const Tensor& rows, at::IntArrayRef sent,
                                                   at::IntArrayRef received, const Phase& phase) {
  const Tensor input = rows.contiguous(), out = empty_rows(input, sum_of(received));
  return run_always(out, phase, [&] {
    Tensor from = as_bytes(input), to = as_bytes(out);
    std::vector<int64_t> sent_bytes = in_bytes(sent, input), received_bytes = in_bytes(received, input);
    return backend().alltoall_base(to, from, received_bytes, sent_bytes,
                                   options<c10d::AllToAllOptions>(false));
  });
}

PendingCollective NcclCollectives::exchange_with_others(const Tensor& rows, const Phase& phase) {
  const int64_t size = to_.state->size, rank = to_.state->rank;
  const Tensor out = empty_rows(rows, rows.size(0) / size * (size - 1));
  return run(out, phase, [&] {
    const Tensor from = as_bytes(rows), to = as_bytes(out);
    const int64_t bytes = from.size(0) / size;
    std::vector<Tensor> sent, received;
    for (int64_t r = 0, place = 0; r < size; ++r) {
      const int64_t moved = r == rank ? 0 : bytes;
      sent.push_back(from.narrow(0, r * bytes, moved));
      received.push_back(to.narrow(0, place, moved));
      place += moved;
    }
    return backend().alltoall(received, sent, options<c10d::AllToAllOptions>(false));
  });
}

}  // namespace transformer_plugin::distributed
#endif

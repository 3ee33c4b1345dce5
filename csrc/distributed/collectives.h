// The collectives of a group as one call of an op makes them: Gloo on a CPU, NCCL on CUDA, copies where the group has one rank.
// Payload travels as bytes. Several collectives may be in flight; every rank starts them, and waits for them, in the same order.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "distributed/call.h"
#include "distributed/process_group_state.h"

namespace transformer_plugin::distributed {

// A collective that a call has started and waits for. Those that outlive their call are in pending_collectives.h.
class PendingCollective {
 public:
  PendingCollective() = default;
  // `wait`: empty if there is nothing to wait for.
  explicit PendingCollective(at::Tensor output, std::function<void()> wait = {});
  // The result. On a CPU this waits for it, within the timeout, or raises PeerTimeoutError. On CUDA the
  // collective is enqueued already and only the stream waits.
  at::Tensor wait();

 private:
  at::Tensor output_;
  std::function<void()> wait_;
};

// A group as one call uses it.
struct CallContext {
  std::shared_ptr<ProcessGroupState> state;
  c10::intrusive_ptr<c10d::ProcessGroup> group;  // null: the group of this process alone
  at::Tensor like;                               // a tensor on the device of the payload, or undefined
  Milliseconds timeout;
};

// Made for each call. Tensors are on the device of `like`; results are contiguous. A collective of tensors without elements is not started, on any rank.
class Collectives {
 public:
  virtual ~Collectives() = default;
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;

  // Compares the ranks' headers; raises ValueError on every rank where they differ. `collectives`: those that follow.
  virtual void begin_call(const Call& call, int64_t collectives) = 0;
  // Every rank raises an error, the same, before the collectives that were to follow.
  virtual void cancel_call() = 0;
  // The op returns, or has raised an error.
  virtual void end_call() = 0;

  // [n, ...] of each rank -> [size * n, ...], in ascending order of ranks.
  virtual PendingCollective all_gather(const at::Tensor& rows, const Phase& phase) = 0;
  // The same for several tensors in one collective, each into a contiguous tensor of `out`. Neither list is empty.
  virtual PendingCollective all_gather_list(at::TensorList inputs, at::TensorList out,
                                            const Phase& phase) = 0;
  // [size * n, ...], of which the r-th n rows go to rank r -> [size * n, ...], of which the r-th n rows come
  // from rank r.
  virtual PendingCollective all_to_all(const at::Tensor& rows, const Phase& phase) = 0;
  // The same with sent[r] rows for rank r, in ascending order of ranks, and received[r] rows from it: what rank r sends to
  // this one. The host of every rank knows its numbers.
  virtual PendingCollective all_to_all_rows(const at::Tensor& rows, at::IntArrayRef sent,
                                            at::IntArrayRef received, const Phase& phase) = 0;
  // The same without this rank's rows, which do not move: [(size - 1) * n, ...]. On CUDA only.
  virtual PendingCollective exchange_with_others(const at::Tensor& rows, const Phase& phase) = 0;

 protected:
  explicit Collectives(CallContext to) : to_(std::move(to)) {}

  template <typename Options>
  Options options(bool asynchronous) const {
    Options options;
    options.timeout = to_.timeout;
    options.asyncOp = asynchronous;
    return options;
  }

  const CallContext to_;
};

// A new tensor of this many rows, each as those of `like`.
at::Tensor empty_rows(const at::Tensor& like, const c10::SymInt& rows);

int64_t sum_of(at::IntArrayRef counts);
// Numbers of rows of `like` as numbers of bytes.
std::vector<int64_t> in_bytes(at::IntArrayRef rows, const at::Tensor& like);

// Those of the tensors that have elements, contiguous, with their outputs.
struct GatheredTensors {
  std::vector<at::Tensor> inputs, out;
};
GatheredTensors with_elements(at::TensorList inputs, at::TensorList out);

// Of a contiguous tensor. Where a dimension has one element, its stride may be any.
at::Tensor as_bytes(const at::Tensor& tensor);

}  // namespace transformer_plugin::distributed

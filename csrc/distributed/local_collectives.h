// Collectives of a group of one rank.
#pragma once

#include "distributed/collectives.h"

namespace transformer_plugin::distributed {

// Nothing is sent: the result of a collective is its argument, or a copy if that is not contiguous.
class LocalCollectives : public Collectives {
 public:
  explicit LocalCollectives(CallContext to) : Collectives(std::move(to)) {}

  void begin_call(const Call&, int64_t) override {}
  void cancel_call() override {}
  void end_call() override {}

  PendingCollective all_gather(const at::Tensor& rows, const Phase&) override {
    return PendingCollective(rows.contiguous());
  }
  PendingCollective all_gather_list(at::TensorList inputs, at::TensorList out, const Phase&) override {
    for (size_t i = 0; i < inputs.size(); ++i) out[i].copy_(inputs[i]);
    return PendingCollective(out[0]);
  }
  PendingCollective all_to_all(const at::Tensor& rows, const Phase&) override {
    return PendingCollective(rows.contiguous());
  }
  PendingCollective all_to_all_rows(const at::Tensor& rows, at::IntArrayRef, at::IntArrayRef,
                                    const Phase&) override {
    return PendingCollective(rows.contiguous());
  }
  PendingCollective exchange_with_others(const at::Tensor& rows, const Phase&) override {
    return PendingCollective(empty_rows(rows, 0));
  }
};

}  // namespace transformer_plugin::distributed

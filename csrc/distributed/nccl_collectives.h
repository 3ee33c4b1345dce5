// Collectives on CUDA. They run on the current stream, read nothing on the host, and can be captured in a graph. The watchdog
// observes them (process_group_state.h).
#pragma once

#include "distributed/collectives.h"

namespace transformer_plugin::distributed {

// Headers of a new kind of call are compared once, through the store, because the host does not wait for the stream. In a
// capture nothing is compared: its kinds of calls were made before, when it was warmed up.
class NcclCollectives : public Collectives {
 public:
  explicit NcclCollectives(CallContext to) : Collectives(std::move(to)) {}

  void begin_call(const Call& call, int64_t collectives) override;
  void cancel_call() override {}
  void end_call() override {}

  PendingCollective all_gather(const at::Tensor& rows, const Phase& phase) override;
  PendingCollective all_gather_list(at::TensorList inputs, at::TensorList out, const Phase& phase) override;
  PendingCollective all_to_all(const at::Tensor& rows, const Phase& phase) override;
  PendingCollective all_to_all_rows(const at::Tensor& rows, at::IntArrayRef sent, at::IntArrayRef received,
                                    const Phase& phase) override;
  PendingCollective exchange_with_others(const at::Tensor& rows, const Phase& phase) override;

 private:
  template <typename Start>
  PendingCollective run(const at::Tensor& out, const Phase& phase, Start&& start);
  // The same also where this rank has no elements, because other ranks may have some.
  template <typename Start>
  PendingCollective run_always(const at::Tensor& out, const Phase& phase, Start&& start);
  c10d::Backend& backend() const;
};

}  // namespace transformer_plugin::distributed

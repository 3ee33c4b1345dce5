// Collectives on a CPU. The calling thread waits for each, and raises PeerTimeoutError if a rank does not join in time.
#pragma once

#include <mutex>

#include "distributed/collectives.h"

namespace transformer_plugin::distributed {

// Headers are all-gathered before each call, because Gloo ends the process when a message is longer than the
// receiver's buffer. One call of the group runs at a time.
class GlooCollectives : public Collectives, public std::enable_shared_from_this<GlooCollectives> {
 public:
  explicit GlooCollectives(CallContext to) : Collectives(std::move(to)) {}

  void begin_call(const Call& call, int64_t collectives) override;
  void cancel_call() override { remaining_ = 0; }
  // If a call ends before its collectives, for example because an allocation failed, the other ranks would take
  // this rank's next message for the missing one. So the group is marked as failed.
  void end_call() override;

  PendingCollective all_gather(const at::Tensor& rows, const Phase& phase) override;
  PendingCollective all_gather_list(at::TensorList inputs, at::TensorList out, const Phase& phase) override;
  PendingCollective all_to_all(const at::Tensor& rows, const Phase& phase) override;
  PendingCollective all_to_all_rows(const at::Tensor& rows, at::IntArrayRef sent, at::IntArrayRef received,
                                    const Phase& phase) override;
  // Gloo has no exchange of lists.
  PendingCollective exchange_with_others(const at::Tensor& rows, const Phase& phase) override;

 private:
  void compare_headers(const Call& call);
  template <typename Start>
  c10::intrusive_ptr<c10d::Work> start_work(const Phase& phase, Start&& start);
  template <typename Start>
  PendingCollective run(const at::Tensor& out, const Phase& phase, Start&& start);
  // The same also where this rank has no elements, because other ranks may have some.
  template <typename Start>
  PendingCollective run_always(const at::Tensor& out, const Phase& phase, Start&& start);

  std::unique_lock<std::mutex> call_lock_;  // held while the call runs
  int64_t remaining_ = 0;                   // collectives of this call that the other ranks still expect
};

}  // namespace transformer_plugin::distributed

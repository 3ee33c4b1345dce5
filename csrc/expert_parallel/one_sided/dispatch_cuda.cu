// The launch of dispatch (dispatch_kernel.cuh).
#include "common/pinned.cuh"
#include "expert_parallel/one_sided/dispatch_kernel.cuh"
#include "expert_parallel/one_sided/kernels.h"
#include "expert_parallel/one_sided/launch.cuh"

namespace transformer_plugin::expert_parallel::one_sided {

ChannelFailure* new_channel_failure() { return new_in_pinned_memory<ChannelFailure>(); }

void launch_dispatch(const DispatchArgs& args, int steps, void* stream) {
  const Exchange& exchange = args.exchange;
  check_exchange(exchange, record_stride(args.rows.row_bytes, args.weights.row_bytes));
  // Rows that come and rows that go, in chunks of which the last one of a rank may have few rows.
  const int64_t unused = args.slots.slot ? args.slots.capacity : 0;
  const int64_t rows = args.received_rows + unused + exchange.max_tokens * exchange.destinations;
  const unsigned blocks =
      grid_of(exchange, ceil_div(rows, int64_t{exchange.chunk_rows}) + 2 * int64_t{exchange.peers.ranks});
  dispatch_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args, steps);
  check_launch("dispatch_kernel");
}

}  // namespace transformer_plugin::expert_parallel::one_sided

// The launch of dispatch (dispatch_kernel.cuh).
#include "expert_parallel/one_sided/dispatch_kernel.cuh"
#include "expert_parallel/one_sided/kernels.h"
#include "expert_parallel/one_sided/launch.cuh"

namespace transformer_plugin::expert_parallel::one_sided {

void launch_dispatch(const DispatchArgs& args, int mode, void* stream) {
  const Exchange& exchange = args.exchange;
  check_exchange(exchange, record_stride(args.rows.row_bytes, args.weights.row_bytes));
  // Rows that come and rows that go, in chunks of which the last one of a rank may have few rows.
  const int64_t rows = args.received_rows + exchange.max_tokens * exchange.destinations;
  const unsigned blocks = grid_of(exchange, ceil_div(rows, kChunkRows) + 2 * int64_t{exchange.peers.ranks});
  dispatch_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args, mode);
  check_launch("dispatch_kernel");
}

}  // namespace transformer_plugin::expert_parallel::one_sided

// Ops for tests of the kernels of dispatch and combine, in a library of their own, so that they are not among the public ops: R ranks
// are tensors of one process on one GPU (virtual_ranks.h).
//
// virtual_exchange launches each step of an exchange for every rank before the next, on one stream, so that no kernel waits.
#include "expert_parallel/one_sided/virtual_ranks.h"

#include <torch/library.h>

#include <algorithm>

#include "common/buffers.h"
#include "common/check.h"
#include "common/tensor.h"
#include "expert_parallel/one_sided/kernels.h"

namespace transformer_plugin::expert_parallel::one_sided {
namespace {

using at::Tensor;
using at::TensorList;

constexpr const char* kOp = "virtual_exchange";
constexpr int64_t kReportWords = 8;
static_assert(sizeof(ChannelFailure) == kReportWords * sizeof(int32_t));
static_assert(sizeof(LocalState) <= kStateWords * sizeof(int32_t));

// Where the outputs of a dispatch are, and which calls the ranks make.
struct VirtualCalls {
  const std::optional<Tensor>&
      allocations;  // int64 [kMostAllocations, R]: addresses, each of a rank's memory
  at::IntArrayRef allocation,
      offset;              // of each rank's output; 0: in none; -1: nor does it put into those of others
  at::IntArrayRef phases;  // of each rank; empty: 0
  int64_t chunk_rows;      // 0: as chosen by the transport
  const std::optional<Tensor>& report;  // int32 [R, 8]: ChannelFailure
};

// The arguments, of which each list has an entry for each rank. `weights` and weights_out are empty where there are none,
// and `slot` where rows are the received rows themselves; `source` is of the slots of a dispatch.
struct VirtualExchange {
  const Tensor& channel;
  const Tensor& local_state;
  bool is_dispatch;
  TensorList rows;
  TensorList weights;
  TensorList slot;
  TensorList source;
  TensorList peer_rows;
  TensorList records;
  TensorList rows_out;
  TensorList weights_out;
  ChannelLayout layout;
  int64_t max_sms;
  int64_t timeout_ms;
  VirtualCalls calls;

  int64_t ranks() const { return local_state.size(0); }
  // Rows of tokens: the input of a dispatch, the output of a combine.
  int64_t tokens(int64_t rank) const { return (is_dispatch ? rows : rows_out)[rank].size(0); }
  // Without slots also the rows of the other side.
  int64_t received_rows(int64_t rank) const {
    return (!slot.empty() ? slot : is_dispatch ? rows_out : rows)[rank].size(0);
  }
};

ChannelLayout checked_layout(const char* op, int64_t ranks, int64_t received_rows, int64_t returned_rows,
                             int64_t record_bytes) {
  TP_CHECK_VALUE(ranks >= 1 && ranks <= kMostPeers, op, "num_ranks", "from 1 to " << kMostPeers, ranks,
                 "Use fewer ranks");
  TP_CHECK_VALUE(received_rows >= 0, op, "received_rows", "0 or more", received_rows,
                 "Pass the most rows that a rank receives");
  TP_CHECK_VALUE(returned_rows >= 0, op, "returned_rows", "0 or more", returned_rows,
                 "Pass the most records of a rank");
  TP_CHECK_VALUE(record_bytes >= 0, op, "record_bytes", "0 or more", record_bytes,
                 "Pass the most bytes of a record");
  return channel_layout(ranks, received_rows, returned_rows, record_bytes);
}

std::vector<int64_t> virtual_channel_layout(int64_t num_ranks, int64_t received_rows, int64_t returned_rows,
                                            int64_t record_bytes) {
  const ChannelLayout layout =
      checked_layout("virtual_channel_layout", num_ranks, received_rows, returned_rows, record_bytes);
  return {layout.bytes,    layout.data[0],    layout.data[1], layout.flags[0],
          layout.flags[1], layout.flag_count, layout.credits};
}

// A contiguous tensor of each rank on the device of the channel, with the same columns.
void check_list(const VirtualExchange& call, const char* name, TensorList list, at::ScalarType dtype,
                int64_t dim) {
  TP_CHECK_VALUE(static_cast<int64_t>(list.size()) == call.ranks(), kOp, name,
                 call.ranks() << " tensors, one of each rank", list.size() << " tensors",
                 "Pass one of each rank");
  for (size_t r = 0; r < list.size(); ++r) {
    const std::string name_of_rank = entry(name, r);
    const Argument argument{kOp, name_of_rank.c_str(), list[r]};
    check_dtype(argument, {dtype});
    check_dim(argument, dim);
    check_same_device(argument, {kOp, "channel", call.channel});
    check_contiguous(argument);
    if (dim == 2) check_size(argument, 1, list[0].sym_size(1), "the columns of the first rank");
  }
}

at::ScalarType sum_type(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

void check_channel(const VirtualExchange& call) {
  const Argument channel{kOp, "channel", call.channel}, state{kOp, "local_state", call.local_state};
  check_dtype(channel, {at::kByte});
  check_dim(channel, 1);
  check_contiguous(channel);
  check_size(channel, 0, call.ranks() * call.layout.bytes,
             "the bytes of virtual_channel_layout for each rank");
  check_dtype(state, {at::kInt});
  check_size(state, 1, kStateWords, "the words of the state of a rank");
  check_contiguous(state);
  check_same_device(state, channel);
}

void check_lists(const VirtualExchange& call) {
  TP_CHECK_VALUE(!call.rows.empty(), kOp, "rows", "one tensor of each rank", "none", "Pass one of each rank");
  const at::ScalarType dtype = call.rows[0].scalar_type();
  check_dtype({kOp, "rows[0]", call.rows[0]}, {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble});
  check_list(call, "rows", call.rows, dtype, 2);
  check_list(call, "rows_out", call.rows_out, dtype, 2);
  if (!call.weights.empty() || !call.weights_out.empty()) {
    check_list(call, "weights", call.weights, sum_type(dtype), 2);
    check_list(call, "weights_out", call.weights_out, sum_type(dtype), 2);
  }
  if (!call.slot.empty()) check_list(call, "slot", call.slot, at::kInt, 2);
  if (call.is_dispatch && !call.slot.empty()) check_list(call, "source", call.source, at::kInt, 1);
  check_list(call, "peer_rows", call.peer_rows, at::kInt, 2);
  check_list(call, "records", call.records, at::kInt, 3);
}

void check_sizes(const VirtualExchange& call) {
  for (int64_t r = 0; r < call.ranks(); ++r) {
    const auto check = [r](const char* name, TensorList list, int64_t dim, int64_t size,
                           const char* meaning) {
      const std::string name_of_rank = entry(name, r);
      check_size({kOp, name_of_rank.c_str(), list[r]}, dim, size, meaning);
    };
    check("rows_out", call.rows_out, 1, call.rows[r].size(1), "the columns of 'rows'");
    check("peer_rows", call.peer_rows, 0, 4, "the rows of the plan");
    check("peer_rows", call.peer_rows, 1, call.ranks() + 1, "the ranks and one");
    check("records", call.records, 0, 3, "the rows of the plan");
    if (call.is_dispatch && !call.slot.empty())
      check("source", call.source, 0, call.rows_out[r].size(0), "the rows of 'rows_out'");
    const int64_t tokens = call.tokens(r), received = call.received_rows(r);
    TP_CHECK_VALUE(tokens <= call.records[r].size(1), kOp, "records",
                   "at least " << tokens << " tokens of rank " << r, call.records[r].size(1),
                   "Pass the plan of these tokens");
    TP_CHECK_VALUE(received <= call.layout.rows, kOp, "received_rows", received << " or more",
                   call.layout.rows, "Make a larger channel");
    if (call.weights.empty()) continue;
    check("weights", call.weights, 0, call.is_dispatch ? tokens : received, "the rows of this rank");
    check("weights_out", call.weights_out, 0, call.is_dispatch ? received : tokens, "the rows of this rank");
    check("weights_out", call.weights_out, 1, call.weights[r].size(1), "the columns of 'weights'");
  }
}

void check_calls(const VirtualExchange& call) {
  const VirtualCalls& calls = call.calls;
  const auto check_count = [&](const char* name, at::IntArrayRef list) {
    TP_CHECK_VALUE(list.empty() || static_cast<int64_t>(list.size()) == call.ranks(), kOp, name,
                   call.ranks() << " numbers, one of each rank", list.size() << " numbers",
                   "Pass one of each rank, or none");
  };
  check_count("allocation", calls.allocation);
  check_count("offset", calls.offset);
  check_count("phases", calls.phases);
  TP_CHECK_VALUE(calls.allocation.size() == calls.offset.size(), kOp, "offset", "as many as 'allocation'",
                 calls.offset.size(), "Pass both");
  if (calls.allocations) {
    const Argument argument{kOp, "allocations", *calls.allocations};
    check_dtype(argument, {at::kLong});
    check_size(argument, 0, kMostAllocations, "the most allocations");
    check_size(argument, 1, call.ranks(), "the ranks");
    check_contiguous(argument);
    check_same_device(argument, {kOp, "channel", call.channel});
  }
  if (!calls.report) return;
  const Argument argument{kOp, "failure", *calls.report};
  check_dtype(argument, {at::kInt});
  check_size(argument, 0, call.ranks(), "the ranks");
  check_size(argument, 1, kReportWords, "the words of the report of a rank");
  check_contiguous(argument);
  check_same_device(argument, {kOp, "channel", call.channel});
}

#ifdef TRANSFORMER_PLUGIN_CUDA
Exchange exchange_of(const VirtualExchange& call, int64_t rank) {
  Exchange exchange{};
  exchange.peer_rows = call.peer_rows[rank].const_data_ptr<int32_t>();
  exchange.records = call.records[rank].const_data_ptr<int32_t>();
  exchange.max_tokens = call.records[rank].size(1);
  exchange.destinations = call.records[rank].size(2);
  const Tensor& rows = call.rows[rank];
  exchange.chunk_rows =
      call.calls.chunk_rows > 0
          ? static_cast<int32_t>(call.calls.chunk_rows)
          : chunk_rows_for(exchange.max_tokens, rows.size(1) * static_cast<int64_t>(rows.element_size()));
  exchange.layout = call.layout;
  exchange.peers = peers_of(call.channel, rank, call.ranks(), call.layout.bytes);
  exchange.state =
      reinterpret_cast<LocalState*>(call.local_state.mutable_data_ptr<int32_t>() + rank * kStateWords);
  exchange.timeout_ns = call.timeout_ms * 1000000;
  exchange.max_sms = static_cast<int32_t>(call.max_sms);
  const VirtualCalls& calls = call.calls;
  if (calls.allocations && (calls.allocation.empty() || calls.allocation[rank] >= 0))
    exchange.allocations = reinterpret_cast<void* const*>(calls.allocations->const_data_ptr<int64_t>());
  if (!calls.phases.empty()) exchange.marks.phase_id = static_cast<int32_t>(calls.phases[rank]);
  if (calls.report)
    exchange.failure =
        reinterpret_cast<ChannelFailure*>(calls.report->mutable_data_ptr<int32_t>() + rank * kReportWords);
  return exchange;
}

DispatchedRows dispatched_rows(TensorList inputs, TensorList outputs, int64_t rank) {
  if (inputs.empty()) return {};
  const Tensor& input = inputs[rank];
  return {input.const_data_ptr(), outputs[rank].mutable_data_ptr(), input.size(1) * input.element_size()};
}

void launch_step(const VirtualExchange& call, int64_t rank, int step, void* stream) {
  if (call.is_dispatch) {
    DispatchArgs args{};
    args.exchange = exchange_of(call, rank);
    args.rows = dispatched_rows(call.rows, call.rows_out, rank);
    args.weights = dispatched_rows(call.weights, call.weights_out, rank);
    args.received_rows = call.received_rows(rank);
    args.tokens = call.tokens(rank);
    if (!call.slot.empty()) {
      args.slots = {call.slot[rank].const_data_ptr<int32_t>(), call.source[rank].const_data_ptr<int32_t>(),
                    call.slot[rank].size(1), call.source[rank].size(0)};
    }
    if (!call.calls.allocation.empty() && call.calls.allocation[rank] > 0)
      args.place = {static_cast<uint32_t>(call.calls.allocation[rank]),
                    static_cast<uint32_t>(call.rows_out[rank].size(0)), call.calls.offset[rank]};
    return launch_dispatch(args, step, stream);
  }
  CombineArgs args{};
  args.exchange = exchange_of(call, rank);
  args.rows = call.rows[rank].const_data_ptr();
  if (!call.slot.empty()) {
    args.slot = call.slot[rank].const_data_ptr<int32_t>();
    args.topk = call.slot[rank].size(1);
    args.capacity = call.rows[rank].size(0);
  }
  args.output = call.rows_out[rank].mutable_data_ptr();
  args.width = call.rows[rank].size(1);
  args.dtype = to_dtype(call.rows[rank].scalar_type());
  if (!call.weights.empty()) {
    args.weights = call.weights[rank].const_data_ptr();
    args.weights_output = call.weights_out[rank].mutable_data_ptr();
    args.weights_width = call.weights[rank].size(1);
  }
  args.tokens = call.tokens(rank);
  launch_combine(args, step, stream);
}
#endif

void virtual_exchange(const Tensor& channel, const Tensor& local_state, std::string_view direction,
                      TensorList rows, TensorList weights, TensorList slot, TensorList source,
                      TensorList peer_rows, TensorList records, TensorList rows_out, TensorList weights_out,
                      int64_t received_rows, int64_t returned_rows, int64_t record_bytes, int64_t max_sms,
                      int64_t timeout_ms, const std::optional<Tensor>& allocations,
                      at::IntArrayRef allocation, at::IntArrayRef offset, at::IntArrayRef phases,
                      const std::optional<Tensor>& failure, int64_t chunk_rows) {
  check_on_cuda(kOp, channel);
  TP_CHECK_VALUE(direction == "dispatch" || direction == "combine", kOp, "direction",
                 "\"dispatch\" or \"combine\"", '"' << direction << '"', "Name one of them");
  check_dim({kOp, "local_state", local_state}, 2);
  const VirtualExchange call{
      channel,
      local_state,
      direction == "dispatch",
      rows,
      weights,
      slot,
      source,
      peer_rows,
      records,
      rows_out,
      weights_out,
      checked_layout(kOp, local_state.size(0), received_rows, returned_rows, record_bytes),
      max_sms,
      timeout_ms,
      {allocations, allocation, offset, phases, chunk_rows, failure}};
  check_channel(call);
  check_lists(call);
  check_sizes(call);
  check_calls(call);
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(channel);
  for (const int step : {kAnnounce, kPut, kReceive}) {
    for (int64_t r = 0; r < call.ranks(); ++r) launch_step(call, r, step, scope.stream());
  }
#endif
  mark_written(channel);
  mark_written(local_state);
  for (const Tensor& each : rows_out) mark_written(each);
  for (const Tensor& each : weights_out) mark_written(each);
}

}  // namespace

TORCH_LIBRARY(transformer_plugin_testing, m) {
  m.def(
      "virtual_channel_layout(int num_ranks, int received_rows, int returned_rows, int record_bytes) -> int[]",
      &virtual_channel_layout);
  m.def(
      "virtual_exchange(Tensor(a!) channel, Tensor(b!) local_state, str direction, Tensor[] rows, Tensor[] weights, "
      "Tensor[] slot, Tensor[] source, Tensor[] peer_rows, Tensor[] records, Tensor(c!)[] rows_out, Tensor(d!)[] weights_out, "
      "int received_rows, int returned_rows, int record_bytes, int max_sms=0, int timeout_ms=10000, Tensor? allocations=None, "
      "int[] allocation=[], int[] offset=[], int[] phases=[], Tensor(e!)? failure=None, int chunk_rows=0) -> ()");
}

TORCH_LIBRARY_IMPL(transformer_plugin_testing, CPU, m) { m.impl("virtual_exchange", &virtual_exchange); }

#ifdef TRANSFORMER_PLUGIN_CUDA
TORCH_LIBRARY_IMPL(transformer_plugin_testing, CUDA, m) { m.impl("virtual_exchange", &virtual_exchange); }
#endif

}  // namespace transformer_plugin::expert_parallel::one_sided

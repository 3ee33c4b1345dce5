// Ops for tests of the one-sided kernels, in a library of their own, so that they are not among the public ops: R ranks are tensors
// of one process on one GPU.
//
// virtual_exchange launches the putting half of every rank, then the receiving half of every rank, on one stream, so that no kernel
// waits. virtual_plan launches each step of a plan for every rank before the next.
//
// channel [R * bytes] uint8 is the symmetric memory of all ranks; virtual_channel_layout and virtual_plan_layout say how many bytes,
// and where the parts of a rank's memory are. local_state [R, 16] int32 is the LocalState or PlanState of each rank. Both stay as
// they are from one exchange or plan to the next.
#include <torch/library.h>

#include <algorithm>

#include "common/buffers.h"
#include "common/check.h"
#include "common/tensor.h"
#include "expert_parallel/one_sided/kernels.h"
#include "expert_parallel/one_sided/plan.h"

namespace transformer_plugin::expert_parallel::one_sided {
namespace {

using at::Tensor;
using at::TensorList;

constexpr const char* kOp = "virtual_exchange";
constexpr int64_t kStateWords = 16;
static_assert(sizeof(LocalState) <= kStateWords * sizeof(int32_t) &&
              sizeof(PlanState) <= kStateWords * sizeof(int32_t));

// The arguments, of which each list has an entry for each rank. `weights` and weights_out are empty where there are none,
// and `slot` where rows are the received rows themselves.
struct VirtualExchange {
  const Tensor& channel;
  const Tensor& local_state;
  bool is_dispatch;
  TensorList rows;
  TensorList weights;
  TensorList slot;
  TensorList peer_rows;
  TensorList records;
  TensorList rows_out;
  TensorList weights_out;
  ChannelLayout layout;
  int64_t max_sms;
  int64_t timeout_ms;

  int64_t ranks() const { return local_state.size(0); }
  // Rows of tokens: the input of a dispatch, the output of a combine.
  int64_t tokens(int64_t rank) const { return (is_dispatch ? rows : rows_out)[rank].size(0); }
  // Without slots also the rows of the other side.
  int64_t received_rows(int64_t rank) const {
    return is_dispatch ? rows_out[rank].size(0) : slot.empty() ? rows[rank].size(0) : slot[rank].size(0);
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
    check("records", call.records, 0, 2, "the rows of the plan");
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

#ifdef TRANSFORMER_PLUGIN_CUDA
PeerPointers peers_of(const Tensor& channel, int64_t rank, int64_t ranks, int64_t bytes) {
  PeerPointers peers{};
  peers.rank = static_cast<int32_t>(rank);
  peers.ranks = static_cast<int32_t>(ranks);
  for (int64_t r = 0; r < ranks; ++r) peers.memory[r] = channel.mutable_data_ptr<uint8_t>() + r * bytes;
  return peers;
}

Exchange exchange_of(const VirtualExchange& call, int64_t rank) {
  Exchange exchange{};
  exchange.peer_rows = call.peer_rows[rank].const_data_ptr<int32_t>();
  exchange.records = call.records[rank].const_data_ptr<int32_t>();
  exchange.max_tokens = call.records[rank].size(1);
  exchange.destinations = call.records[rank].size(2);
  exchange.layout = call.layout;
  exchange.peers = peers_of(call.channel, rank, call.ranks(), call.layout.bytes);
  exchange.state =
      reinterpret_cast<LocalState*>(call.local_state.mutable_data_ptr<int32_t>() + rank * kStateWords);
  exchange.timeout_ns = call.timeout_ms * 1000000;
  exchange.max_sms = static_cast<int32_t>(call.max_sms);
  return exchange;
}

DispatchedRows dispatched_rows(TensorList inputs, TensorList outputs, int64_t rank) {
  if (inputs.empty()) return {};
  const Tensor& input = inputs[rank];
  return {input.const_data_ptr(), outputs[rank].mutable_data_ptr(), input.size(1) * input.element_size()};
}

void launch_half(const VirtualExchange& call, int64_t rank, int mode, void* stream) {
  if (call.is_dispatch) {
    const DispatchArgs args{exchange_of(call, rank), dispatched_rows(call.rows, call.rows_out, rank),
                            dispatched_rows(call.weights, call.weights_out, rank), call.received_rows(rank),
                            call.tokens(rank)};
    return launch_dispatch(args, mode, stream);
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
  launch_combine(args, mode, stream);
}
#endif

void check_on_cuda(const char* op, const Tensor& channel) {
  TORCH_CHECK_NOT_IMPLEMENTED(channel.is_cuda(),
                              TP_FOUR_PARTS(op, "channel", "a tensor on CUDA", describe(channel),
                                            "The one-sided exchange is for GPUs"));
}

void virtual_exchange(const Tensor& channel, const Tensor& local_state, std::string_view direction,
                      TensorList rows, TensorList weights, TensorList slot, TensorList peer_rows,
                      TensorList records, TensorList rows_out, TensorList weights_out, int64_t received_rows,
                      int64_t returned_rows, int64_t record_bytes, int64_t max_sms, int64_t timeout_ms) {
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
      peer_rows,
      records,
      rows_out,
      weights_out,
      checked_layout(kOp, local_state.size(0), received_rows, returned_rows, record_bytes),
      max_sms,
      timeout_ms};
  check_channel(call);
  check_lists(call);
  check_sizes(call);
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(channel);
  for (const int mode : {kPut, kReceive}) {
    for (int64_t r = 0; r < call.ranks(); ++r) launch_half(call, r, mode, scope.stream());
  }
#endif
  mark_written(channel);
  mark_written(local_state);
  for (const Tensor& each : rows_out) mark_written(each);
  for (const Tensor& each : weights_out) mark_written(each);
}

constexpr const char* kPlanOp = "virtual_plan";

std::vector<int64_t> virtual_plan_layout(int64_t num_ranks, int64_t num_experts, int64_t received_rows,
                                         int64_t topk) {
  const PlanLayout layout = plan_layout(0, num_ranks, num_experts, received_rows, topk);
  return {layout.bytes, layout.flags[0], layout.flags[1], layout.flags[2]};
}

// Not the checks of compact_plan, which calls the same host code for one rank.
void check_plan(TensorList topk_idx, const Tensor& channel, const Tensor& state, int64_t max_tokens,
                const RecordPlanSizes& sizes) {
  const auto ranks = static_cast<int64_t>(topk_idx.size());
  TP_CHECK_VALUE(ranks >= 1 && ranks <= kMostPeers, kPlanOp, "topk_idx",
                 "from 1 to " << kMostPeers << " ranks", ranks, "Use fewer ranks");
  TP_CHECK_VALUE(sizes.experts >= ranks && sizes.experts % ranks == 0, kPlanOp, "num_experts",
                 "a multiple of the " << ranks << " ranks", sizes.experts,
                 "Give every rank the same number of experts");
  for (int64_t r = 0; r < ranks; ++r) {
    const std::string name_of_rank = entry("topk_idx", r);
    const Argument argument{kPlanOp, name_of_rank.c_str(), topk_idx[r]};
    check_dtype(argument, {at::kInt, at::kLong});
    check_dim(argument, 2);
    check_contiguous(argument);
    check_same_device(argument, {kPlanOp, "channel", channel});
    check_size(argument, 1, topk_idx[0].sym_size(1), "the columns of the first rank");
    TP_CHECK_VALUE(topk_idx[r].size(0) <= max_tokens, kPlanOp, "topk_idx", "at most max_tokens tokens",
                   describe(topk_idx[r]), "Pass a larger max_tokens");
  }
  const PlanLayout layout = plan_layout(0, ranks, sizes.experts, sizes.received_rows, topk_idx[0].size(1));
  const Argument of_channel{kPlanOp, "channel", channel}, of_state{kPlanOp, "state", state};
  check_dtype(of_channel, {at::kByte});
  check_contiguous(of_channel);
  check_size(of_channel, 0, ranks * layout.bytes, "the bytes of virtual_plan_layout for each rank");
  check_dtype(of_state, {at::kInt});
  check_dim(of_state, 2);
  check_size(of_state, 0, ranks, "the ranks");
  check_size(of_state, 1, kStateWords, "the words of the state of a rank");
  check_contiguous(of_state);
  check_same_device(of_state, of_channel);
}

// The plans of all ranks, eight tensors of each, in the order of CompactPlan.
std::vector<Tensor> virtual_plan(TensorList topk_idx, const Tensor& channel, const Tensor& state,
                                 int64_t num_experts, int64_t max_tokens, int64_t capacity, int64_t alignment,
                                 std::optional<int64_t> max_received_tokens, int64_t timeout_ms) {
  check_on_cuda(kPlanOp, channel);
  const auto ranks = static_cast<int64_t>(topk_idx.size());
  const int64_t tokens = ranks * max_tokens;
  const RecordPlanSizes sizes{
      kPlanOp,   num_experts,         capacity,
      alignment, max_received_tokens, std::min({tokens, capacity, max_received_tokens.value_or(tokens)}),
      false};
  check_plan(topk_idx, channel, state, max_tokens, sizes);
  std::vector<Tensor> plans;
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(channel);
  const PlanLayout layout = plan_layout(0, ranks, num_experts, sizes.received_rows, topk_idx[0].size(1));
  std::vector<PlanCall> calls;
  for (int64_t r = 0; r < ranks; ++r) {
    const PeerPointers peers = peers_of(channel, r, ranks, layout.bytes);
    auto* const of_rank = reinterpret_cast<PlanState*>(state.mutable_data_ptr<int32_t>() + r * kStateWords);
    calls.push_back(make_plan_call(topk_idx[r], max_tokens, sizes,
                                   {layout, peers, of_rank, timeout_ms * 1000000}, nullptr));
    const RecordPlan& plan = calls.back().plan;
    for (const Tensor& each : {plan.slot, plan.source, plan.tokens_per_expert, plan.required, plan.overflow,
                               plan.peer_rows, plan.records, plan.required_tokens})
      plans.push_back(each);
  }
  for (const PlanStep step : kPlanSteps) {
    for (const PlanCall& call : calls) launch_plan(call.args, step, scope.stream());
  }
#endif
  mark_written(channel);
  mark_written(state);
  return plans;
}

}  // namespace

TORCH_LIBRARY(transformer_plugin_testing, m) {
  m.def(
      "virtual_channel_layout(int num_ranks, int received_rows, int returned_rows, int record_bytes) -> int[]",
      &virtual_channel_layout);
  m.def(
      "virtual_exchange(Tensor(a!) channel, Tensor(b!) local_state, str direction, Tensor[] rows, Tensor[] weights, "
      "Tensor[] slot, Tensor[] peer_rows, Tensor[] records, Tensor(c!)[] rows_out, Tensor(d!)[] weights_out, "
      "int received_rows, int returned_rows, int record_bytes, int max_sms=0, int timeout_ms=10000) -> ()");
  m.def("virtual_plan_layout(int num_ranks, int num_experts, int received_rows, int topk) -> int[]",
        &virtual_plan_layout);
  m.def(
      "virtual_plan(Tensor[] topk_idx, Tensor(a!) channel, Tensor(b!) state, int num_experts, int max_tokens, int capacity, "
      "int alignment, int? max_received_tokens, int timeout_ms=10000) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(transformer_plugin_testing, CPU, m) {
  m.impl("virtual_exchange", &virtual_exchange);
  m.impl("virtual_plan", &virtual_plan);
}

#ifdef TRANSFORMER_PLUGIN_CUDA
TORCH_LIBRARY_IMPL(transformer_plugin_testing, CUDA, m) {
  m.impl("virtual_exchange", &virtual_exchange);
  m.impl("virtual_plan", &virtual_plan);
}
#endif

}  // namespace transformer_plugin::expert_parallel::one_sided

#ifdef TRANSFORMER_PLUGIN_CUDA
#include "expert_parallel/one_sided_transport.h"

#include "common/check.h"
#include "common/tensor.h"
#include "distributed/symmetric/symmetric_allocations.h"
#include "distributed/watched_work.h"
#include "expert_parallel/one_sided/kernels.h"

namespace transformer_plugin::expert_parallel {
namespace {

using at::Tensor;
using distributed::WatchedWork;
using one_sided::Channel;
using one_sided::ChannelSizes;
using one_sided::Exchange;

int64_t row_bytes(const Tensor& rows) { return rows.size(1) * rows.element_size(); }

// Where other ranks can put rows of the tensor.
one_sided::OutputPlace place_of(const Tensor& tensor, const distributed::SymmetricAllocations& allocations) {
  const auto place = distributed::symmetric_place(tensor);
  // Another group, or one of this name before, has allocations of the same numbers.
  if (!place || allocations.find(place->allocation->number()).get() != place->allocation) return {};
  return {static_cast<uint32_t>(place->allocation->number()), static_cast<uint32_t>(tensor.size(0)),
          place->offset};
}

// The room that the exchange needs in a channel.
ChannelSizes sizes_of(const TokenExchange& exchange, int64_t ranks) {
  const TokenLayout& layout = exchange.layout;
  ChannelSizes sizes{};
  for (const Payload& payload : exchange.payloads)
    sizes.record_bytes += one_sided::record_stride(row_bytes(payload.rows), 0);
  sizes.received_rows = std::min(layout.received_rows, layout.max_tokens * (ranks - 1));
  sizes.returned_rows = layout.max_tokens * std::min(layout.position->size(2), ranks - 1);
  return sizes;
}

std::string describe(const ChannelSizes& sizes) {
  return std::to_string(sizes.received_rows) + " received and " + std::to_string(sizes.returned_rows) +
         " returned rows of " + std::to_string(sizes.record_bytes) + " bytes";
}

}  // namespace

// Finds the channel of the exchange. If the open one is too small, for example for a wider dtype, all ranks open a larger one.
Exchange OneSidedTransport::begin(const TokenExchange& exchange,
                                  std::shared_ptr<const Channel>& channel) const {
  const TokenLayout& layout = exchange.layout;
  const char* const op = exchange.call.phase().op;
  channel = one_sided::channel_of(op, group_);
  const ChannelSizes sizes = sizes_of(exchange, group_.size());
  const bool has_room = channel->sizes().cover(sizes);
  const CudaScope scope(exchange.payloads[0].rows);
  TP_CHECK_VALUE(
      has_room || !distributed::stream_is_captured(scope.stream()), op, "group_name",
      "room for " << describe(sizes), describe(channel->sizes()),
      "Make the EpContext with the largest hidden_dim, num_topk and dtype of its calls, or make this "
      "call once before the stream is captured");
  group_.begin_call(exchange.call, 1);
  if (!has_room) channel = one_sided::enlarge_channel(op, group_, sizes, exchange.payloads[0].rows.device());
  return {.peer_rows = layout.received->const_data_ptr<int32_t>(),
          .records = layout.position->const_data_ptr<int32_t>(),
          .max_tokens = layout.max_tokens,
          .destinations = layout.position->size(2),
          .chunk_rows = one_sided::chunk_rows_for(layout.max_tokens, row_bytes(exchange.payloads[0].rows)),
          .layout = channel->layout(),
          .peers = channel->peers(),
          .state = channel->state(),
          .timeout_ns = one_sided::kernel_timeout_ns(group_),
          .max_sms = static_cast<int32_t>(group_.max_sms()),
          .marks = {},
          .failure = channel->failure(),
          .allocations = nullptr};
}

std::vector<Tensor> OneSidedTransport::dispatch(const TokenExchange& exchange) const {
  const CudaScope scope(exchange.payloads[0].rows);
  std::shared_ptr<const Channel> channel;
  one_sided::DispatchArgs args{};
  args.exchange = begin(exchange, channel);
  args.received_rows = exchange.layout.received_rows;
  args.tokens = exchange.payloads[0].rows.size(0);
  std::vector<Tensor> inputs, outputs;
  for (const Payload& payload : exchange.payloads) {
    const int64_t rows = payload.slot ? payload.source->size(0) : args.received_rows;
    inputs.push_back(payload.rows.contiguous());
    outputs.push_back(payload.out ? *payload.out : distributed::empty_rows(payload.rows, rows));
    one_sided::DispatchedRows& moved = outputs.size() == 1 ? args.rows : args.weights;
    moved = {inputs.back().const_data_ptr(), outputs.back().mutable_data_ptr(), row_bytes(payload.rows)};
  }
  const Payload& first = exchange.payloads[0];
  const Tensor slot = first.slot ? first.slot->contiguous() : Tensor();
  const Tensor source = first.slot ? first.source->contiguous() : Tensor();
  if (first.slot) {
    args.slots = {slot.const_data_ptr<int32_t>(), source.const_data_ptr<int32_t>(), slot.size(1),
                  source.size(0)};
  }
  if (first.out) {
    const auto& allocations = group_.state().extension<distributed::SymmetricAllocations>();
    args.exchange.allocations = allocations.addresses();
    args.place = place_of(*first.out, allocations);
  }
  const one_sided::ChannelTurn turn(*channel, first.rows.device());
  const WatchedWork watched(group_.shared_state(), first.phase, group_.timeout(), std::nullopt);
  args.exchange.marks = watched.marks();
  one_sided::launch_dispatch(args, one_sided::kWhole, scope.stream());
  return outputs;
}

std::vector<Tensor> OneSidedTransport::combine(const TokenExchange& exchange, int64_t tokens) const {
  const Payload& first = exchange.payloads[0];
  const CudaScope scope(first.rows);
  std::shared_ptr<const Channel> channel;
  one_sided::CombineArgs args{};
  args.exchange = begin(exchange, channel);
  const Tensor rows = first.rows.contiguous();
  const Tensor slot = first.slot ? first.slot->contiguous() : Tensor();
  std::vector<Tensor> outputs{distributed::empty_rows(rows, tokens)};
  args.rows = rows.const_data_ptr();
  args.output = outputs[0].mutable_data_ptr();
  args.width = rows.size(1);
  args.dtype = to_dtype(rows.scalar_type());
  args.tokens = tokens;
  if (slot.defined()) {
    args.slot = slot.const_data_ptr<int32_t>();
    args.topk = slot.size(1);
    args.capacity = rows.size(0);
  }
  Tensor weights;
  if (exchange.payloads.size() > 1) {
    weights = exchange.payloads[1].rows.contiguous();
    outputs.push_back(distributed::empty_rows(weights, tokens));
    args.weights = weights.const_data_ptr();
    args.weights_output = outputs[1].mutable_data_ptr();
    args.weights_width = weights.size(1);
  }
  const one_sided::ChannelTurn turn(*channel, rows.device());
  const WatchedWork watched(group_.shared_state(), first.phase, group_.timeout(), std::nullopt);
  args.exchange.marks = watched.marks();
  one_sided::launch_combine(args, one_sided::kWhole, scope.stream());
  return outputs;
}

}  // namespace transformer_plugin::expert_parallel
#endif

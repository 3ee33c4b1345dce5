// Channels of a group, and the op that opens them.
#include "expert_parallel/one_sided/channel.h"

#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

#include "common/check.h"
#include "common/ops/expert_parallel.h"
#include "common/register.h"
#include "common/tensor.h"
#include "distributed/symmetric/torch_symmetric_memory.h"
#include "expert_parallel/group.h"
#include "expert_parallel/one_sided/kernels.h"

namespace transformer_plugin::expert_parallel::one_sided {

static constexpr const char* kOp = "open_channel";

#ifdef TRANSFORMER_PLUGIN_CUDA
namespace {

constexpr int64_t kStateBytes = 64;
static_assert(sizeof(LocalState) <= kStateBytes && sizeof(PlanState) <= kStateBytes);

// Of one process group, by their numbers.
struct GroupChannels {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<const Channel>> channels;

  std::shared_ptr<const Channel> find(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = channels.find(number);
    return found == channels.end() ? nullptr : found->second;
  }
  void set(int64_t number, std::shared_ptr<const Channel> channel) {
    const std::lock_guard<std::mutex> lock(mutex);
    channels[number] = std::move(channel);
  }
};

ChannelLayout layout_of(const ChannelSizes& sizes, int64_t ranks) {
  return channel_layout(ranks, sizes.received_rows, sizes.returned_rows, sizes.record_bytes);
}

PlanLayout plan_layout_of(const ChannelSizes& sizes, int64_t ranks) {
  return plan_layout(layout_of(sizes, ranks).bytes, ranks, sizes.experts, sizes.planned_rows, sizes.topk);
}

}  // namespace

bool ChannelSizes::cover(const ChannelSizes& other) const {
  return received_rows >= other.received_rows && returned_rows >= other.returned_rows &&
         record_bytes >= other.record_bytes && experts >= other.experts &&
         planned_rows >= other.planned_rows && topk >= other.topk;
}

ChannelSizes ChannelSizes::with(const ChannelSizes& other) const {
  return {std::max(received_rows, other.received_rows), std::max(returned_rows, other.returned_rows),
          std::max(record_bytes, other.record_bytes),   std::max(experts, other.experts),
          std::max(planned_rows, other.planned_rows),   std::max(topk, other.topk)};
}

Channel::Channel(const ChannelSizes& sizes, std::shared_ptr<distributed::PeerMemory> memory, OwnState own,
                 std::shared_ptr<const Channel> replaced)
    : sizes_(sizes),
      layout_(layout_of(sizes, memory->ranks())),
      plan_layout_(plan_layout_of(sizes, memory->ranks())),
      memory_(std::move(memory)),
      own_(std::move(own)),
      replaced_(std::move(replaced)),
      order_(replaced_ ? replaced_->order_ : std::make_shared<ChannelOrder>()) {}

int64_t Channel::bytes(const ChannelSizes& sizes, int64_t ranks) {
  return plan_layout_of(sizes, ranks).bytes;
}

PeerPointers Channel::peers() const {
  PeerPointers peers{};
  peers.rank = static_cast<int32_t>(memory_->rank());
  peers.ranks = static_cast<int32_t>(memory_->ranks());
  for (int64_t r = 0; r < memory_->ranks(); ++r) peers.memory[r] = memory_->pointer(r);
  return peers;
}

LocalState* Channel::state() const { return static_cast<LocalState*>(own_.states.mutable_data_ptr()); }

PlanState* Channel::plan_state() const {
  return reinterpret_cast<PlanState*>(static_cast<char*>(own_.states.mutable_data_ptr()) + kStateBytes);
}

ChannelTurn::ChannelTurn(const Channel& channel, c10::Device device)
    : order_(channel.order()),
      lock_(order_.mutex),
      device_(device),
      here_(distributed::current_stream_context(device)) {
  const bool can_wait = order_.end && order_.context.capture == here_.capture;
  if (can_wait && order_.context.stream != here_.stream) order_.end->wait();
}

ChannelTurn::~ChannelTurn() {
  try {
    order_.end = order_.streams.record(device_);
    order_.context = here_;
  } catch (const std::exception&) {  // the error of the call itself is more useful
    order_.end.reset();
  }
}

namespace {

std::string describe_call(int32_t phase_id, int64_t record_bytes) {
  return distributed::phase_text(distributed::find_phase(phase_id)) + " with records of " +
         std::to_string(record_bytes) + " bytes";
}

// What a kernel of an earlier call has found.
void check_works(const char* op, const Channel& channel, int64_t rank) {
  const ChannelFailure& found = *channel.failure();
  const auto wait = static_cast<ExchangeWait>(found.wait);
  if (wait == ExchangeWait::kNone) return;
  std::atomic_thread_fence(std::memory_order_acquire);  // the rest was written before
  TORCH_CHECK(wait == ExchangeWait::kDifferentCall,
              TP_FOUR_PARTS(op, "group_name", "a channel whose calls end in time",
                            distributed::phase_text(distributed::find_phase(found.phase_id))
                                << " that waited on the GPU of rank " << rank << " for rank " << found.rank,
                            "Make a new group, and look at the output of that rank"));
  TP_CHECK_VALUE(false, op, "group_name", "the same calls in the same order on every rank",
                 describe_call(found.phase_id, found.record_bytes)
                     << " on rank " << rank << " and "
                     << describe_call(found.other_phase_id, found.other_record_bytes) << " on rank "
                     << found.rank << ", in an earlier call on this GPU",
                 "Let every rank make as many forward and backward calls as the others, in their order; the "
                 "channel cannot be used again");
}

}  // namespace

std::shared_ptr<const Channel> channel_of(const char* op, const ExpertParallelGroup& group) {
  std::shared_ptr<const Channel> channel =
      group.state().extension<GroupChannels>().find(group.channel().value_or(0));
  TP_CHECK_VALUE(channel != nullptr, op, "group_name",
                 "a group whose channel " << group.channel().value_or(0) << " is open", "one that is not",
                 "Make an EpContext with transport=\"one_sided\" on every rank first");
  for (const Channel* each = channel.get(); each; each = each->replaced().get())
    check_works(op, *each, group.rank());
  return channel;
}

namespace {

// Of a new channel; an error is the reason why it cannot be opened.
OwnState allocate_own(const at::Device& device, std::string* reason) {
  try {
    const auto options = at::TensorOptions().dtype(at::kByte).device(device);
    const OwnState own{at::zeros({2 * kStateBytes}, options), new_channel_failure()};
    const CudaScope scope(own.states);
    c10::cuda::getCurrentCUDAStream().synchronize();  // calls on any stream read them
    return own;
  } catch (const std::exception& error) {
    *reason = distributed::first_line(error);
    return {};
  }
}

// Opens a channel of at least these sizes, if the group has none. Returns why the ranks cannot have one; "": it is open. Whatever
// may fail on one rank is agreed before any rank has another channel than the others.
std::string open(const distributed::RankGroup& group, ChannelSizes sizes, const at::Device& device) {
  auto& channels = group.state().extension<GroupChannels>();
  const int64_t number = group.channel().value_or(0);
  const std::shared_ptr<const Channel> before = channels.find(number);
  if (before && before->sizes().cover(sizes)) return "";
  if (before) sizes = sizes.with(before->sizes());
  distributed::check_no_capture(device, {kOp, "device", "Make the context before the capture"});
  std::string reason;
  const OwnState own = allocate_own(device, &reason);
  reason = distributed::agree_on_peer_memory(group.state(), reason, group.timeout());
  if (!reason.empty()) return reason;
  auto memory = distributed::allocate_peer_memory(group.state(), device, Channel::bytes(sizes, group.size()),
                                                  group.timeout(), &reason);
  if (memory) channels.set(number, std::make_shared<const Channel>(sizes, std::move(memory), own, before));
  return reason;
}

}  // namespace

std::shared_ptr<const Channel> enlarge_channel(const char* op, const ExpertParallelGroup& group,
                                               const ChannelSizes& sizes, const at::Device& device) {
  const std::string reason = open(group, sizes, device);
  TORCH_CHECK(reason.empty(),
              TP_FOUR_PARTS(op, "group_name", "memory for records of " << sizes.record_bytes << " bytes",
                            reason, "Free memory of the GPU, or choose the transport \"all_gather\""));
  return channel_of(op, group);
}

int64_t kernel_timeout_ns(const ExpertParallelGroup& group) {
  constexpr int64_t kMoreMs = 60'000, kLongestMs = 1'000'000'000;
  return std::min(group.timeout().count() + kMoreMs, kLongestMs) * 1'000'000;
}
#endif

namespace {

// Returns why the ranks cannot exchange rows this way; "": the channel is open. Without a device it is the CPU's.
std::string open_channel(std::string_view group_name, int64_t received_rows, int64_t returned_rows,
                         int64_t record_bytes, int64_t num_experts, int64_t planned_rows, int64_t topk,
                         int64_t timeout_ms, std::optional<at::Device> device) {
  const std::pair<const char*, int64_t> sizes_by_name[] = {
      {"received_rows", received_rows}, {"returned_rows", returned_rows}, {"record_bytes", record_bytes},
      {"num_experts", num_experts},     {"planned_rows", planned_rows},   {"topk", topk}};
  for (const auto& [name, size] : sizes_by_name)
    TP_CHECK_VALUE(size >= 0, kOp, name, "0 or more", size, "Pass the same on every rank");
  const RankGroup group(kOp, group_name, timeout_ms, at::Tensor());
  if (group.size() == 1) return "the group has one rank";
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (device && device->is_cuda()) {
    if (group.size() > kMostPeers) return "more than " + std::to_string(kMostPeers) + " ranks";
    if (num_experts > kMostExperts) return "more than " + std::to_string(kMostExperts) + " experts";
    return open(group, {received_rows, returned_rows, record_bytes, num_experts, planned_rows, topk},
                *device);
  }
#endif
  return "symmetric memory is of GPUs";
}

}  // namespace

TP_IMPL_FOR(CompositeExplicitAutograd, open_channel, open_channel);

}  // namespace transformer_plugin::expert_parallel::one_sided

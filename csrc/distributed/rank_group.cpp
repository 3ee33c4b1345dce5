// A group as one call uses it: its name, its timeout and the collectives of its device.
#include "distributed/rank_group.h"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "common/check.h"
#include "common/tensor.h"
#include "distributed/gloo_collectives.h"
#include "distributed/local_collectives.h"
#include "distributed/nccl_collectives.h"

namespace transformer_plugin::distributed {
namespace {

using at::Tensor;

c10::intrusive_ptr<c10d::ProcessGroup> resolve(const char* op, const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const std::exception&) {
    TP_CHECK_VALUE(false, op, "group_name", "the name of a c10d process group of this process, or \"\"",
                   "'" << name << "'", "Pass group.group_name, and do not use a group after it is destroyed");
  }
}

// "<name>#rank=<r>#channel=<c>#max_sms=<n>", of which each mark may be absent.
constexpr std::string_view kRankMark = "#rank=", kChannelMark = "#channel=", kMaxSmsMark = "#max_sms=";

struct GivenName {
  std::string name;
  std::optional<int64_t> rank, channel, max_sms;
};

// Takes a mark with its number off the end of the name.
std::optional<int64_t> take_number(const char* op, std::string_view given, std::string_view mark,
                                   std::string_view& name) {
  const size_t place = name.rfind(mark);
  if (place == std::string_view::npos) return std::nullopt;
  const std::string_view digits = name.substr(place + mark.size());
  int64_t number = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  TP_CHECK_VALUE(error == std::errc() && end == digits.data() + digits.size(), op, "group_name",
                 "a name, or a name with '#rank=' and a number", "'" << given << "'",
                 "Pass group.group_name");
  name = name.substr(0, place);
  return number;
}

GivenName parse_name(const char* op, std::string_view given) {
  std::string_view name = given;
  GivenName result;
  result.max_sms = take_number(op, given, kMaxSmsMark, name);
  result.channel = take_number(op, given, kChannelMark, name);
  result.rank = take_number(op, given, kRankMark, name);
  result.name = name;
  return result;
}

// A world that is destroyed and created again has the same name, and may have the processes in another order.
void check_rank(const char* op, const GivenName& given, const ProcessGroupState& state) {
  TP_CHECK_VALUE(!given.rank || *given.rank == state.rank, op, "group_name",
                 "the group '" << state.name << "' in which this process is rank " << *given.rank
                               << ", as when the layer was made",
                 "one in which it is rank " << state.rank,
                 "Make the layer again with the new group, and load its state_dict()");
}

constexpr int64_t kLongestMs = 1'000'000'000'000;  // 31 years; a clock counts nanoseconds in 64 bits

Milliseconds group_timeout(c10d::ProcessGroup& group, at::DeviceType device) {
  try {
    return std::clamp(group.getBackend(device)->getBackendOptions()->timeout, Milliseconds(1),
                      Milliseconds(kLongestMs));
  } catch (const std::exception&) {
    return kProcessGroupDefaultTimeout;
  }
}

bool is_on_cuda(const Tensor& like) { return like.defined() && like.is_cuda(); }

std::shared_ptr<Collectives> make_collectives(CallContext to) {
  if (to.state->size == 1) return std::make_shared<LocalCollectives>(std::move(to));
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (is_on_cuda(to.like)) return std::make_shared<NcclCollectives>(std::move(to));
#endif
  return std::make_shared<GlooCollectives>(std::move(to));
}

}  // namespace

void check_timeout(const char* op, int64_t timeout_ms) {
  TP_CHECK_VALUE(timeout_ms <= kLongestMs, op, "timeout_ms", "at most 10^12 milliseconds", timeout_ms,
                 "Pass 0 or less for the timeout of the group");
}

RankGroup::RankGroup(const char* op, std::string_view given, int64_t timeout_ms, const Tensor& like)
    : timeout_(timeout_ms) {
  check_timeout(op, timeout_ms);
  const GivenName parsed = parse_name(op, given);
  const std::string& name = parsed.name;
  channel_ = parsed.channel;
  max_sms_ = parsed.max_sms.value_or(0);
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  if (!name.empty()) group = resolve(op, name);
  state_ = process_group_state(name, group);
  if (group && timeout_ms <= 0) timeout_ = group_timeout(*group, is_on_cuda(like) ? at::kCUDA : at::kCPU);
  check_rank(op, parsed, *state_);
  collectives_ = make_collectives({state_, std::move(group), like, timeout_});
}

RankGroup::~RankGroup() { collectives_->end_call(); }

std::vector<std::string> RankGroup::all_gather_text(const std::string& text) const {
  if (size() == 1) return {text};
  const Phase& phase = kConfigurationPhase;
  check_not_failed(*state_, phase, timeout_);
  return all_gather_texts(*state_, "text", state_->text_sequence++, text, phase, phase_text(phase), timeout_);
}

void RankGroup::compare_through_store(const Call& call) const {
  if (size() > 1) compare_signature(*state_, call, timeout_);
}

}  // namespace transformer_plugin::distributed

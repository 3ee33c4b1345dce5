// The allocation of peer memory, as a collective call: exchange of facts, rendezvous, agreement on the outcome.
#include "distributed/symmetric/peer_memory.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "common/check.h"
#include "distributed/symmetric/rank_facts.h"
#include "distributed/symmetric/rendezvous_store.h"
#include "distributed/symmetric/torch_symmetric_memory.h"

#ifdef TRANSFORMER_PLUGIN_CUDA
#include <c10/cuda/CUDAFunctions.h>
#endif

namespace transformer_plugin::distributed {
namespace {

constexpr Phase kPeerMemoryPhase{1, "allocate_peer_memory", "rendezvous"};
constexpr Phase kPhases[] = {kPeerMemoryPhase};
const PhaseRegistration registration(kPhases);

constexpr const char* kKind = "peer_memory";

// What a group keeps.
struct GroupPeerMemory {
  std::mutex mutex;  // one allocation at a time; guards `memory`
  std::vector<std::shared_ptr<PeerMemory>> memory;
  std::atomic<int64_t> exchanges{0};  // number of exchanges of texts; all ranks make the same
};

// The least number that no allocation of this process has. Allocations of groups of the same name, of which one is created
// after the other, have different numbers.
std::atomic<int64_t> next_number{0};

std::vector<std::string> exchange(ProcessGroupState& state, const std::string& text, Milliseconds timeout) {
  check_not_failed(state, kPeerMemoryPhase, timeout);
  const int64_t sequence = state.extension<GroupPeerMemory>().exchanges++;
  return all_gather_texts(state, kKind, sequence, text, kPeerMemoryPhase, phase_text(kPeerMemoryPhase),
                          timeout);
}

RankFacts facts_of(const at::Device& device, int64_t bytes) {
  RankFacts facts;
  facts.bytes = bytes;
  facts.number = next_number++;
  if (!device.is_cuda()) {
    facts.refusal = "symmetric memory is of GPUs";
    return facts;
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  try {
    add_host_facts(facts);
    if (facts.refusal.empty()) add_gpu_facts(facts, device);
  } catch (const std::exception& error) {
    facts.refusal = first_line(error);
  }
#else
  facts.refusal = "this library was built without CUDA";
#endif
  return facts;
}

#ifdef TRANSFORMER_PLUGIN_CUDA
int64_t agreed_number(const std::vector<RankFacts>& ranks) {
  int64_t number = 0;
  for (const RankFacts& facts : ranks) number = std::max(number, facts.number);
  int64_t next = next_number.load();
  while (next <= number && !next_number.compare_exchange_weak(next, number + 1)) {
  }
  return number;
}

// How often a waiting rank looks whether another has failed, and how long it then waits for torch.
constexpr Milliseconds kPollInterval{100};
constexpr Milliseconds kFailureGrace{2000};
// torch's waits that the store makes end have a better reason than the end of the whole.
constexpr Milliseconds kTorchGrace{500};

bool has_key(ProcessGroupState& state, const std::string& key) {
  const auto found = std::make_shared<std::atomic<bool>>(false);
  state.store->request(kStoreRequestLimit,
                       [found, key](c10d::Store& store) { found->store(store.check({key})); });
  return found->load();
}

// Waits for the rendezvous with heartbeats, like every wait for other ranks.
TorchRendezvous::Result wait_for_rendezvous(ProcessGroupState& state, const TorchRendezvous& rendezvous,
                                            const RendezvousPlan& plan, Milliseconds timeout) {
  const int64_t sequence = state.extension<GroupPeerMemory>().exchanges.load();
  const std::string waits_for = phase_text(kPeerMemoryPhase);
  Heartbeat heartbeat = state.heartbeat(kKind);
  int64_t last_heartbeat_ms = steady_now_ms();
  int64_t failure_ms = 0;  // when another rank's failure was seen
  while (!rendezvous.wait_for(kPollInterval)) {
    const int64_t now = steady_now_ms();
    if (!failure_ms && has_key(state, RendezvousStore::failure_key(plan.store_prefix))) failure_ms = now;
    if (failure_ms && now - failure_ms >= kFailureGrace.count())
      return {nullptr, "torch did not return from a rendezvous that another rank has left", false, true};
    bool has_report = false;
    if (now - last_heartbeat_ms >= kHeartbeatInterval.count()) {
      last_heartbeat_ms = now;
      has_report = heartbeat.send(sequence, waits_for);
    }
    if (has_report || now >= plan.end_ms + kTorchGrace.count())
      raise_peer_error(state, std::move(heartbeat), sequence, kPeerMemoryPhase, timeout,
                       has_report ? "another rank has given up" : "torch's rendezvous did not return",
                       waits_for);
  }
  TorchRendezvous::Result result = rendezvous.result();
  if (result.timed_out)
    raise_peer_error(state, std::move(heartbeat), sequence, kPeerMemoryPhase, timeout, result.reason,
                     waits_for);
  return result;
}

TorchRendezvous::Result allocate(ProcessGroupState& state, const at::Device& device,
                                 const std::vector<RankFacts>& ranks, Milliseconds timeout) {
  const c10::intrusive_ptr<c10d::Store> store = state.store->connection();
  if (!store) return {nullptr, "the group's store does not answer", false, false};
  const int64_t number = agreed_number(ranks);
  const RendezvousPlan plan{
      "transformer_plugin/" + state.name + "/" + std::to_string(number),
      state.key_prefix() + "rendezvous/" +
          std::to_string(state.extension<GroupPeerMemory>().exchanges.load()) + "/",
      state.rank,
      state.size,
      device,
      ranks[state.rank].bytes,
      steady_now_ms() + timeout.count(),
  };
  return wait_for_rendezvous(state, TorchRendezvous(plan, store), plan, timeout);
}
#endif

}  // namespace

at::Device with_index(at::Device device) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (device.is_cuda() && !device.has_index()) return {at::kCUDA, c10::cuda::current_device()};
#endif
  return device;
}

std::string agree_on_peer_memory(ProcessGroupState& state, const std::string& report, Milliseconds timeout) {
  return merge_reports(exchange(state, report, timeout));
}

std::shared_ptr<PeerMemory> allocate_peer_memory(ProcessGroupState& state, const at::Device& device,
                                                 int64_t bytes, Milliseconds timeout, std::string* reason) {
  TP_CHECK_VALUE(bytes > 0, "allocate_peer_memory", "bytes", "a size above 0", bytes,
                 "Ask for memory only where something is to be in it");
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (device.is_cuda())
    check_no_capture(device, {"allocate_peer_memory", "device",
                              "Make the context, which allocates the memory, before the capture"});
#endif
  if (state.size == 1) {
    *reason = "the group has one rank";
    return nullptr;
  }
  GroupPeerMemory& group = state.extension<GroupPeerMemory>();
  const std::lock_guard<std::mutex> lock(group.mutex);
  std::vector<RankFacts> ranks;
  for (const std::string& text : exchange(state, facts_of(device, bytes).text(), timeout)) {
    ranks.push_back(RankFacts::parse(text));
  }
  *reason = refusal_of(ranks);
  if (!reason->empty()) return nullptr;
#ifdef TRANSFORMER_PLUGIN_CUDA
  const TorchRendezvous::Result result = allocate(state, device, ranks, timeout);
  // A rank that has left because of another reports nothing, so that the reason is the other's.
  *reason = agree_on_peer_memory(state, result.another_gave_up ? "" : result.reason, timeout);
  if (reason->empty() && !result.memory) *reason = result.reason;
  if (!reason->empty()) return nullptr;
  group.memory.push_back(result.memory);
  return result.memory;
#else
  return nullptr;
#endif
}

}  // namespace transformer_plugin::distributed

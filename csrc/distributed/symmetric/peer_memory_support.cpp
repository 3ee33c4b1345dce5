// The op peer_memory_support: whether the ranks of a group can read and write each other's memory, found by doing it once.
#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/ops/distributed.h"
#include "common/register.h"
#include "distributed/rank_group.h"
#include "distributed/symmetric/peer_memory.h"

#ifdef TRANSFORMER_PLUGIN_CUDA
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace transformer_plugin::distributed {
namespace {

constexpr const char* kOp = "peer_memory_support";

using Answer = std::tuple<bool, std::string>;

// What a group has found out.
struct PeerMemorySupport {
  std::mutex mutex;
  std::map<std::string, Answer> answers;  // by device
};

at::Device device_of(const std::optional<c10::Device>& given) {
  TP_CHECK_VALUE(!given || given->is_cpu() || given->is_cuda(), kOp, "device", "a CPU or a CUDA device",
                 *given, "Pass the device of the tensors that are to be exchanged");
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (!given && c10::cuda::device_count() > 0) return with_index(at::kCUDA);
#endif
  return with_index(given.value_or(at::kCPU));
}

#ifdef TRANSFORMER_PLUGIN_CUDA
// The word that rank `from` writes to rank `to`: no two are equal, and none is 0.
uint64_t word(int64_t from, int64_t to) {
  return 0x9e3779b97f4a7c15u * (static_cast<uint64_t>(from) << 32 | static_cast<uint64_t>(to) | 1u << 31);
}

// Writes a word from this rank to every rank: to place `rank` of each piece.
void write_words(const PeerMemory& memory, cudaStream_t stream) {
  std::vector<uint64_t> words;
  for (int64_t to = 0; to < memory.ranks(); ++to) words.push_back(word(memory.rank(), to));
  for (int64_t to = 0; to < memory.ranks(); ++to) {
    uint64_t* const place = static_cast<uint64_t*>(memory.pointer(to)) + memory.rank();
    C10_CUDA_CHECK(cudaMemcpyAsync(place, &words[to], sizeof(uint64_t), cudaMemcpyDefault, stream));
  }
  C10_CUDA_CHECK(cudaStreamSynchronize(stream));
}

// Reads all pieces, the others' through their pointers. Returns what is wrong in them; "": nothing.
std::string compare_words(const PeerMemory& memory, cudaStream_t stream) {
  const int64_t ranks = memory.ranks();
  std::vector<uint64_t> words(static_cast<size_t>(ranks));
  for (int64_t to = 0; to < ranks; ++to) {
    C10_CUDA_CHECK(cudaMemcpyAsync(words.data(), memory.pointer(to), words.size() * sizeof(uint64_t),
                                   cudaMemcpyDefault, stream));
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    for (int64_t from = 0; from < ranks; ++from) {
      if (words[from] != word(from, to))
        return "what rank " + std::to_string(from) + " wrote to rank " + std::to_string(to) +
               " did not arrive";
    }
  }
  return "";
}

// Runs one step of the test, and agrees with the other ranks on what it found.
template <typename Step>
std::string agree_on_step(ProcessGroupState& state, const at::Device& device, Milliseconds timeout,
                          Step step) {
  std::string report;
  try {
    const c10::cuda::CUDAGuard guard(device);
    // Another thread may be capturing a graph, of which these copies are no part.
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    report = step(c10::cuda::getStreamFromPool(false, device.index()));
  } catch (const std::exception& error) {
    report = first_line(error);
  }
  return agree_on_peer_memory(state, report, timeout);
}

std::string exchange_words(ProcessGroupState& state, const PeerMemory& memory, const at::Device& device,
                           Milliseconds timeout) {
  const std::string report = agree_on_step(state, device, timeout, [&](cudaStream_t stream) -> std::string {
    write_words(memory, stream);
    return "";
  });
  if (!report.empty()) return report;
  return agree_on_step(state, device, timeout,
                       [&](cudaStream_t stream) { return compare_words(memory, stream); });
}
#endif

Answer find_out(ProcessGroupState& state, const at::Device& device, Milliseconds timeout) {
  constexpr int64_t kLeastBytes = 4096;
  const int64_t bytes = std::max(kLeastBytes, state.size * static_cast<int64_t>(sizeof(uint64_t)));
  std::string reason;
  const std::shared_ptr<PeerMemory> memory = allocate_peer_memory(state, device, bytes, timeout, &reason);
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (memory) reason = exchange_words(state, *memory, device, timeout);
#endif
  return {memory && reason.empty(), reason};
}

Answer peer_memory_support(std::string_view group_name, int64_t timeout_ms,
                           std::optional<c10::Device> given) {
  const RankGroup group(kOp, group_name, timeout_ms, at::Tensor());
  const at::Device device = device_of(given);
  auto& known = group.state().extension<PeerMemorySupport>();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const auto found = known.answers.find(device.str());
  if (found != known.answers.end()) return found->second;
  return known.answers[device.str()] = find_out(group.state(), device, group.timeout());
}

}  // namespace

TP_IMPL_FOR(CompositeExplicitAutograd, peer_memory_support, peer_memory_support);

}  // namespace transformer_plugin::distributed

// Peer memory from torch's symmetric memory.
//
// Of torch's symmetric memory only the allocation and the mapping are used: no barrier or signal (they end in a trap, or never), and
// no multicast (its set-up can hang). The rendezvous takes store, rank and size from a process group registered under the name that
// it is given, so each one gets a name and a group of its own, with a RendezvousStore.
#ifdef TRANSFORMER_PLUGIN_CUDA
#include "distributed/symmetric/torch_symmetric_memory.h"

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/env.h>

#include <condition_variable>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <utility>
#include <vector>

#include "common/check.h"
#include "distributed/symmetric/rendezvous_store.h"

namespace transformer_plugin::distributed {
namespace {

using c10d::symmetric_memory::SymmetricMemory;

// The memory of one allocation, as torch holds it.
struct Mapping {
  c10::DeviceIndex device;
  at::Tensor tensor;
  c10::intrusive_ptr<SymmetricMemory> memory;
};

// torch unmaps memory after a wait for the whole device, and ends the process if CUDA reports an error then. So a mapping that is
// not needed any more is kept here until the next allocation, which may wait and knows whether the device works.
class RetiredMappings {
 public:
  void add(Mapping mapping) {
    const std::lock_guard<std::mutex> lock(mutex_);
    mappings_.push_back(std::move(mapping));
  }

  // Frees those of `device`, which is the current one. Where CUDA reports an error, they stay for ever.
  void free(c10::DeviceIndex device) {
    std::vector<Mapping> all;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      all.swap(mappings_);
    }
    if (all.empty()) return;
    const bool works = cudaDeviceSynchronize() == cudaSuccess;
    if (!works) static_cast<void>(cudaGetLastError());
    for (Mapping& mapping : all) {
      if (!works || mapping.device != device) add(std::move(mapping));
    }
  }

 private:
  std::mutex mutex_;
  std::vector<Mapping> mappings_;
};

RetiredMappings& retired_mappings() {
  static auto* const mappings = new RetiredMappings;  // never freed: at exit CUDA may be gone before it
  return *mappings;
}

class TorchPeerMemory : public PeerMemory {
 public:
  explicit TorchPeerMemory(c10::DeviceIndex device) : mapping_{device, {}, {}} {}
  ~TorchPeerMemory() override {
    try {
      if (mapping_.tensor.defined()) retired_mappings().add(std::move(mapping_));
    } catch (const std::exception&) {  // no host memory: nothing can be done here
    }
  }

  void allocate(int64_t bytes) {
    const c10::Device device(c10::kCUDA, mapping_.device);
    mapping_.tensor = c10d::symmetric_memory::empty_strided_p2p({bytes}, {1}, at::kByte, device, std::nullopt,
                                                                std::nullopt);
    const auto stream = c10::cuda::getStreamFromPool(false, mapping_.device);
    C10_CUDA_CHECK(
        cudaMemsetAsync(mapping_.tensor.mutable_data_ptr(), 0, static_cast<size_t>(bytes), stream));
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    bytes_ = bytes;
  }

  // Returns why the memory cannot be used; "": it can.
  std::string map(const std::string& name, int64_t rank, int64_t ranks) {
    mapping_.memory = c10d::symmetric_memory::rendezvous(mapping_.tensor, name);
    if (!mapping_.memory) return "torch does not know the memory that it has allocated";
    rank_ = rank;
    pointers_ = mapping_.memory->get_buffer_ptrs();
    if (static_cast<int64_t>(pointers_.size()) != ranks || mapping_.memory->get_offset() != 0 ||
        pointers_[rank] != mapping_.tensor.data_ptr())
      return "torch has mapped other memory than was asked for";
    for (int64_t peer = 0; peer < ranks; ++peer) {
      if (!pointers_[peer])
        return "the memory of rank " + std::to_string(peer) + " is not within direct access";
    }
    return mapping_.memory->world_within_direct_access() ? "" : "not all ranks are within direct access";
  }

  int64_t rank() const override { return rank_; }
  int64_t ranks() const override { return static_cast<int64_t>(pointers_.size()); }
  int64_t bytes() const override { return bytes_; }
  void* pointer(int64_t rank) const override { return pointers_.at(rank); }

 private:
  Mapping mapping_;
  int64_t rank_ = 0;
  int64_t bytes_ = 0;
  std::vector<void*> pointers_;
};

// torch's rendezvous sets multicast up wherever the GPUs have it, unless this variable of torch's is 1. Its value is read and set
// under a lock of c10's.
class NoMulticast {
 public:
  NoMulticast() : is_off_(c10::utils::check_env(kVariable) == true) {
    if (!is_off_) c10::utils::set_env(kVariable, "1");
  }
  ~NoMulticast() {
    if (!is_off_) c10::utils::set_env(kVariable, "0");
  }

 private:
  static constexpr const char* kVariable = "TORCH_SYMM_MEM_DISABLE_MULTICAST";
  const bool is_off_;
};

// The process group that torch finds under the name of a rendezvous.
class RegisteredGroup {
 public:
  RegisteredGroup(const RendezvousPlan& plan, const c10::intrusive_ptr<c10d::Store>& store)
      : name_(plan.name),
        group_(c10::make_intrusive<c10d::ProcessGroup>(store, static_cast<int>(plan.rank),
                                                       static_cast<int>(plan.ranks))) {
    c10d::register_process_group(name_, group_);
  }
  ~RegisteredGroup() { c10d::unregister_process_group(name_); }

 private:
  const std::string name_;
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

// torch's rendezvous has one socket in a process, named by the process' number.
std::timed_mutex& socket_turn() {
  static auto* const turn = new std::timed_mutex;  // never freed: an abandoned thread may hold it
  return *turn;
}
constexpr Milliseconds kSocketTurnLimit{2000};

std::string unique_id(const cudaDeviceProp& properties) {
  std::string text = "GPU-";
  for (const char byte : properties.uuid.bytes) {
    constexpr const char* kDigits = "0123456789abcdef";
    text += kDigits[static_cast<unsigned char>(byte) >> 4];
    text += kDigits[static_cast<unsigned char>(byte) & 15];
  }
  return text;
}

}  // namespace

void add_gpu_facts(RankFacts& facts, const at::Device& device) {
  namespace symmetric = c10d::symmetric_memory;
  if (!symmetric::has_allocator(c10::kCUDA)) {
    facts.refusal = "this torch has no symmetric memory for CUDA";
    return;
  }
  const std::string backend = symmetric::get_backend(device).value_or("");
  if (backend != "CUDA") {
    facts.refusal = "torch's symmetric memory is set to '" + backend + "' in this process, not to 'CUDA'";
    return;
  }
  facts.gpu = unique_id(*at::cuda::getDeviceProperties(device.index()));
  facts.may_share_gpu = c10::utils::check_env(kMayShareGpu) == true;
  int count = 0;
  C10_CUDA_CHECK(cudaGetDeviceCount(&count));
  for (int other = 0; other < count; ++other) {
    if (other == device.index()) continue;
    const std::string id = unique_id(*at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(other)));
    int can_access = 0;
    C10_CUDA_CHECK(cudaDeviceCanAccessPeer(&can_access, device.index(), other));
    facts.visible.push_back(id);
    if (can_access) facts.reachable.push_back(id);
  }
}

void check_no_capture(const at::Device& device, const CapturedCall& call) {
  if (c10::cuda::device_count() == 0) return;
  const c10::cuda::CUDAGuard guard(device);
  TP_CHECK_VALUE(c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None, call.op,
                 call.argument, "a current stream that no CUDA graph is captured from",
                 "one that is being captured", call.advice);
}

struct TorchRendezvous::State {
  mutable std::mutex mutex;
  mutable std::condition_variable ended;
  bool has_ended = false;
  Result result;
};

namespace {

TorchRendezvous::Result run(const RendezvousPlan& plan, const c10::intrusive_ptr<RendezvousStore>& store) {
  TorchRendezvous::Result result;
  try {
    const c10::cuda::CUDAGuard guard(plan.device);
    // Another thread may be capturing a graph, of which this allocation is no part.
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    retired_mappings().free(plan.device.index());
    const auto memory = std::make_shared<TorchPeerMemory>(plan.device.index());
    memory->allocate(plan.bytes);
    const std::unique_lock<std::timed_mutex> turn(socket_turn(), kSocketTurnLimit);
    if (!turn) {
      result.reason = "another rendezvous of this process has not ended";
    } else {
      const RegisteredGroup group(plan, store);
      const NoMulticast no_multicast;
      result.reason = memory->map(plan.name, plan.rank, plan.ranks);
    }
    if (result.reason.empty()) result.memory = memory;
  } catch (const std::exception& error) {
    result.reason = first_line(error);
    result.timed_out = store->timed_out();
    result.another_gave_up = store->another_gave_up();
  }
  return result;
}

}  // namespace

TorchRendezvous::TorchRendezvous(const RendezvousPlan& plan, c10::intrusive_ptr<c10d::Store> store)
    : state_(std::make_shared<State>()) {
  std::thread([state = state_, plan, store = std::move(store)]() mutable {
    Result result;
    try {
      const auto own_store =
          c10::make_intrusive<RendezvousStore>(store->clone(), plan.store_prefix, plan.end_ms);
      result = run(plan, own_store);
      if (!result.memory && !result.another_gave_up && !result.timed_out)
        own_store->give_up("rank " + std::to_string(plan.rank) + ": " + result.reason);
    } catch (const std::exception& error) {  // of the group's store
      if (result.reason.empty()) result.reason = first_line(error);
    }
    store.reset();
    const std::lock_guard<std::mutex> lock(state->mutex);
    state->result = std::move(result);
    state->has_ended = true;
    state->ended.notify_all();
  }).detach();
}

bool TorchRendezvous::wait_for(Milliseconds time) const {
  std::unique_lock<std::mutex> lock(state_->mutex);
  return state_->ended.wait_for(lock, time, [this] { return state_->has_ended; });
}

TorchRendezvous::Result TorchRendezvous::result() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->result;
}

}  // namespace transformer_plugin::distributed
#endif

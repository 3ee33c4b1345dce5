// Peer memory from torch's symmetric memory: CUDA memory that processes of one host map into their address spaces.
#pragma once

#ifdef TRANSFORMER_PLUGIN_CUDA
#include <memory>
#include <string>

#include "distributed/symmetric/peer_memory.h"
#include "distributed/symmetric/rank_facts.h"

namespace transformer_plugin::distributed {

// Adds what is known of this rank's GPU, or a refusal.
void add_gpu_facts(RankFacts& facts, const at::Device& device);

// A call that must not be captured, for its error.
struct CapturedCall {
  const char *op, *argument, *advice;
};

// Raises where the device's current stream is being captured, into which no allocation belongs.
void check_no_capture(const at::Device& device, const CapturedCall& call);

struct RendezvousPlan {
  std::string name;          // unique in the process, and the same on all ranks
  std::string store_prefix;  // of the rendezvous' keys in the group's store, used once
  int64_t rank;
  int64_t ranks;
  at::Device device;
  int64_t bytes;
  int64_t end_ms;  // of the steady clock, when waits for other ranks end
};

// A rendezvous on a thread of its own. Parts of torch's have no time limit: then the thread is abandoned, and so is the memory.
class TorchRendezvous {
 public:
  // Begins. `store`: the group's.
  TorchRendezvous(const RendezvousPlan& plan, c10::intrusive_ptr<c10d::Store> store);
  // Waits for its end; false: it goes on.
  bool wait_for(Milliseconds time) const;

  struct Result {
    std::shared_ptr<PeerMemory> memory;  // null: it failed
    std::string reason;
    bool timed_out = false;        // a rank did not come
    bool another_gave_up = false;  // the reason is that of another rank
  };
  // After its end.
  Result result() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace transformer_plugin::distributed
#endif

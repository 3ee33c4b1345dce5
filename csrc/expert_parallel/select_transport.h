// Which transport moves the tokens of a group: one pure function of a description, so that it can be tested and printed where
// there is no second rank and no GPU.
#pragma once

#include <cstdint>

namespace transformer_plugin::expert_parallel {

enum class Transport : int32_t {
  kNone,       // one rank: nothing moves
  kAllGather,  // all-gather of all tokens, all-to-all of sums (all_gather_transport.h)
  kOneSided,   // stores of rows into the memory of the ranks that need them (one_sided_transport.h)
};

struct TransportDesc {
  int64_t ranks;
  bool on_cuda;
  bool peer_memory;  // whether the GPUs of all ranks reach each other's memory (peer_memory_support)
};

struct TransportSelection {
  Transport transport;
  const char* reason;
};

TransportSelection select_transport(const TransportDesc& desc);
const char* transport_name(Transport transport);

}  // namespace transformer_plugin::expert_parallel

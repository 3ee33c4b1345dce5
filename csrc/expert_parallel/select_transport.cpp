// The choice of a transport, and the op that prints it.
#include "expert_parallel/select_transport.h"

#include <string>
#include <tuple>

#include "common/check.h"
#include "common/ops/expert_parallel.h"
#include "common/register.h"
#include "expert_parallel/all_gather_transport.h"
#include "expert_parallel/all_to_all_transport.h"
#include "expert_parallel/one_sided/args.h"
#include "expert_parallel/one_sided_transport.h"
#include "routing/rows.h"

namespace transformer_plugin::expert_parallel {

TransportSelection select_transport(const TransportDesc& desc) {
  if (desc.ranks == 1) return {Transport::kNone, "all experts are on one rank"};
  if (!desc.on_cuda) return {Transport::kAllGather, "collectives of Gloo, the only ones on a CPU"};
  if (desc.peer_memory && desc.ranks <= one_sided::kMostPeers)
    return {Transport::kOneSided, "stores of each row, once, into the memory of the ranks that need it"};
  return {Transport::kAllGather,
          "collectives of the group, such as NCCL's, which take any number of ranks and hosts"};
}

const char* transport_name(Transport transport) {
  switch (transport) {
    case Transport::kNone: return "none";
    case Transport::kAllGather: return "all_gather";
    case Transport::kOneSided: return "one_sided";
  }
  return "";
}

std::unique_ptr<TokenTransport> make_transport(ExpertParallelGroup& group, const TokenLayout& layout) {
  // With one rank the collectives return their input.
  if (!layout.is_by_records()) return std::make_unique<AllGatherTransport>(group);
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (group.channel() && group.on_cuda()) return std::make_unique<OneSidedTransport>(group);
#endif
  return std::make_unique<AllToAllTransport>(group);
}

at::Tensor Payload::received_rows() const {
  return slot ? routing::sum_slots(rows, *slot, std::nullopt) : rows;
}

at::Tensor Payload::result_of(const at::Tensor& received) const {
  if (!slot) return received;
  if (!out) return routing::gather_rows(received, *source, *slot);
  routing::gather_rows_out(received, *source, *slot, *out);
  return *out;
}

namespace {

std::tuple<std::string, std::string> select_transport_op(int64_t ranks, std::string_view device_type,
                                                         bool peer_memory) {
  constexpr const char* op = "select_transport";
  TP_CHECK_VALUE(ranks >= 1, op, "num_ranks", "1 or more", ranks, "Pass the size of the group");
  TP_CHECK_VALUE(device_type == "cpu" || device_type == "cuda", op, "device_type", "'cpu' or 'cuda'",
                 "'" << device_type << "'", "Pass the type of the tokens' device");
  const TransportSelection selection = select_transport({ranks, device_type == "cuda", peer_memory});
  return {transport_name(selection.transport), selection.reason};
}

}  // namespace

TP_IMPL_FOR(CompositeExplicitAutograd, select_transport, select_transport_op);

}  // namespace transformer_plugin::expert_parallel

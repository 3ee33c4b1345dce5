// What ranks exchange before they share memory, and the reasons to refuse it. Every rank finds them from the same values, so that all
// ranks refuse alike, before torch or CUDA waits for a peer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace transformer_plugin::distributed {

// The variable with which torch's rendezvous lets ranks be on one GPU.
inline constexpr const char* kMayShareGpu = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES";

struct RankFacts {
  std::string refusal;  // why this rank cannot take part; "": it can
  int64_t number = 0;   // the least number of an allocation that this process has not used
  int64_t bytes = 0;    // of each rank's memory
  std::string host;     // the machine's name
  std::string boot;     // the machine's id since it was started
  std::string folder;   // of temporary files, by device and inode: handles pass through sockets there
  std::string gpu;      // unique id of this rank's GPU
  std::vector<std::string> visible;    // ids of the other GPUs that this process sees
  std::vector<std::string> reachable;  // those of them whose memory this rank's GPU can access
  bool may_share_gpu = false;          // whether torch lets this rank be on the GPU of another

  std::string text() const;
  static RankFacts parse(const std::string& text);
};

// Host, boot and folder of this process.
void add_host_facts(RankFacts& facts);
// Why the ranks cannot share memory, with the ranks' numbers; "": nothing is known against it.
std::string refusal_of(const std::vector<RankFacts>& ranks);
// "a on ranks 0, 1; b on rank 2" for the values of ranks 0, 1, 2.
std::string values_by_rank(const std::vector<std::string>& values);
// What the ranks report: "" if all reports are empty, the report if all are equal, otherwise "rank 1: ...; rank 3: ...".
std::string merge_reports(const std::vector<std::string>& reports);

}  // namespace transformer_plugin::distributed

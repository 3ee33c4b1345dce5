// Arguments of the kernels that make a plan by records (record_plan.h) by puts of counts and slots into the memory of the other
// ranks, without torch.
//
// Every rank puts its counts to all ranks: how many (token, k) name each expert, how many of its tokens each rank gets, and how
// many of its indices are wrong, with the place of one of them. From the counts of all ranks each computes the first slot of its
// (token, k) of every expert, and the first row of its tokens at every rank; then it puts the slots of each token there. Where a
// bound drops tokens, ranks put their counts once more, without them; where a capacity drops slots, the rows that are left are
// counted before they are numbered, and their slots lie from a place on that all ranks compute from the counts.
#pragma once

#include <cstdint>

#include "common/expert_index_args.h"
#include "common/math.h"
#include "expert_parallel/one_sided/args.h"

namespace transformer_plugin::expert_parallel::one_sided {

// Experts of a group, whose counters are in the shared memory of a block.
inline constexpr int64_t kMostExperts = 4096;

// Where the parts of a plan are in the memory of a rank, in bytes. All plans of a channel have the same layout, because a rank may put
// its counts while another still receives the slots of the plan before.
struct PlanLayout {
  int64_t counts[2];  // int32 [ranks, plan_columns()] from each rank; [1]: without the tokens past the bound
  int64_t sent;       // int32 [ranks, ranks]: rows from each rank to each rank
  int64_t slots;      // int32 [received_rows, topk]
  int64_t flags
      [3];  // uint32 [ranks] each: the plan whose counts, counts without those tokens, or slots have arrived
  int64_t bytes;  // the end of all
};

// The numbers that a rank puts: see PlanArgs.
constexpr int64_t plan_columns(int64_t experts, int64_t ranks) { return experts + ranks + 2; }

constexpr PlanLayout plan_layout(int64_t begin, int64_t ranks, int64_t experts, int64_t received_rows,
                                 int64_t topk) {
  constexpr int64_t kLine = 128;
  int64_t next = round_up(begin, kLine);
  const auto take = [&next](int64_t words) {
    const int64_t place = next;
    next += round_up(words * 4, kLine);
    return place;
  };
  PlanLayout layout{};
  for (int64_t& counts : layout.counts) counts = take(ranks * plan_columns(experts, ranks));
  layout.sent = take(ranks * ranks);
  layout.slots = take(received_rows * topk);
  for (int64_t& flags : layout.flags) flags = take(ranks);
  layout.bytes = next;
  return layout;
}

// What a kernel waited for when its time was over.
enum class PlanWait : int32_t { kNone, kCounts, kKeptCounts, kSlots };

// In ordinary memory of the rank, zero at first.
struct PlanState {
  uint32_t epoch;            // the number of the last plan, which its first kernel advances
  uint32_t finished_blocks;  // of the running kernel
  int32_t failed;            // a PlanWait: kernels return at once unless it is kNone
  int32_t failed_rank;       // the rank that did not come
  uint32_t is_published;     // whether a long wait of this plan is on the progress page
  int32_t wrong_place;       // of a wrong index of the last plan that had one, in this rank's indices
};

struct PlanArgs {
  const void* indices;  // [tokens, topk] int32 or int64
  bool indices_are_int64;
  int64_t tokens, topk, max_tokens;
  int64_t experts, capacity, alignment, received_rows;
  int64_t bound;  // of received tokens; less than 0: none
  bool capacity_may_overflow;
  ExpertRange range;  // of the indices; each rank reports the wrong ones of all ranks
  int64_t* report;    // as in CountRowsArgs and ReportTokensArgs
  PlanLayout layout;
  PeerPointers peers;
  PlanState* state;
  int64_t timeout_ns;  // of each wait
  distributed::WorkMarks marks;
  ChannelFailure* failure;  // or null

  // Memory of the call.
  // [chunks, chunk_stride()]: before each chunk, aligned to 16 bytes; [1]: without the tokens past the bound.
  int32_t* chunk_counts[2];
  // [experts + 1]: the first slot of each expert at its rank, at most the capacity; then whether the capacity drops any slot.
  int32_t* first_slots;
  // Where a capacity may drop slots:
  int32_t* own_slots;        // [tokens, topk]
  int32_t* kept_rows;        // [chunks, ranks]
  int32_t* received_places;  // [ranks]: where the slots from each rank begin in this rank's memory

  // The plan (RecordPlan).
  int32_t* slot;               // [received_rows, topk]
  int32_t* source;             // [capacity]
  int64_t* tokens_per_expert;  // [experts / ranks]
  int64_t* required;           // [ranks]
  int32_t* overflow;           // [1]
  int32_t* peer_rows;          // [4, ranks + 1]
  int32_t* records;            // [3, max_tokens, destinations]
  int64_t* required_tokens;    // [ranks]

  TP_HOST_DEVICE int64_t local_experts() const { return experts / peers.ranks; }
  // Columns of counts: the experts, the ranks, and then these two.
  TP_HOST_DEVICE int64_t wrong_count_column() const { return experts + peers.ranks; }
  TP_HOST_DEVICE int64_t wrong_place_column() const { return wrong_count_column() + 1; }
  TP_HOST_DEVICE int64_t columns() const { return plan_columns(experts, peers.ranks); }
  TP_HOST_DEVICE int64_t destinations() const { return topk < peers.ranks ? topk : peers.ranks; }
  // Columns of a chunk's counts: whole units of 16 bytes.
  TP_HOST_DEVICE int64_t chunk_stride() const { return round_up(columns(), 4); }
  // A chunk is the work of a block: at most 512 tokens, with about 1024 indices.
  TP_HOST_DEVICE int64_t chunk_tokens() const { return topk <= 2 ? 512 : topk < 1024 ? 1024 / topk : 1; }
  TP_HOST_DEVICE int64_t chunks() const {
    return tokens > 0 ? (tokens + chunk_tokens() - 1) / chunk_tokens() : 1;
  }
  // Whether one block makes the whole plan.
  TP_HOST_DEVICE bool is_of_one_block() const {
    constexpr int64_t kMostWords = 1 << 16;  // that it fills or copies
    return chunks() == 1 && bound < 0 && !capacity_may_overflow &&
           capacity + received_rows * topk + 3 * max_tokens * destinations() <= kMostWords;
  }
};

// Steps of a plan. Ranks of one process on one GPU launch each for all ranks before the next. kAll: all of them.
enum class PlanStep : int32_t { kCount, kCountKept, kAssign, kNumber, kReceive, kAll };
inline constexpr PlanStep kPlanSteps[] = {PlanStep::kCount, PlanStep::kCountKept, PlanStep::kAssign,
                                          PlanStep::kNumber, PlanStep::kReceive};

// Launches the kernel of a step, if the plan needs it; or those of all steps.
void launch_plan(const PlanArgs& args, PlanStep step, void* stream);

}  // namespace transformer_plugin::expert_parallel::one_sided

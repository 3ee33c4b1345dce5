// Arguments of the kernels of the one-sided exchange, without torch: each rank stores rows into the memory of the
// others, sets flags there, and reads what arrived in its own memory.
//
// A record is one token row that one rank sends to one rank. peer_rows [4, ranks + 1], int32:
//   [0] received: rows [0][r] .. [0][r + 1] - 1 of the received rows come from rank r
//   [1] sent:     records [1][r] .. [1][r + 1] - 1 of this rank go to rank r
//   [2] put:      the row, of those that rank r receives from others, at which this rank's rows begin there
//   [3] returned: the number, of rank r's records to others, of the first that r sent to this rank
// A rank's own rows do not travel and have no place in its memory; put and returned of this rank itself are 0.
// records [3, max_tokens, destinations], int32:
//   [0][t][m] the record of token t to its m-th destination in ascending order of ranks, -1 after the last
//   [1] read flat: the token of each record
//   [2] read flat: the first slot that each record has there
//
// Exchanges of a channel are numbered 1, 2, ...: the epoch, of 64 bits, so that it never comes back to what is still in a flag that
// no rows of later exchanges reached. Two sets of regions take turns, so that a rank
// may put rows of the next exchange while another still reads those of this one. Before it puts rows of exchange n, a
// rank waits until the destination has written that it consumed exchange n - 2: the credit.
//
// At the beginning of an exchange a rank announces it to every other rank: which call it is, so that ranks which make different
// calls find it out, and where its output is. Where both ranks put into outputs, rows go to the output itself if that lies in
// memory that all ranks have mapped, and to the region otherwise.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/math.h"
#include "distributed/progress.h"
#include "distributed/symmetric/allocation_table.h"

namespace transformer_plugin::expert_parallel::one_sided {

inline constexpr int kMostPeers = 72;  // ranks that reach each other's memory in one machine of today
// The most rows of a chunk, which is the work of a block and has one flag: one for each of its warps.
inline constexpr int kMostChunkRows = 16;

// How many rows a chunk has, the same on all ranks. Few, and then several warps for a row, where rows are wide, so that the first arrive
// early, and where tokens are few, so that all blocks have work.
constexpr int32_t chunk_rows_for(int64_t max_tokens, int64_t row_bytes) {
  constexpr int64_t kMostBytes = 32 * 1024, kLeastChunks = 128;
  int32_t rows = kMostChunkRows;
  while (rows > 1 && (rows * row_bytes > kMostBytes || max_tokens < kLeastChunks * rows)) rows /= 2;
  return rows;
}

// Steps of an exchange. Ranks of one process on one GPU launch each for all ranks before the next.
inline constexpr int kAnnounce = 1, kPut = 2, kReceive = 4, kWhole = 7;

// What a rank announces to another, in the memory of that one.
struct alignas(32) Announcement {
  uint64_t epoch;              // written last
  int32_t phase_id;            // of the call
  uint32_t record_bytes;       // from one record to the next in the region
  uint32_t puts_into_outputs;  // whether the rank puts rows into the outputs that others announce
  uint32_t allocation;         // which holds the rank's output; 0: none
  uint32_t output_rows;
  int64_t offset;  // of the output in the allocation
};

// The symmetric memory of each rank, as this process addresses it. Its flags and credits are zero before the first exchange.
struct PeerPointers {
  int32_t rank;
  int32_t ranks;
  void* memory[kMostPeers];
};

TP_HOST_DEVICE constexpr int64_t round_up(int64_t bytes, int64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Where the parts of a rank's symmetric memory begin, in bytes. A record of a dispatch lies at its row of those received from
// others, one of a combine at its number of the records to others of the rank that gets it back.
struct ChannelLayout {
  int64_t rows;          // of a region
  int64_t record_bytes;  // most bytes of a record
  int64_t data[2];       // rows * record_bytes each
  int64_t flags[2];      // uint64 [flag_count] each: the epoch whose rows have arrived
  int64_t flag_count;
  int64_t credits;           // uint64 [ranks]: the last exchange that each rank has consumed
  int64_t announcements[2];  // Announcement [ranks] each, from each rank
  int64_t bytes;             // of all
};

// `received_rows`: most rows that a rank receives from others, `returned_rows`: most records that it sends to others.
// `record_bytes`: the largest record_stride of an exchange.
constexpr ChannelLayout channel_layout(int64_t ranks, int64_t received_rows, int64_t returned_rows,
                                       int64_t record_bytes) {
  constexpr int64_t kLine = 128;
  ChannelLayout layout{};
  layout.rows = received_rows > returned_rows ? received_rows : returned_rows;
  layout.record_bytes = round_up(record_bytes, 16);
  // flag_index() of the last chunk of the last rank is less, with chunks of one row.
  layout.flag_count = layout.rows + ranks + 1;
  const int64_t data = round_up(layout.rows * layout.record_bytes, kLine);
  const int64_t flags = round_up(layout.flag_count * int64_t{sizeof(uint64_t)}, kLine);
  layout.data[1] = data;
  layout.flags[0] = 2 * data;
  layout.flags[1] = layout.flags[0] + flags;
  layout.credits = layout.flags[1] + flags;
  const int64_t announcements = round_up(ranks * static_cast<int64_t>(sizeof(Announcement)), kLine);
  layout.announcements[0] = layout.credits + round_up(ranks * int64_t{sizeof(uint64_t)}, kLine);
  layout.announcements[1] = layout.announcements[0] + announcements;
  layout.bytes = layout.announcements[1] + announcements;
  return layout;
}

// Bytes from one record to the next in a region: its row, then its weights.
TP_HOST_DEVICE int64_t record_stride(int64_t row_bytes, int64_t weight_bytes) {
  return round_up(row_bytes, 16) + round_up(weight_bytes, 16);
}

// The flag of a chunk of `chunk_rows` rows of rank `source`, whose rows lie from place `begin` on. Chunks of different ranks have
// different flags: n rows from any place on touch at most as many whole units of chunk_rows places as they have chunks, and one.
TP_HOST_DEVICE int64_t flag_index(int64_t begin, int64_t source, int64_t chunk, int32_t chunk_rows) {
  return begin / chunk_rows + source + chunk;
}

// What a kernel waited for when its time was over.
enum class ExchangeWait : int32_t {
  kNone,
  kDispatchCredit,
  kDispatchRows,
  kCombineCredit,
  kCombineRows,
  kAnnouncement,
  kDifferentCall,  // which another rank has announced; no wait
  kPlan,
};

// In ordinary memory of the rank, zero at first. Once a wait has failed, ranks may differ in what they have finished: the
// channel and the states of all ranks have to be made anew.
struct LocalState {
  uint64_t epoch;            // number of finished exchanges
  uint32_t put_ticket;       // the next unit of work; 0 between kernels
  uint32_t receive_ticket;   // the same of the other half
  uint32_t finished_blocks;  // of the running kernel
  int32_t failed;            // an ExchangeWait: kernels return at once unless it is kNone
  int32_t failed_rank;       // the rank that did not come
  uint32_t is_published;     // whether a long wait of this exchange is on the progress page
};

// In pinned memory of the host, zero at first: why the calls of a channel do nothing any more.
struct ChannelFailure {
  volatile int32_t wait;  // an ExchangeWait, written last
  volatile int32_t rank;  // the one that did not come, or made another call
  volatile int32_t phase_id, other_phase_id;
  volatile int64_t record_bytes, other_record_bytes;  // where calls differ
};

using distributed::kMostAllocations;

// Where the output of a rank is.
struct OutputPlace {
  uint32_t allocation;  // its number, from 1; 0: in none
  uint32_t rows;
  int64_t offset;
};

// What dispatch and combine both take.
struct Exchange {
  const int32_t* peer_rows;
  const int32_t* records;
  int64_t max_tokens;    // of `records`
  int64_t destinations;  // of `records`
  int32_t chunk_rows;    // chunk_rows_for() of the rows
  ChannelLayout layout;
  PeerPointers peers;
  LocalState* state;
  int64_t timeout_ns;  // of each wait
  int32_t max_sms;     // 0: all
  distributed::WorkMarks marks;
  ChannelFailure* failure;   // or null
  void* const* allocations;  // addresses (allocation_table.h); null: rows are put into no outputs
};

// output[j] = the row of the token of received row j, bit for bit; zeros past the last received row, and of tokens past the input.
struct DispatchedRows {
  const void* input;  // [tokens, row_bytes]
  void* output;       // [received_rows, row_bytes]
  int64_t row_bytes;  // 0: there is no such payload
};

// The slots that received rows have in an output of the experts.
struct OutputSlots {
  const int32_t* slot;    // [received_rows, topk], or -1; null: there are none
  const int32_t* source;  // [capacity]: the received row of each slot, or -1
  int64_t topk;
  int64_t capacity;
};

struct DispatchArgs {
  Exchange exchange;
  DispatchedRows rows;
  DispatchedRows weights;
  // With slots, rows.output is [capacity, row_bytes] and has each received row in all its slots, and zeros in the others.
  OutputSlots slots;
  OutputPlace place;      // of rows.output
  int64_t received_rows;  // N
  int64_t tokens;         // of the inputs
};

// output[t] = sum over the records of token t, in ascending order of ranks, of their rows, from +0, rounded once.
// Received row j is rows[j], or with `slot` the sum of rows[s] over its slots s in ascending order, rounded once. Sums are in
// FP32, FP64 for float64.
struct CombineArgs {
  Exchange exchange;
  const void* rows;     // [received_rows, width]; with `slot` [capacity, width]
  const int32_t* slot;  // [received_rows, topk], or null
  void* output;         // [tokens, width]
  int64_t topk;
  int64_t capacity;
  int64_t width;
  DType dtype;
  // A second payload of float32, float64 with float64 rows, without slots. Width 0: there is none.
  const void* weights;   // [received_rows, weights_width]
  void* weights_output;  // [tokens, weights_width]
  int64_t weights_width;
  int64_t tokens;
};

}  // namespace transformer_plugin::expert_parallel::one_sided

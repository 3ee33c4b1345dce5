// What the CUDA side of the watch shares with the host, without torch.
//
// Kernels before and after each collective write to host memory, so that a host thread sees from a plain read
// how far the stream has come: also inside a replayed graph, and also when a call into CUDA would block.
#pragma once

#include <cstdint>

#include "distributed/phase.h"

namespace transformer_plugin::expert_parallel {

// Host memory that the device writes. Written in the order phase, begun, then ended.
struct Board {
  volatile int64_t begun;     // collectives that the stream has reached
  volatile int64_t ended;     // collectives that the stream has left
  volatile int32_t phase;     // of the last one begun
  volatile int64_t required;  // not 0: rows that a plan under the "raise" policy had no room for
};

struct BoardMemory {
  Board* board;       // pinned, mapped
  int64_t* counters;  // device: begun, ended
};

// Allowed while a graph is being captured. Never freed: a graph that was captured may write to it at any
// time.
BoardMemory allocate_board();
void launch_begin_turn(const BoardMemory& memory, Phase phase, void* stream);
void launch_end_turn(const BoardMemory& memory, void* stream);
// Whether a graph is being captured from the stream.
bool stream_is_captured(void* stream);

}  // namespace transformer_plugin::expert_parallel

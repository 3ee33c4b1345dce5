// How far the collectives on a CUDA stream have come, in host memory. This header has no torch, for the CUDA
// file.
//
// A kernel before each collective and one after it, or the kernels themselves, write to the group's progress page. The watchdog thread
// reads the page as plain memory, so it sees progress inside a replayed CUDA graph too, and when a CUDA call
// would block.
#pragma once

#include <cstdint>

namespace transformer_plugin::distributed {

// Pinned host memory that the device writes, in the order phase_id and label, begun, then ended.
struct ProgressPage {
  volatile int64_t begun;     // number of collectives that the group's streams have reached
  volatile int64_t ended;     // number of collectives that they have completed
  volatile int32_t phase_id;  // of the last one that has begun
  volatile int32_t label;     // of that one, a number of ProcessGroupState::labels; 0: none
};

struct StreamProgress {
  ProgressPage* page;
  int64_t* counters;  // device memory: begun, ended, and the most that the page has shown as begun
};

// For work whose kernels mark its begin and its end themselves, where they wait for long (progress.cuh).
struct WorkMarks {
  StreamProgress progress;
  int32_t phase_id;
  int32_t label;
};

// Can be called while a graph is captured. The memory is never freed, because a captured graph may write to
// it at any time.
StreamProgress allocate_progress();
// Enqueue the kernel that belongs before a collective, and the one that belongs after it.
void launch_begin_collective(const WorkMarks& marks, void* stream);
void launch_end_collective(const WorkMarks& marks, void* stream);
// Occupies the stream for a time.
void launch_hold(void* stream, int64_t nanoseconds);
// Whether a graph is being captured from the stream, and a number that differs between captures; 0: none.
bool stream_is_captured(void* stream);
uint64_t capture_of(void* stream);

}  // namespace transformer_plugin::distributed

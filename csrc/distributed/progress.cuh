// The marks of work on a progress page (progress.h), by single threads of kernels.
//
// Counts are kept in device memory, because a thread reads host memory slowly; the host page gets copies. A system-wide fence after each
// write makes the host see the writes in order. Work of a group may be on several streams, so counts are added atomically, and a copy
// is written again until it is that of the present count: otherwise a kernel that is late would leave an older one.
//
// Kernels that wait for other ranks themselves count their work, but publish it only once a wait takes long: the fences would cost a
// short exchange a part of its time.
#pragma once

#include "distributed/progress.h"

namespace transformer_plugin::distributed {

// A wait of so many nanoseconds is long. The watchdog looks at the page less often.
inline constexpr uint64_t kLongWait = 20'000'000;

inline __device__ int64_t count_work(int64_t* counter) {
  return static_cast<int64_t>(atomicAdd(reinterpret_cast<unsigned long long*>(counter), 1ull)) + 1;
}

inline __device__ void publish_begun(const StreamProgress& progress) {
  const volatile int64_t* const current = &progress.counters[0];
  int64_t written = 0;
  do {
    written = *current;
    atomicMax(reinterpret_cast<long long*>(&progress.counters[2]), static_cast<long long>(written));
    __threadfence();
    progress.page->begun = written;
    __threadfence_system();
  } while (*current != written);
}

inline __device__ void publish_begin(const WorkMarks& marks) {
  ProgressPage* const page = marks.progress.page;
  page->phase_id = marks.phase_id;
  page->label = marks.label;
  __threadfence_system();
  publish_begun(marks.progress);
}

// The page shows what has begun before what has ended, which therefore never passes it there.
inline __device__ void publish_end(const StreamProgress& progress) {
  publish_begun(progress);
  const volatile int64_t* const current = &progress.counters[1];
  int64_t written = 0;
  do {
    written = *current;
    progress.page->ended = written;
    __threadfence_system();
  } while (*current != written);
}

// Called by one thread of the work, before it waits. Without a page nothing is marked.
inline __device__ void count_begin(const WorkMarks& marks) {
  if (marks.progress.page) count_work(&marks.progress.counters[0]);
}

// Called by one thread when the work is done. `is_published`: of the work's kernels, zero again after this. Also published is the end of
// work whose begin another kernel has shown with its own.
inline __device__ void count_end(const WorkMarks& marks, uint32_t* is_published) {
  const StreamProgress& progress = marks.progress;
  if (!progress.page) return;
  const int64_t ended = count_work(&progress.counters[1]);
  __threadfence();
  const bool is_shown = ended <= *static_cast<volatile int64_t*>(&progress.counters[2]);
  if (atomicExch(is_published, 0u) != 0 || is_shown) publish_end(progress);
}

// Called by a thread whose wait has become long.
inline __device__ void publish_wait(const WorkMarks& marks, uint32_t* is_published) {
  if (!marks.progress.page || *static_cast<volatile uint32_t*>(is_published) != 0) return;
  if (atomicExch(is_published, 1u) == 0) publish_begin(marks);
}

}  // namespace transformer_plugin::distributed

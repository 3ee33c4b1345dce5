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

inline __device__ void count_work(int64_t* counter) {
  atomicAdd(reinterpret_cast<unsigned long long*>(counter), 1ull);
}

inline __device__ void publish_count(const int64_t* counter, volatile int64_t* copy) {
  const volatile int64_t* const current = counter;
  int64_t written = 0;
  do {
    written = *current;
    *copy = written;
    __threadfence_system();
  } while (*current != written);
}

inline __device__ void publish_begin(const WorkMarks& marks) {
  ProgressPage* const page = marks.progress.page;
  page->phase_id = marks.phase_id;
  page->label = marks.label;
  __threadfence_system();
  publish_count(&marks.progress.counters[0], &page->begun);
}

inline __device__ void publish_end(const WorkMarks& marks) {
  publish_count(&marks.progress.counters[1], &marks.progress.page->ended);
}

// Called by one thread of the work, before it waits. Without a page nothing is marked.
inline __device__ void count_begin(const WorkMarks& marks) {
  if (marks.progress.page) count_work(&marks.progress.counters[0]);
}

// Called by one thread when the work is done. `is_published`: of the work's kernels, zero again after this.
inline __device__ void count_end(const WorkMarks& marks, uint32_t* is_published) {
  if (!marks.progress.page) return;
  count_work(&marks.progress.counters[1]);
  if (atomicExch(is_published, 0u) != 0) publish_end(marks);
}

// Called by a thread whose wait has become long.
inline __device__ void publish_wait(const WorkMarks& marks, uint32_t* is_published) {
  if (marks.progress.page && atomicExch(is_published, 1u) == 0) publish_begin(marks);
}

}  // namespace transformer_plugin::distributed

// The kernels around a collective, which write how far the stream has come to pinned host memory
// (progress.h).
//
// begin_collective_kernel: begun += 1, phase_id and label are the collective's. end_collective_kernel: ended += 1.
// Grid and block: one thread.
#include <new>
#include <stdexcept>
#include <string>

#include "common/launch.cuh"
#include "distributed/progress.cuh"

namespace transformer_plugin::distributed {
namespace {

__global__ void begin_collective_kernel(WorkMarks marks) {
  count_work(&marks.progress.counters[0]);
  publish_begin(marks);
}

__global__ void end_collective_kernel(WorkMarks marks) {
  count_work(&marks.progress.counters[1]);
  publish_end(marks.progress);
}

__global__ void hold_kernel(int64_t nanoseconds) {
  uint64_t begin = 0, now = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    __nanosleep(500);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < static_cast<uint64_t>(nanoseconds));
}

// Allows this thread to allocate while a graph is captured: the memory is not part of the graph.
class RelaxedCaptureMode {
 public:
  RelaxedCaptureMode() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCaptureMode() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

void check(cudaError_t error) {
  if (error != cudaSuccess) {
    throw std::runtime_error(
        std::string("transformer_plugin: could not set up the watchdog of collectives: ") +
        cudaGetErrorString(error));
  }
}

}  // namespace

StreamProgress allocate_progress() {
  const RelaxedCaptureMode relaxed;
  StreamProgress progress{};
  void* page = nullptr;
  void* counters = nullptr;
  check(cudaHostAlloc(&page, sizeof(ProgressPage), cudaHostAllocPortable | cudaHostAllocMapped));
  progress.page = new (page) ProgressPage{0, 0, 0, 0};
  check(cudaMalloc(&counters, 3 * sizeof(int64_t)));
  progress.counters = static_cast<int64_t*>(counters);
  // A separate non-blocking stream: the default stream would join a capture that is in progress.
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  check(cudaMemsetAsync(counters, 0, 3 * sizeof(int64_t), stream));
  check(cudaStreamSynchronize(stream));
  check(cudaStreamDestroy(stream));
  return progress;
}

void launch_begin_collective(const WorkMarks& marks, void* stream) {
  begin_collective_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(marks);
  check_launch("begin_collective_kernel");
}

void launch_end_collective(const WorkMarks& marks, void* stream) {
  end_collective_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(marks);
  check_launch("end_collective_kernel");
}

void launch_hold(void* stream, int64_t nanoseconds) {
  hold_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(nanoseconds);
  check_launch("hold_kernel");
}

uint64_t capture_of(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  check(cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &id));
  return status == cudaStreamCaptureStatusNone ? 0 : id + 1;
}

bool stream_is_captured(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace transformer_plugin::distributed

#include <new>
#include <stdexcept>
#include <string>

#include "common/launch.cuh"
#include "distributed/progress.h"

namespace transformer_plugin::expert_parallel {
namespace {

__global__ void begin_turn_kernel(BoardMemory memory, int32_t phase) {
  const int64_t turn = memory.counters[0] + 1;
  memory.counters[0] = turn;
  memory.board->phase = phase;
  __threadfence_system();
  memory.board->begun = turn;
  __threadfence_system();
}

__global__ void end_turn_kernel(BoardMemory memory) {
  const int64_t turn = memory.counters[1] + 1;
  memory.counters[1] = turn;
  memory.board->ended = turn;
  __threadfence_system();
}

// Lets this thread allocate while it or another captures a graph: the memory is not part of the graph.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

void check(cudaError_t error) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("transformer_plugin: no memory for the watch over the ranks: ") +
                             cudaGetErrorString(error));
  }
}

}  // namespace

BoardMemory allocate_board() {
  const RelaxedCapture relaxed;
  BoardMemory memory{};
  void* board = nullptr;
  void* counters = nullptr;
  check(cudaHostAlloc(&board, sizeof(Board), cudaHostAllocPortable | cudaHostAllocMapped));
  memory.board = new (board) Board{0, 0, 0, 0};
  check(cudaMalloc(&counters, 2 * sizeof(int64_t)));
  memory.counters = static_cast<int64_t*>(counters);
  // A stream of its own: the default stream would join a capture that is under way.
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  check(cudaMemsetAsync(counters, 0, 2 * sizeof(int64_t), stream));
  check(cudaStreamSynchronize(stream));
  check(cudaStreamDestroy(stream));
  return memory;
}

void launch_begin_turn(const BoardMemory& memory, Phase phase, void* stream) {
  begin_turn_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(memory, static_cast<int32_t>(phase));
  check_launch("begin_turn_kernel");
}

void launch_end_turn(const BoardMemory& memory, void* stream) {
  end_turn_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(memory);
  check_launch("end_turn_kernel");
}

bool stream_is_captured(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace transformer_plugin::expert_parallel

// Which kernels the current device runs: with PDL instructions, or none (common/launch.cuh).
#include <array>
#include <atomic>

#include "common/gpu_refusal.h"
#include "common/launch.cuh"

namespace transformer_plugin {
namespace {

constexpr int kFirstToWait = 90;  // virtual architecture, as in cudaFuncAttributes

// Compiled for the same architectures as all kernels.
__global__ void probe_kernel() {}

bool ask() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, probe_kernel) == cudaSuccess &&
         attributes.ptxVersion >= kFirstToWait;
}

}  // namespace

void refuse_gpu(const char* kernel) {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  throw std::runtime_error(gpu_refusal(kernel, {__CUDA_ARCH_LIST__}, 10 * major + minor));
}

bool supports_pdl() {
  enum : int8_t { kUnknown, kNo, kYes };
  // One answer per device, which never changes; devices past the last use no PDL.
  static std::array<std::atomic<int8_t>, 64> answers{};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= static_cast<int>(answers.size())) return false;
  int8_t answer = answers[device].load(std::memory_order_relaxed);
  if (answer == kUnknown) {
    answer = ask() ? kYes : kNo;
    answers[device].store(answer, std::memory_order_relaxed);
  }
  return answer == kYes;
}

}  // namespace transformer_plugin

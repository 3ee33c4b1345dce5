// The error of a kernel that the library has for other GPUs only. Uses nothing of CUDA, so that tests compile it anywhere.
#pragma once

#include <initializer_list>
#include <string>

namespace transformer_plugin {

inline constexpr int kOldestCapability = 90;  // that of Hopper: older GPUs lack instructions of kernels

// "9.0a" of 90: the kernels compile for architectures with all of their instructions.
inline std::string name_of_architecture(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10) +
         (capability < kOldestCapability ? "" : "a");
}

// `built`: the architectures of the library as in __CUDA_ARCH_LIST__, 900 for 9.0. `capability`: that of the
// GPU, 80 for 8.0.
inline std::string gpu_refusal(const char* kernel, std::initializer_list<int> built, int capability) {
  std::string names;
  for (const int each : built) names += (names.empty() ? "" : " or ") + name_of_architecture(each / 10);
  const std::string own = name_of_architecture(capability);
  const std::string todo =
      capability < kOldestCapability
          ? "Use a GPU of 9.0 or later, or a CPU: kernels have instructions that older ones lack."
          : "Build it for this GPU: `TORCH_CUDA_ARCH_LIST=" + own +
                " pip install --no-build-isolation --force-reinstall --no-deps .` in the source tree.";
  return std::string("transformer_plugin: kernel '") + kernel +
         "': expected a GPU for which the library was built, of compute capability " + names +
         ", got one of " + own + ". " + todo + " docs/install.md says which GPUs are tested.";
}

}  // namespace transformer_plugin

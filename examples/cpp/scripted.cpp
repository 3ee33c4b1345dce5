// Runs a scripted module that uses transformer_plugin's ops, saved from Python, and compares its numbers:
//   scripted [path/to/_C.torch2.11.cu13.so] module.pt data.pt
// data.pt is a scripted module, too. It contains the tensors input, group_sizes, probs, output and grad that
// Python computed. The output, and the gradient of sum(output^2) with respect to the input, must be
// bit-identical.
#include <torch/script.h>

#include <cstdio>

#include "ops.h"

namespace {

bool same_bits(const char* name, const torch::Tensor& got, const torch::Tensor& expected) {
  const bool same =
      got.sizes() == expected.sizes() && got.dtype() == expected.dtype() &&
      torch::equal(got.contiguous().view(torch::kByte), expected.contiguous().view(torch::kByte));
  std::printf("%s %s: sum %.9g, Python's %.9g\n", name, same ? "equal" : "DIFFERENT",
              got.sum().item<double>(), expected.sum().item<double>());
  return same;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) {
    std::fprintf(stderr, "usage: %s [path/to/_C.torch2.11.cu13.so] module.pt data.pt\n", argv[0]);
    return 2;
  }
  if (argc == 4) tp::load_library(argv[1]);  // built by CMake, the program is linked with it
  torch::jit::Module module = torch::jit::load(argv[argc - 2]);
  const torch::jit::Module data = torch::jit::load(argv[argc - 1]);
  const auto saved = [&](const char* name) { return data.attr(name).toTensor(); };

  const torch::Tensor input = saved("input").detach().requires_grad_();
  const torch::Tensor output = module.forward({input, saved("group_sizes"), saved("probs")}).toTensor();
  output.square().sum().backward();
  const bool same_output = same_bits("output", output.detach(), saved("output"));
  const bool same_grad = same_bits("grad", input.grad(), saved("grad"));
  return same_output && same_grad ? 0 : 1;
}

// Trains a grouped expert MLP from C++, with no Python in the process:
//   expert_mlp path/to/transformer_plugin/_C.torch2.11.cu13.so
// For each of three recipes it takes a few steps of SGD on a fixed batch and prints the loss before and
// after. The gradients come from the library, which registers them with torch's autograd.
#include <torch/torch.h>

#include <cstdio>

#include "ops.h"

namespace {

constexpr int64_t kExperts = 4;
constexpr int64_t kHidden = 128;
constexpr int64_t kFfnHidden = 256;
constexpr int64_t kRows = 160;  // the groups below hold 144 of them: the last 16 belong to no expert
constexpr int kSteps = 5;

// fc2(activation(fc1(x)) * prob), each group of rows with its expert's weights.
struct ExpertMlpImpl : torch::nn::Module {
  ExpertMlpImpl(tp::Recipe recipe, torch::Dtype dtype) : recipe(std::move(recipe)) {
    const auto options = torch::TensorOptions().dtype(dtype);
    fc1 = register_parameter("fc1", torch::randn({kExperts, 2 * kFfnHidden, kHidden}).to(options) * 0.08);
    fc2 = register_parameter("fc2", torch::randn({kExperts, kHidden, kFfnHidden}).to(options) * 0.06);
  }

  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& group_sizes,
                        const torch::Tensor& probs) {
    const auto hidden = tp::activation(tp::grouped_linear(x, fc1, group_sizes, recipe), probs);
    return tp::grouped_linear(hidden, fc2, group_sizes, recipe);
  }

  tp::Recipe recipe;
  torch::Tensor fc1, fc2;
};
TORCH_MODULE(ExpertMlp);

struct Losses {
  double before, after;
};

Losses train(const tp::Recipe& recipe, torch::Dtype dtype) {
  torch::manual_seed(0);
  ExpertMlp experts(recipe, dtype);
  const auto x = torch::randn({kRows, kHidden}).to(dtype);
  const auto target = torch::randn({kRows, kHidden});
  const auto probs = torch::rand({kRows});
  const auto group_sizes = torch::tensor({int64_t{50}, int64_t{0}, int64_t{93}, int64_t{1}});
  const auto rows = group_sizes.sum().item<int64_t>();

  torch::optim::SGD optimizer(experts->parameters(), torch::optim::SGDOptions(20.0));
  const auto loss_now = [&] {
    const auto output = experts->forward(x, group_sizes, probs).to(torch::kFloat);
    TORCH_CHECK(output.slice(0, rows).abs().max().item<double>() == 0, "rows of no group must be zero");
    return torch::mse_loss(output.slice(0, 0, rows), target.slice(0, 0, rows));
  };
  const double before = loss_now().item<double>();
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    loss_now().backward();
    TORCH_CHECK(experts->fc1.grad()[1].abs().max().item<double>() == 0,
                "an expert without rows has no gradient");
    optimizer.step();
  }
  return {before, loss_now().item<double>()};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2) {
    std::fprintf(stderr, "usage: %s [path/to/transformer_plugin/_C.torch2.11.cu13.so]\n", argv[0]);
    return 2;
  }
  if (argc == 2) tp::load_library(argv[1]);  // built by CMake, the program is linked with it
  const struct {
    const char* name;
    tp::Recipe recipe;
    torch::Dtype dtype;
  } runs[] = {
      {"fp32", {"none", "none", "none"}, torch::kFloat},
      {"bf16", {"bf16", "bf16", "bf16"}, torch::kBFloat16},
      {"fp8_block",
       {"fp8_block:e4m3,pow2", "fp8_block:e4m3,pow2,square", "fp8_block:e4m3,pow2"},
       torch::kBFloat16},
  };
  bool all_fell = true;
  for (const auto& run : runs) {
    const Losses losses = train(run.recipe, run.dtype);
    std::printf("%s loss %.6f -> %.6f\n", run.name, losses.before, losses.after);
    all_fell = all_fell && losses.after < losses.before;
  }
  return all_fell ? 0 : 1;
}

// main_grad: a buffer of the caller into which a layer's backward adds the gradient of a weight, in the epilogue of the product
// that computes it.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "linear/weights.h"

namespace transformer_plugin::linear {

// The options without which no buffer was given, and the values of `weight_grad`.
void check_main_grad_options(const char* op, bool has_buffers, const MainGrad& main_grad);
// Dtype, sizes, device, strides. `is_grouped`: a weight [G, N, K].
void check_main_grad(const char* name, const MainGrad& main_grad, const WeightArgument& weight,
                     bool is_grouped);

// All of it for a layer with one weight and arguments of the usual names. `data`: any tensor of the layer.
void check_weight_gradient(const MainGrad& main_grad, const WeightArgument& weight, bool is_grouped,
                           const at::Tensor& data);

// In the forward: keeps the buffers and the queue for the backward, untracked, because two forwards may come
// before two backwards. `name`: of the argument. Nothing without either.
void save_main_grad(torch::autograd::AutogradContext* ctx, const char* name, const MainGrad& main_grad);
// A main_grad as save_main_grad saved it.
struct SavedMainGrad {
  std::vector<at::Tensor> buffers;
  std::optional<at::Tensor> queue = {};
  bool accumulate = true;
  std::string_view weight_grad = "none";
};
// The tensors that were saved one by one under a name; none if there are none.
std::vector<at::Tensor> saved_matrices(torch::autograd::AutogradContext* ctx, const char* name);
SavedMainGrad saved_main_grad(torch::autograd::AutogradContext* ctx, const char* name);
// The name, in errors and in what a node saves, for the queue beside the buffers `name`.
std::string queue_of(const char* name);

}  // namespace transformer_plugin::linear

// The operands of a layer in low precision, each role's matrix rounded to its format, and the products of what was
// rounded. grouped_linear and linear (linear/quantized_linear.h) are made of these, and grouped_mlp of the same twice.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>

#include "common/format.h"
#include "linear/quantized_linear.h"

namespace transformer_plugin::gemm {

// Data with what its values are scaled by; undefined where it is not wanted or there is none.
struct Scaled {
  at::Tensor data, scale, amax;
};

// The format that a layer rounds the rows of groups to. Where kernels multiply codes as they are, groups of what is rounded along
// its columns are aligned: the weight gradient need not copy those that begin elsewhere. `like` is on the layer's device.
std::string layer_key(std::string_view key, const at::Tensor& like,
                      const std::optional<at::Tensor>& group_sizes);

// A matrix in a format, along its rows and along its columns (returned transposed).
struct Rounded {
  Scaled rows, columns;
};

Rounded round_matrix(const at::Tensor& x, const std::optional<at::Tensor>& group_sizes, const Format& format,
                     std::string_view key, bool rows, bool columns);

// A gradient in its format; and its sums over the rows, the gradient of a bias, where one op reads it once for both.
struct RoundedGradient {
  Rounded values;
  at::Tensor bias;  // undefined, or [N], or [G, N] with group sizes
};

RoundedGradient round_gradient(const at::Tensor& grad, const std::optional<at::Tensor>& group_sizes,
                               const Format& format, std::string_view key, bool rows, bool columns,
                               bool with_bias);

// A weight [.., N, K] for the forward product, as b with transpose_b; and for the data gradient.
struct RoundedWeight {
  Scaled forward;
  Scaled backward;  // b with transpose_b if it is rounded along its columns
};

// Whether the data gradient takes the weight along its columns: where its values are others than along its rows; or the
// same, but kernels multiply blocks as they are, what is summed over in one line.
bool rounds_weight_columns(const at::Tensor& weight, const RoleFormats& formats);
RoundedWeight round_weight(const at::Tensor& weight, const RoleFormats& formats, bool backward);
// The same for both products into buffers.
void round_weight_out(const at::Tensor& weight, const RoleFormats& formats, const RoundedWeight& out);

struct Operand {
  const Scaled& values;
  std::string_view key;
};

// a @ b, or a @ b^T, of each group where there are groups.
at::Tensor multiply(const Operand& a, const Operand& b, const std::optional<at::Tensor>& group_sizes,
                    const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& bias_scale,
                    bool transpose_b, at::ScalarType dtype);
// grad^T @ input, from both along their columns: [N, K], or one for each group.
at::Tensor multiply_columns(const Operand& grad, const Operand& input,
                            const std::optional<at::Tensor>& group_sizes, at::ScalarType dtype);

}  // namespace transformer_plugin::gemm

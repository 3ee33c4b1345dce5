// The arguments of the ops linear and grouped_linear.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "common/quantized.h"
#include "gemm/args/launch_options.h"
#include "linear/caller_buffers.h"
#include "linear/no_tensor.h"
#include "linear/operand_formats.h"
#include "linear/weights.h"
#include "sharded/weight_shard.h"

namespace transformer_plugin::linear {

// The ranks over which the rows of an input are sharded (linear/sequence_parallel_input.h).
struct SequenceParallel {
  int64_t size = 1;  // 1: the input has all rows
  std::string_view group = {};

  bool is_sharded() const { return size > 1; }
};

struct FormatKeys {
  std::string_view input = "none", weight = "none", grad = "none";

  bool unquantized() const { return input == "none" && weight == "none" && grad == "none"; }
};

// Delayed scaling (linear/delayed_scaling.h).
struct DelayedScales {
  const std::optional<at::Tensor>& scale;  // none: the scales are those of the data
  const std::optional<at::Tensor>& amax;
};

// input [..., K] and weight [N, K]; or, with group sizes, input [T, K] and weight [G, N, K] or several [N, K].
// `quantized_weight` (linear/quantized_weight.h) is read instead of `weight`, which then gives sizes and dtype only.
struct LinearCall {
  const char* op;
  const at::Tensor& input;
  at::TensorList weight;
  const std::optional<at::Tensor>&group_sizes, &bias, &bias_scale;
  FormatKeys keys = {};
  OptionalList quantized_weight = {};
  gemm::LaunchOptions options = {};  // of the grouped GEMMs
  MainGrad main_grad = {};
  CallerBuffers buffers = {};
  bool save_original_input = false;  // for the weight gradient, which quantizes it in the backward
  SequenceParallel sequence_parallel = {};
  const sharded::WeightShard& shard = sharded::kUnsharded;
  DelayedScales delayed = {kNoTensor, kNoTensor};

  OperandFormats formats() const { return operand_formats(op, keys.input, keys.weight, keys.grad); }
  // Whether it is the product of this rank's own operands, not quantized.
  bool is_local_and_unquantized() const {
    return keys.unquantized() && !shard.is_sharded() && !sequence_parallel.is_sharded();
  }
  // Whether the call has no option, only operands in the dtype of the input.
  bool is_plain() const {
    return is_local_and_unquantized() && !quantized_weight && !main_grad.given() && !buffers.given();
  }
  // The same with the input as a matrix.
  LinearCall with_input(const at::Tensor& matrix) const {
    return {op,
            matrix,
            weight,
            group_sizes,
            bias,
            bias_scale,
            keys,
            quantized_weight,
            options,
            main_grad,
            buffers,
            save_original_input,
            sequence_parallel,
            shard,
            delayed};
  }
  c10::SymInt out_features() const {
    return group_sizes ? unsharded_rows({op, "weight", weight}, shard) : unsharded_size(weight[0], shard);
  }
  // That no buffer of the caller shares memory with another or with an operand.
  void check_memory() const;
};

// The product of the layer; `matrices`: read in place of the data of `weight`, if there are any.
at::Tensor product_of(const LinearCall& call, const Quantized& input, const Quantized& weight,
                      at::TensorList matrices);

}  // namespace transformer_plugin::linear

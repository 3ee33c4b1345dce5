// An activation (activation/description.h) times a probability per row: input [rows, 2F] of a gate and a linear part, or [rows, F]
// without a gate, to output [rows, F]. SwiGLU with the gate in the first F columns:
//   output[i, j] = silu(input[i, j]) * input[i, F + j] * probs[i],   silu(a) = a / (1 + exp(-a)).
// All in FP32, rounded once. The row sums of the backward have a fixed order, so that they are deterministic
// and the same on CPU and CUDA: within each 128 columns neighbours are added, then neighbours of the sums,
// and so on, seven times (missing columns count as 0); then the sums of the 128s are added in order, from
// zero.
#pragma once

#include <cstdint>

#include "activation/description.h"
#include "common/dtype.h"
#include "common/math.h"

namespace transformer_plugin::activation {

inline constexpr int kSumTile = 128;  // columns that are summed as a tree

// Where column `j` of F lies in a row of the input: its gate, and how far behind that its linear part. Without a gate the
// input has the columns of the output. `alternating`: the two are one column each in turn; else `interleaved` says whether they are blocks
// of kInterleave in turn.
template <bool gated, bool alternating = false>
struct InputColumns {
  static_assert(gated || !alternating);
  static constexpr int kStep = alternating ? 2 : 1;  // columns from one gate of a run to the next
  int64_t features;
  bool interleaved;

  TP_HOST_DEVICE int64_t width() const { return gated ? 2 * features : features; }
  TP_HOST_DEVICE int64_t gate(int64_t j) const {
    if constexpr (alternating) return 2 * j;
    return gated && interleaved ? j + j / kInterleave * kInterleave : j;
  }
  TP_HOST_DEVICE int64_t linear_offset() const {
    if constexpr (alternating) return 1;
    return gated ? (interleaved ? kInterleave : features) : 0;
  }
  // Columns from `j` on, of `count`, whose gates are kStep columns apart.
  TP_HOST_DEVICE int64_t run(int64_t j, int64_t count) const {
    if constexpr (alternating) return count;
    const int64_t left = kInterleave - j % kInterleave;
    return gated && interleaved && left < count ? left : count;
  }
};

struct ActivationArgs {
  const void* input;   // [rows, 2F], or [rows, F] without a gate
  const float* probs;  // [rows], or null for 1
  void* output;        // [rows, F]
  int64_t rows;
  int64_t features;  // F
  DType dtype;
  const int32_t* end = nullptr;  // rows from `*end` on are neither read nor written; null if there are none
  Activation activation = {};

  TP_HOST_DEVICE int64_t used_rows() const { return end != nullptr ? *end : rows; }
  template <bool gated, bool alternating = false>
  TP_HOST_DEVICE InputColumns<gated, alternating> columns() const {
    return {features, activation.interleave != 0};
  }
};

struct ActivationBackwardArgs {
  const void* grad;    // [rows, F]
  const void* input;   // [rows, 2F], or [rows, F] without a gate
  const float* probs;  // [rows], or null for 1
  void* grad_input;    // as the input
  float* grad_probs;   // [rows], or null if probs is
  float* partial;      // row sums of tiles, [ceil(F / 128), rows]: scratch, or grad_probs; null if probs is
  int64_t rows;
  int64_t features;
  DType dtype;
  // Rows from `*end` on are neither read nor written, except that their gradient of the probability is zero; null if
  // there are none. `partial` then is not grad_probs.
  const int32_t* end = nullptr;
  Activation activation = {};

  TP_HOST_DEVICE int64_t used_rows() const { return end != nullptr ? *end : rows; }
  template <bool gated, bool alternating = false>
  TP_HOST_DEVICE InputColumns<gated, alternating> columns() const {
    return {features, activation.interleave != 0};
  }
};

// The sum of kCount terms, a power of two, in the order above. Each level is an array of constant size, so
// that compilers vectorise it.
template <int kCount = kSumTile>
TP_HOST_DEVICE float sum_of_tile(const float* terms) {
  if constexpr (kCount == 1) {
    return terms[0];
  } else {
    float sums[kCount / 2];
    for (int i = 0; i < kCount / 2; ++i) sums[i] = terms[2 * i] + terms[2 * i + 1];
    return sum_of_tile<kCount / 2>(sums);
  }
}

void activation_cpu(const ActivationArgs& args);
void activation_backward_cpu(const ActivationBackwardArgs& args);
void launch_activation(const ActivationArgs& args, void* stream);
// Adds the row sums of tiles, starting from zero. Does nothing if `partial` is grad_probs.
void launch_add_row_sums(const ActivationBackwardArgs& args, void* stream);
void launch_activation_backward(const ActivationBackwardArgs& args, void* stream);

}  // namespace transformer_plugin::activation

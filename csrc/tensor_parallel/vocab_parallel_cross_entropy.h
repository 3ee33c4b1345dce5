// The cross entropy of logits whose columns, the vocabulary, are sharded over ranks. Of a row with logits x and target t:
//   largest = max x,   sum = sum over c of exp(x[c] - largest),   log_sum = log(sum),   both over all ranks
//   nll    = (largest - x[t]) + log_sum
//   smooth = (largest - (sum of x) / vocabulary) + log_sum,   the mean of -log softmax(x)
//   loss   = (1 - label_smoothing) * nll + label_smoothing * smooth
//   d x[c] = grad * (exp(x[c] - largest) / sum - label_smoothing / vocabulary - (c == t ? 1 - label_smoothing : 0))
// All in FP32. A rank has the columns first .. first + cols of the vocabulary.
//
// Sums over a row have a fixed order, so that results are deterministic and the same on CPU and CUDA. A unit is 8
// neighbouring columns, those past the last one -infinity (0 in the sum of x). Unit u belongs to lane u % 256. A lane takes its
// units in order: it raises its largest logit, scales its sum to the new one, and adds the 8 exponentials, of which neighbours
// are added first. The lanes' sums, scaled to the largest logit of all, are added likewise, neighbours first; then the ranks' in
// ascending order.
#pragma once

#include <cstdint>
#include <optional>

#include "common/dtype.h"
#include "common/log.h"
#if defined(__CUDACC__)
#include "common/ptx/arithmetic.cuh"
#endif

namespace transformer_plugin::tensor_parallel {

inline constexpr int kLanes = 256;

// What a rank says about a row to the others: kPartWidth floats, the last only with label smoothing.
struct RowPart {
  float largest;
  float sum;     // of exp(x - largest)
  float target;  // the target's logit, 0 if it is not here
  float logits;  // the sum of x
};
inline constexpr int kPartWidth = 4;

struct CrossEntropyTargets {
  const void* indices;  // [rows] int64, or int32
  bool is_int64;
  int64_t ignore_index;
  int64_t vocabulary;

  TP_HOST_DEVICE int64_t at(int64_t row) const {
    return is_int64 ? static_cast<const int64_t*>(indices)[row] : static_cast<const int32_t*>(indices)[row];
  }
  TP_HOST_DEVICE bool contains(int64_t target) const { return target >= 0 && target < vocabulary; }
};

// This rank's columns.
struct CrossEntropyLogits {
  const void* data;  // [rows, stride]
  int64_t rows;
  int64_t stride;
  int64_t cols;   // of the vocabulary; the others are padding
  int64_t first;  // column of the vocabulary
  DType dtype;

  TP_HOST_DEVICE bool has(int64_t target) const { return target >= first && target - first < cols; }
};

struct RowPartArgs {
  CrossEntropyLogits logits;
  CrossEntropyTargets targets;
  float* parts;  // [rows, part_width]
  int part_width;
};

struct CombineArgs {
  CrossEntropyTargets targets;
  const float* parts;  // [ranks, rows, part_width]
  float* losses;       // [rows]
  float* stats;        // [rows, 2]: largest, sum
  int64_t ranks;
  int64_t rows;
  int64_t stride;  // columns of a rank
  int part_width;
  float label_smoothing;
  float target_weight;  // 1 - label_smoothing
};

struct CrossEntropyBackwardArgs {
  CrossEntropyLogits logits;
  CrossEntropyTargets targets;
  const float* grad;  // [rows * grad_stride]
  int64_t grad_stride;
  const float* stats;  // [rows, 2]
  void* grad_logits;   // [rows, stride]
  float target_weight;
  float column_weight;  // label_smoothing / vocabulary
};

TP_HOST_DEVICE float negative_infinity() { return bits_to_float(0xff800000u); }
TP_HOST_DEVICE float not_a_number() { return bits_to_float(0x7fc00000u); }

// The larger one; NaN if one of them is.
TP_HOST_DEVICE float larger_f32(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return ptx::max_nan(a, b);
#else
  return static_cast<int>(a >= b) | static_cast<int>(a != a) ? a : b;
#endif
}

// What is subtracted from logits of which this is the largest. For -infinity, where nothing needs to be, 0: the difference
// would be NaN.
TP_HOST_DEVICE float reference_of(float largest) { return largest == negative_infinity() ? 0.0f : largest; }

// exp(x - reference), from exp(-87) up: in a sum of which one term is 1, what is smaller adds nothing. A number also for NaN:
// the largest logit is NaN or infinity then.
TP_HOST_DEVICE float exp_of_difference(float x, float reference) {
  const float difference = x - reference;
#if defined(__CUDA_ARCH__)
  return exp_in_range_f32(fmaxf(difference, -87.0f));
#else
  return exp_in_range_f32(difference > -87.0f ? difference : -87.0f);
#endif
}

// The factor of a sum whose largest logit rises to `raised`. 1 for NaN, whose sum is not used.
TP_HOST_DEVICE float rescale(float largest, float raised) {
  const float factor = exp_f32(largest - raised);
  return raised > largest ? factor : 1.0f;
}

// A sum's part of one whose largest logit is `of_all`.
TP_HOST_DEVICE float scaled_sum(float largest, float sum, float of_all) {
  return sum * exp_f32(largest - reference_of(of_all));
}

// The part of a row without columns, and of one that is ignored.
TP_HOST_DEVICE RowPart no_part() { return {negative_infinity(), 0.0f, 0.0f, 0.0f}; }

TP_HOST_DEVICE void store_part(const RowPartArgs& args, int64_t row, const RowPart& part) {
  float* to = args.parts + row * args.part_width;
  to[0] = part.largest + 0.0f;  // the sign of a zero may depend on the order
  to[1] = part.sum;
  to[2] = part.target;
  if (args.part_width == kPartWidth) to[3] = part.logits;
}

// Computes the loss and the statistics of a row from the parts of all ranks.
TP_HOST_DEVICE void combine_row(const CombineArgs& args, int64_t row) {
  const int64_t target = args.targets.at(row), step = args.rows * args.part_width;
  const float* parts = args.parts + row * args.part_width;
  float* stats = args.stats + 2 * row;
  if (target == args.targets.ignore_index) {
    stats[0] = stats[1] = args.losses[row] = 0.0f;
    return;
  }
  float largest = negative_infinity();
  for (int64_t r = 0; r < args.ranks; ++r) largest = larger_f32(largest, parts[r * step]);
  float sum = 0.0f, logits = 0.0f;
  for (int64_t r = 0; r < args.ranks; ++r) {
    sum = sum + scaled_sum(parts[r * step], parts[r * step + 1], largest);
    if (args.part_width == kPartWidth) logits = logits + parts[r * step + 3];
  }
  const bool is_finite = fabsf(largest) < -negative_infinity();
  stats[0] = is_finite ? largest : not_a_number();
  stats[1] = is_finite ? sum : not_a_number();
  if (!is_finite || !args.targets.contains(target)) {
    args.losses[row] = not_a_number();
    return;
  }
  const float log_sum = log_f32(sum);
  float loss = (largest - parts[target / args.stride * step + 2]) + log_sum;
  if (args.part_width == kPartWidth) {
    const float smooth = (largest - logits / static_cast<float>(args.targets.vocabulary)) + log_sum;
    loss = args.target_weight * loss + args.label_smoothing * smooth;
  }
  args.losses[row] = loss;
}

// The gradient of a row: of column c, exp(x - largest) * softmax - column, less `target` for the target's.
struct RowGradient {
  float largest;
  float softmax;
  float column;
  float target;

  TP_HOST_DEVICE float at(float x) const {
    const float difference = x - largest, in_range = exp_in_range_f32(difference);
    return (difference > -87.33654f ? in_range : 0.0f) * softmax - column;
  }
};

// NaN for a target outside of the vocabulary.
TP_HOST_DEVICE RowGradient row_gradient(const CrossEntropyBackwardArgs& args, int64_t row, int64_t target) {
  const float grad = args.targets.contains(target) ? args.grad[row * args.grad_stride] : not_a_number();
  return {args.stats[2 * row], grad / args.stats[2 * row + 1], grad * args.column_weight,
          grad * args.target_weight};
}

// The first target that is neither in the vocabulary nor ignored.
std::optional<int64_t> wrong_target_cpu(const CrossEntropyTargets& targets, int64_t rows);
void row_parts_cpu(const RowPartArgs& args);
void combine_cpu(const CombineArgs& args);
void cross_entropy_backward_cpu(const CrossEntropyBackwardArgs& args);
void launch_row_parts(const RowPartArgs& args, void* stream);
void launch_combine(const CombineArgs& args, void* stream);
void launch_cross_entropy_backward(const CrossEntropyBackwardArgs& args, void* stream);

}  // namespace transformer_plugin::tensor_parallel

// Arguments of the row kernels, without torch, and the arithmetic that CPU and CUDA share.
//
// "Rows" are rows of H elements in slots (slots_args.h). `slot` [tokens, topk] and `source` [capacity] are
// the two directions of the same map. Values of either outside of their range mean "none" and are never used
// as an index. Sums are in FP32 (FP64 for float64) in a fixed order and are rounded once.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/math.h"

namespace transformer_plugin::routing {

inline constexpr int kLanes = 32;
inline constexpr int64_t kMaxTopk = 1024;  // limit of the slots of a token in a block's shared memory

// output[s] = rows[source[s]], or zeros. `slot` may make it faster, and never changes the result.
struct GatherRowsArgs {
  const void* rows;       // [tokens, H]
  const int32_t* source;  // [capacity]
  const int32_t* slot;    // [tokens, topk], or null
  void* output;           // [capacity, H]
  int64_t tokens;
  int64_t topk;  // of `slot`
  int64_t capacity;
  int64_t row_bytes;
  const int32_t* end = nullptr;  // rows from `*end` on are not written; null if there are none

  TP_HOST_DEVICE int64_t written_rows() const { return end != nullptr ? *end : capacity; }
};

// output[s] = weights[n, k] * rows[n] if n = source[s] and slot[n, k] = s, otherwise zeros.
struct GatherScaledRowsArgs {
  const void* rows;       // [tokens, H]
  const int32_t* source;  // [capacity]
  const int32_t* slot;    // [tokens, topk]
  const void* weights;    // [tokens, topk] float32; float64 with float64 rows
  void* output;           // [capacity, H]
  int64_t tokens;
  int64_t topk;
  int64_t capacity;
  int64_t width;  // H
  DType dtype;
};

// output[n] = sum of weights[n, k] * rows[slot[n, k]] over k in ascending order of slot[n, k], one fma after
// the other, starting from zero. Without weights, the plain sum of the rows. Rounded once.
struct SumSlotsArgs {
  const void* rows;     // [capacity, H]
  const int32_t* slot;  // [tokens, topk]
  const void* weights;  // as above, or null
  void* output;         // [tokens, H]
  int64_t tokens;
  int64_t topk;
  int64_t capacity;
  int64_t width;
  DType dtype;
};

// output[n, k] = sum over h of rows[slot[n, k], h] * grad[n, h], or 0 without a slot. Lane l of kLanes adds
// the columns l, l + kLanes, ... by fma; then the lanes are added as a tree of halves.
struct DotSlotsArgs {
  const void* rows;     // [capacity, H]
  const int32_t* slot;  // [tokens, topk]
  const void* grad;     // [tokens, H]
  void* output;         // [tokens, topk] float32; float64 with float64 rows
  int64_t tokens;
  int64_t topk;
  int64_t capacity;
  int64_t width;
  DType dtype;
};

// output[s] = weights[source[s], k] if slot[source[s], k] = s, otherwise 0.
struct WeightsToSlotsArgs {
  const void* weights;
  const int32_t* slot;    // [tokens, topk]
  const int32_t* source;  // [capacity]
  void* output;
  int64_t tokens;
  int64_t topk;
  int64_t capacity;
  bool is_float64;
};

TP_HOST_DEVICE float fused(float a, float b, float c) { return fmaf(a, b, c); }
TP_HOST_DEVICE double fused(double a, double b, double c) { return fma(a, b, c); }

// The k with slots[k] = s, or -1.
TP_HOST_DEVICE int64_t find_slot(const int32_t* slots, int64_t topk, int64_t s) {
  for (int64_t k = 0; k < topk; ++k) {
    if (slots[k] == s) return k;
  }
  return -1;
}

void gather_rows_cpu(const GatherRowsArgs& args);
void gather_scaled_rows_cpu(const GatherScaledRowsArgs& args);
void sum_slots_cpu(const SumSlotsArgs& args);
void dot_slots_cpu(const DotSlotsArgs& args);
void weights_to_slots_cpu(const WeightsToSlotsArgs& args);
void launch_gather_rows(const GatherRowsArgs& args, void* stream);
// The same where a GPU has bulk copies and the map from tokens to slots says where each goes; false elsewhere.
// Rows begin at multiples of 16 bytes.
bool launch_spread_rows(const GatherRowsArgs& args, void* stream);
void launch_gather_scaled_rows(const GatherScaledRowsArgs& args, void* stream);
void launch_sum_slots(const SumSlotsArgs& args, void* stream);
void launch_dot_slots(const DotSlotsArgs& args, void* stream);
void launch_weights_to_slots(const WeightsToSlotsArgs& args, void* stream);

}  // namespace transformer_plugin::routing

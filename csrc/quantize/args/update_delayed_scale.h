// Delayed scaling: the scale for the next step from the amaxes of previous steps.
//
//   last = amax, or history[0] if amax is 0
//   if last is not 0: the history is shifted by one, history[H-1] = last, history[0] = 0
//   a = the maximum of the history before history[0] became 0 (NaN ignored), or last ("most_recent");
//       0 if last is 0
//   scale = largest / a if a is positive and finite, else unchanged; infinity becomes the largest float32
//   amax = 0
// `largest` is the element's largest finite value times 2^-margin. A tensor without data in this step keeps
// its history. An infinite amax keeps the scale unchanged until it has left the history.
// Source: NVIDIA TransformerEngine 2.20, delayed scaling (common/recipe/delayed_scaling.cu).
#pragma once

#include <cstdint>

#include "common/math.h"

namespace transformer_plugin::quantize {

inline constexpr int kMaxScaleFormats = 16;

struct DelayedScaleArgs {
  float* history;  // [length, tensors]
  float* scale;    // [tensors]
  float* amax;     // [tensors]
  float* next;     // [tensors], the new scales
  int64_t length;
  int64_t tensors;
  int64_t tensors_per_format;       // consecutive tensors share a format
  float largest[kMaxScaleFormats];  // one per format
  bool most_recent;
  bool write;  // whether to update history, scale and amax; otherwise only `next`
};

TP_HOST_DEVICE float last_amax(const DelayedScaleArgs& args, int64_t tensor) {
  return args.amax[tensor] != 0.0f ? args.amax[tensor] : args.history[tensor];
}

TP_HOST_DEVICE float next_scale(const DelayedScaleArgs& args, int64_t tensor, float amax) {
  constexpr float most = 3.40282347e38f;
  float scale = args.scale[tensor];
  if (amax > 0.0f && amax <= most) scale = args.largest[tensor / args.tensors_per_format] / amax;
  return scale > most ? most : scale;
}

void update_delayed_scale_cpu(const DelayedScaleArgs& args);
void launch_update_delayed_scale(const DelayedScaleArgs& args, void* stream);

}  // namespace transformer_plugin::quantize

// Delayed scaling: the scale of the next step from the amaxes of the last ones.
//
//   last = amax, or history[0] where amax is 0
//   if last is not 0: the history moves up by one, history[H-1] = last, history[0] = 0
//   a = the largest of that window (NaN left out) before history[0] became 0, or last ("most_recent"); 0 if last is 0
//   scale = largest / a if a is positive and finite, else as it was; an infinite one becomes the largest float32
//   amax = 0
// `largest` is the element's largest finite value times 2^-margin. So a tensor that saw nothing keeps its history, and
// one infinity keeps the scale as it is until it has left the window.
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
  float* next;     // [tensors], the new scale
  int64_t length;
  int64_t tensors;
  int64_t tensors_per_format;       // in a row
  float largest[kMaxScaleFormats];  // of each format
  bool most_recent;
  bool write;  // history, scale and amax; else only `next`
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

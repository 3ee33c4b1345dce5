// update_delayed_scale_ on a CPU (quantize/args/update_delayed_scale.h).
#include "quantize/args/update_delayed_scale.h"

#include <ATen/Parallel.h>

#include <algorithm>

namespace transformer_plugin::quantize {
namespace {

constexpr int64_t kTensors = 64;  // per task: a range of each row of the history

void update(const DelayedScaleArgs& args, int64_t begin, int64_t end) {
  float last[kTensors], history_max[kTensors] = {};
  for (int64_t t = begin; t < end; ++t) last[t - begin] = last_amax(args, t);
  for (int64_t i = 0; i < args.length; ++i) {
    for (int64_t t = begin; t < end; ++t) {
      const float next_row = i + 1 < args.length ? args.history[(i + 1) * args.tensors + t] : last[t - begin];
      history_max[t - begin] = fmaxf(history_max[t - begin], next_row);
      if (args.write && last[t - begin] != 0.0f) args.history[i * args.tensors + t] = i > 0 ? next_row : 0.0f;
    }
  }
  for (int64_t t = begin; t < end; ++t) {
    const float newest = last[t - begin];
    const float amax = args.most_recent || newest == 0.0f ? newest : history_max[t - begin];
    const float scale = next_scale(args, t, amax);
    args.next[t] = scale;
    if (!args.write) continue;
    args.scale[t] = scale;
    args.amax[t] = 0.0f;
  }
}

}  // namespace

void update_delayed_scale_cpu(const DelayedScaleArgs& args) {
  const int64_t stretches = (args.tensors + kTensors - 1) / kTensors;
  at::parallel_for(0, stretches, 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      update(args, s * kTensors, std::min((s + 1) * kTensors, args.tensors));
    }
  });
}

}  // namespace transformer_plugin::quantize

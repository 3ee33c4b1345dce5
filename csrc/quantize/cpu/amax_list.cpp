// amax_list_out on a CPU.
#include <algorithm>

#include "common/visit_float.h"
#include "quantize/args/amax_list_out.h"
#include "quantize/cpu/tile.h"

namespace transformer_plugin::quantize {
namespace {

constexpr int64_t kStretch = 16384;  // elements per task

template <typename T>
TP_CPU_CLONES int32_t magnitude_of_values(const T* values, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, magnitude(static_cast<float>(values[i])));
  return largest;
}

template <typename T>
int32_t magnitude_of_tensor(const T* values, int64_t count) {
  float largest = 0.0f;
  at::parallel_for(0, ceil_div(count, kStretch), 1, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kStretch;
    atomic_max(largest, magnitude_of_values<T>(values + first, std::min(end * kStretch, count) - first));
  });
  return static_cast<int32_t>(float_to_bits(largest));
}

}  // namespace

void amax_list_cpu(const AmaxListArgs& args) {
  if (args.noop && *args.noop == 1.0f) return;
  visit_float(args.dtype, [&](auto type) {
    using T = decltype(type);
    for (int t = 0; t < args.tensors; ++t) {
      const int32_t bits = magnitude_of_tensor<T>(static_cast<const T*>(args.inputs[t]), args.counts[t]);
      args.amax[t] = bits_to_float(static_cast<uint32_t>(bits));
      if (args.amax_t) args.amax_t[t] = args.amax[t];
    }
  });
}

}  // namespace transformer_plugin::quantize

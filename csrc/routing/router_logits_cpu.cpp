// The gradient of router logits on a CPU: splitting it into BF16 parts, and adding the halves of a product
// (routing/router_logits.h).
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>

#include <algorithm>

#include "routing/router_logits.h"

namespace transformer_plugin::routing {
namespace {

constexpr int64_t kTokensPerTask = 64, kElementsPerTask = 8192;

TP_CPU_CLONES void split_row(const float* grad, int64_t experts, uint16_t* high, uint16_t* low) {
  for (int64_t e = 0; e < experts; ++e) {
    const BFloat16Parts parts = split_into_bfloat16(grad[e]);
    high[e] = parts.high;
    low[e] = parts.low;
  }
}

TP_CPU_CLONES void add_range(const float* first, const float* second, int64_t size, c10::BFloat16* output) {
  for (int64_t i = 0; i < size; ++i) output[i] = static_cast<c10::BFloat16>(first[i] + second[i]);
}

}  // namespace

void split_gradient_cpu(const SplitGradientArgs& args) {
  at::parallel_for(0, args.tokens, kTokensPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      uint16_t* row = args.parts + 2 * t * args.experts;
      split_row(args.grad + t * args.experts, args.experts, row, row + args.experts);
    }
  });
  if (args.weight == nullptr) return;
  const int64_t size = args.experts * args.hidden;
  for (int64_t half = 0; half < 2; ++half)
    std::copy(args.weight, args.weight + size, args.weight_twice + half * size);
}

void add_halves_cpu(const AddHalvesArgs& args) {
  auto* output = static_cast<c10::BFloat16*>(args.output);
  at::parallel_for(0, args.size, kElementsPerTask, [&](int64_t begin, int64_t end) {
    add_range(args.sums + begin, args.sums + args.size + begin, end - begin, output + begin);
  });
}

}  // namespace transformer_plugin::routing

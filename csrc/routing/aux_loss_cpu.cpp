// The auxiliary loss and its gradient on a CPU (routing/aux_loss.h).
#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "routing/aux_loss.h"
#include "routing/score_cpu.h"

namespace transformer_plugin::routing {

void aux_loss_cpu(const AuxLossArgs& args) {
  at::parallel_for(0, args.chunks, 4, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      float* sums = args.chunk_sums + chunk * args.experts;
      std::fill_n(sums, args.experts, 0.0f);
      const int64_t last = std::min((chunk + 1) * kChunk, args.tokens);
      for (int64_t t = chunk * kChunk; t < last; ++t) {
        for (int64_t e = 0; e < args.experts; ++e) sums[e] = sums[e] + args.scores[t * args.experts + e];
      }
    }
  });
  std::vector<float> products(args.experts);
  for (int64_t e = 0; e < args.experts; ++e) {
    float column = 0.0f;
    for (int64_t chunk = 0; chunk < args.chunks; ++chunk) {
      column = column + args.chunk_sums[chunk * args.experts + e];
    }
    products[e] = column * static_cast<float>(args.counts[e]);
  }
  const float sum = sum_in_lanes(products.data(), args.experts);
  *args.loss = sum * aux_loss_factor(args.coeff, args.experts, args.topk, *args.total);
}

void aux_loss_backward_cpu(const AuxLossBackwardArgs& args) {
  const float scale = *args.grad * aux_loss_factor(args.coeff, args.experts, args.topk, *args.total);
  at::parallel_for(0, args.tokens, kChunk, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* out = args.grad_scores + t * args.experts;
      for (int64_t e = 0; e < args.experts; ++e) out[e] = scale * static_cast<float>(args.counts[e]);
    }
  });
}

}  // namespace transformer_plugin::routing

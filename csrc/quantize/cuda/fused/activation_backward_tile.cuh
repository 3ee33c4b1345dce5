// The backward of an activation with a gate on a tile of 128x128, for the kernels that quantize its results.
#pragma once

#include "activation/activation.h"
#include "activation/functions.h"
#include "activation/row_sums.cuh"
#include "quantize/cuda/tile/tile_fragment.cuh"

namespace transformer_plugin::activation {

using quantize::kColsPerThread;
using quantize::kRowsPerThread;
using quantize::kThreads;
using quantize::Tile;
using quantize::Vector4;
static_assert(kSumTile == quantize::kTile, "a tile holds whole trees of the row sums");

// Computes the gradients of a thread's rows and calls `use(row, gradients of the gate, gradients of the
// linear part)`. `args` has no outputs. The loads of kBatch rows are issued together.
template <typename T, int kBatch, typename Function, typename Use>
__device__ __forceinline__ void for_each_gradient(Function function, const ActivationBackwardArgs& args,
                                                  const Tile& tile, int warp, int lane, Use&& use) {
  const int64_t features = args.features;
  const quantize::FragmentReader<T> grad(args.grad, features, tile, warp, lane);
  const quantize::FragmentReader<T> input(args.input, 2 * features, tile, warp, lane);
  const float own_prob = quantize::load_row_scalar(args.probs, tile, warp, lane);
#pragma unroll
  for (int start = 0; start < kRowsPerThread; start += kBatch) {
    Vector4<T> grads[kBatch], gates[kBatch], linears[kBatch];
    grad.read(start, 0, grads);
    input.read(start, 0, gates);
    input.read(start, features, linears);
    RowSums<kBatch, kWarpSize> sums;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float prob = __shfl_sync(0xffffffffu, own_prob, start + i);
      const quantize::Floats4<T> g(grads[i]), gate(gates[i]), linear(linears[i]);
      float of_gate[kColsPerThread], of_linear[kColsPerThread], terms[kColsPerThread];
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) {
        const ActivationGradient d = function.gradient(g.at[c], gate.at[c], linear.at[c], prob);
        of_gate[c] = d.gate;
        of_linear[c] = d.linear;
        terms[c] = g.at[c] * d.activation;
      }
      sums.at[i] = (terms[0] + terms[1]) + (terms[2] + terms[3]);
      use(start + i, quantize::rounded4<T>(of_gate), quantize::rounded4<T>(of_linear));
    }
    if (!args.partial) continue;
    sums.fold(lane);
    const int row = warp * kRowsPerThread + start + RowSums<kBatch, kWarpSize>::row_of(lane);
    if (lane < kBatch && row < tile.rows) {
      args.partial[tile.col_tile * args.rows + tile.row + row] = sums.at[0] + 0.0f;
    }
  }
}

}  // namespace transformer_plugin::activation

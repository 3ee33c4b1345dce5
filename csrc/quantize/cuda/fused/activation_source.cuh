// The source of the tile kernels that quantize an activation with a gate: its value, rounded to the input's dtype.
#pragma once

#include "activation/functions.h"
#include "quantize/cuda/tile/tile_fragment.cuh"

namespace transformer_plugin::quantize {

template <typename T, typename Function>
struct ActivationSource {
  using Value = T;
  static constexpr int kBlocks = sizeof(T) == 2 ? 3 : 1;

  const float* probs;  // [rows], or null for 1
  Function function;

  template <typename Args>
  __device__ __forceinline__ void load(const Args& args, const Tile& tile, int warp, int lane,
                                       TileFragment<T>& values) const {
    const int64_t features = args.layout.cols;
    const FragmentReader<T> input(args.input, 2 * features, tile, warp, lane);
    const float own_prob = load_row_scalar(probs, tile, warp, lane);
    constexpr int kBatch = kRowsInFlight<T>;
#pragma unroll
    for (int start = 0; start < kRowsPerThread; start += kBatch) {
      Vector4<T> gates[kBatch], linears[kBatch];
      input.read(start, 0, gates);
      input.read(start, features, linears);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float prob = __shfl_sync(0xffffffffu, own_prob, start + i);
        const Floats4<T> gate(gates[i]), linear(linears[i]);
        float out[kColsPerThread];
#pragma unroll
        for (int c = 0; c < kColsPerThread; ++c) {
          out[c] = function.value(gate.at[c], linear.at[c], prob);
        }
        values.at[start + i][0] = two_from_floats<T>(out[0], out[1]);
        values.at[start + i][1] = two_from_floats<T>(out[2], out[3]);
      }
    }
  }
};

}  // namespace transformer_plugin::quantize

// Epilogues of grouped_gemm.cuh with an activation that has a gate. The accumulators are h = [gate, linear], its input:
//
//   act[i, f] = function.value(gate[i, f], linear[i, f], probs[i])     (activation/functions.h)
//
// h is rounded to T before the activation, as if it had been stored and read. It is stored too if h_data is
// not null.
//
// A thread needs the gate and the linear value of the same feature, so a tile's 256 columns are 128 of the
// gate and the 128 matching ones of the linear part. If h is interleaved (32 columns of each in turn),
// consecutive columns are already so. Otherwise a tile loads two TMA boxes of B from the gate's rows and two
// from those of the linear part.
#pragma once

#include "activation/functions.h"
#include "common/ptx/tma.cuh"
#include "gemm/sm90/epilogue/activation.h"
#include "gemm/sm90/grouped_gemm.cuh"

namespace transformer_plugin::gemm::sm90 {

inline constexpr int kHalfTileColumns = kTileColumns / 2;
inline constexpr int kWarpRows = 16;  // rows of a warpgroup's tile that one warp has

// Two values after rounding to T.
template <typename T>
__device__ __forceinline__ float2 round_to(float x, float y) {
  return unpack2<T>(pack2<T>(x, y));
}

// The probabilities of a thread's two rows; 1 for rows that are not of the group.
struct ThreadProbs {
  float low = 1.0f, high = 1.0f;  // of row0 and of row0 + 8

  __device__ __forceinline__ ThreadProbs(const float* probs, int row0, int group_end) {
    if (!probs) return;
    if (row0 < group_end) low = probs[row0];
    if (row0 + 8 < group_end) high = probs[row0 + 8];
  }
};

// Tensor map of `columns` columns of a matrix that has the rows and the dtype of the GEMM.
inline CUtensorMap rows_map(const GroupedGemmArgs& gemm, const void* data, int64_t columns, int64_t stride) {
  return tensor_map({.data = data,
                     .dtype = gemm.dtype,
                     .columns = columns,
                     .rows = gemm.rows,
                     .count = 1,
                     .row_stride = stride,
                     .matrix_stride = gemm.rows * stride},
                    kBoxRows);
}

// What the epilogues of activations share.
template <typename T, typename Function, bool interleaved>
struct ActivationEpilogueBase {
  static_assert(activation::kIsGated<Function>, "a tile is half gate, half linear part");
  static constexpr bool kAllowsHalfN = false;
  CUtensorMap h, linear;  // interleaved: all columns of h. Otherwise `h` has the gate's, `linear` the others
  T* h_data;              // [T, 2 features], or null if h is not stored
  const float* probs;
  int features;
  // Without [[no_unique_address]]: host and device compiler would lay out the derived classes differently.
  Function function;

  void set_activation(const ActivationKernelArgs& args) {
    const GroupedGemmArgs& gemm = args.product;
    const int64_t half = gemm.n / 2;
    h_data = static_cast<T*>(gemm.out);
    probs = args.probs;
    function = Function::of(args.activation);
    features = static_cast<int>(half);
    if (!h_data) return;
    h = rows_map(gemm, h_data, interleaved ? 2 * half : half, 2 * half);
    if (!interleaved) linear = rows_map(gemm, h_data + half, half, 2 * half);
  }

  __device__ __forceinline__ void prefetch_tensormaps() const {
    if (!h_data) return;
    prefetch_tensormap(h);
    if (!interleaved) prefetch_tensormap(linear);
  }
  template <typename SharedStorage>
  static __device__ __forceinline__ void init_barriers(SharedStorage&) {}

  static __device__ __forceinline__ int b_row(const GroupedGemmParams& args, int tile_column, int box) {
    if (interleaved) return tile_column * kTileColumns + box * kBoxRows;
    constexpr int kHalfBoxes = kBBoxes / 2;  // boxes of the gate's columns
    return tile_column * kHalfTileColumns + box % kHalfBoxes * kBoxRows + box / kHalfBoxes * (args.n / 2);
  }
  static __device__ __forceinline__ int output_column(const GroupedGemmParams& args,
                                                      const WarpgroupTile& wg_tile, int j) {
    if (interleaved) return wg_tile.column + j * 8;
    return wg_tile.column / 2 + j % (kHalfTileColumns / 8) * 8 + j / (kHalfTileColumns / 8) * (args.n / 2);
  }

  template <typename SharedStorage>
  __device__ __forceinline__ void prefetch_source(const GroupedGemmParams&, const WarpgroupTile&,
                                                  SharedStorage&) const {}

  // Stores a box to a matrix with `columns` columns, the first of which is at `data`.
  static __device__ __forceinline__ void store_columns(const CUtensorMap& map, uint8_t* box, T* data,
                                                       int64_t stride, int column, int columns,
                                                       const WarpgroupTile& wg_tile) {
    if (wg_tile.row + kBoxRows > wg_tile.group_end) {  // rows of the next group follow
      store_rows_of_group<T>(box, data, stride, column, columns, wg_tile);
    } else if (threadIdx.x % kWarpgroupSize == 0) {
      tma_store(map, box, column, wg_tile.row, 0);
    }
  }

  // Stores the accumulators as h, if that is wanted.
  template <int kBoxes>
  __device__ __forceinline__ void store_h(const WarpgroupTile& wg_tile, const float (&acc)[kAccumulators],
                                          uint8_t (&boxes)[kBoxes][kBoxBytes]) const {
    if (!h_data) return;
    const int column = wg_tile.column / 2;  // within the gate's or the linear columns
    const int64_t stride = int64_t{2} * features;
    store_accumulators<T>(acc, boxes, wg_tile.consumer, [&](uint8_t* box, int offset) {
      if (interleaved) {
        store_columns(h, box, h_data, stride, wg_tile.column + offset, 2 * features, wg_tile);
      } else if (offset < kHalfTileColumns) {
        // `h` covers only the gate's columns, so TMA does not write past them into the linear ones.
        store_columns(h, box, h_data, stride, column + offset, features, wg_tile);
      } else {
        store_columns(linear, box, h_data + features, stride, column + offset - kHalfTileColumns, features,
                      wg_tile);
      }
    });
  }

  // Zeroes the rows of h past the groups.
  __device__ __forceinline__ void zero_tail_rows(const GroupedGemmParams& args, int warps, int warp) const {
    if (!h_data || !args.zero_tail) return;
    sm90::zero_tail_rows(args, h_data, int64_t{2} * features, 2 * features, warps, warp);
  }

  // Replaces the first half of the accumulators by the activation, in the order of features.
  __device__ __forceinline__ void activate(const ThreadProbs& prob, float (&acc)[kAccumulators]) const {
    constexpr int kRun = interleaved ? 4 : kHalfTileColumns / 8;  // consecutive blocks of 8 gate columns
#pragma unroll
    for (int j = 0; j < kHalfTileColumns / 8; ++j) {
      const int gate = (j / kRun * 2 * kRun + j % kRun) * 4, linear = gate + kRun * 4;
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const float2 x = round_to<T>(acc[gate + i], acc[gate + i + 1]);
        const float2 y = round_to<T>(acc[linear + i], acc[linear + i + 1]);
        const float row_prob = i == 0 ? prob.low : prob.high;
        acc[j * 4 + i] = function.value(x.x, y.x, row_prob);
        acc[j * 4 + i + 1] = function.value(x.y, y.y, row_prob);
      }
    }
  }

  static __device__ __forceinline__ void wait_stores() {
    if (threadIdx.x % kWarpgroupSize == 0) cp_async_bulk_wait_group_read<0>();
  }
};

// Stores act [T, features] in T.
template <typename T, typename Function, bool interleaved>
struct ActivationEpilogue : ActivationEpilogueBase<T, Function, interleaved> {
  CUtensorMap act;
  T* act_data;

  using Args = ActivationKernelArgs;
  static const GroupedGemmArgs& gemm_args(const Args& args) { return args.product; }
  static ActivationEpilogue make(const Args& args) {
    ActivationEpilogue epilogue{};
    epilogue.set_activation(args);
    epilogue.act_data = static_cast<T*>(args.act);
    epilogue.act = rows_map(args.product, args.act, args.product.n / 2, args.product.n / 2);
    return epilogue;
  }

  __device__ __forceinline__ void prefetch_tensormaps() const {
    prefetch_tensormap(act);
    ActivationEpilogueBase<T, Function, interleaved>::prefetch_tensormaps();
  }
  __device__ __forceinline__ void zero_tail_rows(const GroupedGemmParams& args, int warps, int warp) const {
    ActivationEpilogueBase<T, Function, interleaved>::zero_tail_rows(args, warps, warp);
    if (args.zero_tail) sm90::zero_tail_rows(args, act_data, this->features, this->features, warps, warp);
  }

  template <typename SharedStorage>
  __device__ __forceinline__ void store(const GroupedGemmParams&, const WarpgroupTile& wg_tile,
                                        float (&acc)[kAccumulators], SharedStorage& shared) const {
    auto& boxes = shared.out[wg_tile.consumer];
    const ThreadProbs prob(this->probs, thread_row(wg_tile.row), wg_tile.group_end);
    this->store_h(wg_tile, acc, boxes);
    this->activate(prob, acc);
    store_accumulators<T, kHalfTileColumns>(acc, boxes, wg_tile.consumer, [&](uint8_t* box, int offset) {
      this->store_columns(act, box, act_data, this->features, wg_tile.column / 2 + offset, this->features,
                          wg_tile);
    });
  }
};

}  // namespace transformer_plugin::gemm::sm90

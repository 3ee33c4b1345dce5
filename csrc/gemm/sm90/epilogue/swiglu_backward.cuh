// Epilogue of grouped_gemm.cuh that differentiates SwiGLU. The accumulators are the gradient of SwiGLU's
// output act [T, F]; with h = [gate, linear] [T, 2F] as input, the epilogue stores
//
//   grad_h [T, 2F]                   the gradients of gate and linear (activation/swiglu.h)
//   partial[f / 128, i] (optional)   sum over 128 features of grad_act[i, f] * act[i, f], where act is before
//                                    the factor probs: terms of the gradient of probs
//
// Each warp works alone on its 16 rows, 32 features at a time. It has two slots of 16 rows x (32 gate + 32
// linear) columns in shared memory, in the place of output boxes. TMA loads h into a slot, the warp replaces
// the values by their gradients, and TMA stores the slot, while the other slot is loaded. The first slot of a
// tile is loaded during the mainloop.
#pragma once

#include "gemm/sm90/epilogue/swiglu.cuh"

namespace transformer_plugin::gemm::sm90 {

inline constexpr int kSlotColumns = 32, kSlots = 2;
inline constexpr int kHalfBytes = kSlotColumns * 2, kSlotBytes = kWarpRows * 2 * kHalfBytes;
inline constexpr int kConsumerWarps = kConsumerWarpgroups * kWarpgroupSize / kWarpSize;
static_assert(kConsumerWarps * kSlots * kSlotBytes == sizeof(SharedStorageDefault::out),
              "slots replace the output boxes");

struct SwigluBackwardSharedStorage : SharedStorageDefault {
  uint64_t loaded[kConsumerWarps][kSlots];
};
static_assert(sizeof(SwigluBackwardSharedStorage) <= kMaxSharedBytes, "shared memory of a CTA");

// Address of a 16-byte chunk of a slot, with the 64-byte swizzle. half: 0 for the gate's columns, 1 for the
// linear ones.
__device__ __forceinline__ uint8_t* slot_chunk(uint8_t* slot, int row, int half, int chunk) {
  return slot + (row * 2 + half) * kHalfBytes + (chunk ^ row % 4) * 16;
}

// The sum of a row over 32 columns, in the order that activation/swiglu.h defines. low[j] and high[j] are the
// lane's sums of two columns of the j-th 8 columns, for its two rows. Even lanes return the sum of the first
// row, odd lanes that of the second.
__device__ __forceinline__ float reduce_slot(const float (&low)[4], const float (&high)[4]) {
  const bool second = threadIdx.x & 1, right = threadIdx.x & 2;
  float fours[4], eights[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    fours[i] = (second ? high[i] : low[i]) + __shfl_xor_sync(~0u, second ? low[i] : high[i], 1);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    eights[i] = (right ? fours[2 + i] : fours[i]) + __shfl_xor_sync(~0u, right ? fours[i] : fours[2 + i], 2);
  }
  const float sixteen = eights[0] + eights[1];
  return sixteen + __shfl_xor_sync(~0u, sixteen, 2);
}

template <typename T>
struct SwigluBackwardEpilogue {
  static constexpr bool kAllowsHalfN = false;
  CUtensorMap h, grad_h;  // gate_linear_map
  T* grad_data;
  const float* probs;
  float* partial;  // [ceil(F / 128), T], or null
  int interleaved;

  using Args = SwigluBackwardKernelArgs;
  static const GroupedGemmArgs& gemm_args(const Args& args) { return args.product; }
  static SwigluBackwardEpilogue make(const Args& args) {
    const GroupedGemmArgs& gemm = args.product;
    const auto map = [&](const void* data) {
      return gate_linear_map({data, gemm.dtype, gemm.rows, gemm.n, args.interleaved}, kWarpRows);
    };
    return {map(args.h), map(gemm.out), static_cast<T*>(gemm.out),
            args.probs,  args.partial,  args.interleaved};
  }

  // The slots of a warp, and its first row.
  struct WarpSlots {
    uint8_t* slots;
    uint64_t* loaded;
    int row;

    __device__ __forceinline__ WarpSlots(const WarpgroupTile& wg_tile, SwigluBackwardSharedStorage& shared) {
      const int warp = threadIdx.x % kWarpgroupSize / kWarpSize;
      slots = shared.out[wg_tile.consumer][0] + warp * (kSlots * kSlotBytes);
      loaded = shared.loaded[wg_tile.consumer * (kWarpgroupSize / kWarpSize) + warp];
      row = wg_tile.row + warp * kWarpRows;
    }
    __device__ __forceinline__ uint8_t* slot(int index) const { return slots + index % kSlots * kSlotBytes; }
  };

  __device__ __forceinline__ void prefetch_tensormaps() const {
    prefetch_tensormap(h);
    prefetch_tensormap(grad_h);
  }
  __device__ __forceinline__ void zero_tail_rows(const GroupedGemmParams& args, int warps, int warp) const {
    sm90::zero_tail_rows(args, grad_data, args.out_row_stride, 2 * args.n, warps, warp);
  }
  static __device__ __forceinline__ void init_barriers(SwigluBackwardSharedStorage& shared) {
    for (auto& barriers : shared.loaded) {
      for (uint64_t& barrier : barriers) mbarrier_init(&barrier, 1);
    }
  }
  static __device__ __forceinline__ int b_row(const GroupedGemmParams&, int tile_column, int box) {
    return tile_column * kTileColumns + box * kBoxRows;
  }
  static __device__ __forceinline__ int b_row_of_acc(const GroupedGemmParams&, const WarpgroupTile& wg_tile,
                                                     int j) {
    return wg_tile.column + j * 8;
  }

  // Loads the index-th 32 columns of h into their slot. Called by one lane.
  __device__ __forceinline__ void load_slot(const WarpSlots& own, const WarpgroupTile& wg_tile,
                                            int index) const {
    uint64_t* loaded = &own.loaded[index % kSlots];
    const int column = wg_tile.column + index * kSlotColumns;
    mbarrier_arrive_expect_tx(loaded, kSlotBytes);
    tma_load(own.slot(index), h, loaded, interleaved ? 0 : column, interleaved ? column / 16 : 0, own.row);
  }

  // Loads the first slot of a tile. The previous tile's last but one store used it.
  __device__ __forceinline__ void prefetch_source(const GroupedGemmParams&, const WarpgroupTile& wg_tile,
                                                  SwigluBackwardSharedStorage& shared) const {
    const WarpSlots own(wg_tile, shared);
    if (threadIdx.x % kWarpSize == 0 && own.row < wg_tile.end_row) {
      tma_store_wait<1>();
      load_slot(own, wg_tile, 0);
    }
    __syncwarp();  // WGMMA needs a converged warp
  }

  // Replaces 32 columns of h in a slot by their gradients. low and high are the operands of reduce_slot.
  static __device__ __forceinline__ void compute_gradients(uint8_t* slot, const float* acc, int columns_left,
                                                           const ThreadProbs& prob, float (&low)[4],
                                                           float (&high)[4]) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {  // 16 columns
      uint8_t* gate_row = slot_chunk(slot, lane % 16, 0, pair * 2 + lane / 16);
      uint8_t* linear_row = slot_chunk(slot, lane % 16, 1, pair * 2 + lane / 16);
      uint32_t gates[4], linears[4];
      ldmatrix_x4(gates, gate_row);
      ldmatrix_x4(linears, linear_row);
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // 8 columns of the first row, of the second row, then the next 8 columns
        const float2 grad = round_to<T>(acc[pair * 8 + i * 2], acc[pair * 8 + i * 2 + 1]);
        const float2 gate = unpack2<T>(gates[i]), linear = unpack2<T>(linears[i]);
        const float own = i % 2 == 0 ? prob.low : prob.high;
        const auto x = activation::swiglu_gradient(grad.x, gate.x, linear.x, own);
        const auto y = activation::swiglu_gradient(grad.y, gate.y, linear.y, own);
        gates[i] = pack2<T>(x.gate, y.gate);
        linears[i] = pack2<T>(x.linear, y.linear);
        const int eight = pair * 2 + i / 2;
        const float terms = grad.x * x.activation + grad.y * y.activation;
        // Past the last column, zeros times an infinite operand may be NaN.
        (i % 2 == 0 ? low : high)[eight] = eight * 8 < columns_left ? terms : 0.0f;
      }
      __syncwarp();  // all lanes have read
      stmatrix_x4(gate_row, gates);
      stmatrix_x4(linear_row, linears);
    }
  }

  // Stores a slot, the rows of the group only. Called by all lanes.
  __device__ __forceinline__ void store_slot(const GroupedGemmParams& args, const WarpgroupTile& wg_tile,
                                             const WarpSlots& own, int index) const {
    uint8_t* slot = own.slot(index);
    const int lane = threadIdx.x % kWarpSize, column = wg_tile.column + index * kSlotColumns;
    fence_proxy_async();
    __syncwarp();
    if (own.row + kWarpRows <= wg_tile.end_row) {
      if (lane == 0)
        tma_store(grad_h, slot, interleaved ? 0 : column, interleaved ? column / 16 : 0, own.row);
    } else {  // rows of the next group follow
      constexpr int kRowChunks = kHalfBytes / 16, kChunkElements = 8;
      T* to = grad_data + own.row * args.out_row_stride + (interleaved ? column * 2 : column);
      for (int i = lane; i < kWarpRows * 2 * kRowChunks; i += kWarpSize) {
        const int row = i / (2 * kRowChunks), half = i / kRowChunks % 2, chunk = i % kRowChunks;
        if (own.row + row < wg_tile.end_row && column + chunk * kChunkElements < args.n) {
          *reinterpret_cast<uint4*>(to + row * args.out_row_stride +
                                    half * (interleaved ? kSlotColumns : args.n) + chunk * kChunkElements) =
              *reinterpret_cast<const uint4*>(slot_chunk(slot, row, half, chunk));
        }
      }
      fence_proxy_async();
      __syncwarp();  // the slot may be loaded again
    }
    if (lane == 0) tma_store_commit();  // an empty group too: tma_store_wait counts groups
  }

  __device__ __forceinline__ void store(const GroupedGemmParams& args, const WarpgroupTile& wg_tile,
                                        float (&acc)[kAccumulators],
                                        SwigluBackwardSharedStorage& shared) const {
    constexpr int kCount = kTileColumns / kSlotColumns;
    const WarpSlots own(wg_tile, shared);
    if (own.row >= wg_tile.end_row) return;
    const int lane = threadIdx.x % kWarpSize, first = thread_row(wg_tile);
    const ThreadProbs prob(probs, first, wg_tile.end_row);
    float row_sums[kCount];
#pragma unroll
    for (int index = 0; index < kCount; ++index) {
      if (lane == 0 && index + 1 < kCount) {
        tma_store_wait<0>();
        load_slot(own, wg_tile, index + 1);
      }
      sm90::mbarrier_wait(&own.loaded[index % kSlots], index / kSlots % 2);
      __syncwarp();  // ldmatrix needs a converged warp
      float low[4], high[4];
      const int columns_left = args.n - wg_tile.column - index * kSlotColumns;
      compute_gradients(own.slot(index), &acc[index * kSlotColumns / 2], columns_left, prob, low, high);
      if (partial) row_sums[index] = reduce_slot(low, high);
      store_slot(args, wg_tile, own, index);
    }
    if (!partial) return;
    const int row = lane % 2 == 0 ? first : first + 8;
    if (lane & 2 || row >= wg_tile.end_row) return;
    constexpr int kSumTiles = kTileColumns / activation::kSumTile, kSlotsPerSumTile = kCount / kSumTiles;
#pragma unroll
    for (int sum_tile = 0; sum_tile < kSumTiles; ++sum_tile) {
      const int column = wg_tile.column + sum_tile * activation::kSumTile;
      if (column >= args.n) return;
      partial[static_cast<int64_t>(column / activation::kSumTile) * args.rows + row] =
          activation::sum_of_tile<kSlotsPerSumTile>(row_sums + sum_tile * kSlotsPerSumTile) + 0.0f;
    }
  }

  static __device__ __forceinline__ void wait_stores() {
    if (threadIdx.x % kWarpSize == 0) tma_store_wait<0>();
  }
};

}  // namespace transformer_plugin::gemm::sm90

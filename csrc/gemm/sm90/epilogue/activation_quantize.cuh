// Epilogues of grouped_gemm.cuh that quantize the activation. act [T, F] (epilogue/activation.cuh) is
// stored as FP8 data and scales along rows, of 1x128 blocks (FP32) or of 1x32 blocks (E8M0, MXFP8), with the
// bits that quantizing act would have.
//
// A tile has 128 features of each row: one 1x128 block, or four 1x32 blocks. The four lanes of a quad have a
// row (the layout of WGMMA accumulators, common/ptx/wgmma.cuh), so they find its scales with warp shuffles.
// Data goes to global memory through shared memory: each warp uses its 16 rows of an output box and waits for
// no other warp.
#pragma once

#include "common/ptx/barrier.cuh"
#include "common/ptx/stmatrix.cuh"
#include "common/ptx/tma.cuh"
#include "gemm/sm90/epilogue/activation.cuh"
#include "quantize/cuda/mxfp8/tile.cuh"

namespace transformer_plugin::gemm::sm90 {

inline constexpr int kQuadLanes = 4;                        // lanes that have the same rows
inline constexpr int kColumnGroups = kHalfTileColumns / 8;  // 8 columns, of which a lane has two
inline constexpr int kDataChunks = kHalfTileColumns / 16;   // 16 bytes of FP8 data of a row
static_assert(kHalfTileColumns == quantize::kTile && kHalfTileColumns == kSwizzleBytes,
              "a row of a tile is a row of a quantization tile, and its FP8 data is a row of a box");

// act of a thread's two rows, rounded to T as if it had been stored and read. Zero past the last column,
// where WGMMA may have produced NaN.
template <typename T>
struct ActPairs {
  using Packed2 = quantize::Packed2<T>;
  using Order = quantize::MagnitudeOrder<T>;
  Packed2 pairs[2][kColumnGroups];  // [row][group of 8 columns]

  // From activated accumulators; `columns` is the number of columns from the tile's first on.
  __device__ __forceinline__ ActPairs(const float (&acc)[kAccumulators], int columns) {
#pragma unroll
    for (int j = 0; j < kColumnGroups; ++j) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float* values = &acc[j * 4 + row * 2];
        pairs[row][j] =
            j * 8 < columns ? quantize::two_from_floats<T>(values[0], values[1]) : quantize::zeros<T>();
      }
    }
  }
  // The lane's largest magnitude of each block: kBlocks blocks of the first row, then those of the second.
  template <int kBlocks, typename Maxima>
  __device__ __forceinline__ void find_maxima(Maxima& maxima) const {
    constexpr int kGroupsPerBlock = kColumnGroups / kBlocks;
#pragma unroll
    for (int block = 0; block < 2 * kBlocks; ++block) {
      const Packed2* block_pairs = &pairs[block / kBlocks][block % kBlocks * kGroupsPerBlock];
      Packed2 largest = block_pairs[0];
#pragma unroll
      for (int j = 1; j < kGroupsPerBlock; ++j) {
        largest = quantize::larger_magnitudes(largest, block_pairs[j]);
      }
      maxima.at[block] = Order::of(largest);
    }
  }
  // The largest magnitude of both values of an item; 0 if both are NaN.
  static __device__ __forceinline__ float amax(typename Order::Item item) {
    const float2 two = quantize::to_floats(Order::two(item));
    return fmaxf(fmaxf(fabsf(two.x), fabsf(two.y)), 0.0f);
  }
};

// The row whose scales a lane computes: even lanes the first of their two rows, odd lanes the second.
__device__ __forceinline__ int scale_row_of_lane(int lane) { return lane / kQuadLanes + lane % 2 * 8; }

// FP32 scales of 1x128 blocks.
struct Fp8BlockRowScales {
  float row_scales[2];  // multipliers of the values of the lane's two rows

  template <typename T>
  __device__ __forceinline__ Fp8BlockRowScales(const ActPairs<T>& act, const quantize::QuantizeArgs& args,
                                               const quantize::Tile& tile, int lane) {
    using Order = quantize::MagnitudeOrder<T>;
    quantize::DistributedMaxima<2, 2, Order> maxima;
    act.template find_maxima<1>(maxima);
    maxima.distribute(lane);
    const auto other_lanes = __shfl_xor_sync(~0u, maxima.at[0], 2);
    const float amax = ActPairs<T>::amax(Order::larger(maxima.at[0], other_lanes));
    const float lane_scale = quantize::encode_scale(amax, args.rule);  // of the row scale_row_of_lane()
    const float other_scale = __shfl_xor_sync(~0u, lane_scale, 1);
    row_scales[0] = lane % 2 == 0 ? lane_scale : other_scale;
    row_scales[1] = lane % 2 == 0 ? other_scale : lane_scale;
    if (lane % kQuadLanes < 2 && scale_row_of_lane(lane) < tile.rows) {
      args.scale[quantize::scale_index(args.layout, tile, false, scale_row_of_lane(lane), 0)] =
          1.0f / lane_scale;
    }
  }
  __device__ __forceinline__ float scale(int row, int) const { return row_scales[row]; }
};

// E8M0 scales of 1x32 blocks. Each lane computes the scales of two blocks of one row; shuffles give every
// lane the four scales of both rows.
struct Mxfp8RowScales {
  uint32_t words[2];

  template <typename T>
  __device__ __forceinline__ Mxfp8RowScales(const ActPairs<T>& act, const quantize::QuantizeArgs& args,
                                            const quantize::Tile& tile, int lane) {
    using Maxima =
        quantize::DistributedMaxima<kQuadLanes, 2 * quantize::kMxBlocksPerRow, quantize::MagnitudeOrder<T>>;
    static_assert(
        Maxima::kCount == 2 && Maxima::lane_of(0) == 0 && Maxima::lane_of(2) == 2 && Maxima::lane_of(4) == 1,
        "bit 0 of the lane is the row, bit 1 the half of the blocks");
    Maxima maxima;
    act.template find_maxima<quantize::kMxBlocksPerRow>(maxima);
    maxima.distribute(lane);
    uint32_t lane_word = exponent(args, ActPairs<T>::amax(maxima.at[0])) |
                         exponent(args, ActPairs<T>::amax(maxima.at[1])) << 8;
    lane_word <<= lane % kQuadLanes / 2 * 16;
    lane_word |= __shfl_xor_sync(~0u, lane_word, 2);
    const uint32_t other_word = __shfl_xor_sync(~0u, lane_word, 1);
    words[0] = lane % 2 == 0 ? lane_word : other_word;
    words[1] = lane % 2 == 0 ? other_word : lane_word;
    if (lane % kQuadLanes < 2 && scale_row_of_lane(lane) < tile.rows) {
      const quantize::ScaleWords scale_words(args.layout, tile, false);
      quantize::store_evict_last(args.exponents + scale_words.at(scale_row_of_lane(lane)), lane_word);
    }
  }
  static __device__ __forceinline__ uint32_t exponent(const quantize::QuantizeArgs& args, float amax) {
    const uint32_t bits = args.element == DType::kFloat8E5M2
                              ? quantize::quick_e8m0_bits<DType::kFloat8E5M2>(amax)
                              : quantize::quick_e8m0_bits<DType::kFloat8E4M3>(amax);
    return bits >> 23;
  }
  __device__ __forceinline__ float scale(int row, int column_group) const {
    const int block = column_group / (quantize::kMxBlock / 8);
    return quantize::quick_e8m0_multiplier((words[row] >> (8 * block) & 0xffu) << 23);
  }
};

// Writes a warp's FP8 data to its rows of a box. stmatrix stores 16-bit elements: a word holds a lane's pairs
// of two groups of 8 columns, so the 16 bytes of 16 columns are in an order that to_column_order() corrects.
template <DType element, typename T, typename Scales>
__device__ __forceinline__ void quantize_to_smem(const ActPairs<T>& act, const Scales& scales, uint8_t* rows,
                                                 int lane) {
  const auto pair = [&](int row, int column_group) {
    const float2 values = quantize::to_floats(act.pairs[row][column_group]);
    const float scale = scales.scale(row, column_group);
    return quantize::encode2<element>(values.x * scale, values.y * scale);
  };
  const auto word = [&](int row, int chunk) { return pair(row, chunk * 2) | pair(row, chunk * 2 + 1) << 16; };
#pragma unroll
  for (int chunk = 0; chunk < kDataChunks; chunk += 2) {
    const uint32_t words[] = {word(0, chunk), word(1, chunk), word(0, chunk + 1), word(1, chunk + 1)};
    stmatrix_x4(swizzled(rows, lane % 16, chunk + lane / 16), words);
  }
}

// 16 bytes as quantize_to_smem() wrote them, in the order of columns.
__device__ __forceinline__ uint4 to_column_order(uint4 chunk) {
  return make_uint4(__byte_perm(chunk.x, chunk.y, 0x5410), __byte_perm(chunk.z, chunk.w, 0x5410),
                    __byte_perm(chunk.x, chunk.y, 0x7632), __byte_perm(chunk.z, chunk.w, 0x7632));
}

// Copies a warp's rows of a box to global memory.
__device__ __forceinline__ void store_quantized(const quantize::QuantizeArgs& args,
                                                const quantize::Tile& tile, uint8_t* rows, int lane) {
  constexpr int kRowsAtATime = kWarpSize / kDataChunks;
  const bool whole = args.layout.cols % 16 == 0;  // otherwise rows begin at multiples of 8 bytes
  const int column = lane % kDataChunks * 16;
#pragma unroll
  for (int row = lane / kDataChunks; row < kWarpRows; row += kRowsAtATime) {
    const uint4 data =
        to_column_order(*reinterpret_cast<const uint4*>(swizzled(rows, row, lane % kDataChunks)));
    if (row >= tile.rows || column >= tile.cols) continue;
    uint8_t* to = args.data + (tile.row + row) * args.layout.cols + tile.col + column;
    if (whole) {
      *reinterpret_cast<uint4*>(to) = data;
    } else {
      *reinterpret_cast<uint2*>(to) = make_uint2(data.x, data.y);
      if (column + 8 < tile.cols) *reinterpret_cast<uint2*>(to + 8) = make_uint2(data.z, data.w);
    }
  }
}

template <typename T, typename Function, bool interleaved, typename Scales>
struct ActivationQuantizeEpilogue : ActivationEpilogueBase<T, Function, interleaved> {
  quantize::QuantizeArgs quantize_args;  // of act [T, F] as one matrix; `input` is not read

  using Args = ActivationQuantizeKernelArgs;
  static const GroupedGemmArgs& gemm_args(const Args& args) { return args.activation.product; }
  static ActivationQuantizeEpilogue make(const Args& args) {
    ActivationQuantizeEpilogue epilogue{};
    epilogue.set_activation(args.activation);
    epilogue.quantize_args = args.quantized_act;
    return epilogue;
  }

  // The 16 rows x 128 columns of act that a warp quantizes.
  __device__ __forceinline__ quantize::Tile tile_of_warp(const WarpgroupTile& wg_tile) const {
    quantize::Tile tile{};
    tile.row = wg_tile.row + threadIdx.x % kWarpgroupSize / kWarpSize * kWarpRows;
    tile.rows = wg_tile.group_end - static_cast<int>(tile.row);  // may be more than 16, or none
    tile.col = wg_tile.column / 2;
    tile.col_tile = wg_tile.column / kTileColumns;
    tile.cols = min(this->features - wg_tile.column / 2, kHalfTileColumns);
    return tile;
  }

  template <typename SharedStorage>
  __device__ __forceinline__ void store(const GroupedGemmParams&, const WarpgroupTile& wg_tile,
                                        float (&acc)[kAccumulators], SharedStorage& shared) const {
    auto& boxes = shared.out[wg_tile.consumer];
    const ThreadProbs prob(this->probs, thread_row(wg_tile.row), wg_tile.group_end);
    this->store_h(wg_tile, acc, boxes);
    this->activate(prob, acc);
    const int lane = threadIdx.x % kWarpSize;
    const quantize::Tile tile = tile_of_warp(wg_tile);
    const ActPairs<T> act(acc, tile.cols);
    const Scales scales(act, quantize_args, tile, lane);
    if (this->h_data) {  // the last store of h used the second box; wait for the first
      if (threadIdx.x % kWarpgroupSize == 0) cp_async_bulk_wait_group_read<1>();
      named_barrier_sync(kBarrierOfConsumer + wg_tile.consumer, kWarpgroupSize);
    } else {
      __syncwarp();  // the data of the previous tile has been read
    }
    uint8_t* rows = boxes[0] + threadIdx.x % kWarpgroupSize / kWarpSize * (kWarpRows * kSwizzleBytes);
    quantize_args.element == DType::kFloat8E5M2
        ? quantize_to_smem<DType::kFloat8E5M2>(act, scales, rows, lane)
        : quantize_to_smem<DType::kFloat8E4M3>(act, scales, rows, lane);
    __syncwarp();
    store_quantized(quantize_args, tile, rows, lane);
  }
};

}  // namespace transformer_plugin::gemm::sm90

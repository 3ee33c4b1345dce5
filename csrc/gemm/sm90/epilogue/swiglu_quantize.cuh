// SwiGLU of the sums straight into codes and the scales of blocks along rows: another epilogue of hopper_rows.cuh. A row of a
// tile is one block of 128 columns of act, or four of 32, and lies in a quad of lanes, which finds its scales. Codes leave
// through the rows that a warp has in a box.
//
// A thread has of two rows, l and l + 8 of its warp's 16 with l = lane / 4, two columns of each 8: its twos (hopper_rows.cuh).
#pragma once

#include "gemm/sm90/epilogue/swiglu.cuh"
#include "quantize/cuda/mxfp8/tile.cuh"

namespace transformer_plugin::gemm::sm90 {

inline constexpr int kQuad = 4;                                          // lanes that have a row
inline constexpr int kEights = kHalfTile / 8, kPieces = kHalfTile / 16;  // of columns of a row
static_assert(kHalfTile == quantize::kTile && kHalfTile == kLine,
              "a row of a tile is a line of the tiles that are quantized, and its codes one of a box");

// act of a thread's rows as if it had been read from memory, zero past the last column: what a product with infinite operands
// has there may be NaN.
template <typename T>
struct TwosOfAct {
  using Two = quantize::Two<T>;
  using Order = quantize::MagnitudeOrder<T>;
  Two at[2][kEights];  // of the first row and of the second

  // Of activated sums, `columns` of which are left.
  __device__ __forceinline__ TwosOfAct(const float (&sums)[kSums], int columns) {
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float* own = &sums[j * 4 + row * 2];
        at[row][j] = j * 8 < columns ? quantize::two_from_floats<T>(own[0], own[1]) : quantize::zeros<T>();
      }
    }
  }
  // The largest magnitudes of the first row, in so many blocks, then of the second.
  template <int kBlock, typename Maxima>
  __device__ __forceinline__ void find(Maxima& maxima) const {
    constexpr int kOfBlock = kEights / kBlock;
#pragma unroll
    for (int block = 0; block < 2 * kBlock; ++block) {
      const Two* own = &at[block / kBlock][block % kBlock * kOfBlock];
      Two largest = own[0];
#pragma unroll
      for (int j = 1; j < kOfBlock; ++j) largest = quantize::larger_magnitudes(largest, own[j]);
      maxima.at[block] = Order::of(largest);
    }
  }
  // Of both values of an item. Where all are NaN, 0.
  static __device__ __forceinline__ float amax(typename Order::Item item) {
    const float2 two = quantize::to_floats(Order::two(item));
    return fmaxf(fmaxf(fabsf(two.x), fabsf(two.y)), 0.0f);
  }
};

// The row that a lane answers for, of the warp's: of its two the first where its number is even.
__device__ __forceinline__ int answered_row(int lane) { return lane / kQuad + lane % 2 * 8; }

// FP32 scales of 1x128 blocks. Lanes of an even number find that of the first row, the others that of the second.
struct BlockScales {
  float of_rows[2];  // what values are multiplied by

  template <typename T>
  __device__ __forceinline__ BlockScales(const TwosOfAct<T>& act, const quantize::QuantizeArgs& args,
                                         const quantize::Tile& tile, int lane) {
    using Order = quantize::MagnitudeOrder<T>;
    quantize::DistributedMaxima<2, 2, Order> maxima;
    act.template find<1>(maxima);
    maxima.distribute(lane);
    const auto other_lanes = __shfl_xor_sync(~0u, maxima.at[0], 2);
    const float amax = TwosOfAct<T>::amax(Order::larger(maxima.at[0], other_lanes));
    const float own = quantize::encode_scale(amax, args.rule);
    const float other = __shfl_xor_sync(~0u, own, 1);
    of_rows[0] = lane % 2 == 0 ? own : other;
    of_rows[1] = lane % 2 == 0 ? other : own;
    if (lane % kQuad < 2 && answered_row(lane) < tile.rows) {
      args.scale[quantize::scale_index(args.layout, tile, false, answered_row(lane), 0)] = 1.0f / own;
    }
  }
  __device__ __forceinline__ float of(int row, int) const { return of_rows[row]; }
};

// E8M0 scales of 1x32 blocks. A lane finds those of two blocks of one row, and all get the words of both rows.
struct MxScales {
  uint32_t words[2];

  template <typename T>
  __device__ __forceinline__ MxScales(const TwosOfAct<T>& act, const quantize::QuantizeArgs& args,
                                      const quantize::Tile& tile, int lane) {
    using Maxima =
        quantize::DistributedMaxima<kQuad, 2 * quantize::kMxBlocksPerRow, quantize::MagnitudeOrder<T>>;
    static_assert(
        Maxima::kCount == 2 && Maxima::lane_of(0) == 0 && Maxima::lane_of(2) == 2 && Maxima::lane_of(4) == 1,
        "the first bit of a lane's number tells the row, the second the half of the blocks");
    Maxima maxima;
    act.template find<quantize::kMxBlocksPerRow>(maxima);
    maxima.distribute(lane);
    uint32_t own = exponent(args, TwosOfAct<T>::amax(maxima.at[0])) |
                   exponent(args, TwosOfAct<T>::amax(maxima.at[1])) << 8;
    own <<= lane % kQuad / 2 * 16;
    own |= __shfl_xor_sync(~0u, own, 2);
    const uint32_t other = __shfl_xor_sync(~0u, own, 1);
    words[0] = lane % 2 == 0 ? own : other;
    words[1] = lane % 2 == 0 ? other : own;
    if (lane % kQuad < 2 && answered_row(lane) < tile.rows) {
      const quantize::ScaleWords lines(args.layout, tile, false);
      quantize::store_evict_last(args.exponents + lines.at(answered_row(lane)), own);
    }
  }
  static __device__ __forceinline__ uint32_t exponent(const quantize::QuantizeArgs& args, float amax) {
    const uint32_t bits = args.element == DType::kFloat8E5M2
                              ? quantize::quick_e8m0_bits<DType::kFloat8E5M2>(amax)
                              : quantize::quick_e8m0_bits<DType::kFloat8E4M3>(amax);
    return bits >> 23;
  }
  __device__ __forceinline__ float of(int row, int eight) const {
    const int block = eight / (quantize::kMxBlock / 8);
    return quantize::quick_e8m0_multiplier((words[row] >> (8 * block) & 0xffu) << 23);
  }
};

// A warp's codes into its rows of a box. Of each 16 columns a row has 16 bytes, and a lane its twos of both eights side by side
// in a word, which in_order() sets right.
template <DType element, typename T, typename Scales>
__device__ __forceinline__ void write_codes(const TwosOfAct<T>& act, const Scales& scales, uint8_t* rows,
                                            int lane) {
  const auto two = [&](int row, int eight) {
    const float2 values = quantize::to_floats(act.at[row][eight]);
    const float scale = scales.of(row, eight);
    return quantize::encode2<element>(values.x * scale, values.y * scale);
  };
  const auto word = [&](int row, int piece) { return two(row, piece * 2) | two(row, piece * 2 + 1) << 16; };
#pragma unroll
  for (int piece = 0; piece < kPieces; piece += 2) {
    const uint32_t words[] = {word(0, piece), word(1, piece), word(0, piece + 1), word(1, piece + 1)};
    write_matrices(swizzled(rows, lane % 16, piece + lane / 16), words);
  }
}

// 16 codes of a row as write_codes left them, in the order of columns.
__device__ __forceinline__ uint4 in_order(uint4 piece) {
  return make_uint4(__byte_perm(piece.x, piece.y, 0x5410), __byte_perm(piece.z, piece.w, 0x5410),
                    __byte_perm(piece.x, piece.y, 0x7632), __byte_perm(piece.z, piece.w, 0x7632));
}

// A warp's rows of a box to those of its tile, whole lines at a time.
__device__ __forceinline__ void store_codes(const quantize::QuantizeArgs& args, const quantize::Tile& tile,
                                            uint8_t* rows, int lane) {
  constexpr int kRowsAtATime = kWarpSize / kPieces;
  const bool whole = args.layout.cols % 16 == 0;  // else rows begin at multiples of 8 bytes
  const int column = lane % kPieces * 16;
#pragma unroll
  for (int row = lane / kPieces; row < kWarpRows; row += kRowsAtATime) {
    const uint4 codes = in_order(*reinterpret_cast<const uint4*>(swizzled(rows, row, lane % kPieces)));
    if (row >= tile.rows || column >= tile.cols) continue;
    uint8_t* to = args.data + (tile.row + row) * args.layout.cols + tile.col + column;
    if (whole) {
      *reinterpret_cast<uint4*>(to) = codes;
    } else {
      *reinterpret_cast<uint2*>(to) = make_uint2(codes.x, codes.y);
      if (column + 8 < tile.cols) *reinterpret_cast<uint2*>(to + 8) = make_uint2(codes.z, codes.w);
    }
  }
}

template <typename T, bool interleaved, typename Scales>
struct SwigluQuantizeRows : SwigluOfSums<T, interleaved> {
  quantize::QuantizeArgs codes;  // of act [T, F] as one matrix, whose `input` is not

  using Args = SwigluQuantizeKernelArgs;
  static const GroupedGemmArgs& problem(const Args& args) { return args.swiglu.product; }
  static SwigluQuantizeRows of(const Args& args) {
    SwigluQuantizeRows epilogue{};
    epilogue.fill(args.swiglu);
    epilogue.codes = args.codes;
    return epilogue;
  }

  // A warp's rows of a part.
  __device__ __forceinline__ quantize::Tile tile_of_warp(const Part& part) const {
    quantize::Tile tile{};
    tile.row = part.row + threadIdx.x % kWarpgroup / kWarpSize * kWarpRows;
    tile.rows = part.end_row - static_cast<int>(tile.row);  // may be more, or none
    tile.col = part.column / 2;
    tile.col_tile = part.column / kTileColumns;
    tile.cols = min(this->features - part.column / 2, kHalfTile);
    return tile;
  }

  template <typename Shared>
  __device__ __forceinline__ void finish(const RowsArgs&, const Part& part, float (&sums)[kSums],
                                         Shared& shared) const {
    auto& boxes = shared.out[part.number];
    const ProbsOfThread prob(this->probs, row_of_thread(part), part.end_row);
    this->keep(part, sums, boxes);
    this->activate(prob, sums);
    const int lane = threadIdx.x % kWarpSize;
    const quantize::Tile tile = tile_of_warp(part);
    const TwosOfAct<T> act(sums, tile.cols);
    const Scales scales(act, codes, tile, lane);
    if (this->h_data) {  // which left through both boxes, the last of it through the second
      if (threadIdx.x % kWarpgroup == 0) wait_until_stored<1>();
      sync_threads(1 + part.number, kWarpgroup);
    } else {
      __syncwarp();  // the codes before have been read
    }
    uint8_t* rows = boxes[0] + threadIdx.x % kWarpgroup / kWarpSize * (kWarpRows * kLine);
    codes.element == DType::kFloat8E5M2 ? write_codes<DType::kFloat8E5M2>(act, scales, rows, lane)
                                        : write_codes<DType::kFloat8E4M3>(act, scales, rows, lane);
    __syncwarp();
    store_codes(codes, tile, rows, lane);
  }
};

}  // namespace transformer_plugin::gemm::sm90

// Shared by the quantize kernels: a tile in registers, the sources that fill it, maxima, and stores of
// quantized data.
#pragma once

#include <type_traits>

#include "quantize/args/quantize.h"
#include "quantize/cuda/tile/aligned_groups.cuh"
#include "quantize/cuda/tile/visit.cuh"

namespace transformer_plugin::quantize {

// Two neighbouring values in their dtype, and maxima of their magnitudes. NaN is ignored.
template <typename T>
struct Packed2 {
  T x, y;
};
template <>
struct Packed2<__nv_bfloat16> : __nv_bfloat162 {};
template <>
struct Packed2<__half> : __half2 {};

template <typename T>
__device__ __forceinline__ Packed2<T> zeros() {
  return {T(0.0f), T(0.0f)};
}
template <>
__device__ __forceinline__ Packed2<__nv_bfloat16> zeros() {
  return {__float2bfloat162_rn(0.0f)};
}
template <>
__device__ __forceinline__ Packed2<__half> zeros() {
  return {__float2half2_rn(0.0f)};
}

__device__ __forceinline__ Packed2<float> max_abs(Packed2<float> largest, Packed2<float> values) {
  return {fmaxf(largest.x, fabsf(values.x)), fmaxf(largest.y, fabsf(values.y))};
}
template <typename T>
__device__ __forceinline__ Packed2<T> max_abs(Packed2<T> largest, Packed2<T> values) {
  return {__hmax2(largest, __habs2(values))};
}

// Element-wise, the value with the larger magnitude; NaN is ignored. The sign of the result is meaningless.
__device__ __forceinline__ Packed2<float> larger_magnitudes(Packed2<float> a, Packed2<float> b) {
  return {fmaxf(fabsf(a.x), fabsf(b.x)), fmaxf(fabsf(a.y), fabsf(b.y))};
}
template <typename T>
__device__ __forceinline__ Packed2<T> larger_magnitudes(Packed2<T> a, Packed2<T> b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  uint32_t x, y;
  memcpy(&x, &a, sizeof(x));
  memcpy(&y, &b, sizeof(y));
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("max.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
  } else {
    asm("max.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
  }
  memcpy(&a, &x, sizeof(x));
  return a;
#else
  return {__hmax2(__habs2(a), __habs2(b))};
#endif
}

// A bfloat16 is the upper half of a float. Converting the second one separately would cost twice as much.
template <typename T>
__device__ __forceinline__ float2 to_floats(Packed2<T> two) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    uint32_t word;
    memcpy(&word, &two, sizeof(word));
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
  }
  return {to_float(two.x), to_float(two.y)};
}

// Rounds two floats to nearest.
template <typename T>
__device__ __forceinline__ Packed2<T> two_from_floats(float x, float y) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return {__floats2bfloat162_rn(x, y)};
  if constexpr (std::is_same_v<T, __half>) return {__floats2half2_rn(x, y)};
  if constexpr (std::is_same_v<T, float>) return {x, y};
}

// A thread's fragment of a tile, in the input's dtype; zero outside the matrix and in the tail.
template <typename T>
struct TileFragment {
  Packed2<T> at[kRowsPerThread][kColsPerThread / 2];

  __device__ __forceinline__ float get(int r, int c) const {
    const float2 two = to_floats(at[r][c / 2]);
    return c % 2 == 0 ? two.x : two.y;
  }
  __device__ __forceinline__ float row_max(int r) const {
    const float2 two = to_floats(larger_magnitudes(larger_magnitudes(zeros<T>(), at[r][0]), at[r][1]));
    return fmaxf(fabsf(two.x), fabsf(two.y));
  }
  // Of columns 2i and 2i + 1, over the thread's rows.
  __device__ __forceinline__ float2 column_max(int i) const {
    Packed2<T> largest = zeros<T>();
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) largest = larger_magnitudes(largest, at[r][i]);
    const float2 two = to_floats(largest);
    return {fabsf(two.x), fabsf(two.y)};
  }
};

// Blocks per multiprocessor, as many as the registers of a fragment allow.
template <typename T>
inline constexpr int kBlocksPerSm = sizeof(T) == 2 ? 4 : 2;

// Four values in one load.
template <typename T>
using Vector4 = std::conditional_t<sizeof(T) == 2, uint2, uint4>;

// A source fills a thread's fragment of a tile: 16 rows of 4 columns, zero outside the matrix and in the
// tail. It is a kernel argument next to the format's own arguments, which have an `input` and a `layout`.
// `Value` is the dtype to which values are rounded before they are quantized.
//
// PlainSource reads the input unchanged.
template <typename T>
struct PlainSource {
  using Value = T;
  static constexpr int kBlocks = kBlocksPerSm<T>;

  template <typename Args>
  __device__ __forceinline__ void load(const Args& args, const Tile& tile, int warp, int lane,
                                       TileFragment<T>& values) const {
    const int64_t cols = args.layout.cols;
    const int c0 = lane * kColsPerThread;
    const int first_row = warp * kRowsPerThread;
    const T* input = static_cast<const T*>(args.input) +
                     (tile.matrix * args.layout.rows + tile.row + first_row) * cols + tile.col + c0;
    const bool aligned = cols % 4 == 0 && reinterpret_cast<uintptr_t>(args.input) % sizeof(Vector4<T>) == 0;
    const int rows = tile.tail ? 0 : tile.rows - first_row;
    if (aligned && tile.cols == kTile) {  // all loads are issued before the first use
      const char* row = reinterpret_cast<const char*>(input);
      const int64_t stride = cols * static_cast<int64_t>(sizeof(T));
#pragma unroll
      for (int r = 0; r < kRowsPerThread; ++r, row += stride) {
        Vector4<T> vector = {};
        if (r < rows) vector = *reinterpret_cast<const Vector4<T>*>(row);
        memcpy(values.at[r], &vector, sizeof(vector));
      }
      return;
    }
    const int count = tile.cols - c0;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
#pragma unroll
      for (int i = 0; i < kColsPerThread / 2; ++i) {
        values.at[r][i] = zeros<T>();
        if (r < rows && 2 * i < count) values.at[r][i].x = input[r * cols + 2 * i];
        if (r < rows && 2 * i + 1 < count) values.at[r][i].y = input[r * cols + 2 * i + 1];
      }
    }
  }
};

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

// The amax of the whole tile, in every thread. `partial` is [kWarps] in shared memory.
template <typename T>
__device__ __forceinline__ float tile_amax(const TileFragment<T>& values, int warp, int lane,
                                           float* partial) {
  float largest = 0.0f;
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) largest = fmaxf(largest, values.row_max(r));
  largest = warp_max(largest);
  if (lane == 0) partial[warp] = largest;
  __syncthreads();
  largest = partial[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) largest = fmaxf(largest, partial[w]);
  return largest;
}

// Non-negative floats order like their bits, and a maximum does not depend on the order, so the atomics are
// deterministic.
__device__ __forceinline__ void atomic_max(float* target, float amax) {
  atomicMax(reinterpret_cast<int*>(target), __float_as_int(amax));
}

// Maxima of kItems items over kLanes neighbouring lanes, distributed over those lanes: each exchange with
// another lane halves the items that a lane keeps. In the end lane l holds items first_of(l) .. first_of(l) +
// kCount - 1 in its first places, so that what follows from a maximum is computed once and not in every lane.
// `Order` defines the type of an item, one register, and its maximum.
struct FloatOrder {
  using Item = float;
  static __device__ __forceinline__ Item larger(Item a, Item b) { return fmaxf(a, b); }
};
// Two 16-bit values compared by magnitude. Stored as an integer, because the compiler would select between
// two class objects in local memory.
template <typename T>
struct MagnitudeOrder {
  using Item = uint32_t;
  static __device__ __forceinline__ Item of(Packed2<T> two) {
    Item item;
    static_assert(sizeof(two) == sizeof(item), "one register");
    memcpy(&item, &two, sizeof(item));
    return item;
  }
  static __device__ __forceinline__ Packed2<T> two(Item item) {
    Packed2<T> two;
    memcpy(&two, &item, sizeof(item));
    return two;
  }
  static __device__ __forceinline__ Item larger(Item a, Item b) {
    return of(larger_magnitudes(two(a), two(b)));
  }
};

template <int kLanes, int kItems, typename Order = FloatOrder>
struct DistributedMaxima {
  using Item = typename Order::Item;
  static constexpr int kCount = kItems / kLanes;
  static_assert(kCount * kLanes == kItems, "lanes share the items out evenly");
  Item at[kItems];

  __device__ __forceinline__ void distribute(int lane) {
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const bool upper = lane & distance;
      const int half = kItems / 2 / distance;
#pragma unroll
      for (int i = 0; i < half; ++i) {
        const Item kept = upper ? at[half + i] : at[i];
        const Item sent = upper ? at[i] : at[half + i];
        at[i] = Order::larger(kept, __shfl_xor_sync(0xffffffffu, sent, distance));
      }
    }
  }

  static __device__ __forceinline__ int first_of(int lane) {
    int item = 0;
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      if (lane & distance) item += kItems / 2 / distance;
    }
    return item;
  }
  // The lane, of kLanes, that holds the item.
  static __host__ __device__ constexpr int lane_of(int item) {
    int lane = 0;
    for (int distance = 1; distance < kLanes; distance *= 2) {
      if (item & (kItems / 2 / distance)) lane += distance;
    }
    return lane;
  }
};

// Maxima of a warp's 16 rows, over the columns that kLanes lanes hold. 16-bit values stay packed in pairs
// until the end.
template <typename T>
using RowOrder = std::conditional_t<sizeof(T) == 2, MagnitudeOrder<T>, FloatOrder>;

template <int kLanes, typename T>
struct RowMaxima : DistributedMaxima<kLanes, kRowsPerThread, RowOrder<T>> {
  __device__ __forceinline__ void find(const TileFragment<T>& values, int lane) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      if constexpr (sizeof(T) == 2) {
        this->at[r] = RowOrder<T>::of(larger_magnitudes(values.at[r][0], values.at[r][1]));
      } else {
        this->at[r] = values.row_max(r);
      }
    }
    this->distribute(lane);
  }
  // The maximum of the lane's item i; 0 if all values are NaN.
  __device__ __forceinline__ float amax(int i) const {
    if constexpr (sizeof(T) == 2) {
      const float2 two = to_floats(RowOrder<T>::two(this->at[i]));
      return fmaxf(fmaxf(fabsf(two.x), fabsf(two.y)), 0.0f);
    } else {
      return this->at[i];
    }
  }
};

// Convert two values, or four into one word; the hardware converts two at once.
template <DType element>
__device__ __forceinline__ uint32_t encode2(float a, float b) {
  constexpr __nv_fp8_interpretation_t type = element == DType::kFloat8E4M3 ? __NV_E4M3 : __NV_E5M2;
  return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, type);
}
template <DType element>
__device__ __forceinline__ Bytes4 encode4(float a, float b, float c, float d) {
  Bytes4 bytes;
  bytes.word = encode2<element>(a, b) | encode2<element>(c, d) << 16;
  return bytes;
}

// Stores a warp's rows of quantized data. `scale_of(r)` returns the scale of row r in all lanes.
template <DType element, typename T, typename ScaleOf>
__device__ __forceinline__ void store_encoded_rows(const QuantizeArgs& args, const Tile& tile,
                                                   const TileFragment<T>& values, int first_row, int lane,
                                                   ScaleOf scale_of) {
  const Layout& layout = args.layout;
  const int count = tile.cols - lane * kColsPerThread;
  // If rows are whole words, a lane's four columns are all inside or all outside of the matrix.
  const bool words = layout.cols % kColsPerThread == 0;
  const int rows = words && count <= 0 ? 0 : tile.rows - first_row;
  uint8_t* target = args.data + (tile.matrix * layout.rows + tile.row + first_row) * layout.cols + tile.col +
                    lane * kColsPerThread;
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const float scale = scale_of(r);
    const Bytes4 bytes = encode4<element>(values.get(r, 0) * scale, values.get(r, 1) * scale,
                                          values.get(r, 2) * scale, values.get(r, 3) * scale);
    if (r < rows) store_bytes(target, bytes, count, words);
    target += layout.cols;
  }
}

// Stores a transposed tile: a warp stores 4 rows of 128 bytes per step, or one if 16-byte stores are not
// aligned.
__device__ __forceinline__ void store_transposed_rows(const QuantizeArgs& args, const Tile& tile, int warp,
                                                      int lane, TransposedTile& transposed_tile) {
  const TransposedRows transposed_rows(args.layout, tile, args.data_t);
  uint8_t* target = args.data_t + transposed_rows.first;
  if (transposed_rows.vectors) {
    constexpr int kLines = kWarpSize / TransposedTile::kChunks;
#pragma unroll
    for (int i = 0; i < kTile / kWarps / kLines; ++i) {
      const int column = (warp * (kTile / kWarps / kLines) + i) * kLines + lane / TransposedTile::kChunks;
      const int chunk = lane % TransposedTile::kChunks;
      if (column < tile.cols) {
        *reinterpret_cast<uint4*>(target + column * transposed_rows.stride + chunk * 16) =
            transposed_tile.chunk(column, chunk);
      }
    }
    return;
  }
  for (int column = warp; column < tile.cols; column += kWarps) {
    uint8_t* transposed_row = target + column * transposed_rows.stride + lane * 4;
    Bytes4 bytes;
    bytes.word = transposed_tile.word(column, lane);
    store_bytes(transposed_row, bytes, tile.rows - lane * 4, is_word_aligned(transposed_row));
  }
}

// In the layout of the arguments.
__device__ __forceinline__ void store_transposed(const QuantizeArgs& args, const Tile& tile, int warp,
                                                 int lane, TransposedTile& transposed_tile) {
  const Layout& layout = args.layout;
  if (!layout.aligned) return store_transposed_rows(args, tile, warp, lane, transposed_tile);
  store_aligned_rows(args.data_t, layout.row_tile_table, static_cast<int>(layout.rows),
                     static_cast<int>(layout.cols), static_cast<int>(layout.groups), layout.zero_tail,
                     tile.row_tile, tile.col_tile, transposed_tile);
}

// Transposed data: a thread packs its rows, the tile is transposed in shared memory, and warps store rows of
// it.
template <DType element, bool may_align = true, typename T>
__device__ __forceinline__ void write_columns(const QuantizeArgs& args, const Tile& tile,
                                              const TileFragment<T>& values, int warp, int lane,
                                              const float* scales, TransposedTile& transposed_tile) {
  const bool holds_rows = warp * kRowsPerThread < tile.rows;
#pragma unroll
  for (int c = 0; c < kColsPerThread && holds_rows; ++c) {
    uint32_t words[kRowsPerThread / 4];
#pragma unroll
    for (int word = 0; word < kRowsPerThread / 4; ++word) {
      const int r = 4 * word;
      words[word] = encode4<element>(values.get(r, c) * scales[c], values.get(r + 1, c) * scales[c],
                                     values.get(r + 2, c) * scales[c], values.get(r + 3, c) * scales[c])
                        .word;
    }
    transposed_tile.chunk(lane * kColsPerThread + c, warp) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
  __syncthreads();
  may_align ? store_transposed(args, tile, warp, lane, transposed_tile)
            : store_transposed_rows(args, tile, warp, lane, transposed_tile);
}

}  // namespace transformer_plugin::quantize

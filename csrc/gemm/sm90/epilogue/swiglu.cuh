// What becomes of sums that are SwiGLU's input: epilogues of hopper_rows.cuh.
#pragma once

#include "activation/swiglu.h"
#include "gemm/sm90/epilogue/swiglu.h"
#include "gemm/sm90/grouped_gemm.cuh"

namespace transformer_plugin::gemm::sm90 {

inline constexpr int kHalfTile = kTileColumns / 2;
inline constexpr int kWarpRows = 16;  // of a part

// As they were if they had gone to memory.
template <typename T>
__device__ __forceinline__ float2 rounded(float x, float y) {
  return as_floats<T>(two_rounded<T>(x, y));
}

// Those of the rows that a thread has sums of. Of the rows of other groups none is read.
struct ProbsOfThread {
  float low = 1.0f, high = 1.0f;

  __device__ __forceinline__ ProbsOfThread(const float* probs, int row, int end_row) {
    if (!probs) return;
    if (row < end_row) low = probs[row];
    if (row + 8 < end_row) high = probs[row + 8];
  }
};

// The first of the rows of a thread; the other is 8 on.
__device__ __forceinline__ int row_of_thread(const Part& part) {
  return part.row + threadIdx.x % kWarpgroup / kWarpSize * 16 + threadIdx.x % kWarpSize / 4;
}

// Columns of a matrix with the rows of the product, in its dtype.
inline CUtensorMap rows_map(const GroupedGemmArgs& product, const void* data, int64_t columns,
                            int64_t stride) {
  return tensor_map({data, product.dtype, columns, product.rows, 1, stride, product.rows * stride},
                    kBoxLines);
}

// Four matrices of 8 x 8, as products have their sums; a lane tells where a row of one lies.
__device__ __forceinline__ void read_matrices(uint32_t (&words)[4], const uint8_t* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void write_matrices(uint8_t* row, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// ---- SwiGLU of the sums, which are h: its columns of a tile are 128 of the gate and the 128 of the linear part that belong to
// them, so a thread has both of each pair. Interleaved they lie side by side; else a tile takes two boxes of b's lines of each.

template <typename T, bool interleaved>
struct SwigluOfSums {
  static constexpr bool kTakesHalves = false;
  CUtensorMap h, linear;  // of h all columns if interleaved, else the gate's; `linear` the others
  T* h_data;              // or null: h is not kept
  const float* probs;
  int features;

  void fill(const SwigluKernelArgs& args) {
    const GroupedGemmArgs& product = args.product;
    const int64_t half = product.n / 2;
    h_data = static_cast<T*>(product.out);
    probs = args.probs;
    features = static_cast<int>(half);
    if (!h_data) return;
    h = rows_map(product, h_data, interleaved ? 2 * half : half, 2 * half);
    if (!interleaved) linear = rows_map(product, h_data + half, half, 2 * half);
  }

  __device__ __forceinline__ void prefetch_maps() const {
    if (!h_data) return;
    prefetch(h);
    if (!interleaved) prefetch(linear);
  }
  template <typename Shared>
  static __device__ __forceinline__ void init(Shared&) {}

  static __device__ __forceinline__ int line(const RowsArgs& args, int tile_column, int box) {
    if (interleaved) return tile_column * kTileColumns + box * kBoxLines;
    constexpr int kBoxes = kRightBoxes / 2;  // of a half
    return tile_column * kHalfTile + box % kBoxes * kBoxLines + box / kBoxes * (args.n / 2);
  }
  static __device__ __forceinline__ int line_of_sums(const RowsArgs& args, const Part& part, int j) {
    if (interleaved) return part.column + j * 8;
    return part.column / 2 + j % (kHalfTile / 8) * 8 + j / (kHalfTile / 8) * (args.n / 2);
  }

  template <typename Shared>
  __device__ __forceinline__ void begin(const RowsArgs&, const Part&, Shared&) const {}

  // A box to `columns` columns of a matrix, of which `data` is the first.
  static __device__ __forceinline__ void leave(const CUtensorMap& map, uint8_t* box, T* data, int64_t stride,
                                               int column, int columns, const Part& part) {
    if (part.row + kBoxLines > part.end_row) {  // rows of the next group follow
      store_own_rows<T>(box, data, stride, column, columns, part);
    } else if (threadIdx.x % kWarpgroup == 0) {
      store_box(map, box, column, part.row, 0);
    }
  }

  // The sums to h, if it is kept.
  template <int kBoxes>
  __device__ __forceinline__ void keep(const Part& part, const float (&sums)[kSums],
                                       uint8_t (&boxes)[kBoxes][kBoxBytes]) const {
    if (!h_data) return;
    const int column = part.column / 2;  // of a half
    const int64_t stride = int64_t{2} * features;
    store_sums<T>(sums, boxes, part.number, [&](uint8_t* box, int offset) {
      if (interleaved) {
        leave(h, box, h_data, stride, part.column + offset, 2 * features, part);
      } else if (offset < kHalfTile) {
        // It may reach into the linear part's columns, which are not its own.
        leave(h, box, h_data, stride, column + offset, features, part);
      } else {
        leave(linear, box, h_data + features, stride, column + offset - kHalfTile, features, part);
      }
    });
  }

  // Of h, if it is kept.
  __device__ __forceinline__ void zero_tail_rows(const RowsArgs& args, int warps, int warp) const {
    if (h_data) sm90::zero_tail_rows(args, h_data, int64_t{2} * features, 2 * features, warps, warp);
  }

  // In the place of the first half of the sums, in the order of columns.
  static __device__ __forceinline__ void activate(const ProbsOfThread& prob, float (&sums)[kSums]) {
    constexpr int kRun = interleaved ? 4 : kHalfTile / 8;  // eights of columns of the gate in a row
#pragma unroll
    for (int j = 0; j < kHalfTile / 8; ++j) {
      const int gate = (j / kRun * 2 * kRun + j % kRun) * 4, linear = gate + kRun * 4;
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const float2 x = rounded<T>(sums[gate + i], sums[gate + i + 1]);
        const float2 y = rounded<T>(sums[linear + i], sums[linear + i + 1]);
        const float own = i == 0 ? prob.low : prob.high;
        sums[j * 4 + i] = activation::swiglu_value(x.x, y.x, own);
        sums[j * 4 + i + 1] = activation::swiglu_value(x.y, y.y, own);
      }
    }
  }

  static __device__ __forceinline__ void drain() {
    if (threadIdx.x % kWarpgroup == 0) wait_until_stored<0>();
  }
};

// ---- Stored as it is.

template <typename T, bool interleaved>
struct SwigluRows : SwigluOfSums<T, interleaved> {
  CUtensorMap act;
  T* act_data;

  using Args = SwigluKernelArgs;
  static const GroupedGemmArgs& problem(const Args& args) { return args.product; }
  static SwigluRows of(const Args& args) {
    SwigluRows epilogue{};
    epilogue.fill(args);
    epilogue.act_data = static_cast<T*>(args.act);
    epilogue.act = rows_map(args.product, args.act, args.product.n / 2, args.product.n / 2);
    return epilogue;
  }

  __device__ __forceinline__ void prefetch_maps() const {
    prefetch(act);
    SwigluOfSums<T, interleaved>::prefetch_maps();
  }
  __device__ __forceinline__ void zero_tail_rows(const RowsArgs& args, int warps, int warp) const {
    SwigluOfSums<T, interleaved>::zero_tail_rows(args, warps, warp);
    sm90::zero_tail_rows(args, act_data, this->features, this->features, warps, warp);
  }

  template <typename Shared>
  __device__ __forceinline__ void finish(const RowsArgs&, const Part& part, float (&sums)[kSums],
                                         Shared& shared) const {
    auto& boxes = shared.out[part.number];
    const ProbsOfThread prob(this->probs, row_of_thread(part), part.end_row);
    this->keep(part, sums, boxes);
    this->activate(prob, sums);
    store_sums<T, kHalfTile>(sums, boxes, part.number, [&](uint8_t* box, int offset) {
      this->leave(act, box, act_data, this->features, part.column / 2 + offset, this->features, part);
    });
  }
};

}  // namespace transformer_plugin::gemm::sm90

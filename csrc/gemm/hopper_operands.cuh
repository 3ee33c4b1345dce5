// How a warpgroup sums its part of a tile of ragged rows on Hopper, for each kind of operands.
#pragma once

#include "gemm/hopper_tiles.cuh"

namespace transformer_plugin::gemm::hopper {

// What of GroupedKernelArgs the kernel needs, in registers' sizes.
struct RowsArgs {
  const int32_t* offsets;  // or null for one group of all rows
  void* out;
  const float* alpha;
  const float* beta;  // of what `out` holds
  const float* bias;
  const float* bias_scale;
  // Of blocks of 1x128, [ceil(k / 128), a_scale_width]; of whole groups, [groups]; of rows, [rows].
  const float* a_scale;
  // Of blocks of 128x128, [groups, ceil(n / 128), b_scale_width]; of whole groups, [groups]; of rows, [groups, n].
  const float* b_scale;
  int64_t out_row_stride, a_scale_width;
  int b_scale_width;
  int groups, rows, n, k;
  bool zeroes_tail;
};

// Where a warpgroup's part of a tile lies.
struct Part {
  int group, number;         // the warpgroup's, of those that multiply
  int row, end_row, column;  // its first row, the group's end, its first column
};

// No scale comes with a stage.
struct NoScaleCopy {
  template <typename Args>
  __device__ __forceinline__ NoScaleCopy(const Args&, int, const Tile&, int) {}
  __device__ __forceinline__ uint32_t bytes() const { return 0; }
  template <typename Shared, typename Place>
  __device__ __forceinline__ void start(Shared&, const Place&) const {}
};

// 16-bit operands. `by_columns`: b [G, k, n], else [G, n, k].
template <typename T, bool by_columns, typename SharedMemory = PlainShared>
struct Plain {
  using Element = T;
  using Out = T;
  using Shared = SharedMemory;
  using ScaleCopy = NoScaleCopy;
  static constexpr bool b_by_columns = by_columns;
  static constexpr bool group_scales = false, row_scales = false;

  static __device__ __forceinline__ void sum(const RowsArgs&, Shared& shared, Place<Shared>& place, int steps,
                                             const Part& part, float (&sums)[kSums]) {
    int read = -1;  // the stage of the step before
    for (int step = 0; step < steps; ++step, place.next()) {
      wait(&shared.full[place.stage], place.parity);
      const Stage& stage = shared.stages[place.stage];
      const uint64_t a = by_rows(stage.left[part.number]);
      const uint64_t b = by_columns ? hopper::by_columns(stage.right, kBoxBytes) : by_rows(stage.right);
      begin_products();
#pragma unroll
      for (int i = 0; i < kStep<T> / 16; ++i) {  // descriptors count 16 bytes
        multiply<T, false, by_columns>(sums, a + i * 2, b + i * (by_columns ? kLine : 2));
      }
      commit_products();
      wait_for_products<1>();
      if (read >= 0) release(shared, read);
      read = place.stage;
    }
    wait_for_products<0>();
    release(shared, read);
  }
};

// E4M3 under scales of blocks. Tensor cores sum E4M3 with some 14 bits, so the sum of each 128 of k leaves them, and is
// added in FP32 under the scales of its blocks. While one warpgroup does that the other's products run. Scales come with the
// stage: loads by those that multiply made them a tenth slower.
struct Blocks {
  using Element = uint8_t;
  using Out = __nv_bfloat16;
  using Shared = RowScaledShared;
  static constexpr bool b_by_columns = false;
  static constexpr bool group_scales = false, row_scales = false;
  static constexpr int kBlock = 128;
  static_assert(kStep<Element> == kBlock && kTileColumns == 2 * kBlock, "a stage is a block of k");

  // The scales of a stage. What is copied begins at multiples of 16 bytes, so rows at a multiple of 4 and columns with those
  // of a multiple of 4 stages.
  class ScaleCopy {
   public:
    __device__ __forceinline__ ScaleCopy(const RowsArgs& args, int row, const Tile& tile, int step) {
      const int lines = (args.n + kBlock - 1) / kBlock, line = tile.column * (kTileColumns / kBlock);
      const int first = row / 4 * 4;
      rows_ = args.a_scale + step * args.a_scale_width + first;
      row_bytes_ =
          4 * static_cast<uint32_t>(min(kTileRows + 4, static_cast<int>(args.a_scale_width) - first));
      if (line >= lines) return;  // the tile is past the last column
      left_ = args.b_scale + (static_cast<int64_t>(tile.group) * lines + line) * args.b_scale_width +
              step / 4 * 4;
      right_ = left_ + (line + 1 < lines ? args.b_scale_width : 0);
    }
    __device__ __forceinline__ uint32_t bytes() const { return row_bytes_ + (left_ ? 32 : 0); }
    __device__ __forceinline__ void start(Shared& shared, const Place<Shared>& place) const {
      RowScales& scales = shared.scales[place.stage];
      uint64_t* full = &shared.full[place.stage];
      load_bytes(scales.rows, rows_, row_bytes_, full);
      if (!left_) return;
      load_bytes(scales.columns[0], left_, 16, full);
      load_bytes(scales.columns[1], right_, 16, full);
    }

   private:
    const float *rows_, *left_ = nullptr, *right_ = nullptr;
    uint32_t row_bytes_;
  };

  static __device__ __forceinline__ void sum(const RowsArgs& args, Shared& shared, Place<Shared>& place,
                                             int steps, const Part& part, float (&sums)[kSums]) {
    const int lane = threadIdx.x % kWarpSize, zero = zero_of_thread();
    const int own = part.number * kBoxLines + threadIdx.x % kWarpgroup / kWarpSize * 16 + lane / 4;
    const int low = own + (part.row - part.number * kBoxLines) % 4;
    for (int step = 0; step < steps; ++step, place.next()) {
      wait(&shared.full[place.stage], place.parity);
      const Stage& stage = shared.stages[place.stage];
      const RowScales& scales = shared.scales[place.stage];
      const float scale_low = scales.rows[low], scale_high = scales.rows[low + 8];
      const uint64_t a = by_rows(stage.left[part.number]), b = by_rows(stage.right);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = scales.columns[half][step % 4 + zero];
        const float both[2] = {scale_low * scale, scale_high * scale};
        float products[64];
        multiply_stage<DType::kFloat8E4M3>(products, a, b, half);
        if (half == 1) release(shared, place.stage);
#pragma unroll
        for (int i = 0; i < 64; ++i) {
          sums[half * 64 + i] = fmaf(products[i], both[i / 2 % 2], sums[half * 64 + i]);
        }
      }
    }
  }
};

// FP8 codes under one scale for each group, of `a` in E4M3 or E5M2: the scales are one factor of the whole sum, which leaves
// the tensor cores every 128 of k all the same, as they round it to some 14 bits.
template <DType a_type>
struct Codes {
  using Element = uint8_t;
  using Out = __nv_bfloat16;
  using Shared = PlainShared;
  using ScaleCopy = NoScaleCopy;
  static constexpr bool b_by_columns = false;
  static constexpr bool group_scales = true, row_scales = false;

  static __device__ __forceinline__ void sum(const RowsArgs&, Shared& shared, Place<Shared>& place, int steps,
                                             const Part& part, float (&sums)[kSums]) {
    for (int step = 0; step < steps; ++step, place.next()) {
      wait(&shared.full[place.stage], place.parity);
      const Stage& stage = shared.stages[place.stage];
      add_stage<a_type>(sums, by_rows(stage.left[part.number]), by_rows(stage.right),
                        [&] { release(shared, place.stage); });
    }
  }
};

// The same under one scale for each row of both operands.
template <DType a_type>
struct RowScaledCodes : Codes<a_type> {
  static constexpr bool group_scales = false, row_scales = true;
};

}  // namespace transformer_plugin::gemm::hopper

// How a warpgroup sums its part of a tile of ragged rows on Hopper, for each kind of operands.
#pragma once

#include "gemm/sm90/pipeline.cuh"
#include "gemm/sm90/tensor_map.h"

namespace transformer_plugin::gemm::sm90 {

// What of GroupedGemmArgs the kernel needs, in registers' sizes.
struct RowsArgs {
  const int32_t* offsets;  // or null for one group of all rows
  void* out;
  const float* alpha;
  const float* beta;  // of what `out` holds
  const float* bias;
  const float* bias_scale;
  const float* a_scale;  // of whole groups, [groups]; of rows, [rows]
  const float* b_scale;  // of whole groups, [groups]; of rows, [groups, n]
  int64_t out_row_stride;
  int groups, rows, n, k;
  bool zero_tail;
};

// Where a warpgroup's part of a tile lies.
struct Part {
  int group, number;       // the warpgroup's, of those that multiply
  int row, end_row;        // its first row, and the group's end
  int column, end_column;  // its first column, and the first that is no more its own
};

// Each kind of operands sums a part of `halves` halves of a tile's columns; stages hold as many of the right operand's boxes.

// No scale comes with a stage.
struct NoScaleMaps {
  static constexpr uint32_t kBytes = 0;
  static NoScaleMaps of(const GroupedGemmArgs&) { return {}; }
  template <typename Shared>
  __device__ __forceinline__ void load_stage(Shared&, const Place<Shared>&, int, int, int, int) const {}
};

// 16-bit operands. `by_columns`: b [G, k, n], else [G, n, k].
template <typename T, bool by_columns, typename SharedMemory = PlainShared>
struct Plain {
  using Element = T;
  using Out = T;
  using Shared = SharedMemory;
  using ScaleMaps = NoScaleMaps;
  static constexpr bool b_by_columns = by_columns;
  static constexpr bool group_scales = false, row_scales = false;

  template <int halves>
  static __device__ __forceinline__ void sum(const RowsArgs&, Shared& shared, Place<Shared>& place, int steps,
                                             const Part& part, float (&sums)[kSums]) {
    int read = -1;  // the stage of the step before
    for (int step = 0; step < steps; ++step, place.next()) {
      wait(&shared.full[place.stage], place.parity);
      const Stage& stage = shared.stages[place.stage];
      const uint64_t a = by_rows(stage.left[part.number]);
      const uint64_t b = by_columns ? sm90::by_columns(stage.right, kBoxBytes) : by_rows(stage.right);
      begin_products();
#pragma unroll
      for (int i = 0; i < kStep<T> / 16; ++i) {  // descriptors count 16 bytes
        multiply<T, false, by_columns, halves>(sums, a + i * 2, b + i * (by_columns ? kLine : 2));
      }
      commit_products();
      wait_for_products<1>();
      if (read >= 0) release(&shared.empty[read]);
      read = place.stage;
    }
    wait_for_products<0>();
    release(&shared.empty[read]);
  }
};

// E4M3 under scales of blocks. Tensor cores sum E4M3 with some 14 bits, so the sum of each 128 of k leaves them, and is
// added in FP32 under the scales of its blocks. Scales come with the stage: loads by those that multiply made them a tenth
// slower.
struct Blocks {
  using Element = uint8_t;
  using Out = __nv_bfloat16;
  using Shared = RowScaledShared;
  static constexpr bool b_by_columns = false;
  static constexpr bool group_scales = false, row_scales = false;
  static constexpr int kBlock = 128;
  static_assert(kStep<Element> == kBlock && kTileColumns == 2 * kBlock, "a stage is a block of k");

  // The scales of a stage. Boxes begin at multiples of 16 bytes, so rows at a multiple of 4 and columns with those of a
  // multiple of 4 steps.
  struct ScaleMaps {
    using Scales = RowScales<Shared::kStages>;
    static constexpr uint32_t kBytes = Scales::kBytes;
    CUtensorMap rows, columns;  // [ceil(k / 128), rows], and [groups, ceil(n / 128), ceil(k / 128)]

    static ScaleMaps of(const GroupedGemmArgs& args) {
      const auto whole = [](int64_t size, int64_t of) { return (size + of - 1) / of; };
      const int64_t steps = whole(args.k, kBlock), lines = whole(args.n, kBlock);
      return {
          scale_map({args.a_scale, 1, steps, whole(args.rows, 4) * 4}, 1, Scales::kRows),
          scale_map({args.b_scale, args.groups, lines, whole(steps, 4) * 4}, 2, Scales::kSteps),
      };
    }
    // Of the rows from `row` and the columns from `column` on.
    __device__ __forceinline__ void load_stage(Shared& shared, const Place<Shared>& place, int group, int row,
                                               int column, int step) const {
      uint64_t* full = &shared.full[place.stage];
      load_box(shared.beside.rows(place.stage), rows, full, row / 4 * 4, step, 0);
      load_box(shared.beside.columns(place.stage), columns, full, step / 4 * 4, column / kBlock, group);
    }
  };

  template <int halves>
  static __device__ __forceinline__ void sum(const RowsArgs&, Shared& shared, Place<Shared>& place, int steps,
                                             const Part& part, float (&sums)[kSums]) {
    const int lane = threadIdx.x % kWarpSize, zero = zero_of_thread();
    const int own = part.number * kBoxLines + threadIdx.x % kWarpgroup / kWarpSize * 16 + lane / 4;
    const int low = own + (part.row - part.number * kBoxLines) % 4;
    for (int step = 0; step < steps; ++step, place.next()) {
      wait(&shared.full[place.stage], place.parity);
      const Stage& stage = shared.stages[place.stage];
      const float* rows = shared.beside.rows(place.stage);
      const auto& columns = shared.beside.columns(place.stage);
      const float scale_low = rows[low], scale_high = rows[low + 8];
      const uint64_t a = by_rows(stage.left[part.number]), b = by_rows(stage.right);
#pragma unroll
      for (int half = 0; half < halves; ++half) {
        const float scale = columns[half][step % 4 + zero];
        const float both[2] = {scale_low * scale, scale_high * scale};
        float products[64];
        multiply_stage<DType::kFloat8E4M3>(products, a, b, half);
        if (half == halves - 1) release(&shared.empty[place.stage]);
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
  using ScaleMaps = NoScaleMaps;
  static constexpr bool b_by_columns = false;
  static constexpr bool group_scales = true, row_scales = false;

  template <int halves>
  static __device__ __forceinline__ void sum(const RowsArgs&, Shared& shared, Place<Shared>& place, int steps,
                                             const Part& part, float (&sums)[kSums]) {
    for (int step = 0; step < steps; ++step, place.next()) {
      wait(&shared.full[place.stage], place.parity);
      const Stage& stage = shared.stages[place.stage];
      add_stage<a_type, halves>(sums, by_rows(stage.left[part.number]), by_rows(stage.right),
                                [&] { release(&shared.empty[place.stage]); });
    }
  }
};

// The same under one scale for each row of both operands.
template <DType a_type>
struct RowScaledCodes : Codes<a_type> {
  static constexpr bool group_scales = false, row_scales = true;
};

}  // namespace transformer_plugin::gemm::sm90

// How a warpgroup sums its part of a tile of ragged rows on Hopper, for each kind of operands.
#pragma once

#include "gemm/hopper_tiles.cuh"

namespace transformer_plugin::gemm::hopper {

// What of GroupedKernelArgs the kernel needs, in registers' sizes.
struct RowsArgs {
  const int32_t* offsets;
  void* out;
  const float* alpha;
  const float* bias;
  const float* bias_scale;
  const float* a_scale;  // of blocks of 1x128, [ceil(k / 128), a_scale_width]
  const float* b_scale;  // of blocks of 128x128, [groups, ceil(n / 128), b_scale_width]
  int64_t a_scale_width;
  int b_scale_width;
  int groups, n, k;
};

// Where a warpgroup's part of a tile lies.
struct Part {
  int group, number;         // the warpgroup's, of those that multiply
  int row, end_row, column;  // its first row, the group's end, its first column
};

// 16-bit operands. `by_columns`: b [G, k, n], else [G, n, k].
template <typename T, bool by_columns>
struct Plain {
  using Element = T;
  using Out = T;
  static constexpr bool b_by_columns = by_columns;

  static __device__ __forceinline__ void sum(const RowsArgs&, Shared& shared, Place& place, int steps,
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
// added in FP32 under the scales of its blocks. While one warpgroup does that the other's products run.
struct Blocks {
  using Element = uint8_t;
  using Out = __nv_bfloat16;
  static constexpr bool b_by_columns = false;
  static constexpr int kBlock = 128;
  static_assert(kStep<Element> == kBlock && kTileColumns == 2 * kBlock, "a stage is a block of k");

  static __device__ __forceinline__ void sum(const RowsArgs& args, Shared& shared, Place& place, int steps,
                                             const Part& part, float (&sums)[kSums]) {
    const int lane = threadIdx.x % kWarpSize;
    const int low = part.row + threadIdx.x % kWarpgroup / kWarpSize * 16 + lane / 4, high = low + 8;
    const bool has_low = low < part.end_row, has_high = high < part.end_row;
    const int lines = (args.n + kBlock - 1) / kBlock, line = part.column / kBlock;
    const float* of_a = args.a_scale + low;
    const float* of_b = args.b_scale + (static_cast<int64_t>(part.group) * lines + line) * args.b_scale_width;
    const float* of_b_right = of_b + (line + 1 < lines ? args.b_scale_width : 0);
    float scale_low = 0.0f, scale_high = 0.0f, scale_left = 0.0f, scale_right = 0.0f;
    const auto fetch = [&](int step) {  // a step ahead
      if (has_low) scale_low = __ldg(of_a);
      if (has_high) scale_high = __ldg(of_a + 8);
      of_a += args.a_scale_width;
      scale_left = __ldg(of_b + step);
      scale_right = __ldg(of_b_right + step);
    };
    fetch(0);
    for (int step = 0; step < steps; ++step, place.next()) {
      const float scales[2][2] = {{scale_low * scale_left, scale_high * scale_left},
                                  {scale_low * scale_right, scale_high * scale_right}};
      wait(&shared.full[place.stage], place.parity);
      if (step + 1 < steps) fetch(step + 1);
      const Stage& stage = shared.stages[place.stage];
      const uint64_t a = by_rows(stage.left[part.number]), b = by_rows(stage.right);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float products[64];
        begin_products();
#pragma unroll
        for (int i = 0; i < kBlock / 32; ++i) {  // descriptors count 16 bytes
          multiply_e4m3(products, a + i * 2, b + half * (kBlock * kLine / 16) + i * 2, i > 0);
        }
        commit_products();
        wait_for_products<0>();
        if (half == 1) release(shared, place.stage);
#pragma unroll
        for (int i = 0; i < 64; ++i) {
          sums[half * 64 + i] = fmaf(products[i], scales[half][i / 2 % 2], sums[half * 64 + i]);
        }
      }
    }
  }
};

}  // namespace transformer_plugin::gemm::hopper

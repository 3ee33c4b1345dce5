// How a warpgroup sums its part of a tile of a weight gradient on Hopper, for each kind of operands.
#pragma once

#include <tuple>

#include "gemm/sm90/align_groups.h"
#include "gemm/sm90/pipeline.cuh"
#include "gemm/sm90/tensor_map.h"

namespace transformer_plugin::gemm::sm90 {

struct WeightGradArgs {
  const int32_t* offsets;  // or null for one group of all rows
  const float* alpha;
  const float* beta;  // of what `out` holds
  void* out;
  const float *a_scale, *b_scale;  // of whole groups, of the gradient and of the input: [groups]
  int64_t group_stride, row_stride;
  int groups, rows, m, n;
  uint32_t thread_boxes;
  bool accumulate;
  bool all_realigned;
  // Of a list of outputs, one for each group, their maps and addresses; or null for the stack.
  const CUtensorMap* out_maps;
  void* const* outs;
};

struct WeightGradMaps {
  CUtensorMap grad, input;
  CUtensorMap grad_moved, input_moved;  // of operands with groups at multiples of 16 bytes
  CUtensorMap grad_scale, input_scale;  // of blocks of 1x128: [row tiles, m] and [row tiles, n]
  CUtensorMap out;
};

// The rows of a group that a tile sums over, and the number of the first of the matrix's row tiles that are the group's.
struct Rows {
  int begin, end;
  int first_tile;
};

// Row tiles of groups, one group after the other: kRows rows each, and each group begins one.
template <int kRows>
class RowTiles {
 public:
  // Those of the groups before `group`, which never decreases.
  __device__ __forceinline__ int before(const int32_t* offsets, int group) {
#pragma unroll 1
    for (; group_ < group; ++group_) tiles_ += (offsets[group_ + 1] - offsets[group_] + kRows - 1) / kRows;
    return tiles_;
  }

 private:
  int group_ = 0, tiles_ = 0;
};

__device__ __forceinline__ int round_up(int size, int to) { return (size + to - 1) / to * to; }

// The products of a stage, `most` as a rule, of a group's last maybe fewer: multiply(i) starts the i-th. Few are a loop of
// its own, so that nothing is decided between many.
template <int most, typename Multiply>
__device__ __forceinline__ void multiply_each(int count, Multiply multiply) {
  if (count >= most) {
    begin_products();
#pragma unroll
    for (int i = 0; i < most; ++i) multiply(i);
    commit_products();
    return;
  }
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    begin_products();
    multiply(i);
    commit_products();
  }
}

// Those that multiply have changed the stage.
__device__ __forceinline__ void sync_changed_stage() {
  fence_for_copies();
  sync_threads(1 + kMultipliers, kMultipliers * kWarpgroup);
}

// 16-bit operands [T, m] and [T, n].
template <typename T>
struct PlainColumns {
  using Shared = PlainShared;
  static constexpr int kRows = kBoxLines;  // of a stage
  static constexpr bool group_scales = false;
  static constexpr bool kIsTold = true;  // of tiles, by the copier

  static void encode(WeightGradMaps& maps, const GroupedGemmArgs& args) {
    const auto map = [&](const void* data, int64_t lines) {
      return tensor_map({data, args.dtype, lines, args.rows, 1, lines, args.rows * lines}, kRows);
    };
    maps.grad = map(args.a, args.m);
    maps.input = map(args.b, args.n);
  }

  static __device__ __forceinline__ void fill(const WeightGradMaps& maps, const WeightGradArgs&,
                                              Shared& shared, const Place<Shared>& place, int block,
                                              const Tile& tile, const Rows&, int row) {
    fill_stage(
        shared, place, block, tile.same_columns,
        [&](void* to, int box, uint64_t* barrier, bool for_both) {
          load(for_both, to, maps.grad, barrier, tile.row * kTileRows + box * kBoxLines, row, 0);
        },
        [&](void* to, int box, uint64_t* barrier, bool for_both) {
          load(for_both, to, maps.input, barrier, tile.column * kTileColumns + box * kBoxLines, row, 0);
        });
  }

  // Zeroes the rows of a stage that are past the group's end, as far as products read them, by all that multiply.
  static __device__ __forceinline__ void zero_rows(Stage& stage, int left) {
    const int pieces = (round_up(left, kProductRows) - left) * (kLine / 16);  // of a box
    constexpr int kBoxes = kLeftBoxes + kRightBoxes;
    for (int i = static_cast<int>(threadIdx.x) - kWarpgroup; i < pieces * kBoxes;
         i += kMultipliers * kWarpgroup) {
      const int box = i / pieces;
      uint8_t* to = box < kLeftBoxes ? stage.left[box] : stage.right[box - kLeftBoxes];
      *reinterpret_cast<uint4*>(to + left * kLine + i % pieces * 16) = uint4{};
    }
    sync_changed_stage();
  }

  // Of so many rows; none are a stage without products.
  static __device__ __forceinline__ void sum(Shared& shared, Place<Shared>& place, int left, int number,
                                             float (&sums)[kSums]) {
    int read = -1;  // the stage of the step before
    do {
      wait(&shared.full[place.stage], place.parity);
      Stage& stage = shared.stages[place.stage];
      if (left < kRows) zero_rows(stage, left);
      const uint64_t a = by_columns(stage.left[number], kBoxBytes), b = by_columns(stage.right, kBoxBytes);
      multiply_each<kRows / kProductRows>((left + kProductRows - 1) / kProductRows, [&](int i) {
        multiply<T, true, true>(sums, a + i * kLine, b + i * kLine);  // descriptors count 16 bytes
      });
      wait_for_products<1>();
      if (read >= 0) release(&shared.empty[read]);
      read = place.stage;
      left -= kRows;
      place.next();
    } while (left > 0);
    wait_for_products<0>();
    release(&shared.empty[read]);
  }
};

// FP8 codes [m, T] and [n, T], a row of T a line, however their scales lie.
struct CodeLines {
  static constexpr int kRows = kLine;  // of a stage
  static constexpr bool kIsTold = false;

  static void encode(WeightGradMaps& maps, const GroupedGemmArgs& args) {
    const auto map = [&](const void* data, int64_t rows, int64_t lines) {
      return tensor_map({data, args.dtype, rows, lines, 1, rows, rows * lines}, kBoxLines);
    };
    if (!args.all_realigned) {
      maps.grad = map(args.a, args.rows, args.m);
      maps.input = map(args.b, args.rows, args.n);
    }
    if (args.a_realigned) {
      const int64_t columns = quantize::aligned_length(args.rows, args.groups);
      maps.grad_moved = map(args.a_realigned, columns, args.m);
      maps.input_moved = map(args.b_realigned, columns, args.n);
      if (args.all_realigned) std::tie(maps.grad, maps.input) = std::tie(maps.grad_moved, maps.input_moved);
    }
  }

  // `more_bytes` as of fill_stage.
  template <typename Shared>
  static __device__ __forceinline__ void fill_lines(const WeightGradMaps& maps, const WeightGradArgs& args,
                                                    Shared& shared, const Place<Shared>& place, int block,
                                                    const Tile& tile, const Rows& rows, int row,
                                                    uint32_t more_bytes) {
    const bool moved = is_moved(rows.begin, args.all_realigned);
    const CUtensorMap& grad = moved ? maps.grad_moved : maps.grad;
    const CUtensorMap& input = moved ? maps.input_moved : maps.input;
    const int begin = moved ? static_cast<int>(quantize::aligned_begin(rows.begin, tile.group)) : rows.begin;
    const int at = begin + row - rows.begin;
    const int left = tile.row * kTileRows, right = tile.column * kTileColumns;
    fill_stage(
        shared, place, block, tile.same_columns,
        [&](void* to, int box, uint64_t* barrier, bool for_both) {
          load(for_both, to, grad, barrier, at, left + box * kBoxLines, 0);
        },
        [&](void* to, int box, uint64_t* barrier, bool for_both) {
          load(for_both, to, input, barrier, at, right + box * kBoxLines, 0);
        },
        more_bytes);
  }

  // Zeroes the rows of a stage that are past the group's end, by all that multiply: the ends of its lines. The products of all
  // of a stage are made; to leave out those of zeros would cost what the others take more than it spares.
  static __device__ __forceinline__ void zero_rows(Stage& stage, int left) {
    constexpr int kLines = (kLeftBoxes + kRightBoxes) * kBoxLines;
    for (int i = static_cast<int>(threadIdx.x) - kWarpgroup; i < kLines; i += kMultipliers * kWarpgroup) {
      const int box = i / kBoxLines, line = i % kBoxLines;
      uint8_t* lines = box < kLeftBoxes ? stage.left[box] : stage.right[box - kLeftBoxes];
      int piece = left / 16;
      if (left % 16 != 0) {
        uint8_t* end = swizzled(lines, line, piece++);
        for (int byte = left % 16; byte < 16; ++byte) end[byte] = 0;
      }
      for (; piece < kLine / 16; ++piece) *reinterpret_cast<uint4*>(swizzled(lines, line, piece)) = uint4{};
    }
    sync_changed_stage();
  }
};

// E4M3 under scales of blocks of 1x128, which begin anew in each group. The sum of each block leaves the tensor cores as in
// `Blocks` of hopper_operands.cuh. A scale for every line comes with the stage.
template <typename Out>
struct BlockColumns : CodeLines {
  using Shared = LineScaledShared<Out>;
  static constexpr bool group_scales = false;
  static_assert(kRows == 128, "a stage is a block");
  // Pairs of scales that are read before they are wanted, the first of them while products run. More hold registers that
  // the order of what is added wants.
  static constexpr int kAhead = 4;

  static void encode(WeightGradMaps& maps, const GroupedGemmArgs& args) {
    CodeLines::encode(maps, args);
    const auto map = [&](const void* scales, int64_t lines, int box) {
      const int64_t row_tiles = quantize::Layout::row_tiles(args.rows, args.groups);
      return scale_map({scales, 1, row_tiles, ceil_div(lines, 4) * 4}, 1, box);
    };
    maps.grad_scale = map(args.a_scale, args.m, kTileRows);
    maps.input_scale = map(args.b_scale, args.n, kTileColumns);
  }

  static __device__ __forceinline__ void fill(const WeightGradMaps& maps, const WeightGradArgs& args,
                                              Shared& shared, const Place<Shared>& place, int block,
                                              const Tile& tile, const Rows& rows, int row) {
    LineScales& scales = shared.beside[place.stage];
    fill_lines(maps, args, shared, place, block, tile, rows, row, sizeof(scales));
    const int row_tile = rows.first_tile + (row - rows.begin) / kRows;
    uint64_t* full = &shared.full[place.stage];
    load_box(scales.left, maps.grad_scale, full, tile.row * kTileRows, row_tile, 0);
    load_box(scales.right, maps.input_scale, full, tile.column * kTileColumns, row_tile, 0);
  }

  static __device__ __forceinline__ void sum(Shared& shared, Place<Shared>& place, int left, int number,
                                             float (&sums)[kSums]) {
    const int lane = threadIdx.x % kWarpSize;
    const int line = number * kBoxLines + threadIdx.x % kWarpgroup / kWarpSize * 16 + lane / 4;
    for (; left > 0; left -= kRows, place.next()) {
      wait(&shared.full[place.stage], place.parity);
      Stage& stage = shared.stages[place.stage];
      const LineScales& scales = shared.beside[place.stage];
      if (left < kRows) zero_rows(stage, left);
      const uint64_t a = by_rows(stage.left[number]), b = by_rows(stage.right);
      const float low = scales.left[line], high = scales.left[line + 8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* right = &scales.right[half * 128 + lane % 4 * 2];
        const auto scale_of = [&](int j) { return *reinterpret_cast<const float2*>(right + j * 8); };
        float2 ahead[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) ahead[j] = scale_of(j);
        float products[64];
        multiply_stage<DType::kFloat8E4M3>(products, a, b, half);
        float* own = &sums[half * 64];
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          const float2 scale = ahead[j % kAhead];
          if (j + kAhead < 16) ahead[j % kAhead] = scale_of(j + kAhead);
          own[j * 4] = fmaf(products[j * 4], low * scale.x, own[j * 4]);
          own[j * 4 + 1] = fmaf(products[j * 4 + 1], low * scale.y, own[j * 4 + 1]);
          own[j * 4 + 2] = fmaf(products[j * 4 + 2], high * scale.x, own[j * 4 + 2]);
          own[j * 4 + 3] = fmaf(products[j * 4 + 3], high * scale.y, own[j * 4 + 3]);
        }
      }
      __syncwarp();  // all lanes have read the scales
      release(&shared.empty[place.stage]);
    }
  }
};

// FP8 codes under one scale for each group, of the gradient in E4M3 or E5M2, as `Codes` of hopper_operands.cuh.
template <DType grad_type>
struct CodeColumns : CodeLines {
  using Shared = ColumnsShared;
  static constexpr bool group_scales = true;

  static __device__ __forceinline__ void fill(const WeightGradMaps& maps, const WeightGradArgs& args,
                                              Shared& shared, const Place<Shared>& place, int block,
                                              const Tile& tile, const Rows& rows, int row) {
    fill_lines(maps, args, shared, place, block, tile, rows, row, 0);
  }

  static __device__ __forceinline__ void sum(Shared& shared, Place<Shared>& place, int left, int number,
                                             float (&sums)[kSums]) {
    for (; left > 0; left -= kRows, place.next()) {
      wait(&shared.full[place.stage], place.parity);
      Stage& stage = shared.stages[place.stage];
      if (left < kRows) zero_rows(stage, left);
      add_stage<grad_type>(sums, by_rows(stage.left[number]), by_rows(stage.right),
                           [&] { release(&shared.empty[place.stage]); });
    }
  }
};

}  // namespace transformer_plugin::gemm::sm90

// What Hopper's grouped products share: the tiles of an output and the order in which clusters take them, stages of
// operands on their way through shared memory, and the way of sums out of registers.
//
// Two blocks are a cluster and take two tiles of one group side by side: as a rule two of the same columns, so that each
// loads half of the wider operand for both; the last row of tiles, where their number is odd, by two of the same rows. A
// block is three warpgroups: one thread of the first, the copier, starts the copies, the others multiply 64 rows of a tile
// each.
#pragma once

#include <cstddef>
#include <cstring>

#include "common/launch.cuh"
#include "gemm/sm90/launch.h"
#include "gemm/sm90/ptx.cuh"

namespace transformer_plugin::gemm::sm90 {

inline constexpr int kWarpgroup = 128;  // threads
inline constexpr int kMultipliers = 2;  // warpgroups
inline constexpr int kThreads = kWarpgroup * (1 + kMultipliers);
inline constexpr int kLine = 128;     // bytes of a row in shared memory: the width of the swizzle
inline constexpr int kBoxLines = 64;  // of an operand or of the output, copied at once
inline constexpr int kBoxBytes = kBoxLines * kLine;
inline constexpr int kLeftBoxes = kTileRows / kBoxLines, kRightBoxes = kTileColumns / kBoxLines;
inline constexpr int kSums = kTileColumns / 2;  // of a thread
static_assert(kTileRows == kMultipliers * kBoxLines && kCluster == 2, "what the code below counts on");

// Of a thread; together what 168 for each would be, which a block of so many threads begins with.
inline constexpr int kCopierRegisters = 56, kMultiplierRegisters = 224;
static_assert(kCopierRegisters + kMultipliers * kMultiplierRegisters == 168 * (1 + kMultipliers), "no more");

template <typename T>
inline constexpr int kStep = kLine / static_cast<int>(sizeof(T));  // of the dimension summed over, in a stage

struct Stage {
  alignas(1024) uint8_t left[kLeftBoxes][kBoxBytes];
  alignas(1024) uint8_t right[kRightBoxes][kBoxBytes];
};
// A tile that the copier has found. Those that multiply learn of it with the first of its stages, and need not look for it: the
// copier, ahead by the stages, does while they multiply. An end takes the turn of one more stage.
struct alignas(16) FoundTile {
  int kind;  // -1: the end, no tile is left; else twice the group, and 1 more where a block takes half of the columns
  int row, column;  // of the output, its first
  int rows;         // of the group from `row` on; may be none or fewer

  static __device__ __forceinline__ FoundTile none() { return {-1, 0, 0, 0}; }
  static __device__ __forceinline__ FoundTile of(int group, bool is_half, int row, int column, int rows) {
    return {group * 2 + is_half, row, column, rows};
  }
  __device__ __forceinline__ int group() const { return kind >> 1; }
  __device__ __forceinline__ bool is_half() const { return kind & 1; }
};
static_assert(sizeof(FoundTile) == sizeof(int4), "stored at once");

// What comes with the stages besides operands: a tile each, if it is the tile's first,
template <int stages>
class TilesAlone {
 public:
  __device__ __forceinline__ FoundTile& tile(int stage) { return tiles_[stage]; }

 private:
  FoundTile tiles_[stages];
};
// the same and the scales of the tile's lines, from a multiple of 4 rows on, and of its two blocks of columns for 4 steps. Boxes
// begin at multiples of 128 bytes; all that is between them, and behind, is needed.
template <int stages>
class RowScales {
 public:
  static constexpr int kRows = kTileRows + 4, kSteps = 4;
  static constexpr int kBytes = (kRows + 2 * kSteps) * sizeof(float);  // of a stage

  __device__ __forceinline__ float* rows(int stage) { return rows_[stage].scales; }
  __device__ __forceinline__ float (&columns(int stage))[2][kSteps] {
    return *reinterpret_cast<float(*)[2][kSteps]>(columns_ + stage * kBoxStride);
  }
  __device__ __forceinline__ FoundTile& tile(int stage) { return rows_[stage].tile; }

 private:
  static constexpr int kBoxStride = 32;
  struct Rows {
    alignas(16) float scales[kRows];
    FoundTile tile;
    float unused[24];
  };
  static_assert(sizeof(Rows) % 128 == 0, "boxes begin there");

  Rows rows_[stages];
  float columns_[(stages - 1) * kBoxStride + 2 * kSteps];
};
// or, in weight gradients of FP8, where all find their tiles themselves, scales of the lines of both operands or nothing.
struct LineScales {
  alignas(128) float left[kTileRows], right[kTileColumns];
};
struct Nothing {};

template <typename Beside, int stage_count, int box_count>
struct SharedOf {
  static constexpr int kStages = stage_count;
  static constexpr int kBoxes = box_count;  // of a warpgroup on their way out, in turn

  Stage stages[kStages];
  alignas(1024) uint8_t out[kMultipliers][kBoxes][kBoxBytes];
  Beside beside;
  uint64_t full[kStages], empty[kStages];

  __device__ __forceinline__ FoundTile& tile(int stage) { return beside.tile(stage); }
};
using PlainShared = SharedOf<TilesAlone<4>, 4, 2>;
using ColumnsShared = SharedOf<Nothing, 4, 2>;
using RowScaledShared = SharedOf<RowScales<4>, 4, 2>;
// Sums of 16 bits leave fastest all at once, for which a stage less is left; FP32 that threads and the copy engine add in turns
// needs one box.
template <typename Out, int stages = sizeof(Out) == 4 ? 4 : 3>
using LineScaledShared = SharedOf<LineScales[stages], stages, sizeof(Out) == 4 ? 1 : 4>;
static_assert(sizeof(RowScaledShared) <= 232448 && sizeof(LineScaledShared<float>) <= 232448,
              "what a block may have");
static_assert(offsetof(RowScaledShared, beside) % 128 == 0, "boxes begin at multiples of 128 bytes");

// Where a thread is in the ring of stages.
template <typename Shared>
struct Place {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == Shared::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// A stage is full when the thread that starts copies of boxes has announced them, `others` have arrived, and all bytes are
// there.
template <typename Shared>
__device__ __forceinline__ void init_stages(Shared& shared, uint32_t others = 0) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shared::kStages; ++stage) {
      init_barrier(&shared.full[stage], 1 + others);
      init_barrier(&shared.empty[stage], kCluster * kMultipliers * kWarpgroup / kWarpSize);
    }
    publish_barriers();
  }
  sync_cluster();
}

// By the copier, when the tile's first stage is empty, before it arrives at that one's barrier. The tile comes as boxes do, so
// those who wait for the stage have it; that a thread's own store is ordered by its arrival compute-sanitizer does not see where
// copies end a phase.
template <typename Shared>
__device__ __forceinline__ void tell_of(Shared& shared, int stage, const FoundTile& tile) {
  uint64_t* full = &shared.full[stage];
  expect(full, sizeof(tile));
  store_for(full, &shared.tile(stage), {tile.kind, tile.row, tile.column, tile.rows});
}
// The same, having waited for that.
template <typename Shared>
__device__ __forceinline__ void tell(Shared& shared, const Place<Shared>& place, const FoundTile& tile) {
  wait(&shared.empty[place.stage], place.parity ^ 1);
  tell_of(shared, place.stage, tile);
}
// By all threads of a warp that multiplies: the tile whose first stage is next, or false at the end. A vote, so that the compiler
// knows a loop on it for one that all threads take alike: else it loses the uniform registers by which products are started.
template <typename Shared>
__device__ __forceinline__ bool hear(Shared& shared, const Place<Shared>& place, FoundTile& tile) {
  wait(&shared.full[place.stage], place.parity);
  tile = shared.tile(place.stage);
  __syncwarp();  // all lanes have read it before one releases the stage
  return __any_sync(~0u, tile.kind >= 0);
}

// All boxes of a stage, by one thread: load(to, box, barrier, shared) for each. What the tiles of the cluster share, each
// of its blocks loads a half of for both. Of the right operand the first `right_boxes` are wanted. `more_bytes` are announced
// too; who asks for them loads them.
template <int right_boxes = kRightBoxes, typename Shared, typename LoadLeft, typename LoadRight>
__device__ __forceinline__ void fill_stage(Shared& shared, const Place<Shared>& place, int block,
                                           bool same_columns, LoadLeft load_left, LoadRight load_right,
                                           uint32_t more_bytes = 0) {
  uint64_t* full = &shared.full[place.stage];
  auto& stage = shared.stages[place.stage];
  wait(&shared.empty[place.stage], place.parity ^ 1);
  arrive_and_expect(full, sizeof(stage.left) + right_boxes * kBoxBytes + more_bytes);
  if (same_columns) {
#pragma unroll
    for (int box = 0; box < kLeftBoxes; ++box) load_left(stage.left[box], box, full, false);
#pragma unroll
    for (int i = 0; i < right_boxes / kCluster; ++i) {
      const int box = block * (right_boxes / kCluster) + i;
      load_right(stage.right[box], box, full, true);
    }
  } else {
    load_left(stage.left[block], block, full, true);
#pragma unroll
    for (int box = 0; box < right_boxes; ++box) load_right(stage.right[box], box, full, false);
  }
}
// The right operand's boxes alone.
template <int right_boxes = kRightBoxes, typename LoadRight>
__device__ __forceinline__ void fill_right(uint8_t (&boxes)[kRightBoxes][kBoxBytes], uint64_t* full,
                                           int block, bool same_columns, LoadRight load_right) {
  arrive_and_expect(full, right_boxes * kBoxBytes);
  const int count = same_columns ? right_boxes / kCluster : right_boxes;
  const int first = same_columns ? block * count : 0;
#pragma unroll 1
  for (int box = first; box < first + count; ++box) load_right(boxes[box], box, full, same_columns);
}

// A box for this block, or for both.
__device__ __forceinline__ void load(bool for_both, void* to, const CUtensorMap& map, uint64_t* barrier,
                                     int x, int y, int z) {
  for_both ? load_box_for((1 << kCluster) - 1, to, map, barrier, x, y, z)
           : load_box(to, map, barrier, x, y, z);
}

// A warp has read what this barrier of both blocks is about.
__device__ __forceinline__ void release(uint64_t* empty) {
  const uint32_t lane = threadIdx.x % kWarpSize;
  if (lane < kCluster) arrive_at(empty, lane);
}

// 0, which the compiler takes for a number of each thread. What it knows to be the same in all threads it moves into a
// uniform register as soon as it is loaded, and so waits for it.
__device__ __forceinline__ int zero_of_thread() {
  int zero;
  asm("shr.u32 %0, %1, 31;" : "=r"(zero) : "r"(threadIdx.x));
  return zero;
}

// FP8 codes by rows: the products of a stage's 64 lines of `a` and a half of its lines of `b`, summed over the stage.
template <DType a_type>
__device__ __forceinline__ void multiply_stage(float (&products)[kSums / 2], uint64_t a, uint64_t b,
                                               int half) {
  begin_products();
#pragma unroll
  for (int i = 0; i < kLine / 32; ++i) {  // descriptors count 16 bytes
    multiply_fp8<a_type>(products, a + i * 2, b + half * (kTileColumns / 2 * kLine / 16) + i * 2, i > 0);
  }
  commit_products();
  wait_for_products<0>();
}

// Adds those of both halves, or of the first, in FP32; release() when the stage has been read.
template <DType a_type, int halves = 2, typename Release>
__device__ __forceinline__ void add_stage(float (&sums)[kSums], uint64_t a, uint64_t b, Release release) {
#pragma unroll
  for (int half = 0; half < halves; ++half) {
    float products[kSums / 2];
    multiply_stage<a_type>(products, a, b, half);
    if (half == halves - 1) release();
#pragma unroll
    for (int i = 0; i < kSums / 2; ++i) sums[half * (kSums / 2) + i] += products[i];
  }
}

// A matrix of so many tiles taken by two blocks at a time.
struct Pairs {
  int rows, columns;  // tiles
  __device__ __forceinline__ int side_by_side() const { return rows / 2 * columns; }
  __device__ __forceinline__ int count() const { return side_by_side() + rows % 2 * ((columns + 1) / 2); }
};
struct Tile {
  int group;
  int row, column;  // tiles, of the group's part of the output; the column may
                    // be past the last
  bool same_columns;
};
// Pairs are taken in bands of so many below each other, column by column: those that are worked on at a time are about
// as many columns, so that together they read the least of both operands.
inline constexpr int kBand = 8;

__device__ __forceinline__ Tile tile_of(const Pairs& pairs, int index, int block) {
  const int last_row = index - pairs.side_by_side();
  if (last_row >= 0) return {0, pairs.rows - 1, last_row * 2 + block, false};
  const int first = index / (kBand * pairs.columns) * kBand;  // of the band's rows of pairs
  const int within = index - first * pairs.columns, height = min(kBand, pairs.rows / 2 - first);
  return {0, (first + within % height) * 2 + block, within / height, true};
}

// A 16-byte piece of a row in shared memory, as the swizzle has it.
__device__ __forceinline__ uint8_t* swizzled(uint8_t* box, int row, int piece) {
  return box + row * kLine + (piece ^ row % 8) * 16;
}

template <typename T>
__device__ __forceinline__ uint32_t two_rounded(float x, float y) {
  uint32_t word;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(x, y);
    memcpy(&word, &two, sizeof(word));
  } else {
    const __half2 two = __floats2half2_rn(x, y);
    memcpy(&word, &two, sizeof(word));
  }
  return word;
}

template <typename T>
__device__ __forceinline__ float2 as_floats(uint32_t two) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {  // the upper half of a float
    return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
  } else {
    __half2 values;
    memcpy(&values, &two, sizeof(two));
    return __half22float2(values);
  }
}

// A warpgroup's sums into a box in shared memory: 64 rows by the i-th line's worth of columns, rounded to T.
template <typename T>
__device__ __forceinline__ void write_box(const float (&sums)[kSums], int i, uint8_t* box) {
  const int lane = threadIdx.x % kWarpSize;
  const int first_row = threadIdx.x % kWarpgroup / kWarpSize * 16;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if constexpr (sizeof(T) ==
                  2) {  // four matrices of 8 x 8: rows 0 to 7 and 8 to 15, then the next 8 columns
      const float* own = &sums[i * 32 + j * 8];
      const uint32_t words[] = {two_rounded<T>(own[0], own[1]), two_rounded<T>(own[2], own[3]),
                                two_rounded<T>(own[4], own[5]), two_rounded<T>(own[6], own[7])};
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       shared_address(swizzled(box, first_row + lane % 16, j * 2 + lane / 16))),
                   "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                   : "memory");
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* own = &sums[i * 16 + j * 4 + half * 2];
        uint8_t* piece = swizzled(box, first_row + half * 8 + lane / 4, j * 2 + lane % 4 / 2);
        *reinterpret_cast<float2*>(piece + lane % 2 * 8) = make_float2(own[0], own[1]);
      }
    }
  }
}

// A warpgroup's sums, or those of the first `columns`, to the output: box by box, or all at once where there are boxes for a
// whole tile's. When a box is written, store(box, column) with the first of its columns, called by all threads.
template <typename T, int columns = kTileColumns, int kBoxes, typename Store>
__device__ __forceinline__ void store_sums(const float (&sums)[kSums], uint8_t (&boxes)[kBoxes][kBoxBytes],
                                           int number, Store store) {
  constexpr int kColumns = kStep<T>, kCount = columns / kColumns;
  const bool first = threadIdx.x % kWarpgroup == 0;
  if constexpr (kBoxes * kColumns >= kTileColumns) {
    if (first) wait_until_stored<0>();
    sync_threads(1 + number, kWarpgroup);
#pragma unroll
    for (int i = 0; i < kCount; ++i) write_box<T>(sums, i, boxes[i]);
    fence_for_copies();
    sync_threads(1 + number, kWarpgroup);
#pragma unroll
    for (int i = 0; i < kCount; ++i) store(boxes[i], i * kColumns);
    if (first) commit_stores();
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      uint8_t* box = boxes[i % kBoxes];
      if (first) wait_until_stored<kBoxes - 1>();
      sync_threads(1 + number, kWarpgroup);
      write_box<T>(sums, i, box);
      fence_for_copies();
      sync_threads(1 + number, kWarpgroup);
      store(box, i * kColumns);
      if (first) commit_stores();
    }
  }
}

// What the sums of a group are multiplied by: its alpha, and the scales of both operands where they are of whole groups.
template <bool group_scales, typename Args>
__device__ __forceinline__ float factor_of(const Args& args, int group) {
  const float alpha = args.alpha ? args.alpha[group] : 1.0f;
  if constexpr (group_scales) return args.a_scale[group] * args.b_scale[group] * alpha;
  return alpha;
}

// The blocks of a launch.
inline unsigned grid_of(const Sm90Config& plan) { return static_cast<unsigned>(plan.clusters * kCluster); }

}  // namespace transformer_plugin::gemm::sm90

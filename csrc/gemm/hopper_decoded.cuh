// Products of ragged rows of microscaled codes on Hopper, whose tensor cores have no scales for 32 or 16 codes: the kernel
// decodes both operands to bfloat16 on their way, so that widened weights are never in memory.
//
// A block is four warpgroups. Two decode the right operand, a line of it for each thread, from shared memory to shared memory,
// and one of their threads starts the copies; the other two multiply as those of hopper_rows.cuh, and decode their rows of the
// left operand in registers. There are two rings: stages of codes as they were copied, and steps of the right operand's
// values, kStepCodes of each line.
//
// What is summed over may be in any order that is the same in both operands. A thread of four that have one row of the left
// operand holds every fourth pair of values that a product takes; so that these come from one chunk of 16 codes, the values of
// a line lie in shared memory as pieces of four pairs, piece j of the j-th pairs of the step's four chunks.
#pragma once

#include <cstddef>

#include "gemm/hopper_decode.cuh"
#include "gemm/hopper_rows.cuh"

namespace transformer_plugin::gemm::hopper {

inline constexpr int kDecoders = 2;  // warpgroups
inline constexpr int kDecodedThreads = (kDecoders + kMultipliers) * kWarpgroup;
static_assert(kTileColumns == kDecoders * kWarpgroup && kDecoders == kMultipliers,
              "a line for each thread, and as many of both roles");
// Of a thread; together what 128 for each would be. A product of 256 columns needs more than 128 to be compiled, of 128 not.
inline constexpr int kDecoderRegisters = 64, kDecodedMultiplierRegisters = 192;
static_assert(kDecoders * kDecoderRegisters + kMultipliers * kDecodedMultiplierRegisters ==
                  128 * (kDecoders + kMultipliers),
              "no more");
inline constexpr int kRoleWarps = kDecoders * kWarpgroup / kWarpSize;  // that decode, or that multiply

inline constexpr int kStepCodes = kStep<__nv_bfloat16>, kChunks = kStepCodes / kChunk;  // of a line in a step
static_assert(kChunks == 4, "the threads that have a row of the left operand");

struct DecodedShared {
  static constexpr int kStages = 3, kSteps = 2, kBoxes = 1;

  Stage stages[kStages];
  alignas(1024) uint8_t steps[kSteps][kTileColumns * kLine];
  alignas(1024) uint8_t out[kMultipliers][kBoxes][kBoxBytes];
  uint64_t full[kStages], empty[kStages];
  uint64_t decoded[kSteps], read[kSteps];
};
static_assert(sizeof(DecodedShared) <= 232448, "what a block may have");

// Scales of codes, a byte each, a line of `width` for each line of codes: words of four.
struct ScaleBytes {
  const uint8_t *a, *b;
  int64_t b_group;  // from one group of b to the next
  int64_t width;
};

struct Steps {
  static constexpr int kStages = DecodedShared::kSteps;
};
using StepPlace = Place<Steps>;  // where a thread is in the ring of steps

__device__ __forceinline__ void init_rings(DecodedShared& shared) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < DecodedShared::kStages; ++i) {
      init_barrier(&shared.full[i], 1);
      init_barrier(&shared.empty[i], kCluster * 2 * kRoleWarps);
    }
    for (int i = 0; i < DecodedShared::kSteps; ++i) {
      init_barrier(&shared.decoded[i], kRoleWarps);
      init_barrier(&shared.read[i], kRoleWarps);
    }
    publish_barriers();
  }
  sync_cluster();
}

template <typename Format>
inline constexpr int kStepBytes = kChunks * static_cast<int>(sizeof(typename Format::Codes));
template <typename Format>
inline constexpr int kStageSteps = kLine / kStepBytes<Format>;

// Where a line begins in its operand's boxes, so that `place ^ byte` is that of a byte of it under the swizzle.
__device__ __forceinline__ int place_of_line(int line) { return line * kLine + line % 8 * 16; }
// The same number, of which the compiler keeps nothing computed beforehand: registers are rarer than time for it.
__device__ __forceinline__ int computed_again(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

// Chunk `chunk` of a step of a stage, of the line at `place` in its boxes.
template <typename Format>
__device__ __forceinline__ typename Format::Codes codes_of(const uint8_t* boxes, int place, int step,
                                                           int chunk) {
  using Codes = typename Format::Codes;
  const int byte = step % kStageSteps<Format> * kStepBytes<Format> + chunk * static_cast<int>(sizeof(Codes));
  return *reinterpret_cast<const Codes*>(boxes + (place ^ byte));
}

// The scales of a line, a word of four at a time, each sent for a step before it is used.
template <typename Format>
class ScaleWords {
 public:
  static constexpr int kStepScales = kStepCodes >> Format::kScaleShift;
  static constexpr int kWordSteps = 4 / kStepScales;

  // `line` is null where there is none: its scales are 0.
  __device__ __forceinline__ void begin(const uint8_t* line, int k) {
    line_ = reinterpret_cast<const uint32_t*>(line);
    left_ = line ? (k + (1 << Format::kScaleShift) - 1) >> Format::kScaleShift : 0;
    next_ = fetch();
  }
  // To the scales of `step`, the next one; where a word of them begins, the word after it is sent for.
  __device__ __forceinline__ void advance(int step) {
    if (step % kWordSteps != 0) return;
    word_ =
        left_ >= 4 ? next_ : next_ & ((1u << max(left_, 0) * 8) - 1);  // of what is past k, codes are zero
    left_ -= 4;
    ++line_;
    next_ = fetch();
  }
  __device__ __forceinline__ uint32_t of(int step, int chunk) const {
    const int scale = step % kWordSteps * kStepScales + (chunk * kChunk >> Format::kScaleShift);
    return word_ >> scale * 8 & 0xff;
  }

 private:
  __device__ __forceinline__ uint32_t fetch() const { return left_ > 0 ? __ldg(line_) : 0; }

  const uint32_t* line_;
  uint32_t word_, next_;
  int left_;  // scales, from `next_` on
};

// What a thread decodes of the right operand, a line.
template <typename Format>
class RightDecoder {
 public:
  __device__ __forceinline__ RightDecoder(const RowsArgs& args, const ScaleBytes& scales, const Tile& tile)
      : place_(place_of_line(threadIdx.x)) {
    const int line = tile.column * kTileColumns + static_cast<int>(threadIdx.x);
    const uint8_t* own = scales.b + tile.group * scales.b_group + line * scales.width;
    scales_.begin(line < args.n ? own : nullptr, args.k);
  }
  __device__ __forceinline__ void advance(int step) { scales_.advance(step); }
  __device__ __forceinline__ void decode(const uint8_t* boxes, uint8_t* to, int step) const {
    const int place = computed_again(place_);
    Values values[kChunks];
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      Format::decode(codes_of<Format>(boxes, place, step, i), scales_.of(step, i), values[i]);
    }
#pragma unroll
    for (int j = 0; j < kChunk / 2; ++j) {
      *reinterpret_cast<uint4*>(to + (place ^ j * 16)) = {values[0][j], values[1][j], values[2][j],
                                                          values[3][j]};
    }
  }

 private:
  ScaleWords<Format> scales_;
  int place_;
};

// Starts the copies of stages one after the other, of all tiles of a block, a warp together.
template <typename Format>
class Copier {
 public:
  __device__ __forceinline__ Copier(const RowsArgs& args, const CUtensorMap& a, const CUtensorMap& b,
                                    int block, int steps)
      : a_(a),
        b_(b),
        walk_(args, block),
        block_(block),
        steps_(steps),
        step_(steps),
        index_(cluster_in_grid()) {}

  __device__ __forceinline__ void start_next(DecodedShared& shared) {
    if (step_ >= steps_) {
      if (!walk_.find(index_, tile_)) return;
      index_ += static_cast<int>(gridDim.x) / kCluster;
      step_ = 0;
    }
    if (threadIdx.x % kWarpSize == 0) {
      const int row = walk_.begin_row + tile_.row * kTileRows, column = tile_.column * kTileColumns;
      const int byte = step_ * kStepBytes<Format>;
      fill_stage(
          shared, place_, block_, tile_.same_columns,
          [&](void* to, int box, uint64_t* barrier, bool for_both) {
            load(for_both, to, a_, barrier, byte, row + box * kBoxLines, 0);
          },
          [&](void* to, int box, uint64_t* barrier, bool for_both) {
            load(for_both, to, b_, barrier, byte, column + box * kBoxLines, tile_.group);
          });
    }
    __syncwarp();
    place_.next();
    step_ += kStageSteps<Format>;
  }

 private:
  const CUtensorMap &a_, &b_;
  RowsWalk walk_;
  Place<DecodedShared> place_;
  Tile tile_;
  int block_, steps_, step_, index_;
};

// The rows of the left operand that a thread multiplies, lane / 4 and 8 more of its warp's 16, and of each the chunk lane % 4.
template <typename Format>
class LeftDecoder {
 public:
  using Step = Values[2];

  __device__ __forceinline__ LeftDecoder(const RowsArgs& args, const ScaleBytes& scales, const Part& part)
      : chunk_(threadIdx.x % 4) {
    const int own = threadIdx.x % kWarpgroup / kWarpSize * 16 + threadIdx.x % kWarpSize / 4;
    place_ = place_of_line(own);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = part.row + own + i * 8;
      scales_[i].begin(row < args.rows ? scales.a + row * scales.width : nullptr, args.k);
    }
  }
  __device__ __forceinline__ void decode(const uint8_t* box, int step, Step& values) {
    const int place = computed_again(place_);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scales_[i].advance(step);
      Format::decode(codes_of<Format>(box, place + i * 8 * kLine, step, chunk_), scales_[i].of(step, chunk_),
                     values[i]);
    }
  }

 private:
  ScaleWords<Format> scales_[2];
  int place_, chunk_;
};

// The registers are those of these values until here, though products that read them started long ago.
__device__ __forceinline__ void keep(const Values (&values)[2]) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) asm volatile("" ::"r"(values[i % 2][i / 2]));
}

// Sums a warpgroup's part of a tile.
template <typename Format>
__device__ __forceinline__ void sum_decoded(const RowsArgs& args, const ScaleBytes& scales,
                                            DecodedShared& shared, Place<DecodedShared>& place,
                                            StepPlace& step_place, int steps, const Part& part,
                                            float (&sums)[kSums]) {
  using Left = LeftDecoder<Format>;
  const bool first_lane = threadIdx.x % kWarpSize == 0;
  Left left(args, scales, part);
  typename Left::Step values, next;
  const auto decode = [&](int step) {
    if (step % kStageSteps<Format> == 0) wait(&shared.full[place.stage], place.parity);
    left.decode(shared.stages[place.stage].left[part.number], step, next);
    if ((step + 1) % kStageSteps<Format> == 0 || step + 1 == steps) {
      release(shared, place.stage);
      place.next();
    }
  };
  decode(0);
#pragma unroll 1
  for (int step = 0; step < steps; ++step, step_place.next()) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) values[i % 2][i / 2] = next[i % 2][i / 2];
    wait(&shared.decoded[step_place.stage], step_place.parity);
    const uint64_t b = by_rows(shared.steps[step_place.stage]);
    begin_products();
#pragma unroll
    for (int i = 0; i < kStepCodes / 16; ++i) {  // descriptors count 16 bytes
      const uint32_t a[] = {values[0][i * 2], values[1][i * 2], values[0][i * 2 + 1], values[1][i * 2 + 1]};
      multiply_registers<0>(sums, a, b + i * 2);
      multiply_registers<1>(sums, a, b + kTileColumns / 2 * kLine / 16 + i * 2);
    }
    commit_products();
    if (step + 1 < steps) decode(step + 1);
    wait_for_products<0>();
    keep(values);
    if (first_lane) arrive_here(&shared.read[step_place.stage]);
  }
  if constexpr (Format::kLeftOver != 1.0f) {
#pragma unroll
    for (float& sum : sums) sum *= Format::kLeftOver * Format::kLeftOver;
  }
}

// As many steps and stages as sum_decoded reads.
template <typename Format>
__device__ __forceinline__ void skip_decoded(DecodedShared& shared, Place<DecodedShared>& place,
                                             StepPlace& step_place, int steps) {
#pragma unroll 1
  for (int step = 0; step < steps; ++step, step_place.next()) {
    if (step % kStageSteps<Format> == 0) {
      wait(&shared.full[place.stage], place.parity);
      release(shared, place.stage);
      place.next();
    }
    wait(&shared.decoded[step_place.stage], step_place.parity);
    if (threadIdx.x % kWarpSize == 0) arrive_here(&shared.read[step_place.stage]);
  }
}

template <typename Format>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kDecodedThreads, 1)
    hopper_decoded_rows_kernel(const __grid_constant__ CUtensorMap a_map,
                               const __grid_constant__ CUtensorMap b_map,
                               const __grid_constant__ CUtensorMap out_map,
                               const __grid_constant__ ScaleBytes scales,
                               const __grid_constant__ RowsArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Out = __nv_bfloat16;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  DecodedShared& shared = *reinterpret_cast<DecodedShared*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  const int block = static_cast<int>(block_in_cluster());
  if (threadIdx.x == 0) {
    prefetch(a_map);
    prefetch(b_map);
    prefetch(out_map);
  }
  init_rings(shared);
  wait_for_the_kernel_before();
  const int clusters = static_cast<int>(gridDim.x) / kCluster;
  const int steps = (args.k + kStepCodes - 1) / kStepCodes;
  Tile tile;
  Place<DecodedShared> place;
  StepPlace step_place;
  if (warpgroup < kDecoders) {
    fewer_registers<kDecoderRegisters>();
    RowsWalk walk(args, block);
    const bool copies = threadIdx.x < kWarpSize, first_lane = threadIdx.x % kWarpSize == 0;
    Copier<Format> copier(args, a_map, b_map, block, steps);
    if (copies) {
      for (int stage = 0; stage + 1 < DecodedShared::kStages; ++stage) copier.start_next(shared);
    }
    for (int index = cluster_in_grid(); walk.find(index, tile); index += clusters) {
      RightDecoder<Format> right(args, scales, tile);
#pragma unroll 1
      for (int step = 0; step < steps; ++step, step_place.next()) {
        right.advance(step);
        const bool first_of_stage = step % kStageSteps<Format> == 0;
        if (first_of_stage) wait(&shared.full[place.stage], place.parity);
        wait(&shared.read[step_place.stage], step_place.parity ^ 1);
        // By now those that multiply are done with the stage before, whose place this takes.
        if (copies && first_of_stage) copier.start_next(shared);
        right.decode(shared.stages[place.stage].right[0], shared.steps[step_place.stage], step);
        fence_for_copies();
        __syncwarp();
        if (first_lane) arrive_here(&shared.decoded[step_place.stage]);
        if ((step + 1) % kStageSteps<Format> == 0 || step + 1 == steps) {
          release(shared, place.stage);
          place.next();
        }
      }
    }
    zero_tail<Out>(args, kRoleWarps, threadIdx.x / kWarpSize);
  } else {
    more_registers<kDecodedMultiplierRegisters>();
    RowsWalk walk(args, block);
    const int number = warpgroup - kDecoders;
    for (int index = cluster_in_grid(); walk.find(index, tile); index += clusters) {
      const Part part{tile.group, number, walk.begin_row + tile.row * kTileRows + number * kBoxLines,
                      walk.end_row, tile.column * kTileColumns};
      if (part.row >= part.end_row || part.column >= args.n) {  // nothing of this warpgroup's
        skip_decoded<Format>(shared, place, step_place, steps);
        continue;
      }
      float sums[kSums] = {};
      sum_decoded<Format>(args, scales, shared, place, step_place, steps, part, sums);
      scale_and_add_bias<Plain<Out, false>>(args, part, sums);
      store_rows<Out>(args, out_map, part, sums, shared.out[number]);
    }
    if (threadIdx.x % kWarpgroup == 0) wait_until_stored<0>();
  }
  sync_cluster();  // neither block leaves while the other may arrive at its barriers
#endif
}

template <typename Format>
void launch_decoded_rows(const GroupedKernelArgs& args, const HopperPlan& plan, cudaStream_t stream) {
  constexpr auto kernel = hopper_decoded_rows_kernel<Format>;
  static DynamicSharedMemory shared_memory;
  constexpr int kShared = sizeof(DecodedShared);
  shared_memory.allow(kernel, kShared);
  const int64_t bytes = args.k * static_cast<int64_t>(sizeof(typename Format::Codes)) / kChunk;  // of a line
  const CUtensorMap a =
      tensor_map({args.a, args.dtype, bytes, args.rows, 1, bytes, args.rows * bytes}, kBoxLines);
  const CUtensorMap b =
      tensor_map({args.b, args.dtype, bytes, args.n, args.groups, bytes, args.n * bytes}, kBoxLines);
  const CUtensorMap out = tensor_map(
      {args.out, args.out_dtype, args.n, args.rows, 1, args.out_row_stride, args.rows * args.out_row_stride},
      kBoxLines);
  constexpr int64_t kScaled = int64_t{1} << Format::kScaleShift;
  const int64_t width = ((args.k + kScaled - 1) / kScaled + 3) / 4 * 4;
  const ScaleBytes scales{static_cast<const uint8_t*>(args.a_scale),
                          static_cast<const uint8_t*>(args.b_scale), (args.n + 127) / 128 * 128 * width,
                          width};
  launch_early(kernel, grid_of(plan), kDecodedThreads, kShared, stream, a, b, out, scales, rows_args(args));
  check_launch("hopper_decoded_rows_kernel");
}

}  // namespace transformer_plugin::gemm::hopper

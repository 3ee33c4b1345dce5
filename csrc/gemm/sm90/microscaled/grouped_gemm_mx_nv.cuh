// Products of ragged rows of microscaled codes on Hopper, whose tensor cores have no scales for 32 or 16 codes: codes become
// bfloat16 on their way, so that widened weights are never in memory.
//
// Shared memory gives products what they read at half of its rate. Were both operands decoded there, one as it is written back,
// the other half would not do, so that the two go different ways. The weights are the left operand, which products may take from
// registers: a thread decodes what it multiplies by, while the products of the step before run. The rows are the right operand:
// they go to memory in bfloat16 once (hopper_widen.cuh), by warps of these blocks that have nothing else to do and keep ahead of
// the copies, or by a small kernel before. So tiles are turned: 128 columns of the output by 256 of its rows.
#pragma once

#include "gemm/sm90/grouped_gemm.cuh"
#include "gemm/sm90/microscaled/dequantize_a_operand.cuh"
#include "gemm/sm90/microscaled/dequantize_b_prepass.cuh"

namespace transformer_plugin::gemm::sm90 {

// Two rings: the left operand's codes, which last for some steps, and the right one's values, for one each.
struct DecodedShared {
  static constexpr int kLefts = 3, kStages = 4, kBoxes = 2;

  alignas(1024) uint8_t left[kLefts][kLeftBoxes][kBoxBytes];
  alignas(1024) uint8_t right[kStages][kRightBoxes][kBoxBytes];
  alignas(1024) uint8_t out[kMultipliers][kBoxes][kBoxBytes];
  uint64_t left_full[kLefts], left_empty[kLefts];
  uint64_t full[kStages], empty[kStages];
};
static_assert(sizeof(DecodedShared) <= 232448, "what a block may have");

struct Lefts {
  static constexpr int kStages = DecodedShared::kLefts;
};
using LeftPlace = Place<Lefts>;
using RightPlace = Place<DecodedShared>;

__device__ __forceinline__ void init_rings(DecodedShared& shared) {
  if (threadIdx.x == 0) {
    constexpr int kReaders = kCluster * kMultipliers * kWarpgroup / kWarpSize;
    for (int i = 0; i < DecodedShared::kLefts; ++i) {
      init_barrier(&shared.left_full[i], 1);
      init_barrier(&shared.left_empty[i], kReaders);
    }
    for (int i = 0; i < DecodedShared::kStages; ++i) {
      init_barrier(&shared.full[i], 1);
      init_barrier(&shared.empty[i], kReaders);
    }
    publish_barriers();
  }
  sync_cluster();
}

// Where a warpgroup's part of a turned tile lies.
struct TurnedPart {
  int group, number;       // the warpgroup's, of those that multiply
  int column, end_column;  // of the output, the first of its 64, and the output's end
  int row, end_row;        // the first of its 256, and the group's end
};

// Starts the products of a step with so many halves of the rows.
template <int halves>
__device__ __forceinline__ void multiply_step(float (&sums)[kSums], const Values (&values)[2], uint64_t b) {
  begin_products();
#pragma unroll
  for (int i = 0; i < kStepCodes / 16; ++i) {  // descriptors count 16 bytes
    const uint32_t a[] = {values[0][i * 2], values[1][i * 2], values[0][i * 2 + 1], values[1][i * 2 + 1]};
    multiply_registers<halves>(sums, a, b + i * 2);
  }
  commit_products();
}

// Where decoding takes long, the two warpgroups start the products of their steps in turn: left to themselves they wait for their
// products together, then decode together, and the tensor cores meanwhile for them. The second has its turn when the first has
// started its products, and so on; which has none of a step takes its turn all the same.
template <bool in_turn>
struct Turns {
  static constexpr int kFirstBarrier = 1 + kMultipliers, kBoth = kMultipliers * kWarpgroup;
  int number;  // the warpgroup's

  __device__ __forceinline__ explicit Turns(int own) : number(own) {
    if (in_turn && number == 1) arrive_threads(kFirstBarrier, kBoth);
  }
  __device__ __forceinline__ void begin() const {
    if (in_turn) sync_threads(kFirstBarrier + number, kBoth);
  }
  __device__ __forceinline__ void end() const {
    if (in_turn) arrive_threads(kFirstBarrier + 1 - number, kBoth);
  }
  // After the last step: nobody is left who has arrived alone.
  __device__ __forceinline__ void finish() const {
    if (in_turn && number == 0) sync_threads(kFirstBarrier, kBoth);
  }
};
static_assert(kMultipliers == 2, "two that take turns");

// Sums a warpgroup's part of a tile, so many halves of its rows. The products of a step start while those of the one before run;
// when these are done, the registers they read are free for what the next step multiplies by.
template <typename Format, int halves>
__device__ __forceinline__ void sum_decoded(const RowsArgs& args, const ByteScales& scales,
                                            DecodedShared& shared, LeftPlace& left_place, RightPlace& place,
                                            const Turns<Format::kInTurn>& turns, int steps,
                                            const TurnedPart& part, float (&sums)[kSums]) {
  using Step = typename LeftDecoder<Format>::Step;
  LeftDecoder<Format> left(args, scales, part.group, part.column);
  const auto decode = [&](int step, Step& values) {
    if (step % kLineSteps<Format> == 0) wait(&shared.left_full[left_place.stage], left_place.parity);
    left.decode(shared.left[left_place.stage][part.number], step, values);
    if ((step + 1) % kLineSteps<Format> == 0 || step + 1 == steps) {
      release(&shared.left_empty[left_place.stage]);
      left_place.next();
    }
  };
  int step = 0, read = -1;  // the stage of the step before
  const auto take_step = [&](Step& own, Step& other) {
    wait(&shared.full[place.stage], place.parity);
    turns.begin();
    multiply_step<halves>(sums, own, by_rows(shared.right[place.stage]));
    turns.end();
    wait_for_products<1>();
    keep(other);
    if (read >= 0) release(&shared.empty[read]);
    read = place.stage;
    place.next();
    if (++step == steps) return false;
    decode(step, other);
    return true;
  };
  Step even = {}, odd = {};
  decode(0, even);
#pragma unroll 1
  while (take_step(even, odd) && take_step(odd, even)) {
  }
  wait_for_products<0>();
  keep(even);
  keep(odd);
  release(&shared.empty[read]);
}

// As many stages as sum_decoded reads.
template <typename Format>
__device__ __forceinline__ void skip_decoded(DecodedShared& shared, LeftPlace& left_place, RightPlace& place,
                                             const Turns<Format::kInTurn>& turns, int steps) {
#pragma unroll 1
  for (int step = 0; step < steps; ++step, place.next()) {
    if (step % kLineSteps<Format> == 0) {
      wait(&shared.left_full[left_place.stage], left_place.parity);
      release(&shared.left_empty[left_place.stage]);
      left_place.next();
    }
    wait(&shared.full[place.stage], place.parity);
    turns.begin();
    turns.end();
    release(&shared.empty[place.stage]);
  }
}

// As scale_and_add_bias, of turned sums: a thread has of the output's columns l = lane / 4 and l + 8 of its warp's 16 the rows
// 8 j + 2 (lane % 4) and the next.
__device__ __forceinline__ void scale_and_add_bias_turned(const RowsArgs& args, const TurnedPart& part,
                                                          float left_over, float (&sums)[kSums]) {
  const float factor = args.alpha ? args.alpha[part.group] : 1.0f;
#pragma unroll
  for (float& sum : sums) sum = sum * left_over * factor;
  if (!args.bias) return;
  const int lane = threadIdx.x % kWarpSize;
  const int column = part.column + threadIdx.x % kWarpgroup / kWarpSize * 16 + lane / 4;
  const float* bias = args.bias + static_cast<int64_t>(part.group) * args.n;
  const float low = column < args.n ? bias[column] : 0.0f,
              high = column + 8 < args.n ? bias[column + 8] : 0.0f;
#pragma unroll
  for (int j = 0; j < kTileColumns / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = part.row + j * 8 + lane % 4 * 2 + i;
      const float scale = args.bias_scale && row < part.end_row ? args.bias_scale[row] : 1.0f;
      sums[j * 4 + i] = fmaf(scale, low, sums[j * 4 + i]);
      sums[j * 4 + 2 + i] = fmaf(scale, high, sums[j * 4 + 2 + i]);
    }
  }
}

// Sums to the output, rounded, 64 of its rows at a time: matrices of 8 x 8 are turned on their way to shared memory.
__device__ __forceinline__ void store_turned(const RowsArgs& args, const CUtensorMap& out_map,
                                             const TurnedPart& part, const float (&sums)[kSums],
                                             uint8_t (&boxes)[DecodedShared::kBoxes][kBoxBytes]) {
  using Out = __nv_bfloat16;
  const bool first = threadIdx.x % kWarpgroup == 0;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x % kWarpgroup / kWarpSize;
#pragma unroll
  for (int i = 0; i < kTileColumns / kBoxLines; ++i) {
    const int row = part.row + i * kBoxLines;
    if (row >= part.end_row) break;
    uint8_t* box = boxes[i % DecodedShared::kBoxes];
    if (first) wait_until_stored<DecodedShared::kBoxes - 1>();
    sync_threads(1 + part.number, kWarpgroup);
#pragma unroll
    for (int j = 0; j < kBoxLines / 8; j += 2) {
      const float* own = &sums[i * 32 + j * 4];
      const uint32_t words[] = {two_rounded<Out>(own[0], own[1]), two_rounded<Out>(own[2], own[3]),
                                two_rounded<Out>(own[4], own[5]), two_rounded<Out>(own[6], own[7])};
      asm volatile(
          "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
              shared_address(swizzled(box, j * 8 + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2))),
          "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
          : "memory");
    }
    fence_for_copies();
    sync_threads(1 + part.number, kWarpgroup);
    if (row + kBoxLines <= part.end_row) {
      if (first) store_box(out_map, box, part.column, row, 0);
    } else {  // rows of the next group follow
      const Part own{part.group, part.number, row, part.end_row, part.column, part.end_column};
      store_own_rows<Out>(box, args.out, args.out_row_stride, part.column, args.n, own);
      fence_for_copies();
    }
    if (first) commit_stores();
  }
}

template <typename Format>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    sm90_grouped_gemm_mx_nv_kernel(const __grid_constant__ CUtensorMap values_map,
                                   const __grid_constant__ CUtensorMap codes_map,
                                   const __grid_constant__ CUtensorMap out_map,
                                   const __grid_constant__ ByteScales scales,
                                   const __grid_constant__ RowsBeside beside,
                                   const __grid_constant__ RowsArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Out = __nv_bfloat16;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  DecodedShared& shared = *reinterpret_cast<DecodedShared*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  const int block = static_cast<int>(block_in_cluster());
  if (threadIdx.x == 0) {
    prefetch(values_map);
    prefetch(codes_map);
    prefetch(out_map);
  }
  init_rings(shared);
  pdl_wait();
  const int clusters = static_cast<int>(gridDim.x) / kCluster;
  const int steps = (args.k + kStepCodes - 1) / kStepCodes;
  Tile tile;
  LeftPlace left_place;
  RightPlace place;
  if (warpgroup == 0) {
    fewer_registers<kCopierRegisters>();
    if (threadIdx.x >= kWarpSize) {
      const int warp = threadIdx.x / kWarpSize - 1;
      if (beside.ready) {
        const int end = args.offsets ? args.offsets[args.groups] : args.rows;
        beside.template widen<Format>(end, args.k);
      }
      zero_tail_rows<Out>(args, kWarpgroup / kWarpSize - 1, warp);
    } else {
      WalkOf<true> walk(args, block);
      for (int index = cluster_in_grid(); walk.find(index, tile); index += clusters) {
        const int line = tile.row * kTileRows, row = walk.begin_row + tile.column * kTileColumns;
        if (beside.ready && row < walk.end_row)
          beside.wait(row, min(row + kTileColumns, walk.end_row), args.k);
        if (threadIdx.x == 0) {
#pragma unroll 1
          for (int step = 0; step < steps; ++step, place.next()) {
            if (step % kLineSteps<Format> == 0) {
              uint64_t* full = &shared.left_full[left_place.stage];
              auto& boxes = shared.left[left_place.stage];
              const int byte = step * kStepBytes<Format>;
              wait(&shared.left_empty[left_place.stage], left_place.parity ^ 1);
              arrive_and_expect(full, sizeof(boxes));
              for (int box = 0; box < kLeftBoxes;
                   ++box) {  // of the same lines each block loads half for both
                if (!tile.same_columns && box != block) continue;
                load(!tile.same_columns, boxes[box], codes_map, full, byte, line + box * kBoxLines,
                     tile.group);
              }
              left_place.next();
            }
            wait(&shared.empty[place.stage], place.parity ^ 1);
            fill_right(shared.right[place.stage], &shared.full[place.stage], block, tile.same_columns,
                       [&](void* to, int box, uint64_t* barrier, bool for_both) {
                         load(for_both, to, values_map, barrier, step * kStepCodes, row + box * kBoxLines, 0);
                       });
          }
        }
        __syncwarp();
      }
    }
  } else {
    more_registers<kMultiplierRegisters>();
    const int number = warpgroup - 1;
    const Turns<Format::kInTurn> turns(number);
    WalkOf<true> walk(args, block);
    for (int index = cluster_in_grid(); walk.find(index, tile); index += clusters) {
      const TurnedPart part{tile.group,
                            number,
                            tile.row * kTileRows + number * kBoxLines,
                            args.n,
                            walk.begin_row + tile.column * kTileColumns,
                            walk.end_row};
      if (part.row >= part.end_row || part.column >= args.n) {  // nothing of this warpgroup's
        skip_decoded<Format>(shared, left_place, place, turns, steps);
        continue;
      }
      if (beta_of(args, part.group) != 0.0f) {
        held_by<Out>(args, part).template send<kTileColumns, kBoxLines>(~0u);
      }
      float sums[kSums] = {};
      if (part.row + kTileColumns / 2 < part.end_row) {
        sum_decoded<Format, 2>(args, scales, shared, left_place, place, turns, steps, part, sums);
      } else {
        sum_decoded<Format, 1>(args, scales, shared, left_place, place, turns, steps, part, sums);
      }
      scale_and_add_bias_turned(args, part, Format::kLeftOver * Format::kLeftOver, sums);
      if (const float beta = beta_of(args, part.group); beta != 0.0f) {
        held_by<Out>(args, part).add_turned(sums, beta);
      }
      store_turned(args, out_map, part, sums, shared.out[number]);
    }
    turns.finish();
    if (threadIdx.x % kWarpgroup == 0) wait_until_stored<0>();
  }
  sync_cluster();  // neither block leaves while the other may arrive at its barriers
#endif
}

// AFormat and Format are those of the rows and of the weights.
template <typename AFormat, typename Format>
void launch_grouped_gemm_mx_nv(const GroupedGemmArgs& args, const Sm90Config& config, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const bool overlaps = overlaps_dequantize(args, config);
  overlaps ? launch_clear_ready(args, stream) : launch_widen_rows<AFormat>(args, stream);
  constexpr auto kernel = sm90_grouped_gemm_mx_nv_kernel<Format>;
  static DynamicSharedMemory shared_memory;
  constexpr int kShared = sizeof(DecodedShared);
  shared_memory.allow(kernel, kShared);
  const int64_t padded = dequantized_columns(args.k);
  const int64_t bytes = args.k * static_cast<int64_t>(sizeof(typename Format::Codes)) / kChunk;  // of a line
  const CUtensorMap values = tensor_map(
      {args.a_dequantized, DType::kBFloat16, padded, args.rows, 1, padded, args.rows * padded}, kBoxLines);
  const CUtensorMap codes =
      tensor_map({args.b, args.dtype, bytes, args.n, args.groups, bytes, args.n * bytes}, kBoxLines);
  const CUtensorMap out = tensor_map(
      {args.out, args.out_dtype, args.n, args.rows, 1, args.out_row_stride, args.rows * args.out_row_stride},
      kBoxLines);
  const ByteScales scales{static_cast<const uint8_t*>(args.b_scale), scale_width<Format>(args.k),
                          args.b_tiled};
  RowsBeside beside{};
  if (overlaps) {
    beside = {code_rows<Format>(args), static_cast<uint32_t*>(args.a_ready_rows),
              args.dtype == DType::kFloat8E5M2};
  }
  launch_pdl(kernel, grid_of(config), kThreads, kShared, stream, values, codes, out, scales, beside,
             rows_args(args));
  check_launch("sm90_grouped_gemm_mx_nv_kernel");
}

}  // namespace transformer_plugin::gemm::sm90

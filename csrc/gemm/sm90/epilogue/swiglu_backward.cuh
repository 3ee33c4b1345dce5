// What becomes of sums that are the gradient of SwiGLU's output: an epilogue of hopper_rows.cuh. Each warp works by itself, 32
// columns at a time: the gate's and the linear part's values come into a slot of its own in shared memory, become their
// gradients there, and leave.
#pragma once

#include "gemm/sm90/epilogue/swiglu.cuh"

namespace transformer_plugin::gemm::sm90 {

inline constexpr int kSlotColumns = 32, kSlots = 2;
inline constexpr int kHalfBytes = kSlotColumns * 2, kSlotBytes = kWarpRows * 2 * kHalfBytes;
inline constexpr int kWarps = kMultipliers * kWarpgroup / kWarpSize;  // that multiply
static_assert(kWarps * kSlots * kSlotBytes == sizeof(PlainShared::out), "slots lie where boxes do");

struct SwigluBackwardShared : PlainShared {
  uint64_t arrived[kWarps][kSlots];
};
static_assert(sizeof(SwigluBackwardShared) <= 232448, "what a block may have");

// A 16-byte piece of a row of a half in a slot, as the swizzle of 64 bytes has it.
__device__ __forceinline__ uint8_t* piece_of_slot(uint8_t* slot, int row, int half, int piece) {
  return slot + (row * 2 + half) * kHalfBytes + (piece ^ row % 4) * 16;
}

// The sum over 32 columns in the order of activation/swiglu.h. Of each 8 a lane brings what it has of its two rows, two
// columns added. Lanes of an even number get that of the first row, the others that of the second.
__device__ __forceinline__ float sum_of_slot(const float (&low)[4], const float (&high)[4]) {
  const bool second = threadIdx.x & 1, right = threadIdx.x & 2;
  float fours[4], eights[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    fours[i] = (second ? high[i] : low[i]) + __shfl_xor_sync(~0u, second ? low[i] : high[i], 1);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    eights[i] = (right ? fours[2 + i] : fours[i]) + __shfl_xor_sync(~0u, right ? fours[i] : fours[2 + i], 2);
  }
  const float sixteen = eights[0] + eights[1];
  return sixteen + __shfl_xor_sync(~0u, sixteen, 2);
}

template <typename T>
struct SwigluBackwardRows {
  static constexpr bool kTakesHalves = false;
  CUtensorMap h, grad_h;  // halves_map
  T* grad_data;
  const float* probs;
  float* partial;  // or null
  int interleaved;

  using Args = SwigluBackwardKernelArgs;
  static const GroupedGemmArgs& problem(const Args& args) { return args.product; }
  static SwigluBackwardRows of(const Args& args) {
    const GroupedGemmArgs& product = args.product;
    const auto map = [&](const void* data) {
      return halves_map({data, product.dtype, product.rows, product.n, args.interleaved}, kWarpRows);
    };
    return {map(args.h), map(product.out), static_cast<T*>(product.out),
            args.probs,  args.partial,     args.interleaved};
  }

  // A warp's rows of a part, and its slots.
  struct Own {
    uint8_t* slots;
    uint64_t* arrived;
    int row;

    __device__ __forceinline__ Own(const Part& part, SwigluBackwardShared& shared) {
      const int warp = threadIdx.x % kWarpgroup / kWarpSize;
      slots = shared.out[part.number][0] + warp * (kSlots * kSlotBytes);
      arrived = shared.arrived[part.number * (kWarpgroup / kWarpSize) + warp];
      row = part.row + warp * kWarpRows;
    }
    __device__ __forceinline__ uint8_t* slot(int index) const { return slots + index % kSlots * kSlotBytes; }
  };

  __device__ __forceinline__ void prefetch_maps() const {
    prefetch(h);
    prefetch(grad_h);
  }
  __device__ __forceinline__ void zero_tail_rows(const RowsArgs& args, int warps, int warp) const {
    sm90::zero_tail_rows(args, grad_data, args.out_row_stride, 2 * args.n, warps, warp);
  }
  static __device__ __forceinline__ void init(SwigluBackwardShared& shared) {
    for (auto& of_warp : shared.arrived) {
      for (uint64_t& barrier : of_warp) init_barrier(&barrier, 1);
    }
  }
  static __device__ __forceinline__ int line(const RowsArgs&, int tile_column, int box) {
    return tile_column * kTileColumns + box * kBoxLines;
  }
  static __device__ __forceinline__ int line_of_sums(const RowsArgs&, const Part& part, int j) {
    return part.column + j * 8;
  }

  // The values of 32 columns into their slot, by one lane.
  __device__ __forceinline__ void fetch(const Own& own, const Part& part, int index) const {
    uint64_t* arrived = &own.arrived[index % kSlots];
    const int column = part.column + index * kSlotColumns;
    arrive_and_expect(arrived, kSlotBytes);
    load_box(own.slot(index), h, arrived, interleaved ? 0 : column, interleaved ? column / 16 : 0, own.row);
  }

  // The first values are under way beside the products. Their slot was the last but one that the part before stored.
  __device__ __forceinline__ void begin(const RowsArgs&, const Part& part,
                                        SwigluBackwardShared& shared) const {
    const Own own(part, shared);
    if (threadIdx.x % kWarpSize == 0 && own.row < part.end_row) {
      wait_until_stored<1>();
      fetch(own, part, 0);
    }
    __syncwarp();  // products are started by all lanes together
  }

  // Gradients of 32 columns in the place of the values; of each 8 columns a thread's sums of terms for its two rows.
  static __device__ __forceinline__ void differentiate(uint8_t* slot, const float* sums, int left,
                                                       const ProbsOfThread& prob, float (&low)[4],
                                                       float (&high)[4]) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {  // 16 columns
      uint8_t* gate_row = piece_of_slot(slot, lane % 16, 0, pair * 2 + lane / 16);
      uint8_t* linear_row = piece_of_slot(slot, lane % 16, 1, pair * 2 + lane / 16);
      uint32_t gates[4], linears[4];
      read_matrices(gates, gate_row);
      read_matrices(linears, linear_row);
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // 8 columns of the first row, of the second, and the same of the next 8
        const float2 grad = rounded<T>(sums[pair * 8 + i * 2], sums[pair * 8 + i * 2 + 1]);
        const float2 gate = as_floats<T>(gates[i]), linear = as_floats<T>(linears[i]);
        const float own = i % 2 == 0 ? prob.low : prob.high;
        const auto x = activation::swiglu_gradient(grad.x, gate.x, linear.x, own);
        const auto y = activation::swiglu_gradient(grad.y, gate.y, linear.y, own);
        gates[i] = two_rounded<T>(x.gate, y.gate);
        linears[i] = two_rounded<T>(x.linear, y.linear);
        const int eight = pair * 2 + i / 2;
        const float terms = grad.x * x.activation + grad.y * y.activation;
        // Past the last column an infinite operand has made NaN of zeros.
        (i % 2 == 0 ? low : high)[eight] = eight * 8 < left ? terms : 0.0f;
      }
      __syncwarp();  // all lanes have read
      write_matrices(gate_row, gates);
      write_matrices(linear_row, linears);
    }
  }

  // A slot to the rows of the group, by all lanes.
  __device__ __forceinline__ void leave(const RowsArgs& args, const Part& part, const Own& own,
                                        int index) const {
    uint8_t* slot = own.slot(index);
    const int lane = threadIdx.x % kWarpSize, column = part.column + index * kSlotColumns;
    fence_for_copies();
    __syncwarp();
    if (own.row + kWarpRows <= part.end_row) {
      if (lane == 0)
        store_box(grad_h, slot, interleaved ? 0 : column, interleaved ? column / 16 : 0, own.row);
    } else {  // rows of the next group follow
      constexpr int kPieces = kHalfBytes / 16, kPiece = 8;
      T* to = grad_data + own.row * args.out_row_stride + (interleaved ? column * 2 : column);
      for (int i = lane; i < kWarpRows * 2 * kPieces; i += kWarpSize) {
        const int row = i / (2 * kPieces), half = i / kPieces % 2, piece = i % kPieces;
        if (own.row + row < part.end_row && column + piece * kPiece < args.n) {
          *reinterpret_cast<uint4*>(to + row * args.out_row_stride +
                                    half * (interleaved ? kSlotColumns : args.n) + piece * kPiece) =
              *reinterpret_cast<const uint4*>(piece_of_slot(slot, row, half, piece));
        }
      }
      fence_for_copies();
      __syncwarp();  // the next values may come
    }
    if (lane == 0) commit_stores();  // of nothing, too: they are counted
  }

  __device__ __forceinline__ void finish(const RowsArgs& args, const Part& part, float (&sums)[kSums],
                                         SwigluBackwardShared& shared) const {
    constexpr int kCount = kTileColumns / kSlotColumns;
    const Own own(part, shared);
    if (own.row >= part.end_row) return;
    const int lane = threadIdx.x % kWarpSize, first = row_of_thread(part);
    const ProbsOfThread prob(probs, first, part.end_row);
    float of_rows[kCount];
#pragma unroll
    for (int index = 0; index < kCount; ++index) {
      if (lane == 0 && index + 1 < kCount) {
        wait_until_stored<0>();
        fetch(own, part, index + 1);
      }
      sm90::wait(&own.arrived[index % kSlots], index / kSlots % 2);
      __syncwarp();  // matrices are read by all lanes together
      float low[4], high[4];
      const int left = args.n - part.column - index * kSlotColumns;
      differentiate(own.slot(index), &sums[index * kSlotColumns / 2], left, prob, low, high);
      if (partial) of_rows[index] = sum_of_slot(low, high);
      leave(args, part, own, index);
    }
    if (!partial) return;
    const int row = lane % 2 == 0 ? first : first + 8;
    if (lane & 2 || row >= part.end_row) return;
    constexpr int kTrees = kTileColumns / activation::kSumTile, kOfTree = kCount / kTrees;
#pragma unroll
    for (int tree = 0; tree < kTrees; ++tree) {
      const int column = part.column + tree * activation::kSumTile;
      if (column >= args.n) return;
      partial[static_cast<int64_t>(column / activation::kSumTile) * args.rows + row] =
          activation::sum_of_tile<kOfTree>(of_rows + tree * kOfTree) + 0.0f;
    }
  }

  static __device__ __forceinline__ void drain() {
    if (threadIdx.x % kWarpSize == 0) wait_until_stored<0>();
  }
};

}  // namespace transformer_plugin::gemm::sm90

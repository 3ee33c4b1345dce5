// What becomes of sums that are SwiGLU's input, or the gradient of its output: epilogues of hopper_rows.cuh.
#pragma once

#include "activation/swiglu.h"
#include "gemm/hopper_rows.cuh"
#include "gemm/hopper_swiglu.h"

namespace transformer_plugin::gemm::hopper {

inline constexpr int kHalfTile = kTileColumns / 2;

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
inline CUtensorMap rows_map(const GroupedKernelArgs& product, const void* data, int64_t columns,
                            int64_t stride) {
  return tensor_map({data, product.dtype, columns, product.rows, 1, stride, product.rows * stride},
                    kBoxLines);
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
  __device__ __forceinline__ void zero_tail(const RowsArgs& args, int warps, int warp) const {
    if (h_data) hopper::zero_tail(args, h_data, int64_t{2} * features, 2 * features, warps, warp);
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

  __device__ __forceinline__ void prefetch_maps() const {
    prefetch(act);
    SwigluOfSums<T, interleaved>::prefetch_maps();
  }
  __device__ __forceinline__ void zero_tail(const RowsArgs& args, int warps, int warp) const {
    SwigluOfSums<T, interleaved>::zero_tail(args, warps, warp);
    hopper::zero_tail(args, act_data, this->features, this->features, warps, warp);
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

// An epilogue of either kind, but for what becomes of act.
template <typename Epilogue, typename T, bool interleaved>
Epilogue swiglu_of_sums(const SwigluKernelArgs& args) {
  const GroupedKernelArgs& product = args.product;
  const int64_t features = product.n / 2;
  Epilogue epilogue{};
  epilogue.h_data = static_cast<T*>(product.out);
  epilogue.probs = args.probs;
  epilogue.features = static_cast<int>(features);
  if (product.out) {
    epilogue.h = rows_map(product, epilogue.h_data, interleaved ? 2 * features : features, 2 * features);
    if (!interleaved) {
      epilogue.linear = rows_map(product, epilogue.h_data + features, features, 2 * features);
    }
  }
  return epilogue;
}

template <typename T, bool interleaved>
void launch_swiglu_rows(const SwigluKernelArgs& args, cudaStream_t stream) {
  const GroupedKernelArgs& product = args.product;
  auto epilogue = swiglu_of_sums<SwigluRows<T, interleaved>, T, interleaved>(args);
  epilogue.act_data = static_cast<T*>(args.act);
  epilogue.act = rows_map(product, args.act, product.n / 2, product.n / 2);
  launch_rows_into<Plain<T, false>>(epilogue, product, plan_here(GroupedMode::kForward, product), stream);
}

// ---- SwiGLU's gradient: the sums are that of its output. Each warp works by itself, 32 columns at a time: the gate's and the
// linear part's values come into a slot of its own in shared memory, become their gradients there, and leave.

inline constexpr int kWarpRows = 16, kSlotColumns = 32, kSlots = 2;
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
  __device__ __forceinline__ void zero_tail(const RowsArgs& args, int warps, int warp) const {
    hopper::zero_tail(args, grad_data, args.out_row_stride, 2 * args.n, warps, warp);
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
      hopper::wait(&own.arrived[index % kSlots], index / kSlots % 2);
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

template <typename T>
void launch_swiglu_backward_rows(const SwigluBackwardKernelArgs& args, cudaStream_t stream) {
  const GroupedKernelArgs& product = args.product;
  const auto map = [&](const void* data) {
    return halves_map({data, product.dtype, product.rows, product.n, args.interleaved}, kWarpRows);
  };
  const SwigluBackwardRows<T> epilogue{map(args.h), map(product.out), static_cast<T*>(product.out),
                                       args.probs,  args.partial,     args.interleaved};
  launch_rows_into<Plain<T, true, SwigluBackwardShared>>(epilogue, product,
                                                         plan_here(GroupedMode::kDataGrad, product), stream);
}

}  // namespace transformer_plugin::gemm::hopper

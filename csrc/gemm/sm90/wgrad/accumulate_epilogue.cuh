// The epilogue of weight gradients that are added to an FP32 buffer in place: out += acc.
//
// A warpgroup's tile is 8 boxes of 64 rows x 32 columns. There are two ways to add a box:
//   TMA      reduce-add in the L2 cache. Slower than DRAM bandwidth, but it overlaps with the next tile.
//   threads  read the old values (prefetched into L2 during the mainloop), add, store. DRAM bandwidth, but
//            the warpgroup waits.
// Sm90Config::thread_boxes says which boxes threads add, so that both ways run at the same time. Both flush
// subnormals to zero and each element is added to once, so the choice does not change the result.
#pragma once

#include "gemm/sm90/epilogue/beta_source.cuh"

namespace transformer_plugin::gemm::sm90 {

class AccumulateEpilogue {
 public:
  // A tile that is not complete goes by TMA, which leaves out what is outside of the matrix.
  __device__ __forceinline__ AccumulateEpilogue(const SourceTile<float>& out, uint32_t thread_boxes)
      : out_(out), thread_boxes_(out.rows >= kBoxRows && out.columns >= kTileColumns ? thread_boxes : 0) {}

  // reduce_add(box, column) starts the TMA reduction of a box; called by one thread.
  template <int kOutBoxes, typename ReduceAdd>
  __device__ __forceinline__ void add(const float (&acc)[kAccumulators],
                                      uint8_t (&boxes)[kOutBoxes][kBoxBytes], int consumer,
                                      ReduceAdd reduce_add) const {
    switch (thread_boxes_) {  // separate code for each choice: otherwise registers spill
      case kMostBoxes: return add_boxes<kMostBoxes>(acc, boxes, consumer, reduce_add);
      case kHalfOfBoxes: return add_boxes<kHalfOfBoxes>(acc, boxes, consumer, reduce_add);
      default: return add_boxes<0>(acc, boxes, consumer, reduce_add);
    }
  }

 private:
  static constexpr int kColumns = kSwizzleBytes / static_cast<int>(sizeof(float)),
                       kBoxes = kTileColumns / kColumns;
  // A thread's accumulators of a box: pairs of columns of 2 rows, at 4 places 8 columns apart.
  static constexpr int kPairs = 8;
  // Boxes whose old values a thread has in flight, in registers that the mainloop used.
  static constexpr int kBoxesAhead = 4;

  template <uint32_t thread_boxes, int kOutBoxes, typename ReduceAdd>
  __device__ __forceinline__ void add_boxes(const float (&acc)[kAccumulators],
                                            uint8_t (&boxes)[kOutBoxes][kBoxBytes], int consumer,
                                            ReduceAdd reduce_add) const {
    const bool first = threadIdx.x % kWarpgroupSize == 0;
    const int lane = threadIdx.x % kWarpSize, row = threadIdx.x % kWarpgroupSize / kWarpSize * 16 + lane / 4;
    float* low = out_.at + row * out_.row_stride + lane % 4 * 2;
    float* high = low + 8 * out_.row_stride;
    const auto at = [&](int box, int pair) {
      return reinterpret_cast<float2*>((pair % 2 ? high : low) + box * kColumns + pair / 2 * 8);
    };
    float2 old[kBoxesAhead][kPairs];
    const auto load = [&](int box) {
      if (!(thread_boxes >> box & 1)) return;
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) old[box % kBoxesAhead][pair] = __ldcs(at(box, pair));
    };
    int tma_count = 0;
#pragma unroll
    for (int i = 0; i < kBoxesAhead; ++i) load(i);
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      if (thread_boxes >> i & 1) {
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          const float* own = &acc[i * 16 + pair * 2];
          const float2 before = old[i % kBoxesAhead][pair];
          __stcs(at(i, pair), make_float2(add_ftz(before.x, own[0]), add_ftz(before.y, own[1])));
        }
      } else {
        uint8_t* box = boxes[tma_count++ % kOutBoxes];
        if (first) tma_store_wait<kOutBoxes - 1>();
        named_barrier_sync(1 + consumer, kWarpgroupSize);
        store_box_to_smem<float>(acc, i, box);
        fence_proxy_async();
        named_barrier_sync(1 + consumer, kWarpgroupSize);
        if (first && i * kColumns < out_.columns && out_.rows > 0) reduce_add(box, i * kColumns);
        if (first) tma_store_commit();
      }
      if (i + kBoxesAhead < kBoxes) load(i + kBoxesAhead);
    }
  }

  SourceTile<float> out_;
  uint32_t thread_boxes_;
};

}  // namespace transformer_plugin::gemm::sm90

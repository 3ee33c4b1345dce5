// The epilogue of weight gradients that are added to an FP32 buffer in place: out += acc.
//
// A warpgroup's tile is 8 boxes of 64 rows x 32 columns. There are two ways to add a box:
//   TMA      reduce-add in the L2 cache, below DRAM speed, but it overlaps with the next tile.
//   threads  read the old values (prefetched into L2 during the mainloop), add, store. DRAM bandwidth, but
//            the warpgroup waits.
// Sm90Config::boxes_added_by_threads says which boxes threads add, so that both ways run at the same time.
// Both flush subnormals to zero and each element is added to once, so the choice does not change the result.
#pragma once

#include "common/ptx/arithmetic.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/memory.cuh"
#include "common/ptx/tma.cuh"
#include "gemm/sm90/epilogue/beta_source.cuh"

namespace transformer_plugin::gemm::sm90 {

class AccumulateEpilogue {
 public:
  // `out` is read and written. TMA adds all of an incomplete tile, as it leaves out what is outside of the
  // matrix.
  __device__ __forceinline__ AccumulateEpilogue(const OutputView<float>& out, uint32_t boxes_added_by_threads)
      : out_(out),
        boxes_added_by_threads_(out.rows >= kBoxRows && out.columns >= kTileColumns ? boxes_added_by_threads
                                                                                    : 0) {}

  // reduce_add(box, column) starts the TMA reduction of a box; called by one thread.
  template <int kOutBoxes, typename ReduceAdd>
  __device__ __forceinline__ void add(const float (&acc)[kAccumulators],
                                      uint8_t (&boxes)[kOutBoxes][kBoxBytes], int consumer,
                                      ReduceAdd reduce_add) const {
    switch (boxes_added_by_threads_) {  // separate code for each choice: otherwise registers spill
      case kThreadsAdd6Of8: return add_boxes<kThreadsAdd6Of8>(acc, boxes, consumer, reduce_add);
      case kThreadsAddHalf: return add_boxes<kThreadsAddHalf>(acc, boxes, consumer, reduce_add);
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

  template <uint32_t boxes_added_by_threads, int kOutBoxes, typename ReduceAdd>
  __device__ __forceinline__ void add_boxes(const float (&acc)[kAccumulators],
                                            uint8_t (&boxes)[kOutBoxes][kBoxBytes], int consumer,
                                            ReduceAdd reduce_add) const {
    const bool is_leader = threadIdx.x % kWarpgroupSize == 0;
    const int lane = threadIdx.x % kWarpSize;
    float* row0 = out_.data + thread_row(0, lane) * out_.row_stride + lane % 4 * 2;
    float* row1 = row0 + 8 * out_.row_stride;
    const auto address = [&](int box, int pair) {
      return reinterpret_cast<float2*>((pair % 2 ? row1 : row0) + box * kColumns + pair / 2 * 8);
    };
    float2 old[kBoxesAhead][kPairs];
    const auto load = [&](int box) {
      if (!(boxes_added_by_threads >> box & 1)) return;
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) old[box % kBoxesAhead][pair] = __ldcs(address(box, pair));
    };
    int tma_count = 0;
#pragma unroll
    for (int i = 0; i < kBoxesAhead; ++i) load(i);
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      if (boxes_added_by_threads >> i & 1) {
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          const float* sums = &acc[(i * kPairs + pair) * 2];
          const float2 before = old[i % kBoxesAhead][pair];
          __stcs(address(i, pair), make_float2(add_ftz(before.x, sums[0]), add_ftz(before.y, sums[1])));
        }
      } else {
        uint8_t* box = boxes[tma_count++ % kOutBoxes];
        if (is_leader) cp_async_bulk_wait_group_read<kOutBoxes - 1>();
        named_barrier_sync(kBarrierOfConsumer + consumer, kWarpgroupSize);
        store_box_to_smem<float>(acc, i, box);
        fence_proxy_async();
        named_barrier_sync(kBarrierOfConsumer + consumer, kWarpgroupSize);
        if (is_leader && i * kColumns < out_.columns && out_.rows > 0) reduce_add(box, i * kColumns);
        if (is_leader) cp_async_bulk_commit_group();
      }
      if (i + kBoxesAhead < kBoxes) load(i + kBoxesAhead);
    }
  }

  OutputView<float> out_;
  uint32_t boxes_added_by_threads_;
};

}  // namespace transformer_plugin::gemm::sm90

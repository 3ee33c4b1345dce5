// From accumulators to the output: conversion, swizzled boxes in shared memory, stores.
#pragma once

#include "common/ptx/barrier.cuh"
#include "common/ptx/memory.cuh"
#include "common/ptx/stmatrix.cuh"
#include "common/ptx/tma.cuh"
#include "gemm/sm90/pipeline.cuh"

namespace transformer_plugin::gemm::sm90 {

// Two values rounded to T (BF16 or FP16) in one word, and back.
template <typename T>
__device__ __forceinline__ uint32_t pack2(float x, float y) {
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
__device__ __forceinline__ float2 unpack2(uint32_t two) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {  // BF16 is the upper half of FP32
    return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
  } else {
    __half2 values;
    memcpy(&values, &two, sizeof(two));
    return __half22float2(values);
  }
}

// Writes the i-th 128 bytes of columns of a warpgroup's 64 rows, rounded to T, to a swizzled box.
template <typename T>
__device__ __forceinline__ void store_box_to_smem(const float (&acc)[kAccumulators], int i, uint8_t* box) {
  const int lane = threadIdx.x % kWarpSize;
  const int first_row = threadIdx.x % kWarpgroupSize / kWarpSize * 16;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    // stmatrix stores four 8 x 8 matrices: rows 0..7 and 8..15 of 8 columns, then of the next 8 columns.
    if constexpr (sizeof(T) == 2) {
      const float* values = &acc[i * 32 + j * 8];
      const uint32_t words[] = {pack2<T>(values[0], values[1]), pack2<T>(values[2], values[3]),
                                pack2<T>(values[4], values[5]), pack2<T>(values[6], values[7])};
      stmatrix_x4(swizzled(box, first_row + lane % 16, j * 2 + lane / 16), words);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* values = &acc[i * 16 + j * 4 + half * 2];
        uint8_t* chunk = swizzled(box, first_row + half * 8 + lane / 4, j * 2 + lane % 4 / 2);
        *reinterpret_cast<float2*>(chunk + lane % 2 * 8) = make_float2(values[0], values[1]);
      }
    }
  }
}

// Stores the first `columns` columns of a consumer warpgroup's tile: box by box with the boxes in turn, or
// all boxes at once where shared memory has room for a whole tile. When a box is in shared memory, all
// threads call store(box, column), `column` being the first of the box.
template <typename T, int columns = kTileColumns, int kOutBoxes, typename Store>
__device__ __forceinline__ void store_accumulators(const float (&acc)[kAccumulators],
                                                   uint8_t (&boxes)[kOutBoxes][kBoxBytes], int consumer,
                                                   Store store) {
  constexpr int kColumns = kTileK<T>, kCount = columns / kColumns;
  const bool is_leader = threadIdx.x % kWarpgroupSize == 0;
  if constexpr (kOutBoxes * kColumns >= kTileColumns) {
    if (is_leader) cp_async_bulk_wait_group_read<0>();
    named_barrier_sync(kBarrierOfConsumer + consumer, kWarpgroupSize);
#pragma unroll
    for (int i = 0; i < kCount; ++i) store_box_to_smem<T>(acc, i, boxes[i]);
    fence_proxy_async();
    named_barrier_sync(kBarrierOfConsumer + consumer, kWarpgroupSize);
#pragma unroll
    for (int i = 0; i < kCount; ++i) store(boxes[i], i * kColumns);
    if (is_leader) cp_async_bulk_commit_group();
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      uint8_t* box = boxes[i % kOutBoxes];
      if (is_leader) cp_async_bulk_wait_group_read<kOutBoxes - 1>();
      named_barrier_sync(kBarrierOfConsumer + consumer, kWarpgroupSize);
      store_box_to_smem<T>(acc, i, box);
      fence_proxy_async();
      named_barrier_sync(kBarrierOfConsumer + consumer, kWarpgroupSize);
      store(box, i * kColumns);
      if (is_leader) cp_async_bulk_commit_group();
    }
  }
}

}  // namespace transformer_plugin::gemm::sm90

// The A operand of grouped_gemm_mx_nv.cuh, the weights: dequantized from shared memory to registers, where
// WGMMA reads it. Scales come from global memory.
#pragma once

#include "gemm/sm90/microscaled/dequantize_b_prepass.cuh"
#include "gemm/sm90/params.cuh"

namespace transformer_plugin::gemm::sm90 {

// The scales of one row of the weights, read in words of four and prefetched one word ahead.
template <typename Format>
class ScaleWords {
 public:
  static constexpr int kStepScales = kStepElements >> Format::kScaleShift;  // scales of one step of K
  static constexpr int kWordSteps = 4 / kStepScales;

  // `row`: the row's first word, or null for a row that does not exist, whose scales are 0.
  __device__ __forceinline__ void begin(const uint8_t* row, int k) {
    next_address_ = row;
    remaining_ = row ? (k + (1 << Format::kScaleShift) - 1) >> Format::kScaleShift : 0;
    next_ = load();
  }
  // Moves to `step`; steps are visited in order. Where a new word begins, the word after it, `stride` bytes
  // further, is loaded.
  __device__ __forceinline__ void advance(int step, int stride) {
    if (step % kWordSteps != 0) return;
    word_ = remaining_ >= 4 ? next_ : next_ & ((1u << max(remaining_, 0) * 8) - 1);  // scales past k are 0
    remaining_ -= 4;
    next_address_ += stride;
    next_ = load();
  }
  __device__ __forceinline__ uint32_t scale(int step, int chunk) const {
    const int index = step % kWordSteps * kStepScales + (chunk * kChunk >> Format::kScaleShift);
    return word_ >> index * 8 & 0xff;
  }

 private:
  __device__ __forceinline__ uint32_t load() const {
    return remaining_ > 0 ? __ldg(reinterpret_cast<const uint32_t*>(next_address_)) : 0;
  }

  const uint8_t* next_address_;
  uint32_t word_, next_;
  int remaining_;  // scales from `next_` on
};

// Dequantizes the fragment of A that a thread passes to WGMMA: rows lane / 4 and lane / 4 + 8 of its warp's
// 16 rows, and of each step of 64 elements the chunk lane % 4. WGMMA wants every fourth pair of elements
// instead; the order of K is free as long as B has the same order (dequantize_b_prepass.cuh).
template <typename Format>
class ADequantizer {
 public:
  using Fragment = DequantizedChunk[2];  // of one step: a chunk of both rows

  // `first_row`: of the warpgroup's 64 rows of the weight [n, k].
  __device__ __forceinline__ ADequantizer(const GroupedGemmParams& args, const ByteScales& scales, int group,
                                          int first_row)
      : stride_(scales.word_stride()), chunk_(threadIdx.x % 4) {
    const int row0 = thread_row(0);
    // With the 128-byte swizzle, byte b of the row is at swizzle_base_ ^ b.
    swizzle_base_ = row0 * kSwizzleBytes + row0 % 8 * 16;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + row0 + i * 8;
      const int64_t row_of_stack = static_cast<int64_t>(group) * ((args.n + 127) / 128 * 128) + row;
      scales_[i].begin(row < args.n ? scales.row(row_of_stack) : nullptr, args.k);
    }
  }
  // `box`: the warpgroup's 64 rows x 128 bytes in shared memory that contain `step`.
  __device__ __forceinline__ void dequantize(const uint8_t* box, int step, Fragment& values) {
    using Packed = typename Format::Packed;
    const int byte =
        step % kStepsPerBox<Format> * kStepBytes<Format> + chunk_ * static_cast<int>(sizeof(Packed));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scales_[i].advance(step, stride_);
      const Packed packed =
          *reinterpret_cast<const Packed*>(box + ((swizzle_base_ + i * 8 * kSwizzleBytes) ^ byte));
      Format::dequantize(packed, scales_[i].scale(step, chunk_), values[i]);
    }
  }

 private:
  ScaleWords<Format> scales_[2];
  int stride_, swizzle_base_, chunk_;
};

// Keeps the fragment's registers allocated until here. The compiler sees their last use where WGMMA starts,
// but WGMMA reads them until it has finished.
__device__ __forceinline__ void keep_alive(const DequantizedChunk (&values)[2]) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) asm volatile("" ::"r"(values[i % 2][i / 2]));
}

}  // namespace transformer_plugin::gemm::sm90

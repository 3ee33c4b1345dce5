// What a thread multiplies by, of codes in shared memory and scales in memory: the left operand of hopper_decoded.cuh.
#pragma once

#include "gemm/sm90/mainloop.cuh"
#include "gemm/sm90/microscaled/dequantize_b_prepass.cuh"

namespace transformer_plugin::gemm::sm90 {

// The scales of a line, a word of four at a time, each sent for a step before it is used.
template <typename Format>
class ScaleWords {
 public:
  static constexpr int kStepScales = kStepCodes >> Format::kScaleShift;
  static constexpr int kWordSteps = 4 / kStepScales;

  // `line` is null where there is none: its scales are 0.
  __device__ __forceinline__ void begin(const uint8_t* line, int k) {
    next_word_ = line;
    left_ = line ? (k + (1 << Format::kScaleShift) - 1) >> Format::kScaleShift : 0;
    next_ = fetch();
  }
  // To the scales of `step`, the next one; where a word of them begins, the word after it, `stride` bytes on, is sent for.
  __device__ __forceinline__ void advance(int step, int stride) {
    if (step % kWordSteps != 0) return;
    word_ =
        left_ >= 4 ? next_ : next_ & ((1u << max(left_, 0) * 8) - 1);  // of what is past k, codes are zero
    left_ -= 4;
    next_word_ += stride;
    next_ = fetch();
  }
  __device__ __forceinline__ uint32_t of(int step, int chunk) const {
    const int scale = step % kWordSteps * kStepScales + (chunk * kChunk >> Format::kScaleShift);
    return word_ >> scale * 8 & 0xff;
  }

 private:
  __device__ __forceinline__ uint32_t fetch() const {
    return left_ > 0 ? __ldg(reinterpret_cast<const uint32_t*>(next_word_)) : 0;
  }

  const uint8_t* next_word_;
  uint32_t word_, next_;
  int left_;  // scales, from `next_` on
};

// The lines of the left operand that a thread multiplies, lane / 4 and 8 more of its warp's 16, and of each the chunk lane % 4.
template <typename Format>
class LeftDecoder {
 public:
  using Step = Values[2];

  // `line`: the first of the warpgroup's.
  __device__ __forceinline__ LeftDecoder(const RowsArgs& args, const ByteScales& scales, int group, int line)
      : stride_(scales.word_stride()), chunk_(threadIdx.x % 4) {
    const int own = threadIdx.x % kWarpgroup / kWarpSize * 16 + threadIdx.x % kWarpSize / 4;
    place_ = own * kLine + own % 8 * 16;  // so that `place ^ byte` is that of a byte of it under the swizzle
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = line + own + i * 8;
      const int64_t of_stack = static_cast<int64_t>(group) * ((args.n + 127) / 128 * 128) + at;
      scales_[i].begin(at < args.n ? scales.line(of_stack) : nullptr, args.k);
    }
  }
  __device__ __forceinline__ void decode(const uint8_t* box, int step, Step& values) {
    using Codes = typename Format::Codes;
    const int byte =
        step % kLineSteps<Format> * kStepBytes<Format> + chunk_ * static_cast<int>(sizeof(Codes));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scales_[i].advance(step, stride_);
      const Codes codes = *reinterpret_cast<const Codes*>(box + ((place_ + i * 8 * kLine) ^ byte));
      Format::decode(codes, scales_[i].of(step, chunk_), values[i]);
    }
  }

 private:
  ScaleWords<Format> scales_[2];
  int stride_, place_, chunk_;
};

// The registers are those of these values until here, though products that read them started long ago.
__device__ __forceinline__ void keep(const Values (&values)[2]) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) asm volatile("" ::"r"(values[i % 2][i / 2]));
}

}  // namespace transformer_plugin::gemm::sm90

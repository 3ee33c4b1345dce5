// PTX wrappers: warpgroup matrix multiply-accumulate (wgmma.mma_async), shared memory descriptors,
// setmaxnreg.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/device_types.cuh"
#include "common/dtype.h"
#include "common/shared_memory.cuh"

namespace transformer_plugin::ptx {

// Moves registers between warpgroups: the producer warpgroup gives up registers that the consumers take.
template <int count>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most `pending` groups of WGMMAs are incomplete.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Shared memory descriptors of operands with the 128-byte swizzle: rows of 128 bytes, in groups of 8 rows,
// 1024 bytes apart.
//   bits 62-63  1: 128-byte swizzle
//   bits 32-45  stride between groups of 8 rows / 16
//   bits 16-29  leading stride / 16 (ignored for K-major)
//   bits 0-13   address / 16, so adding 1 to a descriptor moves it by 16 bytes
// K-major: a row of shared memory holds 128 bytes of K of one row (A) or column (B) of the operand. MN-major
// (2-byte elements): a row of shared memory holds 64 consecutive M or N indices at one k; the next 64 begin
// `mn_stride` bytes further, which is the leading stride.
__device__ __forceinline__ uint64_t smem_desc_k_major(const void* operand) {
  return uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 16 |
         (shared_address(operand) & 0x3ffff) >> 4;
}
__device__ __forceinline__ uint64_t smem_desc_mn_major(const void* operand, uint32_t mn_stride) {
  return uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32 | static_cast<uint64_t>(mn_stride >> 4) << 16 |
         (shared_address(operand) & 0x3ffff) >> 4;
}

// clang-format off
#define TP_ACC_8(i) "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3]), \
                     "+f"(acc[i + 4]), "+f"(acc[i + 5]), "+f"(acc[i + 6]), "+f"(acc[i + 7])
#define TP_ACC_64(i) TP_ACC_8(i), TP_ACC_8(i + 8), TP_ACC_8(i + 16), TP_ACC_8(i + 24), \
                      TP_ACC_8(i + 32), TP_ACC_8(i + 40), TP_ACC_8(i + 48), TP_ACC_8(i + 56)
#define TP_ACC_REGS_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TP_ACC_REGS_128 TP_ACC_REGS_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// clang-format on

inline constexpr int kWgmmaK = 16;  // K of one WGMMA of 2-byte elements

// acc += A B for one warpgroup: M = 64, N = 256 (or 128, into acc[0..63], with half_count == 1), K = 16. T is
// BF16 or FP16. Accumulator layout: warp w of the warpgroup has rows 16 w .. 16 w + 15. With l = lane / 4 a
// thread has, for each j, columns 8 j + 2 (lane % 4) and the next one of row l (acc[4 j], acc[4 j + 1]) and
// of row l + 8 (acc[4 j + 2], acc[4 j + 3]).
template <typename T, bool a_mn_major, bool b_mn_major, int half_count = 2>
__device__ __forceinline__ void wgmma(float (&acc)[128], uint64_t a, uint64_t b) {
#define TP_WGMMA(type)                                                                             \
  if constexpr (half_count == 2) {                                                                 \
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" TP_ACC_REGS_128 \
                 "}, %128, %129, 1, 1, 1, %130, %131;"                                             \
                 : TP_ACC_64(0), TP_ACC_64(64)                                                     \
                 : "l"(a), "l"(b), "n"(int{a_mn_major}), "n"(int{b_mn_major}));                    \
  } else {                                                                                         \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" TP_ACC_REGS_64  \
                 "}, %64, %65, 1, 1, 1, %66, %67;"                                                 \
                 : TP_ACC_64(0)                                                                    \
                 : "l"(a), "l"(b), "n"(int{a_mn_major}), "n"(int{b_mn_major}));                    \
  }
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    TP_WGMMA("bf16");
  } else {
    static_assert(std::is_same_v<T, __half>, "BF16 or FP16");
    TP_WGMMA("f16");
  }
#undef TP_WGMMA
}

// The same in BF16 with A in registers. a[0] holds k = 2 (lane % 4) and the next one of row l, a[1] of row l
// + 8; a[2] and a[3] hold k + 8 of both rows.
template <int half_count>
__device__ __forceinline__ void wgmma_a_in_registers(float (&acc)[128], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (half_count == 2) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" TP_ACC_REGS_128
                 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 0;"
                 : TP_ACC_64(0), TP_ACC_64(64)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" TP_ACC_REGS_64
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
                 : TP_ACC_64(0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
}

// FP8 operands, both K-major: A is E4M3 or E5M2, B is E4M3; M = 64, N = 128, K = 32. Overwrites acc unless
// `accumulate`.
template <DType a_type>
__device__ __forceinline__ void wgmma_fp8(float (&acc)[64], uint64_t a, uint64_t b, bool accumulate) {
#define TP_WGMMA(type)                                                             \
  asm volatile(                                                                    \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                 \
      "wgmma.mma_async.sync.aligned.m64n128k32.f32." type ".e4m3 {" TP_ACC_REGS_64 \
      "}, %64, %65, p, 1, 1;\n}"                                                   \
      : TP_ACC_64(0)                                                               \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))
  if constexpr (a_type == DType::kFloat8E4M3) {
    TP_WGMMA("e4m3");
  } else {
    static_assert(a_type == DType::kFloat8E5M2, "FP8");
    TP_WGMMA("e5m2");
  }
#undef TP_WGMMA
}

}  // namespace transformer_plugin::ptx

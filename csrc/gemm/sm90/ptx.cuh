// Hopper's instructions for matrices and for copies of tiles, a function each. What they are and how operands lie in shared
// memory: "Parallel Thread Execution ISA", sections on wgmma, cp.async.bulk.tensor, mbarrier and setmaxnreg.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/device_types.cuh"
#include "common/dtype.h"
#include "common/shared_memory.cuh"

namespace transformer_plugin::gemm::sm90 {

// ---- Barriers in shared memory. A phase ends when all arrived and all announced bytes are there.

__device__ __forceinline__ void init_barrier(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive_and_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
// So many bytes more, before who announces them arrives.
__device__ __forceinline__ void expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
// 16 bytes to shared memory of this block; like those of a copy they are there when the barrier's phase ends.
__device__ __forceinline__ void store_for(uint64_t* barrier, void* to, const int4& value) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(
          shared_address(to)),
      "r"(shared_address(barrier)), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
      : "memory");
}
// At the barrier in the same place of a block of the cluster. Not .release.cluster, whose fence waits for all that the
// GPU's memory owes this thread: what is handed over is room in shared memory that tensor cores have read.
__device__ __forceinline__ void arrive_at(uint64_t* barrier, uint32_t block) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(shared_address(barrier)),
      "r"(block)
      : "memory");
}
// At a barrier of this block.
__device__ __forceinline__ void arrive_here(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Until the phase of this parity has ended.
__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finish;\nbra again;\nfinish:\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ uint32_t block_in_cluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ int cluster_in_grid() {
  int number;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(number));
  return number;
}
__device__ __forceinline__ void sync_cluster() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait."
      "acquire.aligned;" ::
          : "memory");
}
// Of the threads that call it with the same number.
__device__ __forceinline__ void sync_threads(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
// For those, among the threads that are counted.
__device__ __forceinline__ void arrive_threads(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// ---- Copies of boxes between a matrix in memory, told by a tensor map, and shared memory. Coordinates count elements, the
// inner dimension first; what lies outside of the matrix is zero, and is not stored.

__device__ __forceinline__ void prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
__device__ __forceinline__ void load_box(void* to, const CUtensorMap& map, uint64_t* barrier, int x, int y,
                                         int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::"
      "complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// Before the first copy by a map that the kernel before wrote.
__device__ __forceinline__ void acquire(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}
// 16 bytes by a thread, or 16 zeros. Not by the copy engine: products that read them want a fence (fence_for_copies) by the
// thread that waited for them.
__device__ __forceinline__ void load_piece(uint32_t to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(is_there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void commit_pieces() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the last `left` groups of a thread's pieces are there.
template <int left>
__device__ __forceinline__ void wait_for_pieces() {
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}
// Into the second level cache.
__device__ __forceinline__ void prefetch_line(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}
// To the same place in each block of the cluster that has a bit in `blocks`, and told to its barrier.
__device__ __forceinline__ void load_box_for(uint16_t blocks, void* to, const CUtensorMap& map,
                                             uint64_t* barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::"
      "complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(blocks)
      : "memory");
}
__device__ __forceinline__ void store_box(const CUtensorMap& map, const void* from, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, "
      "{%2, %3, %4}], [%1];" ::"l"(&map),
      "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void add_box(const CUtensorMap& map, const void* from, int x, int y, int z) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          &map),
      "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// A sum as add_box makes it: subnormal numbers count as zero.
__device__ __forceinline__ float add_as_copies(float x, float y) {
  float sum;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(sum) : "f"(x), "f"(y));
  return sum;
}
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until shared memory of all but the last `left` groups of stores has been read.
template <int left>
__device__ __forceinline__ void wait_until_stored() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(left) : "memory");
}
// What threads wrote to shared memory, or read of it, comes before the copies and products that they start after.
__device__ __forceinline__ void fence_for_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Of memory that threads write and the copy engine reads: by those that wrote before they say so, and by those that were told
// before they start copies.
__device__ __forceinline__ void fence_for_copies_of_memory() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ---- Counters in memory, between blocks: what was written before one was added to is there for who finds it in the count.

__device__ __forceinline__ void add_released(uint32_t* counter, uint32_t count) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(count) : "memory");
}
__device__ __forceinline__ uint32_t load_acquired(const uint32_t* counter) {
  uint32_t count;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

// ---- Registers move from the warpgroup that copies to those that multiply.

template <int count>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// ---- Products of a warpgroup, from shared memory into registers.

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until all but the last `left` groups of products are there.
template <int left>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}

// An operand in shared memory, in rows of 128 bytes under the swizzle of that width, eight of them 1024 bytes. By rows
// (what the products sum over is the inner dimension): a row is a line of the operand. By columns: a row is 64 lines of 2
// bytes at one place of that dimension, and the next 64 lines come `lines` bytes on.
__device__ __forceinline__ uint64_t by_rows(const void* operand) {
  return uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 16 |
         (shared_address(operand) & 0x3ffff) >> 4;
}
__device__ __forceinline__ uint64_t by_columns(const void* operand, uint32_t lines) {
  return uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32 | static_cast<uint64_t>(lines >> 4) << 16 |
         (shared_address(operand) & 0x3ffff) >> 4;
}

// clang-format off
#define TP_SUMS_8(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), \
                     "+f"(sums[i + 4]), "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define TP_SUMS_64(i) TP_SUMS_8(i), TP_SUMS_8(i + 8), TP_SUMS_8(i + 16), TP_SUMS_8(i + 24), \
                      TP_SUMS_8(i + 32), TP_SUMS_8(i + 40), TP_SUMS_8(i + 48), TP_SUMS_8(i + 56)
#define TP_NAMES_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TP_NAMES_128 TP_NAMES_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// clang-format on

inline constexpr int kProductRows = 16;  // that a product of elements of 2 bytes sums over

// sums += a b: 64 lines of a, 256 of b, or 128 for the first half of the sums, 16 of the dimension between them. A thread has
// of rows l = lane / 4 and l + 8 of its warp's 16 the columns 8 j + 2 (lane % 4) and the next: sums[4 j], [4 j + 1] and
// [4 j + 2], [4 j + 3].
template <typename T, bool a_by_columns, bool b_by_columns, int halves = 2>
__device__ __forceinline__ void multiply(float (&sums)[128], uint64_t a, uint64_t b) {
#define TP_MULTIPLY(type)                                                                       \
  if constexpr (halves == 2) {                                                                  \
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" TP_NAMES_128 \
                 "}, %128, %129, 1, 1, 1, %130, %131;"                                          \
                 : TP_SUMS_64(0), TP_SUMS_64(64)                                                \
                 : "l"(a), "l"(b), "n"(int{a_by_columns}), "n"(int{b_by_columns}));             \
  } else {                                                                                      \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" TP_NAMES_64  \
                 "}, %64, %65, 1, 1, 1, %66, %67;"                                              \
                 : TP_SUMS_64(0)                                                                \
                 : "l"(a), "l"(b), "n"(int{a_by_columns}), "n"(int{b_by_columns}));             \
  }
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    TP_MULTIPLY("bf16");
  } else {
    static_assert(std::is_same_v<T, __half>, "operands of two bytes");
    TP_MULTIPLY("f16");
  }
#undef TP_MULTIPLY
}

// The same of bfloat16, with the 64 lines of a in registers: a thread has of its rows l and l + 8 the places 2 (lane % 4) and the
// next, then those of both rows 8 places on.
template <int halves>
__device__ __forceinline__ void multiply_registers(float (&sums)[128], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (halves == 2) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" TP_NAMES_128
                 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 0;"
                 : TP_SUMS_64(0), TP_SUMS_64(64)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" TP_NAMES_64
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
                 : TP_SUMS_64(0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
}

// The same of FP8 operands by rows, `a` in E4M3 or E5M2 and b in E4M3, 128 lines of b and 32 of the dimension between them;
// `add` to sums, or in their place.
template <DType a_type>
__device__ __forceinline__ void multiply_fp8(float (&sums)[64], uint64_t a, uint64_t b, bool add) {
#define TP_MULTIPLY(type)                                                                                  \
  asm volatile(                                                                                            \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                         \
      "wgmma.mma_async.sync.aligned.m64n128k32.f32." type ".e4m3 {" TP_NAMES_64 "}, %64, %65, p, 1, 1;\n}" \
      : TP_SUMS_64(0)                                                                                      \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)))
  if constexpr (a_type == DType::kFloat8E4M3) {
    TP_MULTIPLY("e4m3");
  } else {
    static_assert(a_type == DType::kFloat8E5M2, "codes of a byte");
    TP_MULTIPLY("e5m2");
  }
#undef TP_MULTIPLY
}

}  // namespace transformer_plugin::gemm::sm90

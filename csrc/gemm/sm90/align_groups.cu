#include <algorithm>

#include "common/launch.cuh"
#include "gemm/sm90/align_groups.h"

namespace transformer_plugin::gemm {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 8;  // of a line: 128 bytes of a group at a time
constexpr int kAhead = 4;  // pieces of a lane that are on their way at a time
constexpr int kBlock = 4;  // of a multiprocessor
constexpr int64_t kEnough =
    132 * kBlock * 4;  // blocks, so that none of the multiprocessors waits for a few at the end
constexpr int kLinesPerBlock = kThreads / kLanes;

// The whole words around 16 bytes at any address, as far as they hold any of the `left` bytes that are wanted.
struct Words {
  uint4 low, high;

  __device__ __forceinline__ void load(const uint8_t* from, int left) {
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16);
    const uint4* words = reinterpret_cast<const uint4*>(from - shift);
    low = __ldg(words);
    high = shift + min(left, 16) > 16 ? __ldg(words + 1) : uint4{};
  }
  // The 16 bytes from `shift` on.
  __device__ __forceinline__ uint4 from(int shift) const {
    const uint32_t all[] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    uint32_t own[5];
#pragma unroll
    for (int i = 0; i < 5; ++i) {  // a choice among registers, which have no index
      const int word = shift / 4;
      own[i] = word == 0 ? all[i] : word == 1 ? all[i + 1] : word == 2 ? all[i + 2] : all[min(i + 3, 7)];
    }
    const int bits = shift % 4 * 8;
    return {__funnelshift_r(own[0], own[1], bits), __funnelshift_r(own[1], own[2], bits),
            __funnelshift_r(own[2], own[3], bits), __funnelshift_r(own[3], own[4], bits)};
  }
};

// What lies in words that are not whole inside of the operand: byte by byte, zeros past the `left` that are wanted.
__device__ __forceinline__ void copy_bytes(uint4* to, const uint8_t* from, int left) {
  uint8_t* bytes = reinterpret_cast<uint8_t*>(to);
#pragma unroll 1
  for (int i = 0; i < 16; ++i) bytes[i] = i < left ? from[i] : uint8_t{0};
}

// A block copies lines of every `parts`-th group.
__global__ void __launch_bounds__(kThreads, kBlock)
    align_groups_kernel(Lines first, Lines second, const int32_t* offsets, int groups, int rows, int parts,
                        bool all) {
  pdl_wait();
  pdl_launch_dependents();
  int64_t line = static_cast<int64_t>(blockIdx.x / parts) * kLinesPerBlock + threadIdx.x / kLanes;
  const bool is_first = line < first.count;
  const Lines lines = is_first ? first : second;
  if (!is_first) line -= first.count;
  if (line >= lines.count) return;
  const uint8_t* from = lines.from + line * rows;
  // Bytes of the operand before the line, and from it on, as far as they matter.
  const int before = line == 0 ? 0 : min(rows, 16);
  const int after = static_cast<int>(min((lines.count - line) * rows, static_cast<int64_t>(rows) + 32));
  uint8_t* to = lines.to + line * quantize::aligned_length(rows, groups);
  for (int group = static_cast<int>(blockIdx.x) % parts; group < groups; group += parts) {
    const int begin = offsets ? offsets[group] : 0, end = offsets ? offsets[group + 1] : rows;
    if (!is_moved(begin, all)) continue;
    uint4* own = reinterpret_cast<uint4*>(to + quantize::aligned_begin(begin, group));
    const int pieces = (end - begin + 15) / 16;
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(from + begin) % 16);
    const auto has_whole_words = [&](int at) {
      return at - shift >= -before && at - shift + 2 * static_cast<int>(sizeof(uint4)) <= after;
    };
    for (int first_piece = static_cast<int>(threadIdx.x) % kLanes; first_piece < pieces;
         first_piece += kAhead * kLanes) {
      Words words[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int piece = first_piece + i * kLanes, at = begin + piece * 16;
        if (piece < pieces && has_whole_words(at)) words[i].load(from + at, end - at);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int piece = first_piece + i * kLanes, at = begin + piece * 16;
        if (piece >= pieces) continue;
        if (has_whole_words(at)) {
          own[piece] = words[i].from(shift);
        } else {
          copy_bytes(&own[piece], from + at, end - at);
        }
      }
    }
  }
}

}  // namespace

void launch_align_groups(const Lines& first, const Lines& second, const int32_t* offsets, int64_t groups,
                         int64_t rows, bool all, void* stream) {
  const unsigned of_part = grid_size(first.count + second.count, kLinesPerBlock);
  if (of_part == 0) return;
  const int parts = static_cast<int>(std::clamp<int64_t>(kEnough / of_part, 1, groups));
  launch_pdl(align_groups_kernel, of_part * static_cast<unsigned>(parts), kThreads, 0,
             static_cast<cudaStream_t>(stream), first, second, offsets, static_cast<int>(groups),
             static_cast<int>(rows), parts, all);
  check_launch("align_groups_kernel");
}

}  // namespace transformer_plugin::gemm

// Copies groups of FP8 operands to the `aligned` layout (align_groups.h): for each row r and each group g
// that is copied,
//
//   to[r, aligned_begin(g) + i] = from[r, offsets[g] + i]   for 0 <= i < tokens of the group
//
// The last 16 bytes of a group are written whole. Bytes past the group are zeros or those of the next group;
// the consumers of the GEMM zero them (zero_tokens_past_group).
//
// Grid: blocks of 32 rows, times `parts`; a block copies every parts-th group. Block: 256 threads, 8 lanes
// for each row, which copy 128 bytes of a group at a time. Unaligned 16 bytes are loaded as two aligned words
// of 16 bytes and shifted. No shared memory.
#include <algorithm>

#include "common/launch.cuh"
#include "gemm/sm90/align_groups.h"

namespace transformer_plugin::gemm {
namespace {

constexpr int kThreads = 256;
constexpr int kLanesPerRow = 8;     // 128 bytes of a group at a time
constexpr int kChunksInFlight = 4;  // 16-byte chunks that a lane has in flight
constexpr int kBlocksPerSm = 4;     // resident blocks of an SM
constexpr int kH100Sms = 132, kWaves = 4;
constexpr int64_t kMinBlocks = kH100Sms * kBlocksPerSm * kWaves;  // enough for an even load of all SMs
constexpr int kRowsPerBlock = kThreads / kLanesPerRow;

// The aligned 16-byte words that contain 16 bytes at any address. The second is loaded only if it has some of
// the `left` bytes that are needed.
struct Words {
  uint4 low, high;

  __device__ __forceinline__ void load(const uint8_t* from, int left) {
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16);
    const uint4* words = reinterpret_cast<const uint4*>(from - shift);
    low = __ldg(words);
    high = shift + min(left, 16) > 16 ? __ldg(words + 1) : uint4{};
  }
  // The 16 bytes that begin `shift` bytes after the first word.
  __device__ __forceinline__ uint4 from(int shift) const {
    const uint32_t all[] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    uint32_t selected[5];
#pragma unroll
    for (int i = 0; i < 5; ++i) {  // selects among registers, which cannot be indexed
      const int word = shift / 4;
      selected[i] = word == 0 ? all[i] : word == 1 ? all[i + 1] : word == 2 ? all[i + 2] : all[min(i + 3, 7)];
    }
    const int bits = shift % 4 * 8;
    return {__funnelshift_r(selected[0], selected[1], bits), __funnelshift_r(selected[1], selected[2], bits),
            __funnelshift_r(selected[2], selected[3], bits), __funnelshift_r(selected[3], selected[4], bits)};
  }
};

// Copies 16 bytes whose aligned words are not completely inside of the operand: byte by byte, zeros after
// `left` bytes.
__device__ __forceinline__ void copy_bytes(uint4* to, const uint8_t* from, int left) {
  uint8_t* bytes = reinterpret_cast<uint8_t*>(to);
#pragma unroll 1
  for (int i = 0; i < 16; ++i) bytes[i] = i < left ? from[i] : uint8_t{0};
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    align_groups_kernel(OperandCopy first, OperandCopy second, const int32_t* offsets, int groups, int tokens,
                        int parts, bool copy_all) {
  pdl_wait();
  pdl_launch_dependents();
  int64_t row = static_cast<int64_t>(blockIdx.x / parts) * kRowsPerBlock + threadIdx.x / kLanesPerRow;
  const bool is_first = row < first.count;
  const OperandCopy operand = is_first ? first : second;
  if (!is_first) row -= first.count;
  if (row >= operand.count) return;
  const uint8_t* from = operand.from + row * tokens;
  // Bytes of the operand before the row, and from its beginning on, as far as aligned words may reach.
  const int before = row == 0 ? 0 : min(tokens, 16);
  const int after = static_cast<int>(min((operand.count - row) * tokens, static_cast<int64_t>(tokens) + 32));
  uint8_t* to = operand.to + row * quantize::aligned_length(tokens, groups);
  for (int group = static_cast<int>(blockIdx.x) % parts; group < groups; group += parts) {
    const int begin = offsets ? offsets[group] : 0, end = offsets ? offsets[group + 1] : tokens;
    if (!reads_group_aligned(begin, copy_all)) continue;
    uint4* group_to = reinterpret_cast<uint4*>(to + quantize::aligned_begin(begin, group));
    const int chunks = (end - begin + 15) / 16;
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(from + begin) % 16);
    const auto has_whole_words = [&](int token) {
      return token - shift >= -before && token - shift + 2 * static_cast<int>(sizeof(uint4)) <= after;
    };
    for (int first_chunk = static_cast<int>(threadIdx.x) % kLanesPerRow; first_chunk < chunks;
         first_chunk += kChunksInFlight * kLanesPerRow) {
      Words words[kChunksInFlight];
#pragma unroll
      for (int i = 0; i < kChunksInFlight; ++i) {
        const int chunk = first_chunk + i * kLanesPerRow, token = begin + chunk * 16;
        if (chunk < chunks && has_whole_words(token)) words[i].load(from + token, end - token);
      }
#pragma unroll
      for (int i = 0; i < kChunksInFlight; ++i) {
        const int chunk = first_chunk + i * kLanesPerRow, token = begin + chunk * 16;
        if (chunk >= chunks) continue;
        if (has_whole_words(token)) {
          group_to[chunk] = words[i].from(shift);
        } else {
          copy_bytes(&group_to[chunk], from + token, end - token);
        }
      }
    }
  }
}

}  // namespace

void launch_align_groups(const OperandCopy& first, const OperandCopy& second, const int32_t* offsets,
                         int64_t groups, int64_t tokens, bool copy_all, void* stream) {
  const unsigned row_blocks = grid_size(first.count + second.count, kRowsPerBlock);
  if (row_blocks == 0) return;
  const int parts = static_cast<int>(std::clamp<int64_t>(kMinBlocks / row_blocks, 1, groups));
  launch_pdl(align_groups_kernel, row_blocks * static_cast<unsigned>(parts), kThreads, 0,
             static_cast<cudaStream_t>(stream), first, second, offsets, static_cast<int>(groups),
             static_cast<int>(tokens), parts, copy_all);
  check_launch("align_groups_kernel");
}

}  // namespace transformer_plugin::gemm

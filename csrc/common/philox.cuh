// Philox (philox.h) for threads that make several calls with one key: the round keys are computed once per
// block, and calls are interleaved.
#pragma once

#include "common/philox.h"

namespace transformer_plugin {

// Round keys, two rounds per vector: k0, k1, k0, k1.
struct PhiloxKeys {
  uint4 rounds[5];

  PhiloxKeys() = default;
  __device__ __forceinline__ explicit PhiloxKeys(uint64_t key) {
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      rounds[i] = {k0, k1, k0 + 0x9E3779B9u, k1 + 0xBB67AE85u};
      k0 += 2 * 0x9E3779B9u;
      k1 += 2 * 0xBB67AE85u;
    }
  }
};

// philox(key, counter, 0, c2, 0) for each counter.
template <int count>
__device__ __forceinline__ void philox_small(const PhiloxKeys& keys, const uint32_t (&counters)[count],
                                             uint32_t c2, Philox4 (&out)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) out[i] = {{counters[i], 0u, c2, 0u}};
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint4 two = keys.rounds[round / 2];
    const uint32_t k0 = round % 2 == 0 ? two.x : two.z, k1 = round % 2 == 0 ? two.y : two.w;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      uint32_t(&c)[4] = out[i].word;
      const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c[0];
      const uint64_t p1 = static_cast<uint64_t>(0xCD9E8D57u) * c[2];
      c[0] = static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0;
      c[1] = static_cast<uint32_t>(p1);
      c[2] = static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1;
      c[3] = static_cast<uint32_t>(p0);
    }
  }
}

}  // namespace transformer_plugin

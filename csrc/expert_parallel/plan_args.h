// Arguments of the kernels of plan, without torch.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/expert_index_args.h"
#include "common/math.h"

namespace transformer_plugin::expert_parallel {

// packed[t, k] = indices[t, k], or the nearest int32; rows t >= tokens are -1. Wrong indices are sent too, so that
// all ranks find them.
struct PackIndicesArgs {
  const void* indices;  // [tokens, topk] int32 or int64
  bool indices_are_int64;
  int64_t tokens;
  int64_t max_tokens;
  int64_t topk;
  int32_t* packed;  // [max_tokens, topk]
};

// The number of rows that each rank needs: the sum of its experts' counts, each rounded up to `alignment`.
// Every rank computes the same values from the same gathered indices.
struct CountRowsArgs {
  const int32_t* indices;  // [numel], the packed ones of all ranks
  int64_t numel;
  int64_t experts;
  int64_t ranks;
  int64_t capacity;
  int64_t alignment;
  int64_t* required;  // [ranks]
  int32_t* overflow;  // [1]: 1 if any of `required` exceeds the capacity, else 0
  int64_t* report;    // null, or where the largest of `required` is stored on overflow
  int32_t* counts;    // [experts], scratch memory of the CUDA kernel
  ExpertRange range;  // of the indices
};

// Stores the negative of the largest number of tokens that a rank needs in `report`, if it exceeds `bound`.
struct ReportTokensArgs {
  const int64_t* required_tokens;  // [ranks]
  int64_t ranks;
  int64_t bound;
  int64_t* report;
};

TP_HOST_DEVICE int32_t packed_index(int64_t index) {
  constexpr int64_t kLargest = 0x7fffffff;
  return static_cast<int32_t>(index > kLargest ? kLargest : index < -kLargest ? -kLargest : index);
}

TP_HOST_DEVICE int64_t padded_rows(int64_t rows, int64_t alignment) {
  return (rows + alignment - 1) / alignment * alignment;
}

void pack_indices_cpu(const PackIndicesArgs& args);
void launch_pack_indices(const PackIndicesArgs& args, void* stream);
void count_rows_cpu(const CountRowsArgs& args);
void launch_count_rows(const CountRowsArgs& args, void* stream);
void launch_report_tokens(const ReportTokensArgs& args, void* stream);
// Pinned host memory for CountRowsArgs::report, 0 at first. Never freed: CUDA graphs keep its address.
int64_t* new_overflow_report();

}  // namespace transformer_plugin::expert_parallel

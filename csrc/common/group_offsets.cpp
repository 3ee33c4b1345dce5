// Checks of group sizes, and group offsets as a tensor or on the host; the op check_group_sizes.
#include "common/group_offsets.h"

#include <atomic>
#include <limits>

#include "common/expert_index.h"
#include "common/ops/common.h"
#include "common/register.h"
#include "common/row_index.h"
#include "common/shared_offsets.h"
#include "common/tensor.h"

namespace transformer_plugin {
namespace {

template <typename Size>
void check_values(const Argument& argument, int64_t rows) {
  const Size* sizes = argument.tensor.const_data_ptr<Size>();
  int64_t total = 0;
  for (int64_t g = 0; g < argument.tensor.numel(); ++g) {
    TP_CHECK_VALUE(sizes[g] >= 0, argument.op, argument.name, "sizes that are not negative",
                   sizes[g] << " for group " << g, "Pass the number of rows of each group");
    const int64_t size = sizes[g], left = rows - total;  // the sum itself may exceed 2^63
    TP_CHECK_VALUE(
        size <= left, argument.op, argument.name,
        "sizes that sum to at most " << rows << ", the rows of the buffer",
        "a sum of " << static_cast<uint64_t>(total) + static_cast<uint64_t>(size) << " at group " << g,
        "Enlarge the buffer or fix the sizes");
    total += size;
  }
}

void check_arguments(const Argument& group_sizes, const Argument& data, int64_t rows) {
  check_group_sizes(group_sizes, data);
  TP_CHECK_VALUE(rows <= std::numeric_limits<int32_t>::max(), data.op, data.name, "at most 2^31 - 1 rows",
                 describe(data.tensor), "Split the call");
}

#ifdef TRANSFORMER_PLUGIN_CUDA
// Set by the first call with group sizes on a GPU, so that checking starts no CUDA context.
std::atomic<bool> has_word = false;
#endif

}  // namespace

void check_earlier_sizes(const char* op) {
  check_earlier_rows(op);
  check_earlier_experts(op);
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (!has_word) return;
  WrongSizesWord* word = wrong_sizes_word();
  if (word->is_set == 0) return;
  const int64_t group = word->found.group, size = word->found.size;
  const int64_t left = word->found.left, rows = word->found.rows;
  word->is_set = 0;
  TP_CHECK_VALUE(false, op, "group_sizes", "sizes that fit their buffer in the calls before this one",
                 "a call with " << size << " rows for group " << group << " where " << left << " of " << rows
                                << " are left",
                 "Rows past the buffer were dropped: fix the sizes or enlarge the buffer");
#endif
}

#ifdef TRANSFORMER_PLUGIN_CUDA
DeviceSizes device_sizes(const Argument& group_sizes, const Argument& data, int64_t rows) {
  check_arguments(group_sizes, data, rows);
  check_earlier_sizes(group_sizes.op);
  has_word = true;
  return {group_sizes.tensor.const_data_ptr(), group_sizes.tensor.scalar_type() == at::kLong,
          wrong_sizes_word()};
}
#endif

namespace {

template <typename Size>
void fill_checked(const Argument& group_sizes, int64_t rows, int32_t* offsets) {
  const at::Tensor& sizes = group_sizes.tensor;
  check_values<Size>(group_sizes, rows);
  group_offsets_cpu(sizes.const_data_ptr<Size>(), sizes.numel(), rows, offsets);
}

void fill_cpu(const Argument& group_sizes, int64_t rows, int32_t* offsets) {
  group_sizes.tensor.scalar_type() == at::kLong ? fill_checked<int64_t>(group_sizes, rows, offsets)
                                                : fill_checked<int32_t>(group_sizes, rows, offsets);
}

}  // namespace

HostOffsets host_offsets(const Argument& group_sizes, const Argument& data, int64_t rows) {
  check_arguments(group_sizes, data, rows);
  HostOffsets offsets(static_cast<size_t>(group_sizes.tensor.numel() + 1));
  fill_cpu(group_sizes, rows, offsets.data());
  return offsets;
}

at::Tensor group_offsets(const Argument& group_sizes, const Argument& data, int64_t rows) {
  check_arguments(group_sizes, data, rows);
  const at::Tensor shared = SharedOffsets::find(GroupTable::kOffsets, group_sizes.tensor, rows);
  if (shared.defined()) {
    if (data.tensor.is_cuda()) check_earlier_sizes(group_sizes.op);
    return shared;
  }
  const at::Tensor offsets = empty(data.tensor, {group_sizes.tensor.numel() + 1}, at::kInt);
  int32_t* out = offsets.mutable_data_ptr<int32_t>();
  if (data.tensor.is_cpu()) fill_cpu(group_sizes, rows, out);
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (data.tensor.is_cuda()) {
    const DeviceSizes given = device_sizes(group_sizes, data, rows);
    const CudaScope scope(data.tensor);
    launch_group_offsets(given.sizes, given.is_int64, group_sizes.tensor.numel(), rows, out, given.word,
                         scope.stream());
  }
#endif
  SharedOffsets::keep(GroupTable::kOffsets, group_sizes.tensor, rows, offsets);
  return offsets;
}

TP_IMPL_FOR(CompositeExplicitAutograd, check_group_sizes, +[] { check_earlier_sizes("check_group_sizes"); });

}  // namespace transformer_plugin

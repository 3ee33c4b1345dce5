// Rows gathered by an index: checks, the gather and its gradient (common/row_index.h).
#include "common/row_index.h"

#include <ATen/ops/sort.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "common/tensor.h"

namespace transformer_plugin {
namespace {

using at::Tensor;

#ifdef TRANSFORMER_PLUGIN_CUDA
// Set by the first call with an index on a GPU, so that checking starts no CUDA context.
std::atomic<bool> has_word = false;
#endif

RowIndex row_index(const Tensor& index, const Tensor& offsets, int64_t rows) {
  return {index.const_data_ptr(), index.scalar_type() == at::kLong, index.size(0), rows,
          offsets.const_data_ptr<int32_t>() + offsets.size(0) - 1};
}

template <typename Entry>
void check_entries(const Argument& index, const Argument& matrix, int64_t end) {
  const Entry* entries = index.tensor.const_data_ptr<Entry>();
  const int64_t rows = matrix.tensor.size(0);
  for (int64_t i = 0; i < end; ++i) {
    TP_CHECK_VALUE(
        entries[i] >= kRowOfZeros && entries[i] < rows, index.op, index.name,
        "entries from 0 to " << rows - 1 << ", the rows of '" << matrix.name << "', or -1 for a row of zeros",
        entries[i] << " at " << i, "Pass the row that each place takes");
  }
}

// Row indices as sort keys; entries that are ignored come last.
Tensor row_keys(const Tensor& index, const Tensor& offsets, int64_t rows) {
  const Tensor keys = empty(index, {index.size(0)}, at::kInt);
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (index.is_cuda()) {
    const CudaScope scope(index);
    launch_row_keys(row_index(index, offsets, rows), keys.mutable_data_ptr<int32_t>(), scope.stream());
    return keys;
  }
#endif
  const RowIndex of = row_index(index, offsets, rows);
  const Tensor wide = index.to(at::kLong);
  const int64_t* entries = wide.const_data_ptr<int64_t>();
  int32_t* key = keys.mutable_data_ptr<int32_t>();
  for (int64_t i = 0; i < of.places; ++i) {
    const bool followed = i < *of.end && entries[i] >= 0 && entries[i] < rows;
    key[i] = static_cast<int32_t>(followed ? entries[i] : rows);
  }
  return keys;
}

}  // namespace

void check_row_index(const Argument& index, const Argument& matrix) {
  check_dtype(index, {at::kInt, at::kLong});
  check_dim(index, 1);
  check_same_device(index, matrix);
  check_contiguous(index);
  TP_CHECK_VALUE(matrix.tensor.sym_size(0) <= std::numeric_limits<int32_t>::max(), matrix.op, matrix.name,
                 "at most 2^31 - 1 rows", describe(matrix.tensor), "Split the call");
}

void check_row_entries(const Argument& index, const Argument& matrix, const Tensor& offsets) {
  if (!index.tensor.is_cpu()) return;
  const int64_t end = offsets.const_data_ptr<int32_t>()[offsets.size(0) - 1];
  index.tensor.scalar_type() == at::kLong ? check_entries<int64_t>(index, matrix, end)
                                          : check_entries<int32_t>(index, matrix, end);
}

void check_earlier_rows(const char* op) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (!has_word) return;
  WrongRowWord* word = wrong_row_word();
  const uint64_t found = word->found;
  if (found == 0) return;
  word->found = 0;
  TP_CHECK_VALUE(
      false, op, "rows", "entries that are rows of their matrix in the calls before this one",
      "a call whose entry " << (found >> 32) - 1 << " is not one of its " << (found & 0xffffffff) << " rows",
      "Out-of-range entries were treated as zeros: fix the index");
#endif
}

GatheredRows rows_by_index(const Tensor& matrix, const Tensor& index, const Tensor& offsets) {
  WrongRowWord* word = nullptr;
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (matrix.is_cuda()) {
    has_word = true;
    word = wrong_row_word();
  }
#endif
  const auto bytes = static_cast<int64_t>(matrix.element_size());
  return {row_index(index, offsets, matrix.size(0)), matrix.const_data_ptr(), matrix.size(1) * bytes,
          matrix.stride(0) * bytes, word};
}

Tensor take_rows(const Tensor& matrix, const Tensor& index, const Tensor& offsets) {
  const Tensor taken = empty(matrix, {index.size(0), matrix.size(1)}, matrix.scalar_type());
  const bool readable = matrix.stride(1) == 1 || matrix.size(1) <= 1;
  const Tensor source = readable ? matrix : matrix.contiguous();
  const GatheredRows rows = rows_by_index(source, index, offsets);
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (matrix.is_cuda()) {
    const CudaScope scope(source);
    launch_take_rows(rows, taken.mutable_data_ptr(), scope.stream());
    return taken;
  }
#endif
  take_rows_cpu(rows, taken.mutable_data_ptr());
  return taken;
}

Tensor sum_taken_rows(const Tensor& taken, const Tensor& index, const Tensor& offsets, int64_t num_rows) {
  const Tensor source = taken.contiguous();
  const Tensor output = empty(source, {num_rows, source.size(1)}, source.scalar_type());
  const auto [keys, order] = at::sort(row_keys(index, offsets, num_rows), std::optional<bool>(true));
  const SumTakenRowsArgs args{source.const_data_ptr(),
                              keys.const_data_ptr<int32_t>(),
                              order.const_data_ptr<int64_t>(),
                              output.mutable_data_ptr(),
                              source.size(0),
                              num_rows,
                              source.size(1),
                              to_dtype(source.scalar_type())};
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (source.is_cuda()) {
    const CudaScope scope(source);
    launch_sum_taken_rows(args, scope.stream());
    return output;
  }
#endif
  sum_taken_rows_cpu(args);
  return output;
}

}  // namespace transformer_plugin

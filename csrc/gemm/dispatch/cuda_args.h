// Helpers that fill GroupedGemmArgs from tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "common/row_index_args.h"
#include "common/tensor.h"
#include "gemm/args/kernel_args.h"

namespace transformer_plugin::gemm {

// The device memory for the pointer array of a list of matrices; must outlive the launch. Empty for an empty list.
class DevicePointerArray {
 public:
  DevicePointerArray(at::TensorList matrices, const at::Tensor& like) {
    if (matrices.empty()) return;
    for (const at::Tensor& matrix : matrices) addresses_.push_back(matrix.const_data_ptr());
    room_ = empty(like, {pointer_array_bytes(static_cast<int64_t>(matrices.size()))}, at::kByte);
  }
  PointerArray get() const {
    if (addresses_.empty()) return {};
    return {addresses_.data(), room_.mutable_data_ptr()};
  }

 private:
  std::vector<const void*> addresses_;
  at::Tensor room_;
};

inline bool aligned_rows(const at::Tensor& tensor) {
  const int64_t row_bytes = tensor.size(-1) * static_cast<int64_t>(tensor.element_size());
  return row_bytes % 16 == 0 && reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

// Whether kernels that gather rows by 16 bytes can read the matrix.
inline bool has_aligned_rows(const GatheredRows& rows) {
  return rows.index.rows > 0 && reinterpret_cast<uintptr_t>(rows.matrix) % 16 == 0 &&
         rows.stride_bytes % 16 == 0;
}

inline const float* float_or_null(const std::optional<at::Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<float>() : nullptr;
}

inline std::optional<at::Tensor> as_float(const std::optional<at::Tensor>& tensor) {
  return tensor ? std::optional<at::Tensor>(tensor->to(at::kFloat).contiguous()) : std::nullopt;
}

// The stride of a single row is arbitrary, so it is replaced by the width.
inline int64_t row_stride(const at::Tensor& matrix) {
  return matrix.size(0) > 1 ? matrix.stride(0) : matrix.size(1);
}

// Launches the kernels of gemm/generic, and writes zeros past the last group if `args.zero_tail`.
void launch_generic(GemmDirection direction, const GroupedGemmArgs& args, void* stream);

// Writes zeros to the rows past the last group.
inline void zero_tail_rows(const at::Tensor& out, const at::Tensor& offsets, void* stream) {
  const auto bytes = static_cast<int64_t>(out.element_size());
  launch_zero_tail(out.mutable_data_ptr(), offsets.const_data_ptr<int32_t>() + offsets.size(0) - 1,
                   out.size(0), out.size(1) * bytes, row_stride(out) * bytes, stream);
}

}  // namespace transformer_plugin::gemm

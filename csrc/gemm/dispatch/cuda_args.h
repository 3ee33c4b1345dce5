// Helpers that fill the pointers of GroupedGemmArgs, and launch.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "common/tensor.h"
#include "gemm/dispatch/describe_gemm.h"
#include "gemm/sm90/launch.h"

namespace transformer_plugin::gemm {

// The device memory for the pointer array of a list of matrices; must outlive the launch. Empty for an empty
// list.
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

inline const float* float_or_null(const std::optional<at::Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<float>() : nullptr;
}

inline std::optional<at::Tensor> as_float(const std::optional<at::Tensor>& tensor) {
  return tensor ? std::optional<at::Tensor>(tensor->to(at::kFloat).contiguous()) : std::nullopt;
}

// Launches the kernels of gemm/generic, and writes zeros past the last group if `args.zero_tail`.
Launcher generic_launcher(GemmDirection direction);

// Writes zeros to the rows past the last group.
inline void zero_tail_rows(const at::Tensor& out, const at::Tensor& offsets, void* stream) {
  const auto bytes = static_cast<int64_t>(out.element_size());
  launch_zero_tail(out.mutable_data_ptr(), offsets.const_data_ptr<int32_t>() + offsets.size(0) - 1,
                   out.size(0), out.size(1) * bytes, row_stride(out) * bytes, stream);
}

}  // namespace transformer_plugin::gemm

// Conversions between torch and kernels: element types, streams, and allocation with symbolic shapes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <optional>

#include "common/dtype.h"

#ifdef TRANSFORMER_PLUGIN_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace transformer_plugin {

inline DType to_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return DType::kFloat32;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kHalf: return DType::kFloat16;
    case at::kDouble: return DType::kFloat64;
    case at::kFloat8_e4m3fn: return DType::kFloat8E4M3;
    case at::kFloat8_e5m2: return DType::kFloat8E5M2;
    case at::kByte: return DType::kUInt8;
    default: TORCH_INTERNAL_ASSERT(false, "no kernel element type for ", dtype);
  }
}

// A new contiguous tensor on the device of `like`; symbolic sizes stay symbolic.
at::Tensor empty(const at::Tensor& like, c10::SymIntArrayRef sizes, at::ScalarType dtype);

#ifdef TRANSFORMER_PLUGIN_CUDA
// Makes the device of a tensor current, and provides its current stream. For None or a tensor on another kind
// of device, which an op may get here if another argument is on a GPU, nothing changes: the op's checks raise
// the error later.
class CudaScope {
 public:
  explicit CudaScope(const at::Tensor& tensor)
      : guard_(tensor.defined() && tensor.is_cuda() ? std::optional(tensor.device()) : std::nullopt),
        stream_(c10::cuda::getCurrentCUDAStream()) {}
  void* stream() const { return stream_.stream(); }

 private:
  c10::cuda::OptionalCUDAGuard guard_;
  c10::cuda::CUDAStream stream_;
};
#endif

using OptionalTensorArg = const std::optional<at::Tensor>&;

}  // namespace transformer_plugin

// Element types of kernels, independent of torch: host files convert at::ScalarType to these.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

namespace transformer_plugin {

enum class DType : int32_t {
  kFloat32,
  kBFloat16,
  kFloat16,
  kFloat64,
  kFloat8E4M3,
  kFloat8E5M2,
  kFloat4E2M1,
  kUInt8
};

// Calls fn with a value of the C++ type of `dtype`, one of the three float types of activations.
template <typename Fn>
void visit_float(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kBFloat16: return fn(c10::BFloat16{});
    case DType::kFloat16: return fn(c10::Half{});
    default: return fn(float{});
  }
}

}  // namespace transformer_plugin

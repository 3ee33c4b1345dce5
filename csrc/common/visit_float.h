// The C++ types of element types on a CPU, which are torch's. Kernels have CUDA's (device_types.cuh).
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "common/dtype.h"

namespace transformer_plugin {

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

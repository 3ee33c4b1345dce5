// Element types of kernels, independent of torch: host files convert at::ScalarType to these.
#pragma once

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

}  // namespace transformer_plugin

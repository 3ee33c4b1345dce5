// From the dtypes of kernel arguments to template parameters: one call selects the input's type and the FP8 element.
#pragma once

#include <type_traits>

#include "common/device_types.cuh"

namespace transformer_plugin::quantize {

// Call fn(type, element) with a value of the input's type and the FP8 element as an integral constant.
using E4M3 = std::integral_constant<DType, DType::kFloat8E4M3>;
using E5M2 = std::integral_constant<DType, DType::kFloat8E5M2>;

template <typename Fn>
void visit_16bit_fp8(DType dtype, DType element, Fn&& fn) {
  if (dtype == DType::kFloat16) {
    return element == DType::kFloat8E5M2 ? fn(__half{}, E5M2{}) : fn(__half{}, E4M3{});
  }
  element == DType::kFloat8E5M2 ? fn(__nv_bfloat16{}, E5M2{}) : fn(__nv_bfloat16{}, E4M3{});
}

template <typename Fn>
void visit_float_fp8(DType dtype, DType element, Fn&& fn) {
  if (dtype != DType::kFloat32) return visit_16bit_fp8(dtype, element, fn);
  element == DType::kFloat8E5M2 ? fn(float{}, E5M2{}) : fn(float{}, E4M3{});
}

}  // namespace transformer_plugin::quantize

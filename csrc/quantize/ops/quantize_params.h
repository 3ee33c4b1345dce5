// Parameters of ops that quantize: per-tensor or per-row amaxes, and a seed for stochastic rounding.
#pragma once

#include "quantize/args/quantize_nv.h"
#include "quantize/ops/checks.h"
#include "quantize/ops/group_tables.h"
#include "quantize/ops/outputs.h"

namespace transformer_plugin::quantize {

// As the caller passed them: `amax` of the rows, `amax_t` of the columns. fp8_tensor has one amax, `amax`.
struct QuantizeParams {
  const OptionalTensor& amax;
  const OptionalTensor& amax_t;
  const OptionalTensor& seed;
};

// What is quantized: an argument of the op, or an intermediate result, whose amax the caller must know.
// `intermediate` is text for errors that says what it is and how to do without the op, or null.
struct QuantizeInput {
  Argument argument;
  MatrixShape shape;
  const char* intermediate = nullptr;
};

// Checks that each parameter is present exactly if the format uses it, with the right sizes.
void check_quantize_params(const QuantizeInput& input, const Format& format, std::string_view key,
                           const Directions& directions, const QuantizeParams& params);

// The encoding method of an NVFP4 format.
NvMethod nv_method(const Format& format);

// Kernel arguments for NVFP4, and the contiguous amaxes that they point to, which must live until the launch.
// `input` is contiguous; values are rounded to its dtype before they are quantized.
class NvArgsOwner {
 public:
  NvArgsOwner(const at::Tensor& input, const Outputs& outputs, const Layout& layout, const Format& format,
              const QuantizeParams& params);
  // Without an input pointer, for computed values.
  NvArgsOwner(DType dtype, const Outputs& outputs, const Layout& layout, const Format& format,
              const QuantizeParams& params);
  const NvArgs& get() const { return args_; }

 private:
  at::Tensor amax_, amax_t_;
  NvArgs args_;
};

}  // namespace transformer_plugin::quantize

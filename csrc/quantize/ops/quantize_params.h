// What an op that quantizes is given beside the matrix: the largest magnitudes of more than a block, and a seed.
#pragma once

#include "quantize/args/quantize_nv.h"
#include "quantize/ops/outputs.h"

namespace transformer_plugin::quantize {

// As the caller passed them. `amax` is that of the rows, or of the only direction.
struct GivenTensors {
  const OptionalTensor& amax;
  const OptionalTensor& amax_t;
  const OptionalTensor& seed;
};

// What is quantized: an argument of the op, or what the op makes of it on the way, which then has no amax of its own.
// `made` says what that is and how to do without the op, or is null.
struct Subject {
  Argument argument;
  Operand operand;
  const char* made = nullptr;
};

// Whether each is there just when the format takes it, with the right sizes.
void check_given(const Subject& subject, const Format& format, std::string_view key,
                 const Directions& directions, const GivenTensors& given);

// How NVFP4 codes a block.
NvMethod nv_method(const Format& format);

// Kernels read `input`, which is contiguous, and values have its dtype before they are quantized. Checked amaxes, which
// this keeps while kernels are launched.
class NvArguments {
 public:
  NvArguments(const at::Tensor& input, const Outputs& outputs, const Layout& layout, const Format& format,
              const GivenTensors& given);
  // Without an input, of values that are made.
  NvArguments(DType dtype, const Outputs& outputs, const Layout& layout, const Format& format,
              const GivenTensors& given);
  const NvArgs& get() const { return args_; }

 private:
  at::Tensor amax_, amax_t_;
  NvArgs args_;
};

}  // namespace transformer_plugin::quantize

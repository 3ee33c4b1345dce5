// Checks of the amax and seed parameters, and NVFP4 kernel arguments (quantize/ops/quantize_params.h).
#include "quantize/ops/quantize_params.h"

#include "common/tensor.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;

void check_seed(const Argument& argument, const Format& format, std::string_view key,
                const OptionalTensor& params) {
  if (!format.stochastic_rounding) return check_unused(argument.op, "seed", params, key);
  TP_CHECK_VALUE(params, argument.op, "seed",
                 "an int64 tensor of size [1], which '" << key << "' draws its roundings from", "None",
                 "Pass another number in each step, for example of torch.randint");
  const Argument seed{argument.op, "seed", *params};
  check_dtype(seed, {at::kLong});
  check_same_device(seed, argument);
  check_dim(seed, 1);
  check_size(seed, 0, 1, "one seed for the call");
}

// That of one direction, which is required exactly if the direction is requested.
void check_nv_amax(const QuantizeInput& input, const AmaxArgument& amax, const Format& format,
                   std::string_view key) {
  const char* direction = amax.transposed ? "columnwise" : "rowwise";
  TP_CHECK_VALUE(amax.required || !amax.tensor, input.argument.op, amax.name,
                 "None unless '" << direction << "' is True", describe(*amax.tensor), "Leave it out");
  check_amax(input.argument, amax, key, input.shape.amax_sizes(format, amax.transposed));
}

uint8_t* bytes(const Tensor& tensor) {
  return tensor.defined() ? static_cast<uint8_t*>(tensor.mutable_data_ptr()) : nullptr;
}

}  // namespace

void check_quantize_params(const QuantizeInput& input, const Format& format, std::string_view key,
                           const Directions& directions, const QuantizeParams& params) {
  const Argument& argument = input.argument;
  check_seed(argument, format, key, params.seed);
  if (!takes_amax(format)) {
    check_unused(argument.op, "amax", params.amax, key);
    return check_unused(argument.op, "amax_t", params.amax_t, key);
  }
  if (!format.is_nv()) {
    check_amax(argument, {"amax", params.amax, false, input.intermediate != nullptr, input.intermediate}, key,
               input.shape.amax_sizes(format, false));
    return check_unused(argument.op, "amax_t", params.amax_t, key);
  }
  check_nv_amax(input, {"amax", params.amax, false, directions.rowwise, input.intermediate}, format, key);
  check_nv_amax(input, {"amax_t", params.amax_t, true, directions.columnwise, input.intermediate}, format,
                key);
}

NvMethod nv_method(const Format& format) {
  if (format.stochastic_rounding) return NvMethod::kStochastic;
  switch (format.four_over_six) {
    case FourOverSix::kMae: return NvMethod::kFourOverSixMae;
    case FourOverSix::kMse: return NvMethod::kFourOverSixMse;
    default: return NvMethod::kNearest;
  }
}

NvArgsOwner::NvArgsOwner(const Tensor& input, const Outputs& outputs, const Layout& layout,
                         const Format& format, const QuantizeParams& params)
    : NvArgsOwner(to_dtype(input.scalar_type()), outputs, layout, format, params) {
  args_.input = input.const_data_ptr();
}

NvArgsOwner::NvArgsOwner(DType dtype, const Outputs& outputs, const Layout& layout, const Format& format,
                         const QuantizeParams& params)
    : amax_((params.amax ? params.amax : params.amax_t)->contiguous()),
      amax_t_(params.amax_t ? params.amax_t->contiguous() : amax_) {
  args_ = {nullptr,
           bytes(outputs.data),
           bytes(outputs.scale),
           bytes(outputs.data_t),
           bytes(outputs.scale_t),
           amax_.const_data_ptr<float>(),
           amax_t_.const_data_ptr<float>(),
           params.seed ? params.seed->const_data_ptr<int64_t>() : nullptr,
           layout,
           dtype,
           nv_method(format),
           format.random_hadamard,
           format.row_scaled,
           outputs.data.defined(),
           outputs.data_t.defined(),
           nullptr};
}

}  // namespace transformer_plugin::quantize

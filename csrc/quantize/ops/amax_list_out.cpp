// amax_list_out: the amaxes of many tensors in one launch, into buffers of the caller.
#include "quantize/args/amax_list_out.h"

#include <ATen/core/List.h>

#include "common/buffers.h"
#include "common/ops/quantize.h"
#include "common/register.h"
#include "common/tensor.h"
#include "quantize/ops/checks.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;

constexpr const char* kOp = "amax_list_out";

struct AmaxListCall {
  at::TensorList inputs;
  c10::string_view key;
  const Tensor& amax;
  const OptionalTensor& amax_t;
  const OptionalTensor& noop;
};

void check_buffer(const char* name, const Tensor& buffer, const AmaxListCall& call) {
  const Argument argument{kOp, name, buffer};
  check_dtype(argument, {at::kFloat});
  check_dim(argument, 1);
  check_size(argument, 0, static_cast<int64_t>(call.inputs.size()), "one for each of 'inputs'");
  check_contiguous(argument);
  check_written(argument);
}

void check_arguments(const AmaxListCall& call) {
  const Format format = parse_format(kOp, "format", call.key);
  TP_CHECK_VALUE(
      takes_amax(format) && !format.row_scaled, kOp, "format",
      "fp8_tensor, or nvfp4 without row_scaled, whose ops take one amax for a matrix", "'" << call.key << "'",
      "With row_scaled take transformer_plugin.ops.amax; for other formats quantize computes every scale itself");
  TP_CHECK_VALUE(!call.amax_t || !format.random_hadamard, kOp, "amax_t",
                 "None for '" << call.key << "', whose columns are rotated first", describe(*call.amax_t),
                 "Take those of transformer_plugin.ops.amax with columnwise=True");
  check_buffer("amax", call.amax, call);
  const Argument amax{kOp, "amax", call.amax};
  if (call.amax_t) {
    check_buffer("amax_t", *call.amax_t, call);
    check_same_device({kOp, "amax_t", *call.amax_t}, amax);
  }
  if (call.noop) check_noop({kOp, "noop", *call.noop}, amax);
  for (const Tensor& input : call.inputs) {
    const Argument argument{kOp, "inputs", input};
    check_dtype(argument, kFloatTypes);
    check_same_dtype(argument, {kOp, "the first", call.inputs[0]});
    check_same_device(argument, amax);
    check_dim(argument, 2);
    check_matrix(argument, nullptr, format, call.amax_t.has_value());
  }
}

void meta(const AmaxListCall& call) { check_arguments(call); }

void run(const AmaxListCall& call) {
  check_arguments(call);
  check_apart(kOp, {{"amax", call.amax}, {"amax_t", call.amax_t}}, {{"noop", call.noop}});
  for (const Tensor& input : call.inputs) {
    check_apart(kOp, {{"amax", call.amax}, {"amax_t", call.amax_t}}, {{"inputs", input}});
  }
  const size_t count = call.inputs.size();
  std::vector<Tensor> contiguous_inputs;  // must live until the launch
  contiguous_inputs.reserve(count);
  for (const Tensor& input : call.inputs) contiguous_inputs.push_back(input.contiguous());
  for (size_t first = 0; first < count; first += kListTensors) {
    AmaxListArgs args{};
    args.tensors = static_cast<int>(std::min<size_t>(kListTensors, count - first));
    for (int t = 0; t < args.tensors; ++t) {
      args.inputs[t] = contiguous_inputs[first + t].const_data_ptr();
      args.counts[t] = contiguous_inputs[first + t].numel();
    }
    args.amax = call.amax.mutable_data_ptr<float>() + first;
    args.amax_t = call.amax_t ? call.amax_t->mutable_data_ptr<float>() + first : nullptr;
    args.noop = call.noop ? call.noop->const_data_ptr<float>() : nullptr;
    args.dtype = to_dtype(contiguous_inputs[0].scalar_type());
    if (call.amax.is_cpu()) {
      amax_list_cpu(args);
      continue;
    }
#ifdef TRANSFORMER_PLUGIN_CUDA
    const CudaScope scope(call.amax);
    launch_amax_list(args, scope.stream());
#endif
  }
}

template <void (*run_op)(const AmaxListCall&)>
void amax_list_out(at::TensorList inputs, std::string_view format, const Tensor& amax,
                   OptionalTensorArg amax_t, OptionalTensorArg noop) {
  run_op({inputs, format, amax, amax_t, noop});
}

}  // namespace

TP_IMPL_NO_GRADIENT(amax_list_out, amax_list_out<run>, amax_list_out<meta>);

}  // namespace transformer_plugin::quantize

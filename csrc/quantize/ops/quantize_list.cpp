// quantize_list and quantize_list_both: many matrices in one launch, with the results of quantize for each.
#include "quantize/args/quantize_list.h"

#include <limits>

#include "common/register.h"
#include "common/tensor.h"
#include "quantize/ops/quantize_call.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Pair = std::tuple<Tensors, Tensors>;
using TwoPairs = std::tuple<Tensors, Tensors, Tensors, Tensors>;

struct QuantizeListCall {
  const char* op;
  bool transposed;  // also transposed data
  at::TensorList inputs;
  c10::string_view key;
  const OptionalTensor& amax;
};

struct ListOutputs {
  Tensors data, scale, data_t, scale_t;
};

void check_list_amax(const QuantizeListCall& call, const Format& format) {
  if (!call.amax) return;
  if (!takes_amax(format)) return check_not_given(call.op, "amax", call.amax, call.key);
  const Argument amax{call.op, "amax", *call.amax};
  check_dtype(amax, {at::kFloat});
  check_dim(amax, 1);
  check_size(amax, 0, static_cast<int64_t>(call.inputs.size()), "one for each of 'inputs'");
  check_contiguous(amax);
  check_same_device(amax, {call.op, "the first of inputs", call.inputs[0]});
}

Format check_list(const QuantizeListCall& call) {
  const Format format = quantized_format(call.op, "format", call.key, true);
  const bool has_list = !format.random_hadamard && !format.stochastic_rounding && !format.row_scaled;
  TP_CHECK_VALUE(has_list, call.op, "format",
                 "fp8_tensor, fp8_block, mxfp8, or nvfp4 without rht, sr and row_scaled",
                 "'" << call.key << "'", "Quantize the matrices one by one");
  TP_CHECK_VALUE(!call.inputs.empty(), call.op, "inputs", "at least one matrix, which says on what device",
                 "none", "Leave out the call");
  for (const Tensor& input : call.inputs) {
    const Argument argument{call.op, "inputs", input}, first{call.op, "the first", call.inputs[0]};
    check_dim(argument, 2);
    check_matrix(argument, nullptr, format, call.transposed);
    check_same_dtype(argument, first);
    check_same_device(argument, first);
  }
  check_list_amax(call, format);
  return format;
}

ListOutputs make_list_outputs(const QuantizeListCall& call, const Format& format) {
  ListOutputs outputs;
  const at::ScalarType element = element_dtype(format), scale = scale_dtype(format);
  for (const Tensor& input : call.inputs) {
    const MatrixShape shape = matrix_shape(input, false, nullptr);
    outputs.data.push_back(empty(input, shape.data_sizes(format, false), element));
    outputs.scale.push_back(empty(input, shape.scale_sizes(format, false), scale));
    if (!call.transposed) continue;
    outputs.data_t.push_back(empty(input, shape.data_sizes(format, true), element));
    outputs.scale_t.push_back(empty(input, shape.scale_sizes(format, true), scale));
  }
  return outputs;
}

ListOutputs meta(const QuantizeListCall& call) { return make_list_outputs(call, check_list(call)); }

// The amaxes of all matrices, computed in a first launch unless the caller passed them.
Tensor amax_of_list(const QuantizeListCall& call, const Tensors& contiguous_inputs) {
  if (call.amax) return *call.amax;
  using Signature =
      void(at::TensorList, c10::string_view, const Tensor&, const OptionalTensor&, const OptionalTensor&);
  static const auto op = find_op<Signature>("amax_list_out");
  const Tensor amax =
      empty(contiguous_inputs[0], {static_cast<int64_t>(contiguous_inputs.size())}, at::kFloat);
  op.call(contiguous_inputs, call.key, amax, kNotGiven, kNotGiven);
  return amax;
}

uint8_t* bytes_at(const Tensors& tensors, size_t index) {
  return tensors.empty() ? nullptr : static_cast<uint8_t*>(tensors[index].mutable_data_ptr());
}

void fill_entries(QuantizeListArgs& args, const QuantizeListCall& call, const Tensors& contiguous_inputs,
                  const ListOutputs& outputs, size_t first) {
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  args.tensors = static_cast<int>(std::min<size_t>(kQuantizeListTensors, contiguous_inputs.size() - first));
  for (int t = 0; t < args.tensors; ++t) {
    const size_t i = first + t;
    TP_CHECK_VALUE(contiguous_inputs[i].size(0) <= most && contiguous_inputs[i].size(1) <= most, call.op,
                   "inputs", "at most 2^31 - 1 rows and columns", describe(contiguous_inputs[i]),
                   "Quantize it alone");
    args.entries[t] = {contiguous_inputs[i].const_data_ptr(),
                       bytes_at(outputs.data, i),
                       bytes_at(outputs.scale, i),
                       bytes_at(outputs.data_t, i),
                       bytes_at(outputs.scale_t, i),
                       static_cast<int32_t>(contiguous_inputs[i].size(0)),
                       static_cast<int32_t>(contiguous_inputs[i].size(1))};
  }
}

void launch_chunk(QuantizeListArgs& args, const Tensor& like) {
  const ScaleGranularity granularity = args.layout.granularity;
  if (like.is_cpu()) {
    for (int t = 0; t < args.tensors; ++t) {
      granularity == ScaleGranularity::k1x16 ? quantize_nv_cpu(args.nv_of(t)) : quantize_cpu(args.of(t));
    }
    return;
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(like);
  const auto launch =
      granularity == ScaleGranularity::k1x16
          ? launch_quantize_list_nv
          : (granularity == ScaleGranularity::k1x32 ? launch_quantize_list_mx : launch_quantize_list);
  launch(args, scope.stream());
#endif
}

ListOutputs run(const QuantizeListCall& call) {
  const Format format = check_list(call);
  ListOutputs outputs = make_list_outputs(call, format);
  Tensors contiguous_inputs;  // contiguous
  for (const Tensor& input : call.inputs) contiguous_inputs.push_back(input.contiguous());
  Tensor amax;
  if (takes_amax(format)) amax = amax_of_list(call, contiguous_inputs);
  QuantizeListArgs args{};
  args.rule = scale_rule(format, contiguous_inputs[0].scalar_type());
  args.layout = make_layout(matrix_shape(contiguous_inputs[0], false, nullptr), format, {});
  args.dtype = to_dtype(contiguous_inputs[0].scalar_type());
  args.element = format.element;
  args.rowwise = true;
  args.transposed = call.transposed;
  args.method = nv_method(format);
  for (size_t first = 0; first < contiguous_inputs.size(); first += kQuantizeListTensors) {
    fill_entries(args, call, contiguous_inputs, outputs, first);
    args.amax = amax.defined() ? amax.const_data_ptr<float>() + first : nullptr;
    launch_chunk(args, contiguous_inputs[0]);
  }
  return outputs;
}

template <ListOutputs (*run_op)(const QuantizeListCall&)>
Pair quantize_list(at::TensorList inputs, std::string_view format, OptionalTensorArg amax) {
  ListOutputs o = run_op({"quantize_list", false, inputs, format, amax});
  return {std::move(o.data), std::move(o.scale)};
}

template <ListOutputs (*run_op)(const QuantizeListCall&)>
TwoPairs quantize_list_both(at::TensorList inputs, std::string_view format, OptionalTensorArg amax) {
  ListOutputs o = run_op({"quantize_list_both", true, inputs, format, amax});
  return {std::move(o.data), std::move(o.scale), std::move(o.data_t), std::move(o.scale_t)};
}

}  // namespace

TP_IMPL_NO_GRADIENT("quantize_list", quantize_list<run>, quantize_list<meta>);
TP_IMPL_NO_GRADIENT("quantize_list_both", quantize_list_both<run>, quantize_list_both<meta>);

}  // namespace transformer_plugin::quantize

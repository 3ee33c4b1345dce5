// quantize_list and quantize_list_both: many matrices, each as quantize does it, in one launch.
#include "quantize/args/quantize_list.h"

#include <torch/library.h>

#include <limits>

#include "common/tensor.h"
#include "quantize/ops/quantize_call.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Pair = std::tuple<Tensors, Tensors>;
using TwoPairs = std::tuple<Tensors, Tensors, Tensors, Tensors>;

struct ListCall {
  const char* op;
  bool transposed;  // that direction too
  at::TensorList inputs;
  c10::string_view key;
  const OptionalTensor& amax;
};

struct ListOutputs {
  Tensors data, scale, data_t, scale_t;
};

void check_list_amax(const ListCall& call, const Format& format) {
  if (!call.amax) return;
  if (!takes_amax(format)) return check_not_given(call.op, "amax", call.amax, call.key);
  const Argument amax{call.op, "amax", *call.amax};
  check_dtype(amax, {at::kFloat});
  check_dim(amax, 1);
  check_size(amax, 0, static_cast<int64_t>(call.inputs.size()), "one for each of 'inputs'");
  check_contiguous(amax);
  check_same_device(amax, {call.op, "the first of inputs", call.inputs[0]});
}

Format check_list(const ListCall& call) {
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

ListOutputs make_list_outputs(const ListCall& call, const Format& format) {
  ListOutputs outputs;
  const at::ScalarType element = element_dtype(format), scale = scale_dtype(format);
  for (const Tensor& input : call.inputs) {
    const Operand operand = operand_of(input, false, nullptr);
    outputs.data.push_back(empty(input, operand.data_sizes(format, false), element));
    outputs.scale.push_back(empty(input, operand.scale_sizes(format, false), scale));
    if (!call.transposed) continue;
    outputs.data_t.push_back(empty(input, operand.data_sizes(format, true), element));
    outputs.scale_t.push_back(empty(input, operand.scale_sizes(format, true), scale));
  }
  return outputs;
}

ListOutputs meta(const ListCall& call) { return make_list_outputs(call, check_list(call)); }

// The first of the two phases of scales that depend on a whole matrix.
Tensor amax_of_list(const ListCall& call, const Tensors& held) {
  if (call.amax) return *call.amax;
  using Signature =
      void(at::TensorList, c10::string_view, const Tensor&, const OptionalTensor&, const OptionalTensor&);
  static const auto op = find_op<Signature>("amax_list_out");
  const Tensor amax = empty(held[0], {static_cast<int64_t>(held.size())}, at::kFloat);
  op.call(held, call.key, amax, kNotGiven, kNotGiven);
  return amax;
}

uint8_t* bytes_at(const Tensors& tensors, size_t index) {
  return tensors.empty() ? nullptr : static_cast<uint8_t*>(tensors[index].mutable_data_ptr());
}

void fill_entries(QuantizeListArgs& args, const ListCall& call, const Tensors& held,
                  const ListOutputs& outputs, size_t first) {
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  args.tensors = static_cast<int>(std::min<size_t>(kQuantizeListTensors, held.size() - first));
  for (int t = 0; t < args.tensors; ++t) {
    const size_t i = first + t;
    TP_CHECK_VALUE(held[i].size(0) <= most && held[i].size(1) <= most, call.op, "inputs",
                   "at most 2^31 - 1 rows and columns", describe(held[i]), "Quantize it alone");
    args.entries[t] = {held[i].const_data_ptr(),
                       bytes_at(outputs.data, i),
                       bytes_at(outputs.scale, i),
                       bytes_at(outputs.data_t, i),
                       bytes_at(outputs.scale_t, i),
                       static_cast<int32_t>(held[i].size(0)),
                       static_cast<int32_t>(held[i].size(1))};
  }
}

void run_chunk(QuantizeListArgs& args, const Tensor& like) {
  const ScaleMode mode = args.layout.mode;
  if (like.is_cpu()) {
    for (int t = 0; t < args.tensors; ++t) {
      mode == ScaleMode::kNv ? quantize_nv_cpu(args.nv_of(t)) : quantize_cpu(args.of(t));
    }
    return;
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(like);
  const auto launch = mode == ScaleMode::kNv
                          ? launch_quantize_list_nv
                          : (mode == ScaleMode::kMx ? launch_quantize_list_mx : launch_quantize_list);
  launch(args, scope.stream());
#endif
}

ListOutputs run(const ListCall& call) {
  const Format format = check_list(call);
  ListOutputs outputs = make_list_outputs(call, format);
  Tensors held;  // contiguous
  for (const Tensor& input : call.inputs) held.push_back(input.contiguous());
  Tensor amax;
  if (takes_amax(format)) amax = amax_of_list(call, held);
  QuantizeListArgs args{};
  args.rule = scale_rule(format, held[0].scalar_type());
  args.layout = make_layout(operand_of(held[0], false, nullptr), format, {});
  args.dtype = to_dtype(held[0].scalar_type());
  args.element = format.element;
  args.rowwise = true;
  args.transposed = call.transposed;
  args.method = nv_method(format);
  for (size_t first = 0; first < held.size(); first += kQuantizeListTensors) {
    fill_entries(args, call, held, outputs, first);
    args.amax = amax.defined() ? amax.const_data_ptr<float>() + first : nullptr;
    run_chunk(args, held[0]);
  }
  return outputs;
}

template <ListOutputs (*run_op)(const ListCall&)>
void register_ops(torch::Library& m) {
  m.impl("quantize_list",
         [](at::TensorList inputs, c10::string_view format, const OptionalTensor& amax) -> Pair {
           ListOutputs o = run_op({"quantize_list", false, inputs, format, amax});
           return {std::move(o.data), std::move(o.scale)};
         });
  m.impl("quantize_list_both",
         [](at::TensorList inputs, c10::string_view format, const OptionalTensor& amax) -> TwoPairs {
           ListOutputs o = run_op({"quantize_list_both", true, inputs, format, amax});
           return {std::move(o.data), std::move(o.scale), std::move(o.data_t), std::move(o.scale_t)};
         });
}

}  // namespace

TORCH_LIBRARY_IMPL(transformer_plugin, CPU, m) { register_ops<run>(m); }
TORCH_LIBRARY_IMPL(transformer_plugin, Meta, m) { register_ops<meta>(m); }

#ifdef TRANSFORMER_PLUGIN_CUDA
TORCH_LIBRARY_IMPL(transformer_plugin, CUDA, m) { register_ops<run>(m); }
#endif

TORCH_LIBRARY_IMPL(transformer_plugin, Autograd, m) {
  m.impl("quantize_list", torch::CppFunction::makeFallthrough());
  m.impl("quantize_list_both", torch::CppFunction::makeFallthrough());
}

}  // namespace transformer_plugin::quantize

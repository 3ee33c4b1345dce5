// quantize_list: many matrices in one launch, with the results of quantize for each or for the stack of all.
#include "quantize/args/quantize_list.h"

#include <limits>

#include "common/autograd.h"
#include "common/ops/quantize.h"
#include "common/register.h"
#include "common/tensor.h"
#include "quantize/ops/quantize_call.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;

constexpr const char* kOp = "quantize_list";

struct QuantizeListCall {
  at::TensorList inputs;
  std::string_view key;
  const OptionalTensor& amax;
  Directions directions;
  bool stacked;  // the results of quantize for the stack of the matrices
};

void check_list_amax(const QuantizeListCall& call, const Format& format) {
  if (!call.amax) return;
  if (!takes_amax(format)) return check_unused(kOp, "amax", call.amax, call.key);
  const Argument amax{kOp, "amax", *call.amax};
  check_dtype(amax, {at::kFloat});
  check_dim(amax, 1);
  check_size(amax, 0, static_cast<int64_t>(call.inputs.size()), "one for each of 'inputs'");
  check_contiguous(amax);
  check_same_device(amax, {kOp, "the first of inputs", call.inputs[0]});
}

Format check_list(const QuantizeListCall& call) {
  check_directions(kOp, call.directions);
  const Format format = quantized_format(kOp, "format", call.key, true);
  const bool has_list = !format.random_hadamard && !format.stochastic_rounding && !format.row_scaled;
  TP_CHECK_VALUE(has_list, kOp, "format",
                 families_with(&FormatFamilyTraits::has_scales) << " (without rht, sr and row_scaled)",
                 "'" << call.key << "'", "Quantize the matrices one by one");
  TP_CHECK_VALUE(!call.inputs.empty(), kOp, "inputs", "at least one matrix", "none",
                 "Skip the call if there is nothing to quantize");
  for (const Tensor& input : call.inputs) {
    const Argument argument{kOp, "inputs", input}, first{kOp, "the first", call.inputs[0]};
    check_dim(argument, 2);
    check_matrix(argument, nullptr, format, call.directions.columnwise);
    check_same_dtype(argument, first);
    check_same_device(argument, first);
    const bool fits = !call.stacked || input.sym_sizes() == call.inputs[0].sym_sizes();
    TP_CHECK_VALUE(fits, kOp, "inputs", "matrices of one size, which a stack has", describe(input),
                   "Pass stacked=False for matrices of several sizes");
  }
  check_list_amax(call, format);
  return format;
}

std::vector<Outputs> make_list_outputs(const QuantizeListCall& call, const Format& format) {
  std::vector<Outputs> outputs;
  outputs.reserve(call.inputs.size());
  for (const Tensor& input : call.inputs) {
    outputs.push_back(make_outputs(input, matrix_shape(input, false, nullptr), format, call.directions));
  }
  return outputs;
}

// The results for the stack: one tensor of each kind.
Outputs make_stack_outputs(const QuantizeListCall& call, const Format& format) {
  MatrixShape shape = matrix_shape(call.inputs[0], false, nullptr);
  shape.matrices = c10::SymInt(static_cast<int64_t>(call.inputs.size()));
  check_tile_count({kOp, "inputs", call.inputs[0]}, shape);
  return make_outputs(call.inputs[0], shape, format, call.directions);
}

// The place of one matrix in a tensor of the stack. Kernels store vectors to buffers that begin where an allocation would;
// a matrix that begins elsewhere gets a buffer of its own, and is copied.
Tensor place_in(const Tensor& whole, int64_t matrix) {
  if (!whole.defined()) return {};
  constexpr uintptr_t kVector = 16;
  const Tensor place = whole.select(0, matrix);
  const bool begins_as_allocated = reinterpret_cast<uintptr_t>(place.const_data_ptr()) % kVector == 0;
  if (whole.is_cpu() || whole.element_size() > 1 || begins_as_allocated) return place;
  return empty(whole, place.sym_sizes(), whole.scalar_type());
}

std::vector<Outputs> places_in(const Outputs& stack, size_t matrices) {
  std::vector<Outputs> outputs;
  outputs.reserve(matrices);
  for (int64_t i = 0; i < static_cast<int64_t>(matrices); ++i) {
    outputs.push_back({place_in(stack.data, i), place_in(stack.scale, i), place_in(stack.data_t, i),
                       place_in(stack.scale_t, i)});
  }
  return outputs;
}

// Copies what place_in gave a buffer of its own.
void copy_to_places(const std::vector<Outputs>& outputs, const Outputs& stack) {
  const auto copy = [](const Tensor& whole, int64_t matrix, const Tensor& own) {
    if (!whole.defined() || own.is_alias_of(whole)) return;
    whole.select(0, matrix).view(at::kByte).copy_(own.view(at::kByte));
  };
  for (int64_t i = 0; i < static_cast<int64_t>(outputs.size()); ++i) {
    copy(stack.data, i, outputs[i].data);
    copy(stack.scale, i, outputs[i].scale);
    copy(stack.data_t, i, outputs[i].data_t);
    copy(stack.scale_t, i, outputs[i].scale_t);
  }
}

// All outputs of the first matrix, then of the next.
Tensors flat(std::vector<Outputs>&& outputs) {
  Tensors list;
  list.reserve(4 * outputs.size());
  for (Outputs& one : outputs) append_outputs(std::move(one), list);
  return list;
}

// The amaxes of all matrices, computed in a first launch unless the caller passed them.
Tensor amax_of_list(const QuantizeListCall& call, const Tensors& contiguous_inputs) {
  if (call.amax) return *call.amax;
  const Tensor amax =
      empty(contiguous_inputs[0], {static_cast<int64_t>(contiguous_inputs.size())}, at::kFloat);
  ops::amax_list_out(contiguous_inputs, call.key, amax, kNoTensor, kNoTensor);
  return amax;
}

uint8_t* bytes(const Tensor& tensor) {
  return tensor.defined() ? static_cast<uint8_t*>(tensor.mutable_data_ptr()) : nullptr;
}

void fill_entries(QuantizeListArgs& args, const Tensors& contiguous_inputs,
                  const std::vector<Outputs>& outputs, size_t first) {
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  args.tensors = static_cast<int>(std::min<size_t>(kQuantizeListTensors, contiguous_inputs.size() - first));
  for (int t = 0; t < args.tensors; ++t) {
    const size_t i = first + t;
    TP_CHECK_VALUE(contiguous_inputs[i].size(0) <= most && contiguous_inputs[i].size(1) <= most, kOp,
                   "inputs", "at most 2^31 - 1 rows and columns", describe(contiguous_inputs[i]),
                   "Quantize it alone");
    args.entries[t] = {contiguous_inputs[i].const_data_ptr(),
                       bytes(outputs[i].data),
                       bytes(outputs[i].scale),
                       bytes(outputs[i].data_t),
                       bytes(outputs[i].scale_t),
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

void run(const QuantizeListCall& call, const Format& format, const std::vector<Outputs>& outputs) {
  if (!format.traits().has_list_kernel) {
    for (size_t i = 0; i < outputs.size(); ++i) {
      run_quantize(
          {kOp, call.inputs[i], call.key, kNoTensor, {kNoTensor, kNoTensor, kNoTensor}, call.directions},
          format, outputs[i], nullptr);
    }
    return;
  }
  Tensors contiguous_inputs;
  contiguous_inputs.reserve(call.inputs.size());
  for (const Tensor& input : call.inputs) contiguous_inputs.push_back(input.contiguous());
  Tensor amax;
  if (takes_amax(format)) amax = amax_of_list(call, contiguous_inputs);
  QuantizeListArgs args{};
  args.rule = scale_rule(format, contiguous_inputs[0].scalar_type());
  args.layout = make_layout(matrix_shape(contiguous_inputs[0], false, nullptr), format, {});
  args.dtype = to_dtype(contiguous_inputs[0].scalar_type());
  args.element = format.element;
  args.rowwise = call.directions.rowwise;
  args.transposed = call.directions.columnwise;
  args.method = nv_method(format);
  for (size_t first = 0; first < contiguous_inputs.size(); first += kQuantizeListTensors) {
    fill_entries(args, contiguous_inputs, outputs, first);
    args.amax = amax.defined() ? amax.const_data_ptr<float>() + first : nullptr;
    launch_chunk(args, contiguous_inputs[0]);
  }
}

Tensors quantize_list(at::TensorList inputs, std::string_view key, OptionalTensorArg amax, bool rowwise,
                      bool columnwise, bool stacked) {
  const QuantizeListCall call{inputs, key, amax, {rowwise, columnwise}, stacked};
  const Format format = check_list(call);
  if (stacked) {
    const BelowAutograd guard;
    Outputs stack = make_stack_outputs(call, format);
    const std::vector<Outputs> places = places_in(stack, inputs.size());
    run(call, format, places);
    copy_to_places(places, stack);
    return as_list(std::move(stack));
  }
  std::vector<Outputs> outputs = make_list_outputs(call, format);
  run(call, format, outputs);
  return flat(std::move(outputs));
}

Tensors quantize_list_meta(at::TensorList inputs, std::string_view key, OptionalTensorArg amax, bool rowwise,
                           bool columnwise, bool stacked) {
  const QuantizeListCall call{inputs, key, amax, {rowwise, columnwise}, stacked};
  const Format format = check_list(call);
  return stacked ? as_list(make_stack_outputs(call, format)) : flat(make_list_outputs(call, format));
}

}  // namespace

TP_IMPL_NO_GRADIENT(quantize_list, quantize_list, quantize_list_meta);

}  // namespace transformer_plugin::quantize

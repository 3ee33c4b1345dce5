// quantize_out and its kin: the ops of quantize.cpp into buffers that are given.
#include <torch/library.h>

#include "common/buffers.h"
#include "common/tensor.h"
#include "quantize/ops/quantize_call.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;

constexpr Op kQuantize{"quantize_out", true, false};
constexpr Op kQuantizeTransposed{"quantize_transposed_out", false, true};
constexpr Op kQuantizeBoth{"quantize_both_out", true, true};
constexpr Op kGroupedQuantize{"grouped_quantize_out", true, false};
constexpr Op kGroupedQuantizeTransposed{"grouped_quantize_transposed_out", false, true};
constexpr Op kGroupedQuantizeBoth{"grouped_quantize_both_out", true, true};

void check_buffer(const Argument& buffer, const Argument& input, at::ScalarType dtype,
                  const SymSizes& sizes) {
  check_dtype(buffer, {dtype});
  check_same_device(buffer, input);
  const Tensor& tensor = buffer.tensor;
  bool fits = tensor.dim() == static_cast<int64_t>(sizes.size()) && tensor.is_contiguous();
  for (size_t d = 0; fits && d < sizes.size(); ++d)
    fits = tensor.sym_size(static_cast<int64_t>(d)) == sizes[d];
  TP_CHECK_VALUE(fits, buffer.op, buffer.name, "a contiguous tensor of sizes " << c10::SymIntArrayRef(sizes),
                 describe(tensor) << " with strides " << tensor.sym_strides(),
                 "Allocate it as the op without _out does");
  check_written(buffer);
}

Format check_all(const Call& call, const Outputs& buffers, const OptionalTensor& noop) {
  const Format format = check_arguments(call);
  const Argument input = call.argument();
  const Operand operand = call.operand();
  const char* op = call.op.name;
  const at::ScalarType element = element_dtype(format), scale = scale_dtype(format);
  if (call.op.rowwise) {
    check_buffer({op, "data", buffers.data}, input, element, operand.data_sizes(format, false));
    check_buffer({op, "scale_inv", buffers.scale}, input, scale, operand.scale_sizes(format, false));
  }
  if (call.op.transposed) {
    const bool only = !call.op.rowwise;
    check_buffer({op, only ? "data" : "data_t", buffers.data_t}, input, element,
                 operand.data_sizes(format, true));
    check_buffer({op, only ? "scale_inv" : "scale_t", buffers.scale_t}, input, scale,
                 operand.scale_sizes(format, true));
  }
  if (noop) check_noop({op, "noop", *noop}, input);
  return format;
}

void check_apart_from_read(const Call& call, const Outputs& buffers, const OptionalTensor& noop) {
  const bool only = !call.op.rowwise;
  const Tensor none;
  check_apart(call.op.name,
              {{"data", buffers.data},
               {"scale_inv", buffers.scale},
               {only ? "data" : "data_t", buffers.data_t},
               {only ? "scale_inv" : "scale_t", buffers.scale_t}},
              {{"input", call.input},
               {"group_sizes", call.group_sizes ? *call.group_sizes : none},
               {"amax", call.amax},
               {"amax_t", call.amax_t},
               {"seed", call.seed},
               {"noop", noop}});
}

void meta(const Call& call, const Outputs& buffers, const OptionalTensor& noop) {
  check_all(call, buffers, noop);
}

void run(const Call& call, const Outputs& buffers, const OptionalTensor& noop) {
  const Format format = check_all(call, buffers, noop);
  check_apart_from_read(call, buffers, noop);
  if (call.group_sizes) {
    check_group_values(call.argument(), *call.group_sizes, group_multiple(format, call.op.transposed));
  }
  if (call.op.transposed) zero_aligned_lines(call.input, call.operand(), format, buffers, noop);
  quantize_into(call, format, buffers, noop ? noop->const_data_ptr<float>() : nullptr);
}

using Run = void (*)(const Call&, const Outputs&, const OptionalTensor&);
using Key = c10::string_view;
using Given = const OptionalTensor&;
using In = const Tensor&;

template <Run run_op>
void register_dense(torch::Library& m) {
  m.impl("quantize_out", [](In input, Key format, In data, In scale, Given amax, Given seed, Given noop) {
    run_op({kQuantize, input, nullptr, format, amax, kNotGiven, seed}, {data, scale, {}, {}}, noop);
  });
  m.impl("quantize_transposed_out", [](In input, Key format, In data, In scale, Given amax, Given seed,
                                       Given noop) {
    run_op({kQuantizeTransposed, input, nullptr, format, amax, kNotGiven, seed}, {{}, {}, data, scale}, noop);
  });
  m.impl("quantize_both_out", [](In input, Key format, In data, In scale, In data_t, In scale_t, Given amax,
                                 Given amax_t, Given seed, Given noop) {
    run_op({kQuantizeBoth, input, nullptr, format, amax, amax_t, seed}, {data, scale, data_t, scale_t}, noop);
  });
}

template <Run run_op>
void register_grouped(torch::Library& m) {
  m.impl("grouped_quantize_out", [](In input, In sizes, Key format, In data, In scale, Given amax, Given seed,
                                    Given noop) {
    run_op({kGroupedQuantize, input, &sizes, format, amax, kNotGiven, seed}, {data, scale, {}, {}}, noop);
  });
  m.impl("grouped_quantize_transposed_out",
         [](In input, In sizes, Key format, In data, In scale, Given amax, Given seed, Given noop) {
           run_op({kGroupedQuantizeTransposed, input, &sizes, format, amax, kNotGiven, seed},
                  {{}, {}, data, scale}, noop);
         });
  m.impl("grouped_quantize_both_out", [](In input, In sizes, Key format, In data, In scale, In data_t,
                                         In scale_t, Given amax, Given amax_t, Given seed, Given noop) {
    run_op({kGroupedQuantizeBoth, input, &sizes, format, amax, amax_t, seed}, {data, scale, data_t, scale_t},
           noop);
  });
}

template <Run run_op>
void register_ops(torch::Library& m) {
  register_dense<run_op>(m);
  register_grouped<run_op>(m);
}

}  // namespace

TORCH_LIBRARY_IMPL(transformer_plugin, CPU, m) { register_ops<run>(m); }
TORCH_LIBRARY_IMPL(transformer_plugin, Meta, m) { register_ops<meta>(m); }

#ifdef TRANSFORMER_PLUGIN_CUDA
TORCH_LIBRARY_IMPL(transformer_plugin, CUDA, m) { register_ops<run>(m); }
#endif

TORCH_LIBRARY_IMPL(transformer_plugin, Autograd, m) {
  for (const Op& op : {kQuantize, kQuantizeTransposed, kQuantizeBoth, kGroupedQuantize,
                       kGroupedQuantizeTransposed, kGroupedQuantizeBoth}) {
    m.impl(op.name, torch::CppFunction::makeFallthrough());
  }
}

}  // namespace transformer_plugin::quantize

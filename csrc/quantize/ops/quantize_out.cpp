// quantize_out and the other _out forms of the ops in quantize.cpp: the same results, written into buffers of
// the caller.
#include "common/buffers.h"
#include "common/register.h"
#include "common/tensor.h"
#include "quantize/ops/quantize_call.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;
using Key = std::string_view;

constexpr QuantizeOp kQuantize{"quantize_out", {true, false}};
constexpr QuantizeOp kQuantizeTransposed{"quantize_transposed_out", {false, true}};
constexpr QuantizeOp kQuantizeBoth{"quantize_both_out", {true, true}};
constexpr QuantizeOp kGroupedQuantize{"grouped_quantize_out", {true, false}};
constexpr QuantizeOp kGroupedQuantizeTransposed{"grouped_quantize_transposed_out", {false, true}};
constexpr QuantizeOp kGroupedQuantizeBoth{"grouped_quantize_both_out", {true, true}};

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

Format check_all(const QuantizeCall& call, const Outputs& buffers, OptionalTensorArg noop) {
  const Format format = check_arguments(call);
  const Argument input = call.argument();
  const MatrixShape shape = call.shape();
  const char* op = call.op.name;
  const Directions& directions = call.op.directions;
  const at::ScalarType element = element_dtype(format), scale = scale_dtype(format);
  if (directions.rowwise) {
    check_buffer({op, "data", buffers.data}, input, element, shape.data_sizes(format, false));
    check_buffer({op, "scale_inv", buffers.scale}, input, scale, shape.scale_sizes(format, false));
  }
  if (directions.transposed) {
    const bool only = !directions.rowwise;
    check_buffer({op, only ? "data" : "data_t", buffers.data_t}, input, element,
                 shape.data_sizes(format, true));
    check_buffer({op, only ? "scale_inv" : "scale_t", buffers.scale_t}, input, scale,
                 shape.scale_sizes(format, true));
  }
  if (noop) check_noop({op, "noop", *noop}, input);
  return format;
}

void check_no_overlap(const QuantizeCall& call, const Outputs& buffers, OptionalTensorArg noop) {
  const bool only = !call.op.directions.rowwise;
  const Tensor none;
  check_apart(call.op.name,
              {{"data", buffers.data},
               {"scale_inv", buffers.scale},
               {only ? "data" : "data_t", buffers.data_t},
               {only ? "scale_inv" : "scale_t", buffers.scale_t}},
              {{"input", call.input},
               {"group_sizes", call.group_sizes ? *call.group_sizes : none},
               {"amax", call.params.amax},
               {"amax_t", call.params.amax_t},
               {"seed", call.params.seed},
               {"noop", noop}});
}

constexpr bool kMeta = true;

// Checks and, unless on Meta, the kernel.
template <bool is_meta>
void quantize_into(const QuantizeCall& call, const Outputs& buffers, OptionalTensorArg noop) {
  const Format format = check_all(call, buffers, noop);
  if (is_meta) return;
  const bool transposed = call.op.directions.transposed;
  check_no_overlap(call, buffers, noop);
  if (call.group_sizes) {
    check_group_values(call.argument(), *call.group_sizes, group_multiple(format, transposed));
  }
  if (transposed) zero_empty_aligned_rows(call.input, call.shape(), format, buffers, noop);
  run_quantize(call, format, buffers, noop ? noop->const_data_ptr<float>() : nullptr);
}

template <const QuantizeOp& op, bool is_meta = false>
void quantize_one_out(const Tensor& input, Key key, const Tensor& data, const Tensor& scale,
                      OptionalTensorArg amax, OptionalTensorArg seed, OptionalTensorArg noop) {
  const Outputs buffers = op.directions.rowwise ? Outputs{data, scale, {}, {}} : Outputs{{}, {}, data, scale};
  quantize_into<is_meta>({op, input, nullptr, key, {amax, kNotGiven, seed}}, buffers, noop);
}

template <const QuantizeOp& op, bool is_meta = false>
void quantize_two_out(const Tensor& input, Key key, const Tensor& data, const Tensor& scale,
                      const Tensor& data_t, const Tensor& scale_t, OptionalTensorArg amax,
                      OptionalTensorArg amax_t, OptionalTensorArg seed, OptionalTensorArg noop) {
  quantize_into<is_meta>({op, input, nullptr, key, {amax, amax_t, seed}}, {data, scale, data_t, scale_t},
                         noop);
}

template <const QuantizeOp& op, bool is_meta = false>
void grouped_quantize_one_out(const Tensor& input, const Tensor& group_sizes, Key key, const Tensor& data,
                              const Tensor& scale, OptionalTensorArg amax, OptionalTensorArg seed,
                              OptionalTensorArg noop) {
  const Outputs buffers = op.directions.rowwise ? Outputs{data, scale, {}, {}} : Outputs{{}, {}, data, scale};
  quantize_into<is_meta>({op, input, &group_sizes, key, {amax, kNotGiven, seed}}, buffers, noop);
}

template <const QuantizeOp& op, bool is_meta = false>
void grouped_quantize_two_out(const Tensor& input, const Tensor& group_sizes, Key key, const Tensor& data,
                              const Tensor& scale, const Tensor& data_t, const Tensor& scale_t,
                              OptionalTensorArg amax, OptionalTensorArg amax_t, OptionalTensorArg seed,
                              OptionalTensorArg noop) {
  quantize_into<is_meta>({op, input, &group_sizes, key, {amax, amax_t, seed}}, {data, scale, data_t, scale_t},
                         noop);
}

}  // namespace

TP_IMPL_NO_GRADIENT(kQuantize.name, quantize_one_out<kQuantize>, (quantize_one_out<kQuantize, kMeta>));
TP_IMPL_NO_GRADIENT(kQuantizeTransposed.name, quantize_one_out<kQuantizeTransposed>,
                    (quantize_one_out<kQuantizeTransposed, kMeta>));
TP_IMPL_NO_GRADIENT(kQuantizeBoth.name, quantize_two_out<kQuantizeBoth>,
                    (quantize_two_out<kQuantizeBoth, kMeta>));
TP_IMPL_NO_GRADIENT(kGroupedQuantize.name, grouped_quantize_one_out<kGroupedQuantize>,
                    (grouped_quantize_one_out<kGroupedQuantize, kMeta>));
TP_IMPL_NO_GRADIENT(kGroupedQuantizeTransposed.name, grouped_quantize_one_out<kGroupedQuantizeTransposed>,
                    (grouped_quantize_one_out<kGroupedQuantizeTransposed, kMeta>));
TP_IMPL_NO_GRADIENT(kGroupedQuantizeBoth.name, grouped_quantize_two_out<kGroupedQuantizeBoth>,
                    (grouped_quantize_two_out<kGroupedQuantizeBoth, kMeta>));

}  // namespace transformer_plugin::quantize

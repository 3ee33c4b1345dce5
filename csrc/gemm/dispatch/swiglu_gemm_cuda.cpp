// The Hopper kernels with SwiGLU in the epilogue.
#ifdef TRANSFORMER_PLUGIN_CUDA

#include "common/row_index.h"
#include "common/tensor.h"
#include "gemm/dispatch/cuda_args.h"
#include "gemm/dispatch/select.h"
#include "gemm/dispatch/swiglu_gemm.h"
#include "gemm/sm90/epilogue/swiglu.h"
#include "quantize/args/zero_tail.h"
#include "quantize/ops/fused.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;

// Everything but the outputs. The product has rows of 2F.
// `a` is undefined where a kernel gathers its rows.
GroupedGemmArgs arguments_of(const GroupedGemmSwiglu& product, const Tensor& a, const Tensor& b) {
  GroupedGemmArgs args{};
  args.a = a.defined() ? a.const_data_ptr() : nullptr;
  args.b = b.const_data_ptr();
  args.offsets = product.offsets.const_data_ptr<int32_t>();
  args.rows = product.capacity();
  args.groups = b.size(0);
  args.n = args.out_row_stride = 2 * product.features();
  args.k = b.size(2);
  args.dtype = args.out_dtype = to_dtype(b.scalar_type());
  args.rows_16_byte_aligned = (!a.defined() || aligned_rows(a)) && aligned_rows(b);
  args.zero_tail = product.zero_tail;
  args.options = product.options;
  return args;
}

std::optional<Tensor> contiguous(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional<Tensor>(tensor->contiguous()) : std::nullopt;
}

// The operands of a product, which it keeps alive, and h. Rows that an index names are copied unless a kernel gathers them.
class SwigluOperands {
 public:
  SwigluOperands(const GroupedGemmSwiglu& product, bool may_gather)
      : product_(product), b_(product.b.contiguous()) {
    const bool gathers = may_gather && product.rows && product.a.stride(1) == 1;
    if (gathers) gathered = rows_by_index(product.a, *product.rows, product.offsets);
    if (!gathers || !select()) {
      gathered = {};
      a_ = product.rows ? take_rows(product.a, *product.rows, product.offsets) : product.a.contiguous();
      select();
    }
  }

  bool is_supported() const { return selection.backend != Backend::kSteps; }
  // Allocates outputs; called once a kernel is selected.
  void complete() {
    bias_ = as_float(product_.bias);
    probs_ = contiguous(product_.probs);
    h = make({product_.keep_input ? product_.capacity() : 0, 2 * features()});
    args.product.bias = float_or_null(bias_);
    args.product.out = product_.keep_input ? h.mutable_data_ptr() : nullptr;
    args.probs = float_or_null(probs_);
  }
  Tensor make(c10::SymIntArrayRef sizes) const { return empty(b_, sizes, b_.scalar_type()); }
  int64_t features() const { return product_.features(); }

  SwigluKernelArgs args{};
  std::optional<GatheredRows> gathered;
  Selection selection;
  Tensor h;

 private:
  bool select() {
    args.product = arguments_of(product_, a_, b_);
    args.interleaved = product_.interleave != 0;
    GemmDesc desc{GemmDirection::kFprop, args.product, pointers_aligned(args.product), Epilogue::kSwiglu,
                  args.interleaved};
    desc.index = gathered.has_value();
    desc.index_matrix_aligned = gathered && has_aligned_rows(*gathered);
    selection = select_gemm(desc, current_gpu());
    return is_supported();
  }

  const GroupedGemmSwiglu& product_;
  Tensor a_, b_;
  std::optional<Tensor> bias_, probs_;
};

}  // namespace

std::optional<TwoTensors> gemm_swiglu_cuda(const GroupedGemmSwiglu& product) {
  const CudaScope scope(product.a);
  SwigluOperands operands(product, true);
  if (!operands.is_supported()) return std::nullopt;
  operands.complete();
  const Tensor act = operands.make({product.capacity(), operands.features()});
  operands.args.act = act.mutable_data_ptr();
  const DType dtype = operands.args.product.dtype;
  const bool interleaved = operands.args.interleaved;
  if (operands.gathered) {
    const SwigluGatherLauncher launch = interleaved ? swiglu_gather_interleaved(dtype) : swiglu_gather(dtype);
    launch(operands.args, *operands.gathered, operands.selection.config, scope.stream());
  } else {
    const SwigluLauncher launch = interleaved ? swiglu_interleaved(dtype) : swiglu(dtype);
    launch(operands.args, operands.selection.config, scope.stream());
  }
  return TwoTensors(act, operands.h);
}

std::optional<ThreeTensors> gemm_swiglu_quantize_cuda(const GroupedGemmSwiglu& product,
                                                      const Format& format) {
  const CudaScope scope(product.a);
  SwigluOperands operands(product, false);
  if (!operands.is_supported()) return std::nullopt;
  operands.complete();
  // Quantization along rows does not depend on the groups, except for where the tail begins.
  const auto operand = quantize::matrix_shape(product.a.size(0), operands.features(), std::nullopt);
  const auto outputs = quantize::make_outputs(product.a, operand, format, {true, false});
  const SwigluQuantizeKernelArgs args{
      operands.args, quantize::quantize_args(product.a, outputs, quantize::make_layout(operand, format, {}),
                                             format, Tensor())};
  const bool mx = args.quantized_act.layout.granularity == quantize::ScaleGranularity::k1x32;
  const bool interleaved = args.swiglu.interleaved;
  const auto launcher = mx ? (interleaved ? swiglu_mxfp8_interleaved : swiglu_mxfp8)
                           : (interleaved ? swiglu_fp8_block_interleaved : swiglu_fp8_block);
  const SwigluQuantizeLauncher launch = launcher(args.swiglu.product.dtype);
  launch(args, operands.selection.config, scope.stream());
  quantize::launch_zero_tail(args.quantized_act, args.swiglu.product.offsets + product.b.size(0),
                             scope.stream());
  return ThreeTensors(outputs.data, outputs.scale, operands.h);
}

}  // namespace transformer_plugin::gemm

#endif

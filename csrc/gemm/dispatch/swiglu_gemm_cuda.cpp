// The Hopper kernels with SwiGLU in the epilogue.
#ifdef TRANSFORMER_PLUGIN_CUDA

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
GroupedGemmArgs arguments_of(const Tensor& a, const Tensor& b, const Tensor& offsets, int64_t n,
                             int64_t features, const LaunchOptions& options) {
  GroupedGemmArgs args{};
  args.a = a.const_data_ptr();
  args.b = b.const_data_ptr();
  args.offsets = offsets.const_data_ptr<int32_t>();
  args.rows = a.size(0);
  args.groups = b.size(0);
  args.n = n;
  args.k = a.size(1);
  args.out_row_stride = 2 * features;
  args.dtype = args.out_dtype = to_dtype(a.scalar_type());
  args.rows_16_byte_aligned = aligned_rows(a) && aligned_rows(b);
  args.options = options;
  return args;
}

Selection select(const GroupedGemmArgs& args, bool interleaved) {
  return select_gemm({GemmDirection::kFprop, args, pointers_aligned(args), Epilogue::kSwiglu, interleaved},
                     current_gpu());
}

std::optional<Tensor> contiguous(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional<Tensor>(tensor->contiguous()) : std::nullopt;
}

// The operands of a product, which it keeps alive, and h.
class SwigluOperands {
 public:
  explicit SwigluOperands(const GroupedGemmSwiglu& product)
      : product_(product), a_(product.a.contiguous()), b_(product.b.contiguous()) {
    args.product = arguments_of(a_, b_, product.offsets, 2 * features(), features(), product.options);
    args.interleaved = product.interleave != 0;
  }

  // Allocates outputs; called once a kernel is selected.
  void complete() {
    bias_ = as_float(product_.bias);
    probs_ = contiguous(product_.probs);
    h = make({product_.keep_input ? a_.size(0) : 0, 2 * features()});
    args.product.bias = float_or_null(bias_);
    args.product.out = product_.keep_input ? h.mutable_data_ptr() : nullptr;
    args.probs = float_or_null(probs_);
  }
  Tensor make(c10::SymIntArrayRef sizes) const { return empty(a_, sizes, a_.scalar_type()); }
  int64_t features() const { return product_.features(); }
  const Tensor& rows() const { return a_; }

  SwigluKernelArgs args{};
  Tensor h;

 private:
  const GroupedGemmSwiglu& product_;
  Tensor a_, b_;
  std::optional<Tensor> bias_, probs_;
};

}  // namespace

std::optional<TwoTensors> gemm_swiglu_cuda(const GroupedGemmSwiglu& product) {
  const CudaScope scope(product.a);
  SwigluOperands operands(product);
  const Selection selection = select(operands.args.product, operands.args.interleaved);
  if (selection.backend != Backend::kSm90Swiglu) return std::nullopt;
  operands.complete();
  const Tensor act = operands.make({product.a.size(0), operands.features()});
  operands.args.act = act.mutable_data_ptr();
  const DType dtype = operands.args.product.dtype;
  const SwigluLauncher launch = operands.args.interleaved ? swiglu_interleaved(dtype) : swiglu(dtype);
  launch(operands.args, selection.config, scope.stream());
  return TwoTensors(act, operands.h);
}

std::optional<ThreeTensors> gemm_swiglu_quantize_cuda(const GroupedGemmSwiglu& product,
                                                      const Format& format) {
  const CudaScope scope(product.a);
  SwigluOperands operands(product);
  const Selection selection = select(operands.args.product, operands.args.interleaved);
  if (selection.backend != Backend::kSm90Swiglu) return std::nullopt;
  operands.complete();
  // Quantization along rows does not depend on the groups, except for where the tail begins.
  const auto operand = quantize::matrix_shape(product.a.size(0), operands.features(), std::nullopt);
  const auto outputs = quantize::make_outputs(operands.rows(), operand, format, {true, false});
  const SwigluQuantizeKernelArgs args{
      operands.args, quantize::quantize_args(operands.rows(), outputs,
                                             quantize::make_layout(operand, format, {}), format, Tensor())};
  const bool mx = args.quantized_act.layout.granularity == quantize::ScaleGranularity::k1x32;
  const bool interleaved = args.swiglu.interleaved;
  const auto launcher = mx ? (interleaved ? swiglu_mxfp8_interleaved : swiglu_mxfp8)
                           : (interleaved ? swiglu_fp8_block_interleaved : swiglu_fp8_block);
  const SwigluQuantizeLauncher launch = launcher(args.swiglu.product.dtype);
  launch(args, selection.config, scope.stream());
  quantize::launch_zero_tail(args.quantized_act, args.swiglu.product.offsets + product.b.size(0),
                             scope.stream());
  return ThreeTensors(outputs.data, outputs.scale, operands.h);
}

}  // namespace transformer_plugin::gemm

#endif

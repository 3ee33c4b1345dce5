// The Hopper kernels with SwiGLU in the epilogue.
#ifdef TRANSFORMER_PLUGIN_CUDA

#include "common/row_index.h"
#include "common/tensor.h"
#include "gemm/dispatch/cuda_args.h"
#include "gemm/dispatch/describe_gemm.h"
#include "gemm/dispatch/select.h"
#include "gemm/dispatch/swiglu_gemm.h"
#include "gemm/sm90/epilogue/swiglu.h"
#include "quantize/args/zero_tail.h"
#include "quantize/ops/fused.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;

std::optional<Tensor> contiguous(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional<Tensor>(tensor->contiguous()) : std::nullopt;
}

// The arguments of a kernel, and what they point to. Rows that an index names are copied unless the kernel
// gathers them.
class SwigluOperands {
 public:
  SwigluOperands(const GroupedGemmSwiglu& product, const GemmDesc& desc, const Selection& selection)
      : b_(product.problem.b.data.contiguous()),
        bias_(as_float(product.problem.bias)),
        probs_(contiguous(product.probs)) {
    const GemmProblem& problem = product.problem;
    const Quantized& a = problem.a;
    const bool index = a.row_index.defined(), copies = selection.copy == GemmCopy::kTakeRows;
    if (index && !copies) gathered = rows_by_index(a.data, a.row_index, problem.offsets);
    if (!index) a_ = a.data.contiguous();
    if (copies) a_ = take_rows(a.data, a.row_index, problem.offsets);
    h = make({product.keep_input ? product.capacity() : 0, 2 * product.features()});
    args.product = args_of(desc);
    args.product.a = a_.defined() ? a_.const_data_ptr() : nullptr;
    args.product.b = b_.const_data_ptr();
    args.product.offsets = problem.offsets.const_data_ptr<int32_t>();
    args.product.zero_tail = problem.zero_tail;
    args.product.bias = float_or_null(bias_);
    args.product.out = product.keep_input ? h.mutable_data_ptr() : nullptr;
    args.probs = float_or_null(probs_);
    args.interleaved = product.interleave != 0;
  }

  Tensor make(c10::SymIntArrayRef sizes) const { return empty(b_, sizes, b_.scalar_type()); }

  SwigluKernelArgs args{};
  std::optional<GatheredRows> gathered;
  Tensor h;

 private:
  const Tensor b_;
  const std::optional<Tensor> bias_, probs_;
  Tensor a_;
};

}  // namespace

TwoTensors gemm_swiglu_cuda(const GroupedGemmSwiglu& product, const GemmDesc& desc,
                            const Selection& selection) {
  const CudaScope scope(product.problem.a.data);
  SwigluOperands operands(product, desc, selection);
  const Tensor act = operands.make({product.capacity(), product.features()});
  operands.args.act = act.mutable_data_ptr();
  const DType dtype = operands.args.product.dtype;
  const bool interleaved = operands.args.interleaved;
  if (operands.gathered) {
    const SwigluGatherLauncher launch = interleaved ? swiglu_gather_interleaved(dtype) : swiglu_gather(dtype);
    launch(operands.args, *operands.gathered, selection.config, scope.stream());
  } else {
    const SwigluLauncher launch = interleaved ? swiglu_interleaved(dtype) : swiglu(dtype);
    launch(operands.args, selection.config, scope.stream());
  }
  return TwoTensors(act, operands.h);
}

ThreeTensors gemm_swiglu_quantize_cuda(const GroupedGemmSwiglu& product, const GemmDesc& desc,
                                       const Selection& selection, const Format& format) {
  const Tensor& a = product.problem.a.data;
  const CudaScope scope(a);
  SwigluOperands operands(product, desc, selection);
  // Quantization along rows does not depend on the groups, except for where the tail begins.
  const auto operand = quantize::matrix_shape(a.size(0), product.features(), std::nullopt);
  const auto outputs = quantize::make_outputs(a, operand, format, {true, false});
  const SwigluQuantizeKernelArgs args{
      operands.args,
      quantize::quantize_args(a, outputs, quantize::make_layout(operand, format, {}), format, Tensor())};
  const bool mx = args.quantized_act.layout.granularity == quantize::ScaleGranularity::k1x32;
  const bool interleaved = args.swiglu.interleaved;
  const auto launcher = mx ? (interleaved ? swiglu_mxfp8_interleaved : swiglu_mxfp8)
                           : (interleaved ? swiglu_fp8_block_interleaved : swiglu_fp8_block);
  const SwigluQuantizeLauncher launch = launcher(args.swiglu.product.dtype);
  launch(args, selection.config, scope.stream());
  quantize::launch_zero_tail(args.quantized_act, args.swiglu.product.offsets + product.problem.groups(),
                             scope.stream());
  return ThreeTensors(outputs.data, outputs.scale, operands.h);
}

}  // namespace transformer_plugin::gemm

#endif

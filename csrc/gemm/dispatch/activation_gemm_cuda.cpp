// The Hopper kernels with an activation in the epilogue.
#ifdef TRANSFORMER_PLUGIN_CUDA

#include "common/row_index.h"
#include "common/tensor.h"
#include "gemm/dispatch/activation_gemm.h"
#include "gemm/dispatch/cuda_args.h"
#include "gemm/dispatch/describe_gemm.h"
#include "gemm/dispatch/select.h"
#include "gemm/sm90/epilogue/activation.h"
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
class ActivationOperands {
 public:
  ActivationOperands(const GroupedGemmActivation& product, const EpilogueKernel& kernel)
      : b_(product.problem.b.data.contiguous()),
        bias_(as_float(product.problem.bias)),
        probs_(contiguous(product.probs)) {
    const GemmProblem& problem = product.problem;
    const Quantized& a = problem.a;
    const bool index = a.row_index.defined(), copies = kernel.selection.copy == GemmCopy::kTakeRows;
    if (index && !copies) gathered = rows_by_index(a.data, a.row_index, problem.offsets);
    if (!index) a_ = a.data.contiguous();
    if (copies) a_ = take_rows(a.data, a.row_index, problem.offsets);
    h = make({product.keep_input ? product.capacity() : 0, product.problem.columns()});
    args.product = args_of(kernel.desc);
    args.product.a = a_.defined() ? a_.const_data_ptr() : nullptr;
    args.product.b = b_.const_data_ptr();
    args.product.offsets = problem.offsets.const_data_ptr<int32_t>();
    args.product.zero_tail = problem.zero_tail;
    args.product.bias = float_or_null(bias_);
    args.product.out = product.keep_input ? h.mutable_data_ptr() : nullptr;
    args.probs = float_or_null(probs_);
    args.activation = product.activation;
  }

  Tensor make(c10::SymIntArrayRef sizes) const { return empty(b_, sizes, b_.scalar_type()); }

  ActivationKernelArgs args{};
  std::optional<GatheredRows> gathered;
  Tensor h;

 private:
  const Tensor b_;
  const std::optional<Tensor> bias_, probs_;
  Tensor a_;
};

// The launchers of a function, [0] with the gate's columns first, [1] interleaved.
struct Launchers {
  ActivationLauncher (*store[2])(DType dtype);
  ActivationGatherLauncher (*gather[2])(DType dtype);
  ActivationQuantizeLauncher (*fp8_block[2])(DType dtype);
  ActivationQuantizeLauncher (*mxfp8[2])(DType dtype);
};

constexpr Launchers kSwigluLaunchers = {{swiglu, swiglu_interleaved},
                                        {swiglu_gather, swiglu_gather_interleaved},
                                        {swiglu_fp8_block, swiglu_fp8_block_interleaved},
                                        {swiglu_mxfp8, swiglu_mxfp8_interleaved}};
constexpr Launchers kClampedSwigluLaunchers = {
    {clamped_swiglu, clamped_swiglu_interleaved},
    {clamped_swiglu_gather, clamped_swiglu_gather_interleaved},
    {clamped_swiglu_fp8_block, clamped_swiglu_fp8_block_interleaved},
    {clamped_swiglu_mxfp8, clamped_swiglu_mxfp8_interleaved}};

// Of a function whose traits say that it has them.
const Launchers& launchers_of(const activation::Activation& activation) {
  using activation::ActivationFunction;
  if (activation.function == ActivationFunction::kClampedSwiglu) return kClampedSwigluLaunchers;
  TORCH_INTERNAL_ASSERT(activation.function == ActivationFunction::kSwiglu,
                        "select_gemm takes the steps for other functions");
  return kSwigluLaunchers;
}

}  // namespace

std::optional<EpilogueKernel> epilogue_kernel(const GroupedGemmActivation& product) {
  const Tensor& a = product.problem.a.data;
  if (!a.is_cuda()) return std::nullopt;
  GemmDesc desc = describe_gemm(product.problem, product.problem.b.data.scalar_type(), {});
  desc.epilogue = Epilogue::kActivation;
  desc.activation = product.activation;
  const Selection selection = select_gemm(desc, gpu_of(a));
  if (selection.backend != Backend::kSm90Activation) return std::nullopt;
  return EpilogueKernel{desc, selection};
}

TwoTensors gemm_activation_cuda(const GroupedGemmActivation& product, const EpilogueKernel& kernel) {
  const CudaScope scope(product.problem.a.data);
  ActivationOperands operands(product, kernel);
  const Tensor act = operands.make({product.capacity(), product.features()});
  operands.args.act = act.mutable_data_ptr();
  const DType dtype = operands.args.product.dtype;
  const Launchers& launchers = launchers_of(product.activation);
  const size_t order = product.activation.interleave != 0;
  if (operands.gathered) {
    launchers.gather[order](dtype)(operands.args, *operands.gathered, kernel.selection.config,
                                   scope.stream());
  } else {
    launchers.store[order](dtype)(operands.args, kernel.selection.config, scope.stream());
  }
  return TwoTensors(act, operands.h);
}

ThreeTensors gemm_activation_quantize_cuda(const GroupedGemmActivation& product, const EpilogueKernel& kernel,
                                           const Format& format) {
  const Tensor& a = product.problem.a.data;
  const CudaScope scope(a);
  ActivationOperands operands(product, kernel);
  // Quantization along rows does not depend on the groups, except for where the tail begins.
  const auto operand = quantize::matrix_shape(a.size(0), product.features(), std::nullopt);
  const auto outputs = quantize::make_outputs(a, operand, format, {true, false});
  const ActivationQuantizeKernelArgs args{
      operands.args,
      quantize::quantize_args(a, outputs, quantize::make_layout(operand, format, {}), format, Tensor())};
  const bool mx = args.quantized_act.layout.granularity == quantize::ScaleGranularity::k1x32;
  const Launchers& launchers = launchers_of(product.activation);
  const auto& of_format = mx ? launchers.mxfp8 : launchers.fp8_block;
  const ActivationQuantizeLauncher launch =
      of_format[product.activation.interleave != 0](args.activation.product.dtype);
  launch(args, kernel.selection.config, scope.stream());
  quantize::launch_zero_tail(args.quantized_act, args.activation.product.offsets + product.problem.groups(),
                             scope.stream());
  return ThreeTensors(outputs.data, outputs.scale, operands.h);
}

}  // namespace transformer_plugin::gemm

#endif

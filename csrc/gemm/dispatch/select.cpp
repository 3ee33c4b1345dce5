#include "gemm/dispatch/select.h"

#ifdef TRANSFORMER_PLUGIN_CUDA
#include <ATen/cuda/CUDAContextLight.h>

#include "gemm/sm90/launch.h"
#endif

namespace transformer_plugin::gemm {
namespace {

bool is_sm90(const GpuDesc& gpu) { return gpu.capability / 10 == 9; }

// at::_grouped_mm without a host read: BF16, rows of multiples of 16 bytes, below 1024 groups, Blackwell; on
// Hopper the kernels here are faster. Elsewhere it is a loop that reads the offsets on the host, so it is not
// called.
bool torch_supports(const GemmDesc& desc, const GpuDesc& gpu) {
  const bool has_elements = desc.rows > 0 && desc.n > 0 && (desc.k > 0 || desc.m > 0);
  const bool has_kernel = gpu.capability / 10 == 10 || (is_sm90(gpu) && !gpu.has_sm90a_kernels);
  return desc.torch_computes_it && desc.dtype == DType::kBFloat16 && desc.out_dtype == DType::kBFloat16 &&
         desc.groups > 0 && desc.groups < 1024 && has_elements && desc.rows_aligned && has_kernel;
}

constexpr const char* kNotAligned = "a pointer or a row of an operand is not a multiple of 16 bytes";

// Null where the kernels of gemm/sm90 take the problem, else why they do not. Of the operands' memory only
// what no copy changes.
const char* why_not_sm90(const GemmDesc& desc, const GpuDesc& gpu) {
  if (!is_sm90(gpu)) return "the GPU is not a Hopper (compute capability 9.0)";
  if (!gpu.has_sm90a_kernels) return "the library was built without kernels for sm_90a";
  if (const char* reason = sm90_unsupported_shape(desc)) return reason;
  return desc.pointers_aligned ? nullptr : kNotAligned;
}

// On an H100, rows by an index take 1 to 2 % of a product, for any number of columns, and a copy of them 2 %
// (28672 columns) to 26 % (2048). Weight gradients: gathers_wgrad().
bool gathers(const GemmDesc& desc) {
  return desc.index && desc.can_gather && bytes_of(desc.dtype) == 2 && desc.rows > 0 &&
         desc.index_matrix_aligned && (!desc.is_wgrad() || (desc.index_fits_wgrad && gathers_wgrad(desc.n)));
}

Selection on_sm90(Backend backend, GemmCopy copy, const GemmDesc& desc, const GpuDesc& gpu) {
  return {backend, "dtypes, sizes and alignment are those of the Hopper kernels", copy, desc.direction,
          sm90_config(desc, gpu.multiprocessors)};
}

// A copy of the rows that an index names is needed unless the kernel gathers them.
GemmCopy copy_of_rows(const GemmDesc& desc) { return desc.index ? GemmCopy::kTakeRows : GemmCopy::kNone; }

Selection select_activation(const GemmDesc& desc, const GpuDesc& gpu) {
  const activation::Activation& activation = desc.activation;
  const int64_t features = desc.n / activation.columns_per_feature();
  const char* reason =
      activation.traits().has_gemm_epilogue ? why_not_sm90(desc, gpu) : "no epilogue has this activation";
  if (!reason && activation.alternates()) reason = "no epilogue has columns that alternate one by one";
  if (!reason && !desc.rows_aligned) reason = kNotAligned;
  if (!reason && features % (activation.interleave != 0 ? 32 : 8) != 0) {
    reason = "the features are not a multiple of 8 (32 when interleaved)";
  }
  if (reason) return {Backend::kSteps, reason, copy_of_rows(desc), desc.direction};
  return on_sm90(Backend::kSm90Activation, gathers(desc) ? GemmCopy::kNone : copy_of_rows(desc), desc, gpu);
}

// What the kernel for these scales needs copied, if it can read the operands then; else kDequantize.
GemmCopy copy_of_quantized(const GemmDesc& desc, OperandScaling scaling) {
  if (desc.is_wgrad()) {
    // In the aligned layout the quantizer wrote all groups at multiples of 32.
    if (desc.a_format.aligned_groups && !desc.is_dense) {
      return desc.rows_aligned ? GemmCopy::kNone : GemmCopy::kDequantize;
    }
    if (!desc.rows_aligned) return GemmCopy::kAlignAllGroups;
    return desc.is_dense ? GemmCopy::kNone : GemmCopy::kAlignGroups;
  }
  if (!desc.rows_aligned) return GemmCopy::kDequantize;
  const bool reads_list = scaling == OperandScaling::kGroup || scaling == OperandScaling::kBlock;
  return desc.is_list && !(reads_list && desc.list_aligned) ? GemmCopy::kStack : GemmCopy::kNone;
}

Selection select_quantized(const GemmDesc& desc, const GpuDesc& gpu) {
  const auto steps = [&](const char* reason) {
    return Selection{Backend::kSteps, reason, GemmCopy::kDequantize, desc.direction};
  };
  const auto scaling = operand_scaling(desc.direction, desc.a_format, desc.b_format);
  if (!scaling) return steps("no kernel multiplies these two formats");
  if (desc.groups == 0) return steps("there are no groups");
  if (const char* reason = why_not_sm90(desc, gpu)) return steps(reason);
  const GemmCopy copy = copy_of_quantized(desc, *scaling);
  if (copy == GemmCopy::kDequantize || (desc.is_wgrad() && !desc.list_aligned)) return steps(kNotAligned);
  return on_sm90(Backend::kSm90, copy, desc, gpu);
}

}  // namespace

Selection select_gemm(const GemmDesc& desc, const GpuDesc& gpu) {
  if (desc.epilogue != Epilogue::kStore) return select_activation(desc, gpu);
  if (desc.is_quantized()) {
    const Selection selection = select_quantized(desc, gpu);
    const bool tries_wgrad = desc.is_dense && !desc.has_bias && desc.direction == GemmDirection::kFprop;
    if (selection.backend != Backend::kSteps || !tries_wgrad) return selection;
    const Selection wgrad = select_quantized(as_wgrad(desc), gpu);
    return wgrad.backend == Backend::kSteps ? selection : wgrad;
  }
  const GemmCopy copy = copy_of_rows(desc);
  if (torch_supports(desc, gpu)) {
    return {Backend::kTorch, "torch has a kernel for this GPU", copy, desc.direction};
  }
  const char* reason = desc.groups == 0 ? "there are no groups" : why_not_sm90(desc, gpu);
  if (!reason && !(desc.rows_aligned && desc.list_aligned)) reason = kNotAligned;
  if (reason) return {Backend::kGeneric, reason, copy, desc.direction};
  if (gathers(desc)) return on_sm90(Backend::kSm90Gather, GemmCopy::kNone, desc, gpu);
  return on_sm90(Backend::kSm90, copy, desc, gpu);
}

GemmDesc as_wgrad(GemmDesc desc) {
  desc.direction = GemmDirection::kWgrad;
  desc.m = desc.rows;
  desc.rows = desc.k;
  desc.k = 0;
  desc.out_group_stride = desc.m * desc.out_row_stride;
  return desc;
}

const char* backend_name(Backend backend) {
  switch (backend) {
    case Backend::kTorch: return "torch";
    case Backend::kSm90: return "sm90";
    case Backend::kSm90Gather: return "sm90_gather";
    case Backend::kSm90Activation: return "sm90_activation";
    case Backend::kGeneric: return "generic";
    case Backend::kSteps: return "steps";
  }
  return "";
}

GpuDesc gpu_of([[maybe_unused]] const at::Tensor& tensor) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (tensor.is_cuda()) {
    const cudaDeviceProp* gpu = at::cuda::getDeviceProperties(tensor.device().index());
    return {gpu->major * 10 + gpu->minor, gpu->multiProcessorCount, kBuiltForSm90a};
  }
#endif
  return {};
}

bool has_quantized_kernels(const at::Tensor& like) {
  const GpuDesc gpu = gpu_of(like);
  return is_sm90(gpu) && gpu.has_sm90a_kernels;
}

}  // namespace transformer_plugin::gemm

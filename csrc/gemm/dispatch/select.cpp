#include "gemm/dispatch/select.h"

namespace transformer_plugin::gemm {
namespace {

bool is_sm90(const GpuDesc& gpu) { return gpu.capability / 10 == 9; }

// at::_grouped_mm without a host read: BF16, rows of multiples of 16 bytes, below 1024 groups, Blackwell; on Hopper the kernels
// here are faster. Elsewhere it is a loop that reads the offsets on the host, so it is not called.
bool torch_supports(const GemmDesc& desc, const GpuDesc& gpu) {
  const GroupedGemmArgs& args = desc.args;
  const bool has_elements = args.rows > 0 && args.n > 0 && (args.k > 0 || args.m > 0);
  const bool has_kernel = gpu.capability / 10 == 10 || (is_sm90(gpu) && !gpu.has_sm90a_kernels);
  return desc.torch_computes_it && args.dtype == DType::kBFloat16 && args.out_dtype == DType::kBFloat16 &&
         args.groups > 0 && args.groups < 1024 && has_elements && args.rows_16_byte_aligned && has_kernel;
}

// Null where the kernels of gemm/sm90 take the problem, else why they do not.
const char* why_not_sm90(const GemmDesc& desc, const GpuDesc& gpu) {
  if (!is_sm90(gpu)) return "the GPU is not a Hopper (compute capability 9.0)";
  if (!gpu.has_sm90a_kernels) return "the library was built without kernels for sm_90a";
  if (const char* reason = sm90_unsupported_shape(desc.direction, desc.args)) return reason;
  if (!desc.args.rows_16_byte_aligned || !desc.pointers_aligned) {
    return "a pointer or a row of an operand is not a multiple of 16 bytes";
  }
  return nullptr;
}

constexpr const char* kCopiedFirst = "the rows that the index names are copied first";

// On an H100, rows by an index take 1 to 2 % of a product, for any number of columns, and a copy of them 2 % (28672
// columns) to 26 % (2048). Weight gradients: gathers_wgrad().
bool gathers(const GemmDesc& desc) {
  const bool wgrad = desc.direction == GemmDirection::kWgrad;
  return bytes_of(desc.args.dtype) == 2 && desc.args.rows > 0 && desc.index_matrix_aligned &&
         (!wgrad || (desc.index_fits_wgrad && gathers_wgrad(desc.args.n)));
}

Selection on_sm90(Backend backend, const GemmDesc& desc, const GpuDesc& gpu) {
  return {backend, "dtypes, sizes and alignment are those of the Hopper kernels",
          sm90_config(desc.direction, desc.args, gpu.multiprocessors, desc.epilogue == Epilogue::kStore)};
}

Selection select_swiglu(const GemmDesc& desc, const GpuDesc& gpu) {
  const int64_t features = desc.args.n / 2;
  if (const char* reason = why_not_sm90(desc, gpu)) return {Backend::kSteps, reason, {}};
  if (desc.index && !gathers(desc)) return {Backend::kSteps, kCopiedFirst, {}};
  if (features % (desc.interleaved ? 32 : 8) != 0) {
    return {Backend::kSteps, "the features are not a multiple of 8 (32 when interleaved)", {}};
  }
  return on_sm90(Backend::kSm90Swiglu, desc, gpu);
}

}  // namespace

Selection select_gemm(const GemmDesc& desc, const GpuDesc& gpu) {
  if (desc.epilogue != Epilogue::kStore) return select_swiglu(desc, gpu);
  if (torch_supports(desc, gpu)) return {Backend::kTorch, "torch has a kernel for this GPU", {}};
  const char* reason = desc.args.groups == 0 ? "there are no groups" : why_not_sm90(desc, gpu);
  if (!reason && desc.index && !gathers(desc)) reason = kCopiedFirst;
  if (!reason) return on_sm90(desc.index ? Backend::kSm90Gather : Backend::kSm90, desc, gpu);
  return {bytes_of(desc.args.dtype) == 1 ? Backend::kSteps : Backend::kGeneric, reason, {}};
}

const char* backend_name(Backend backend) {
  switch (backend) {
    case Backend::kTorch: return "torch";
    case Backend::kSm90: return "sm90";
    case Backend::kSm90Gather: return "sm90_gather";
    case Backend::kSm90Swiglu: return "sm90_swiglu";
    case Backend::kGeneric: return "generic";
    case Backend::kSteps: return "steps";
  }
  return "";
}

}  // namespace transformer_plugin::gemm

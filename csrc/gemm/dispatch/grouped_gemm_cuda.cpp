// Grouped GEMM on CUDA, by the kernel that select_gemm names. No size or index is read on the host.
#ifdef TRANSFORMER_PLUGIN_CUDA

#include <ATen/ops/_grouped_mm.h>

#include <algorithm>
#include <vector>

#include "common/row_index.h"
#include "common/tensor.h"
#include "gemm/dispatch/cuda_args.h"
#include "gemm/dispatch/grouped_gemm.h"
#include "gemm/dispatch/select.h"
#include "gemm/sm90/gather/gather.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;

// The stack, or the matrices of the list, contiguous.
std::vector<Tensor> operands_of(const GroupedGemm& problem) {
  std::vector<Tensor> held;
  held.reserve(std::max<size_t>(problem.list.size(), 1));
  if (problem.list.empty()) held.push_back(problem.b.contiguous());
  for (const Tensor& matrix : problem.list) held.push_back(matrix.contiguous());
  return held;
}

GroupedGemmArgs args_of(const GroupedGemm& problem, at::TensorList operands, const Tensor& out) {
  GroupedGemmArgs args{};
  args.b = operands[0].const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.offsets = problem.offsets.const_data_ptr<int32_t>();
  args.rows = problem.capacity();
  args.groups = problem.groups();
  args.n = problem.columns();
  args.k = problem.a.size(1);
  args.out_row_stride = row_stride(out);
  args.dtype = to_dtype(problem.a.scalar_type());
  args.out_dtype = to_dtype(out.scalar_type());
  args.rows_16_byte_aligned = std::all_of(operands.begin(), operands.end(), aligned_rows);
  args.zero_tail = problem.zero_tail && !problem.beta;
  args.options = problem.options;
  return args;
}

// Without the operands.
GroupedGemmArgs args_of(const GroupedWgrad& problem, const Tensor& out, bool is_list) {
  GroupedGemmArgs args{};
  args.out = out.mutable_data_ptr();
  args.offsets = problem.offsets.const_data_ptr<int32_t>();
  args.rows = problem.capacity();
  args.groups = problem.groups();
  args.m = problem.grad.size(1);
  args.n = problem.input.size(1);
  args.out_row_stride = is_list ? row_stride(out) : out.stride(1);
  args.out_group_stride = is_list ? args.m * args.out_row_stride : out.stride(0);
  args.dtype = to_dtype(problem.grad.scalar_type());
  args.out_dtype = to_dtype(out.scalar_type());
  args.options = problem.options;
  return args;
}

// The rows of an operand, contiguous; a copy if there is an index.
Tensor contiguous_rows(const Tensor& matrix, const std::optional<Tensor>& index, const Tensor& offsets) {
  return index ? take_rows(matrix, *index, offsets) : matrix.contiguous();
}

// A weight gradient into `out`: the arguments of its kernel, and the tensors that they point to.
class WgradCall {
 public:
  WgradCall(const GroupedWgrad& problem, at::TensorList out, bool accumulate)
      : problem_(problem),
        list_(out[0].dim() == 2 ? out : at::TensorList(), problem.grad),
        alpha_(as_float(problem.alpha)),
        beta_(as_float(problem.beta)) {
    for (const Tensor& matrix : out) matrix.mutable_data_ptr();  // makes copy-on-write tensors writable
    args_ = args_of(problem, out[0], out[0].dim() == 2);
    args_.list = list_.get();
    args_.alpha = float_or_null(alpha_);
    args_.beta = float_or_null(beta_);
    args_.accumulate = accumulate;
  }

  // Makes the rows of both operands contiguous, but not those of the gradient that the kernel gathers.
  void copy_rows() {
    input_ = contiguous_rows(problem_.input, problem_.input_rows, problem_.offsets);
    args_.b = input_.const_data_ptr();
    args_.rows_16_byte_aligned = aligned_rows(input_);
    if (select_gather()) return;
    grad_ = contiguous_rows(problem_.grad, problem_.grad_rows, problem_.offsets);
    args_.a = grad_.const_data_ptr();
    args_.rows_16_byte_aligned = aligned_rows(grad_) && aligned_rows(input_);
  }

  // The product by torch, if that is selected.
  std::optional<Tensor> torch_product() const {
    if (gathered_) return std::nullopt;
    GemmDesc desc{GemmDirection::kWgrad, args_, pointers_aligned(args_)};
    desc.torch_computes_it = !problem_.alpha;
    if (select_gemm(desc, current_gpu()).backend != Backend::kTorch) return std::nullopt;
    return at::_grouped_mm(grad_.t(), input_, problem_.offsets.narrow(0, 1, problem_.groups()));
  }

  void launch(void* stream) const {
    if (gathered_) {
      const bool float_out = args_.out_dtype == DType::kFloat32;
      const auto launch = float_out ? wgrad_gather_fp32_out(args_.dtype) : wgrad_gather(args_.dtype);
      return launch(args_, gathered_->rows, gathered_->config, stream);
    }
    const Selection selection =
        select_gemm({GemmDirection::kWgrad, args_, pointers_aligned(args_)}, current_gpu());
    const bool on_sm90 = selection.backend == Backend::kSm90;
    const Launcher launch = on_sm90 ? sm90_launcher(GemmDirection::kWgrad, args_) : nullptr;
    on_sm90 ? launch(args_, selection.config, stream) : launch_generic(GemmDirection::kWgrad, args_, stream);
  }

 private:
  struct Gathered {
    GatheredRows rows;
    Sm90Config config;
  };

  // Whether the kernel gathers the rows of the gradient; then sets `gathered_`.
  bool select_gather() {
    if (!problem_.grad_rows || problem_.grad.stride(1) != 1) return false;
    const GatheredRows rows = rows_by_index(problem_.grad, *problem_.grad_rows, problem_.offsets);
    GemmDesc desc{GemmDirection::kWgrad, args_, pointers_aligned(args_)};
    desc.index = true;
    desc.index_fits_wgrad = !rows.index.is_int64 && rows.stride_bytes < (int64_t{1} << 31);
    desc.index_matrix_aligned = has_aligned_rows(rows);
    const Selection selection = select_gemm(desc, current_gpu());
    if (selection.backend != Backend::kSm90Gather) return false;
    gathered_ = {rows, selection.config};
    return true;
  }

  const GroupedWgrad& problem_;
  const DevicePointerArray list_;
  const std::optional<Tensor> alpha_, beta_;
  Tensor grad_, input_;
  std::optional<Gathered> gathered_;
  GroupedGemmArgs args_;
};

}  // namespace

Tensor grouped_gemm_cuda(const GroupedGemm& problem, at::ScalarType dtype,
                         const std::optional<Tensor>& given_out) {
  const CudaScope scope(problem.a);
  const std::vector<Tensor> operands = operands_of(problem);
  const auto direction = problem.transpose_b ? GemmDirection::kFprop : GemmDirection::kDgrad;
  const Tensor out =
      given_out ? *given_out : empty(problem.a, {problem.capacity(), problem.columns()}, dtype);
  const DevicePointerArray list(problem.list.empty() ? at::TensorList() : operands, problem.a);
  const auto bias = as_float(problem.bias), bias_scale = as_float(problem.bias_scale);
  const auto alpha = as_float(problem.alpha), beta = as_float(problem.beta);
  GroupedGemmArgs args = args_of(problem, operands, out);
  args.list = list.get();
  args.alpha = float_or_null(alpha);
  args.beta = float_or_null(beta);
  args.bias = float_or_null(bias);
  args.bias_scale = float_or_null(bias_scale);
  GemmDesc desc{direction, args, pointers_aligned(args)};
  desc.torch_computes_it = !given_out && !problem.bias && !problem.alpha && problem.list.empty();
  if (problem.rows && problem.a.stride(1) == 1) {
    const GatheredRows rows = rows_by_index(problem.a, *problem.rows, problem.offsets);
    desc.index = true;
    desc.index_matrix_aligned = has_aligned_rows(rows);
    const Selection selection = select_gemm(desc, current_gpu());
    if (selection.backend == Backend::kSm90Gather) {
      const auto launch = problem.transpose_b ? fprop_gather(args.dtype) : dgrad_gather(args.dtype);
      launch(args, rows, selection.config, scope.stream());
      return out;
    }
    desc.index = false;
  }
  const Tensor a =
      problem.rows ? take_rows(problem.a, *problem.rows, problem.offsets) : problem.a.contiguous();
  args.a = a.const_data_ptr();
  args.rows_16_byte_aligned = args.rows_16_byte_aligned && aligned_rows(a);
  const Selection selection = select_gemm(desc, current_gpu());
  if (selection.backend == Backend::kTorch) {
    const Tensor& b = operands[0];
    const Tensor product = at::_grouped_mm(a, problem.transpose_b ? b.transpose(1, 2) : b,
                                           problem.offsets.narrow(0, 1, problem.groups()));
    if (problem.zero_tail) zero_tail_rows(product, problem.offsets, scope.stream());
    return product;
  }
  const bool on_sm90 = selection.backend == Backend::kSm90;
  const Launcher launch = on_sm90 ? sm90_launcher(direction, args) : nullptr;
  on_sm90 ? launch(args, selection.config, scope.stream()) : launch_generic(direction, args, scope.stream());
  return out;
}

Tensor grouped_wgrad_cuda(const GroupedWgrad& problem, at::ScalarType dtype) {
  const CudaScope scope(problem.grad);
  const Tensor out =
      empty(problem.grad, {problem.groups(), problem.grad.size(1), problem.input.size(1)}, dtype);
  WgradCall call(problem, {&out, 1}, false);
  call.copy_rows();
  if (std::optional<Tensor> product = call.torch_product()) return *product;
  call.launch(scope.stream());
  return out;
}

void grouped_wgrad_out_cuda(const GroupedWgrad& problem, at::TensorList out, bool accumulate) {
  const CudaScope scope(problem.grad);
  WgradCall call(problem, out, accumulate);
  call.copy_rows();
  call.launch(scope.stream());
}

}  // namespace transformer_plugin::gemm

#endif

#include "tensor_parallel/exchange.h"

#include "common/tensor.h"
#include "tensor_parallel/checksum.h"

namespace transformer_plugin::tensor_parallel {
namespace {

const distributed::PhaseRegistration registration(phases::kAll);

}  // namespace

using at::Tensor;

void check_exchange(const Argument& tensor, int64_t num_ranks, int64_t timeout_ms) {
  distributed::check_timeout(tensor.op, timeout_ms);
  check_strided(tensor);
  TP_CHECK_VALUE(tensor.tensor.dim() >= 1, tensor.op, tensor.name, "at least 1 dimension",
                 describe(tensor.tensor), "Pass a tensor with rows, such as value.unsqueeze(0)");
  TP_CHECK_VALUE(num_ranks >= 1, tensor.op, "num_ranks", "at least 1", num_ranks, "Pass group.size()");
  check_memory(tensor);
}

void check_memory(const Argument& argument) {
  const Tensor& tensor = argument.tensor;
  if (!(tensor.is_cpu() || tensor.is_cuda()) || is_traced(tensor) || tensor.numel() == 0) return;
  int64_t end = tensor.storage_offset() + 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) end += (tensor.size(dim) - 1) * tensor.stride(dim);
  const auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
  TP_CHECK_VALUE(end * static_cast<int64_t>(tensor.element_size()) <= bytes, argument.op, argument.name,
                 "a tensor whose storage holds its elements",
                 describe(tensor) << " in a storage of " << bytes << " bytes",
                 "Allocate the storage again, as untyped_storage().resize_() does");
}

std::vector<c10::SymInt> reduced_sizes(const Argument& argument, int64_t num_ranks, int64_t timeout_ms) {
  const Tensor& input = argument.tensor;
  check_exchange(argument, num_ranks, timeout_ms);
  check_dtype(argument, {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble});
  TP_CHECK_VALUE(input.sym_size(0) % num_ranks == 0, argument.op, argument.name,
                 "rows that " << num_ranks << " ranks can share evenly", describe(input),
                 "Pad the rows to a multiple of the number of ranks");
  std::vector<c10::SymInt> sizes(input.sym_sizes().begin(), input.sym_sizes().end());
  sizes[0] = sizes[0] / num_ranks;
  return sizes;
}

Tensor all_to_all_rows(const RankGroup& group, const Tensor& input, const Phase& phase) {
  return group.collectives().all_to_all(input, phase).wait().view({input.size(0), width_of(input)});
}

void check_ranks(const char* op, const RankGroup& group, int64_t num_ranks) {
  TP_CHECK_VALUE(group.size() == num_ranks, op, "num_ranks", group.size() << ", the size of the group",
                 num_ranks, "Pass the size and the name of one group");
}

int64_t width_of(const Tensor& tensor) {
  int64_t width = 1;
  for (int64_t dim = 1; dim < tensor.dim(); ++dim) width *= tensor.size(dim);
  return width;
}

Call exchange_call(const Phase& phase, const char* argument, const Tensor& tensor, bool needs_grad) {
  Call call(phase, fields::kAll);
  call.set(fields::kDtype, static_cast<int64_t>(tensor.scalar_type()), argument)
      .set(fields::kRows, tensor.size(0), argument)
      .set(fields::kWidth, width_of(tensor), argument)
      .set(fields::kGradient, needs_grad, argument);
  return call;
}

Call list_call(const Phase& phase, const char* argument, at::TensorList inputs) {
  Checksum shapes;
  int64_t bytes = 0;
  for (const Tensor& tensor : inputs) {
    bytes += static_cast<int64_t>(tensor.nbytes());
    shapes.add(static_cast<int64_t>(tensor.scalar_type()));
    shapes.add(tensor.dim());
    for (const int64_t size : tensor.sizes()) shapes.add(size);
  }
  Call call(phase, fields::kAll);
  call.set(fields::kTensors, static_cast<int64_t>(inputs.size()), argument)
      .set(fields::kBytes, bytes, argument)
      .set(fields::kShapes, shapes.value(), argument);
  return call;
}

}  // namespace transformer_plugin::tensor_parallel

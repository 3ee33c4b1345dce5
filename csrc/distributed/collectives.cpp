#include "distributed/collectives.h"

#include <numeric>
#include <utility>

#include "common/tensor.h"

namespace transformer_plugin::distributed {

PendingCollective::PendingCollective(at::Tensor output, std::function<void()> wait)
    : output_(std::move(output)), wait_(std::move(wait)) {}

at::Tensor PendingCollective::wait() {
  if (wait_) std::exchange(wait_, nullptr)();
  return output_;
}

at::Tensor empty_rows(const at::Tensor& like, const c10::SymInt& rows) {
  std::vector<c10::SymInt> sizes(like.sym_sizes().begin(), like.sym_sizes().end());
  sizes[0] = rows;
  return empty(like, sizes, like.scalar_type());
}

int64_t sum_of(at::IntArrayRef counts) { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

std::vector<int64_t> in_bytes(at::IntArrayRef rows, const at::Tensor& like) {
  const int64_t row_bytes = c10::multiply_integers(like.sizes().slice(1)) * like.element_size();
  std::vector<int64_t> bytes;
  for (const int64_t count : rows) bytes.push_back(count * row_bytes);
  return bytes;
}

GatheredTensors with_elements(at::TensorList inputs, at::TensorList out) {
  GatheredTensors found;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].numel() == 0) continue;
    found.inputs.push_back(inputs[i].contiguous());
    found.out.push_back(out[i]);
  }
  return found;
}

at::Tensor as_bytes(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}).view(at::kByte);
}

}  // namespace transformer_plugin::distributed

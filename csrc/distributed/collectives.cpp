#include "distributed/collectives.h"

#include <utility>

namespace transformer_plugin::distributed {

PendingCollective::PendingCollective(at::Tensor output, std::function<void()> wait)
    : output_(std::move(output)), wait_(std::move(wait)) {}

at::Tensor PendingCollective::wait() {
  if (wait_) std::exchange(wait_, nullptr)();
  return output_;
}

at::Tensor as_bytes(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}).view(at::kByte);
}

}  // namespace transformer_plugin::distributed

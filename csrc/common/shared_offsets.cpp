#include "common/shared_offsets.h"

#include <tuple>

#include "common/tensor.h"

namespace transformer_plugin {
namespace {

thread_local SharedOffsets* innermost = nullptr;

// Writes to inference tensors are not counted.
int64_t version_of(const at::Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); }

}  // namespace

SharedOffsets::SharedOffsets(const at::Tensor& group_sizes, bool with_tail)
    : group_sizes_(group_sizes), with_tail_(with_tail), outer_(innermost) {
  innermost = this;
}

SharedOffsets::~SharedOffsets() { innermost = outer_; }

bool SharedOffsets::are_for(const at::Tensor& group_sizes) {
  return innermost && group_sizes.is_same(innermost->group_sizes_);
}

bool SharedOffsets::are_with_tail(const at::Tensor& group_sizes) {
  return are_for(group_sizes) && innermost->with_tail_;
}

at::Tensor SharedOffsets::find(GroupTable kind, const at::Tensor& group_sizes, int64_t rows) {
  if (!are_for(group_sizes)) return {};
  const Key key = key_of(kind, group_sizes, rows);
  for (const Entry& entry : innermost->entries_) {
    if (entry.key == key) return entry.table;
  }
  return {};
}

void SharedOffsets::keep(GroupTable kind, const at::Tensor& group_sizes, int64_t rows,
                         const at::Tensor& table) {
  if (are_for(group_sizes)) innermost->entries_.push_back({key_of(kind, group_sizes, rows), table});
}

bool SharedOffsets::Key::operator==(const Key& other) const {
  return std::tie(kind, rows, sizes, version, stream) ==
         std::tie(other.kind, other.rows, other.sizes, other.version, other.stream);
}

SharedOffsets::Key SharedOffsets::key_of(GroupTable kind, const at::Tensor& group_sizes, int64_t rows) {
  void* stream = nullptr;
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (group_sizes.is_cuda()) stream = CudaScope(group_sizes).stream();
#endif
  return {kind, rows, group_sizes.const_data_ptr(), version_of(group_sizes), stream};
}

}  // namespace transformer_plugin

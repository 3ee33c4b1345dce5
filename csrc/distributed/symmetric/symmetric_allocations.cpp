// Tensors in symmetric memory, and the ops that make them.
#include "distributed/symmetric/symmetric_allocations.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>

#include <algorithm>

#include "common/check.h"
#include "common/ops/distributed.h"
#include "common/register.h"
#include "common/tensor.h"
#include "distributed/rank_group.h"
#ifdef TRANSFORMER_PLUGIN_CUDA
#include <c10/cuda/CUDAFunctions.h>

#include "distributed/symmetric/torch_symmetric_memory.h"
#endif

namespace transformer_plugin::distributed {
namespace {

using at::Tensor;

// Tensors begin at multiples of this.
constexpr int64_t kUnit = 256;
constexpr int64_t kMostBytes = int64_t{1} << 40;

int64_t rounded(int64_t bytes) { return (std::max<int64_t>(bytes, 1) + kUnit - 1) / kUnit * kUnit; }

// What the storage of a tensor holds.
struct Block {
  std::shared_ptr<SymmetricAllocation> allocation;
  int64_t place;

  ~Block() { allocation->release(place); }
};

// Of a group of one rank, on any device.
class OwnMemory : public PeerMemory {
 public:
  OwnMemory(int64_t bytes, const at::Device& device)
      : memory_(at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device))) {}
  int64_t rank() const override { return 0; }
  int64_t ranks() const override { return 1; }
  int64_t bytes() const override { return memory_.numel(); }
  void* pointer(int64_t) const override { return memory_.mutable_data_ptr(); }

 private:
  const Tensor memory_;
};

void free_block(void* block) { delete static_cast<Block*>(block); }

}  // namespace

std::optional<int64_t> SymmetricAllocation::take(int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t place = 0;
  for (const auto& [begin, end] : used_) {
    if (begin - place >= rounded(bytes)) break;
    place = end;
  }
  if (this->bytes() - place < rounded(bytes)) return std::nullopt;
  used_[place] = place + rounded(bytes);
  return place;
}

void SymmetricAllocation::release(int64_t place) {
  const std::lock_guard<std::mutex> lock(mutex_);
  used_.erase(place);
}

int64_t SymmetricAllocation::largest_free() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t largest = 0, place = 0;
  for (const auto& [begin, end] : used_) {
    largest = std::max(largest, begin - place);
    place = end;
  }
  return std::max(largest, bytes() - place);
}

void SymmetricAllocations::enter(int64_t number, const PeerMemory& memory, const at::Device& device) {
  const int64_t ranks = memory.ranks();
  std::vector<int64_t> addresses;
  for (int64_t r = 0; r < ranks; ++r) addresses.push_back(reinterpret_cast<int64_t>(memory.pointer(r)));
  if (!table_.defined()) {
    table_ = at::zeros({kMostAllocations, ranks}, at::TensorOptions().dtype(at::kLong).device(device));
  }
  table_.select(0, number - 1).copy_(at::tensor(addresses, at::kLong));
  addresses_ = reinterpret_cast<void* const*>(table_.const_data_ptr<int64_t>());
}

int64_t SymmetricAllocations::add(std::shared_ptr<PeerMemory> memory, const at::Device& device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto number = static_cast<int64_t>(allocations_.size()) + 1;
  if (memory->ranks() > 1) enter(number, *memory, device);
  allocations_.push_back(std::make_shared<SymmetricAllocation>(number, std::move(memory), device));
  return number;
}

std::shared_ptr<SymmetricAllocation> SymmetricAllocations::find(int64_t number) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return number >= 1 && number <= static_cast<int64_t>(allocations_.size()) ? allocations_[number - 1]
                                                                            : nullptr;
}

std::optional<SymmetricPlace> symmetric_place(const Tensor& tensor) {
  if (!tensor.has_storage()) return std::nullopt;
  const c10::DataPtr& data = tensor.storage().data_ptr();
  const auto* const block = data.cast_context<Block>(&free_block);
  if (!block) return std::nullopt;
  const SymmetricAllocation& allocation = *block->allocation;
  return SymmetricPlace{&allocation, static_cast<const char*>(tensor.const_data_ptr()) - allocation.begin()};
}

namespace {

std::tuple<int64_t, std::string> symmetric_allocate(std::string_view group_name, int64_t bytes,
                                                    int64_t timeout_ms, std::optional<c10::Device> device) {
  constexpr const char* op = "symmetric_allocate";
  TP_CHECK_VALUE(bytes >= 1 && bytes <= kMostBytes, op, "num_bytes", "from 1 to 2^40", bytes,
                 "Pass the same size on every rank");
  const RankGroup group(op, group_name, timeout_ms, Tensor());
  auto& allocations = group.state().extension<SymmetricAllocations>();
  const at::Device here = with_index(device.value_or(at::kCPU));
  if (group.size() == 1)
    return {allocations.add(std::make_shared<OwnMemory>(rounded(bytes), here), here), ""};
  TP_CHECK_VALUE(!allocations.find(kMostAllocations), op, "group_name",
                 "a group with fewer than " << kMostAllocations << " allocations", kMostAllocations,
                 "Make one allocation and take several tensors from it: a pool");
  std::string reason;
  auto memory = allocate_peer_memory(group.state(), here, rounded(bytes), group.timeout(), &reason);
  if (!memory) return {0, reason};
  return {allocations.add(std::move(memory), here), ""};
}

Tensor symmetric_empty(std::string_view group_name, int64_t allocation, int64_t bytes) {
  constexpr const char* op = "symmetric_empty";
  TP_CHECK_VALUE(bytes >= 0 && bytes <= kMostBytes, op, "num_bytes", "from 0 to 2^40", bytes,
                 "Pass the size of the tensor");
  const RankGroup group(op, group_name, 0, Tensor());
  const auto from = group.state().extension<SymmetricAllocations>().find(allocation);
  TP_CHECK_VALUE(from != nullptr, op, "allocation", "a number that symmetric_allocate has returned",
                 allocation, "Call symmetric_allocate on every rank first");
  const at::Device device = from->device();
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (device.is_cuda()) check_no_capture(device, {op, "allocation", "Take the tensor before the capture"});
#endif
  const std::optional<int64_t> place = from->take(bytes);
  TP_CHECK_VALUE(place.has_value(), op, "num_bytes",
                 "at most the " << from->largest_free() << " bytes that are free in one piece", bytes,
                 "Delete tensors of this allocation, or make a larger one on every rank");
  c10::DataPtr data(from->begin() + *place, new Block{from, *place}, &free_block, device);
  const c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes), std::move(data),
                             /*allocator=*/nullptr, /*resizable=*/false);
  Tensor tensor = at::empty({0}, at::TensorOptions().dtype(at::kByte).device(device));
  return tensor.set_(storage, 0, {bytes}, {1});
}

bool is_symmetric(const Tensor& tensor) { return symmetric_place(tensor).has_value(); }

}  // namespace

TP_IMPL_FOR(CompositeExplicitAutograd, symmetric_allocate, symmetric_allocate);
TP_IMPL_FOR(CompositeExplicitAutograd, symmetric_empty, symmetric_empty);
TP_IMPL_FOR(CompositeExplicitAutograd, is_symmetric, is_symmetric);

}  // namespace transformer_plugin::distributed

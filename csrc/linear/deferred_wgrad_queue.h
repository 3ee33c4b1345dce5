// The queues of deferred weight gradients, by id.
#pragma once

#include <deque>
#include <mutex>
#include <unordered_map>

#include "linear/deferred_wgrad.h"

namespace transformer_plugin::linear {

// A tensor, and the version that it had when it was kept.
class KeptTensor {
 public:
  KeptTensor() = default;
  explicit KeptTensor(at::Tensor tensor)
      : tensor_(std::move(tensor)), version_(has_version() ? tensor_._version() : 0) {}

  const at::Tensor& get() const { return tensor_; }
  bool is_unchanged() const { return !has_version() || tensor_._version() == version_; }

 private:
  bool has_version() const { return tensor_.defined() && !tensor_.is_inference(); }

  at::Tensor tensor_;
  int64_t version_ = 0;
};

struct KeptOperand {
  KeptTensor data, scale, amax;  // the last two undefined where the format has none
  KeptTensor row_index;          // Quantized::row_index
  std::string key;

  Quantized get() const {
    return {data.get(), scale.get(), amax.get(), {}, key, /*transposed=*/false, row_index.get()};
  }
  bool is_unchanged() const {
    return data.is_unchanged() && scale.is_unchanged() && amax.is_unchanged() && row_index.is_unchanged();
  }
  // Of the operand in elements: quantized data is stored transposed.
  int64_t columns() const { return data.get().size(scale.get().defined() ? -2 : -1); }
};

struct DeferredWgrad {
  KeptOperand grad, input;
  KeptTensor group_sizes;
  DeferOptions options;
};

// The backward of a GPU runs in a thread of autograd, hence the mutex.
class WgradQueues {
 public:
  static WgradQueues& instance();

  int64_t create();
  void release(int64_t id);
  bool contains(int64_t id);
  int64_t count(int64_t id);
  // `op`: for the error about an unknown id.
  void push(const char* op, int64_t id, DeferredWgrad&& wgrad);
  std::deque<DeferredWgrad> take_all(const char* op, int64_t id);
  // Puts back, at the front, what take_all() took.
  void put_back(int64_t id, std::deque<DeferredWgrad>&& wgrads);

 private:
  std::deque<DeferredWgrad>& find(const char* op, int64_t id);

  std::mutex mutex_;
  std::unordered_map<int64_t, std::deque<DeferredWgrad>> queues_;
  // Far from small numbers, so that one that is no id is noticed.
  int64_t next_ = int64_t{1} << 40;
};

}  // namespace transformer_plugin::linear

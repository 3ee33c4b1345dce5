// Checks of buffers that the caller passes to be written.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "common/check.h"

namespace transformer_plugin {

// "out[3]": the name of a list's entry.
std::string entry(const char* name, size_t index);

// Refuses a tensor that requires a gradient while gradients are recorded, or has a tangent: for arguments
// that are not differentiable and for buffers.
void check_no_gradient(const Argument& argument, const char* advice);
// The same for one or more buffers, which also must not be negative or conjugate views.
void check_written(const Argument& buffer);
void check_written(const char* op, const char* name, at::TensorList out);
// Tells autograd that the op wrote the buffer.
void mark_written(const at::Tensor& out);
// A tensor with the name that errors use, or none.
struct Named {
  const char* name;
  const at::Tensor* tensor;

  Named(const char* name, const at::Tensor& tensor)
      : name(name), tensor(tensor.defined() ? &tensor : nullptr) {}
  Named(const char* name, const std::optional<at::Tensor>& tensor)
      : name(name), tensor(tensor ? &*tensor : nullptr) {}
};
// Checks that each buffer overlaps neither another buffer nor a tensor that is read. A tensor without
// elements overlaps nothing; different columns of one matrix do not overlap.
void check_apart(const char* op, std::initializer_list<Named> written, std::initializer_list<Named> read);
// The same for the buffers of a list.
void check_apart(const char* op, const char* name, at::TensorList out, std::initializer_list<Named> read);

// The same for a call with several lists: its tensors by the names of their arguments.
class CallMemory {
 public:
  explicit CallMemory(const char* op) : op_(op) {}
  void read(const char* name, const at::Tensor& tensor) { add(name, tensor, false); }
  void read(const char* name, const std::optional<at::Tensor>& tensor) {
    if (tensor) add(name, *tensor, false);
  }
  void read(const char* name, const std::optional<at::TensorList>& tensors) { add(name, tensors, false); }
  // A list of one is named as if it were no list, as the weight of a layer is.
  void written(const char* name, const std::optional<at::TensorList>& tensors) { add(name, tensors, true); }
  void written_entries(const char* name, at::TensorList tensors);
  // Says nothing about tensors without memory, as a tracer has them.
  void check() const;

 private:
  struct Use {
    const char* name;
    int64_t index;  // in a list, or -1
    const at::Tensor* tensor;
    bool is_written;
    std::string text() const { return index < 0 ? std::string(name) : entry(name, index); }
  };
  void add(const char* name, const at::Tensor& tensor, bool is_written, int64_t index = -1);
  void add(const char* name, const std::optional<at::TensorList>& tensors, bool is_written);

  const char* op_;
  std::vector<Use> uses_;
};

}  // namespace transformer_plugin

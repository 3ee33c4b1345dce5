// Checks of buffers that the caller passes to be written.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>

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

}  // namespace transformer_plugin

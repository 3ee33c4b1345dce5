// What ops check of the buffers that a caller gives them to write into.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>

#include "common/check.h"

namespace transformer_plugin {

// "out[3]": of a list.
std::string entry(const char* name, size_t index);

// Where gradients are recorded, or in forward mode: for an argument that has none, or an op that writes into a buffer.
void check_no_gradient(const Argument& argument, const char* advice);
// The same of a buffer, and of those of a list; and its numbers are what lies in memory, not their negative or conjugate.
void check_written(const Argument& buffer);
void check_written(const char* op, const char* name, at::TensorList out);
// A tensor by the name that errors use, or none.
struct Named {
  const char* name;
  const at::Tensor* tensor;

  Named(const char* name, const at::Tensor& tensor)
      : name(name), tensor(tensor.defined() ? &tensor : nullptr) {}
  Named(const char* name, const std::optional<at::Tensor>& tensor)
      : name(name), tensor(tensor ? &*tensor : nullptr) {}
};
// The buffers of a call: each in other memory than what is read while it is written, and than the others. A tensor without
// elements has none. Different columns of one buffer are apart.
void check_apart(const char* op, std::initializer_list<Named> written, std::initializer_list<Named> read);
// The same of the buffers of a list.
void check_apart(const char* op, const char* name, at::TensorList out, std::initializer_list<Named> read);

}  // namespace transformer_plugin

// The error for None in place of a required tensor of a differentiable op.
#include "common/autograd.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>

#include "common/check.h"

namespace transformer_plugin {

void refuse_none(const char* op, size_t index) {
  const std::string name = std::string("transformer_plugin::") + op;
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
  const char* argument = "";
  for (const c10::Argument& own : handle.schema().arguments()) {
    if (own.type()->kind() != c10::TypeKind::TensorType) continue;
    argument = own.name().c_str();
    if (index-- == 0) break;
  }
  check_defined({op, argument, at::Tensor()});
  TORCH_INTERNAL_ASSERT(false, "a tensor that is not there is refused");
}

}  // namespace transformer_plugin

#include "common/op.h"

namespace transformer_plugin {

c10::OperatorHandle find_op(const char* name) {
  const std::string qualified = std::string("transformer_plugin::") + name;
  return c10::Dispatcher::singleton().findSchemaOrThrow(qualified.c_str(), "");
}

}  // namespace transformer_plugin

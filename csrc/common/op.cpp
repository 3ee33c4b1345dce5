#include "common/op.h"

namespace transformer_plugin {

c10::OperatorHandle find_op(const char* name) {
  const std::string qualified = std::string("transformer_plugin::") + name;
  const size_t dot = qualified.find('.');
  const std::string overload = dot == std::string::npos ? "" : qualified.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchemaOrThrow(qualified.substr(0, dot).c_str(), overload.c_str());
}

}  // namespace transformer_plugin

#include "distributed/subject.h"

namespace transformer_plugin::distributed {
namespace {

thread_local const Subject* innermost = nullptr;

}  // namespace

Subject::Subject(const std::string& text) : text_(text), outer_(innermost) { innermost = this; }

Subject::~Subject() { innermost = outer_; }

const std::string& Subject::current() {
  static const std::string none;
  return innermost ? innermost->text_ : none;
}

}  // namespace transformer_plugin::distributed

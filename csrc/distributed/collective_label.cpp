#include "distributed/collective_label.h"

namespace transformer_plugin::distributed {
namespace {

thread_local const CollectiveLabel* innermost = nullptr;

}  // namespace

CollectiveLabel::CollectiveLabel(const std::string& text) : text_(text), outer_(innermost) {
  innermost = this;
}

CollectiveLabel::~CollectiveLabel() { innermost = outer_; }

const std::string& CollectiveLabel::current() {
  static const std::string none;
  return innermost ? innermost->text_ : none;
}

}  // namespace transformer_plugin::distributed

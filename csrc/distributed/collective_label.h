// What the collectives are about that a thread starts, for errors: the name of a weight, for example.
#pragma once

#include <string>

namespace transformer_plugin::distributed {

// While it exists, collectives of this thread are about `text`, which the error of the watchdog then contains.
class CollectiveLabel {
 public:
  explicit CollectiveLabel(const std::string& text);
  ~CollectiveLabel();
  CollectiveLabel(const CollectiveLabel&) = delete;
  CollectiveLabel& operator=(const CollectiveLabel&) = delete;
  // The text of the innermost one; "" without one.
  static const std::string& current();

 private:
  const std::string& text_;
  const CollectiveLabel* outer_;
};

}  // namespace transformer_plugin::distributed

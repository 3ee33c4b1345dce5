// What the collectives are about that a thread starts, for errors: the name of a weight, for example.
#pragma once

#include <string>

namespace transformer_plugin::distributed {

// While it exists, collectives of this thread are about `text`, which the error of the watchdog then contains.
class Subject {
 public:
  explicit Subject(const std::string& text);
  ~Subject();
  Subject(const Subject&) = delete;
  Subject& operator=(const Subject&) = delete;
  // The text of the innermost one; "" without one.
  static const std::string& current();

 private:
  const std::string& text_;
  const Subject* outer_;
};

}  // namespace transformer_plugin::distributed

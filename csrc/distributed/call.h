// What a rank says of a call before any payload moves, so that ranks which make different calls raise one error
// instead of reading each other's bytes as something else.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "distributed/phase.h"

namespace transformer_plugin::expert_parallel {

// The fields of the header, in the order in which differences are reported.
enum class Field : int64_t {
  kOp,
  kDtype,
  kWidth,
  kTopk,
  kMaxTokens,
  kExperts,
  kCapacity,
  kAlignment,
  kRaise,
  kWeights,
  kForTokens,
  kForWeights,
  // These three differ from call to call and are no part of a signature. Which plan it is, counted in calls of
  // the group; 0 where that is not known, which fits any.
  kPlan,
  // The tokens of this rank and those that its plan was made for; -1: not known. They may differ between ranks.
  kTokens,
  kPlanned,
  kCount
};

// All numbers, -1 where the op has no such field, so that a header has one length whatever the call is.
class Call {
 public:
  static constexpr int64_t kFields = static_cast<int64_t>(Field::kCount);
  using Numbers = std::array<int64_t, kFields>;

  // `phase`: where this call first waits for the others; the op follows from it.
  explicit Call(Phase phase);
  // `argument`: the one that an error about this field names.
  Call& set(Field field, int64_t value, const char* argument);

  Phase phase() const { return phase_; }
  const Numbers& numbers() const { return numbers_; }
  // The fields that calls of one kind share.
  std::vector<int64_t> signature() const;
  // "dispatch with dtype float32, width 8".
  std::string text() const;

  // ValueError where the ranks' headers, kFields numbers for each, are not those of one call.
  void compare(const int64_t* headers, int64_t ranks, const std::string& group) const;

 private:
  std::string different_tokens(const int64_t* headers, int64_t ranks) const;

  Phase phase_;
  Numbers numbers_;
  std::array<const char*, kFields> arguments_{};
};

}  // namespace transformer_plugin::expert_parallel

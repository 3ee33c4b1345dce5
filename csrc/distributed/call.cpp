#include "distributed/call.h"

#include "common/check.h"

namespace transformer_plugin::expert_parallel {
namespace {

constexpr int64_t index(Field field) { return static_cast<int64_t>(field); }

const char* name_of(int64_t field) {
  switch (static_cast<Field>(field)) {
    case Field::kOp: return "op";
    case Field::kDtype: return "dtype";
    case Field::kWidth: return "width";
    case Field::kTopk: return "topk";
    case Field::kMaxTokens: return "max_tokens";
    case Field::kExperts: return "num_experts";
    case Field::kCapacity: return "capacity";
    case Field::kAlignment: return "alignment";
    case Field::kRaise: return "raise_on_overflow";
    case Field::kWeights: return "topk_weights";
    case Field::kForTokens: return "the gradient of the rows";
    case Field::kForWeights: return "the gradient of topk_weights";
    case Field::kPlan: return "the plan";
    default: return "tokens";
  }
}

std::string value_of(int64_t field, int64_t value) {
  switch (static_cast<Field>(field)) {
    case Field::kOp: return phase_name(static_cast<Phase>(value)).op;
    case Field::kDtype: return dtype_name(static_cast<at::ScalarType>(value));
    case Field::kRaise: return value ? "True" : "False";
    case Field::kWeights: return value ? "given" : "None";
    case Field::kForTokens:
    case Field::kForWeights: return value ? "wanted" : "not wanted";
    case Field::kPlan: return "that of call " + std::to_string(value) + " of the group";
    default: return std::to_string(value);
  }
}

std::string ranks_text(const std::vector<int64_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i ? "," : "") + std::to_string(ranks[i]);
  return text;
}

// "width is 8 on rank 0, 16 on ranks 1,2", or "" where the ranks that know have one value.
std::string difference(const int64_t* headers, int64_t ranks, int64_t field) {
  std::vector<std::pair<int64_t, std::vector<int64_t>>> groups;  // by value, in the order of the first rank
  for (int64_t r = 0; r < ranks; ++r) {
    const int64_t value = headers[r * Call::kFields + field];
    if (field == index(Field::kPlan) && value == 0) continue;
    auto group = groups.begin();
    while (group != groups.end() && group->first != value) ++group;
    if (group == groups.end()) group = groups.insert(group, {value, {}});
    group->second.push_back(r);
  }
  if (groups.size() < 2) return "";
  std::string text = std::string(name_of(field)) + " is ";
  for (size_t i = 0; i < groups.size(); ++i) {
    text += (i ? ", " : "") + value_of(field, groups[i].first) + " on " + ranks_text(groups[i].second);
  }
  return text;
}

}  // namespace

Call::Call(Phase phase) : phase_(phase) {
  numbers_.fill(-1);
  arguments_.fill("group_name");
  numbers_[index(Field::kOp)] = static_cast<int64_t>(phase);
  numbers_[index(Field::kPlan)] = 0;
}

Call& Call::set(Field field, int64_t value, const char* argument) {
  numbers_[index(field)] = value;
  arguments_[index(field)] = argument;
  return *this;
}

std::vector<int64_t> Call::signature() const {
  return {numbers_.begin(), numbers_.begin() + index(Field::kPlan)};
}

std::string Call::text() const {
  std::string text = std::string(phase_name(phase_).op) + " with ";
  bool first = true;
  for (int64_t field = index(Field::kDtype); field < index(Field::kPlan); ++field) {
    if (numbers_[field] < 0) continue;
    text += (first ? "" : ", ") + std::string(name_of(field)) + " " + value_of(field, numbers_[field]);
    first = false;
  }
  return text;
}

std::string Call::different_tokens(const int64_t* headers, int64_t ranks) const {
  std::string text;
  for (int64_t r = 0; r < ranks; ++r) {
    const int64_t tokens = headers[r * kFields + index(Field::kTokens)];
    const int64_t planned = headers[r * kFields + index(Field::kPlanned)];
    if (tokens < 0 || planned < 0 || tokens == planned) continue;
    text += (text.empty() ? "" : ", ") + std::to_string(tokens) + " on rank " + std::to_string(r) +
            ", whose plan has " + std::to_string(planned);
  }
  return text;
}

void Call::compare(const int64_t* headers, int64_t ranks, const std::string& group) const {
  const char* op = phase_name(phase_).op;
  std::string differences;
  const char* argument = nullptr;
  for (int64_t field = 0; field <= index(Field::kPlan); ++field) {
    const std::string text = difference(headers, ranks, field);
    if (text.empty()) continue;
    if (!argument) argument = arguments_[field];
    differences += (differences.empty() ? "" : "; ") + text;
    if (field == index(Field::kOp)) break;  // the fields of different ops are not to be compared
  }
  TP_CHECK_VALUE(differences.empty(), op, argument,
                 "the same call on all " << ranks << " ranks of group '" << group << "'",
                 "different ones: " << differences,
                 "Make the same calls in the same order, with the same constants, on every rank");
  const std::string tokens = different_tokens(headers, ranks);
  TP_CHECK_VALUE(tokens.empty(), op, "tokens", "the tokens that the plan was made for", tokens,
                 "Pass the plan of these tokens");
}

}  // namespace transformer_plugin::expert_parallel

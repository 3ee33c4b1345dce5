// Call headers: how they are printed and compared.
#include "distributed/call.h"

#include "common/check.h"

namespace transformer_plugin::distributed {
namespace {

// Every header begins with the id of the phase, printed as the op.
constexpr Field kOpField{0, "op", FieldKind::kNumber};

bool is_in_signature(const Field& field) {
  return field.kind != FieldKind::kPerCall && field.kind != FieldKind::kPerRank;
}

int64_t unknown_value(const Field& field) { return field.kind == FieldKind::kPerCall ? 0 : -1; }

std::string value_text(const Field& field, int64_t value) {
  if (field.index == kOpField.index) return find_phase(static_cast<int32_t>(value)).op;
  switch (field.kind) {
    case FieldKind::kDtype: return dtype_name(static_cast<at::ScalarType>(value));
    case FieldKind::kFlag: return value ? "True" : "False";
    case FieldKind::kGiven: return value ? "given" : "None";
    case FieldKind::kNeedsGrad: return value ? "needed" : "not needed";
    case FieldKind::kPerCall: return "that of call " + std::to_string(value) + " of the group";
    default: return std::to_string(value);
  }
}

std::string ranks_text(const std::vector<int64_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i ? "," : "") + std::to_string(ranks[i]);
  return text;
}

}  // namespace

Call::Call(const Phase& phase, std::span<const Field> fields, HeaderCheck check)
    : phase_(phase), fields_(fields), check_(check) {
  header_.fill(-1);
  arguments_.fill("group_name");
  header_[kOpField.index] = phase.id;
  for (const Field& field : fields_) header_[field.index] = unknown_value(field);
}

Call& Call::set(const Field& field, int64_t value, const char* argument) {
  header_[field.index] = value;
  arguments_[field.index] = argument;
  return *this;
}

std::vector<int64_t> Call::signature() const {
  std::vector<int64_t> numbers{header_[kOpField.index]};
  for (const Field& field : fields_) {
    if (is_in_signature(field)) numbers.push_back(header_[field.index]);
  }
  return numbers;
}

std::string Call::text() const {
  std::string text = std::string(phase_.op) + " with ";
  bool first = true;
  for (const Field& field : fields_) {
    const int64_t value = header_[field.index];
    if (!is_in_signature(field) || value < 0) continue;
    text += (first ? "" : ", ") + std::string(field.name) + " " + value_text(field, value);
    first = false;
  }
  return text;
}

std::string Call::difference(const int64_t* headers, int64_t ranks, const Field& field) const {
  // In the order of each value's first rank.
  std::vector<std::pair<int64_t, std::vector<int64_t>>> ranks_by_value;
  for (int64_t r = 0; r < ranks; ++r) {
    const int64_t value = headers[r * kHeaderLength + field.index];
    if (field.kind == FieldKind::kPerCall && value == unknown_value(field)) continue;
    auto entry = ranks_by_value.begin();
    while (entry != ranks_by_value.end() && entry->first != value) ++entry;
    if (entry == ranks_by_value.end()) entry = ranks_by_value.insert(entry, {value, {}});
    entry->second.push_back(r);
  }
  if (ranks_by_value.size() < 2) return "";
  std::string text = std::string(field.name) + " is ";
  for (size_t i = 0; i < ranks_by_value.size(); ++i) {
    const auto& [value, with_value] = ranks_by_value[i];
    text += (i ? ", " : "") + value_text(field, value) + " on " + ranks_text(with_value);
  }
  return text;
}

void Call::compare(const int64_t* headers, int64_t ranks, const std::string& group) const {
  std::string differences = difference(headers, ranks, kOpField);
  const char* argument = arguments_[kOpField.index];
  // Fields of different ops mean different things.
  const auto fields = differences.empty() ? fields_ : std::span<const Field>();
  for (const Field& field : fields) {
    if (field.kind == FieldKind::kPerRank) continue;
    const std::string text = difference(headers, ranks, field);
    if (text.empty()) continue;
    if (differences.empty()) argument = arguments_[field.index];
    differences += (differences.empty() ? "" : "; ") + text;
  }
  TP_CHECK_VALUE(differences.empty(), phase_.op, argument,
                 "the same call on all " << ranks << " ranks of group '" << group << "'",
                 "different ones: " << differences,
                 "Make the same calls in the same order, with the same constants, on every rank");
  if (check_) check_(*this, headers, ranks);
}

void Call::compare_signatures(std::vector<int64_t> headers, int64_t ranks, const std::string& group) const {
  for (const Field& field : fields_) {
    if (is_in_signature(field)) continue;
    for (int64_t r = 0; r < ranks; ++r) headers[r * kHeaderLength + field.index] = unknown_value(field);
  }
  compare(headers.data(), ranks, group);
}

}  // namespace transformer_plugin::distributed

// The header that describes a call. Ranks compare their headers before any payload moves, so that ranks which
// make different calls all raise an error and do not read each other's bytes as something else.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "distributed/phase.h"

namespace transformer_plugin::distributed {

// How a field is printed and compared.
enum class FieldKind : int32_t {
  // The same on all ranks, and the same in all calls of one kind: the fields of a call's signature.
  kNumber,
  kDtype,      // an at::ScalarType
  kFlag,       // printed as "True" or "False"
  kGiven,      // whether an optional argument is present: "given" or "None"
  kNeedsGrad,  // whether a gradient is computed: "needed" or "not needed"
  // Not part of the signature, because they differ from call to call.
  kPerCall,  // the number of the group's call that made what this one uses; 0: unknown, equal to any
  kPerRank,  // a size that may differ between ranks
};

// One field of a family's calls.
struct Field {
  int32_t index;  // position in the header, from 1 in steps of 1
  const char* name;
  FieldKind kind;
};

class Call;

// What a family checks of the headers of `ranks` ranks, Call::kHeaderLength numbers each, when all describe one call. It
// raises an error on every rank alike.
using HeaderCheck = void (*)(const Call& call, const int64_t* headers, int64_t ranks);

// The header of one call: the same count of numbers for every family. Number 0 is the id of the phase; the
// others are the fields of the family's table, -1 where the op has no such field.
class Call {
 public:
  // The length is fixed because on a CPU the header travels before the ranks know that they make the same
  // call.
  static constexpr int64_t kHeaderLength = 20;
  using Header = std::array<int64_t, kHeaderLength>;

  // `phase`: where this call first waits for the others; it also names the op. `fields`: the table of the
  // op's family, in the order in which errors report differences. It must be static. `check`: the family's own, or null.
  Call(const Phase& phase, std::span<const Field> fields, HeaderCheck check = nullptr);
  // `argument`: the argument of the op that an error about this field names.
  Call& set(const Field& field, int64_t value, const char* argument);

  const Phase& phase() const { return phase_; }
  const Header& header() const { return header_; }
  // The numbers that calls of one kind share.
  std::vector<int64_t> signature() const;
  // "dispatch with dtype float32, width 8".
  std::string text() const;

  // Raises ValueError if the headers of `ranks` ranks, kHeaderLength numbers each, do not describe one call.
  void compare(const int64_t* headers, int64_t ranks, const std::string& group) const;
  // The same for the signatures alone: the fields that differ from call to call are ignored.
  void compare_signatures(std::vector<int64_t> headers, int64_t ranks, const std::string& group) const;

 private:
  // "width is 8 on rank 0, 16 on ranks 1,2", or "" where all ranks have one value.
  std::string difference(const int64_t* headers, int64_t ranks, const Field& field) const;

  Phase phase_;
  std::span<const Field> fields_;
  HeaderCheck check_;
  Header header_;
  std::array<const char*, kHeaderLength> arguments_{};
};

// For a static_assert on a family's table: the fields are in the order of their positions and fit into a
// header.
constexpr bool is_field_table(std::span<const Field> fields) {
  for (size_t i = 0; i < fields.size(); ++i) {
    if (fields[i].index != static_cast<int32_t>(i) + 1) return false;
  }
  return fields.size() < static_cast<size_t>(Call::kHeaderLength);
}

}  // namespace transformer_plugin::distributed

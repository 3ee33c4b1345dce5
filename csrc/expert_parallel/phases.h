// The tables that expert parallelism supplies to csrc/distributed: the phases in which its ops wait for other
// ranks, and the fields of their call headers.
#pragma once

#include <iterator>

#include "distributed/call.h"

namespace transformer_plugin::expert_parallel {

using distributed::Call;
using distributed::Field;
using distributed::FieldKind;
using distributed::Phase;

namespace phases {

inline constexpr Phase kPlanIndices{100, "plan", "indices"};
inline constexpr Phase kDispatchTokens{101, "dispatch", "tokens"};
inline constexpr Phase kDispatchWeights{102, "dispatch", "weights"};
inline constexpr Phase kDispatchBackwardRows{103, "dispatch_backward", "rows"};
inline constexpr Phase kDispatchBackwardWeights{104, "dispatch_backward", "weights"};
inline constexpr Phase kCombineRows{105, "combine", "rows"};
inline constexpr Phase kCombineBackwardRows{106, "combine_backward", "gradients"};
inline constexpr Phase kCompactPlanIndices{107, "compact_plan", "indices"};
inline constexpr Phase kCompactPlanCounts{108, "compact_plan", "counts"};
inline constexpr Phase kCompactPlanSlots{109, "compact_plan", "slots"};

inline constexpr Phase kAll[] = {
    kPlanIndices, kDispatchTokens,      kDispatchWeights,    kDispatchBackwardRows, kDispatchBackwardWeights,
    kCombineRows, kCombineBackwardRows, kCompactPlanIndices, kCompactPlanCounts,    kCompactPlanSlots};

}  // namespace phases

namespace fields {

inline constexpr Field kDtype{1, "dtype", FieldKind::kDtype};  // of the payload
inline constexpr Field kWidth{2, "width", FieldKind::kNumber};
inline constexpr Field kTopk{3, "topk", FieldKind::kNumber};
inline constexpr Field kMaxTokens{4, "max_tokens", FieldKind::kNumber};
inline constexpr Field kExperts{5, "num_experts", FieldKind::kNumber};
inline constexpr Field kCapacity{6, "capacity", FieldKind::kNumber};
inline constexpr Field kAlignment{7, "alignment", FieldKind::kNumber};
inline constexpr Field kRaise{8, "raise_on_overflow", FieldKind::kFlag};
inline constexpr Field kWeights{9, "topk_weights", FieldKind::kGiven};
inline constexpr Field kRowsGradient{10, "the gradient of the rows", FieldKind::kNeedsGrad};
inline constexpr Field kWeightsGradient{11, "the gradient of topk_weights", FieldKind::kNeedsGrad};
inline constexpr Field kPlan{12, "the plan", FieldKind::kPerCall};
inline constexpr Field kTokens{13, "tokens", FieldKind::kPerRank};
// those that this rank's plan was made for
inline constexpr Field kPlannedTokens{14, "tokens", FieldKind::kPerRank};
inline constexpr Field kMaxReceived{15, "max_received_tokens", FieldKind::kNumber};

inline constexpr Field kRecords{16, "records", FieldKind::kFlag};

inline constexpr Field kAll[] = {kDtype,           kWidth,     kTopk,   kMaxTokens,     kExperts,
                                 kCapacity,        kAlignment, kRaise,  kWeights,       kRowsGradient,
                                 kWeightsGradient, kPlan,      kTokens, kPlannedTokens, kMaxReceived,
                                 kRecords};
static_assert(distributed::is_field_table(kAll), "fields are numbered from 1 and fit into a header");

}  // namespace fields

// Raises ValueError if a rank's tokens are not those that its plan was made for.
void check_planned_tokens(const Call& call, const int64_t* headers, int64_t ranks);

inline Call make_call(const Phase& phase) { return Call(phase, fields::kAll, check_planned_tokens); }

}  // namespace transformer_plugin::expert_parallel

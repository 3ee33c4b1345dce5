// The tables that tensor parallelism supplies to csrc/distributed: the phases in which its ops wait for other ranks, and the
// fields of their call headers.
#pragma once

#include "distributed/call.h"

namespace transformer_plugin::tensor_parallel {

using distributed::Call;
using distributed::Field;
using distributed::FieldKind;
using distributed::Phase;

namespace phases {

inline constexpr Phase kAllGather{200, "all_gather", "input"};
inline constexpr Phase kReduceScatter{201, "reduce_scatter", "input"};

inline constexpr Phase kAllGatherList{202, "all_gather_list_out", "input"};
inline constexpr Phase kReduceScatterOut{203, "reduce_scatter_out", "input"};

inline constexpr Phase kAllReduce{204, "all_reduce", "input"};
inline constexpr Phase kCrossEntropy{205, "vocab_parallel_cross_entropy", "input"};

inline constexpr Phase kStartAllGather{206, "start_all_gather", "input"};
inline constexpr Phase kStartReduceScatter{207, "start_reduce_scatter", "input"};

inline constexpr Phase kAll[] = {kAllGather, kReduceScatter, kAllGatherList,  kReduceScatterOut,
                                 kAllReduce, kCrossEntropy,  kStartAllGather, kStartReduceScatter};

}  // namespace phases

namespace fields {

inline constexpr Field kDtype{1, "dtype", FieldKind::kDtype};
inline constexpr Field kRows{2, "rows", FieldKind::kNumber};    // of the tensor's first dimension
inline constexpr Field kWidth{3, "width", FieldKind::kNumber};  // elements of one of them
inline constexpr Field kGradient{4, "the gradient", FieldKind::kNeedsGrad};
// of a list
inline constexpr Field kTensors{5, "tensors", FieldKind::kNumber};
inline constexpr Field kBytes{6, "bytes", FieldKind::kNumber};
inline constexpr Field kShapes{7, "checksum of dtypes and shapes", FieldKind::kNumber};
inline constexpr Field kWeight{8, "checksum of the weight's name and direction", FieldKind::kNumber};
// of a loss
inline constexpr Field kVocabulary{9, "vocabulary", FieldKind::kNumber};
inline constexpr Field kLossOptions{10, "checksum of label_smoothing and ignore_index", FieldKind::kNumber};

inline constexpr Field kAll[] = {kDtype, kRows,   kWidth,  kGradient,   kTensors,
                                 kBytes, kShapes, kWeight, kVocabulary, kLossOptions};
static_assert(distributed::is_field_table(kAll), "fields are numbered from 1 and fit into a header");

}  // namespace fields

}  // namespace transformer_plugin::tensor_parallel

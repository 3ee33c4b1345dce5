// The argument checks of every op, and the four-part error that they raise: op and argument, what was
// expected, what was passed, what to do.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <initializer_list>
#include <optional>
#include <sstream>
#include <string>

namespace transformer_plugin {

// ValueError: "transformer_plugin::<op>: <argument>: expected <expected>, got <got>. <advice>."
// `expected`, `got` and `advice` may be chains of <<, evaluated only if the check fails.
#define TP_CHECK_VALUE(condition, op, argument, expected, got, advice) \
  TORCH_CHECK_VALUE(condition, TP_FOUR_PARTS(op, argument, expected, got, advice))
// TypeError with the same text.
#define TP_CHECK_TYPE(condition, op, argument, expected, got, advice) \
  TORCH_CHECK_TYPE(condition, TP_FOUR_PARTS(op, argument, expected, got, advice))
#define TP_FOUR_PARTS(op, argument, expected, got, advice)                                           \
  [&] {                                                                                              \
    std::ostringstream text;                                                                         \
    text << "transformer_plugin::" << op << ": argument '" << argument << "': expected " << expected \
         << ", got " << got << ". " << advice << ".";                                                \
    return text.str();                                                                               \
  }()

// A tensor argument with the names that errors use.
struct Argument {
  const char* op;
  const char* name;
  const at::Tensor& tensor;
};

// "float32[3, 4] on cpu", also for symbolic sizes; or "None".
std::string describe(const at::Tensor& tensor);
std::string dtype_name(at::ScalarType dtype);

// Refuses None. The checks below do so too, for their first argument.
void check_defined(const Argument& argument);
// Whether the tensor has data in memory: not on meta, and not a wrapper of tracing or of a function
// transform, which an Autograd kernel may get.
bool has_memory(const at::Tensor& tensor);
// Whether a tracer sees what is called with the tensor: a FakeTensor, or one of functionalization.
bool is_traced(const at::Tensor& tensor);
// Refuses nested, sparse and torch-quantized tensors. check_dtype does so too.
void check_strided(const Argument& argument);
void check_dtype(const Argument& argument, std::initializer_list<at::ScalarType> allowed);
void check_dim(const Argument& argument, int64_t dim);
// The size of dimension `dim` must equal `expected`; `meaning` explains it in the error ("the rows of
// 'input'").
void check_size(const Argument& argument, int64_t dim, const c10::SymInt& expected, const char* meaning);
void check_same_device(const Argument& argument, const Argument& other);
void check_same_dtype(const Argument& argument, const Argument& other);
void check_contiguous(const Argument& argument);
// int32 or int64 [G] on the device of `data`, contiguous.
void check_group_sizes(const Argument& group_sizes, const Argument& data);

inline constexpr std::initializer_list<at::ScalarType> kFloatTypes = {at::kFloat, at::kBFloat16, at::kHalf};

}  // namespace transformer_plugin

// The checks every op makes at its door, and the four-part error they raise:
// op and argument, what was expected, what came, what to do.
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
// `expected`, `got` and `advice` may be chains of <<, put together only when the check fails.
#define TP_CHECK_VALUE(condition, op, argument, expected, got, advice) \
  TORCH_CHECK_VALUE(condition, TP_FOUR_PARTS(op, argument, expected, got, advice))
// TypeError, in the same words.
#define TP_CHECK_TYPE(condition, op, argument, expected, got, advice) \
  TORCH_CHECK_TYPE(condition, TP_FOUR_PARTS(op, argument, expected, got, advice))
#define TP_FOUR_PARTS(op, argument, expected, got, advice)                                           \
  [&] {                                                                                              \
    std::ostringstream text;                                                                         \
    text << "transformer_plugin::" << op << ": argument '" << argument << "': expected " << expected \
         << ", got " << got << ". " << advice << ".";                                                \
    return text.str();                                                                               \
  }()

// A tensor argument with the names that its errors use.
struct Argument {
  const char* op;
  const char* name;
  const at::Tensor& tensor;
};

// "float32[3, 4] on cpu", also for symbolic sizes; "None".
std::string describe(const at::Tensor& tensor);
std::string dtype_name(at::ScalarType dtype);

// Not Python's None. The checks below do so too, of their first argument.
void check_defined(const Argument& argument);
// Whether the tensor has numbers that can be read: not on meta, and none of the stand-ins of a trace or a transform, which an
// Autograd kernel gets too.
bool has_memory(const at::Tensor& tensor);
// Neither nested, nor sparse, nor quantized by torch. check_dtype asks too.
void check_strided(const Argument& argument);
void check_dtype(const Argument& argument, std::initializer_list<at::ScalarType> allowed);
void check_dim(const Argument& argument, int64_t dim);
// `size` of dimension `dim` must equal `expected`, which is `meaning` in the error ("the rows of 'input'").
void check_size(const Argument& argument, int64_t dim, const c10::SymInt& expected, const char* meaning);
void check_same_device(const Argument& argument, const Argument& other);
void check_same_dtype(const Argument& argument, const Argument& other);
void check_contiguous(const Argument& argument);
// int32 or int64 [G] on the device of `data`, contiguous.
void check_group_sizes(const Argument& group_sizes, const Argument& data);

inline constexpr std::initializer_list<at::ScalarType> kFloatTypes = {at::kFloat, at::kBFloat16, at::kHalf};

}  // namespace transformer_plugin

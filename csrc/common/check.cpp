// Argument checks of ops (common/check.h).
#include "common/check.h"

#include <sstream>

namespace transformer_plugin {

std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return "float32";
    case at::kDouble: return "float64";
    case at::kHalf: return "float16";
    case at::kBFloat16: return "bfloat16";
    case at::kFloat8_e4m3fn: return "float8_e4m3fn";
    case at::kFloat8_e5m2: return "float8_e5m2";
    case at::kFloat8_e8m0fnu: return "float8_e8m0fnu";
    case at::kFloat4_e2m1fn_x2: return "float4_e2m1fn_x2";
    case at::kByte: return "uint8";
    case at::kChar: return "int8";
    case at::kInt: return "int32";
    case at::kLong: return "int64";
    case at::kBool: return "bool";
    default: return c10::toString(dtype);
  }
}

std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "None";
  std::ostringstream text;
  text << dtype_name(tensor.scalar_type()) << tensor.sym_sizes() << " on " << tensor.device();
  return text.str();
}

void check_defined(const Argument& argument) {
  TP_CHECK_TYPE(argument.tensor.defined(), argument.op, argument.name, "a tensor", "None",
                "It cannot be left out");
}

bool has_memory(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet stand_ins({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                           c10::DispatchKey::FuncTorchBatched,
                                           c10::DispatchKey::FuncTorchGradWrapper});
  return tensor.defined() && !tensor.is_meta() && !tensor.key_set().has_any(stand_ins);
}

bool is_traced(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kTraced({c10::DispatchKey::Python, c10::DispatchKey::Functionalize});
  return tensor.key_set().has_any(kTraced);
}

void check_strided(const Argument& argument) {
  const at::Tensor& tensor = argument.tensor;
  if (tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_quantized()) return;
  std::ostringstream kind;
  const char* advice = "Convert it with .to_dense() first";
  if (tensor.is_nested()) {
    kind << "a nested tensor";
    advice =
        "Pass its rows as one tensor, .values() of a jagged one, and to grouped ops their numbers as group_sizes";
  } else if (tensor.is_quantized()) {
    kind << "a tensor that torch quantized, " << tensor.scalar_type();
    advice = "Convert it with .dequantize() first";
  } else {
    kind << "one of layout " << tensor.layout();
  }
  TP_CHECK_TYPE(false, argument.op, argument.name, "a tensor whose numbers lie in memory by strides",
                kind.str(), advice);
}

void check_dtype(const Argument& argument, std::initializer_list<at::ScalarType> allowed) {
  for (const auto dtype : allowed) {
    if (argument.tensor.scalar_type() == dtype) return check_strided(argument);
  }
  check_defined(argument);
  check_strided(argument);
  std::string names;
  for (const auto dtype : allowed) names += (names.empty() ? "" : ", ") + dtype_name(dtype);
  TP_CHECK_TYPE(false, argument.op, argument.name, "one of the dtypes " + names,
                dtype_name(argument.tensor.scalar_type()), "Convert it with .to() first");
}

void check_dim(const Argument& argument, int64_t dim) {
  check_defined(argument);
  TP_CHECK_VALUE(argument.tensor.dim() == dim, argument.op, argument.name, dim << " dimensions",
                 describe(argument.tensor), "Reshape it first");
}

void check_size(const Argument& argument, int64_t dim, const c10::SymInt& expected, const char* meaning) {
  TP_CHECK_VALUE(argument.tensor.sym_size(dim) == expected, argument.op, argument.name,
                 "size " << expected << " in dimension " << dim << " (" << meaning << ")",
                 describe(argument.tensor), "Pass tensors whose sizes agree");
}

void check_same_device(const Argument& argument, const Argument& other) {
  check_defined(argument);
  TP_CHECK_VALUE(argument.tensor.device() == other.tensor.device(), argument.op, argument.name,
                 "a tensor on " << other.tensor.device() << ", like " << other.name,
                 describe(argument.tensor), "Move it with .to(\"" << other.tensor.device() << "\") first");
}

void check_same_dtype(const Argument& argument, const Argument& other) {
  check_defined(argument);
  TP_CHECK_TYPE(argument.tensor.scalar_type() == other.tensor.scalar_type(), argument.op, argument.name,
                dtype_name(other.tensor.scalar_type()) << ", like " << other.name,
                dtype_name(argument.tensor.scalar_type()), "Convert one of them with .to() first");
}

void check_contiguous(const Argument& argument) {
  TP_CHECK_VALUE(argument.tensor.is_contiguous(), argument.op, argument.name, "a contiguous tensor",
                 describe(argument.tensor) << " with strides " << argument.tensor.sym_strides(),
                 "Call .contiguous() on it first");
}

namespace {

// Kernels count groups, and multiples of them, in 32 bits.
constexpr int64_t kMostGroups = int64_t{1} << 24;

}  // namespace

void check_group_sizes(const Argument& group_sizes, const Argument& data) {
  check_dtype(group_sizes, {at::kInt, at::kLong});
  check_dim(group_sizes, 1);
  check_same_device(group_sizes, data);
  check_contiguous(group_sizes);
  const auto groups = group_sizes.tensor.sym_size(0).maybe_as_int();
  TP_CHECK_VALUE(!groups || *groups <= kMostGroups, group_sizes.op, group_sizes.name,
                 "at most " << kMostGroups << " groups", describe(group_sizes.tensor), "Split the call");
}

}  // namespace transformer_plugin

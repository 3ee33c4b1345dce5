// Handles of our ops, through which C++ calls them by the dispatcher, so that compilers, fake tensors and counters of FLOPs see
// the calls. The handle of each is in common/ops/, written from its schema by build_tools/op_handles.py.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/tensor.h"

namespace transformer_plugin {

// A string as an argument of a template, to which a literal converts.
template <size_t size>
struct OpName {
  char text[size];
  constexpr OpName(const char (&literal)[size]) { std::copy_n(literal, size, text); }
};

// The op of this name of the library; of an overload "linear.scaled".
c10::OperatorHandle find_op(const char* name);

// `ops::activation(x, probs, sizes)` calls the op, `ops::linear_scaled` the overload linear.scaled. `Signature` is a function type, as the dispatcher passes the schema's types.
template <OpName op_name, typename Signature>
struct Op;

template <OpName op_name, typename Result, typename... Arguments>
struct Op<op_name, Result(Arguments...)> {
  using Schema = Result(Arguments...);
  static constexpr const char* name = op_name.text;

  Result operator()(Arguments... arguments) const {
    static const auto handle = find_op(name).template typed<Schema>();
    return handle.call(std::forward<Arguments>(arguments)...);
  }
};

// Names in the headers of common/ops/.
namespace ops {
using at::ScalarType;
using at::Tensor;
using at::TensorList;
using c10::SymInt;
}  // namespace ops

// Whether a kernel takes what the schema says: the same types, but where no size is symbolic an int64_t for a SymInt.
template <typename Given, typename Wanted>
constexpr bool is_argument_of = std::is_same_v<Given, Wanted>;
template <>
inline constexpr bool is_argument_of<int64_t, c10::SymInt> = true;
template <>
inline constexpr bool is_argument_of<std::optional<int64_t>, std::optional<c10::SymInt>> = true;

template <typename Kernel, typename Schema>
constexpr bool is_kernel_of = false;
template <typename Result, typename... Given, typename... Wanted>
  requires(sizeof...(Given) == sizeof...(Wanted))
constexpr bool is_kernel_of<Result (*)(Given...), Result(Wanted...)> = (is_argument_of<Given, Wanted> && ...);

// The kernel, which is compared with the schema of the op.
template <typename OpHandle, typename Kernel>
constexpr Kernel checked_kernel(const OpHandle&, Kernel kernel) {
  static_assert(is_kernel_of<Kernel, typename OpHandle::Schema>,
                "the types of the kernel are not those of the schema in registration.cpp");
  return kernel;
}

}  // namespace transformer_plugin

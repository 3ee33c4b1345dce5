// Dispatch kernels for nested, sparse, quantized, negative and conjugate tensors (common/unsupported_layouts.h).
#include "common/unsupported_layouts.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/resolve_conj.h>
#include <ATen/ops/resolve_neg.h>

#include <algorithm>

#include "common/buffers.h"

namespace transformer_plugin {
namespace {

using c10::DispatchKey;
using c10::IValue;
using torch::jit::Stack;

constexpr const char* kNamespace = "transformer_plugin::";

std::string own_name(const c10::FunctionSchema& schema) {
  return schema.name().substr(std::string_view(kNamespace).size());
}

bool takes_tensor(const c10::Argument& argument) {
  return argument.type()->isSubtypeOf(*c10::TensorType::get());
}
bool takes_list(const c10::Argument& argument) {
  return argument.type()->isSubtypeOf(*c10::ListType::ofTensors());
}
// By the op, or by its backward: of a resolved copy the caller would see nothing.
bool is_written(const c10::Argument& argument) {
  const std::string_view name = argument.name();
  const auto ends_with = [&](std::string_view end) {
    return name.size() >= end.size() && name.substr(name.size() - end.size()) == end;
  };
  const bool by_backward = ends_with("main_grad") || ends_with("dgrad_out");
  return by_backward || (argument.alias_info() != nullptr && argument.alias_info()->isWrite());
}
bool is_resolved(const at::Tensor& tensor) { return !tensor.is_neg() && !tensor.is_conj(); }

// Calls use(name, tensor) for every tensor of an argument.
template <typename Use>
void for_each_tensor(const c10::Argument& argument, const IValue& value, Use&& use) {
  if (value.isTensor()) use(argument.name(), value.toTensor());
  if (!value.isTensorList()) return;
  const c10::List<at::Tensor> list = value.toTensorList();
  for (size_t i = 0; i < list.size(); ++i) use(entry(argument.name().c_str(), i), list.get(i));
}

// Called for the dispatch keys of nested, sparse and quantized tensors.
void refuse_others(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const std::string name = own_name(schema);
  const auto values = torch::jit::last(*stack, schema.arguments().size());
  for (size_t i = 0; i < values.size(); ++i) {
    for_each_tensor(schema.arguments()[i], values[i],
                    [&](const std::string& argument, const at::Tensor& tensor) {
                      if (tensor.defined()) check_strided({name.c_str(), argument.c_str(), tensor});
                    });
  }
  TORCH_INTERNAL_ASSERT(false, "a tensor with such a key is one of those");
}

IValue resolved(const at::Tensor& tensor) { return tensor.resolve_conj().resolve_neg(); }

template <DispatchKey key>
void resolve(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const std::string name = own_name(schema);
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  for (size_t i = 0; i < count; ++i) {
    if (!is_written(schema.arguments()[i])) continue;
    for_each_tensor(schema.arguments()[i], (*stack)[first + i],
                    [&](const std::string& argument, const at::Tensor& tensor) {
                      check_written({name.c_str(), argument.c_str(), tensor});
                    });
  }
  for (size_t i = 0; i < count; ++i) {
    for_each_tensor(schema.arguments()[i], (*stack)[first + i],
                    [&](const std::string& argument, const at::Tensor& tensor) {
                      const bool is_code = tensor.element_size() == 1 && tensor.is_floating_point();
                      TP_CHECK_VALUE(!tensor.is_neg() || !is_code, name, argument,
                                     "quantized values without a lazy negation", "a view of their negatives",
                                     "Quantize the negative values instead");
                    });
    IValue& value = (*stack)[first + i];
    if (value.isTensor() && !is_resolved(value.toTensor())) value = resolved(value.toTensor());
    if (!value.isTensorList()) continue;
    const c10::List<at::Tensor> given = value.toTensorList();
    c10::List<at::Tensor> list;
    bool is_same = true;
    for (size_t j = 0; j < given.size(); ++j) {
      const at::Tensor tensor = given.get(j);
      is_same = is_same && is_resolved(tensor);
      list.push_back(tensor.resolve_conj().resolve_neg());
    }
    if (!is_same) value = list;
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key), stack);
}

constexpr DispatchKey kRefused[] = {
    DispatchKey::AutogradNestedTensor, DispatchKey::NestedTensorCPU, DispatchKey::NestedTensorCUDA,
    DispatchKey::NestedTensorMeta,     DispatchKey::SparseCPU,       DispatchKey::SparseCUDA,
    DispatchKey::SparseMeta,           DispatchKey::SparseCsrCPU,    DispatchKey::SparseCsrCUDA,
    DispatchKey::SparseCsrMeta,        DispatchKey::QuantizedCPU,    DispatchKey::QuantizedCUDA,
    DispatchKey::QuantizedMeta,        DispatchKey::MkldnnCPU,
};

}  // namespace

void register_unsupported_layouts(torch::Library& library) {
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) {
    if (op.name.rfind(kNamespace, 0) != 0) continue;
    const auto handle = c10::Dispatcher::singleton().findSchema(op);
    if (!handle) continue;
    const auto& arguments = handle->schema().arguments();
    const bool has_tensors = std::any_of(
        arguments.begin(), arguments.end(),
        [](const c10::Argument& argument) { return takes_tensor(argument) || takes_list(argument); });
    if (!has_tensors) continue;
    std::string name = own_name(handle->schema());
    if (!op.overload_name.empty()) name += "." + op.overload_name;
    for (const DispatchKey key : kRefused) {
      library.impl(name.c_str(),
                   torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<&refuse_others>()));
    }
    library.impl(
        name.c_str(),
        torch::dispatch(DispatchKey::Negative,
                        torch::CppFunction::makeFromBoxedFunction<&resolve<DispatchKey::Negative>>()));
    library.impl(
        name.c_str(),
        torch::dispatch(DispatchKey::Conjugate,
                        torch::CppFunction::makeFromBoxedFunction<&resolve<DispatchKey::Conjugate>>()));
  }
}

}  // namespace transformer_plugin

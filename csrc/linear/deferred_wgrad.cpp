// defer_wgrad keeps the operands of a weight gradient, run_deferred_wgrads computes the gradients of all that
// are kept.
#include "linear/deferred_wgrad.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "common/autograd.h"
#include "common/buffers.h"
#include "common/ops/linear.h"
#include "common/register.h"
#include "common/row_index.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/dispatch/quantized_operands.h"
#include "linear/deferred_wgrad_queue.h"
#include "linear/main_grad.h"
#include "linear/products.h"

namespace transformer_plugin::linear {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

namespace {

constexpr const char *kDefer = "defer_wgrad", *kRun = "run_deferred_wgrads";

int64_t id_of(const Tensor& queue) { return *queue.const_data_ptr<int64_t>(); }

// Without its value, which a tracer's tensor has not: in Meta kernels that is on meta, as the data.
void check_queue_tensor(const Argument& queue, const Tensor& data) {
  check_dtype(queue, {at::kLong});
  check_dim(queue, 0);
  const bool is_traced = queue.tensor.is_meta() && data.defined() && data.is_meta();
  TP_CHECK_VALUE(queue.tensor.is_cpu() || is_traced, queue.op, queue.name, "a tensor on the CPU",
                 describe(queue.tensor), "Pass what new_wgrad_queue() returned");
}

bool contains(at::IntArrayRef values, size_t value) {
  return std::find(values.begin(), values.end(), static_cast<int64_t>(value)) != values.end();
}

}  // namespace

void check_wgrad_queue(const char* op, const char* name, const OptionalTensor& queue, const Tensor& data) {
  if (!queue) return;
  check_queue_tensor({op, name, *queue}, data);
  if (!has_memory(*queue)) return;
  TP_CHECK_VALUE(WgradQueues::instance().contains(id_of(*queue)), op, name,
                 "the id of a queue that new_wgrad_queue() made and nobody released", id_of(*queue),
                 "Make a queue, and keep it while a layer uses it");
}

std::vector<Tensor> replaced_buffers(at::TensorList buffers, at::IntArrayRef skipped) {
  if (skipped.empty()) return buffers.vec();
  std::vector<Tensor> result = buffers.size() == 1 ? buffers[0].unbind() : buffers.vec();
  for (size_t i = 0; i < result.size(); ++i) {
    if (!contains(skipped, i)) continue;
    const Tensor& kept = result[i];
    result[i] = at::empty_strided_symint(kept.sym_sizes(), kept.sym_strides(), kept.options());
  }
  return result;
}

namespace {

std::vector<Tensor> scales_of(const Quantized& operand) {
  std::vector<Tensor> scales;
  if (operand.scale.defined()) scales.push_back(as_traceable(operand).scale);
  if (operand.amax.defined()) scales.push_back(operand.amax);
  return scales;
}

}  // namespace

// Inductor reuses the memory of a tensor after the last op that it sees read it, so what it makes is copied.
void call_defer_wgrad(const Tensor& queue, const Quantized& grad, const Quantized& input,
                      const OptionalTensor& group_sizes, const DeferOptions& options) {
  const std::vector<Tensor> grad_scale = scales_of(grad), input_scale = scales_of(input);
  const bool scaled = !grad_scale.empty();
  const auto list = [&](const std::vector<Tensor>& scales) {
    return scaled ? OptionalList(at::TensorList(scales)) : std::nullopt;
  };
  ops::defer_wgrad(queue, grad.data, input.data, group_sizes, list(grad_scale), list(input_scale),
                   scaled ? grad.key : "none", scaled ? input.key : "none", options.dtype, options.accumulate,
                   options.skipped, options.launch.max_sms, options.launch.expected_rows, is_traced(queue),
                   as_optional(input.row_index), as_optional(grad.row_index));
}

namespace {

struct Deferred {
  const Tensor &queue, &grad, &input;
  const OptionalTensor &group_sizes, &input_rows, &grad_rows;
  OptionalList grad_scale, input_scale;
  std::string_view grad_format, input_format;
  at::IntArrayRef skipped;
  gemm::LaunchOptions launch;
};

// The rows of an operand: of the matrix, or those that an index names.
Argument rows_of(const Argument& operand, const char* name, const OptionalTensor& index) {
  if (!index) return operand;
  const Argument argument{kDefer, name, *index};
  check_row_index(argument, operand);
  return argument;
}

// What the product will refuse, which is too late: the operands would stay in the queue.
void check_operands(const Deferred& call) {
  const Argument grad{kDefer, "grad", call.grad}, input{kDefer, "input", call.input};
  if (!gemm::is_quantized(call.grad_format, call.input_format)) {
    gemm::check_plain(kDefer, call.grad_scale, call.input_scale, "grad_scale", "input_scale");
    call.group_sizes ? gemm::check_grouped_operand(grad, 2) : gemm::check_operand(grad, 2);
    gemm::check_pair(input, grad, 2);
    const Argument grad_rows = rows_of(grad, "grad_rows", call.grad_rows);
    const std::string meaning = std::string("the rows of '") + grad_rows.name + "'";
    check_size(rows_of(input, "input_rows", call.input_rows), 0, grad_rows.tensor.sym_size(0),
               meaning.c_str());
    if (call.group_sizes) check_group_sizes({kDefer, "group_sizes", *call.group_sizes}, grad);
    TP_CHECK_VALUE(call.group_sizes || !(call.input_rows || call.grad_rows), kDefer, "group_sizes",
                   "sizes of groups with an index of rows", "None", "Pass the sizes, or copied rows");
    return;
  }
  const bool has_input_rows = call.input_rows.has_value();
  const OptionalTensor& rows = has_input_rows ? call.input_rows : call.grad_rows;
  TP_CHECK_VALUE(!rows, kDefer, (has_input_rows ? "input_rows" : "grad_rows"), "None with quantized operands",
                 describe(*rows), "Quantize the rows that the index names");
  const gemm::OperandArguments of_grad{call.grad, call.grad_scale, call.grad_format};
  const gemm::OperandArguments of_input{call.input, call.input_scale, call.input_format};
  if (call.group_sizes) {
    gemm::checked_wgrad_operands(kDefer, of_grad, of_input, *call.group_sizes);
    return;
  }
  const gemm::OperandNames grad_names = gemm::names_of_grad(kDefer),
                           input_names = gemm::names_of_input(kDefer);
  const Quantized a = gemm::checked_operand(grad_names, of_grad, 2, nullptr, false);
  const Quantized b = gemm::checked_operand(input_names, of_input, 2, nullptr, false);
  check_same_device(input, grad);
  gemm::check_formats(grad_names, a, input_names, b, true);
  gemm::check_value_size(input_names, b, 1, a.columns(), "the rows of 'grad', summed over");
}

void check_deferred(const Deferred& call) {
  const Argument grad{kDefer, "grad", call.grad}, input{kDefer, "input", call.input};
  check_queue_tensor({kDefer, "queue", call.queue}, call.grad);
  check_strided(grad);
  check_strided(input);
  check_operands(call);
  gemm::check_launch_options(kDefer, call.launch);
  for (const int64_t matrix : call.skipped) {
    TP_CHECK_VALUE(call.group_sizes && matrix >= 0 && matrix < call.group_sizes->sym_size(0), kDefer,
                   "skipped", "numbers of groups", matrix, "Pass numbers from 0 to G - 1, with group_sizes");
  }
  for (const auto& [name, scales] :
       {std::pair{"grad_scale", call.grad_scale}, std::pair{"input_scale", call.input_scale}}) {
    for (const Tensor& scale : list_or_none(scales)) {
      check_strided({kDefer, name, scale});
      check_same_device({kDefer, name, scale}, grad);
    }
  }
  CallMemory memory(kDefer);
  memory.written("queue", at::TensorList(call.queue));
  memory.read("grad", call.grad);
  memory.read("input", call.input);
  memory.read("group_sizes", call.group_sizes);
  memory.read("input_rows", call.input_rows);
  memory.read("grad_rows", call.grad_rows);
  memory.read("grad_scale", call.grad_scale);
  memory.read("input_scale", call.input_scale);
  memory.check();
}

// The tensor of the caller, who may empty his own (linear/saved_tensor_release.h) but not change the values.
Tensor shared(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  const auto& impl = tensor.unsafeGetTensorImpl();
  return Tensor(impl->shallow_copy_and_detach(impl->version_counter(), false));
}

KeptTensor kept(const Tensor& tensor, bool copy) {
  return KeptTensor(copy ? tensor.clone() : shared(tensor));
}

KeptOperand kept_operand(const Tensor& data, OptionalList scales, const OptionalTensor& rows,
                         std::string_view key, bool copy) {
  const auto keep = [&](const Tensor& tensor) { return kept(tensor, copy); };
  const at::TensorList list = list_or_none(scales);
  return {keep(data), list.empty() ? KeptTensor() : keep(list[0]),
          list.size() < 2 ? KeptTensor() : keep(list[1]), rows ? keep(*rows) : KeptTensor(),
          std::string(key)};
}

template <bool is_meta>
void defer_wgrad(const Tensor& queue, const Tensor& grad, const Tensor& input,
                 const OptionalTensor& group_sizes, OptionalList grad_scale, OptionalList input_scale,
                 std::string_view grad_format, std::string_view input_format,
                 std::optional<at::ScalarType> dtype, bool accumulate, at::IntArrayRef skipped,
                 int64_t max_sms, int64_t expected_rows, bool copy, const OptionalTensor& input_rows,
                 const OptionalTensor& grad_rows) {
  const gemm::LaunchOptions launch{max_sms, expected_rows};
  check_deferred({queue, grad, input, group_sizes, input_rows, grad_rows, grad_scale, input_scale,
                  grad_format, input_format, skipped, launch});
  if constexpr (!is_meta) {
    const BelowAutograd guard;
    DeferredWgrad wgrad{kept_operand(grad, grad_scale, grad_rows, grad_format, copy),
                        kept_operand(input, input_scale, input_rows, input_format, copy),
                        KeptTensor(),
                        {dtype, accumulate, skipped.vec(), launch}};
    // The tensor itself, so that autograd, which makes a .grad of a gradient that nobody else has and adds to it
    // later, copies it. A view of the gradient that reaches a leaf is not noticed: see is_unchanged.
    if (!copy) wgrad.grad.data = KeptTensor(grad);
    if (group_sizes) wgrad.group_sizes = kept(*group_sizes, copy);
    WgradQueues::instance().push(kDefer, id_of(queue), std::move(wgrad));
  }
}

// Refuses buffers that the products would refuse, before anything is written.
void check_buffers(const DeferredWgrad& wgrad, at::TensorList out) {
  if (wgrad.options.dtype) return;  // the product has a tensor of its own, which is then added
  const Argument operand{kRun, "queue", wgrad.grad.data.get()};
  const c10::SymInt rows(wgrad.grad.columns()), columns(wgrad.input.columns());
  const Tensor& sizes = wgrad.group_sizes.get();
  if (!sizes.defined()) {
    gemm::check_result({kRun, "out", out[0]}, operand, rows, columns);
  } else if (gemm::is_stack(out)) {
    const std::vector<c10::SymInt> stack{c10::SymInt(sizes.size(0)), rows, columns};
    gemm::check_accumulator({kRun, "out", out[0]}, operand, stack);
  } else {
    const std::vector<c10::SymInt> matrix{rows, columns};
    gemm::check_accumulators(kRun, "out", out, operand, matrix);
  }
}

void check_memory(const std::deque<DeferredWgrad>& wgrads, at::TensorList out) {
  CallMemory memory(kRun);
  memory.written("out", out);
  for (const DeferredWgrad& wgrad : wgrads) {
    memory.read("the gradient in the queue", wgrad.grad.data.get());
    memory.read("the input in the queue", wgrad.input.data.get());
    memory.read("the group sizes in the queue", wgrad.group_sizes.get());
    for (const KeptOperand* operand : {&wgrad.grad, &wgrad.input}) {
      memory.read("scales in the queue", operand->scale.get());
      memory.read("amaxes in the queue", operand->amax.get());
      memory.read("an index in the queue", operand->row_index.get());
    }
  }
  memory.check();
}

// Refuses what does not fit, before anything is written.
void check_fits(const DeferredWgrad& wgrad, at::TensorList out) {
  const Tensor& sizes = wgrad.group_sizes.get();
  const int64_t groups = sizes.defined() ? sizes.size(0) : 1;
  const std::vector<int64_t> matrix{wgrad.grad.columns(), wgrad.input.columns()};
  std::vector<int64_t> stack = matrix;
  stack.insert(stack.begin(), groups);
  const bool fits_alone = out.size() == 1 && (out[0].sizes() == at::IntArrayRef(stack) ||
                                              (groups == 1 && out[0].sizes() == at::IntArrayRef(matrix)));
  const bool fits_each = static_cast<int64_t>(out.size()) == groups &&
                         std::all_of(out.begin(), out.end(), [&](const Tensor& buffer) {
                           return buffer.sizes() == at::IntArrayRef(matrix);
                         });
  TP_CHECK_VALUE(fits_alone || fits_each, kRun, "out",
                 "one tensor of the sizes " << at::IntArrayRef(stack) << ", or " << groups << " of the sizes "
                                            << at::IntArrayRef(matrix),
                 out.size() << " tensors, the first " << describe(out[0]),
                 "Pass buffers of the sizes of the weight");
  const at::Device device = wgrad.grad.data.get().device();
  TP_CHECK_VALUE(out[0].device() == device, kRun, "out", "tensors on " << device << ", as the operands",
                 describe(out[0]), "Call it before the layer moves");
  TP_CHECK_VALUE(
      wgrad.grad.is_unchanged() && wgrad.input.is_unchanged() && wgrad.group_sizes.is_unchanged(), kRun,
      "queue", "operands as they were in the backward",
      "one that was changed in place since (the input of the layer, the gradient of its output or the "
      "group sizes)",
      "Change a copy of it, or compute the weight gradients first");
  check_buffers(wgrad, out);
}

// The allocator must not reuse the operands while another stream than theirs reads them.
void record_stream(const KeptTensor& kept) {
  const Tensor& tensor = kept.get();
  if (!tensor.defined() || !tensor.is_cuda()) return;
  Tensor(tensor).record_stream(
      c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()));
}

void add_rounded(const Tensor& wgrad, at::TensorList out, bool accumulate, at::IntArrayRef skipped) {
  const bool alone = out.size() == 1 && skipped.empty();
  const std::vector<Tensor> buffers = out.size() > 1 ? out.vec() : out[0].unbind();
  const std::vector<Tensor> parts = alone ? std::vector<Tensor>{wgrad.view(out[0].sizes())}
                                          : wgrad.view({-1, wgrad.size(-2), wgrad.size(-1)}).unbind();
  for (size_t i = 0; i < parts.size(); ++i) {
    if (contains(skipped, i)) continue;
    Tensor buffer = alone ? out[0] : buffers[i];
    accumulate ? buffer.add_(parts[i]) : buffer.copy_(parts[i]);
  }
}

void compute(const DeferredWgrad& wgrad, at::TensorList out, bool accumulate) {
  for (const KeptOperand* operand : {&wgrad.grad, &wgrad.input}) {
    record_stream(operand->data);
    record_stream(operand->scale);
    record_stream(operand->amax);
    record_stream(operand->row_index);
  }
  record_stream(wgrad.group_sizes);
  const Quantized grad = wgrad.grad.get(), input = wgrad.input.get();
  const OptionalTensor group_sizes = as_optional(wgrad.group_sizes.get());
  const DeferOptions& options = wgrad.options;
  if (options.dtype) {
    add_rounded(wgrad_of(grad, input, group_sizes, *options.dtype, options.launch), out, accumulate,
                options.skipped);
  } else {
    wgrad_into(grad, input, group_sizes, replaced_buffers(out, options.skipped), accumulate, options.launch);
  }
}

void check_run(const Tensor& queue, at::TensorList out) {
  check_queue_tensor({kRun, "queue", queue}, out.empty() ? Tensor() : out[0]);
  TP_CHECK_VALUE(!out.empty(), kRun, "out", "one tensor, or a matrix for each group", "an empty list",
                 "Pass the buffers of the weight's gradient");
  for (size_t i = 0; i < out.size(); ++i) {
    const std::string name = entry("out", i);
    const Argument buffer{kRun, name.c_str(), out[i]};
    check_defined(buffer);
    check_dtype(buffer, {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble});
    check_same_dtype(buffer, {kRun, "out[0]", out[0]});
    check_same_device(buffer, {kRun, "out[0]", out[0]});
    TP_CHECK_VALUE(out[i].dim() == 2 || (out[i].dim() == 3 && out.size() == 1), kRun, name,
                   "a matrix, or one tensor [G, N, K]", describe(out[i]),
                   "Pass buffers of the sizes of the weight");
    // Without gradients in the queue no product checks the buffers, which may be set to zero.
    TP_CHECK_VALUE(at::has_internal_overlap(out[i]) != at::MemOverlap::Yes, kRun, name,
                   "a buffer with memory for each element", describe(out[i]) << ", which is expanded",
                   "Pass a buffer of its own");
  }
  check_written(kRun, "out", out);
  CallMemory memory(kRun);
  memory.written("queue", at::TensorList(queue));
  memory.written("out", out);
  memory.check();
}

void run_deferred_wgrads_meta(const Tensor& queue, at::TensorList out, bool) { check_run(queue, out); }

// A gradient leaves the queue when it is in `out`; after an error the rest is still there.
void run_deferred_wgrads(const Tensor& queue, at::TensorList out, bool accumulate) {
  check_run(queue, out);
  const BelowAutograd guard;
  const int64_t id = id_of(queue);
  std::deque<DeferredWgrad> wgrads = WgradQueues::instance().take_all(kRun, id);
  try {
    for (const DeferredWgrad& wgrad : wgrads) check_fits(wgrad, out);
    check_memory(wgrads, out);
    if (!accumulate && (wgrads.empty() || !wgrads.front().options.skipped.empty())) {
      for (Tensor buffer : out) buffer.zero_();
      accumulate = true;
    }
    for (; !wgrads.empty(); wgrads.pop_front()) {
      compute(wgrads.front(), out, accumulate && wgrads.front().options.accumulate);
      accumulate = true;
    }
  } catch (...) {
    WgradQueues::instance().put_back(id, std::move(wgrads));
    throw;
  }
}

}  // namespace

TP_IMPL_NO_GRADIENT(defer_wgrad, defer_wgrad<false>, defer_wgrad<true>);
TP_IMPL_NO_GRADIENT(run_deferred_wgrads, run_deferred_wgrads, run_deferred_wgrads_meta);

}  // namespace transformer_plugin::linear

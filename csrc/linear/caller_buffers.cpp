#include "linear/caller_buffers.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <string>
#include <utility>

#include "common/autograd.h"
#include "common/torch_version.h"
#include "gemm/ops/leading_dims.h"

namespace transformer_plugin::linear {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;

constexpr const char* kDgradOut = "dgrad_out";

void check_buffer(const char* name, const Tensor& buffer, const Argument& input,
                  const c10::SymDimVector& sizes, const char* meaning) {
  const Argument argument{input.op, name, buffer};
  check_defined(argument);
  check_strided(argument);
  check_same_dtype(argument, input);
  TP_CHECK_VALUE(buffer.sym_sizes() == c10::SymIntArrayRef(sizes), input.op, name,
                 "a buffer of the sizes " << c10::SymIntArrayRef(sizes) << " of " << meaning,
                 describe(buffer), "Allocate it in these sizes, or pass a view of them");
  check_same_device(argument, input);
  check_contiguous(argument);
  check_written(argument);
  // check_written() lets it pass where no gradients are computed.
  TP_CHECK_VALUE(!buffer.requires_grad(), input.op, name, "a tensor with requires_grad=False",
                 describe(buffer) << " with requires_grad=True", "Pass buffer.detach()");
}

}  // namespace

void CallerBuffers::add_to(CallMemory& memory) const {
  for (const auto& [name, buffer] : {std::pair{"out", &out}, std::pair{kDgradOut, &dgrad_out}}) {
    if (*buffer) memory.written(name, at::TensorList(**buffer));
  }
}

void check_caller_buffers(const Argument& input, const c10::SymInt& columns, const CallerBuffers& buffers) {
  if (buffers.out) {
    check_buffer("out", *buffers.out, input, gemm::with_columns(input.tensor, columns), "the output");
    // Its history would become that of the tensor it is a view of, and grow with each call.
    TP_CHECK_VALUE(!at::GradMode::is_enabled() || !buffers.out->is_view(), input.op, "out",
                   "a tensor that autograd does not know as a view of another",
                   describe(*buffers.out) << ", a view", "Pass buffer.detach(), which has the same memory");
  }
  if (buffers.dgrad_out) {
    check_buffer(kDgradOut, *buffers.dgrad_out, input, c10::SymDimVector(input.tensor.sym_sizes()),
                 "'input'");
  }
}

void save_dgrad_out(AutogradContext* ctx, const CallerBuffers& buffers) {
  if (buffers.dgrad_out) ctx->saved_data[kDgradOut] = *buffers.dgrad_out;
}

std::optional<Tensor> saved_dgrad_out(const AutogradContext* ctx, const char* op, const Tensor& grad) {
  const auto found = ctx->saved_data.find(kDgradOut);
  if (found == ctx->saved_data.end()) return std::nullopt;
  Tensor buffer = found->second.toTensor();
  if (has_memory(buffer) && has_memory(grad)) {
    check_apart(op, {{kDgradOut, buffer}}, {{"the gradient of the output", grad}});
  }
  return buffer;
}

namespace {

// Its gradient is in the buffer already.
class IntoBuffer : public torch::autograd::Node {
 public:
  explicit IntoBuffer(Tensor buffer) : buffer_(std::move(buffer)) {}
  std::string name() const override { return "transformer_plugin::dgrad_out_backward_node"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    // One that refuses a second derivative.
    const bool has_graph = grads[0].defined() && grads[0].requires_grad();
    return {has_graph ? grads[0].view_symint(buffer_.sym_sizes()) : buffer_};
  }

 private:
  const Tensor buffer_;
};

}  // namespace

Tensor rows_into(const Tensor& input, const Tensor& dgrad_out) {
  const Tensor rows = gemm::as_matrix(input).detach();
  const auto node = make_node<IntoBuffer>(dgrad_out);
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  torch::autograd::set_history(rows, node);
  return rows;
}

}  // namespace transformer_plugin::linear

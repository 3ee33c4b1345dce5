// all_gather_list_out: all_gather of several tensors in one collective, into buffers of the caller.
#include "common/buffers.h"
#include "common/ops/tensor_parallel.h"
#include "common/register.h"
#include "tensor_parallel/exchange.h"

namespace transformer_plugin::tensor_parallel {
namespace {

using at::Tensor;
using at::TensorList;

constexpr const char* kOp = "all_gather_list_out";

void check_entry(const Argument& input, const Argument& out, int64_t num_ranks, int64_t timeout_ms) {
  check_exchange(input, num_ranks, timeout_ms);
  check_no_gradient(input, "Call all_gather, which has a gradient");
  check_same_device(out, input);
  check_same_dtype(out, input);
  std::vector<c10::SymInt> sizes(input.tensor.sym_sizes().begin(), input.tensor.sym_sizes().end());
  sizes[0] = sizes[0] * num_ranks;
  TP_CHECK_VALUE(out.tensor.sym_sizes() == c10::SymIntArrayRef(sizes), kOp, out.name,
                 "the sizes " << c10::SymIntArrayRef(sizes) << ", the inputs of " << num_ranks << " ranks",
                 describe(out.tensor), "Allocate it with those sizes");
  check_contiguous(out);
  check_memory(out);
}

void check_arguments(TensorList inputs, TensorList out, int64_t num_ranks, int64_t timeout_ms) {
  TP_CHECK_VALUE(!inputs.empty(), kOp, "inputs", "at least one tensor", "an empty list",
                 "Pass tensors to gather");
  TP_CHECK_VALUE(inputs.size() == out.size(), kOp, "out",
                 inputs.size() << " tensors, one for each of 'inputs'", out.size(),
                 "Pass one buffer for each input");
  for (size_t i = 0; i < inputs.size(); ++i) {
    const std::string input_name = entry("inputs", i), out_name = entry("out", i);
    const Argument input{kOp, input_name.c_str(), inputs[i]};
    check_entry(input, {kOp, out_name.c_str(), out[i]}, num_ranks, timeout_ms);
    check_same_device(input, {kOp, "inputs[0]", inputs[0]});
  }
  check_written(kOp, "out", out);
}

void all_gather_list_out(TensorList inputs, TensorList out, int64_t num_ranks, std::string_view group_name,
                         int64_t timeout_ms) {
  check_arguments(inputs, out, num_ranks, timeout_ms);
  CallMemory memory(kOp);
  memory.read("inputs", inputs);
  memory.written_entries("out", out);
  memory.check();
  RankGroup group(kOp, group_name, timeout_ms, inputs[0]);
  check_ranks(kOp, group, num_ranks);
  const BelowAutograd guard;  // the version of a buffer is bumped once, below
  group.begin_call(list_call(phases::kAllGatherList, "inputs", inputs), 1);
  group.collectives().all_gather_list(inputs, out, phases::kAllGatherList).wait();
  for (const Tensor& buffer : out) mark_written(buffer);
}

void all_gather_list_out_meta(TensorList inputs, TensorList out, int64_t num_ranks, std::string_view,
                              int64_t timeout_ms) {
  check_arguments(inputs, out, num_ranks, timeout_ms);
}

}  // namespace

TP_IMPL_NO_GRADIENT(all_gather_list_out, all_gather_list_out, all_gather_list_out_meta);

}  // namespace transformer_plugin::tensor_parallel

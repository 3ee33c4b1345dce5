// Every op of torch.ops.transformer_plugin, by family: the table of contents of the project.
//
// Conventions. A "format" is the key of a number format with its options, for example "fp8_block:e4m3,pow2" (common/format.h).
// "group_sizes" are int32 or int64 [G] on the device of the data; rows past their sum are the tail, written as zero, or not at all
// if zero_tail is False. "group_name" names a c10d process group. An op whose name ends in "_out" or "_" writes into a buffer that
// it is given, and so do those with an "amax" to collect into; every other tensor is fresh.
#include <torch/library.h>

#include "common/unsupported_layouts.h"

TORCH_LIBRARY(transformer_plugin, m) {
  // quantize: values to data and scales, along rows, along columns (the data is then transposed), or both. Results
  // are a list: rowwise data and scale, columnwise data and scale, without those of a direction that is False.
  // "amax" and "amax_t" are the largest magnitudes of both directions, from the op amax; "seed" is what stochastic
  // rounding draws from. With "rows", row i of the ragged matrix is row rows[i] of the input, and -1 a row of zeros.
  m.def(
      "quantize(Tensor input, str format, Tensor? group_sizes=None, Tensor? amax=None, Tensor? amax_t=None, "
      "Tensor? seed=None, bool rowwise=True, bool columnwise=False, Tensor? rows=None, bool zero_tail=True) -> Tensor[]");
  // Into buffers of the caller, in the order of the results; with noop = 1 on the device every byte of them stays.
  m.def(
      "quantize_out(Tensor input, str format, Tensor(a!)[] out, Tensor? group_sizes=None, Tensor? amax=None, "
      "Tensor? amax_t=None, Tensor? seed=None, Tensor? noop=None, bool rowwise=True, bool columnwise=False) -> ()");
  // All results of the first matrix, then of the second; or "stacked", those of quantize for the stack of them.
  m.def(
      "quantize_list(Tensor[] inputs, str format, Tensor? amax=None, bool rowwise=True, bool columnwise=False, "
      "bool stacked=False) -> Tensor[]");
  m.def(
      "dequantize(Tensor data, Tensor scale_inv, str format, ScalarType dtype, Tensor? group_sizes=None, "
      "bool transposed=False, Tensor? amax=None, bool zero_tail=True) -> Tensor");
  m.def(
      "amax(Tensor input, str format, Tensor? group_sizes=None, bool rowwise=True, bool columnwise=False) -> Tensor[]");
  m.def(
      "amax_list_out(Tensor[] inputs, str format, Tensor(a!) amax, Tensor(b!)? amax_t=None, Tensor? noop=None) -> ()");
  m.def(
      "requantize_transposed(Tensor data, Tensor scale_inv, str format, ScalarType dtype, "
      "Tensor? group_sizes=None, Tensor? amax=None, Tensor? amax_t=None, Tensor? seed=None) -> (Tensor, Tensor)");
  // Delayed scaling: encode scales from earlier steps, from index `first` on of a state tensor that holds many; the
  // amax of the input is combined into `amax` by a maximum. The update computes scales from the amaxes;
  // delayed_scale only returns them. quantize_scaled always has four results, because torch compiles no op that writes
  // an argument and returns a list; those of a direction that is False are empty.
  m.def(
      "quantize_scaled(Tensor input, Tensor scale, str format, Tensor(a!)? amax=None, Tensor? group_sizes=None, "
      "int first=0, bool rowwise=True, bool columnwise=False) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "update_delayed_scale_(Tensor(a!) history, Tensor(b!) scale, Tensor(c!) amax, str[] formats, int margin=0, "
      "str algorithm=\"max\", str group=\"\") -> Tensor");
  m.def(
      "delayed_scale(Tensor history, Tensor scale, Tensor amax, str[] formats, int margin=0, "
      "str algorithm=\"max\") -> Tensor");
  // Fused with the step before: the bytes of the two steps, in one pass. fp8_tensor needs an amax here, except in
  // bias_backward_quantize.
  m.def(
      "activation_quantize(Tensor input, str format, Tensor? probs=None, Tensor? group_sizes=None, "
      "Tensor? amax=None, Tensor? amax_t=None, Tensor? seed=None, bool rowwise=True, bool columnwise=False, "
      "bool zero_tail=True, str activation=\"swiglu\") -> Tensor[]");
  // Always in both directions, then grad_probs.
  m.def(
      "activation_backward_quantize(Tensor grad, Tensor input, str format, Tensor? probs=None, "
      "Tensor? group_sizes=None, Tensor? amax=None, Tensor? amax_t=None, Tensor? seed=None, bool zero_tail=True, "
      "str activation=\"swiglu\") -> Tensor[]");
  // The gradient of a bias, the sums over the rows, is the last result.
  m.def(
      "bias_backward_quantize(Tensor grad, str format, Tensor? group_sizes=None, Tensor? amax=None, "
      "Tensor? amax_t=None, Tensor? seed=None, bool rowwise=True, bool columnwise=False, bool zero_tail=True) -> Tensor[]");

  // gemm: products with FP32 sums. linear and grouped_linear are the differentiable ones in low precision. A quantized
  // operand has a format and its scales, [scale_inv], or of nvfp4 [scale_inv, amax]; those of a weight gradient are
  // quantized along columns. `b` of a grouped product, and `out` of its weight gradient, is one tensor [G, .., ..] or G
  // matrices at any addresses; the scales of a list are one for each matrix, then the amaxes.
  m.def(
      "gemm(Tensor a, Tensor b, Tensor? bias=None, bool transpose_b=True, ScalarType? dtype=None, "
      "Tensor? alpha=None, Tensor[]? a_scale=None, Tensor[]? b_scale=None, str a_format=\"none\", "
      "str b_format=\"none\") -> Tensor");
  m.def(
      "gemm_out(Tensor a, Tensor b, Tensor(a!) out, Tensor? bias=None, bool transpose_b=True, Tensor? alpha=None, "
      "Tensor? beta=None, Tensor[]? a_scale=None, Tensor[]? b_scale=None, str a_format=\"none\", "
      "str b_format=\"none\", bool accumulate=False) -> ()");
  m.def(
      "grouped_gemm(Tensor a, Tensor[] b, Tensor group_sizes, Tensor? bias=None, Tensor? bias_scale=None, "
      "bool transpose_b=True, ScalarType? dtype=None, Tensor? alpha=None, Tensor? rows=None, "
      "int max_sms=0, int expected_rows=-1, Tensor[]? a_scale=None, Tensor[]? b_scale=None, str a_format=\"none\", "
      "str b_format=\"none\", bool zero_tail=True) -> Tensor");
  m.def(
      "grouped_gemm_out(Tensor a, Tensor[] b, Tensor group_sizes, Tensor(a!) out, Tensor? bias=None, "
      "Tensor? bias_scale=None, bool transpose_b=True, Tensor? alpha=None, Tensor? beta=None, "
      "Tensor? rows=None, int max_sms=0, int expected_rows=-1, Tensor[]? a_scale=None, Tensor[]? b_scale=None, "
      "str a_format=\"none\", str b_format=\"none\") -> ()");
  m.def("gather_rows_backward(Tensor grad, Tensor rows, Tensor group_sizes, SymInt num_rows) -> Tensor");
  m.def(
      "grouped_gemm_wgrad(Tensor grad, Tensor input, Tensor group_sizes, ScalarType? dtype=None, "
      "Tensor? alpha=None, Tensor? input_rows=None, Tensor? grad_rows=None, int max_sms=0, int expected_rows=-1, "
      "Tensor[]? grad_scale=None, Tensor[]? input_scale=None, str grad_format=\"none\", str input_format=\"none\") -> Tensor");
  m.def(
      "grouped_gemm_wgrad_out(Tensor grad, Tensor input, Tensor group_sizes, Tensor(a!)[] out, "
      "bool accumulate=True, Tensor? alpha=None, Tensor? beta=None, Tensor? input_rows=None, "
      "Tensor? grad_rows=None, int max_sms=0, int expected_rows=-1, Tensor[]? grad_scale=None, "
      "Tensor[]? input_scale=None, str grad_format=\"none\", str input_format=\"none\") -> ()");
  // The first product of an expert and an activation times a probability.
  m.def(
      "grouped_gemm_activation(Tensor a, Tensor b, Tensor group_sizes, Tensor? probs=None, Tensor? bias=None, "
      "str activation=\"swiglu\", bool keep_input=True, int max_sms=0, int expected_rows=-1, Tensor? rows=None, "
      "bool zero_tail=True) -> (Tensor act, Tensor h)");
  // The same, its result as a format has it that finds its scales in blocks along a row.
  m.def(
      "grouped_gemm_activation_quantize(Tensor a, Tensor b, Tensor group_sizes, str format, Tensor? probs=None, "
      "Tensor? bias=None, str activation=\"swiglu\", bool keep_input=True, int max_sms=0, int expected_rows=-1) -> "
      "(Tensor data, Tensor scale, Tensor h)");
  // Which kernel a GPU would run for a weight [G, n, k], why, and its configuration (gemm/dispatch/select.h,
  // gemm/sm90/config.h). Needs no GPU.
  m.def(
      "grouped_gemm_plan(str product, str a_format, str b_format, ScalarType dtype, ScalarType out_dtype, int rows, "
      "int groups, int n, int k, int multiprocessors, int capability=90, bool accumulate=False, int max_sms=0, "
      "int expected_rows=-1) -> (str, str, int[])");
  m.def("bias_backward(Tensor grad) -> Tensor");
  m.def(
      "grouped_bias_backward(Tensor grad, Tensor group_sizes, Tensor? bias=None, Tensor? bias_scale=None) -> "
      "(Tensor, Tensor)");
  // linear: layers. The weight of a grouped one is one tensor [G, N, K] or G matrices [N, K] at any addresses. A "main_grad",
  // like it one tensor or G matrices, is where the backward adds ("accumulate") or writes the gradient of the weight;
  // autograd then gets "weight_grad": none, an empty tensor or zeros. "dgrad_out" is where the backward writes the
  // gradient of the input. The forward writes no argument but the "out" of the forms of that name, which then is the
  // output with its gradient.
  m.def(
      "linear(Tensor input, Tensor weight, Tensor? bias=None, str input_format=\"none\", str weight_format=\"none\", "
      "str grad_format=\"none\", Tensor[]? quantized_weight=None, Tensor? main_grad=None, bool accumulate=True, "
      "str weight_grad=\"none\", Tensor? wgrad_queue=None, bool save_original_input=False, Tensor? dgrad_out=None, "
      "str weight_shard=\"\", int sequence_parallel_size=1, str sequence_parallel_group=\"\") -> Tensor");
  m.def(
      "linear_out(Tensor input, Tensor weight, Tensor(a!) out, Tensor? bias=None, str input_format=\"none\", "
      "str weight_format=\"none\", str grad_format=\"none\", Tensor[]? quantized_weight=None, "
      "Tensor? main_grad=None, bool accumulate=True, str weight_grad=\"none\", Tensor? wgrad_queue=None, "
      "bool save_original_input=False, Tensor? dgrad_out=None) -> ()");
  // linear of rms_norm or layer_norm of the input. normalized is that norm, or an empty tensor without
  // return_normalized.
  m.def(
      "norm_linear(Tensor input, Tensor? norm_weight, Tensor? norm_bias, Tensor weight, Tensor? bias, float eps, "
      "str normalization=\"rms_norm\", bool zero_centered=False, bool return_normalized=False, str input_format=\"none\", "
      "str weight_format=\"none\", str grad_format=\"none\", Tensor[]? quantized_weight=None, Tensor? main_grad=None, "
      "bool accumulate=True, str weight_grad=\"none\", Tensor? wgrad_queue=None, str weight_shard=\"\") -> (Tensor output, "
      "Tensor normalized)");
  m.def(
      "grouped_linear(Tensor input, Tensor[] weight, Tensor group_sizes, Tensor? bias=None, Tensor? bias_scale=None, "
      "str input_format=\"none\", str weight_format=\"none\", str grad_format=\"none\", Tensor[]? quantized_weight=None, "
      "int max_sms=0, int expected_rows=-1, Tensor[]? main_grad=None, bool accumulate=True, str weight_grad=\"none\", "
      "Tensor? wgrad_queue=None, bool save_original_input=False, Tensor? dgrad_out=None, str weight_shard=\"\") -> Tensor");
  m.def(
      "grouped_linear_out(Tensor input, Tensor[] weight, Tensor group_sizes, Tensor(a!) out, Tensor? bias=None, "
      "Tensor? bias_scale=None, str input_format=\"none\", str weight_format=\"none\", str grad_format=\"none\", "
      "Tensor[]? quantized_weight=None, int max_sms=0, int expected_rows=-1, Tensor[]? main_grad=None, bool accumulate=True, "
      "str weight_grad=\"none\", Tensor? wgrad_queue=None, bool save_original_input=False, Tensor? dgrad_out=None) -> ()");
  // Two grouped_linears with an activation between them, `probs` scaling it and the second bias. With `slot` and `source` from
  // assign_slots the input is tokens, whose rows the groups are, and the output the sum of each token's rows. "over_ranks": dispatch,
  // this, and combine. The maps are then those of the plan, and `probs` the weights of this rank's tokens.
  m.def(
      "grouped_mlp(Tensor input, Tensor[] fc1_weight, Tensor[] fc2_weight, Tensor group_sizes, Tensor probs, "
      "Tensor? fc1_bias=None, Tensor? fc2_bias=None, str input_format=\"none\", str weight_format=\"none\", "
      "str grad_format=\"none\", Tensor[]? quantized_fc1_weight=None, Tensor[]? quantized_fc2_weight=None, "
      "str activation=\"swiglu\", int max_sms=0, int expected_rows=-1, Tensor[]? fc1_main_grad=None, "
      "Tensor[]? fc2_main_grad=None, bool accumulate=True, str weight_grad=\"none\", "
      "Tensor? fc1_wgrad_queue=None, Tensor? fc2_wgrad_queue=None, Tensor? dgrad_out=None, Tensor? slot=None, "
      "Tensor? source=None, str weight_shard=\"\", bool over_ranks=False, str group_name=\"\", int timeout_ms=-1, "
      "Tensor? received=None, Tensor? position=None) -> Tensor");
  m.def(
      "grouped_mlp_out(Tensor input, Tensor[] fc1_weight, Tensor[] fc2_weight, Tensor group_sizes, Tensor probs, Tensor(a!) out, "
      "Tensor? fc1_bias=None, Tensor? fc2_bias=None, str input_format=\"none\", str weight_format=\"none\", "
      "str grad_format=\"none\", Tensor[]? quantized_fc1_weight=None, Tensor[]? quantized_fc2_weight=None, "
      "str activation=\"swiglu\", int max_sms=0, int expected_rows=-1, Tensor[]? fc1_main_grad=None, "
      "Tensor[]? fc2_main_grad=None, bool accumulate=True, str weight_grad=\"none\", Tensor? fc1_wgrad_queue=None, "
      "Tensor? fc2_wgrad_queue=None, Tensor? dgrad_out=None, Tensor? slot=None, Tensor? source=None) -> ()");
  // Delayed weight gradients. "queue" is an id; the ops have it in an int64 scalar on the CPU, which they "write" so that
  // compiled code calls them, and in order. With a "wgrad_queue" the backward of a layer calls defer_wgrad, which keeps
  // the operands of the weight gradient, those of grouped_gemm_wgrad or gemm. With a "dtype" the gradient is rounded to
  // it before it is added, as autograd does, otherwise added in the epilogue or written ("accumulate"); "skipped"
  // matrices need none. run_deferred_wgrads computes all and frees the operands.
  m.def("new_wgrad_queue() -> int");
  m.def("release_wgrad_queue(int queue) -> ()");
  m.def("count_deferred_wgrads(int queue) -> int");
  m.def(
      "defer_wgrad(Tensor(a!) queue, Tensor grad, Tensor input, Tensor? group_sizes=None, Tensor[]? grad_scale=None, "
      "Tensor[]? input_scale=None, str grad_format=\"none\", str input_format=\"none\", ScalarType? dtype=None, "
      "bool accumulate=True, int[] skipped=[], int max_sms=0, int expected_rows=-1, bool copy=False, "
      "Tensor? input_rows=None, Tensor? grad_rows=None) -> ()");
  m.def("run_deferred_wgrads(Tensor(a!) queue, Tensor(b!)[] out, bool accumulate=True) -> ()");
  // The rows of a table that indices name.
  m.def("embedding(Tensor indices, Tensor weight, int padding_idx=-1, str weight_shard=\"\") -> Tensor");
  // A weight in its format, once for many calls of the layers above: data, scale_inv and, of nvfp4, amax, along rows;
  // then along columns, if the data gradient takes those. bf16 has data alone. Several matrices give what their stack would.
  m.def("quantize_weight(Tensor[] weight, str input_format, str weight_format, str grad_format) -> Tensor[]");
  m.def(
      "quantize_weight_out(Tensor[] weight, str input_format, str weight_format, str grad_format, "
      "Tensor(a!)[] out, Tensor? noop=None) -> ()");
  // The same with delayed scaling: `scale` [3], or [3 G], of input, weight and gradient. Their amaxes are maxed into
  // `amax`, that of the gradient in the backward.
  m.def(
      "linear.scaled(Tensor input, Tensor weight, Tensor scale, Tensor(a!)? amax=None, Tensor? bias=None, "
      "str input_format=\"fp8_tensor:e4m3\", str weight_format=\"fp8_tensor:e4m3\", "
      "str grad_format=\"fp8_tensor:e5m2\", str weight_shard=\"\") -> Tensor");
  m.def(
      "grouped_linear.scaled(Tensor input, Tensor weight, Tensor group_sizes, Tensor scale, Tensor(a!)? amax=None, "
      "Tensor? bias=None, Tensor? bias_scale=None, str input_format=\"fp8_tensor:e4m3\", str weight_format=\"fp8_tensor:e4m3\", "
      "str grad_format=\"fp8_tensor:e5m2\", int max_sms=0, int expected_rows=-1, str weight_shard=\"\") -> Tensor");

  // common: autograd passes the gradient of "value", a new tensor, on to "source", which stands for the same numbers.
  m.def("connect_gradient(Tensor value, Tensor source) -> ()");

  // Raises what a GPU noticed about group sizes, row and expert indices of earlier calls; calls with these do so too.
  m.def("check_group_sizes() -> ()");

  // activation: an "activation" is a key (activation/description.h). With "group_sizes" rows past the last group are neither read nor written; their gradients of probs are 0.
  m.def(
      "activation(Tensor input, Tensor? probs=None, Tensor? group_sizes=None, str activation=\"swiglu\") -> Tensor");
  m.def(
      "activation_backward(Tensor grad, Tensor input, Tensor? probs=None, Tensor? group_sizes=None, "
      "str activation=\"swiglu\") -> (Tensor, Tensor)");

  // norm: over the last dimension. The forward ops also return what the backward wants of them; those that quantize give
  // the bytes of the steps, in one pass.
  m.def("rms_norm(Tensor input, Tensor? weight, float eps, bool zero_centered=False) -> Tensor");
  m.def(
      "rms_norm_forward(Tensor input, Tensor? weight, float eps, bool zero_centered=False) -> "
      "(Tensor output, Tensor rstd)");
  m.def(
      "rms_norm_backward(Tensor grad, Tensor input, Tensor? weight, Tensor rstd, bool zero_centered=False) -> "
      "(Tensor grad_input, Tensor grad_weight)");
  m.def(
      "rms_norm_quantize(Tensor input, Tensor? weight, float eps, str format, bool zero_centered=False, "
      "Tensor? amax=None, Tensor? seed=None) -> (Tensor data, Tensor scale_inv, Tensor rstd)");
  m.def(
      "layer_norm(Tensor input, Tensor? weight, Tensor? bias, float eps, bool zero_centered=False) -> Tensor");
  m.def(
      "layer_norm_forward(Tensor input, Tensor? weight, Tensor? bias, float eps, bool zero_centered=False) -> "
      "(Tensor output, Tensor mean, Tensor rstd)");
  m.def(
      "layer_norm_backward(Tensor grad, Tensor input, Tensor? weight, Tensor mean, Tensor rstd, "
      "bool zero_centered=False, bool has_bias=True) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
  m.def(
      "layer_norm_quantize(Tensor input, Tensor? weight, Tensor? bias, float eps, str format, "
      "bool zero_centered=False, Tensor? amax=None, Tensor? seed=None) -> (Tensor data, Tensor scale_inv, "
      "Tensor mean, Tensor rstd)");

  // routing: which experts, and rows to them and back. "Slots" are the rows of an expert-major layout of
  // fixed capacity (routing/slots_args.h). An index is one of "total_experts", by default those up to the last of the
  // layout, or -1 for none; those outside the layout get no row. Others are an error, on a GPU of a later call.
  // router_logits: input [T, H] x weight [E, H] transposed, summed and kept in FP32.
  m.def("router_logits(Tensor input, Tensor weight) -> Tensor");
  m.def("router_logits_with_tokens(Tensor(a) input, Tensor weight) -> (Tensor logits, Tensor(a) tokens)");
  m.def(
      "router_logits_backward(Tensor grad, Tensor input, Tensor weight, bool for_input=True, bool for_weight=True, "
      "Tensor? grad_tokens=None) -> (Tensor grad_input, Tensor grad_weight)");
  m.def(
      "topk_router(Tensor logits, Tensor? expert_bias, int topk, str score_function=\"softmax\", "
      "bool pre_softmax=False, int num_groups=1, int group_topk=1, float scaling_factor=1.0, "
      "int? group_score_topk=None) -> (Tensor weights, Tensor indices)");
  m.def(
      "topk_router_with_load(Tensor logits, Tensor? expert_bias, int topk, str score_function=\"softmax\", "
      "bool pre_softmax=False, int num_groups=1, int group_topk=1, float scaling_factor=1.0, "
      "int? group_score_topk=None) -> (Tensor weights, Tensor indices, Tensor load, Tensor aux_loss)");
  m.def(
      "topk_router_backward(Tensor grad, Tensor logits, Tensor indices, str score_function, bool pre_softmax, "
      "float scaling_factor) -> Tensor");
  m.def("router_scores(Tensor logits, str score_function=\"softmax\") -> Tensor");
  m.def("router_scores_backward(Tensor grad, Tensor logits, str score_function) -> Tensor");
  m.def(
      "aux_loss(Tensor scores, Tensor tokens_per_expert, Tensor total_tokens, int topk, float coeff) -> Tensor");
  m.def(
      "aux_loss_backward(Tensor grad, Tensor tokens_per_expert, Tensor total_tokens, SymInt tokens, int topk, "
      "float coeff) -> Tensor");
  m.def(
      "assign_slots(Tensor indices, int first_expert, int num_experts, SymInt capacity, int alignment=1, "
      "int total_experts=-1) -> (Tensor slot, Tensor source, Tensor source_k, Tensor group_sizes, Tensor total)");
  m.def(
      "assign_weighted_slots(Tensor indices, Tensor weights, int first_expert, int num_experts, SymInt capacity, "
      "int alignment=1, int total_experts=-1) -> (Tensor slot, Tensor source, Tensor group_sizes, Tensor total, "
      "Tensor probs)");
  m.def("count_tokens_per_expert(Tensor indices, int num_experts) -> Tensor");
  m.def(
      "permute(Tensor tokens, Tensor indices, int num_experts, SymInt capacity, int alignment=1) -> "
      "(Tensor rows, Tensor group_sizes, Tensor slot, Tensor source, Tensor total)");
  m.def("permute_backward(Tensor grad, Tensor slot) -> Tensor");
  m.def("permute_rows(Tensor tokens, Tensor slot, Tensor source, Tensor? group_sizes=None) -> Tensor");
  m.def("unpermute(Tensor rows, Tensor slot, Tensor source, Tensor? weights=None) -> Tensor");
  m.def(
      "unpermute_backward(Tensor grad, Tensor? rows, Tensor slot, Tensor source, Tensor? weights=None) -> "
      "(Tensor grad_rows, Tensor grad_weights)");

  // expert_parallel: sends tokens to the experts on other ranks and back (expert_parallel/ops/plan.cpp). group_name "": this
  // process alone. grads_needed: the gradients that autograd will compute (1: of the rows, 2: of the weights), which it fills in.
  // expand: rows of the experts [capacity, H]; without it the received rows [N, H].
  m.def(
      "plan(Tensor topk_idx, int num_experts, SymInt max_tokens, SymInt capacity, int alignment=1, int num_ranks=1, "
      "str group_name=\"\", bool raise_on_overflow=False, int timeout_ms=-1) -> "
      "(Tensor slot, Tensor source, Tensor tokens_per_expert, Tensor required, Tensor overflow)");
  m.def(
      "compact_plan(Tensor topk_idx, int num_experts, SymInt max_tokens, SymInt capacity, int alignment=1, "
      "int num_ranks=1, str group_name=\"\", bool raise_on_overflow=False, int timeout_ms=-1, "
      "SymInt? max_received_tokens=None, bool records=False) -> (Tensor slot, Tensor source, Tensor tokens_per_expert, Tensor required, "
      "Tensor overflow, Tensor received, Tensor position, Tensor required_tokens)");
  m.def(
      "dispatch(Tensor tokens, Tensor? topk_weights, Tensor slot, Tensor source, str group_name=\"\", "
      "int timeout_ms=-1, int grads_needed=-1, bool expand=True, Tensor? received=None, Tensor? position=None) -> "
      "(Tensor recv, Tensor recv_weights)");
  m.def(
      "dispatch_out(Tensor tokens, Tensor? topk_weights, Tensor slot, Tensor source, Tensor(a!) recv, "
      "Tensor(b!)? recv_weights=None, str group_name=\"\", int timeout_ms=-1, int grads_needed=-1, "
      "Tensor? received=None, Tensor? position=None) -> ()");
  m.def(
      "dispatch_backward(Tensor? grad_recv, Tensor? grad_recv_weights, Tensor slot, SymInt num_tokens, "
      "SymInt hidden_size, ScalarType dtype, bool for_tokens=True, bool for_weights=True, str group_name=\"\", "
      "int timeout_ms=-1, bool expand=True, Tensor? received=None, Tensor? position=None) -> "
      "(Tensor grad_tokens, Tensor grad_topk_weights)");
  m.def(
      "combine(Tensor rows, Tensor slot, Tensor source, SymInt num_tokens, str group_name=\"\", int timeout_ms=-1, "
      "int grads_needed=-1, bool expand=True, Tensor? received=None, Tensor? position=None) -> Tensor");
  m.def(
      "combine_backward(Tensor grad, Tensor slot, Tensor source, str group_name=\"\", int timeout_ms=-1, "
      "bool expand=True, Tensor? received=None, Tensor? position=None) -> Tensor");
  m.def(
      "combine_backward_out(Tensor grad, Tensor slot, Tensor source, Tensor(a!) grad_rows, str group_name=\"\", "
      "int timeout_ms=-1, Tensor? received=None, Tensor? position=None) -> ()");
  m.def(
      "open_channel(str group_name, int received_rows, int returned_rows, int record_bytes, int num_experts, "
      "int planned_rows, int topk, int timeout_ms=-1, Device? device=None) -> str");  // for one-sided exchanges; "" or a reason
  m.def("select_transport(int num_ranks, str device_type, bool peer_memory) -> (str transport, str reason)");
  // tensor_parallel: collectives along the first dimension, over c10d groups. num_ranks: the size of the group. needs_grad: 1 if
  // autograd will compute the gradient, which autograd fills in.
  m.def(
      "all_gather(Tensor input, int num_ranks=1, str group_name=\"\", int timeout_ms=-1, int needs_grad=-1) -> Tensor");
  m.def(
      "reduce_scatter(Tensor input, int num_ranks=1, str group_name=\"\", int timeout_ms=-1, int needs_grad=-1) -> Tensor");
  m.def(
      "all_gather_list_out(Tensor[] inputs, Tensor(a!)[] out, int num_ranks=1, str group_name=\"\", "
      "int timeout_ms=-1) -> ()");
  m.def(
      "reduce_scatter_out(Tensor input, Tensor(a!) out, bool accumulate=False, int num_ranks=1, "
      "str group_name=\"\", int timeout_ms=-1, float factor=1.0) -> ()");
  // start_all_gather, start_reduce_scatter: the same begun on a side stream, and a work tensor for finish_all_gather and
  // finish_reduce_scatter, which give the result. depends_on: computed meanwhile, for compilers that order ops by operands.
  m.def(
      "start_all_gather(Tensor input, int num_ranks=1, str group_name=\"\", int timeout_ms=-1, int needs_grad=-1) -> Tensor");
  m.def(
      "finish_all_gather(Tensor work, Tensor input, int num_ranks=1, str group_name=\"\", int timeout_ms=-1, "
      "Tensor? depends_on=None) -> Tensor");
  m.def(
      "start_reduce_scatter(Tensor input, int num_ranks=1, str group_name=\"\", int timeout_ms=-1, int needs_grad=-1) -> Tensor");
  m.def(
      "finish_reduce_scatter(Tensor work, Tensor input, int num_ranks=1, str group_name=\"\", int timeout_ms=-1, "
      "Tensor? depends_on=None) -> Tensor");
  m.def("all_reduce(Tensor input, int num_ranks=1, str group_name=\"\", int timeout_ms=-1) -> Tensor");
  m.def(
      "copy_to_group(Tensor(a) input, int num_ranks=1, str group_name=\"\", int timeout_ms=-1) -> Tensor(a)");
  // vocab_parallel_cross_entropy: the losses of rows of logits whose columns are sharded over ranks. The forward also returns of each
  // row the largest logit and the sum of the exponentials of the differences to it.
  m.def(
      "vocab_parallel_cross_entropy(Tensor logits, Tensor target, int vocabulary, int num_ranks, str group_name, "
      "float label_smoothing=0.0, int ignore_index=-100, int timeout_ms=-1) -> Tensor");
  m.def(
      "vocab_parallel_cross_entropy_forward(Tensor logits, Tensor target, int vocabulary, int num_ranks, str group_name, "
      "float label_smoothing=0.0, int ignore_index=-100, int timeout_ms=-1) -> (Tensor losses, Tensor stats)");
  m.def(
      "vocab_parallel_cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor stats, int vocabulary, "
      "int num_ranks, str group_name, float label_smoothing=0.0, int ignore_index=-100) -> Tensor");

  // sharded: weights whose first dimension is sharded over ranks. `shard`, and `weight_shard` of layers: the key of such a weight
  // (sharded/weight_shard.h). gather_weight: the tensors of one direction of the unsharded weight, from this rank's.
  // gather_weight_list: a stack of unsharded matrices, from this rank's rows of each.
  // reduce_gradient_out: the sum over ranks of this rank's rows of gradients [ranks * n, ...] of the unsharded weight; the
  // other two begin it, and wait for it, in a compiled graph not before `depends_on` is computed.
  // configure_gathers: how many weights ahead of their use a group gathers, and whether in CUDA graphs, too. count_gathers:
  // collectives, those begun early, uses of these, early ones that were dropped, bytes sent. invalidate_prefetched: nothing
  // gathered before is used. enter_gather_region, leave_gather_region: the input, at the borders of what is captured alone.
  m.def(
      "gather_weight(Tensor data, Tensor? scale_inv, Tensor? amax, str format, bool columnwise, bool backward, "
      "str shard) -> (Tensor unsharded_data, Tensor unsharded_scale_inv, Tensor unsharded_amax)");
  m.def("gather_weight_list(Tensor[] shards, bool backward, str shard) -> Tensor");
  m.def(
      "reduce_gradient_out(Tensor unsharded_grad, Tensor weight, Tensor(a!) out, bool accumulate, str shard) -> ()");
  m.def("start_reduce_gradient(Tensor unsharded_grad, Tensor weight, str shard) -> Tensor");
  m.def(
      "finish_reduce_gradient(Tensor work, Tensor unsharded_grad, Tensor weight, str shard, Tensor? depends_on=None) -> Tensor");
  m.def("configure_gathers(str group_name, int distance, bool in_graphs=False) -> ()");
  m.def("clear_gathers(str group_name) -> ()");
  m.def("count_gathers(str group_name) -> int[]");
  m.def("invalidate_prefetched() -> ()");
  m.def("enter_gather_region(Tensor input, str group_name) -> Tensor");
  m.def("leave_gather_region(Tensor output, str group_name) -> Tensor");

  // distributed: all_gather_text returns every rank's text, through the group's store, to compare configurations. compare_header raises if ranks
  // announce different calls. release_group frees the state of groups that have been destroyed. peer_memory_support: whether ranks can share memory.
  m.def("all_gather_text(str group_name, str text, int timeout_ms=-1) -> str[]");
  m.def("compare_header(str group_name, ScalarType dtype, int width, int timeout_ms=-1) -> ()");
  m.def(
      "peer_memory_support(str group_name, int timeout_ms=-1, Device? device=None) -> (bool supported, str reason)");
  m.def("release_group(str group_name) -> ()");
  m.def(
      "symmetric_allocate(str group_name, int num_bytes, int timeout_ms=-1, Device? device=None) -> (int allocation, str reason)");
  m.def("symmetric_empty(str group_name, int allocation, int num_bytes) -> Tensor");
  m.def("is_symmetric(Tensor tensor) -> bool");

  transformer_plugin::register_unsupported_layouts(m);  // of all of the above
}

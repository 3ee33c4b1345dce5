"""References of the tensor-parallel ops. One process computes all ranks: arguments and results are lists with one entry
per rank."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_plugin.reference.quantize import quantize


def all_gather(input: list[Tensor]) -> list[Tensor]:
    """Returns on every rank the inputs of all."""
    return [torch.cat(input) for _ in input]


def reduce_scatter(input: list[Tensor]) -> list[Tensor]:
    """Returns each rank's rows of the sum, which is made in ascending order of ranks and rounded once."""
    dtype = input[0].dtype
    total = torch.zeros(input[0].shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    for each in input:
        total = total + each.to(total.dtype)
    return [chunk.contiguous() for chunk in total.to(dtype).tensor_split(len(input))]


def start_all_gather(input: list[Tensor]) -> list[Tensor]:
    """Returns work tensors, which mean nothing here; so does the other start."""
    return [torch.zeros(1, dtype=torch.int64) for _ in input]


start_reduce_scatter = start_all_gather
finish_all_gather, finish_reduce_scatter = all_gather, reduce_scatter


def all_reduce(input: list[Tensor]) -> list[Tensor]:
    """Returns the sum on every rank, made in ascending order of ranks and rounded once."""
    columns = torch.cat([tensor.reshape(1, -1) for tensor in input]).t()  # a row for each element
    return [torch.cat(reduce_scatter(list(columns.unbind(1)))).view(input[0].shape) for _ in input]


def copy_to_group(input: list[Tensor]) -> list[Tensor]:
    """Returns the input on every rank."""
    return list(input)


def all_gather_list_out(inputs: list[list[Tensor]], out: list[list[Tensor]]) -> None:
    """Writes on every rank, for each tensor of its list, the inputs of all ranks."""
    for buffers in out:
        for buffer, *of_ranks in zip(buffers, *inputs, strict=True):
            buffer.copy_(torch.cat(of_ranks))


def reduce_scatter_out(
    input: list[Tensor], out: list[Tensor], accumulate: bool = False, factor: float = 1.0
) -> None:
    """Writes each rank's rows of the sum times a factor, or adds it; the total is rounded once."""
    wide = torch.float64 if input[0].dtype == torch.float64 else torch.float32
    sums = reduce_scatter([tensor.to(wide) for tensor in input])
    for buffer, total in zip(out, sums, strict=True):
        total = total * factor
        buffer.copy_(buffer.to(wide) + total if accumulate else total)


def vocab_parallel_cross_entropy_forward(
    logits: list[Tensor],
    target: Tensor,
    vocabulary: int,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> list[tuple[Tensor, Tensor]]:
    """Returns on every rank the losses of rows of the whole logits, and the largest logit and the sum of the
    exponentials of the differences to it. In float32, or in float64 for float64."""
    whole = torch.cat(logits, dim=-1)[..., :vocabulary]
    whole = whole if whole.dtype == torch.float64 else whole.float()
    is_ignored = target == ignore_index
    largest = whole.amax(-1)
    sums = (whole - largest.unsqueeze(-1)).exp().sum(-1)
    is_finite = largest.isfinite()
    log_sums = sums.log()
    place = target.long().masked_fill(is_ignored, 0).unsqueeze(-1)
    losses = (largest - whole.gather(-1, place).squeeze(-1)) + log_sums
    if label_smoothing > 0.0:
        smooth = (largest - whole.mean(-1)) + log_sums
        losses = (1.0 - label_smoothing) * losses + label_smoothing * smooth
    nan = torch.full_like(losses, torch.nan)
    losses = torch.where(is_finite, losses, nan).masked_fill(is_ignored, 0.0)
    stats = torch.stack([torch.where(is_finite, each, nan) for each in (largest, sums)], -1)
    stats = stats.masked_fill(is_ignored.unsqueeze(-1), 0.0)
    return [(losses, stats) for _ in logits]


def vocab_parallel_cross_entropy(
    logits: list[Tensor],
    target: Tensor,
    vocabulary: int,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> list[Tensor]:
    """Returns on every rank the losses of rows of logits whose columns the ranks have."""
    made = vocab_parallel_cross_entropy_forward(logits, target, vocabulary, label_smoothing, ignore_index)
    return [losses for losses, _ in made]


def enter_gather_region(input: Tensor) -> Tensor:
    """Returns the input; so does the other border."""
    return input.clone()


leave_gather_region = enter_gather_region


def gather_weight(values: list[Tensor], format: str, columnwise: bool, rows: int) -> list[tuple[Tensor, ...]]:
    """Returns on every rank what quantizing the full weight gives, from the values of the ranks' shards."""
    full = torch.cat(values)[:rows]
    if format == "none":
        return [(full,) for _ in values]
    made = quantize(full, format, rowwise=not columnwise, columnwise=columnwise)
    return [tuple(tensor for tensor in made if tensor.numel()) for _ in values]


def gather_weight_list(shards: list[list[Tensor]], rows: int) -> list[Tensor]:
    """Returns on every rank the stack of full matrices, from the ranks' lists of shards."""
    full = torch.stack([torch.cat(each)[:rows] for each in zip(*shards, strict=True)])
    return [full.clone() for _ in shards]


def reduce_gradient_out(grads: list[Tensor], out: list[Tensor], accumulate: bool, mean: bool = False) -> None:
    """Writes each rank's rows of the sum or mean of the ranks' gradients, or adds it."""
    reduce_scatter_out(grads, out, accumulate, 1 / len(grads) if mean else 1.0)


def finish_reduce_gradient(grads: list[Tensor], mean: bool = False) -> list[Tensor]:
    """Returns each rank's rows of the sum or mean of the ranks' gradients."""
    out = [torch.empty(each.shape[0] // len(grads), *each.shape[1:], dtype=each.dtype) for each in grads]
    reduce_gradient_out(grads, out, False, mean)
    return out


start_reduce_gradient = start_all_gather

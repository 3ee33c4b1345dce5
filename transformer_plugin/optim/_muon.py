"""Muon for matrices of which each rank has a shard, and for stacks of experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _adjust_lr, muon
from torch.optim.optimizer import _to_scalar

from transformer_plugin._arguments import check_strided, typed
from transformer_plugin.optim import _full_matrices as matrices
from transformer_plugin.optim._full_matrices import Target, target_of
from transformer_plugin.optim._newton_schulz import orthogonalized
from transformer_plugin.optim._shared_work import by_ranks
from transformer_plugin.parallel.external import refuse_shards
from transformer_plugin.tensor._base import FormatTensor
from transformer_plugin.tensor._layout import describe, message

#: Values of ``adjust_lr_fn`` that some version of ``torch.optim.Muon`` takes.
ADJUSTMENTS = ("original", "match_rms_adamw", "spectral_unclamped")
#: A target, its gradient and its momentum: this rank's tensors.
_Item = tuple[Target, Tensor, Tensor]


class Muon(torch.optim.Muon):
    """``torch.optim.Muon`` that is right for shards of weights, and takes stacks of experts ``[G, N, K]``.

    For a full matrix ``[N, K]`` it gives what ``torch.optim.Muon`` gives, bit for bit. Of a matrix that
    :func:`~transformer_plugin.parallel.shard_` or tensor parallelism has sharded over ranks, it gathers the momentum
    update of the full matrix in bfloat16, orthogonalizes that, and applies this rank's rows and columns; so it gives
    these elements of the result for the full matrix. Each matrix of a stack is orthogonalized by itself, in batched
    products; of sharded experts each rank has full matrices, and nothing travels.

    Muon is for the matrices of hidden layers. Give embeddings, the head, biases (also ``[G, N]`` of experts) and norms
    to another optimizer, after ``shard_``::

        hidden, others = [], []
        for name, layer in model.named_modules():
            for key, parameter in layer.named_parameters(recurse=False):
                is_layer = isinstance(layer, (nn.Linear, nn.LayerNormLinear, nn.GroupedLinear))
                is_hidden = is_layer and key == "weight" and name != "head"
                (hidden if is_hidden else others).append(parameter)
        optimizers = [
            transformer_plugin.optim.Muon(hidden, lr=3e-4, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=3e-4),
        ]

    All ranks have the same parameters in the same order and call :meth:`step` together. Ranks of a matrix have a
    gradient of it all or none. Otherwise a CPU gets a ``ValueError`` on all of them; GPUs compare this when the
    parameters with a gradient change on a rank, and wait for the timeout of the group if they do not on another.

    Args:
        params: matrices and stacks of matrices, or groups of them: plain parameters, shards of them, and ``DTensor`` s
            of which this rank has full matrices.
        lr: the learning rate. It is adjusted by the sizes of the full matrix.
        weight_decay: decoupled, for each element.
        momentum: of the moving average of gradients.
        nesterov: whether to use Nesterov momentum.
        ns_coefficients: of the polynomial of a Newton-Schulz iteration.
        eps: the smallest norm that an update is divided by.
        ns_steps: the number of iterations, below 100.
        adjust_lr_fn: ``"original"``, which None means, too, ``"match_rms_adamw"``, or what else the installed
            ``torch.optim.Muon`` takes, as ``"spectral_unclamped"`` since torch 2.14.

    Raises:
        TypeError: quantized parameters, or ``DTensor`` s that divide a matrix.
        ValueError: parameters of another number of dimensions, or options out of range.
        PeerTimeoutError: in :meth:`step`, a rank did not take part in time.

    With ``nesterov=False`` and bfloat16 gradients, ``torch.optim.Muon`` of torch 2.11 divides the momentum of a matrix
    by its norm in each step, which later versions do not. Matrices here follow the version that is installed; the
    momentum of stacks is never divided.
    """

    #: Shards are not refused, as they are by optimizers that would take them for full matrices.
    handles_shards = True

    @typed
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (DEFAULT_A, DEFAULT_B, DEFAULT_C),
        eps: float = EPS,
        ns_steps: int = DEFAULT_NS_STEPS,
        adjust_lr_fn: str | None = None,
    ) -> None:
        options: Any = (lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn)
        _check_values(lr, weight_decay, momentum, eps, ns_steps, ns_coefficients, adjust_lr_fn)
        # torch's constructor refuses stacks.
        defaults = torch.optim.Muon([torch.empty(1, 1)], *options).defaults
        Optimizer.__init__(self, params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with options of their own, which are checked."""
        super().add_param_group(param_group)
        try:
            for parameter in self.param_groups[-1]["params"]:
                _check(parameter)
            _check_options(self.param_groups[-1], self.defaults)
        except Exception:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. ``closure``, if any, computes the loss and the gradients; its result is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for settings in self.param_groups:
            self._compare_ranks(settings["params"])
        for settings in self.param_groups:
            self._step(settings)
        return loss

    def _compare_ranks(self, parameters: Iterable[Tensor]) -> None:
        """Raises if only some of the ranks over which a matrix is sharded have a gradient of it."""
        places: dict[tuple[matrices.Group, ...], list[Target]] = {}
        for parameter in parameters:
            target = target_of(parameter)
            if parameter.requires_grad and target.groups:
                places.setdefault(target.groups, []).append(target)
        compared = self.__dict__.setdefault("_compared", {})  # not in a pickle
        for targets in places.values():
            own = [target.parameter.grad is not None for target in targets]
            key = tuple(id(target.parameter) for target in targets)
            if targets[0].parameter.is_cuda and (compared.get(key) == own or _capturing()):
                continue
            every = matrices.flags_of_ranks(targets[0], own)
            for target, flags in zip(targets, zip(*every, strict=True), strict=True):
                if len(set(flags)) > 1:
                    got = f"a gradient of {target.name} on {sum(flags)} of {len(flags)} ranks"
                    advice = "Run the same layers on all ranks, or set the gradient to zeros where it is None"
                    _refuse(
                        ValueError, "params", "gradients on all ranks of a matrix, or on none", got, advice
                    )
            compared[key] = own

    def _step(self, settings: dict[str, Any]) -> None:
        parameters: list[Tensor] = []
        grads: list[Tensor] = []
        momenta: list[Tensor] = []
        options = {name: value for name, value in settings.items() if name in self.defaults}
        has_complex = self._init_group(settings, parameters, grads, momenta)
        items: dict[int, _Item] = {}
        for parameter, grad, momentum in zip(parameters, grads, momenta, strict=True):
            target = target_of(parameter)
            if target.layout is None and parameter.dim() == 2 and not hasattr(parameter, "to_local"):
                muon([parameter], [grad], [momentum], has_complex=has_complex, **options)
            else:
                _check_gradient(parameter, grad)
                items[id(parameter)] = (target, _local(grad), _local(momentum))
        for bucket in matrices.buckets(target for target, _, _ in items.values()):
            _step_bucket([items[id(target.parameter)] for target in bucket], options)


def _step_bucket(items: list[_Item], options: dict[str, Any]) -> None:
    """Gathers what is to be orthogonalized, does so, and applies it."""
    updates = []
    for _, grad, momentum in items:
        momentum.lerp_(grad, 1 - options["momentum"])
        updates.append(grad.lerp(momentum, options["momentum"]) if options["nesterov"] else momentum)
    targets = [target for target, _, _ in items]
    groups = targets[0].groups
    if groups:
        updates = [
            update.bfloat16() for update in updates
        ]  # as the first thing that is done with the full matrix
    gathered = matrices.gathered(targets, updates)
    compute = partial(
        orthogonalized,
        coefficients=options["ns_coefficients"],
        steps=options["ns_steps"],
        eps=options["eps"],
    )
    # Some versions of torch divide a matrix of momentum in place, which each rank must then see.
    in_place = not options["nesterov"] and any(momentum.dtype == torch.bfloat16 for _, _, momentum in items)
    results = by_ranks(() if in_place else groups, gathered, compute)
    lr = _to_scalar(options["lr"])
    for (target, _, momentum), full, result in zip(items, gathered, results, strict=True):
        if in_place and full.dim() == 2 and momentum.dtype == torch.bfloat16:
            for own, other in matrices.blocks(target, momentum, full):
                own.copy_(other)
        shard = _local(target.parameter)
        shard.mul_(1 - lr * options["weight_decay"])
        adjusted = _adjust_lr(lr, options["adjust_lr_fn"], torch.Size(target.shape[-2:]))
        matrices.add(target, shard, result, -adjusted)
        if shard is not target.parameter:
            torch.autograd.graph.increment_version(target.parameter)


def _local(tensor: Any) -> Tensor:
    """This rank's tensor of a DTensor, or the tensor."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _has_full_matrices(tensor: Any) -> bool:
    """Whether this rank's tensor of a DTensor is a matrix, or some matrices of a stack."""
    return all(p.is_replicate() or (tensor.dim() == 3 and _is_of_matrices(p)) for p in tensor.placements)


def _is_of_matrices(placement: Any) -> bool:
    """Whether it shards the first dimension, also of what FSDP2 has sharded after experts were."""
    return not placement.is_partial() and getattr(placement, "dim", None) == 0


def _check(parameter: Tensor) -> None:
    check_strided("Muon", "params", parameter)
    if parameter.dim() == 2:  # of a stack each rank has full matrices
        refuse_shards("Muon", "params", [parameter])
    if isinstance(parameter, FormatTensor):
        advice = "Train float32 copies: MasterWeights(parameters, lambda weights: optim.Muon(weights))"
        _refuse(TypeError, "params", "plain parameters", describe(parameter), advice)
    if parameter.dim() not in (2, 3):
        advice = "Give biases and norms to another optimizer, such as torch.optim.AdamW"
        _refuse(ValueError, "params", "matrices [N, K] or stacks [G, N, K]", describe(parameter), advice)
    if hasattr(parameter, "to_local") and not _has_full_matrices(parameter):
        got = f"a DTensor {list(parameter.shape)} with the placements {parameter.placements}"  # type: ignore[attr-defined]
        advice = "Use parallel.shard_ or parallel_mode, whose shards are plain tensors, or torch.optim.Muon"
        _refuse(TypeError, "params", "tensors of which this rank has full matrices", got, advice)


def _check_gradient(parameter: Any, grad: Any) -> None:
    if hasattr(parameter, "to_local") and grad.placements != parameter.placements:
        got = f"{grad.placements} for a parameter with {parameter.placements}"
        advice = "Redistribute the gradient to the placements of its parameter"
        _refuse(ValueError, "params", "gradients with the placements of parameters", got, advice)


def _check_options(settings: dict[str, Any], defaults: Iterable[str]) -> None:
    names = ("lr", "weight_decay", "momentum", "eps", "ns_steps", "ns_coefficients", "adjust_lr_fn")
    _check_values(*(settings[name] for name in names))
    # torch's constructor checks the options of all groups alike, and not those of one.
    torch.optim.Muon([torch.empty(1, 1)], **{name: settings[name] for name in defaults})


def _check_values(
    lr: Any,
    weight_decay: Any,
    momentum: Any,
    eps: Any,
    ns_steps: Any,
    ns_coefficients: Any,
    adjust_lr_fn: Any,
) -> None:
    """Of values with which a step would be one of NaN, or the wrong way; torch looks at some of them."""
    numbers = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "eps": eps}
    for name, value in numbers.items():
        if isinstance(value, Tensor) and (value.is_cuda or value.numel() != 1):
            continue  # the host does not wait for a learning rate; torch refuses several
        if not _is_number(value) or not 0 <= value < math.inf:
            _refuse(ValueError, name, "a finite number from 0", str(value), "Leave it out for the default")
    if not isinstance(ns_steps, int) or not 1 <= ns_steps < 100:
        _refuse(ValueError, "ns_steps", "from 1 to 99", str(ns_steps), "5 are usual")
    is_sequence = isinstance(ns_coefficients, list | tuple) and len(ns_coefficients) == 3
    if not is_sequence or not all(_is_number(each) and math.isfinite(each) for each in ns_coefficients):
        kind = ValueError if isinstance(ns_coefficients, list | tuple) else TypeError
        got = str(ns_coefficients) if kind is ValueError else type(ns_coefficients).__name__
        _refuse(kind, "ns_coefficients", "three finite numbers", got, "Leave them out")
    if not _torch_takes(adjust_lr_fn):
        expected = f"{', '.join(repr(name) for name in ADJUSTMENTS if _torch_takes(name))} or None"
        _refuse(ValueError, "adjust_lr_fn", expected, repr(adjust_lr_fn), "None is as 'original'")


def _torch_takes(adjust_lr_fn: Any) -> bool:
    """Whether the installed version of torch knows this adjustment of the learning rate."""
    try:
        torch.optim.Muon([torch.empty(1, 1)], adjust_lr_fn=adjust_lr_fn)
    except ValueError:
        return False
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Tensor) and not isinstance(value, bool)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _refuse(kind: type[Exception], argument: str, expected: str, got: str, advice: str) -> NoReturn:
    raise kind(message("Muon", argument, expected, got, advice))

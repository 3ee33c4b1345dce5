"""Weight gradients that ``backward_dw()`` computes, after the backward, as pipeline schedules with zero bubbles do."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin._arguments import class_name
from transformer_plugin.nn._main_grad import main_grad_buffers
from transformer_plugin.parallel._shard_experts import local
from transformer_plugin.recipes import DelayedScaling, Recipe
from transformer_plugin.tensor import GroupedTensor
from transformer_plugin.tensor._layout import message

_ops = torch.ops.transformer_plugin


class WgradQueue:
    """The queue of one weight. It is released with this object; a copy has a queue of its own."""

    def __init__(self) -> None:
        self.id: int = _ops.new_wgrad_queue.default()
        with torch.inference_mode(False):  # compiled code saves it for the backward
            #: what the ops take.
            self.tensor = torch.tensor(self.id, dtype=torch.int64, device="cpu")
        weakref.finalize(self, _ops.release_wgrad_queue.default, self.id).atexit = False

    def __len__(self) -> int:
        return ops.count_deferred_wgrads(self.id)

    def __reduce__(self) -> tuple[Any, ...]:
        if len(self) > 0:
            raise RuntimeError(
                "transformer_plugin::backward_dw: argument 'module': expected no weight gradients that wait while a "
                f"module is copied or pickled, got {len(self)}. Call backward_dw() first."
            )
        return WgradQueue, ()


class WgradHooks(torch.nn.Module):
    """What all modules with ``backward_dw()`` have in common: hooks that run after it."""

    _wgrad_hooks: tuple[Callable[[], Any], ...] = ()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Registers what :meth:`backward_dw` calls, without arguments, once the gradients are complete.

        Frameworks reduce the gradients over ranks in it, because the hooks of autograd ran before they were computed.
        """
        if not callable(hook):
            raise TypeError(
                f"transformer_plugin::{class_name(self)}: argument 'hook': expected a function without arguments, "
                f"got {type(hook).__name__}. Pass for example functools.partial(reduce, parameter)."
            )
        self._wgrad_hooks = (*self._wgrad_hooks, hook)

    def need_backward_dw(self) -> bool:
        """Whether weight gradients wait for :meth:`backward_dw`."""
        raise AssertionError("subclasses define it")

    def backward_dw(self) -> None:
        """Computes the weight gradients of all backwards since the last call, in their order, then calls the hooks.

        The gradients are added to ``main_grad``, with ``fuse_wgrad_accumulation``, or to ``.grad``. Does nothing if
        none waits. Runs on the current stream, which must wait for that of the backward if it is another one.
        """
        if not self.need_backward_dw():
            return
        self._compute_wgrads()
        for hook in self._wgrad_hooks:
            hook()

    def _compute_wgrads(self) -> None:
        raise AssertionError("subclasses define it")


class DelayedWgradMixin(WgradHooks):
    """A layer with one weight whose gradient may be delayed."""

    fuse_wgrad_accumulation: bool
    _recipe: Recipe | None
    _delays_wgrad: bool = False
    _deferred: WgradQueue | None = None

    @property
    def delay_wgrad_compute(self) -> bool:
        """Whether a backward leaves the weight's gradient to :meth:`backward_dw`. May be set at any time."""
        return self._delays_wgrad

    @delay_wgrad_compute.setter
    def delay_wgrad_compute(self, delay: bool) -> None:
        if delay and self._deferred is None:
            self._deferred = WgradQueue()
        self._delays_wgrad = bool(delay)

    def need_backward_dw(self) -> bool:
        """Whether weight gradients wait for :meth:`backward_dw`."""
        return self._deferred is not None and len(self._deferred) > 0

    if TYPE_CHECKING:  # every subclass defines it

        def _source_weight(self) -> Tensor | list[Tensor]: ...

    def _weights(self) -> list[Tensor]:
        weight = self._source_weight()
        return [weight] if isinstance(weight, Tensor) else list(weight)

    def _wgrad_queue(self) -> Tensor | None:
        """The argument ``wgrad_queue`` of a layer's op; None where nothing is delayed."""
        if not self._delays_wgrad or self._deferred is None or not torch.is_grad_enabled():
            return None
        if isinstance(self._recipe, DelayedScaling):
            self._refuse(
                "recipe",
                "delay_wgrad_compute=False with DelayedScaling",
                "True",
                "Use another recipe, for example Float8CurrentScaling()",
            )
        if not self.fuse_wgrad_accumulation and not all(weight.is_leaf for weight in self._weights()):
            self._refuse(
                "weight",
                "a parameter with delay_wgrad_compute=True, whose .grad can be added to later",
                "a tensor that is computed from others",
                "Compute the weight's gradient in the backward",
            )
        return self._deferred.tensor

    def _watch_capture(self, op: str, output: Tensor, prefix: str = "") -> None:
        """Called with the output of the layer's op. A backward that does not accumulate is refused before it begins,
        as the op refuses it itself where no view lies between it and a weight."""
        is_deferred = self._delays_wgrad and self._deferred is not None
        if not (is_deferred or self.fuse_wgrad_accumulation) or torch.compiler.is_compiling():
            return
        nodes = _nodes_behind_views(output, self._weights())
        if not nodes or output.grad_fn is None:
            return
        argument = f"{prefix}main_grad{'_queue' if is_deferred else ''}"
        option = "delay_wgrad_compute" if is_deferred else "fuse_wgrad_accumulation"

        def refuse(_: Any) -> None:
            if any(_is_captured(node) for node in nodes):
                expected = f"a backward that accumulates, as the layer has {option}=True"
                got = "torch.autograd.grad for the gradient of its weight, as pipeline schedules with a zero bubble "
                advice = (
                    "Pass dw_builder=transformer_plugin.nn.dw_builder(module) to PipelineStage, or leave the "
                )
                raise ValueError(message(op, argument, expected, f"{got}call it", f"{advice}option out"))

        output.grad_fn.register_prehook(refuse)

    def _refuse(self, argument: str, expected: str, got: str, advice: str) -> NoReturn:
        raise ValueError(
            f"transformer_plugin::{class_name(self)}: argument '{argument}': expected {expected}, got {got}. "
            f"{advice}."
        )

    @torch.no_grad()
    def _compute_wgrads(self) -> None:
        assert self._deferred is not None
        queue, weights = self._deferred.tensor, self._weights()
        if self.fuse_wgrad_accumulation:
            ops.run_deferred_wgrads(queue, main_grad_buffers(class_name(self), weights))
            return
        fresh = all(weight.grad is None for weight in weights)
        grads: list[Tensor] = []
        seen: set[int] = set()  # one parameter may be the weight of several groups
        for weight in weights:
            own = None if id(weight) in seen else weight.grad
            grads.append(_empty_grad(weight, not fresh) if own is None else own)
            seen.add(id(weight))
        ops.run_deferred_wgrads(queue, [_plain(grad) for grad in grads], not fresh)
        for weight, grad in zip(weights, grads, strict=True):
            if not weight.requires_grad or weight.grad is grad:
                continue
            weight.grad = grad if weight.grad is None else weight.grad.add_(grad)


def _nodes_behind_views(output: Tensor, weights: list[Tensor]) -> list[Any]:
    """The nodes that accumulate the gradients of weights of which an op has read views."""
    found: list[Any] = []
    for following, _ in () if output.grad_fn is None else output.grad_fn.next_functions:
        node: Any = following
        while node is not None and node.name() in ("ViewBackward0", "ToCopyBackward0"):
            node = node.next_functions[0][0]
        is_direct = node is following
        if not is_direct and any(getattr(node, "variable", None) is weight for weight in weights):
            found.append(node)
    return found


def _is_captured(node: Any) -> bool:
    """Whether the backward that runs is torch.autograd.grad for the gradient of a leaf."""
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:  # it says so
        return True
    return False


def _plain(grad: Tensor) -> Tensor:
    """The memory of a gradient, as the ops write it."""
    return grad.packed() if isinstance(grad, GroupedTensor) else local(grad)


def _empty_grad(weight: Any, zeros: bool) -> Tensor:
    """A gradient like autograd's of a weight."""
    make = torch.zeros_like if zeros else torch.empty_like
    if not hasattr(weight, "to_local"):
        return make(weight)
    from torch.distributed.tensor import DTensor

    part = make(weight.to_local())
    sizes = {"shape": weight.shape, "stride": weight.stride()}
    return DTensor.from_local(part, weight.device_mesh, weight.placements, run_check=False, **sizes)


class DelayedWgradContainer(WgradHooks):
    """A module with layers whose weight gradients may be delayed."""

    def _delaying(self) -> list[Any]:
        return list(outermost(self))

    @property
    def delay_wgrad_compute(self) -> bool:
        """Whether the backward leaves the weights' gradients to :meth:`backward_dw`.

        Setting it sets that of each layer. Reading it raises a ValueError if the layers differ.
        """
        found = {layer.delay_wgrad_compute for layer in self._delaying()}
        if len(found) > 1:
            raise ValueError(
                f"transformer_plugin::{class_name(self)}: attribute 'delay_wgrad_compute': expected the same in "
                "all layers, got both. Read that of each layer."
            )
        return found == {True}

    @delay_wgrad_compute.setter
    def delay_wgrad_compute(self, delay: bool) -> None:
        for layer in self._delaying():
            layer.delay_wgrad_compute = delay

    def need_backward_dw(self) -> bool:
        """Whether weight gradients of any layer wait for :meth:`backward_dw`."""
        return any(layer.need_backward_dw() for layer in self._delaying())

    def _compute_wgrads(self) -> None:
        for layer in self._delaying():
            layer.backward_dw()


def outermost(module: torch.nn.Module) -> Iterator[WgradHooks]:
    """The modules with ``backward_dw()`` inside a module, without those inside them."""
    for child in module.children():
        if isinstance(child, WgradHooks):
            yield child
        else:
            yield from outermost(child)

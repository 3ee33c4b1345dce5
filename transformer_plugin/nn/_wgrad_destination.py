"""Where the gradient of a layer's weight goes: to autograd, into ``main_grad``, or into a queue.

With ``fuse_wgrad_accumulation`` the backward adds it to the buffer ``weight.main_grad``. With ``delay_wgrad_compute``
the backward leaves its operands in a queue, and ``backward_dw()`` computes it, as pipeline schedules with zero bubbles
do. Of a sharded weight it is reduce-scattered to the ranks' shards first; another runtime takes that of its weight.

The same object as in C++ (``csrc/linear/wgrad_destination.h``), which gets it as the arguments ``main_grad``,
``accumulate``, ``weight_grad`` and ``wgrad_queue`` of an op.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin._arguments import class_name
from transformer_plugin.nn._main_grad import main_grad_buffers, main_grads, mark_added
from transformer_plugin.parallel._shard_experts import local
from transformer_plugin.recipes import DelayedScaling
from transformer_plugin.tensor import GroupedTensor
from transformer_plugin.tensor._layout import message

if TYPE_CHECKING:
    from transformer_plugin.nn._recipe import RecipeModule

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


def checked_hook(module: torch.nn.Module, hook: Callable[[], Any]) -> Callable[[], Any]:
    """What ``backward_dw()`` of a module is to call. Raises if it cannot be called."""
    if not callable(hook):
        raise TypeError(
            f"transformer_plugin::{class_name(module)}: argument 'hook': expected a function without arguments, "
            f"got {type(hook).__name__}. Pass for example functools.partial(reduce, parameter)."
        )
    return hook


class WgradDestination:
    """Where the backward of a layer puts the gradient of the weight. Not changed after it was made.

    Args:
        into_main_grad: into the buffers, in place of ``.grad``.
        is_delayed: into the queue.
        queue: of a layer whose gradients were ever delayed. Gradients may wait in it when they are not any more.
    """

    def __init__(
        self, into_main_grad: bool = False, is_delayed: bool = False, queue: WgradQueue | None = None
    ) -> None:
        self.into_main_grad, self.is_delayed = into_main_grad, is_delayed
        self.queue = WgradQueue() if is_delayed and queue is None else queue

    @property
    def waiting(self) -> int:
        """How many gradients wait in the queue."""
        return 0 if self.queue is None else len(self.queue)

    def arguments(self, layer: RecipeModule) -> dict[str, Any]:
        """What the op of a forward gets."""
        found: dict[str, Any] = {}
        if not (self.into_main_grad or self.is_delayed):
            return found
        if self.queue is not None and self.is_delayed and torch.is_grad_enabled():
            self._check_delay(layer)
            found["wgrad_queue"] = self.queue.tensor
        if self.into_main_grad and not layer._weight_source.is_external:
            found.update(self._buffers(layer))
        return found

    def _check_delay(self, layer: RecipeModule) -> None:
        if isinstance(layer.recipe, DelayedScaling):
            _refuse_delayed_scaling(layer, "delay_wgrad_compute")
        if not self.into_main_grad and not all(weight.is_leaf for weight in layer._weights()):
            expected = "a parameter with delay_wgrad_compute=True, whose .grad can be added to later"
            got, advice = (
                "a tensor that is computed from others",
                "Compute the weight's gradient in the backward",
            )
            raise ValueError(message(class_name(layer), "weight", expected, got, advice))

    def _buffers(self, layer: RecipeModule) -> dict[str, Any]:
        if isinstance(layer.recipe, DelayedScaling):
            _refuse_delayed_scaling(layer, "fuse_wgrad_accumulation")
        main_grad: Any
        main_grad, accumulate, weight_grad = main_grads(class_name(layer), layer._weights())
        if main_grad is not None and isinstance(layer._source_weight(), Tensor):
            main_grad = main_grad[0]
        return {"main_grad": main_grad, "accumulate": accumulate, "weight_grad": weight_grad}

    def accepted(self, layer: RecipeModule, arguments: dict[str, Any]) -> None:
        """Called with what :meth:`arguments` returned, once the layer's op has accepted the call."""
        if arguments.get("weight_grad", "none") != "none":
            mark_added(layer._weights())

    def watch_capture(self, layer: RecipeModule, op: str, output: Tensor, prefix: str = "") -> None:
        """Called with the output of the layer's op. A backward that does not accumulate is refused before it begins,
        as the op refuses it itself where no view lies between it and a weight."""
        if not (self.is_delayed or self.into_main_grad) or torch.compiler.is_compiling():
            return
        nodes = _nodes_behind_views(output, layer._weights())
        if not nodes or output.grad_fn is None:
            return
        argument = f"{prefix}main_grad{'_queue' if self.is_delayed else ''}"
        option = "delay_wgrad_compute" if self.is_delayed else "fuse_wgrad_accumulation"

        def refuse(_: Any) -> None:
            if any(_is_captured(node) for node in nodes):
                expected = f"a backward that accumulates, as the layer has {option}=True"
                got = "torch.autograd.grad for the gradient of its weight, as pipeline schedules with a zero bubble "
                advice = (
                    "Pass dw_builder=transformer_plugin.nn.dw_builder(module) to PipelineStage, or leave the "
                )
                raise ValueError(message(op, argument, expected, f"{got}call it", f"{advice}option out"))

        output.grad_fn.register_prehook(refuse)

    @torch.no_grad()
    def compute(self, layer: RecipeModule) -> None:
        """Computes the gradients that wait in the queue, and adds them to ``main_grad`` or ``.grad``."""
        assert self.queue is not None
        queue, weights = self.queue.tensor, layer._weights()
        if self.into_main_grad:
            ops.run_deferred_wgrads(queue, main_grad_buffers(class_name(layer), weights))
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


def _refuse_delayed_scaling(layer: RecipeModule, option: str) -> NoReturn:
    expected, advice = (
        f"{option}=False with DelayedScaling",
        "Use another recipe, for example Float8CurrentScaling()",
    )
    raise ValueError(message(class_name(layer), "recipe", expected, "True", advice))


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

    local = make(weight.to_local())
    sizes = {"shape": weight.shape, "stride": weight.stride()}
    return DTensor.from_local(local, weight.device_mesh, weight.placements, run_check=False, **sizes)

"""Optimizers of quantized weights."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from transformer_plugin._arguments import check_strided, typed
from transformer_plugin.nn.quantized_weight import Seen, copies_of
from transformer_plugin.parallel._layer_shards import note, note_shards, refuse_replaced
from transformer_plugin.parallel._parameter_shard import layout_of, shard_of_parameter
from transformer_plugin.parallel._shard_experts import local
from transformer_plugin.parallel._shard_tensor import ShardTensor, shard_for
from transformer_plugin.parallel._tensor_slices import slices_of
from transformer_plugin.parallel.clip import gradient_of
from transformer_plugin.tensor._base import FormatTensor
from transformer_plugin.tensor._layout import message

__all__ = ["MasterWeights", "refresh_after"]


def refresh_after(optimizer: Optimizer) -> RemovableHandle:
    """Quantizes the weights of an optimizer again after each of its steps.

    These are the :class:`~transformer_plugin.nn.QuantizedWeight` objects whose weight is a parameter of this optimizer
    at the time of a step, those that modules keep after ``quantize_weights()`` and others. It holds also for an
    optimizer that changes parameters without counting it (``fused=True``), and inside a CUDA graph that captures the
    step. Other optimizers are not affected.

    Args:
        optimizer: any ``torch.optim.Optimizer``.

    Returns:
        A handle; its ``remove()`` undoes the call.

    Raises:
        TypeError: no optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "transformer_plugin::refresh_after: argument 'optimizer': expected a torch.optim.Optimizer, got "
            f"{type(optimizer).__name__}. Call QuantizedWeight.refresh() after its steps."
        )
    return optimizer.register_step_post_hook(_refresh)


def _refresh(optimizer: Optimizer, *_: Any) -> None:
    seen: set[int] = set()
    shards: list[Any] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if "quantized_copies" not in parameter.__dict__:
                continue
            for weight in copies_of(parameter):
                if id(weight) not in seen:  # one copy may be of several parameters
                    seen.add(id(weight))
                    if weight.refreshes_itself:
                        shards.append(weight)
                    else:
                        weight.refresh()
    if shards:
        from transformer_plugin.parallel._quantized_shard import refresh_together

        refresh_together(shards, None)


class MasterWeights:
    """Trains parameters, quantized ones too, through an optimizer of float32 copies.

    Each step gives the gradients to the copies, the master weights, steps them, and writes them into the parameters:
    ``copy_`` rounds to the dtype of a plain parameter, and quantizes into the memory of a quantized one.

    Args:
        parameters: plain tensors, :class:`~transformer_plugin.tensor.QuantizedTensor` s or
            :class:`~transformer_plugin.tensor.GroupedTensor` s. Master weights start at
            ``get_high_precision_init_val()`` where a parameter has it, else at its present values.
        make: makes the optimizer from the list of the master weights, for example
            ``lambda weights: torch.optim.AdamW(weights, lr=1e-3)``.

    Attributes:
        optimizer: the optimizer, which schedulers of the learning rate take: this class is none itself.
        master_weights: float32, in the order of the parameters.

    A gradient is ``parameter.main_grad`` where ``parameter.grad_added_to_main_grad`` is True, as ``parameter.grad`` is
    then a tensor without a meaning. Otherwise it is ``parameter.grad``, or ``parameter.main_grad`` where there is none.

    Master weights follow loads: if a parameter has been changed since the last step, and is no longer its master weight
    in fewer bits, :meth:`step` and :meth:`state_dict` give its values to the master weight first. What torch counts as
    a change is noticed (``load_state_dict``, ``torch.distributed.checkpoint``, ``parameter.copy_()``, and of a value
    ``quantize_()``), and ``parameter.data = other``. Call :meth:`follow_parameters` after ``parameter.data.copy_()``
    of a plain tensor, and where ``torch.distributed.checkpoint.load`` has written into a ``DTensor`` without a
    ``load_state_dict`` afterwards. Constraints such as ``clamp_()`` belong on the master weights.
    ``load_state_dict(assign=True)`` makes other parameters: the next step raises an error.
    """

    @typed
    def __init__(self, parameters: Iterable[Tensor], make: Callable[[list[Tensor]], Optimizer]) -> None:
        note_shards()
        self.parameters = [p for p in parameters if p.requires_grad]
        for parameter in self.parameters:
            check_strided("MasterWeights", "parameters", parameter)
        self.master_weights = [_master_of(p) for p in self.parameters]
        #: Parameters that modules have replaced by others, by id.
        self._replaced: dict[int, Replaced] = {}
        self._seen: list[Seen] | None
        self.optimizer = make(self.master_weights)
        if not callable(getattr(self.optimizer, "step", None)):
            got = type(self.optimizer).__name__
            advice = "Pass for example lambda weights: torch.optim.AdamW(weights, lr=1e-3)"
            raise TypeError(
                message("MasterWeights", "make", "a function that returns an optimizer", got, advice)
            )
        self._note_written()
        self._watch()

    def _watch(self) -> None:
        _masters_of_process.add(self)
        _watch_assignments()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, whose parameters have other versions, memory and ids."""
        behind: list[int] | None = None
        if self._seen is not None:
            behind = [seen.versions_behind(p) for seen, p in zip(self._seen, self.parameters, strict=True)]
        found = [(i, self._replaced.get(id(parameter))) for i, parameter in enumerate(self.parameters)]
        replaced = {i: each.name for i, each in found if each is not None}
        return {**self.__dict__, "_seen": behind, "_replaced": replaced}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        behind, replaced = state["_seen"], state["_replaced"]
        self._replaced = {
            id(self.parameters[i]): Replaced.now(self.parameters[i], n) for i, n in replaced.items()
        }
        if behind is not None:
            self._seen = [Seen.of(p, versions) for p, versions in zip(self.parameters, behind, strict=True)]
        self._watch()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer, and its result in the parameters.

        Args:
            closure: computes the loss and the gradients of the parameters, as for optimizers of torch. It is called
                once, so that optimizers that call it several times (``LBFGS``) do not work.

        Returns:
            What the closure returns; None without one.

        Raises:
            TypeError: the closure is no function.
            ValueError: a module has another parameter in the place of one that has no gradient since then, for example
            since ``load_state_dict(assign=True)``; or no ``main_grad``. Nothing is changed then.
        """
        loss = self._loss_of(closure)
        refuse_replaced(self.parameters)
        grads = [gradient_of(parameter, "MasterWeights") for parameter in self.parameters]
        self._check_replaced(grads)
        self._follow_changed()
        for grad, master in zip(grads, self.master_weights, strict=True):
            master.grad = None if grad is None else grad.to(master.dtype)
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.master_weights, strict=True):
            if master.grad is not None:
                parameter.copy_(master.detach())
        self.optimizer.zero_grad()
        self._note_written()
        return loss

    @staticmethod
    def _loss_of(closure: Callable[[], Any] | None) -> Any:
        """Calls a closure, with gradients."""
        if closure is None:
            return None
        if not callable(closure):
            got, advice = (
                type(closure).__name__,
                "Leave it out, or pass what computes the loss and the gradients",
            )
            raise TypeError(message("MasterWeights", "closure", "a function or None", got, advice))
        with torch.enable_grad():
            return closure()

    @torch.no_grad()
    def follow_parameters(self) -> None:
        """Gives every master weight the values of its parameter, unless that is the master weight in fewer bits."""
        for parameter, master in zip(self.parameters, self.master_weights, strict=True):
            _follow(master, parameter)
        self._note_written()

    def _follow_changed(self) -> None:
        """The same of parameters that something else has changed since the last step."""
        if self._seen is None or torch.compiler.is_compiling():
            return
        for parameter, master, seen in zip(self.parameters, self.master_weights, self._seen, strict=True):
            if seen.is_outdated(parameter):
                _follow(master, parameter)
        self._note_written()

    def _note_written(self) -> None:
        """The parameters are as this optimizer has written them. Compiled code cannot read versions."""
        compiling = torch.compiler.is_compiling()
        self._seen = None if compiling else [Seen.of(parameter) for parameter in self.parameters]

    def _check_replaced(self, grads: Iterable[Tensor | None]) -> None:
        """Raises if a module has another parameter in the place of one that no backward has reached since then."""
        for parameter, grad in zip(self.parameters, grads, strict=True):
            replaced = self._replaced.get(id(parameter))
            if replaced is not None and replaced.has_no_new(grad):
                got = f"'{replaced.name}', of which the module has another by now"
                advice = (
                    "Make a new MasterWeights after load_state_dict(assign=True) and after an assignment, or load with "
                    "assign=False"
                )
                raise ValueError(message("MasterWeights", "parameters", "those of the model", got, advice))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the parameters: ``.grad``, and with zeros ``main_grad``, a framework's buffer."""
        for parameter in self.parameters:
            main_grad = getattr(parameter, "main_grad", None)
            if isinstance(main_grad, Tensor):
                main_grad.detach().zero_()
            if hasattr(parameter, "grad_added_to_main_grad"):
                parameter.grad_added_to_main_grad = False
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer and the master weights. Of shards both are shards, as in the model's."""
        with torch.no_grad():
            self._follow_changed()
        layouts = [layout_of(master) for master in self.master_weights]
        masters = [master.detach() for master in self.master_weights]
        return {
            "optimizer": self.optimizer.state_dict(),
            "master_weights": [
                m if at is None else ShardTensor(m, at) for m, at in zip(masters, layouts, strict=True)
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores both, and writes the master weights into the parameters.

        Raises:
            ValueError: another number of master weights, other sizes, or a state that the optimizer refuses. Nothing is
            changed then.
        """
        if not isinstance(state, dict) or not {"optimizer", "master_weights"} <= state.keys():
            got = (
                f"a dict with {sorted(map(str, state))}" if isinstance(state, dict) else type(state).__name__
            )
            advice = "Pass what state_dict() of a MasterWeights returned"
            raise ValueError(
                message("MasterWeights", "state", "a dict with 'optimizer' and 'master_weights'", got, advice)
            )
        optimizer, saved = state["optimizer"], list(state["master_weights"])
        if len(saved) == len(self.master_weights):
            saved = [_local_shard_of(weight, self.master_weights[i], i) for i, weight in enumerate(saved)]
        shapes = [list(weight.shape) for weight in saved]
        expected = [list(weight.shape) for weight in self.master_weights]
        if shapes != expected:
            raise ValueError(
                f"transformer_plugin::MasterWeights: argument 'state': expected master weights of sizes {expected}, "
                f"got {shapes}. Load the state of an optimizer of the same parameters."
            )
        self.optimizer.load_state_dict(optimizer)  # raises before it changes anything
        for parameter, master, weight in zip(self.parameters, self.master_weights, saved, strict=True):
            master.copy_(weight)
            parameter.copy_(master.detach())
        self._note_written()


class Replaced(NamedTuple):
    """A parameter in whose place a module has another, and its gradients at that time."""

    name: str
    grads: tuple[Seen, ...]

    @staticmethod
    def now(parameter: Tensor, name: str) -> Replaced:
        grads = (parameter.grad, getattr(parameter, "main_grad", None))
        return Replaced(name, tuple(Seen.of(grad) for grad in grads if _is_dense(grad)))

    def has_no_new(self, grad: Tensor | None) -> bool:
        """Whether a gradient is no backward's since then. Reads it on the host."""
        if grad is None or not _is_dense(grad):
            return grad is None
        return not all(seen.is_outdated(grad) for seen in self.grads) or not local(grad).any()


def _is_dense(grad: object) -> TypeGuard[Tensor]:
    return isinstance(grad, Tensor) and grad.layout == torch.strided


#: All that exist: modules that replace a parameter look for its masters here.
_masters_of_process: weakref.WeakSet[MasterWeights] = weakref.WeakSet()


@functools.cache
def _watch_assignments() -> None:
    """Once per process: optimizers learn of parameters that modules replace."""
    register_module_parameter_registration_hook(_note_replaced)


def _note_replaced(module: torch.nn.Module, name: str, parameter: Tensor) -> None:
    replaced = module._parameters.get(name)
    if replaced is None or replaced is parameter:
        return
    for masters in list(_masters_of_process):
        if any(replaced is other for other in masters.parameters):
            masters._replaced[id(replaced)] = Replaced.now(replaced, f"{name} of {type(module).__name__}")


def _follow(master: Tensor, parameter: Tensor) -> None:
    """Gives a master weight the values of its parameter, unless that is the master weight in fewer bits."""
    own = local(master.detach())
    own.copy_(_of_which_is(own, local(parameter.detach()), _value_of(local(parameter))))


def _of_which_is(values: Tensor, parameter: Tensor, others: Tensor) -> Tensor:
    """Those values of which a parameter is the rounded or quantized form; if not these, the others. Without a wait."""
    written = parameter.clone()
    written.copy_(values)
    return torch.where((_unquantized(written) == _unquantized(parameter)).all(), values, others)


def _local_shard_of(saved: Tensor, master: Tensor, i: int) -> Tensor:
    """This rank's shard of a saved master weight."""
    layout = layout_of(master)
    if layout is not None:
        return shard_for(saved, layout, f"master_weights.{i}")
    if isinstance(saved, ShardTensor):
        advice = "Load it with torch.distributed.checkpoint into the state of this optimizer"
        expected = "full master weights, as this optimizer has"
        raise ValueError(message("MasterWeights", f"master_weights.{i}", expected, repr(saved), advice))
    return saved


def _master_of(parameter: Tensor) -> Tensor:
    """A float32 copy of a parameter."""
    master = _value_of(parameter).to(torch.float32, copy=True).requires_grad_()
    note(master, shard_of_parameter(parameter), slices_of(parameter))
    return master


def _value_of(parameter: Tensor) -> Tensor:
    """The values of a parameter in float32; those that it has kept, if it is these in fewer bits still."""
    present = _unquantized(parameter)
    kept = parameter.get_high_precision_init_val() if isinstance(parameter, FormatTensor) else None
    if kept is None:
        return present
    return _of_which_is(kept.to(parameter.device, torch.float32), parameter.detach(), present)


def _unquantized(parameter: Tensor) -> Tensor:
    """The values of a parameter in float32."""
    value = parameter.detach()
    return value.dequantize(torch.float32) if isinstance(value, FormatTensor) else value.float()

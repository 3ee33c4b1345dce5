"""What the two value types share: their buffers, their construction, and how torch sees them.

A value is a wrapper subclass of ``torch.Tensor``: it has a shape, a nominal dtype, a device and a gradient, and its
numbers are in the tensors of :class:`Buffers`. Ops of aten on it go to the table of
:mod:`transformer_plugin.tensor._table`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
import torch.utils.dlpack
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.tensor import _layout, _table

#: The key of values as they are.
UNQUANTIZED = "none"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Buffers(NamedTuple):
    """The tensors of a value; None where it has none.

    All of them travel together, so that no copy, view or pickle of a value can lose one.
    """

    rowwise_data: Tensor | None = None
    scale_inv: Tensor | None = None
    amax: Tensor | None = None
    columnwise_data: Tensor | None = None
    columnwise_scale_inv: Tensor | None = None
    columnwise_amax: Tensor | None = None
    group_sizes: Tensor | None = None

    def present(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of those that exist."""
        return ((name, t) for name, t in zip(self._fields, self, strict=True) if t is not None)

    def of_values(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of all but the group sizes."""
        return ((name, t) for name, t in self.present() if name != "group_sizes")


_forbid_access = torch._C._set_throw_on_mutable_data_ptr

#: The two types by name.
KINDS: dict[str, type[FormatTensor]] = {}


def new_value(
    kind: str, key: str, shape: Any, dtype: torch.dtype, requires_grad: bool, *buffers: Tensor | None
) -> Any:
    """A value over buffers. A call of this function is one node of a graph that torch.compile traces.

    It is an inference tensor if its data is one, also where the mode is another now: as torch has it for views.
    """
    data = buffers[0] if buffers[0] is not None else buffers[3]
    assert data is not None
    options: dict[str, Any] = {"dtype": dtype, "device": data.device, "requires_grad": requires_grad}
    of_inference = data.is_inference()
    if of_inference is torch.is_inference_mode_enabled():
        value = Tensor._make_wrapper_subclass(KINDS[kind], shape, **options)
    else:
        with torch.inference_mode(of_inference):
            value = Tensor._make_wrapper_subclass(KINDS[kind], shape, **options)
    _forbid_access(value)  # code in C++ that asks for its address gets an error, not 0
    value._buffers = Buffers(*buffers)
    value._key = key
    return value


class FormatTensor(Tensor):
    """Base class of :class:`QuantizedTensor` and :class:`GroupedTensor`."""

    _buffers: Buffers
    _key: str
    _is_param: bool

    def __init_subclass__(cls) -> None:
        KINDS[cls.__name__] = cls

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def _make(
        cls,
        buffers: Buffers,
        key: str,
        shape: Any,
        dtype: torch.dtype,
        requires_grad: bool = False,
    ) -> Any:
        """A value over the buffers, which are not checked. torch computes its strides, those of a contiguous tensor."""
        return new_value(cls.__name__, key, shape, dtype, requires_grad, *buffers)

    def _with(self, buffers: Buffers, shape: Any = None, dtype: torch.dtype | None = None) -> Any:
        """A value of the same type and format over other buffers."""
        return self._make(buffers, self._key, self.shape if shape is None else shape, dtype or self.dtype)

    @property
    def format(self) -> Format:
        """How the values are stored."""
        return _layout.parsed(self._key)

    @property
    def rowwise_data(self) -> Tensor | None:
        """The data along rows, in the sizes of the value (half the columns, two elements to a byte, for ``nvfp4``)."""
        return self._buffers.rowwise_data

    @rowwise_data.setter
    def rowwise_data(self, data: Tensor) -> None:
        self._set_data(data, "rowwise_data")

    @property
    def scale_inv(self) -> Tensor | None:
        """The scales of :attr:`rowwise_data`."""
        return self._buffers.scale_inv

    @property
    def amax(self) -> Any:
        """The largest magnitudes that ``nvfp4`` scales :attr:`rowwise_data` by; None of other formats.

        Of an unquantized value it is the method of a tensor: ``value.amax(dim)``.
        """
        if self._key == UNQUANTIZED:
            return super().amax
        return self._buffers.amax

    @property
    def columnwise_data(self) -> Tensor | None:
        """The data quantized along columns, transposed."""
        return self._buffers.columnwise_data

    @property
    def columnwise_scale_inv(self) -> Tensor | None:
        """The scales of :attr:`columnwise_data`."""
        return self._buffers.columnwise_scale_inv

    @property
    def columnwise_amax(self) -> Tensor | None:
        """The largest magnitudes that ``nvfp4`` scales :attr:`columnwise_data` by."""
        return self._buffers.columnwise_amax

    @property
    def data(self) -> Any:
        """The value without its autograd history, over the same memory.

        An assignment replaces the memory: from then on every op reads the tensor that was assigned. It has the same
        shape, dtype and device, and is a value of the same type and format or, for an unquantized
        :class:`GroupedTensor`, a plain tensor.
        """
        return torch._C.TensorBase.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        self._set_data(value, "data")

    def _set_data(self, value: Tensor, name: str) -> None:
        if self._takes(value):
            self._buffers = value._buffers  # type: ignore[attr-defined]
            return
        self._refuse(
            name,
            f"a {self._described_fully()}",
            value._described_fully() if isinstance(value, FormatTensor) else _layout.describe(value),
            "Use copy_() to quantize other values into the same memory",
        )

    def _takes(self, other: object) -> bool:
        """Whether another value has the same type, format, buffers, sizes, nominal dtype and device."""
        return self._takes_bytes(other) and other.dtype == self.dtype and other.device == self.device  # type: ignore[attr-defined]

    def _takes_bytes(self, other: object) -> bool:
        """Whether the bytes of another value are those of one like this: of another nominal dtype, on any device."""
        return (
            type(other) is type(self)
            and other.shape == self.shape
            and other._key == self._key
            and [(name, t.shape) for name, t in other._buffers.present()]
            == [(name, t.shape) for name, t in self._buffers.present()]
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers as a plain tensor: what :func:`transformer_plugin.ops.dequantize` gives of the rowwise data, or
        of the columnwise data where there is no other.

        Args:
            dtype: float32, bfloat16 or float16; the nominal dtype by default.

        Returns:
            A fresh tensor of the shape of the value. Its gradient is that of the value, unchanged.
        """
        if dtype is not None and not isinstance(dtype, torch.dtype):
            self._refuse("dtype", "a torch.dtype or None", repr(dtype), "Pass torch.float32", TypeError)
        value = self if dtype is None or dtype == self.dtype else self.to(dtype)
        return torch.ops.aten.view_copy.default(value, value.shape)

    def flat_bytes(self, columnwise: bool = False) -> Tensor:
        """The memory of the rowwise data, or of the columnwise data, as uint8 ``[n]``: an alias, not a copy.

        Raises:
            ValueError: there is no data in this direction.
        """
        data = self._buffers.columnwise_data if columnwise else self._buffers.rowwise_data
        if data is None:
            self._refuse(
                "columnwise",
                f"{not columnwise} for a value without {'columnwise' if columnwise else 'rowwise'} data",
                str(columnwise),
                "Read the other direction, or quantize in both",
            )
        return data.detach().view(torch.uint8).view(-1)

    def expand_as(self, other: Tensor) -> Any:
        """The value itself with an autograd node, for a tensor of the same shape; others are an error.

        The node leads to the node that accumulates the gradient of a parameter:
        ``p.expand_as(p).grad_fn.next_functions[0][0]``.
        """
        return self.expand(other.shape)

    def data_ptr(self) -> int:
        """The address of the rowwise data, or of the columnwise data where there is no other."""
        return next(self._buffers.of_values())[1].data_ptr()

    def share_memory_(self) -> Any:
        """Moves all buffers into shared memory, as of a plain tensor: for other processes. On a GPU nothing happens."""
        for _, tensor in self._buffers.present():
            tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether all buffers are in shared memory."""
        return all(tensor.is_shared() for _, tensor in self._buffers.present())

    def get_high_precision_init_val(self) -> Tensor | None:
        """The initial values before they were quantized, on the CPU; None without them
        (:func:`transformer_plugin.nn.quantized_init`), and of a layer on the meta device before it has values."""
        kept = self.__dict__.get("high_precision_init_val")
        return None if kept is None or kept.is_meta else kept

    def clear_high_precision_init_val(self) -> None:
        """Frees the initial values."""
        self.__dict__.pop("high_precision_init_val", None)

    def _described(self) -> str:
        return f"{type(self).__name__} {_layout.sizes(self)} in {self._key}"

    def _described_fully(self) -> str:
        """All in which two values of one type may differ."""
        buffers = ", ".join(name for name, _ in self._buffers.present())
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self._described()} of nominal dtype {dtype} on {self.device} with {buffers}"

    def _refuse(
        self, argument: str, expected: str, got: str, advice: str, error: type[Exception] = ValueError
    ) -> NoReturn:
        raise error(_layout.message(type(self).__name__, argument, expected, got, advice))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        buffers = ", ".join(name for name, _ in self._buffers.present())
        gradient = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"{type(self).__name__}({_layout.sizes(self)}, format={self._key!r}, dtype={self.dtype}, "
            f"device='{self.device}', buffers=({buffers}){gradient})"
        )

    # How torch's compiler takes a value apart and makes one again.

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype]]:
        return [name for name, _ in self._buffers.present()], (self._key, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, tensors: dict[str, Tensor], meta: tuple[str, torch.dtype], outer_size: Any, outer_stride: Any
    ) -> Any:
        key, dtype = meta
        return cls._make(Buffers(**tensors), key, outer_size, dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _table.call(func, args, kwargs or {})

    # Copies and pickles. Attributes that a framework has set on a parameter (main_grad) are kept.

    def _attributes(self) -> dict[str, Any]:
        """What was set on the instance from outside."""
        own = ("_buffers", "_key", "_is_param")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
            )
        with torch.no_grad():
            buffers = Buffers(*(copy.deepcopy(t, memo) for t in self._buffers))
            result = _rebuild(*self._arguments(buffers))
        memo[id(self)] = result
        result.__dict__.update(copy.deepcopy(self._attributes(), memo))
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        return result

    def _arguments(self, buffers: Buffers) -> tuple[Any, ...]:
        """What :func:`_rebuild` makes a value of."""
        is_parameter = isinstance(self, torch.nn.Parameter)
        return type(self), buffers, self._key, tuple(self.shape), self.dtype, self.requires_grad, is_parameter

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """All of types that ``weights_only=True`` loads, and data as bytes: pickle has no FP8 tensors."""
        cls, buffers, *rest = self._arguments(self._buffers)
        stored = tuple(
            t if t is None or not _is_byte(t.dtype) else t.detach().view(torch.uint8) for t in buffers
        )
        return _rebuild, (cls, stored, *rest, self._attributes())


for _name in ("numpy", "tolist", "item", "apply_", "map_", "map2_", "storage", "__array__", "__dlpack__"):
    setattr(FormatTensor, _name, _table.refused_method(_name))
# Libraries ask whether this attribute exists, which an AttributeError denies.
_interface = "__cuda_array_interface__"
setattr(FormatTensor, _interface, property(_table.refused_method(_interface, AttributeError)))


def _refuse_values(to_dlpack: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function, which asks a tensor for its address and calls no method that a subclass could have."""
    refused = _table.refused_method("to_dlpack")

    @functools.wraps(to_dlpack)
    def checked(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (refused if isinstance(tensor, FormatTensor) else to_dlpack)(tensor, *args, **kwargs)

    return checked


for _module in (torch, torch.utils.dlpack):
    setattr(_module, "to_dlpack", _refuse_values(_module.to_dlpack))  # noqa: B010


def _is_byte(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def _rebuild(
    cls: type[FormatTensor],
    stored: tuple[Tensor | None, ...],
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    is_parameter: bool,
    attributes: dict[str, Any] | None = None,
) -> Any:
    """Makes a value from its pickle or for its deep copy."""
    buffers = list(stored)
    format = _layout.parsed(key)
    if buffers[0] is not None and not format.is_quantized:
        buffers[0] = buffers[0].view(dtype)
    if format.is_quantized:
        for i, kind in (
            (0, format.dtype),
            (1, format.scale_dtype),
            (3, format.dtype),
            (4, format.scale_dtype),
        ):
            tensor = buffers[i]
            buffers[i] = tensor if tensor is None or kind is None else tensor.view(kind)
    value = cls._make(Buffers(*buffers), key, shape, dtype)
    result = torch.nn.Parameter(value, requires_grad) if is_parameter else value.requires_grad_(requires_grad)
    result.__dict__.update(attributes or {})
    return result

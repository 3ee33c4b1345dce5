"""GroupedTensor: several matrices back to back in one storage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.tensor import _checks, _layout
from transformer_plugin.tensor._base import UNQUANTIZED, Buffers, FormatTensor, new_value

_ops = torch.ops.transformer_plugin


class _FromTensor(torch.autograd.Function):
    """The node from a tensor to a value over its memory."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, group_sizes: Tensor | None) -> Any:
        nothing = (None,) * 5
        arguments = ("GroupedTensor", UNQUANTIZED, data.shape, data.dtype, False)
        return new_value(*arguments, data.detach(), *nothing, group_sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0]
        return (grad.rowwise_data if isinstance(grad, FormatTensor) else grad), None


def differentiable(data: Tensor, group_sizes: Tensor | None) -> GroupedTensor:
    """A value over the memory of a tensor that requires a gradient, which gets that of the value.

    A call of this function is one node of a graph that torch.compile traces.
    """
    value: GroupedTensor = _FromTensor.apply(data, group_sizes)
    return value


def over(data: Tensor, group_sizes: Tensor | None) -> GroupedTensor:
    """:func:`differentiable`, in half of its host time where nothing is traced."""
    if torch.compiler.is_compiling() or type(data) is not Tensor:
        return differentiable(data, group_sizes)
    nothing = (None,) * 5
    arguments = ("GroupedTensor", UNQUANTIZED, data.shape, data.dtype, False)
    value: GroupedTensor = new_value(*arguments, data.detach(), *nothing, group_sizes)
    _ops.connect_gradient.default(value, data)
    return value


class GroupedTensor(FormatTensor):
    """G matrices in one storage: of one size, ``[G, M, K]``, or with rows whose number is on the device, ``[T, K]``.

    Without ``group_sizes`` the members are ``[M, K]`` (or ``[N]``, biases for example): the value is ``[G, M, K]`` (or
    ``[G, N]``). With ``group_sizes`` it is ragged: the first rows are of group 0, the next of group 1, and so on; rows
    past the groups may hold anything and are never read. The host does not read the sizes, so a CUDA graph follows new
    ones.

    The constructor takes buffers that exist; none of them is copied. :func:`transformer_plugin.quantize` makes
    quantized values.

    Args:
        rowwise_data: the values, contiguous, any dtype with ``format="none"``; data of the format otherwise.
        group_sizes: int32 or int64 ``[G]`` on the device of the data; None for members of one size.
        format: the format of the data or its key, ``"none"`` for values as they are.
        dtype: the nominal dtype of quantized values: float32, bfloat16 or float16. Not for ``"none"``.
        scale_inv, amax, columnwise_data, columnwise_scale_inv, columnwise_amax: as for
            :class:`~transformer_plugin.tensor.QuantizedTensor`, in the layouts of a stack or of a ragged matrix.
        rows: T, of a ragged value without rowwise data.
        requires_grad: whether a gradient is wanted. It is a plain tensor of the shape of the value. A value over a
            tensor that requires a gradient passes its own on to that tensor.

    Raises:
        TypeError: no tensor, another dtype. ValueError: sizes that do not agree, scales that are missing or of another
            size, tensors that are not contiguous or on several devices.

    An unquantized value works under optimizers: elementwise in-place ops and their ``_foreach`` and fused forms act on
    its storage (of a ragged value on the rows of its groups). Ops that the type does not have are a ValueError; nothing
    is stacked or dequantized.
    """

    def __new__(
        cls,
        rowwise_data: Tensor | None = None,
        group_sizes: Tensor | None = None,
        *,
        format: str | Format = UNQUANTIZED,
        dtype: torch.dtype | None = None,
        scale_inv: Tensor | None = None,
        amax: Tensor | None = None,
        columnwise_data: Tensor | None = None,
        columnwise_scale_inv: Tensor | None = None,
        columnwise_amax: Tensor | None = None,
        rows: int | None = None,
        requires_grad: bool = False,
    ) -> GroupedTensor:
        op = "GroupedTensor"
        buffers = Buffers(
            rowwise_data, scale_inv, amax, columnwise_data, columnwise_scale_inv, columnwise_amax, group_sizes
        )
        _checks.check_flag(op, "requires_grad", requires_grad)
        if _checks.key_of(op, format) == UNQUANTIZED:
            data = cls._check_unquantized(buffers, dtype, rows)
            if data.requires_grad and torch.is_grad_enabled():
                return over(data, group_sizes)
            if (
                data.requires_grad
            ):  # under no_grad: functions read the data, and would pass a gradient on to it
                buffers = buffers._replace(rowwise_data=data.detach())
            value: GroupedTensor = cls._make(buffers, UNQUANTIZED, data.shape, data.dtype, requires_grad)
            return value
        parsed = _checks.format_of(op, format)
        if not parsed.is_quantized:
            advice = "Cast the values first"
            _checks.refuse(op, "format", "'none' or a format with scales", f"'{parsed.key}'", advice)
        _checks.check_rows(op, rows, buffers)
        nominal = torch.bfloat16 if dtype is None else dtype
        shape = _checks.check_quantized(op, buffers, parsed, nominal, 3 if group_sizes is None else 2, rows)
        quantized: GroupedTensor = cls._make(buffers, parsed.key, shape, nominal, requires_grad)
        return quantized

    @classmethod
    def _check_unquantized(cls, buffers: Buffers, dtype: torch.dtype | None, rows: int | None) -> Tensor:
        op = "GroupedTensor"
        data = _checks.check_tensor(op, "rowwise_data", buffers.rowwise_data)
        ragged = buffers.group_sizes is not None
        if data.dim() != 2 if ragged else data.dim() not in (2, 3):
            expected = "[T, K] with group sizes" if ragged else "[G, M, K], or [G, N] for members [N]"
            _checks.refuse(op, "rowwise_data", expected, _layout.describe(data), "Reshape it first")
        if ragged:
            _checks.check_group_sizes(op, buffers.group_sizes, data.device)
        for name, tensor in buffers.of_values():
            if name != "rowwise_data":
                got = _layout.describe(tensor)
                _checks.refuse(
                    op, name, "None for unquantized values", got, "Leave it out or pass the format"
                )
        if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype != data.dtype):
            _checks.refuse(op, "dtype", f"{data.dtype}, that of the values", str(dtype), "Leave it out")
        _checks.check_rows(op, rows, buffers)
        return data

    @classmethod
    def from_members(cls, members: Any, *, requires_grad: bool = False) -> GroupedTensor:
        """Copies G tensors of one size and dtype into one new storage.

        Raises:
            TypeError: no tensors. ValueError: no member, members that are not ``[M, K]`` or ``[N]``, or of several
            sizes, dtypes or devices.
        """
        op = "GroupedTensor"
        _checks.check_flag(op, "requires_grad", requires_grad)
        if not isinstance(members, Iterable):
            got = _layout.describe(members)
            _checks.refuse(op, "members", "tensors", got, "Pass a list of tensors", TypeError)
        listed = [_checks.check_plain(op, f"members[{i}]", member) for i, member in enumerate(members)]
        if listed and listed[0].dim() not in (1, 2):
            got = _layout.describe(listed[0])
            _checks.refuse(op, "members[0]", "[M, K], or [N] for biases", got, "Reshape it first")
        kinds = {(tuple(t.shape), t.dtype, t.device) for t in listed}
        if len(kinds) != 1:
            got = ", ".join(sorted(_layout.describe(t) for t in listed)) or "none"
            advice = "Use group_sizes for matrices with different numbers of rows"
            _checks.refuse(op, "members", "at least one tensor, all of one size", got, advice)
        with torch.no_grad():
            return cls(torch.stack(listed), requires_grad=requires_grad)

    @property
    def group_sizes(self) -> Tensor | None:
        """The rows of each group, on the device; None for members of one size."""
        return self._buffers.group_sizes

    @property
    def num_groups(self) -> int:
        """G."""
        sizes = self._buffers.group_sizes
        return self.shape[0] if sizes is None else sizes.shape[0]

    @property
    def is_ragged(self) -> bool:
        """Whether the rows of the groups are on the device."""
        return self._buffers.group_sizes is not None

    def packed(self) -> Tensor:
        """The values of an unquantized value as one plain tensor of its shape: an alias, with its gradient.

        Raises:
            ValueError: the value is quantized. :meth:`dequantize` gives its numbers.
        """
        return self.view(-1).view(self.shape)

    def members(self) -> list[Any]:
        """The G members, as views: plain tensors, or of a quantized stack
        :class:`~transformer_plugin.tensor.QuantizedTensor`.

        Of a ragged value the host reads the sizes, which waits for the device and fails while a CUDA graph is captured.

        Raises:
            ValueError: a quantized ragged value, whose scales are not those of separate matrices; group sizes below 0
            or of more rows than there are.
        """
        sizes = self._buffers.group_sizes
        if sizes is None:
            return list(self.unbind(0))
        if self.format.is_quantized:
            advice = "Call dequantize() and split the result"
            self._refuse("self", "members of one size, or unquantized", self._described(), advice)
        rows: list[int] = sizes.tolist()
        if min(rows, default=0) < 0 or sum(rows) > self.shape[0]:
            expected = f"sizes from 0 whose sum is at most {self.shape[0]}"
            self._refuse("group_sizes", expected, str(rows), "Correct the tensor of sizes")
        return list(self.view(-1).view(self.shape)[: sum(rows)].split(rows))

    def quantize_(
        self, source: Tensor, *, seed: Tensor | None = None, noop: Tensor | None = None
    ) -> GroupedTensor:
        """Quantizes new values into the same memory, in the directions that the value has.

        Args:
            source: of the shape of the value, float32, bfloat16 or float16, on its device. Rows of a ragged value past
                its groups are not read.
            seed: int64 ``[1]``, of formats with stochastic rounding.
            noop: float32 ``[1]`` on the device, read when the kernels run: with 1 every byte stays.

        Raises:
            TypeError, ValueError: as :func:`transformer_plugin.ops.quantize_out`; an unquantized value. Nothing is
            written then.
        """
        if not self.format.is_quantized:
            self._refuse("self", "a quantized value", self._described(), "Use copy_()")
        _checks.write(self, source, seed, noop)
        return self

    def _set_data(self, value: Tensor, name: str) -> None:
        """An unquantized value takes a plain tensor, too."""
        plain = isinstance(value, Tensor) and not isinstance(value, FormatTensor)
        if plain and not self.format.is_quantized:
            same = (value.shape, value.dtype, value.device) == (self.shape, self.dtype, self.device)
            if same and value.is_contiguous():
                self._buffers = self._buffers._replace(rowwise_data=value.detach())
                return
        super()._set_data(value, name)

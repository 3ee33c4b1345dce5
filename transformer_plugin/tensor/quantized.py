"""QuantizedTensor: one matrix in a format."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.tensor import _checks
from transformer_plugin.tensor._base import Buffers, FormatTensor


class QuantizedTensor(FormatTensor):
    """One matrix ``[M, K]``, quantized along rows, along columns, or both.

    :func:`transformer_plugin.quantize` makes them. The constructor takes buffers that exist; none of them is copied.

    Args:
        rowwise_data, scale_inv: what :func:`transformer_plugin.ops.quantize` returns along rows; None without this
            direction.
        columnwise_data, columnwise_scale_inv: what it returns along columns: data of the transposed matrix, ``[K, M]``.
        format: the format of the data, with scales, or its key.
        dtype: the nominal dtype, which the value has for torch and :meth:`dequantize` returns: float32, bfloat16 or
            float16.
        amax, columnwise_amax: of ``nvfp4``, the float32 amaxes that the data was quantized with.
        requires_grad: whether a gradient is wanted. Its gradient is a plain tensor ``[M, K]`` of the nominal dtype.

    Raises:
        TypeError: no tensor, another dtype. ValueError: no data, sizes that do not agree, scales that are missing or of
            another size, tensors that are not contiguous or on several devices.

    ``copy_`` and :meth:`quantize_` quantize new values into the same memory. ``.to()`` with a dtype changes the nominal
    dtype and no byte. Ops that the type does not have are a ValueError; nothing is dequantized unless
    :meth:`dequantize` is called.
    """

    def __new__(
        cls,
        rowwise_data: Tensor | None = None,
        scale_inv: Tensor | None = None,
        *,
        format: str | Format,
        dtype: torch.dtype = torch.bfloat16,
        columnwise_data: Tensor | None = None,
        columnwise_scale_inv: Tensor | None = None,
        amax: Tensor | None = None,
        columnwise_amax: Tensor | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        _checks.check_flag(cls.__name__, "requires_grad", requires_grad)
        buffers = Buffers(
            rowwise_data, scale_inv, amax, columnwise_data, columnwise_scale_inv, columnwise_amax, None
        )
        parsed = _checks.format_of(cls.__name__, format)
        shape = _checks.check_quantized(cls.__name__, buffers, parsed, dtype, dim=2)
        value: QuantizedTensor = cls._make(buffers, parsed.key, shape, dtype, requires_grad)
        return value

    def quantize_(
        self, source: Tensor, *, seed: Tensor | None = None, noop: Tensor | None = None
    ) -> QuantizedTensor:
        """Quantizes new values into the same memory, in the directions that the value has.

        Args:
            source: ``[M, K]``, float32, bfloat16 or float16, on the device of the value.
            seed: int64 ``[1]``, of formats with stochastic rounding.
            noop: float32 ``[1]`` on the device, read when the kernels run: with 1 every byte stays.

        Raises:
            TypeError, ValueError: as :func:`transformer_plugin.ops.quantize_out`. Nothing is written then.
        """
        _checks.write(self, source, seed, noop)
        return self

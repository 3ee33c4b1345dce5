"""What the NVIDIA driver says, without torch. A file that a child runs; it imports nothing of this package."""

from __future__ import annotations

import ctypes
from typing import Any

#: cuDeviceGetAttribute: the compute capability.
_MAJOR, _MINOR = 75, 76
#: cuInit: nothing to report, where there is a driver and no device that this process may use.
_NO_DEVICE = 100


def _of_management() -> str:
    """The version of the driver, such as 580.65.06; empty if it does not say."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        if library.nvmlInit_v2() == 0 and library.nvmlSystemGetDriverVersion(text, 96) == 0:
            return text.value.decode()
    except (OSError, AttributeError):
        pass
    return ""


def _name(library: Any, status: int) -> str:
    text = ctypes.c_char_p()
    known = library.cuGetErrorName(status, ctypes.byref(text)) == 0 and text.value
    return f"{text.value.decode()} ({status})" if known and text.value else str(status)


def _devices(library: Any) -> list[dict[str, Any]]:
    count = ctypes.c_int()
    library.cuDeviceGetCount(ctypes.byref(count))
    found = []
    for i in range(count.value):
        device, value, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
        text = ctypes.create_string_buffer(128)
        library.cuDeviceGet(ctypes.byref(device), i)
        library.cuDeviceGetName(text, 128, device)
        library.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        capability = []
        for attribute in (_MAJOR, _MINOR):
            library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            capability.append(value.value)
        found.append({"name": text.value.decode(), "capability": capability, "bytes": size.value})
    return found


def driver() -> dict[str, Any]:
    """``found``, ``version`` of the driver, ``cuda`` that it serves as ``[13, 0]``, ``error`` and ``devices``."""
    facts: dict[str, Any] = {"found": False, "version": "", "cuda": [0, 0], "error": "", "devices": []}
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return facts
    number = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(number))
    facts |= {"found": True, "version": _of_management()}
    facts["cuda"] = [number.value // 1000, number.value % 1000 // 10]
    status = library.cuInit(0)
    if status == 0:
        facts["devices"] = _devices(library)
    elif status != _NO_DEVICE:
        facts["error"] = _name(library, status)
    return facts

"""The crc32c of numbers, counted without the interpreter's lock."""

import ctypes
import importlib
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


@cache
def crc32c_function() -> Any:  # noqa: ANN401  (a foreign function)
    """Return ``crc32c_extend(crc, address, size)`` of google-crc32c, which holds no lock; None where the wheel does not export it."""
    try:
        function = ctypes.CDLL(importlib.import_module("google_crc32c._crc32c").__file__).crc32c_extend
    except (ImportError, OSError, AttributeError, TypeError):
        return None
    function.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_uint32
    return function


def extend_checksum(crc: int, values: NDArray[Any]) -> int:
    """Extend a crc32c by the little-endian bytes of values."""
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    native = crc32c_function()
    if native is not None and raw.size:
        return int(native(crc, raw.ctypes.data, raw.size))
    import google_crc32c

    return int(google_crc32c.extend(crc, raw))

"""Memory that was freed and that allocators still hold: given back where it is known that much of it lies about."""

import ctypes
from functools import cache
from typing import Any

import pyarrow as pa


def give_back() -> None:
    """Give freed memory back to the system: that of Arrow's pool, and that of the C library where it has a call for it.

    Reading a long column leaves many small freed pieces, which the C library keeps for the thread that made them; whatever
    comes next on other threads would take new memory beside them.

    Examples
    --------
    >>> give_back()
    """
    pa.default_memory_pool().release_unused()
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:  # noqa: ANN401  (a foreign function)
    """Find `malloc_trim` of glibc; None with any other C library."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None

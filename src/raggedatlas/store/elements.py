"""Writing unpacked uint32 values to an address: in an element type, or through a map of columns.

This module imports numba at the top, so it is imported inside functions only.
"""

# ruff: noqa: TID253

import numpy as np
from numba.np.numpy_support import carray

from raggedatlas.store.chunks import frame_pointer
from raggedatlas.store.kernels import Integer, compiled

TYPE_CODES = {"uint8": 0, "uint16": 1, "uint32": 2, "uint64": 3, "float32": 4, "float64": 5}
"""Element types that unpacked values are written in."""


@compiled
def write_values(source: Integer, n: Integer, more: Integer, out: Integer, code: Integer) -> None:  # noqa: C901 (a type each)
    """Write uint32 values plus a number in another element type.

    Parameters
    ----------
    source, n : int
        Address of the values, and how many they are.
    more : uint32
        Added to each.
    out, code : int
        Address of the output, and its element type by `TYPE_CODES`.
    """
    values = carray(frame_pointer(np.uint64(source)), (n,), np.uint32)
    place = frame_pointer(np.uint64(out))
    if code == 0:
        octets = carray(place, (n,), np.uint8)
        for i in range(n):
            octets[i] = np.uint32(values[i] + more)
    elif code == 1:
        halves = carray(place, (n,), np.uint16)
        for i in range(n):
            halves[i] = np.uint32(values[i] + more)
    elif code == 2:
        words = carray(place, (n,), np.uint32)
        for i in range(n):
            words[i] = np.uint32(values[i] + more)
    elif code == 3:
        longs = carray(place, (n,), np.uint64)
        for i in range(n):
            longs[i] = np.uint32(values[i] + more)
    elif code == 4:
        singles = carray(place, (n,), np.float32)
        for i in range(n):
            singles[i] = np.uint32(values[i] + more)
    else:
        doubles = carray(place, (n,), np.float64)
        for i in range(n):
            doubles[i] = np.uint32(values[i] + more)


@compiled
def write_mapped(source: Integer, n: Integer, more: Integer, column_map: tuple[Integer, Integer], out: Integer) -> None:
    """Write the int32 that a map has for uint32 values plus a number, its last entry for those beyond.

    Parameters
    ----------
    source, n, more
        As for `write_values`.
    column_map : (int, int)
        Address of the map, and how many entries it has.
    out : int
        Address of the output.
    """
    values = carray(frame_pointer(np.uint64(source)), (n,), np.uint32)
    columns = carray(frame_pointer(np.uint64(column_map[0])), (column_map[1],), np.int32)
    target = carray(frame_pointer(np.uint64(out)), (n,), np.int32)
    beyond = np.uint32(column_map[1] - 1)
    for i in range(n):
        target[i] = columns[np.uint64(min(np.uint32(values[i] + more), beyond))]

"""Writing unpacked uint32 values to an address: in an element type, or through a map of columns.

This module imports numba at the top, so it is imported inside functions only.
"""

# ruff: noqa: PLR0917, TID253 - functions that are called at an address take plain numbers

import numpy as np
from numba.np.numpy_support import carray

from raggedatlas.store.chunks import frame_pointer
from raggedatlas.store.kernels import Integer, address_function, compiled
from raggedatlas.store.lanes import BLOCK

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


@address_function(7)
def copy_values(
    source: Integer, itemsize: Integer, n: Integer, scratch: Integer, column_map: Integer, out: Integer, form: Integer
) -> Integer:
    """Copy decoded values to an address, through a map where there is one, in pieces that fit the scratch.

    Parameters
    ----------
    source, itemsize, n : int
        Address of the values, their width (1, 2 or 4), and how many they are.
    scratch : int
        Address of room for 256 uint32.
    column_map, out, form : int
        Address of a map or 0, address of the output, and its element type or the entries of the map, as
        `raggedatlas.store.unpacking.unpack_range` takes them.

    Returns
    -------
    int
        0.
    """
    width = np.int64(4) if column_map or form == 4 else np.int64(1) << min(form, 3)
    none = np.uint32(0)
    while n > 0:
        step = min(n, BLOCK)
        place = frame_pointer(np.uint64(source))
        words = carray(frame_pointer(np.uint64(scratch)), (step,), np.uint32)
        at = source if itemsize == 4 else scratch
        if itemsize == 2:
            halves = carray(place, (step,), np.uint16)
            for i in range(step):
                words[i] = halves[i]
        elif itemsize == 1:
            octets = carray(place, (step,), np.uint8)
            for i in range(step):
                words[i] = octets[i]
        if column_map:
            write_mapped(at, step, none, (column_map, form), out)
        else:
            write_values(at, step, none, out, form)
        source += step * itemsize
        out += step * width
        n -= step
    return 0

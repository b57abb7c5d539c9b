"""The compiled library: where it is found, how it is built in a checkout, and the types of its functions.

The functions are described in ``native/raggedatlas.h``. They are called as ``library().ra_crc32c(...)`` and run without
the interpreter's lock. Arrays are passed as they are; their dtype, contiguity and writability are checked.
"""

import ctypes
import importlib.util
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import ArgumentError, MissingExtraError

ABI = 8
"""RA_ABI of the header that this module follows."""

LEVELS = ("baseline", "avx2", "avx512")
"""Vector instructions that may be forced by the environment variable RAGGEDATLAS_SIMD."""

PACKAGE = Path(__file__).parent
SOURCES = PACKAGE.parents[2] / "native"
_SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")

# Statuses and kinds, as the header numbers them.
GOOD, BAD_CHECKSUM, BAD_SIZE, BAD_FRAME, OUTSIDE, REPEATED, OTHER_FRAME = range(7)
BAD_BOUNDS, BAD_COLUMN, UNSORTED, BAD_TYPE = range(7, 11)
CUT_SHORT, TRAILING, BAD_MODE, NEGATIVE = range(11, 15)
NO_HEAD, NO_MAGIC, BAD_VERSION, BAD_RUNS, BAD_BITS, BAD_LISTS, BAD_OFFSETS, BEYOND, MISSING = range(15, 24)
REFUSED, UNKNOWN_CALL = 24, 25
PLAIN, BLOSC, PACKED, STREAM, CHECKED, AS_IS = 0, 1, 2, 3, 8, 16

TYPE_CODES = {"uint8": 0, "uint16": 1, "uint32": 2, "uint64": 3, "float32": 4, "float64": 5}
"""Element types of results, as ``enum ra_type`` numbers them."""

FAULTS = {
    BAD_CHECKSUM: "its crc32c does not match",
    BAD_SIZE: "it does not have the size it should",
    BAD_FRAME: "its frame does not decode",
    OTHER_FRAME: "its frame is of another compressor than the array's metadata says",
}
"""What is wrong with a chunk, by status."""


_NO_BYTES = ctypes.c_char * 0
_NUMBERS = frozenset("biuf")
"""Kinds of dtypes whose arrays are buffers."""


@dataclass(frozen=True)
class ArrayArgument:
    """The type of an argument that is an array, checked when it is passed."""

    dtype: str  # name of the dtype; empty for any
    writable: bool = False  # whether the function writes to the array

    def from_param(self, array: NDArray[Any] | None) -> ctypes.c_void_p | None:
        """Return the address of an array after checking its dtype, layout and writability; None for None."""
        if array is None:
            return None
        flags = array.flags
        # C reads through typed pointers, so strided or unaligned memory would be read wrongly.
        if (
            (self.dtype and array.dtype != self.dtype)
            or not flags.c_contiguous
            or not flags.aligned
            or (self.writable and not flags.writeable)
        ):
            raise ArgumentError(
                f"A compiled function takes a contiguous {'writable ' * self.writable}array of {self.dtype or 'any dtype'}, "
                f"got {array.dtype} of shape {array.shape}; report this."
            )
        # `array.ctypes` makes objects in Python, in more time than a short row takes to read; only writable memory has the other way.
        if flags.writeable and array.dtype.kind in _NUMBERS:
            return ctypes.c_void_p(ctypes.addressof(_NO_BYTES.from_buffer(array)))  # type: ignore[arg-type]  # Python 3.12 knows buffers
        return ctypes.c_void_p(array.ctypes.data)

    def address(self, array: NDArray[Any]) -> int:
        """Return the checked address of an array, for a field of a structure; the caller keeps the array alive."""
        pointer = self.from_param(array)
        return (pointer.value if pointer is not None else None) or 0


ANY, U8, U32, U64, I32, I64, F64 = map(ArrayArgument, ("", "uint8", "uint32", "uint64", "int32", "int64", "float64"))
OUT, OUT_U8, OUT_U32, OUT_U64, OUT_I32, OUT_I64, OUT_F64 = (
    ArrayArgument(known.dtype, writable=True) for known in (ANY, U8, U32, U64, I32, I64, F64)
)
_int, _long, _uint, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_void_p
_where, _which = ctypes.POINTER(_long), ctypes.POINTER(_int)


def _structure(name: str, fields: str) -> type[ctypes.Structure]:
    """Declare a structure of the header: pointers begin with ``*``, ``:`` ends a field of 32 bits, others have 64."""
    kinds = [_pointer if field[0] == "*" else _int if field[-1] == ":" else _long for field in fields.split()]
    named = [field.strip("*:") for field in fields.split()]
    return type(name, (ctypes.Structure,), {"_fields_": [*zip(named, kinds, strict=True)]})


Chunks = _structure("ra_chunks", "*addresses *sizes n")
Pieces = _structure("ra_pieces", "*bounds *sources *lengths *targets n")
Rows = _structure("ra_rows", "*order n_order *group *column_start *value_start *length *at n_rows n_groups")
Array = _structure("ra_array", "*addresses *sizes *states n_slots *groups")
Maps = _structure("ra_maps", "*columns *bounds *monotone *wanted *targets *wanted_bounds")
Result = _structure("ra_result", "*columns *values *counts n n_columns type:")
Room = _structure(
    "ra_room", "*column_chunk *value_chunk *work chunk_bytes *found *values *numbers longest *words *slots"
)
Csr = _structure("ra_csr", "*bounds n_rows *columns n itemsize:")  # made by `csr_of`
RaColumns = _structure("ra_columns", "*bounds *columns n n_entries")
Manifests = _structure("ra_manifests", "*bounds *chunks *modes *starts *counts *items n n_dims n_blocks n_items")
RaFragments = _structure("ra_fragments", "*is_run *starts *counts n *rows n_rows")


def csr_of(indptr: NDArray[np.int64], columns: NDArray[Any]) -> ctypes.Structure:
    """Describe rows of a sparse matrix to compiled functions; the arrays live as long as the description.

    `indptr`, (n_rows + 1,), bounds the rows among all of `columns` and need not start at 0. `columns` may be of any
    integer dtype.
    """
    matrix = Csr(I64.address(indptr), indptr.size - 1, ANY.address(columns), columns.size, columns.itemsize)
    # The structure holds bare addresses; this keeps the memory alive.
    matrix.arrays = indptr, columns
    return matrix


_csr = ctypes.POINTER(Csr)

FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ra_abi": (_int, ()),
    "ra_best_level": (_int, ()),
    "ra_set_level": (_int, (_int,)),
    "ra_crc32c": (_uint, (_uint, U8, _long)),
    "ra_read_file": (_int, (_int, I64, I64, I64, _long, OUT_U8, _long, _where)),
    "ra_permute": (_int, (OUT_I64, _long, _long, U64, _long)),
    "ra_permute_each": (_int, (OUT_I64, I64, U64, _long)),
    "ra_count_pieces": (_long, (I64, I64, _long, _long)),
    "ra_split_ranges": (None, (I64, I64, _long, _long, OUT_I64, _long)),
    "ra_decode_chunks": (
        _int,
        (
            ctypes.POINTER(Chunks), ctypes.POINTER(Pieces), _int, _int, _long, OUT_U8, OUT_U8, U8, _long, OUT_U8, _long,
            _where,
        ),
    ),
    "ra_decode_lzf": (_int, (U8, _long, OUT_U8, _long)),
    "ra_packed_room": (_long, (_long, _int)),
    "ra_pack": (_long, (ANY, _long, _int, I64, _long, OUT_U8, _long)),
    # `ra_pack_chunks` overwrites the row starts, hence `OUT_I64` and the copy in `encode_packed_run`.
    "ra_pack_chunks": (_long, (ANY, _long, _long, _int, OUT_I64, _long, OUT_U8, _long, OUT_I64)),
    "ra_check_packed": (_int, (U8, _long, _long, _long)),
    "ra_unpack": (_int, (U8, _long, _long, _long, OUT)),
    "ra_unpack_chunks": (_int, (ctypes.POINTER(Chunks), ctypes.POINTER(Pieces), _long, _long, OUT, _long, _where)),
    "ra_arrange_rows": (
        _int, (I32, I64, I64, _long, I64, _long, I64, U8, I64, U8, OUT_I64, OUT_I64, OUT_I64, OUT_I64),
    ),
    "ra_gather": (_int, (*map(ctypes.POINTER, (Rows, Array, Maps, Result, Room)), _where, _which)),
    "ra_check_order": (_int, (_csr, _long, _where)),
    "ra_count_kept": (_int, (_csr, ANY, _long, _int, OUT_I64, _where)),
    "ra_map_rows": (
        _int, (_csr, ANY, _long, _int, I64, OUT, OUT_I64, _long, OUT_U64, OUT_I64, _long),
    ),
    "ra_count_columns": (_int, (ANY, _long, _int, OUT_I64, _long)),
    "ra_claim_places": (_int, (U32, _long, OUT_I64, _long, OUT_I64)),
    "ra_move_runs": (_int, (ANY, _long, I64, I64, I64, _long, _int, OUT, _long)),
    "ra_count_places": (_int, (ANY, _long, _int, I32, _long, OUT_I64, _long, OUT_I32)),
    "ra_fill_places": (
        _int,
        (
            ctypes.POINTER(RaColumns), I32, ANY, _int, OUT_I64, OUT_I32, _long, OUT, _int, OUT, _long,
        ),
    ),
    "ra_write_dense": (_int, (_csr, ANY, _int, OUT, _long, _where)),
    "ra_scan_entries": (_int, (_csr, _long, OUT_I64, _long, OUT_I64)),
    "ra_scan_whole": (_int, (ANY, _long, _int, OUT_I64)),
    "ra_count_dense": (_int, (ANY, _long, _long, _int, _int, OUT_I64)),
    "ra_take_dense": (_int, (ANY, _long, _long, _int, _int, I64, OUT_U32, OUT)),
    "ra_place_rows": (
        _int, (_csr, ANY, _int, U32, _long, OUT_U64, OUT, OUT_U32, OUT, _int, _where),
    ),
    "ra_mix": (_int, (ANY, _long, _int, OUT_U64)),
    "ra_frame_items": (_int, (U8, _long, OUT_I64, OUT_I64, _long)),
    "ra_measure_manifests": (_int, (U8, _long, _long, OUT_I64, _long)),
    "ra_count_manifests": (_int, (U8, _long, I64, _long, _long, OUT_I64, _where)),
    "ra_read_manifests": (_int, (U8, _long, I64, ctypes.POINTER(Manifests), _where)),
    "ra_write_manifests": (_int, (ctypes.POINTER(Manifests), OUT_U8, _long)),
    "ra_count_fragments": (_int, (U8, _long, I64, _long, OUT_I64, _where)),
    "ra_read_fragments": (_int, (U8, _long, I64, _long, OUT_U8, OUT_I64, OUT_I64, _long, OUT_I64, _long, _where)),
    "ra_locate_fragments": (_int, (U8, _long, I64, _long, _long, OUT_I64)),
    "ra_expand_fragments": (_int, (ctypes.POINTER(RaFragments), I64, _long, OUT_I64, _long)),
    "ra_copy_fragments": (_int, (U8, _long, U8, _long, I64, I64, _long, _long, OUT_U8, _long)),
    "ra_number_cells": (_int, (ANY, _long, _long, _int, F64, I64, I64, OUT_I64)),
    "ra_weigh_lines": (_int, (F64, _long, _long, I64, _long, OUT_F64, OUT_I64, OUT_F64, _long)),
    "ra_walk_chains": (_int, (I64, _long, I64, U8, _long, OUT_U8, OUT_I64, OUT_I64, OUT_I64)),
}  # fmt: skip
"""What every function returns and takes, in the order of the header."""


@cache
def library() -> Any:  # noqa: ANN401  (a foreign library)
    """Return the library, loaded and declared; in a checkout it is compiled first if a source has changed."""
    path = library_path()
    try:
        loaded = ctypes.CDLL(os.fspath(path))
        number = loaded.ra_abi()
    except (OSError, AttributeError) as error:
        raise MissingExtraError(f"The compiled library {path} cannot be loaded ({error}). {_HOW}") from error
    # Before the declarations, so that a library of another version is not reported as an incomplete one.
    if number != ABI:
        raise MissingExtraError(f"The compiled library {path} has version {number}, expected {ABI}. {_HOW}")
    try:
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise MissingExtraError(f"The compiled library {path} is incomplete ({error}). {_HOW}") from error
    level = os.environ.get("RAGGEDATLAS_SIMD")
    if level:
        best = LEVELS[loaded.ra_best_level()]
        if level not in LEVELS or LEVELS.index(level) > LEVELS.index(best):
            raise ArgumentError(
                f"RAGGEDATLAS_SIMD is {level!r}; expected one of {', '.join(LEVELS)}, of which this machine has up to {best}."
            )
        loaded.ra_set_level(LEVELS.index(level))
    return loaded


_HOW = "Install the package again with `pip install --force-reinstall --no-deps raggedatlas`; from sources, with a C compiler (gcc, clang, or `pip install ziglang`), `pip install .`."


def library_path() -> Path:
    """Return where the library is: named by RAGGEDATLAS_LIBRARY, in the package, or compiled from the checkout's sources."""
    named = os.environ.get("RAGGEDATLAS_LIBRARY")
    if named:
        return Path(named)
    installed = PACKAGE / f"libraggedatlas{_SUFFIX}"
    if not (SOURCES / "compile.py").is_file() or installed.is_file():
        return installed
    spec = importlib.util.spec_from_file_location("raggedatlas_compile", SOURCES / "compile.py")
    assert spec is not None
    assert spec.loader is not None
    compiling = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compiling)
    try:
        made: Path = compiling.compile_library(compiling.library_path())
    except (compiling.CompileError, OSError) as error:
        raise MissingExtraError(f"{SOURCES} cannot be compiled: {error}") from error
    return made

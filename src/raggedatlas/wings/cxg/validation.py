"""Validator of CXG: checks of all values of tables, matrices and embeddings, block by block, and `validate`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import NotFoundError, SourceError
from raggedatlas.formats.containers import decode_texts
from raggedatlas.formats.soma import tiledb_kind
from raggedatlas.model.arguments import checked
from raggedatlas.model.validation import Depth, Problems
from raggedatlas.store.location import Address, as_path
from raggedatlas.wings.cxg.array_reader import NUMBERED
from raggedatlas.wings.cxg.inspection import is_cxg, list_members
from raggedatlas.wings.cxg.options import ANONYMOUS, OBS, SHIFT, VAR, XC, XR, X
from raggedatlas.wings.cxg.rules import (
    CxgChecker,
    check_arrays,
    check_columns,
    check_members,
    check_metadata,
    check_shift,
    check_sizes,
)
from raggedatlas.wings.cxg.table_encoder import count_duplicates
from raggedatlas.wings.cxg.tiledb_arrays import (
    BUFFER_BYTES,
    ArrayInfo,
    attribute_files,
    check_text_offsets,
    open_array,
    query_attributes,
    tiledb_errors,
    values_of,
)

STEP_BYTES = 16 << 20
"""Approximate size of a block of a dense array."""

SPARSEST, DENSEST = 0.05, 0.60
"""Share of non-zero values below which a matrix should not be dense, and above which not sparse."""

# Multipliers and shifts of splitmix64; the shift by 32 joins cell and feature.
_MIX = tuple(np.uint64(one) for one in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SHIFTS = tuple(np.uint64(one) for one in (32, 30, 27, 31))

_EXACT_BITS = 53
"""Integers of this many bits are exact in float64."""

MAX_EMPTY_READS = 100
"""Number of consecutive empty blocks after which a read is given up."""

Block = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]
"""Cells, features and values."""


@dataclass(slots=True)
class EntryCounts:
    """Counts of the entries of a sparse matrix."""

    shape: tuple[int, int]  # cells and features
    cells: NDArray[np.float64]  # sum of the digests of the entries of each row
    features: NDArray[np.float64]  # sum of the digests of the entries of each column
    n: int = 0  # all entries
    zeros: int = 0  # stored zeros
    nonfinite: int = 0  # NaN or infinite values
    outside: int = 0  # entries beyond an axis
    repeated: int = 0
    first: dict[str, str] = field(default_factory=dict)  # position of the first entry of each kind


def check_values(checker: CxgChecker) -> None:
    """Check all values: C06, C07, C19, C20, C24, C31, C32, C44, C45; unreadable ones break C00."""
    for name, hints in checker.hints.items():
        if len(checker.arrays[name].axes) == 1 and checker.arrays[name].is_readable:
            _read_columns(checker, name, hints)
    for name in checker.embeddings:
        info = checker.arrays[name]
        if info.is_readable and len(info.axes) == 2 and _is_real(info):
            with checker.guarded(name):
                infinite, known, first = 0, 0, ""
                for start, values in iter_bands(checker, name, info):
                    bad = np.isinf(values)
                    known += int(np.count_nonzero(~np.isnan(values)))
                    if not first and bad.any():
                        first = f"cell {start + int(np.argwhere(bad)[0][0]):,}"
                    infinite += int(np.count_nonzero(bad))
                if infinite:
                    checker.report("C24", name, f"{infinite:,} coordinates are infinite, the first of {first}.")
                if not known:
                    checker.report("C24", name, "every coordinate is missing.")
    shift = checker.arrays.get(SHIFT)
    if shift is not None and shift.is_readable and len(shift.axes) == 1 and _is_real(shift):
        with checker.guarded(SHIFT):
            with open_array(checker.path / SHIFT) as array:
                read = array[:]
            values = values_of(read)
            bad = np.flatnonzero(~np.isfinite(values))
            if len(bad):
                checker.report(
                    "C44", SHIFT, f"{len(bad):,} of {shift.shape[0]:,} are not finite, the first of feature {bad[0]:,}."
                )
            elif not values.any():
                checker.report("C45", SHIFT, "it is zero for every feature.")
    _read_matrix(checker)


def _is_real(info: ArrayInfo) -> bool:
    values = info.attribute(ANONYMOUS)
    return values is not None and values.is_number


def iter_bands(checker: CxgChecker, name: str, info: ArrayInfo) -> Iterator[tuple[int, NDArray[Any]]]:
    """Read a dense array of two axes in bands of rows: the number of the first row, and all columns of the rows."""
    attribute = info.attribute(ANONYMOUS)
    width = max(1, info.shape[1] * (attribute.dtype.itemsize if attribute is not None else 1))
    height = max(info.tile[0], STEP_BYTES // width // info.tile[0] * info.tile[0])
    with open_array(checker.path / name) as array:
        reader = query_attributes(array, ANONYMOUS)
        for start in range(0, info.shape[0], height):
            read = reader[start : min(start + height, info.shape[0])]
            yield start, values_of(read)


def _read_matrix(checker: CxgChecker) -> None:
    x, shape = checker.arrays.get(X), None
    # Memory is allocated for both tables, so they must be readable.
    frames = [checker.arrays.get(name) for name in (OBS, VAR)]
    sizes = [frame.shape[0] for frame in frames if frame is not None and len(frame.axes) == 1 and frame.is_readable]
    if len(sizes) == 2:
        shape = sizes[0], sizes[1]
    if x is not None and len(x.axes) == 2 and _is_real(x):
        with checker.guarded(X):
            if not x.sparse and x.is_readable:
                n = n_nonfinite = 0
                first = ""
                for start, values in iter_bands(checker, X, x):
                    n += int(np.count_nonzero(values))
                    infinite = ~np.isfinite(values)
                    if not first and infinite.any():
                        row, column = np.argwhere(infinite)[0]
                        first = f"cell {start + int(row):,}, feature {int(column):,}"
                    n_nonfinite += int(np.count_nonzero(infinite))
                if n_nonfinite:
                    checker.report("C07", X, _nonfinite_text(n_nonfinite, first))
                share = n / max(1, x.shape[0] * x.shape[1])
                if share < SPARSEST:
                    checker.report("C06", X, f"it is dense, and {share:.1%} of its values are not zero.")
            elif x.sparse and shape is not None:
                _report_counts(checker, X, _count_entries(checker, X, shape))
    counted = {}
    for name, along in ((XR, "var"), (XC, "obs")):
        info = checker.arrays.get(name)
        fits = info is not None and info.sparse and len(info.axes) == 1 and info.attribute(along) is not None
        if info is not None and fits and _is_real(info) and shape is not None:
            with checker.guarded(name):
                counted[name] = _count_entries(checker, name, shape)
                _report_counts(checker, name, counted[name])
    # A half that raised is reported as damaged (C00); comparing it would add a false C19.
    if len(counted) == 2:
        by_cell, by_feature = counted[XR], counted[XC]
        cells = np.flatnonzero(by_cell.cells != by_feature.cells)
        features = np.flatnonzero(by_cell.features != by_feature.features)
        if len(cells) or len(features) or by_cell.n != by_feature.n:
            text = f"{XR} and {XC} have {by_cell.n:,} and {by_feature.n:,} values"
            if len(cells) or len(features):
                text += f", {len(cells):,} cells and {len(features):,} features differ"
            if len(cells) and len(features):
                text += f", the first cell {cells[0]:,}, the first feature {features[0]:,}"
            checker.report("C19", XC, f"{text}.")


def _nonfinite_text(n: int, first: str) -> str:
    return f"{n:,} of its values are NaN or infinite, the first at {first}."


def iter_entries(checker: CxgChecker, name: str) -> Iterator[Block]:
    """Read a sparse matrix of either layout in TileDB's global order, in blocks that its buffers bound.

    Entries of one row of `Xr`, or of one place of `X`, follow each other.
    """
    axes = checker.arrays[name].axes
    # Axes are used by position; their names have no meaning.
    keys = {X: (axes[0].name, axes[-1].name), XR: (axes[0].name, "var"), XC: ("obs", axes[0].name)}[name]
    path = checker.path / name
    with open_array(path) as array:
        # In global order a read can stop within a row that is larger than its buffers; in row order it would fail.
        query = array.query(order="G", return_incomplete=True)
        # Only the read itself is guarded: errors of the caller of this generator are not TileDB errors.
        walk, idle = iter(query.multi_index[:]), 0
        while True:
            with tiledb_errors(path):
                block = next(walk, None)
            if block is None:
                return
            idle = 0 if len(block[ANONYMOUS]) else idle + 1
            if idle > MAX_EMPTY_READS:
                raise SourceError(
                    f"C00: {path} cannot be read in pieces of {BUFFER_BYTES:,} bytes; fetch or write it again."
                )
            yield block[keys[0]].astype(np.int64), block[keys[1]].astype(np.int64), block[ANONYMOUS]


def _count_entries(checker: CxgChecker, name: str, shape: tuple[int, int]) -> EntryCounts:
    counts = EntryCounts(shape, np.zeros(shape[0]), np.zeros(shape[1]))
    carried: tuple[NDArray[np.int64], NDArray[np.int64]] = (np.zeros(0, np.int64), np.zeros(0, np.int64))
    for read in iter_entries(checker, name):
        cells, features, values = read
        inside = (cells >= 0) & (cells < shape[0]) & (features >= 0) & (features < shape[1])
        _count(counts, "outside", ~inside, (cells, features))
        _count(counts, "zeros", values == 0, (cells, features))
        _count(counts, "nonfinite", ~np.isfinite(values), (cells, features))
        counts.n += len(values)
        # `bincount` refuses negative positions and grows beyond the axis for large ones.
        block = read if inside.all() else (cells[inside], features[inside], values[inside])
        digests = _digests(block, max(shape))
        # Sums do not depend on the order of entries, so `Xr` and `Xc` can be compared without sorting either.
        counts.cells += np.bincount(block[0], digests, minlength=shape[0])
        counts.features += np.bincount(block[1], digests, minlength=shape[1])
        major, minor = (block[1], block[0]) if name == XC else (block[0], block[1])
        carried = _count_repeated(counts, carried, (major, minor), by_feature=name == XC)
    return counts


def _count(
    counts: EntryCounts, what: str, which: NDArray[np.bool_], at: tuple[NDArray[np.int64], NDArray[np.int64]]
) -> None:
    n = int(np.count_nonzero(which))
    if n:
        i = int(np.argmax(which))
        counts.first.setdefault(what, f"cell {at[0][i]:,}, feature {at[1][i]:,}")
        setattr(counts, what, getattr(counts, what) + n)


def _count_repeated(
    counts: EntryCounts,
    carried: tuple[NDArray[np.int64], NDArray[np.int64]],
    block: tuple[NDArray[np.int64], NDArray[np.int64]],
    *,
    by_feature: bool,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count repeated positions; entries of a row can be in any order, so the last row is compared with the next block."""
    major, minor = np.concatenate([carried[0], block[0]]), np.concatenate([carried[1], block[1]])
    if not len(major):
        return carried
    # A row may span several blocks: all its entries so far are carried along.
    is_last = major == major[-1]
    kept = major[is_last], minor[is_last]
    keys = major * max(counts.shape) + minor
    steps = np.diff(keys)
    if (steps <= 0).any():
        order = np.argsort(keys, kind="stable")
        keys, major, minor = keys[order], major[order], minor[order]
        # Keys are not negative, so the first one never equals -1.
        again = np.diff(keys, prepend=-1) == 0
        # Carried entries were counted with the previous block.
        again &= order >= len(carried[0])
        _count(counts, "repeated", again, (minor, major) if by_feature else (major, minor))
    return kept


def _digests(block: Block, longest: int) -> NDArray[np.float64]:
    """Return hashes of position and value of each entry, of at most 32 bits, so that sums over the longest axis are exact."""
    cells, features, values = block
    mixed = cells.astype(np.uint64) << _SHIFTS[0]
    mixed += features.astype(np.uint64)
    mixed *= _MIX[0]
    # Bits instead of values, by which NaN equals itself; float64 makes the type of `Xr` and `Xc` irrelevant.
    mixed ^= values.astype(np.float64).view(np.uint64)
    for shift, factor in ((_SHIFTS[1], _MIX[1]), (_SHIFTS[2], _MIX[2])):
        mixed ^= mixed >> shift
        mixed *= factor
    mixed ^= mixed >> _SHIFTS[3]
    # The sum of `longest` numbers of that many bits stays below 2**53, so `_read_matrix` may use `!=`.
    bits = min(32, _EXACT_BITS - longest.bit_length())
    return (mixed & np.uint64((1 << bits) - 1)).astype(np.float64)


def _report_counts(checker: CxgChecker, name: str, counts: EntryCounts) -> None:
    if counts.outside:
        checker.report(
            "C20", name, f"{counts.outside:,} values are beyond an axis, the first at {counts.first['outside']}."
        )
    if counts.repeated:
        checker.report("C20", name, f"{counts.repeated:,} values occur again, the first at {counts.first['repeated']}.")
    if counts.zeros:
        checker.report(
            "C20", name, f"{counts.zeros:,} of its values are zero, the first at {counts.first['zeros']}.", "practice",
            "Leave zeros out.",
        )  # fmt: skip
    # `Xc` repeats the values of `Xr`; each is reported once.
    if counts.nonfinite and name != XC:
        checker.report("C07", name, _nonfinite_text(counts.nonfinite, counts.first["nonfinite"]))
    share = counts.n / max(1, counts.shape[0] * counts.shape[1])
    if name != XC and share > DENSEST:
        checker.report("C06", name, f"it is sparse, and {share:.1%} of its values are not zero.")


ROWS = 1 << 18
"""Rows of a column read at once."""


def iter_column_blocks(checker: CxgChecker, name: str, column: str) -> Iterator[NDArray[Any]]:
    """Read a column in blocks of `ROWS`."""
    values = checker.arrays[name]
    path = checker.path / name
    with open_array(path) as array:
        check_text_offsets(path, array.schema, attribute_files(array.schema, column))
        # One column at a time: TileDB crashes if several of a damaged array are read at once.
        reader = array.query(attrs=[column])
        for start in range(0, values.shape[0], ROWS):
            read = reader[start : min(start + ROWS, values.shape[0])]
            found = np.asarray(read[column])
            if array.schema.attr(column).dtype.kind == "S":
                # TileDB returns such columns as bytes, which the reader decodes as UTF-8.
                decode_texts(found.tolist(), "the column")
            yield found


def _read_columns(checker: CxgChecker, name: str, hints: dict[str, Any]) -> None:
    index = checker.shown.get(name)
    for attribute in checker.arrays[name].attributes:
        hint = hints.get(attribute.name, {})
        categories = hint.get("categories")
        # Within the loop: a damaged column must not hide problems of the others.
        where = f"{name}/{attribute.name}"
        with checker.guarded(where):
            if attribute.dtype.kind in "iu" and isinstance(categories, list) and hint.get("type") == "categorical":
                low, high = _read_extent(checker, name, attribute.name)
                if high >= len(categories):
                    checker.report("C31", where, f"it has the code {high:,}, but {len(categories):,} categories.")
                if low < -1:
                    checker.report("C31", where, f"it has the code {low:,}; expected -1 or more.")
            elif hint.get("type") == "boolean" and attribute.dtype.kind in "iu":
                low, high = _read_extent(checker, name, attribute.name)
                if low < 0 or high > 1:
                    checker.report("C28", where, f"it is a boolean with the value {high if high > 1 else low}.")
                # Viewers number the values that occur: the code 1 is beyond the only one, see `_Encoder._booleans`.
                elif low == 1 and name == OBS:
                    fix = "Set its hint to categorical with the categories False and True."
                    checker.report(
                        "C28", where, "every value is true, which the Explorer cannot show.", "practice", fix
                    )
            elif attribute.name:
                # The shown index and the original one (`TableInfo.index`) may be two columns.
                is_index = attribute.is_text and (attribute.name == index or NUMBERED.fullmatch(attribute.name))
                blocks = partial(iter_column_blocks, checker, name, attribute.name)
                if not is_index:
                    # Reading is the check: damage raises, which `guarded` reports.
                    for _ in blocks():
                        pass
                elif n_repeated := count_duplicates(blocks, checker.arrays[name].shape[0]):
                    checker.report("C32", where, f"{n_repeated:,} of its names occur before.")


def _read_extent(checker: CxgChecker, name: str, column: str) -> tuple[int, int]:
    """Return the lowest and highest value of a column, (0, -1) without rows."""
    extents = [(int(v.min()), int(v.max())) for v in iter_column_blocks(checker, name, column)]
    # The extent (0, -1) breaks none of the bounds that callers test.
    lows, highs = zip(*extents, strict=True) if extents else ((0,), (-1,))
    return min(lows), max(highs)


@checked
def validate(path: Address, level: Depth = "metadata") -> Problems:
    """List the rules that a CXG breaks; the reference lists the rules.

    Parameters
    ----------
    path : str or Path
        Path of the folder.
    level : {"metadata", "full"}
        ``metadata`` reads schemas and metadata. ``full`` reads every value as well, a block at a time: memory is bounded by the
        blocks and 16 bytes per cell and per feature.

    Returns
    -------
    Problems
        Sorted by rule; empty for a valid CXG.

    Raises
    ------
    NotFoundError
        If the folder does not exist.
    SourceError
        If the level is unknown.
    MissingExtraError
        If tiledb is not installed.

    References
    ----------
    CXG 0.3.0.

    Examples
    --------
    >>> import raggedatlas as ra
    >>> import tempfile
    >>> made = ra.copy("tests/data/pbmc68k_reduced.h5ad", tempfile.mkdtemp() + "/x.cxg")
    >>> [problem.rule for problem in validate(made)]  # an embedding is float64
    ['C03']
    >>> print(validate("tests/data")[0])
    C01 must: it is not a TileDB group, ...
    """
    path = as_path(path)
    if not path.exists():
        raise NotFoundError(f"File or folder {path} does not exist; check the path.")
    marked = tiledb_kind(path) == "group"
    checker = CxgChecker(path, level == "full", list_members(path))
    # Nothing else is checked here: every rule would be broken in any other folder.
    if not marked and not is_cxg(path):
        checker.report("C01", "", "it is not a TileDB group, and has no arrays obs and var.")
        return checker.problems
    if not marked:
        checker.report("C01", "", "it is not a TileDB group, although it has the arrays of a CXG.")
    checker.open_arrays()
    check_members(checker)
    check_arrays(checker)
    check_shift(checker)
    check_sizes(checker)
    check_columns(checker)
    check_metadata(checker)
    if checker.full:
        check_values(checker)
    return checker.by_rule()

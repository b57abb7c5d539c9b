"""The values of matrices: the value policy, canonical form, and passes over a source that write nothing."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.errors import ValuesError
from raggedatlas.model.batch import Block, CsrBlock
from raggedatlas.model.protocols import MatrixInfo, Source
from raggedatlas.store.content_hash import StreamingHash
from raggedatlas.store.native import library
from raggedatlas.store.sparse import canonicalize, count_columns, scan_integers

UNSIGNED = (np.uint8, np.uint16, np.uint32, np.uint64)


SIGNED = (np.int8, np.int16, np.int32, np.int64)


_TWO_64 = 2.0**64


@dataclass
class LayerFit:
    """What the values of one layer have turned out to be so far.

    Notes
    -----
    A matrix of integers with a negative value among them can only be refused once it is known that no fraction follows, so
    the first offending cell of each kind is remembered and judged by `judge`.
    """

    key: str  # the matrix in its source, for messages
    dtype: np.dtype[Any]  # of the source's values
    must_count: bool = False  # whether its name says that it holds counts
    may_be_signed: bool = False  # whether negative integers may stay, as in a layer of differences or an embedding
    keep_nonfinite: bool = False  # whether NaN and infinities may stay
    # Names the cell and feature of a row and column, for messages.
    place: Callable[[int, int], str] = "cell {}, feature {} (both counted from 0)".format
    low: float = 0
    high: float = 0
    whole: bool = True
    finite: bool = True
    negative_at: tuple[int, int] | None = None
    negative_value: float = field(default=0.0)
    uncounted_at: tuple[int, int] | None = None
    uncounted_value: float = field(default=0.0)

    @property
    def counts(self) -> bool:
        """Whether every value so far is a non-negative integer."""
        # Whole floats from 2**64 on fit no unsigned type.
        return self.whole and self.finite and self.low >= 0 and self.high < _TWO_64

    @property
    def largest(self) -> int:
        """The largest absolute value of integers so far."""
        return int(max(-self.low, self.high))

    @property
    def stored(self) -> np.dtype[Any]:
        """The smallest dtype that holds every value so far exactly."""
        if not self.counts:
            return self.returned if self.dtype.kind != "b" else np.dtype(np.uint8)
        return next(np.dtype(t) for t in UNSIGNED if self.high <= np.iinfo(t).max)

    @property
    def returned(self) -> np.dtype[Any]:
        """The source's dtype, or the next integer dtype that holds the values where summed entries outgrew it."""
        if self.dtype.kind == "f" or (self.dtype.kind == "b" and self.high <= 1):
            return self.dtype
        wider = UNSIGNED if self.dtype.kind in "bu" else SIGNED
        # The dtype of the source first, so that only sums of repeated entries widen it.
        same = (self.dtype,) if self.dtype.kind != "b" else ()
        bounds = ((np.dtype(t), np.iinfo(t)) for t in (*same, *wider))
        return next(t for t, info in bounds if info.min <= self.low and self.high <= info.max)

    def observe(self, block: Block, first_row: int) -> None:
        """Record the values of a block; the first NaN or infinity is refused, unless they may stay."""
        values = np.ascontiguousarray(block.layers["values"]).reshape(-1)
        if values.size == 0:
            return
        if values.dtype.kind in "bu":
            self._extend(0, int(values.max()))
            return
        if values.dtype.kind == "i":
            low = int(values.min())
            self._extend(low, int(values.max()))
            if low < 0:
                self._first_negative(block, int(np.argmax(values < 0)), first_row)
            return
        # `ra_scan_whole` takes floats of 4 and 8 bytes; float32 holds every float16.
        wide = values.astype(np.float32) if values.dtype.itemsize < 4 else values
        if self.whole:
            smallest, largest, whole = scan_integers(wide)
            if whole and smallest >= 0:
                self._extend(smallest, largest)
                return
        found = scan_floats(wide)
        if found.strange >= 0:
            self.finite = False
            if not self.keep_nonfinite:
                row, column = find_entry(block, found.strange)
                raise ValuesError(
                    f"{self.key} holds {values[found.strange]} at {self.place(first_row + row, column)}; a matrix of "
                    "values must be finite. Mend the file, or pass nonfinite='keep' to keep such values as they are."
                )
        self._extend(found.low, found.high)
        self.whole = self.whole and found.fractional < 0
        first = min((at for at in (found.fractional, found.strange) if at >= 0), default=-1)
        if first >= 0 and self.uncounted_at is None:
            row, column = find_entry(block, first)
            self.uncounted_at, self.uncounted_value = (first_row + row, column), float(values[first])
        if found.negative >= 0:
            self._first_negative(block, found.negative, first_row)

    def _extend(self, low: float, high: float) -> None:
        self.low, self.high = min(self.low, low), max(self.high, high)

    def _first_negative(self, block: Block, position: int, first_row: int) -> None:
        if self.negative_at is None:
            row, column = find_entry(block, position)
            self.negative_at = (first_row + row, column)
            self.negative_value = float(np.ravel(block.layers["values"])[position])

    def judge(self) -> None:
        """Refuse what only the whole matrix shows: integers but for their sign, and the name of counts without being any."""
        if self.negative_at is not None and (
            self.must_count or (self.whole and self.finite and not self.may_be_signed)
        ):
            raise ValuesError(
                f"{self.key} holds {self.negative_value:g} at {self.place(*self.negative_at)}; counts cannot be "
                "negative. Mend the file, leave the matrix out with layers=[...], or store differences as floats with fractions."
            )
        if self.must_count and not self.counts:
            where = (
                "" if self.uncounted_at is None else f", {self.uncounted_value:g} at {self.place(*self.uncounted_at)}"
            )
            raise ValuesError(
                f"{self.key} is to be the layer 'counts' but holds fractions or values that are not finite{where}; give it another name, "
                f"e.g. layers={{{self.key!r}: 'normalized'}}."
            )


class OtherFormatError(Exception):
    """Later values do not fit what was chosen of layers from earlier ones, such as a dtype; `right` is what they all fit, by layer."""

    def __init__(self, right: Mapping[str, Any]) -> None:
        super().__init__()
        self.right = right


def find_entry(block: Block, position: int) -> tuple[int, int]:
    """Find the row and column of the value at a position of a block.

    Examples
    --------
    >>> find_entry(CsrBlock(np.array([0, 0, 2]), np.array([4, 7]), {"values": np.array([1, 1])}, 9), 1)
    (1, 7)
    """
    if isinstance(block, CsrBlock):
        return int(np.searchsorted(block.indptr, position, side="right")) - 1, int(block.indices[position])
    shape = next(iter(block.layers.values())).shape
    place = np.unravel_index(position, shape)
    return int(place[0]), int(place[1]) if len(place) > 1 else 0


def to_csr(block: Block) -> CsrBlock:
    """Turn a dense block, of numbers of at most 8 bytes, into a sparse one without its zeros; a sparse one stays as it is.

    Examples
    --------
    >>> from raggedatlas.model.batch import DenseBlock
    >>> block = to_csr(DenseBlock({"values": np.array([[0.0, np.nan], [-0.0, 0.0]])}))
    >>> block.indptr, block.indices, block.layers["values"]
    (array([0, 1, 1]), array([1], dtype=uint32), array([nan]))
    """
    if isinstance(block, CsrBlock):
        return block
    dense = np.ascontiguousarray(block.layers["values"])
    (n, m), is_float = dense.shape, dense.dtype.kind == "f"
    indptr = np.empty(n + 1, np.int64)
    library().ra_count_dense(dense, n, m, dense.itemsize, is_float, indptr)
    indices, kept = np.empty(indptr[-1], np.uint32), np.empty(indptr[-1], dense.dtype)
    library().ra_take_dense(dense, n, m, dense.itemsize, is_float, indptr, indices, kept)
    return CsrBlock(indptr, indices, {"values": kept}, m)


_STEP = 2**15
"""Floats that NumPy looks at before it goes on, so that they stay in the cache."""


@dataclass
class FloatRange:
    """What floats are; positions are -1 for none."""

    low: float = np.inf  # smallest finite value; `scan_floats` makes it 0 when there is none
    high: float = -np.inf  # largest finite value; 0 when there is none
    fractional: int = -1  # position of the first finite value with a fraction
    strange: int = -1  # position of the first that is not finite
    negative: int = -1  # position of the first finite one below 0


def scan_floats(values: NDArray[Any]) -> FloatRange:
    """Scan floats, (n,), once.

    Examples
    --------
    >>> scan_floats(np.array([1.0, np.nan, 0.5]))
    FloatRange(low=0.5, high=1.0, fractional=2, strange=1, negative=-1)
    """
    found = FloatRange()
    for start in range(0, values.size, _STEP):
        part = values[start : start + _STEP]
        finite = np.isfinite(part)
        if not finite.all():
            found.strange = _first(found.strange, ~finite, start)
            # Numbers that are not finite take the place of one that is, else of 0.
            part = np.where(finite, part, part[np.argmax(finite)] if finite.any() else 0)
            if not finite.any():
                continue
        low = float(part.min())
        found.low, found.high = min(found.low, low), max(found.high, float(part.max()))
        found.fractional = _first(found.fractional, (np.floor(part) != part) & finite, start)
        if low < 0:
            found.negative = _first(found.negative, (part < 0) & finite, start)
    if found.low > found.high:
        found.low, found.high = 0.0, 0.0
    return found


def _first(known: int, marks: NDArray[np.bool_], start: int) -> int:
    """Return the position of the first mark, unless an earlier one is known; -1 for none."""
    if known >= 0:
        return known
    # `argmax` is 0 also if no mark is set.
    at = int(np.argmax(marks))
    return start + at if marks[at] else -1


BLOCK_BYTES = 32 * 2**20
"""About how many bytes of values and indices one step holds; the bound on an `add`'s working memory is a small multiple.

Small enough that memory is used again instead of being asked from the system for every block.
"""


def block_rows(info: MatrixInfo) -> int:
    """Choose how many rows one step takes, from how wide or full the rows are."""
    if info.form == "dense":
        per_row = max(1, int(np.prod(info.shape[1:]))) * info.dtype.itemsize
    else:
        # A tenth is assumed to be stored where the source does not say; 8 bytes allow for 64-bit indices.
        entries = info.n_entries if info.n_entries is not None else info.shape[0] * info.shape[1] // 10
        per_row = max(1, entries // max(1, info.shape[0])) * (info.dtype.itemsize + 8)
    return int(min(65_536, max(16, BLOCK_BYTES // max(1, per_row))))


def iterate_blocks(source: Source, info: MatrixInfo) -> Iterator[tuple[int, Block]]:
    """Iterate over one matrix: first row and block of each step."""
    row = 0
    for (block,) in source.blocks((info.key,), block_rows(info)):
        yield row, block
        row += block.n_rows


def entry_hash(source: Source, info: MatrixInfo) -> bytes:
    """Hash which entries a matrix has, whatever their values; two layers with equal hashes can share their indices."""
    lengths, columns = StreamingHash(), StreamingHash()
    for row, block in iterate_blocks(source, info):
        sparse, _ = canonicalize(to_csr(block), info.key, row, sum_duplicates=True)
        # Lengths, because pointers start again at 0 in each block and would depend on the size of blocks.
        lengths.update(np.diff(sparse.indptr))
        columns.update(sparse.indices)
    return lengths.digest() + columns.digest()


def hash_texts(texts: pa.Array) -> str:
    """Return a hash of texts in their order, 32 hex digits.

    Examples
    --------
    >>> hash_texts(pa.array(["ab", "c"])) == hash_texts(pa.array(["a", "bc"]))
    False
    """
    digest = hashlib.sha256(np.asarray(pc.fill_null(pc.binary_length(texts), -1)).tobytes())
    # The buffer of a slice holds the texts beside it as well.
    first, last = (
        np.frombuffer(texts.buffers()[1], np.int32)[[texts.offset, texts.offset + len(texts)]].tolist()
        if len(texts)
        else (0, 0)
    )
    digest.update(b"" if first == last else texts.buffers()[2][first:last])
    return digest.hexdigest()[:32]


SAMPLE_ENTRIES = 4 * 2**20
"""About how many entries are looked at (four times as many numbers of a dense matrix); a smaller matrix is read whole."""


SLABS = 16
"""Runs of neighbouring rows that a sample is made of, spread evenly over the file."""


def rank_columns(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the place of every column by falling count of the cells that detect it; equal counts keep their order.

    Examples
    --------
    >>> rank_columns(np.array([0, 5, 5, 9]))
    array([3, 1, 2, 0])
    """
    places = np.empty(len(counts), np.int64)
    # `argsort` gives the column at each place; the assignment inverts that.
    places[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    return places


def sample_counts(source: Source, info: MatrixInfo) -> NDArray[np.int64]:
    """Count in how many cells of a sample each column of a matrix is stored, (n_columns,).

    The sample depends on the matrix's shape and number of entries alone, so the same file gives the same counts.
    """
    counts = np.zeros(info.shape[1], np.int64)
    slabs, limit = plan_sample(info)
    for rows in slabs:
        seen = 0
        for (block,) in source.blocks((info.key,), block_rows(info), rows):
            indices = to_csr(block).indices
            counts += count_columns(indices, len(counts))
            seen += indices.size
            # Ends this run of rows only; the others are spread over the file and are needed too.
            if seen >= limit:
                break
    return counts


def plan_sample(info: MatrixInfo) -> tuple[list[tuple[int, int]], int]:
    """Choose the runs of rows ``(start, stop)`` to look at, and after how many entries of one run to stop looking.

    Rows may be of uneven length, so that a run can have far more entries than planned.
    """
    height = info.shape[0]
    if info.form == "dense":
        total, wanted = height * info.shape[1], 4 * SAMPLE_ENTRIES
    else:
        total, wanted = info.n_entries if info.n_entries is not None else height * info.shape[1] // 10, SAMPLE_ENTRIES
    if total <= wanted:
        return [(0, height)], 4 * SAMPLE_ENTRIES
    rows = max(1, height * wanted // total // SLABS)
    # Where there are fewer rows than slabs, starts coincide and their cells would count several times.
    starts = np.unique(np.linspace(0, height - rows, SLABS).astype(np.int64)).tolist()
    return [(start, start + rows) for start in starts], 2 * SAMPLE_ENTRIES // SLABS

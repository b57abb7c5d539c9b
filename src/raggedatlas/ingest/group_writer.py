"""Write the matrices of one group, block by block, in bounded memory; and what is kept with the dataset as it is."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import byref, c_int64
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import SchemaError, SourceError, StoreError
from raggedatlas.formats.anndata.packing import pack
from raggedatlas.ingest.options import IngestOptions
from raggedatlas.ingest.plan import COUNTS, LayerPlan, NewGroup, OtherElements
from raggedatlas.ingest.values import ContentHash, LayerFit, as_bits, block_rows, canonicalize, iterate_blocks, to_csr
from raggedatlas.model.arguments import Progress
from raggedatlas.model.batch import Block, CsrBlock, DenseBlock
from raggedatlas.model.frames import INDEX
from raggedatlas.model.ids import free_name
from raggedatlas.model.protocols import MatrixInfo, Source
from raggedatlas.model.records import COLUMNS, ELEMENTS, EXTRAS, ExtraFacts
from raggedatlas.model.spaces import PointerKind
from raggedatlas.store.arrays import ArraySpec, ArrayWriter, create_group, describe_group
from raggedatlas.store.bundle import Bundle
from raggedatlas.store.codecs import STANDARD, is_exact
from raggedatlas.store.location import Location
from raggedatlas.store.native import BAD_COLUMN, csr_of, library
from raggedatlas.store.runtime import DECODE_THREADS, BackgroundWriter, BufferPool, map_decode, prefetch, shared_pool

DEPTH = 2
"""Blocks that may wait between two steps of the pipeline."""


SPAN_ENTRIES = 2**18
"""Entries that a thread renumbers at once, at least."""


@dataclass
class WrittenGroup:
    """A written group.

    Parameters
    ----------
    group : NewGroup
        The plan.
    path : str
        Path of the group.
    layers : dict
        Layer name -> its plan.
    stored : dict
        Layer name -> stored dtype.
    specs, checksums : dict
        Path below the group -> array description, checksum.
    indptr : (n_rows + 1,) int64 or None
        Bounds of the rows' entries; None for dense groups.
    present : (n_rows,) int64 or None
        Cell of each row; None when row i is cell i.
    n_rows, n_entries, n_summed, n_new_features : int
        Rows, entries or values, summed duplicate entries, and new features.
    listed : bool
        Whether the metadata of the group describe its arrays; not in an atlas of standard codecs, which is for readers that may not know
        consolidated metadata.
    """

    group: NewGroup
    path: str
    layers: dict[str, LayerPlan] = field(default_factory=dict)
    stored: dict[str, np.dtype[Any]] = field(default_factory=dict)
    specs: dict[str, ArraySpec] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    indptr: NDArray[np.int64] | None = None
    n_rows: int = 0
    n_entries: int = 0
    n_summed: int = 0
    present: NDArray[np.int64] | None = None
    n_new_features: int = 0
    listed: bool = True


class PendingWrite:
    """A group whose source has been read, and whose last rows are still being written.

    Parameters
    ----------
    written : WrittenGroup
        Complete except for `specs` and `checksums`.
    steps : ExitStack
        Pipeline steps that are still running.
    close : callable
        Closes the arrays after the last rows, and records their descriptions.
    """

    def __init__(self, written: WrittenGroup, steps: contextlib.ExitStack, close: Callable[[], None]) -> None:
        self.written, self._steps, self._close = written, steps, close

    def __reduce__(self) -> tuple[Callable[[WrittenGroup], "PendingWrite"], tuple[WrittenGroup]]:
        """Pickle a finished group."""
        # Threads and closures do not pickle; workers call `finish` before they return a group.
        return _finished, (self.written,)

    def finish(self) -> None:
        """Wait for the last rows and close the arrays, unless that was done already; callable from any thread.

        Raises
        ------
        StoreError
            If a write failed; the caller removes the group.
        """
        # Swapped first, so that a second call finds nothing to close.
        close, self._close = self._close, _nothing_left
        with self._steps:
            close()

    def abandon(self) -> None:
        """Wait for the current write, and discard the rest."""
        # With an error, the writers cancel queued blocks; without one they would write them all.
        self._steps.__exit__(StoreError, StoreError("abandoned"), None)


def _finished(written: WrittenGroup) -> PendingWrite:
    return PendingWrite(written, contextlib.ExitStack(), _nothing_left)


def _nothing_left() -> None:
    """Do nothing."""


class _DtypeChangedError(Exception):
    """Later values do not fit the layer names or dtypes chosen from earlier ones; `right` has the correct ones by matrix."""

    def __init__(self, right: Mapping[str, "_LayerFormat"]) -> None:
        super().__init__()
        self.right = right


class _LayerFormat(NamedTuple):
    """Name and dtype of a layer, after all its values were read."""

    name: str
    dtype: np.dtype[Any]


class _LayerWriter:
    """Writes one layer in the smallest exact dtype, which is widened when later values need it."""

    def __init__(self, source: Source, plan: LayerPlan, group: NewGroup, options: IngestOptions) -> None:
        self.plan = plan
        self.name = ""
        self.known: np.dtype[Any] | None = None
        self.sent: np.dtype[Any] | None = None
        self.needs_rewrite = False
        counted = group.space.is_counts
        self.compact = counted
        self.fit = LayerFit(
            plan.info.key,
            plan.info.dtype,
            must_count=plan.name == COUNTS,
            # In a space of counts, negative whole numbers are refused in a matrix without a name of its own: such a
            # matrix becomes `counts` if its values allow it.
            may_be_signed=not counted or bool(plan.name),
            keep_nonfinite=options.nonfinite == "keep" or not counted,
            place=partial(_named, source, plan.info),
        )
        self.writer: ArrayWriter | None = None

    def decide(self, group: NewGroup, taken: set[str]) -> str:
        """Return the layer's name, chosen from the values so far."""
        if self.plan.name:
            return self.plan.name
        wanted = COUNTS if group.space.is_counts and self.fit.counts else self.plan.otherwise
        return free_name(wanted if wanted not in taken else self.plan.otherwise, taken)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype that holds every value so far exactly."""
        if self.known is not None:
            return self.known
        if self.compact:
            return self.fit.stored
        return np.dtype(np.uint8) if self.plan.info.dtype.kind == "b" else self.plan.info.dtype

    def choose(self) -> np.dtype[Any]:
        """Return the dtype for the next values, chosen from all values so far.

        Integral floats may have been written as an unsigned dtype that the float dtype does not hold (uint32, float32); when
        a fraction follows, the layer must be rewritten.
        """
        if self.sent is None or is_exact(self.sent, self.dtype):
            self.sent = self.dtype
        else:
            self.needs_rewrite = True
        return self.dtype

    def append(self, arrays: "_Arrays", values: NDArray[Any], breaks: NDArray[np.int64] | None) -> None:
        """Append values in the dtype chosen for them; values that need a rewrite are skipped."""
        dtype = values.dtype
        if self.writer is None:
            self.writer = arrays.writer(f"{arrays.layers_path}/{self.name}", dtype, values.shape[1:])
        elif not is_exact(self.writer.dtype, dtype):
            # `choose` has set `needs_rewrite`, so `finish` discards this array.
            return
        self.writer.promote(dtype)
        self.writer.append(values, breaks)


def write_group(
    catalog: Catalog, source: Source, path: str, group: NewGroup, options: IngestOptions, progress: Progress, *,
    taken: set[str], content: ContentHash | None, bundle: Bundle,
) -> PendingWrite:  # fmt: skip
    """Stream the matrices of a group into new arrays; the last rows are still being written when this returns.

    `seal` completes the group.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    source : Source
        The source.
    path : str
        Path of the group.
    group : NewGroup
        What it holds.
    options : IngestOptions
        The caller's options; with ``dry_run`` everything is read and checked, nothing written.
    progress : callable
        Called with ``"block"`` after each step.
    taken : set of str
        Layer names that other groups of this space have taken.
    content : ContentHash or None
        Updated with the first matrix.
    bundle : Bundle
        Takes small arrays besides those of the matrices.

    Raises
    ------
    ValuesError
        If the value policy refuses a value; the caller removes the group.
    """
    reading = _Reading(source, WrittenGroup(group, path), options, taken, content)
    try:
        return _write(catalog, reading, bundle, progress)
    except _DtypeChangedError as error:
        # The threads of the first pass have ended, so nothing appears below the path after this.
        if not options.dry_run:
            catalog.arrays.child(*path.split("/")).delete_prefix()
        # No hash: the first pass has read all blocks, so `content` is complete.
        again = replace(reading, written=WrittenGroup(group, path), content=None, formats=error.right)
        return _write(catalog, again, bundle, progress)


def _write(catalog: Catalog, reading: "_Reading", bundle: Bundle, progress: Progress) -> PendingWrite:
    written, layers = reading.written, reading.layers
    with contextlib.ExitStack() as steps:
        # Contexts end in reverse order: `later` feeds `append`, which feeds `send`.
        send, append, later = (steps.enter_context(BackgroundWriter(DEPTH)) for _ in range(3))
        arrays = None if reading.options.dry_run else _Arrays(catalog, written.path, written.group, send)
        blocks = prefetch(reading.blocks(), DEPTH)
        with contextlib.closing(blocks):
            for rows in map(reading.check, blocks):
                if arrays is not None:
                    # `choose` runs now: when the job runs, `fit` may have seen later blocks.
                    later(partial(arrays.place, rows, [(layer, layer.choose()) for layer in layers], append))
                progress("block", written.n_rows, written.group.layers[0].info.shape[0])
        reading.finish()
        # The last blocks are still queued: from here on `PendingWrite` waits for the threads.
        left = steps.pop_all()

    def close() -> None:
        # In this order: `append` gets its last job from `later`.
        later.join()
        append.join()
        _close(written, layers, arrays, bundle)

    return PendingWrite(written, left, close)


@dataclass
class _Reading:
    """One pass over the matrices of a group.

    Parameters
    ----------
    source, options, taken, content
        See `write_group`.
    written : WrittenGroup
        Filled with what is found.
    formats : dict
        Matrix -> name and dtype of its layer, where an earlier pass has found them.
    """

    source: Source
    written: WrittenGroup
    options: IngestOptions
    taken: set[str]
    content: ContentHash | None
    formats: Mapping[str, _LayerFormat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Prepare the layers."""
        group = self.written.group
        self.layers = [_LayerWriter(self.source, plan, group, self.options) for plan in group.layers]
        self._bounds = [np.zeros(1, np.int64)]

    def blocks(self) -> Iterator[tuple[Block, ...]]:
        """Yield the next rows of all matrices."""
        infos = [plan.info for plan in self.written.group.layers]
        n_rows = min(block_rows(info) for info in infos)
        return self.source.blocks(tuple(info.key for info in infos), max(1, n_rows // len(infos)))

    def check(self, blocks: tuple[Block, ...]) -> Sequence[Block]:
        """Return rows in their canonical form, after the values are checked and hashed and the layers have names."""
        written = self.written
        sparse = written.group.space.kind is PointerKind.SPARSE
        ready: Sequence[Block] = self._align(blocks) if sparse else [to_dense(block) for block in blocks]
        for layer, block in zip(self.layers, ready, strict=True):
            layer.fit.observe(block, written.n_rows)
        if self.content is not None:
            self.content.update(ready[0])
        self._name_layers()
        if isinstance(ready[0], CsrBlock):
            self._bounds.append(ready[0].indptr[1:] + self._bounds[-1][-1])
        written.n_rows += ready[0].n_rows
        written.n_entries += ready[0].layers["values"].size
        return ready

    def _align(self, blocks: tuple[Block, ...]) -> list[CsrBlock]:
        ready = []
        for block, layer in zip(blocks, self.layers, strict=True):
            key = layer.plan.info.key
            clean, n = canonicalize(
                to_csr(block), key, self.written.n_rows, sum_duplicates=self.options.duplicate_entries == "sum"
            )
            ready.append(clean)
            self.written.n_summed += n
        for other in ready[1:]:
            if not (np.array_equal(other.indptr, ready[0].indptr) and np.array_equal(other.indices, ready[0].indices)):
                raise SourceError(
                    f"{self.layers[0].plan.info.key} and its layers changed while they were read; let nothing write the source and add it again."
                )
        return ready

    def _used(self) -> set[str]:
        """Return the names that layers cannot have."""
        return self.taken | {layer.plan.name for layer in self.layers if layer.plan.name}

    def _name_layers(self) -> None:
        used = self._used()
        for layer in self.layers:
            if not layer.name:
                form = self.formats.get(layer.plan.info.key)
                layer.name, layer.known = (layer.decide(self.written.group, used), None) if form is None else form
                used.add(layer.name)

    def finish(self) -> None:
        """Judge the layers by all their values, and record them.

        Raises
        ------
        _DtypeChangedError
            If the matrices have to be read again, to write them under other names or in other dtypes.
        """
        final: dict[str, _LayerFormat] = {}
        used, written = self._used(), self.written
        for layer in self.layers:
            layer.fit.judge()
            form = final[layer.plan.info.key] = _LayerFormat(layer.decide(written.group, used), layer.dtype)
            used.add(form.name)
        # Names were chosen from the first block, and now all values are known.
        if any(
            layer.needs_rewrite or layer.name != final[layer.plan.info.key].name for layer in self.layers if layer.name
        ):
            raise _DtypeChangedError(final)
        for layer in self.layers:
            plan = layer.plan
            layer.name = final[plan.info.key].name
            written.layers[layer.name] = replace(plan, info=replace(plan.info, dtype=layer.fit.returned))
            written.stored[layer.name] = layer.dtype
        self.taken.update(written.layers)
        written.present = self.source.present(written.group.layers[0].info.key)
        if written.group.space.kind is PointerKind.SPARSE:
            written.indptr = np.concatenate(self._bounds)


class _Arrays:
    """The arrays of a group that is being written."""

    def __init__(self, catalog: Catalog, path: str, group: NewGroup, send: BackgroundWriter) -> None:
        self.catalog, self.group, self.send = catalog, group, send
        sparse = group.space.kind is PointerKind.SPARSE
        self.layers_path = f"{path}/csr/layers" if sparse else f"{path}/layers"
        self.pool = shared_pool()
        self.indices = self.writer(f"{path}/csr/indices", np.uint32) if sparse else None

    def writer(self, path: str, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> ArrayWriter:
        """Return a writer whose files are written while the next chunks are encoded."""
        made = ArrayWriter(self.catalog.arrays, path, dtype, row_shape, profile=self.catalog.codec())
        return made.behind(self.send)

    def place(
        self,
        blocks: Sequence[Block],
        layers: Sequence[tuple[_LayerWriter, np.dtype[Any]]],
        then: Callable[[Callable[[], None]], None],
    ) -> None:
        """Reorder the columns of the next rows, and append the rows with `then`.

        Parameters
        ----------
        blocks : sequence of Block
            One of each layer.
        layers : sequence of (_LayerWriter, dtype)
            Each with the dtype chosen for its values.
        then : callable
            Runs a task in the background, in the order of the calls.
        """
        fitted = [(block.layers["values"], dtype) for block, (_, dtype) in zip(blocks, layers, strict=True)]
        columns = rows = None
        if self.indices is not None and isinstance(blocks[0], CsrBlock):
            columns, values = reorder_columns(blocks[0], fitted, self.group.columns, self.pool)
            bounds = blocks[0].indptr
            # Where rows with entries begin: hints by which the packed codec cuts its blocks.
            rows = bounds[:-1][bounds[1:] > bounds[:-1]]
        else:
            values = [np.ascontiguousarray(part, dtype=dtype) for part, dtype in fitted]
        then(
            partial(
                self._append, columns, [(layer, part) for (layer, _), part in zip(layers, values, strict=True)], rows
            )
        )

    def _append(
        self,
        columns: NDArray[np.uint32] | None,
        values: Sequence[tuple[_LayerWriter, NDArray[Any]]],
        rows: NDArray[np.int64] | None,
    ) -> None:
        if self.indices is not None and columns is not None:
            self.indices.append(columns, rows)
        for layer, part in values:
            layer.append(self, part, rows)


def reorder_columns(
    block: CsrBlock,
    layers: Sequence[tuple[NDArray[Any], DTypeLike]],
    columns: NDArray[np.int64] | None,
    pool: BufferPool | None = None,
) -> tuple[NDArray[np.uint32], list[NDArray[Any]]]:
    """Renumber the columns of some rows, sort each row by the new numbers, and cast each layer to its stored dtype.

    Parameters
    ----------
    block : CsrBlock
        Canonical rows.
    layers : sequence of ((n_entries,) array, dtype)
        Values, and a dtype that holds them all exactly.
    columns : (n_cols,) int64 or None
        Stored column of every column; None keeps the order.
    pool : BufferPool, optional
        Where the memory of the result comes from; fresh memory without one.

    Returns
    -------
    tuple
        Stored columns, ascending in each row, and the layers.

    Raises
    ------
    SourceError
        If a column index is out of range.

    Examples
    --------
    >>> block = CsrBlock(np.array([0, 2]), np.array([0, 2], np.uint32), {}, 3)
    >>> reorder_columns(block, [(np.array([7.0, 9.0]), np.uint8)], np.array([2, 1, 0]))
    (array([0, 2], dtype=uint32), [array([9, 7], dtype=uint8)])
    """
    if columns is None:
        return block.indices, [np.ascontiguousarray(values, dtype=dtype) for values, dtype in layers]
    places = columns.astype(np.uint32)
    pool = pool or BufferPool(0)
    moved = pool.take(block.indices.size, np.dtype(np.uint32))
    stored = [pool.take(block.indices.size, np.dtype(dtype)) for _, dtype in layers]

    def place(span: tuple[int, int]) -> None:
        indptr = block.indptr[span[0] : span[1] + 1]
        part = slice(int(indptr[0]), int(indptr[-1]))
        rows, where = csr_of(indptr - indptr[0], block.indices[part]), c_int64()
        for (values, _), out in zip(layers, stored, strict=True):
            fitted, words = _placeable(values[part], out.dtype, pool), np.zeros(places.size // 64 + 1, np.uint64)
            fault = library().ra_place_rows(
                byref(rows), fitted, fitted.dtype.kind == "f", places, places.size, words,
                np.empty(64 * words.size, out.dtype), moved[part], out[part], out.itemsize, byref(where),
            )  # fmt: skip
            if fault == BAD_COLUMN:
                column = int(block.indices[slice(*indptr[where.value : where.value + 2])].max())
                raise SourceError(f"A block has column index {column:,}, out of range for {places.size:,} columns.")
            if fault:
                raise SourceError(
                    f"Row {span[0] + where.value:,} of a block repeats a column or has descending pointers."
                )

    # The other steps of the pipeline keep one core busy.
    n_spans = max(1, min(DECODE_THREADS - 1, block.indices.size // SPAN_ENTRIES))
    # Spans of about equal numbers of entries. Cuts coincide at a long row, and the empty span is skipped.
    cuts = np.searchsorted(block.indptr, np.linspace(0, block.indptr[-1], n_spans + 1)[1:-1])
    edges = [0, *cuts.tolist(), block.n_rows]
    map_decode(place, [span for span in pairwise(edges) if span[0] < span[1]])
    return moved, stored


def _placeable(values: NDArray[Any], dtype: np.dtype[Any], pool: BufferPool) -> NDArray[Any]:
    """Return values in the form that `ra_place_rows` takes: floats if they become integers, else their bits in the stored dtype."""
    # `ra_place_rows` converts these while it places them, which saves a copy.
    if values.dtype == np.float32 and dtype.kind == "u" and dtype.itemsize <= values.dtype.itemsize:
        return values
    if values.dtype == dtype:
        return as_bits(values)
    fitted = pool.take(values.size, dtype)
    fitted[:] = values
    return as_bits(fitted)


def to_dense(block: Block) -> DenseBlock:
    """Return a block as dense values, with booleans as 0 and 1, as it is stored and hashed."""
    if isinstance(block, DenseBlock):
        values = block.layers["values"]
        return DenseBlock({"values": values.astype(np.uint8) if values.dtype == bool else values})
    from scipy.sparse import csr_matrix

    matrix = csr_matrix((block.layers["values"], block.indices, block.indptr), shape=(block.n_rows, block.n_cols))
    return DenseBlock({"values": matrix.toarray()})


def _named(source: Source, info: MatrixInfo, row: int, column: int) -> str:
    present = source.present(info.key)
    cell = source.cells().column(INDEX)[row if present is None else int(present[row])].as_py()
    feature = f"{source.features(info.features).column(INDEX)[column].as_py()!r} " if info.features else ""
    return f"cell {cell!r} (row {row}), feature {feature}(column {column}, both counted from 0)"


def _close(written: WrittenGroup, layers: list[_LayerWriter], arrays: _Arrays | None, bundle: Bundle) -> None:
    writers = {}
    if arrays is not None:
        written.listed = arrays.catalog.codec() != STANDARD
    if arrays is not None and arrays.indices is not None and written.indptr is not None:
        writers["csr/indices"] = arrays.indices
        kept = {"csr/indptr": arrays.writer(f"{written.path}/csr/indptr", np.int64)}
        kept["csr/indptr"].append(written.indptr)
        if written.group.columns is not None:
            kept[COLUMNS] = arrays.writer(f"{written.path}/{COLUMNS}", np.uint32)
            kept[COLUMNS].append(written.group.columns.astype(np.uint32))
        _close_arrays(written, kept, bundle if written.listed else None)
    for layer in layers:
        if layer.writer is None and arrays is not None:
            # A layer without rows still has an array.
            row = () if arrays.indices is not None else layer.plan.info.shape[1:]
            layer.writer = arrays.writer(f"{arrays.layers_path}/{layer.name}", layer.dtype, row)
        if layer.writer is not None:
            writers[layer.writer.path.removeprefix(f"{written.path}/")] = layer.writer
    # Never into the bundle: other Zarr readers find the matrices in the group.
    _close_arrays(written, writers, None)
    for layer in layers:
        # Narrower integers fit a float64 whatever their values are; for these the values decide what a query may make of them.
        if layer.writer is not None and layer.writer.dtype in (np.int64, np.uint64):
            own = layer.writer.path.removeprefix(f"{written.path}/")
            written.specs[own] = replace(written.specs[own], largest=layer.fit.largest)


PRESENT = "present/"
"""Before the key of a modality's cells: which cell each of its rows is."""


@dataclass
class WrittenElements:
    """What writing found out.

    Parameters
    ----------
    facts : dict
        Key of each array -> where it is, its form, dtype and shape.
    specs, checksums : dict
        Path below the group -> array description, checksum.
    """

    facts: dict[str, ExtraFacts] = field(default_factory=dict)
    specs: dict[str, ArraySpec] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)


def serialize_other_elements(source: Source, extras: OtherElements) -> bytes:
    """Read what is kept whole, as one file; empty where there is nothing.

    Raises
    ------
    SchemaError
        If there is something that AnnData cannot write; the message names it.
    """
    found = {key: source.element(key) for key in extras.elements}
    for name in extras.modalities:
        cells = source.present(f"mod/{name}/obs")
        if cells is not None:
            found[f"{PRESENT}mod/{name}/obs"] = cells
    try:
        return pack(found) if found else b""
    except SchemaError as error:
        where = source.describe().uri or "the object"
        raise SchemaError(f"{where}: {error} Or leave it out with extras=[...].") from error


def write_other_elements(
    catalog: Catalog, source: Source, group: str, extras: OtherElements, packed: bytes, bundle: Bundle
) -> WrittenElements:
    """Write what is kept below a group, matrices in blocks of rows.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    source : Source
        The source.
    group : str
        Path of the dataset's first group.
    extras : OtherElements
        What `plan_other_elements` decided.
    packed : bytes
        What `serialize_other_elements` made.
    bundle : Bundle
        Takes what is small.
    """
    written = WrittenElements()
    if not packed and not extras.arrays:
        return written
    profile = catalog.codec()
    if packed:
        # Bytes are no numbers: the packed codec would not make them smaller.
        elements = _filled(
            catalog,
            f"{group}/{ELEMENTS}",
            np.frombuffer(packed, np.uint8),
            "archive" if profile != STANDARD else profile,
        )
        _close_arrays(written, {ELEMENTS: elements}, bundle)
    for i, info in enumerate(extras.arrays):
        path = f"{EXTRAS}/{i}"
        dtype = np.dtype(np.uint8) if info.dtype.kind == "b" else info.dtype
        rows = info.shape[1:] if info.form == "dense" else ()
        writers = {f"{path}/data": ArrayWriter(catalog.arrays, f"{group}/{path}/data", dtype, rows, profile=profile)}
        if info.form != "dense":
            writers[f"{path}/indices"] = ArrayWriter(
                catalog.arrays, f"{group}/{path}/indices", np.uint32, profile=profile
            )
        bounds = [np.zeros(1, np.int64)]
        for _, block in iterate_blocks(source, info):
            writers[f"{path}/data"].append(block.layers["values"].astype(dtype, copy=False))
            if isinstance(block, CsrBlock):
                writers[f"{path}/indices"].append(block.indices.astype(np.uint32))
                # Pointers of each block start at 0 again.
                bounds.append(block.indptr[1:] + bounds[-1][-1])
        if info.form != "dense":
            indptr = np.concatenate(bounds)
            writers[f"{path}/indptr"] = _filled(catalog, f"{group}/{path}/indptr", indptr, profile)
        _close_arrays(written, writers, bundle)
        written.facts[info.key] = ExtraFacts(path=path, shape=info.shape, **matrix_facts(info))
    return written


def matrix_facts(info: MatrixInfo) -> dict[str, Any]:
    """Return the form in which a matrix is read back: the fields of `MatrixFacts`."""
    return {"form": info.form, "dtype": str(info.dtype), "wide": info.wide}


def _filled(catalog: Catalog, path: str, values: NDArray[Any], profile: str) -> ArrayWriter:
    writer = ArrayWriter(catalog.arrays, path, values.dtype, profile=profile)
    writer.append(values)
    return writer


def _close_arrays(
    written: WrittenGroup | WrittenElements, writers: Mapping[str, ArrayWriter], bundle: Bundle | None
) -> None:
    """Close arrays by their path below the group, and record their descriptions and checksums; those that are small go into the bundle."""
    for path, writer in writers.items():
        written.specs[path] = writer.close(listed=writer.profile != STANDARD, bundle=bundle)
    for path, writer in writers.items():
        written.checksums |= writer.checksums(path)


def seal(arrays: Location, groups: Sequence[WrittenGroup], extras: WrittenElements, bundle: Bundle) -> None:
    """Write the metadata of groups whose arrays are written, and the bundle of their dataset.

    Parameters
    ----------
    arrays : Location
        The Zarr store.
    groups : sequence of WrittenGroup
        The groups; the first holds the other elements.
    extras : WrittenElements
        The other elements.
    bundle : Bundle
        The small files.
    """
    for n, written in enumerate(groups):
        space, specs = written.group.space, written.specs | (extras.specs if n == 0 else {})
        facts = {"raggedatlas": {"feature_space": space.name, "kind": space.kind.value}}
        if written.listed:
            describe_group(arrays, written.path, facts, specs)
        else:
            create_group(arrays, written.path, facts)
    bundle.write(arrays)

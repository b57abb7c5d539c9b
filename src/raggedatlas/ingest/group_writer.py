"""Write the matrices of one group, block by block, in bounded memory; and what is kept with the dataset as it is."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
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
from raggedatlas.ingest.linking import ColumnLinks, LinkPlan
from raggedatlas.ingest.plan import COUNTS, LayerPlan, NewGroup, OtherElements
from raggedatlas.ingest.values import LayerFit, OtherFormatError, block_rows, iterate_blocks, to_csr
from raggedatlas.model.arguments import Progress
from raggedatlas.model.arrays import ArraySpec
from raggedatlas.model.batch import Block, CsrBlock, DenseBlock
from raggedatlas.model.frames import INDEX
from raggedatlas.model.ids import free_name
from raggedatlas.model.options import IngestOptions
from raggedatlas.model.protocols import MatrixInfo, Source
from raggedatlas.model.records import COLUMNS, ELEMENTS, EXTRAS, ExtraFacts
from raggedatlas.model.spaces import PointerKind
from raggedatlas.store.arrays import ArrayWriter
from raggedatlas.store.bundle import Bundle
from raggedatlas.store.codecs import STANDARD, is_exact
from raggedatlas.store.content_hash import ContentHash, as_bits
from raggedatlas.store.native import BAD_COLUMN, csr_of, library
from raggedatlas.store.runtime import DECODE_THREADS, BackgroundWriter, BufferPool, map_decode, prefetch, shared_pool
from raggedatlas.store.sparse import canonicalize

DEPTH = 2
"""Blocks that may wait between two steps of the pipeline."""


SPAN_ENTRIES = 2**18
"""Entries that a thread renumbers at once, at least."""


@dataclass
class WrittenGroup:
    """A written group.

    `specs` and `checksums` have the array descriptions and checksums by path below the group, `layers` and `stored` the
    plans and stored dtypes by name of the layer.
    """

    group: NewGroup  # its plan
    path: str  # of the group
    layers: dict[str, LayerPlan] = field(default_factory=dict)
    stored: dict[str, np.dtype[Any]] = field(default_factory=dict)
    specs: dict[str, ArraySpec] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    # (n_rows + 1,): bounds of the rows' entries; None for dense groups.
    indptr: NDArray[np.int64] | None = None
    n_rows: int = 0
    n_entries: int = 0  # entries, or values of a dense group
    n_summed: int = 0  # duplicate entries that were summed
    # (n_rows,): cell of each row; None when row i is cell i.
    present: NDArray[np.int64] | None = None
    n_new_features: int = 0
    # False in an atlas of standard codecs, which is for readers that may not know consolidated metadata.
    listed: bool = True


class PendingWrite:
    """A group whose source has been read, and whose last rows are still being written.

    `written` is complete except for `specs` and `checksums`; `steps` are the pipeline steps that are still running.
    `close` closes the arrays after the last rows, and records their descriptions.
    """

    def __init__(self, written: WrittenGroup, steps: contextlib.ExitStack, close: Callable[[], None]) -> None:
        self.written, self._steps, self._close = written, steps, close

    def __reduce__(self) -> tuple[Callable[[WrittenGroup], "PendingWrite"], tuple[WrittenGroup]]:
        """Pickle a finished group."""
        # Threads and closures do not pickle; workers call `finish` before they return a group.
        return partial(PendingWrite, steps=contextlib.ExitStack(), close=_nothing_left), (self.written,)

    def finish(self) -> None:
        """Wait for the last rows and close the arrays, unless that was done already; callable from any thread.

        If a write failed, the caller removes the group.
        """
        # Swapped first, so that a second call finds nothing to close.
        close, self._close = self._close, _nothing_left
        with self._steps:
            close()

    def abandon(self) -> None:
        """Wait for the current write, and discard the rest."""
        # With an error, the writers cancel queued blocks; without one they would write them all.
        self._steps.__exit__(StoreError, StoreError("abandoned"), None)


def _nothing_left() -> None:
    """Do nothing."""


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
        self._folder = "csr/layers" if group.space.kind is PointerKind.SPARSE else "layers"
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

    def decide(self, group: NewGroup, taken: AbstractSet[str]) -> str:
        """Return the layer's name, chosen from the values so far."""
        if self.plan.name:
            return self.plan.name
        wanted = COUNTS if group.space.is_counts and self.fit.counts else self.plan.otherwise
        return free_name(wanted if wanted not in taken else self.plan.otherwise, taken)

    @property
    def path(self) -> str:
        """Path of its array below the group."""
        return f"{self._folder}/{self.name}"

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

    def append(
        self, create: Callable[..., ArrayWriter], values: NDArray[Any], breaks: NDArray[np.int64] | None
    ) -> None:
        """Append values in the dtype chosen for them; values that need a rewrite are skipped."""
        dtype = values.dtype
        if self.writer is None:
            self.writer = create(self.path, dtype, values.shape[1:])
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

    `StagedDataset.finish` completes the group; if an error is raised, the caller removes it. With ``dry_run``
    everything is read and checked, nothing written. `progress` is called with ``"block"`` after each step. `taken` are
    the layer names that other groups of this space have taken; those of this group are added. `content`, unless it is
    None, is updated with the first matrix. `bundle` takes small arrays besides those of the matrices.
    """
    write = partial(_write, catalog, source, path, group, options, progress, taken, bundle)
    try:
        return write(content, {})
    except OtherFormatError as error:
        # The threads of the first pass have ended, so nothing appears below the path after this.
        if not options.dry_run:
            catalog.arrays.child(*path.split("/")).delete_prefix()
        # No hash: the first pass has read all blocks, so `content` is complete.
        return write(None, error.right)


def _write(
    catalog: Catalog, source: Source, path: str, group: NewGroup, options: IngestOptions, progress: Progress, taken: set[str],
    bundle: Bundle, content: ContentHash | None, formats: Mapping[str, _LayerFormat],
) -> PendingWrite:  # fmt: skip
    """Make one pass over the matrices of a group.

    `formats` has the names and dtypes of the layers, by matrix, where an earlier pass has found them. Raises
    `OtherFormatError` if the matrices have to be read again, to write them under other names or in other dtypes.
    """
    written = WrittenGroup(group, path, listed=catalog.codec() != STANDARD)
    layers = [_LayerWriter(source, plan, group, options) for plan in group.layers]
    infos = [plan.info for plan in group.layers]
    used = {*taken, *(plan.name for plan in group.layers if plan.name)}
    sparse = group.space.kind is PointerKind.SPARSE
    bounds, pool = [np.zeros(1, np.int64)], shared_pool()
    with contextlib.ExitStack() as steps:
        # Contexts end in reverse order: `later` feeds `append`, which feeds `send`.
        send, append, later = (steps.enter_context(BackgroundWriter(DEPTH)) for _ in range(3))

        def create(own: str, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> ArrayWriter:
            """Return a writer of an array of the group, whose files are written while the next chunks are encoded."""
            return ArrayWriter(catalog.arrays, f"{path}/{own}", dtype, row_shape, profile=catalog.codec()).behind(send)

        indices = create("csr/indices", np.uint32) if sparse and not options.dry_run else None

        def place(rows: Sequence[Block], dtypes: Sequence[np.dtype[Any]]) -> None:
            """Reorder the columns of the next rows, and append them; runs on the thread of `later`."""
            fitted = [(block.layers["values"], dtype) for block, dtype in zip(rows, dtypes, strict=True)]
            columns = begins = None
            if isinstance(rows[0], CsrBlock):
                columns, values = reorder_columns(rows[0], fitted, group.columns, pool)
                ends = rows[0].indptr
                # Where rows with entries begin: hints by which the packed codec cuts its blocks.
                begins = ends[:-1][ends[1:] > ends[:-1]]
            else:
                values = [np.ascontiguousarray(part, dtype=dtype) for part, dtype in fitted]
            append(partial(store, columns, values, begins))

        def store(
            columns: NDArray[np.uint32] | None, values: Sequence[NDArray[Any]], begins: NDArray[np.int64] | None
        ) -> None:
            if indices is not None and columns is not None:
                indices.append(columns, begins)
            for layer, part in zip(layers, values, strict=True):
                layer.append(create, part, begins)

        n_rows = max(1, min(block_rows(info) for info in infos) // len(infos))
        with contextlib.closing(prefetch(source.blocks(tuple(info.key for info in infos), n_rows), DEPTH)) as ahead:
            for blocks in ahead:
                rows: Sequence[Block]
                rows = _canonical(blocks, written, options) if sparse else [to_dense(block) for block in blocks]
                first = rows[0]
                for layer, block in zip(layers, rows, strict=True):
                    layer.fit.observe(block, written.n_rows)
                if content is not None:
                    content.update(first)
                for layer in (layer for layer in layers if not layer.name):
                    form = formats.get(layer.plan.info.key)
                    layer.name, layer.known = (layer.decide(group, used), None) if form is None else form
                    used.add(layer.name)
                if isinstance(first, CsrBlock):
                    bounds.append(first.indptr[1:] + bounds[-1][-1])
                written.n_rows += first.n_rows
                written.n_entries += first.layers["values"].size
                if not options.dry_run:
                    # `choose` runs now: when the job runs, `fit` may have seen later blocks.
                    later(partial(place, rows, [layer.choose() for layer in layers]))
                progress("block", written.n_rows, infos[0].shape[0])
        final = _final_formats(layers, group, taken)
        for layer in layers:
            layer.name = final[layer.plan.info.key].name
            info = replace(layer.plan.info, dtype=layer.fit.returned)
            written.layers[layer.name] = replace(layer.plan, info=info)
            written.stored[layer.name] = layer.dtype
        taken.update(written.layers)
        written.present = source.present(infos[0].key)
        if sparse:
            written.indptr = np.concatenate(bounds)
        # The last blocks are still queued: from here on `PendingWrite` waits for the threads.
        left = steps.pop_all()

    def close() -> None:
        # In this order: `append` gets its last job from `later`.
        later.join()
        append.join()
        if not catalog.location.is_local:
            # The last shards are sent side by side.
            send.join()
        if not options.dry_run:
            _close(catalog, written, layers, indices, create, bundle)

    return PendingWrite(written, left, close)


def link_group(
    catalog: Catalog, path: str, group: NewGroup, links: LinkPlan, number: int, options: IngestOptions, bundle: Bundle
) -> PendingWrite:
    """Describe the arrays of a linked group, whose references are in the bundle, and write the bounds of its rows.

    `number` is that of the group among those of the source. `bundle` takes the bounds; with ``dry_run`` nothing is
    written.
    """
    linked = links.groups[number]
    written = WrittenGroup(group, path, dict(linked.layers), dict(linked.stored), listed=catalog.codec() != STANDARD)
    info = group.layers[0].info
    written.indptr, written.present, written.n_rows = linked.indptr, links.present[number], info.shape[0]
    written.n_entries = int(np.prod(info.shape, dtype=np.int64)) if linked.indptr is None else int(linked.indptr[-1])
    if not options.dry_run:
        if linked.bounds:
            _write_arrays(catalog, written, path, linked.bounds, bundle if written.listed else None)
        for own, spec in linked.specs.items():
            written.specs[own] = links.link(
                spec, f"{path}/{own}", sampled=own in linked.sampled, entries=linked.indptr is not None
            )
    return PendingWrite(written, contextlib.ExitStack(), _nothing_left)


def link_columns(catalog: Catalog, written: WrittenGroup, links: ColumnLinks, bundle: Bundle) -> None:
    """Describe the CSC matrices of a file as the column-sorted copy of the group that has their rows; the bundle takes the bounds."""
    # Layers of a group have the same entries, in the same order: the indices of the first are those of all.
    for name, layer in written.layers.items():
        arrays = links.matrices.get(layer.info.key)
        if arrays is None:
            continue
        described = {f"csc/layers/{name}": arrays["data"]}
        if "csc/indices" not in written.specs:
            described["csc/indices"] = arrays["indices"]
            bounds = {"csc/indptr": links.indptr[layer.info.key]}
            _write_arrays(catalog, written, written.path, bounds, bundle if written.listed else None)
        written.specs |= {own: links.link(spec, f"{written.path}/{own}") for own, spec in described.items()}


def _close(
    catalog: Catalog,
    written: WrittenGroup,
    layers: Sequence[_LayerWriter],
    indices: ArrayWriter | None,
    create: Callable[..., ArrayWriter],
    bundle: Bundle,
) -> None:
    """Close the arrays after the last rows, and record their descriptions."""
    writers = {}
    if indices is not None and written.indptr is not None:
        writers["csr/indices"] = indices
        kept: dict[str, NDArray[Any]] = {"csr/indptr": written.indptr}
        if written.group.columns is not None:
            kept[COLUMNS] = written.group.columns.astype(np.uint32)
        _write_arrays(catalog, written, written.path, kept, bundle if written.listed else None)
    for layer in layers:
        if layer.writer is None:
            # A layer without rows still has an array.
            row_shape = () if indices is not None else layer.plan.info.shape[1:]
            layer.writer = create(layer.path, layer.dtype, row_shape)
        writers[layer.path] = layer.writer
    # Never into the bundle: other Zarr readers find the matrices in the group.
    _close_arrays(written, writers, None)
    for layer in layers:
        # Narrower integers fit a float64 whatever their values are; for these the values decide what a query may make of them.
        if layer.writer is not None and layer.writer.dtype in (np.int64, np.uint64):
            written.specs[layer.path] = replace(written.specs[layer.path], largest=layer.fit.largest)


def _canonical(blocks: Sequence[Block], written: WrittenGroup, options: IngestOptions) -> list[CsrBlock]:
    """Return the next rows of the matrices of a sparse group in canonical form; all have the same entries."""
    infos, rows = [plan.info for plan in written.group.layers], []
    for block, info in zip(blocks, infos, strict=True):
        sums = options.duplicate_entries == "sum"
        clean, n_summed = canonicalize(to_csr(block), info.key, written.n_rows, sum_duplicates=sums)
        written.n_summed += n_summed
        rows.append(clean)
    for other in rows[1:]:
        if not (np.array_equal(other.indptr, rows[0].indptr) and np.array_equal(other.indices, rows[0].indices)):
            raise SourceError(
                f"{infos[0].key} and its layers changed while they were read; let nothing write the source and add it again."
            )
    return rows


def _final_formats(layers: Sequence[_LayerWriter], group: NewGroup, taken: AbstractSet[str]) -> dict[str, _LayerFormat]:
    """Return names and dtypes of the layers by all their values; refuse values that only the whole matrix shows."""
    used = {*taken, *(plan.name for plan in group.layers if plan.name)}
    final: dict[str, _LayerFormat] = {}
    for layer in layers:
        layer.fit.judge()
        form = final[layer.plan.info.key] = _LayerFormat(layer.decide(group, used), layer.dtype)
        used.add(form.name)
    # They were chosen from the first blocks.
    if any(layer.name and (layer.needs_rewrite or layer.name != final[layer.plan.info.key].name) for layer in layers):
        raise OtherFormatError(final)
    return final


def reorder_columns(
    block: CsrBlock,
    layers: Sequence[tuple[NDArray[Any], DTypeLike]],
    columns: NDArray[np.int64] | None,
    pool: BufferPool | None = None,
) -> tuple[NDArray[np.uint32], list[NDArray[Any]]]:
    """Renumber the columns of some rows, sort each row by the new numbers, and cast each layer to its stored dtype.

    `block` has canonical rows; `layers` are (n_entries,) values, each with a dtype that holds them all exactly.
    `columns`, (n_cols,), is the stored column of every column; None keeps the order. Returns the stored columns,
    ascending in each row, and the layers, in memory from `pool` if there is one.

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


PRESENT = "present/"
"""Before the key of a modality's cells: which cell each of its rows is."""


@dataclass
class WrittenElements:
    """What writing found out; `specs` and `checksums` are by path below the group."""

    # Key of each array -> where it is, its form, dtype and shape.
    facts: dict[str, ExtraFacts] = field(default_factory=dict)
    specs: dict[str, ArraySpec] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)


def serialize_other_elements(source: Source, extras: OtherElements) -> bytes:
    """Read what is kept whole, as one file; empty where there is nothing.

    Raises `SchemaError`, which names the element, if there is something that AnnData cannot write.
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
    catalog: Catalog, source: Source, group: str, extras: OtherElements, packed: bytes, bundle: Bundle,
    links: LinkPlan | None = None,
) -> WrittenElements:  # fmt: skip
    """Write what is kept below a group, matrices in blocks of rows; of those that are linked only the bounds of rows."""
    written = WrittenElements()
    if not packed and not extras.arrays:
        return written
    profile = catalog.codec()
    if packed:
        # Bytes are no numbers: the packed codec would not make them smaller.
        own = "archive" if profile != STANDARD else profile
        _write_arrays(catalog, written, group, {ELEMENTS: np.frombuffer(packed, np.uint8)}, bundle, own)
    for i, info in enumerate(extras.arrays):
        path = f"{EXTRAS}/{i}"
        if links is not None and info.key in links.extras:
            for name, spec in links.extras[info.key].items():
                written.specs[f"{path}/{name}"] = links.link(spec, f"{group}/{path}/{name}")
            if info.form != "dense":
                _write_arrays(catalog, written, group, {f"{path}/indptr": links.extra_indptr[info.key]}, bundle)
            written.facts[info.key] = ExtraFacts(path=path, shape=info.shape, **matrix_facts(info))
            continue
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
        _close_arrays(written, writers, bundle)
        if info.form != "dense":
            _write_arrays(catalog, written, group, {f"{path}/indptr": np.concatenate(bounds)}, bundle)
        written.facts[info.key] = ExtraFacts(path=path, shape=info.shape, **matrix_facts(info))
    return written


def matrix_facts(info: MatrixInfo) -> dict[str, Any]:
    """Return the form in which a matrix is read back: the fields of `MatrixFacts`."""
    return {"form": info.form, "dtype": str(info.dtype), "wide": info.wide}


def _write_arrays(
    catalog: Catalog, written: WrittenGroup | WrittenElements, group: str, arrays: Mapping[str, NDArray[Any]], bundle: Bundle | None,
    profile: str | None = None,
) -> None:  # fmt: skip
    """Write arrays that are in memory, by their path below the group, by a codec profile or that of the atlas; see `_close_arrays`."""
    writers = {}
    for path, values in arrays.items():
        writers[path] = ArrayWriter(catalog.arrays, f"{group}/{path}", values.dtype, profile=profile or catalog.codec())
        writers[path].append(values)
    _close_arrays(written, writers, bundle)


def _close_arrays(
    written: WrittenGroup | WrittenElements, writers: Mapping[str, ArrayWriter], bundle: Bundle | None
) -> None:
    """Close arrays by their path below the group, and record their descriptions and checksums; those that are small go into the bundle."""
    location = next(iter(writers.values())).location
    if not location.is_local:
        writers = {path: writer.behind(None) for path, writer in writers.items()}
    steps = [partial(writer.close, listed=writer.profile != STANDARD, bundle=bundle) for writer in writers.values()]
    # One after the other into a bundle, whose files have an order.
    specs = [step() for step in steps] if bundle is not None else location.side_by_side(steps)
    written.specs |= zip(writers, specs, strict=True)
    for path, writer in writers.items():
        written.checksums |= writer.checksums(path)

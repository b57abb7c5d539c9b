"""The column-sorted copy of a sparse group: streamed, idempotent, layer by layer."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.catalog.assets import (
    array_readers,
    find_dataset,
    hold_lease,
    read_records,
    read_specs,
)
from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.versions import list_versions
from raggedatlas.errors import ConflictError, CorruptError, NotFoundError, QueryError
from raggedatlas.ingest.group_changes import NewArrays, change_records, group_metadata_of
from raggedatlas.model.arrays import ArraySpec
from raggedatlas.model.records import DatasetRecord
from raggedatlas.model.spaces import PointerKind
from raggedatlas.store.arrays import ArrayWriter, create_group
from raggedatlas.store.executors import Workers, in_order, run_tasks
from raggedatlas.store.native import library
from raggedatlas.store.read import ArrayReader, read_bounds, read_slice
from raggedatlas.store.runtime import BackgroundWriter, prefetch
from raggedatlas.store.sparse import count_columns, move_runs

BAND_BYTES = 192 * 2**20
"""Row numbers and values of the columns that are gathered in memory at once; memory is bounded by a small multiple."""

STEP_ENTRIES = 2**20
"""Entries that are read at once."""

_LOST = "Copies that were not finished are not used; call add_csc() again."

Entries = tuple[NDArray[Any], list[NDArray[Any]]]
"""Columns of some entries, uint32, and one array for each array of the copy, in the order of the rows."""


def add_csc(
    catalog: Catalog,
    dataset: str,
    space: str,
    layers: Sequence[str] | None = None,
    executor: Executor | Workers | None = None,
) -> tuple[str, ...]:
    """Write column-sorted copies of a dataset's sparse layers, and return the layers written now.

    Every row of the group is in the copy, also rows whose cells were deleted since, so ``zarr_row`` keeps its meaning.
    Layers that had a copy are left as they are; `layers` None means all. A copy that a snapshot has is taken, and not
    written over. `dataset` is a name or uid. The workers of `executor` write the copies, one for each group of layers
    with the same entries.
    """
    catalog = catalog.session("add_csc()")
    if catalog.space(space).kind is not PointerKind.SPARSE:
        raise QueryError(
            f"The feature space {space!r} is dense: its arrays are read by row and by column alike; add_csc() is for sparse ones."
        )
    records = [r for r in find_dataset(catalog, dataset) if r.feature_space == space]
    there = [layer for r in records for layer in r.layers]
    unknown = sorted(set(layers or ()) - set(there))
    if not records or unknown:
        raise NotFoundError(f"Dataset {dataset!r} has the {space!r} layers {there}, not {unknown or 'any'}.")
    written: list[str] = []
    with hold_lease(catalog, records[0], "add_csc()") as refuse_other:
        # Another call may have made a copy before this one had the lease, which has brought the tables up to date.
        records = [r for r in find_dataset(catalog, records[0].uid) if r.feature_space == space]
        copied = _copied_before(catalog, [record for record in records if _missing(record, layers)])
        tasks = [
            partial(_copy_group, catalog, record, layers, copied.get(record.zarr_group, NewArrays()))
            for record in records
        ]
        for record, copy in zip(
            records, in_order(run_tasks(tasks, executor, place=catalog.location, lost=_LOST)), strict=True
        ):
            if copy.specs:
                refuse_other()
                _commit(catalog, record, copy)
            written += [layer for layer in record.layers if f"csc/layers/{layer}" in copy.specs]
    return tuple(written)


def _missing(record: DatasetRecord, layers: Sequence[str] | None) -> list[str]:
    """Return those of some layers that have no copy yet."""
    there = record.array_specs
    return [name for name in record.layers if (layers is None or name in layers) and f"csc/layers/{name}" not in there]


def _copied_before(catalog: Catalog, records: Sequence[DatasetRecord]) -> dict[str, NewArrays]:
    """Return the copies of groups that snapshots have, which are not written over where `restore` has taken them from the records."""
    # Where nothing lies, nothing is written over.
    groups = [
        record.zarr_group
        for record in records
        if catalog.arrays.child(*record.zarr_group.split("/"), "csc").holds_files()
    ]
    found = {group: (dict[str, ArraySpec](), dict[str, str]()) for group in groups}
    views = [catalog.at(version) for version in list_versions(catalog)] if found else []
    for then in (record for view in views for record in read_records(view)):
        if then.zarr_group in found and '"csc/' in then.arrays:
            specs, checksums = found[then.zarr_group]
            specs |= {k: s for k, s in read_specs(then).items() if k.startswith("csc/") and s.linked is None}
            checksums |= {key: sha for key, sha in then.array_checksums.items() if key.startswith("csc/")}
    return {group: NewArrays(*copy) for group, copy in found.items()}


def _copy_group(catalog: Catalog, record: DatasetRecord, layers: Sequence[str] | None, before: NewArrays) -> NewArrays:
    """Write the copies of layers that have none; `before` has those of snapshots."""
    missing, there = _missing(record, layers), record.array_specs
    if not missing:
        return NewArrays()
    wanted = ("csc/indptr", "csc/indices", *(f"csc/layers/{layer}" for layer in missing))
    kept = before.only([path for path in wanted if path in before.specs and path not in there])
    record = kept.add_to(record)
    fresh = _missing(record, missing)
    if not fresh:
        return kept
    readers = array_readers(catalog, record)
    group = catalog.arrays.child(*record.zarr_group.split("/"))
    # Indices and bounds are recorded together with the first layer; further layers of the group share them.
    first_time = "csc/indptr" not in readers
    sources = {f"csc/layers/{layer}": f"csr/layers/{layer}" for layer in fresh}
    lost = sorted({"csr/indices", "csr/indptr", *sources.values()} - set(readers))
    if lost:
        raise CorruptError(
            f"The record of {record.zarr_group} names no array {lost[0]!r}; run validate('deep') and restore the atlas from a copy."
        )
    kinds = {path: np.dtype(readers[source].spec.dtype) for path, source in sources.items()}
    if first_time:
        kinds = {"csc/indices": np.dtype(np.uint32)} | kinds
    # Shards may be left of a copy that was not finished; as no record of the tip or of a snapshot names these arrays, nobody reads them.
    for path in [*kinds, *(["csc/indptr"] if first_time else [])]:
        group.child(*path.split("/")).delete_prefix()
    # Groups of standard codecs do not list their arrays.
    listed = group_metadata_of(catalog, record).listed is not None
    if not listed:
        create_group(catalog.arrays, f"{record.zarr_group}/csc/layers")

    def create(path: str, dtype: np.dtype[Any]) -> ArrayWriter:
        return ArrayWriter(catalog.arrays, f"{record.zarr_group}/{path}", dtype, profile=catalog.codec())

    def append(arrays: Sequence[NDArray[Any]], columns: NDArray[np.int64]) -> None:
        for writer, values in zip(writers.values(), arrays, strict=True):
            writer.append(values, columns)

    bounds = _column_bounds(readers, record.n_features)
    made: dict[str, ArrayWriter] = {}
    if first_time:
        made["csc/indptr"] = create("csc/indptr", np.dtype(np.int64))
        made["csc/indptr"].append(bounds)
    writers = {path: create(path, dtype) for path, dtype in kinds.items()}
    # Bands of columns whose entries fit in memory together; a column with more entries gets a band for itself.
    n_entries = BAND_BYTES // sum(dtype.itemsize for dtype in kinds.values())
    edges = [0]
    while edges[-1] < record.n_features:
        last = int(np.searchsorted(bounds, bounds[edges[-1]] + n_entries, side="right")) - 1
        edges.append(min(record.n_features, max(edges[-1] + 1, last)))
    entries_of_bands = _by_band(lambda: _entries(readers, [sources.get(path) for path in kinds]), edges)
    with BackgroundWriter() as later:
        for (first, last), entries in zip(pairwise(edges), entries_of_bands, strict=True):
            starts = bounds[first : last + 1] - bounds[first]
            # Where columns with entries begin: hints by which the packed codec cuts its blocks.
            columns = starts[:-1][starts[1:] > starts[:-1]]
            later(partial(append, _gathered(entries, first, starts, list(kinds.values())), columns))
    specs, checksums = dict(kept.specs), dict(kept.checksums)
    for path, written in (made | writers).items():
        specs[path] = written.close(listed=listed)
        checksums |= written.checksums(path)
    return NewArrays(specs, checksums)


def _commit(catalog: Catalog, record: DatasetRecord, copy: NewArrays) -> None:
    changed: list[DatasetRecord] = []

    def change(old: list[DatasetRecord]) -> list[DatasetRecord]:
        # Into the record as it is now: another call may have added a copy of another layer.
        changed[:] = [copy.add_to(now) for now in old if now.zarr_group == record.zarr_group]
        return changed

    change_records(catalog, record.uid, "add_csc()", change)
    if not changed:
        raise ConflictError(
            f"The dataset {record.name!r} of {catalog.location.uri} was dropped while add_csc() copied it; nothing of the copy is used."
        )


def _column_bounds(readers: Mapping[str, ArrayReader], n_columns: int) -> NDArray[np.int64]:
    """Count the entries of every column: where each begins and the last ends, (n_columns + 1,) int64."""
    bounds, n = np.zeros(n_columns + 1, np.int64), 0
    for columns, _ in _entries(readers, []):
        bounds[1:] += count_columns(columns, n_columns)
        n += len(columns)
    np.cumsum(bounds, out=bounds)
    # `count_columns` ignores columns beyond the last, so the sum falls short if there are any.
    if bounds[-1] != n:
        raise CorruptError(
            f"{readers['csr/indices'].name}: {n - bounds[-1]:,} entries are beyond column {n_columns - 1:,}; run validate('deep')."
        )
    return bounds


def _entries(readers: Mapping[str, ArrayReader], sources: Sequence[str | None]) -> Iterator[Entries]:
    """Yield all entries in the order of the rows, at most `STEP_ENTRIES` at a time.

    The source None means the row numbers. Of a dense matrix these are the entries that are not zero in some layer.
    """
    indices, pointers = readers["csr/indices"], readers["csr/indptr"]
    layers = [reader for path, reader in readers.items() if path.startswith("csr/layers/")]
    n = indices.spec.n_rows
    indptr = read_bounds(pointers, pointers.spec.n_rows - 1, n)
    for start in range(0, n, STEP_ENTRIES):
        stop = min(n, start + STEP_ENTRIES)
        # The row that has entry `start`: `side="right"` passes over empty rows that begin there.
        first = int(np.searchsorted(indptr, start, side="right")) - 1
        last = int(np.searchsorted(indptr, stop, side="left"))
        # The first and the last row may extend beyond the step.
        bounds = np.clip(indptr[first : last + 1], start, stop)
        rows = np.repeat(np.arange(first, last, dtype=np.uint32), np.diff(bounds))
        columns = read_slice(indices, start, stop)
        arrays = [rows if source is None else read_slice(readers[source], start, stop) for source in sources]
        if indices.spec.is_columns:
            kept = np.any([read_slice(layer, start, stop) != 0 for layer in layers], axis=0)
            columns, arrays = columns[kept], [values[kept] for values in arrays]
        yield columns, arrays


def _by_band(entries: Callable[[], Iterator[Entries]], edges: Sequence[int]) -> Iterator[Iterator[Entries]]:
    """Yield the entries of each band of columns, in the order of the rows; those of several bands wait in temporary files."""
    n_bands = len(edges) - 1
    if n_bands < 2:
        for _ in range(n_bands):
            with contextlib.closing(prefetch(entries())) as ahead:
                yield ahead
        return
    band_of = np.repeat(np.arange(n_bands, dtype=np.uint32), np.diff(edges))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="raggedatlas-csc-"))
        files = [Path(folder) / str(i) for i in range(n_bands)]
        lengths: list[list[int]] = [[] for _ in files]
        kinds: list[np.dtype[Any]] = []
        ahead = stack.enter_context(contextlib.closing(prefetch(entries())))
        for columns, arrays in ahead:
            kinds = [columns.dtype, *(a.dtype for a in arrays)]
            # This sort is stable, so rows still ascend within each column of a band.
            cuts, parted = _sorted(band_of[columns], [columns, *arrays], n_bands)
            for i in np.flatnonzero(np.diff(cuts)).tolist():
                lengths[i].append(int(cuts[i + 1] - cuts[i]))
                with files[i].open("ab") as file:
                    for part in parted:
                        part[cuts[i] : cuts[i + 1]].tofile(file)

        def read_back(path: Path, pieces: Sequence[int]) -> Iterator[Entries]:
            # A band without entries has no file.
            if not pieces:
                return
            with path.open("rb") as file:
                for n in pieces:
                    columns, *arrays = (np.fromfile(file, kind, n) for kind in kinds)
                    yield columns, arrays

        yield from map(read_back, files, lengths)


def _gathered(
    entries: Iterator[Entries], first: int, starts: NDArray[np.int64], kinds: Sequence[np.dtype[Any]]
) -> list[NDArray[Any]]:
    """Put the entries of a band, whose first column is given, in the order of their columns.

    Those of one column stay in the order in which they come. Each step is sorted by itself first, in the processor's
    cache, so that memory is written in runs.
    """
    out = [np.empty(int(starts[-1]), kind) for kind in kinds]
    # Next free place of each column.
    taken = starts[:-1].copy()
    for columns, arrays in entries:
        runs, parted = _sorted(columns - np.uint32(first), arrays, len(taken))
        after = taken + np.diff(runs)
        if (after > starts[1:]).any():
            raise CorruptError("The entries of a sparse group changed while they were sorted; run validate('deep').")
        for values, target in zip(parted, out, strict=True):
            move_runs(values, runs[:-1], np.diff(runs), taken, target)
        taken = after
    if not np.array_equal(taken, starts[1:]):
        raise CorruptError("Entries of a sparse group were lost while they were sorted; run validate('deep').")
    return out


def _sorted(
    columns: NDArray[Any], arrays: Sequence[NDArray[Any]], n_columns: int
) -> tuple[NDArray[np.int64], list[NDArray[Any]]]:
    """Sort one step's arrays by column, stably: where each column begins and the last ends, and the arrays."""
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(count_columns(columns, n_columns))])
    if starts[-1] != len(columns):
        raise CorruptError("A sparse group has entries beyond its columns; run validate('deep').")
    n, places = len(columns), np.empty(len(columns), np.int64)
    library().ra_claim_places(columns.astype(np.uint32, copy=False), n, starts[:-1].copy(), n_columns, places)
    out = [np.empty(n, values.dtype) for values in arrays]
    for values, target in zip(arrays, out, strict=True):
        target[places] = values
    return starts, out

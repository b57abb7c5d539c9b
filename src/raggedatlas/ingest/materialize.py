"""Copy the values of linked datasets into the atlas: streamed, idempotent, dataset by dataset."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Executor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from raggedatlas.catalog.assets import (
    array_readers,
    column_layers,
    find_dataset,
    group_by_dataset,
    hold_lease,
    open_array,
    read_links,
    read_records,
    read_specs,
)
from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.cells import read_frame
from raggedatlas.catalog.linked_values import (
    beyond,
    content_hash,
    index_limits,
    iterate_linked,
    layer_paths,
    refuse_duplicate,
    update_hash,
)
from raggedatlas.catalog.versions import list_versions
from raggedatlas.errors import AtlasError, ConflictError, DuplicateError, SourceError, ValuesError
from raggedatlas.ingest.group_changes import NewArrays, change_records, group_metadata_of, records_of
from raggedatlas.ingest.plan import COUNTS
from raggedatlas.ingest.values import LayerFit, OtherFormatError, find_entry
from raggedatlas.model.arrays import ArraySpec
from raggedatlas.model.batch import CsrBlock
from raggedatlas.model.frames import INDEX
from raggedatlas.model.records import DatasetRecord
from raggedatlas.store.arrays import ArrayWriter
from raggedatlas.store.codecs import is_exact
from raggedatlas.store.executors import Workers, in_order, run_tasks
from raggedatlas.store.read import ArrayReader, iterate_slices
from raggedatlas.store.sparse import canonicalize

INDICES = "csr/indices"

_LOST = "Datasets that were not finished are still linked; call materialize() again."


def materialize(
    catalog: Catalog, datasets: str | Sequence[str] | None = None, executor: Executor | Workers | None = None
) -> tuple[str, ...]:
    """Copy the values of linked datasets into the atlas, in one commit for each dataset; return the names of these.

    Every entry stays where it is in its row, so that pointers of cells and column-sorted copies stay as they are.
    Snapshots from before keep the dataset as it was then, linked. What a call that died has written is not read by
    anyone; the next one writes it again. A dataset that is refused keeps no other from being copied; the error of the
    first one is raised at the end.

    `datasets` are names or uids; None takes all that are linked, and those that are not linked are left as they are.
    The workers of `executor` read and write, a dataset each; the caller commits. Refused are values that are not what
    the dataset says, such as fractions in a layer of counts or a cell that names a feature twice, and a dataset with
    the content of another, or that another process copies at this time. A file that is not the recorded one raises
    `StaleSourceError`.
    """
    catalog = catalog.session("materialize()")
    if datasets is None:
        chosen = [[*own] for own in group_by_dataset(read_records(catalog)).values()]
    else:
        names = [datasets] if isinstance(datasets, str) else datasets
        found = [find_dataset(catalog, name) for name in names]
        chosen = [*{own[0].uid: own for own in found}.values()]
    chosen = [own for own in chosen if _is_linked(own)]
    earlier = _copied_before(catalog, {own[0].uid for own in chosen})
    begun: list[tuple[DatasetRecord, ExitStack, Callable[[], None]]] = []
    done, errors = list[str](), list[AtlasError]()
    with ExitStack() as leases:

        def tasks() -> Iterator[Callable[[], _DatasetCopy | AtlasError | None]]:
            for own in chosen:
                lease = leases.enter_context(ExitStack())
                begun.append((own[0], lease, lease.enter_context(hold_lease(catalog, own[0], "materialize()"))))
                # Another process may have finished it before this one had the lease, which has brought the tables up to date.
                now = records_of(catalog, own[0].uid)
                yield partial(_copy_dataset, catalog, now, earlier.get(own[0].uid))

        copies = in_order(run_tasks(tasks(), executor, place=catalog.location, lost=_LOST))
        for number, copy in enumerate(copies):
            first, lease, refuse_other = begun[number]
            with lease:
                try:
                    if isinstance(copy, AtlasError):
                        raise copy
                    if copy is not None:
                        refuse_other()
                        if _commit(catalog, first, copy):
                            done.append(first.name)
                # The others do not depend on it.
                except AtlasError as error:
                    errors.append(error)
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"Another dataset was not copied: {other}")
        raise errors[0]
    return tuple(done)


@dataclass(frozen=True)
class _DatasetCopy:
    """The arrays of a dataset in place of linked ones, by group; `links` is what they take the place of."""

    groups: Mapping[str, NewArrays]
    links: Mapping[str, "dict[str, tuple[str, str]]"]
    content_hash: str  # hash of the dataset, with its values
    written: bool = True  # whether they were written now; a snapshot may have had them

    def discard(self, catalog: Catalog) -> None:
        """Remove what was written."""
        for group, copy in self.groups.items() if self.written else ():
            _remove(catalog, group, copy.specs)


def _remove(catalog: Catalog, group: str, paths: Iterable[str]) -> None:
    for path in paths:
        catalog.arrays.child(*group.split("/"), *path.split("/")).delete_prefix()


def _is_linked(records: Sequence[DatasetRecord]) -> bool:
    return any(map(read_links, records))


def _links(records: Sequence[DatasetRecord]) -> dict[str, dict[str, tuple[str, str]]]:
    """Return what is linked: group -> path below it -> the array in the file, and the hash of the references; `optimize` moves these."""
    found = {record.zarr_group: read_links(record) for record in records}
    return {
        group: {path: (link.array, link.sha256) for path, link in links.items()}
        for group, links in found.items()
        if links
    }


def _copied_before(catalog: Catalog, uids: AbstractSet[str]) -> dict[str, list[DatasetRecord]]:
    """Return the records of datasets in snapshots that have their values, which are not written over where `restore` has linked them again."""
    views = [catalog.at(version) for version in list_versions(catalog)] if uids else []
    each = (item for view in views for item in group_by_dataset(read_records(view)).items())
    return {uid: own for uid, own in each if uid in uids and not _is_linked(own)}


def _copy_dataset(
    catalog: Catalog, records: Sequence[DatasetRecord], earlier: Sequence[DatasetRecord] | None
) -> _DatasetCopy | AtlasError | None:
    """Write the values of a dataset; None if it is not linked any more."""
    made, groups = dict[str, _Writers](), dict[str, NewArrays]()
    try:
        links = _links(records)
        if not links:
            return None
        if earlier is not None:
            known = {record.zarr_group: record for record in earlier}
            now = {record.zarr_group: record.array_specs for record in records}
            for group, linked in links.items():
                every = NewArrays(read_specs(known[group]), known[group].array_checksums)
                # Of a dataset that is stored by column alone, rows as well.
                groups[group] = every.only([*linked, *(every.specs.keys() - now[group].keys())])
            return _DatasetCopy(groups, links, earlier[0].content_hash, written=False)
        first, content = records[0], records[0].content_hash
        facts = first.file_facts.linked
        for record in records:
            copy, text = _copy_group(catalog, records, record, made)
            groups |= {record.zarr_group: copy} if copy.specs else {}
            # Only the group of the main matrix has one.
            content = text or content
        if facts is not None and facts.hashed == "full" and content != first.content_hash:
            raise SourceError(
                f"The values of {facts.address} do not have the hash that was recorded when the dataset {first.name!r} was linked to it; "
                "put the file back from a copy, or drop the dataset and add it again."
            )
        return _DatasetCopy(groups, links, content)
    except BaseException as error:
        # What cannot be removed is not read by anyone, and must not hide the error or end the call for the other datasets.
        with suppress(AtlasError):
            for group, writers in made.items():
                _remove(catalog, group, writers.made)
        if isinstance(error, SourceError | ValuesError):
            return type(error)(f"{error} The dataset {records[0].name!r} stays linked; nothing was changed.")
        if isinstance(error, AtlasError):
            return error
        raise


class _Writers:
    """Writes arrays of a group in place of linked ones."""

    def __init__(self, catalog: Catalog, record: DatasetRecord) -> None:
        self.catalog, self.record = catalog, record
        self.listed = group_metadata_of(catalog, record).listed is not None
        self.made: dict[str, ArrayWriter] = {}

    def start(self, path: str, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> ArrayWriter:
        """Start an array; what a call that died has left of it is removed, which no record names."""
        _remove(self.catalog, self.record.zarr_group, [path])
        profile = self.catalog.codec()
        writer = ArrayWriter(self.catalog.arrays, f"{self.record.zarr_group}/{path}", dtype, row_shape, profile=profile)
        self.made[path] = writer
        return writer

    def close(self, fits: Mapping[str, LayerFit]) -> NewArrays:
        """Close all; `fits` tells what the values of layers are, by path."""
        specs, checksums = dict[str, ArraySpec](), dict[str, str]()
        for path, writer in self.made.items():
            specs[path] = writer.close(listed=self.listed)
            checksums |= writer.checksums(path)
            # For these, the values decide what a query may make of them.
            if path in fits and writer.dtype in (np.int64, np.uint64):
                specs[path] = replace(specs[path], largest=fits[path].largest)
        return NewArrays(specs, checksums)


def _copy_group(
    catalog: Catalog, records: Sequence[DatasetRecord], record: DatasetRecord, made: dict[str, _Writers]
) -> tuple[NewArrays, str]:
    """Write the linked arrays of a group; return them and, of the first group, the hash of the dataset."""
    readers, known = array_readers(catalog, record), dict[str, np.dtype[Any]]()
    while True:
        writers = made[record.zarr_group] = _Writers(catalog, record)
        try:
            fits, text = _copy_layers(catalog, records, record, readers, writers, known)
            break
        # At most once for each layer.
        except OtherFormatError as error:
            known |= error.right
    _copy_others(catalog, record, writers)
    return writers.close(fits), text


def _copy_layers(
    catalog: Catalog, records: Sequence[DatasetRecord], record: DatasetRecord, readers: Mapping[str, ArrayReader], writers: _Writers,
    known: Mapping[str, np.dtype[Any]],
) -> tuple[dict[str, LayerFit], str]:  # fmt: skip
    """Write the linked layers of a group and, if it is sparse, the columns of its entries."""
    space, paths, facts = catalog.space(record.feature_space), layer_paths(record), record.file_facts.layers

    def name(frame: str, at: int) -> str:
        names = read_frame(catalog, records[0], frame).column(INDEX)
        return f"{names[at].as_py()!r} " if at < len(names) else " "

    def place(row: int, column: int) -> str:
        # Rows of a modality that only some cells have are not those of the file.
        cell = name("obs", row) if record.n_cells == records[0].n_cells_added else ""
        frame = f"var.{record.pointer}"
        feature = f"feature {name(frame, column)}" if frame in records[0].file_facts.frames else ""
        return f"cell {cell}(row {row}), {feature}(column {column}, both counted from 0)"

    fits = {
        path: LayerFit(
            facts[layer].key if layer in facts else layer, np.dtype(readers[path].spec.dtype), must_count=layer == COUNTS,
            may_be_signed=True, keep_nonfinite=not space.is_counts, place=place,
        )
        for layer, path in paths.items()
    }  # fmt: skip
    is_main = record.zarr_group == records[0].zarr_group and record.layers[0] in paths
    content = content_hash(catalog, [*records]) if is_main else None

    def dtype(path: str) -> np.dtype[Any]:
        fit = fits[path]
        if path in known:
            return known[path]
        if space.is_counts:
            return fit.stored
        return np.dtype(np.uint8) if fit.dtype.kind == "b" else fit.dtype

    # A matrix with an entry in every column of every row has no array of columns.
    by_column = bool(column_layers(record.array_specs))
    columns = writers.start(INDICES, np.uint32) if by_column or INDICES in read_links(record) else None
    for row, layers in iterate_linked(readers, record):
        main, begins = next(iter(layers.values())), None
        if isinstance(main, CsrBlock) and columns is not None:
            fit, outside = next(iter(fits.values())), beyond(main.indices, main.n_cols)
            if outside.any():
                at, column = find_entry(main, int(np.argmax(outside)))
                raise SourceError(
                    f"{fit.key} names column {column:,} of {main.n_cols:,} in cell {row + at}; fix the file."
                )
            canonicalize(main, fit.key, row, sum_duplicates=False)
            ends = main.indptr
            # Where rows with entries begin: hints by which the packed codec cuts its blocks.
            begins = ends[:-1][ends[1:] > ends[:-1]]
            columns.append(main.indices.astype(np.uint32), begins)
        if content is not None:
            update_hash(content, layers[record.layers[0]], record.zarr_group, row, complete=columns is None)
        for layer, block in layers.items():
            path, values = paths[layer], block.layers["values"]
            fits[path].observe(block, row)
            fits[path].judge()
            writer = writers.made.get(path) or writers.start(path, dtype(path), values.shape[1:])
            if not is_exact(writer.dtype, dtype(path)):
                # Of floats: integers hold whole numbers that the dtype of the file does not.
                raise OtherFormatError({path: fits[path].dtype})
            writer.promote(dtype(path))
            writer.append(np.ascontiguousarray(values, dtype=dtype(path)), begins)
    for path in paths.values():
        if path not in writers.made:
            writers.start(path, dtype(path), readers[path].spec.row_shape)
    return fits, "" if content is None else content.hexdigest()


def _copy_others(catalog: Catalog, record: DatasetRecord, writers: _Writers) -> None:
    """Write what else of the dataset is linked, as it is."""
    specs, limits = read_specs(record), index_limits(record)
    for path in sorted(read_links(record).keys() - {INDICES, *layer_paths(record).values()}):
        # The copy of a layer has its dtype, which holds all values.
        spec, rows = specs[path], path.replace("csc/layers/", "csr/layers/")
        dtype = writers.made[rows].dtype.name if rows in writers.made else specs.get(rows, spec).dtype
        kind: DTypeLike = np.uint32 if path in limits else np.uint8 if dtype == "bool" else dtype
        writer = writers.start(path, kind, spec.row_shape)
        for values in iterate_slices(open_array(catalog, record, spec)):
            if path in limits and beyond(values, limits[path]).any():
                raise SourceError(
                    f"{path} of {record.zarr_group} names columns or rows that the matrix does not have; fix the file."
                )
            writer.append(values.astype(kind, copy=False))


def _commit(catalog: Catalog, first: DatasetRecord, copy: _DatasetCopy) -> bool:
    """Put the arrays into the records of a dataset; return whether it was linked until now."""
    now: list[DatasetRecord] = []
    changed = False

    def change(old: list[DatasetRecord]) -> list[DatasetRecord]:
        nonlocal changed
        now[:] = old
        if _links(old) != copy.links:
            return []
        # Before the commit, whose response may be lost: the next attempt then finds that it was done.
        changed = True
        refuse_duplicate(catalog, old[0], copy.content_hash)
        fresh = []
        for record in old:
            own, facts = copy.groups.get(record.zarr_group), record.file_facts.model_copy(update={"linked": None})
            update: dict[str, Any] = {"content_hash": copy.content_hash, "facts": facts.to_json()}
            fresh.append((record if own is None else own.add_to(record)).model_copy(update=update))
        return fresh

    try:
        change_records(catalog, first.uid, "materialize()", change)
        if not now or _links(now) not in (copy.links, {}):
            raise ConflictError(
                f"The dataset {first.name!r} of {catalog.location.uri} was {'changed' if now else 'dropped'} while materialize() copied it; "
                "call it again."
            )
    except (ConflictError, DuplicateError):
        copy.discard(catalog)
        raise
    return changed

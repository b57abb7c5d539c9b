"""Deletion of cells: a record first, then the cells of all datasets in one commit; and which rows of a dataset are left."""

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.assets import (
    group_by_dataset,
    is_this_process,
    process_alive,
    read_records,
    source_facts,
    this_process,
)
from raggedatlas.catalog.catalog import CELLS, DATASETS, DELETIONS_KEY, Catalog
from raggedatlas.catalog.cells import in_datasets, read_frame, write_frame
from raggedatlas.catalog.versions import list_versions
from raggedatlas.errors import AtlasError, ConflictError, CorruptError, NotFoundError, QueryError
from raggedatlas.model.assets import DeletedCells, DeletionRecord, result_columns
from raggedatlas.model.ids import UidIndex, new_uid
from raggedatlas.model.records import DatasetRecord
from raggedatlas.model.spaces import PointerKind, pointer_columns
from raggedatlas.model.validation import Problem
from raggedatlas.store.sql import in_list
from raggedatlas.store.tables import ROW_ADDRESS, ROW_ID, walk

if TYPE_CHECKING:
    from raggedatlas.model.reports import MaintenanceReport


@dataclass(frozen=True)
class _Plan:
    """The cells to delete at a version of the table of cells."""

    rows: dict[str, pa.Table]  # dataset uid -> ``row`` and ``uid`` of its cells to delete
    addresses: pa.Array  # where they are in the table
    # dataset uid -> group or result -> how many of them, and how many entries of theirs, it has
    counts: dict[str, dict[str, tuple[int, int]]]
    notes: list[str]  # how many these are of how many, by dataset


def delete_cells(
    catalog: Catalog, uids: pa.Array, where: str, *, given: bool = False, dry_run: bool = False
) -> "MaintenanceReport":
    """Delete cells from the tip; snapshots that have them keep them.

    The record of what is deleted is written first: condition, number of cells of each dataset, and the hash of a file
    of each with their rows. Then the cells of all datasets go in one commit. A process that dies in between has deleted
    nothing: a record whose cells are there has no effect, and `repair` and the next deletion remove it.

    `where` says how the cells were chosen. With `given`, the caller named the uids, so that each must be that of a
    cell; those that a condition chose may be gone meanwhile.
    """
    catalog = catalog.session("delete_cells()")
    deletion = DeletionRecord(uid=new_uid(), where=where, owner=this_process())

    def delete() -> _Plan:
        plans: list[_Plan] = []
        if dry_run:
            return _plan(catalog, _at(catalog, catalog.tables.version(CELLS)), uids, given=given)
        try:
            catalog.tables.retry(CELLS, partial(_attempt, catalog, deletion, uids, plans, given=given))
            # A purge that began after the record was written: nothing was deleted.
            if not plans:
                catalog.refuse_unfinished_purge("delete_cells()")
        except AtlasError:
            # Nothing is lost without this: the record has no effect.
            with suppress(AtlasError):
                remove_dead_deletions(catalog)
            raise
        return plans[-1]

    steps: list[Callable[[], Any]] = [delete, partial(_newest_snapshot, catalog)]
    plan, (number, there) = catalog.location.side_by_side(steps)
    counts, notes = {uid: rows.num_rows for uid, rows in plan.rows.items()}, [*plan.notes]
    if not counts:
        notes.append("no cell matches; nothing was written")
    elif there.issuperset(counts):
        notes.append(f"snapshots keep them; restore({number}) brings the newest one back")
    else:
        notes.append(
            "no snapshot has all of them, so restore() cannot bring them all back; take one first if you may need them"
        )
    if counts:
        notes.append("their rows stay in the arrays until the dataset is dropped, or purged, and gc() has run")
    from raggedatlas.model.reports import MaintenanceReport

    return MaintenanceReport(n_cells=sum(counts.values()), dry_run=dry_run, notes=tuple(notes), datasets=counts)


def _newest_snapshot(catalog: Catalog) -> tuple[int, set[str]]:
    """Return the number of the newest snapshot and the datasets that it has, from which cells can come back."""
    snapshots = list_versions(catalog)
    if not snapshots:
        return 0, set()
    same = snapshots[-1].table_versions[DATASETS] == catalog.tables.version(DATASETS)
    return snapshots[-1].version, {r.uid for r in read_records(catalog if same else catalog.at(snapshots[-1]))}


def _attempt(catalog: Catalog, deletion: DeletionRecord, uids: pa.Array, plans: list[_Plan], *, given: bool) -> None:
    """Plan at the newest version and delete; a commit in between that matters is a `ConflictError`."""
    version = catalog.tables.version(CELLS)
    at = _at(catalog, version)
    kept = at.deletions()
    if deletion.uid in {record.uid for record in kept}:
        return  # The commit of the last attempt was done, although its response was lost.
    refuse_running_deletion(at, "delete_cells()", own=deletion.uid)
    plans[:] = [_plan(catalog, at, uids, given=given)]
    rows = plans[0].rows
    if not rows:
        return
    datasets = {
        uid: DeletedCells(
            n_cells=own.num_rows,
            witness=own.column("uid")[0].as_py(),
            rows=write_frame(catalog, uid, deletion.frame, own),
            counts=plans[0].counts[uid],
        )
        for uid, own in rows.items()
    }
    # Records of datasets that were dropped since are left out.
    visible = {record.uid for record in read_records(catalog)}
    records = [record.of(visible) for record in kept] + [deletion.model_copy(update={"datasets": datasets})]
    if not catalog.tables.update_metadata_if(CELLS, {DELETIONS_KEY: _to_json(records)}, version):
        raise ConflictError(f"{CELLS} of {catalog.location.uri} changed")
    # A purge leaves its mark before it looks for running deletions, which leave their record before they look for the mark.
    if catalog.tables.unfinished_purge() is not None:
        plans.clear()
        remove_dead_deletions(catalog)
        return
    catalog.tables.delete_at(CELLS, plans[0].addresses, version)


def _at(catalog: Catalog, version: int) -> Catalog:
    """Return the atlas with the table of cells at one version, and no other table."""
    return catalog.with_tables(catalog.tables.at({CELLS: version}))


def _to_json(records: Iterable[DeletionRecord]) -> str:
    return json.dumps([record.model_dump(mode="json", exclude_defaults=True) for record in records if record.datasets])


def _plan(catalog: Catalog, at: Catalog, uids: pa.Array, *, given: bool) -> _Plan:
    """Find the datasets and rows of cells; refuse given cells that are not there, and datasets that would be left empty."""
    known = {uid: records[0] for uid, records in group_by_dataset(read_records(catalog)).items()}
    uids = pc.unique(uids)
    index, found, touched = UidIndex(uids), np.zeros(len(uids), bool), dict[str, None]()
    for batch in at.tables.batches(CELLS, ["uid", "dataset_uid"]):
        owners = batch.column("dataset_uid")
        places = np.where(in_datasets(batch, known), index.find(batch.column("uid")), -1)
        found[places[places >= 0]] = True
        touched |= dict.fromkeys(owners.filter(pa.array(places >= 0)).unique().to_pylist())
    missing = uids.filter(pa.array(~found))
    if len(missing) and given:
        # Uids of cells that were deleted before are no error.
        before = [rows.column("uid") for record in known.values() for rows in _deleted_rows(at, record)]
        deleted = pa.chunked_array([chunk for column in before for chunk in column.chunks], pa.string())
        foreign = missing.filter(pc.invert(pc.is_in(missing, value_set=deleted.combine_chunks())))
        if len(foreign):
            raise NotFoundError(
                f"{len(foreign):,} of the uids are of no cell of {catalog.location.uri}, e.g. {foreign.to_pylist()[:3]}; nothing was deleted. "
                "Cells are named by the column uid, which is the index of every query's result."
            )
    rows, sizes = {}, {}
    counts: dict[str, dict[str, tuple[int, int]]] = {uid: {} for uid in known if uid in touched}
    each, addresses = _read_cells(at, index, counts)
    for uid, own in each.items():
        chosen = pa.array(index.find(own) >= 0)
        left = _rows_left(at, known[uid])
        if len(left) != len(own):
            raise CorruptError(
                f"Dataset {known[uid].name!r} has {len(own):,} cells in {catalog.location.uri}, {len(left):,} are recorded; run validate('rows')."
            )
        # Cells are in the order of the file, less those that were deleted before.
        rows[uid] = pa.table({"row": pa.array(left).filter(chosen), "uid": own.filter(chosen)})
        sizes[uid] = len(own)
    emptied = [uid for uid in rows if rows[uid].num_rows == sizes[uid]]
    if emptied:
        more = f", and all of {len(emptied) - 1:,} more" if len(emptied) > 1 else ""
        raise QueryError(
            f"All {sizes[emptied[0]]:,} cells of the dataset {known[emptied[0]].name!r} would be deleted{more}; nothing was. Take "
            f"it out with drop_dataset({emptied[0]!r}), and delete the cells of the others then."
        )
    notes = [f"{known[uid].name}: {own.num_rows:,} of {sizes[uid]:,} cells" for uid, own in rows.items()]
    linked = {known[uid].name: facts.address for uid in rows if (facts := source_facts(known[uid])) is not None}
    notes += [
        f"{name}: their values stay in {address}, which the atlas does not own" for name, address in linked.items()
    ]
    return _Plan(
        rows,
        addresses,
        counts,
        [*notes, *([f"{len(missing):,} of the cells were deleted before"] if len(missing) else [])],
    )


def _read_cells(
    at: Catalog, index: UidIndex, counts: dict[str, dict[str, tuple[int, int]]]
) -> tuple[dict[str, pa.Array], pa.Array]:
    """Read the cells of the datasets that `counts` names, and fill it.

    Of the chosen cells, it gets how many have a row or a vector in something, and how many entries. Returns the uids of
    all cells by dataset uid, in table order, and the addresses of the chosen ones.
    """
    datasets = [*counts]
    if not datasets:
        return {}, pa.array([], pa.uint64())
    schema = at.tables.schema(CELLS)
    pointers = {name: kind for name, (_, kind) in pointer_columns(schema).items()}
    # By the marks of the columns: a result that is being added has no record yet.
    vectors = {name: uid for name, (uid, _) in result_columns(schema).items() if name not in pointers}
    parts = [part for name, kind in pointers.items() for part in _parts(name, kind)]
    read, addresses = [], []
    columns, where = ["uid", "dataset_uid", *parts, *vectors], in_list("dataset_uid", datasets)
    for batch in walk(at.tables, CELLS, columns, where, use_index=False, addresses=True):
        read.append(batch.select(["uid", "dataset_uid", ROW_ID]))
        cells = batch.filter(pa.array(index.find(batch.column("uid")) >= 0))
        addresses.append(cells.column(ROW_ADDRESS))
        groups = {name: cells.column(f"{name}.zarr_group") for name in pointers}
        groups |= {
            name: pc.if_else(pc.is_valid(cells.column(name)), uid, pa.scalar(None, pa.string()))
            for name, uid in vectors.items()
        }
        for name, keys in groups.items():
            sparse = pointers.get(name) is PointerKind.SPARSE
            n = pc.subtract(*(cells.column(part) for part in _parts(name, PointerKind.SPARSE)[:0:-1])) if sparse else 0
            table = pa.table({"of": cells.column("dataset_uid"), "key": keys}).append_column(
                "n", n if sparse else pa.array(np.zeros(cells.num_rows, np.int64))
            )
            sums = table.filter(pc.is_valid(table.column("key"))).group_by(["of", "key"])
            for row in sums.aggregate([("n", "count"), ("n", "sum")]).to_pylist():
                cells_before, entries_before = counts[row["of"]].get(row["key"], (0, 0))
                counts[row["of"]][row["key"]] = (cells_before + row["n_count"], entries_before + row["n_sum"])
    every = pa.Table.from_batches(read)
    code = pc.index_in(every.column("dataset_uid"), value_set=pa.array(datasets)).to_numpy()
    order = np.lexsort((every.column(ROW_ID).to_numpy(), code))
    uids = every.column("uid").combine_chunks().take(pa.array(order))
    sizes = np.bincount(code, minlength=len(datasets))
    starts = np.cumsum(sizes) - sizes
    found = {uid: uids.slice(start, n) for uid, start, n in zip(datasets, starts.tolist(), sizes.tolist(), strict=True)}
    return found, pa.concat_arrays(addresses)


def _parts(name: str, kind: PointerKind) -> list[str]:
    """Return the parts of a pointer that are counted: the group, and of sparse ones where the entries begin and end."""
    return [f"{name}.{part}" for part in (("zarr_group", "start", "end")[: 3 if kind is PointerKind.SPARSE else 1])]


def remove_dead_deletions(catalog: Catalog) -> list[str]:
    """Remove the records of deletions that died before a cell was deleted; return what was removed, in words."""
    notes: list[str] = []

    def attempt() -> None:
        version = catalog.tables.version(CELLS)
        at = _at(catalog, version)
        gone = {record.uid for record in at.deletions()}
        dead = {r.uid: r for r in at.recorded_deletions() if r.uid not in gone and not _is_running(catalog, r)}
        notes[:] = [
            f"a deletion of {r.n_cells:,} cells ({r.where}) had died before it deleted any" for r in dead.values()
        ]
        kept = [record for record in at.recorded_deletions() if record.uid not in dead]
        # Now that their processes are known to have ended: one may have deleted its cells meanwhile, and Lance would let both commits pass.
        catalog.tables.refresh([CELLS] if dead else [])
        if dead and not (
            catalog.tables.version(CELLS) == version
            and catalog.tables.update_metadata_if(CELLS, {DELETIONS_KEY: _to_json(kept)}, version)
        ):
            raise ConflictError(f"{CELLS} of {catalog.location.uri} changed")

    catalog.tables.retry(CELLS, attempt)
    return notes


def refuse_running_deletion(catalog: Catalog, action: str, own: str = "") -> None:
    """Raise if a process is deleting cells by another record than `own`, which an action would take away."""
    gone = {record.uid for record in catalog.deletions()}
    for record in catalog.recorded_deletions():
        if record.uid not in {*gone, own} and _is_running(catalog, record):
            raise ConflictError(
                f"{action} is refused while process {record.owner.get('pid')} of {record.owner.get('host')} deletes cells of "
                f"{catalog.location.uri}; wait for it. If it died, run repair()."
            )


def _is_running(catalog: Catalog, record: DeletionRecord) -> bool:
    """Return whether the process that wrote a record may still delete its cells."""
    if is_this_process(record.owner):
        # A thread that comes here has ended its own deletion.
        return bool(record.owner.get("thread") != threading.get_ident())
    return process_alive(record.owner, catalog.tables.location.child(f"{CELLS}.lance"))


def rows_left(catalog: Catalog, record: DatasetRecord) -> NDArray[np.int64] | None:
    """Return the rows of a dataset's cells that were not deleted, ascending; None if none was."""
    if not any(record.uid in deletion.datasets for deletion in catalog.deletions()):
        return None
    return _rows_left(catalog, record)


def _rows_left(catalog: Catalog, record: DatasetRecord) -> NDArray[np.int64]:
    left = np.ones(record.n_cells_added, bool)
    for rows in _deleted_rows(catalog, record):
        numbers = rows.column("row").to_numpy()
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(left):
            raise CorruptError(
                f"Deleted rows of dataset {record.uid} are beyond its {len(left):,} cells; run validate('deep')."
            )
        left[numbers] = False
    return np.flatnonzero(left)


def _deleted_rows(catalog: Catalog, record: DatasetRecord) -> list[pa.Table]:
    """Return ``row`` and ``uid`` of the deleted cells of a dataset, for each deletion."""
    tables = []
    for deletion in catalog.deletions():
        cells = deletion.datasets.get(record.uid)
        if cells is not None:
            rows = read_frame(catalog, record, deletion.frame, cells.rows)
            if rows.column_names != ["row", "uid"] or rows.num_rows != cells.n_cells or rows.column("row").null_count:
                raise CorruptError(
                    f"The frame {deletion.frame} of dataset {record.uid} does not list the {cells.n_cells:,} cells that were deleted; restore it from a copy."
                )
            tables.append(rows)
    return tables


def describe_deleted(catalog: Catalog, uids: pa.Array) -> str:
    """Say how many uids are of cells that were deleted, when and by what; return an empty text where there is none."""
    records = {uid: records[0] for uid, records in group_by_dataset(read_records(catalog)).items()}
    uids, parts = uids.drop_null(), []
    for deletion in catalog.deletions():
        frames = [
            read_frame(catalog, records[uid], deletion.frame, cells.rows)
            for uid, cells in deletion.datasets.items()
            if uid in records
        ]
        n = sum(pc.sum(pc.is_in(rows.column("uid"), value_set=uids)).as_py() or 0 for rows in frames)
        if n:
            parts.append(f"{n:,} of them were deleted at {deletion.created_at[:19]} ({deletion.where})")
    return "; ".join(parts)


def check_unfinished(catalog: Catalog) -> list[Problem]:
    """Note deletions whose cells are still there, under the rule ``unfinished-deletion``."""
    gone = {record.uid for record in catalog.deletions()}
    return [
        Problem("unfinished-deletion", "practice", CELLS, f"a deletion of {r.n_cells:,} cells ({r.where}) is under way, or died before it deleted any",
                "If it died, run repair(), or the deletion again.")
        for r in catalog.recorded_deletions() if r.uid not in gone
    ]  # fmt: skip


def check_deleted_rows(catalog: Catalog, records: Sequence[DatasetRecord]) -> list[Problem]:
    """Read the lists of deleted rows of a dataset, and compare them with the records of the deletions (rule ``deleted-rows``)."""
    record = records[0]
    try:
        left = rows_left(catalog, record)
    except AtlasError as error:
        return [Problem("deleted-rows", "must", record.uid, str(error), "Restore the file from a copy.")]
    n_cells = record.n_cells_added - catalog.n_deleted().get(record.uid, 0)
    if left is None or len(left) == n_cells:
        return []
    text = f"the lists of deleted rows leave {len(left):,} cells, the records {n_cells:,}"
    return [Problem("deleted-rows", "must", record.uid, text, "Restore a snapshot.")]

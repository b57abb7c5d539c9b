"""Checks of geometry: rows of the registry, pointers of the cells, and the files of the stores."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.datasets import read_records
from raggedatlas.catalog.geometries import geometry_columns, is_visible
from raggedatlas.errors import AtlasError
from raggedatlas.model.assets import GeometryRecord
from raggedatlas.model.pointers import AXES, pointer_columns
from raggedatlas.model.reports import AtlasProblem
from raggedatlas.store.location import Location, digest_files
from raggedatlas.store.sql import equals

_AGAIN = "Drop it with drop_geometry({name!r}) and add it again, or restore() a snapshot."


def _problem(record: GeometryRecord, rule: str, text: str) -> AtlasProblem:
    return AtlasProblem(rule, f"{record.name} {record.zarr_group}", text, _AGAIN.format(name=record.name))


def check_geometries(catalog: Catalog, records: Sequence[GeometryRecord]) -> list[AtlasProblem]:
    """Check that a dataset has one store of a name, and that every store has its column and its feature space; reads no pointer.

    Returns
    -------
    list of AtlasProblem
        Rules ``duplicate-geometry``, ``geometry-column``, ``unknown-space``, ``group-name``.
    """
    schema, spaces = catalog.tables.schema(CELLS), catalog.spaces()
    pointers, columns = pointer_columns(schema), set(geometry_columns(schema))
    problems = []
    for (name, uid), n in Counter((r.name, uid) for r in records for uid in r.cells_of).items():
        if n > 1:
            text = f"{n} stores called {name!r} have shapes of the dataset {uid}"
            problems.append(AtlasProblem("duplicate-geometry", name, text, "Run restore() of a snapshot."))
    for record in records:
        if record.column not in columns or pointers[record.column][0] != record.space:
            text = f"the cells have no column {record.column!r} of pointers into {record.space!r}"
            problems.append(_problem(record, "geometry-column", text))
        if record.space not in spaces:
            problems.append(_problem(record, "unknown-space", f"its feature space {record.space!r} is unknown"))
        if record.zarr_group != f"{record.uid}/{record.space}":
            problems.append(_problem(record, "group-name", f"the group is not {record.uid}/{record.space}"))
    return problems


def check_shapes(catalog: Catalog, records: Sequence[GeometryRecord]) -> list[AtlasProblem]:
    """Check every visible store's root, and the pointers of the cells to it.

    Pointers to a store that nobody names are no problem: nobody follows them, and `repair` removes them.

    Returns
    -------
    list of AtlasProblem
        Rules ``missing-store``, ``geometry-count``, ``geometry-box``, ``geometry-object``.
    """
    known = {record.uid for record in read_records(catalog)}
    schema = catalog.tables.schema(CELLS)
    problems = []
    for record in records:
        if not is_visible(record, known) or record.column not in schema.names:
            continue
        try:
            catalog.arrays.child(*record.zarr_group.split("/")).read_bytes("zarr.json")
        except AtlasError as error:
            problems.append(_problem(record, "missing-store", f"its root cannot be read: {error}"))
        where = equals(f"{record.column}.zarr_group", record.zarr_group)
        rows = catalog.tables.read(CELLS, ["dataset_uid", record.column], where)
        rows = rows.filter(pc.is_in(rows.column("dataset_uid"), value_set=pa.array(sorted(known), pa.string())))
        problems += _check_pointers(record, rows, known)
    return problems


def _check_pointers(record: GeometryRecord, rows: pa.Table, known: set[str]) -> list[AtlasProblem]:
    problems = []
    counts = {e["values"]: e["counts"] for e in pc.value_counts(rows.column("dataset_uid")).to_pylist()}
    wanted = {uid: n for uid, n in record.cells_of.items() if uid in known}
    if counts != {uid: n for uid, n in wanted.items() if n}:
        text = f"{sum(counts.values()):,} cells point to it, {sum(wanted.values()):,} were given a pointer"
        problems.append(_problem(record, "geometry-count", text))
    pointers = rows.column(1).combine_chunks()
    ids = pc.struct_field(pointers, "object_id")
    n_twice = len(ids) - pc.count_distinct(ids, mode="all").as_py()
    level = pc.fill_null(pc.struct_field(pointers, "level"), -1).to_numpy()
    bad = ids.null_count + int(np.count_nonzero((level < 0) | (level >= record.n_levels)))
    if n_twice or bad:
        text = f"{n_twice:,} cells share an object with another cell, {bad:,} name none or a level that is not there"
        problems.append(_problem(record, "geometry-object", text))
    wrong = 0
    for axis in AXES:
        least, greatest = (
            pc.struct_field(pointers, f"{axis}_{end}").to_numpy(zero_copy_only=False) for end in ("min", "max")
        )
        there = ~(np.isnan(least) & np.isnan(greatest))
        wrong += int(np.count_nonzero(there & ~((least <= greatest) & np.isfinite(least) & np.isfinite(greatest))))
    if wrong:
        problems.append(_problem(record, "geometry-box", f"{wrong:,} boxes are not finite, or end before they begin"))
    return problems


def check_store(arrays: Location, record: GeometryRecord) -> list[AtlasProblem]:
    """Read every byte of a visible store (rule ``store-files``)."""
    try:
        n_files, n_bytes, digest = digest_files(arrays.child(*record.zarr_group.split("/")))
    except AtlasError as error:
        return [_problem(record, "store-files", f"it cannot be read: {error}")]
    if digest == record.digest:
        return []
    text = f"its {n_files:,} files of {n_bytes:,} bytes are not the {record.n_files:,} of {record.n_bytes:,} that were written"
    return [_problem(record, "store-files", text)]

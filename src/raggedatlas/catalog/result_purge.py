"""A dataset out of the results of models too: its rows of their arrays, down to the bytes."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import CELLS, RESULTS, Catalog
from raggedatlas.catalog.datasets import read_specs
from raggedatlas.catalog.results import read_results
from raggedatlas.catalog.versions import list_versions
from raggedatlas.errors import ConflictError
from raggedatlas.model.assets import ResultRecord, results_to_table
from raggedatlas.store.arrays import ArrayWriter
from raggedatlas.store.read import ArrayReader, read_slice
from raggedatlas.store.sql import all_of, equals, is_not_null
from raggedatlas.store.tables import Tables

_LAYERS = "layers"
_BLOCK_BYTES = 2**24


@dataclass(frozen=True)
class PurgedArrays:
    """Arrays of results without the rows of a dataset.

    Parameters
    ----------
    uid : str
        The dataset.
    arrays : mapping of str to (str, str)
        Result uid -> its array descriptions and checksums.
    """

    uid: str
    arrays: Mapping[str, tuple[str, str]]

    def apply(self, record: ResultRecord) -> ResultRecord:
        """Give a record as it is without the dataset."""
        cells = record.cells_of
        if self.uid not in cells:
            return record
        n = cells.pop(self.uid)
        changed = {"datasets": json.dumps(cells, sort_keys=True), "n_cells": record.n_cells - n}
        if record.uid in self.arrays:
            changed |= dict(zip(("arrays", "checksums"), self.arrays[record.uid], strict=True))
        return record.model_copy(update=changed)


def purge_arrays(catalog: Catalog, uid: str, tips: Mapping[str, int]) -> PurgedArrays:
    """Write the array of every result that has rows of a dataset anew, with zeros in their place; the old ones stay for now.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    uid : str
        The dataset.
    tips : mapping of str to int
        The versions of the tables that are the true tip.
    """
    found: dict[str, ResultRecord] = {}
    rows: dict[str, set[int]] = {}
    for tables, record in _everywhere(catalog, tips):
        if record.zarr_group and uid in record.cells_of:
            found[record.uid] = record
            # where the dataset was dropped and the result stayed, another version knows its rows
            where = all_of(equals("dataset_uid", uid), is_not_null(record.column))
            own = tables.read(CELLS, [f"{record.column}.position"], where)
            rows.setdefault(record.uid, set()).update(own.column(0).to_pylist())
    made = {
        one: _clean_array(catalog, record, np.array(sorted(rows[one]), np.int64), uid) for one, record in found.items()
    }
    return PurgedArrays(uid, made)


def rewrite_results(catalog: Catalog, cleaned: PurgedArrays, version: int) -> int:
    """Make a registry like that of a version, without the dataset, the newest; return its version."""
    records = read_results(_with(catalog, {RESULTS: version}))
    at = catalog.tables.version(RESULTS)
    if not catalog.tables.overwrite_if(RESULTS, results_to_table([cleaned.apply(r) for r in records]), at):
        raise ConflictError(
            f"Somebody wrote to {catalog.location.uri} during a purge, which needs it alone; run repair() to finish it."
        )
    return at + 1


def remove_old_arrays(catalog: Catalog) -> int:
    """Remove the arrays of results that no registry names any more; return the bytes freed."""
    named: dict[str, set[str]] = {}
    for _, record in _everywhere(catalog, {}):
        if record.zarr_group:
            named.setdefault(record.zarr_group, set()).update(record.array_specs)
    freed = 0
    for group, paths in named.items():
        place = catalog.arrays.child(*group.split("/"), _LAYERS)
        for name in place.list_children():
            if name != "zarr.json" and f"{_LAYERS}/{name}" not in paths:
                freed += place.child(name).delete_prefix()
    return freed


def every_result(catalog: Catalog) -> list[ResultRecord]:
    """Give the results of the tip and of all snapshots, each once."""
    return list({record.uid: record for _, record in _everywhere(catalog, {})}.values())


def _everywhere(catalog: Catalog, tips: Mapping[str, int]) -> Iterator[tuple[Tables, ResultRecord]]:
    """Walk over the results of all snapshots and of the tip, with the tables that belong to them."""
    views = [_with(catalog, record.table_versions) for record in list_versions(catalog)]
    own = {name: catalog.tables.version(name) for name in (CELLS, RESULTS) if catalog.tables.has(name)}
    views.append(_with(catalog, {**own, **tips}))
    for view in views:
        for result in read_results(view):
            yield view.tables, result


def _with(catalog: Catalog, versions: Mapping[str, int]) -> Catalog:
    return Catalog(catalog.location, Tables(catalog.tables.location, dict(versions)), catalog.arrays)


def _clean_array(catalog: Catalog, record: ResultRecord, rows: NDArray[np.int64], uid: str) -> tuple[str, str]:
    ((_, spec),) = read_specs(record.as_group()).items()
    path = f"{_LAYERS}/without_{uid}"
    reader = ArrayReader(catalog.arrays, spec)
    writer = ArrayWriter(
        catalog.arrays, f"{record.zarr_group}/{path}", np.dtype(spec.dtype), spec.row_shape, profile=catalog.codec()
    )
    gone = np.zeros(spec.n_rows, bool)
    gone[rows] = True
    step = max(1, _BLOCK_BYTES // max(1, int(np.prod(spec.row_shape)) * np.dtype(spec.dtype).itemsize))
    for start in range(0, spec.n_rows, step):
        block = read_slice(reader, start, min(start + step, spec.n_rows))
        block[gone[start : start + step]] = 0
        writer.append(block)
    specs = json.dumps({path: json.loads(writer.close().to_json())}, sort_keys=True)
    return specs, json.dumps({path: writer.checksum})

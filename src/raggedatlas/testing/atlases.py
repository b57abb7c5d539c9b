"""Write small datasets into an atlas step by step, without the ingest: for tests of what stands below it."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.cells import CellColumn, add_cell_columns, cell_rows, stored_type
from raggedatlas.catalog.datasets import Commit, commit_records
from raggedatlas.catalog.feature_registration import register_features
from raggedatlas.catalog.features import read_registry
from raggedatlas.catalog.layouts import ensure_layouts
from raggedatlas.catalog.leases import release_lease, take_lease
from raggedatlas.model.frames import ColumnFacts
from raggedatlas.model.ids import feature_uids, new_uid, new_uids
from raggedatlas.model.pointers import PointerKind, SparseZarrPointer, pointer_field
from raggedatlas.model.records import DatasetRecord
from raggedatlas.store.arrays import ArrayWriter, create_group

SPACE = "gene_expression"
Step = Literal["lease", "arrays", "features", "layout", "columns", "cells", "record"]


def write_dataset(
    catalog: Catalog,
    name: str,
    genes: Sequence[str],
    counts: NDArray[Any],
    columns: Mapping[str, Sequence[Any]] | None = None,
    *,
    last: Step = "record",
) -> str:
    """Add a small dataset in the order of the write protocol, and stop after any of its steps.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    name : str
        Of the dataset.
    genes : sequence of str
        Gene names, one per column.
    counts : (n_cells, n_genes) unsigned integers
        Values.
    columns : mapping of str to sequence, or None
        Metadata columns.
    last : str
        The last step to take; what comes after it is left undone, as if the process had died.

    Returns
    -------
    str
        The dataset's uid.

    Examples
    --------
    >>> import tempfile
    >>> from raggedatlas.catalog.catalog import create_catalog
    >>> from raggedatlas.store.location import Location
    >>> catalog = create_catalog(Location(tempfile.mkdtemp()))
    >>> len(write_dataset(catalog, "pbmc", ["CD3E", "MS4A1"], np.eye(2, dtype="u1")))
    16
    """
    uid = new_uid()
    uids = feature_uids(SPACE, genes, "human")
    record, indptr = None, np.zeros(1, np.int64)
    for step in ("lease", "arrays", "features", "layout", "columns", "cells", "record"):
        if step == "lease":
            take_lease(catalog, uid)
        elif step == "arrays":
            record, indptr = _write_arrays(catalog, uid, name, counts)
        elif step == "features":
            catalog.add_space(catalog.space(SPACE))
            register_features(
                catalog,
                SPACE,
                pa.table(
                    {"uid": uids, "feature_id": list(genes), "symbol": list(genes), "organism": ["human"] * len(genes)}
                ),
            )
        elif step == "layout":
            registry = read_registry(catalog, SPACE)
            index = registry.global_index[[registry.row_of[u] for u in uids]]
            (layout,) = ensure_layouts(catalog, [(uids, index)])
        elif step == "columns":
            _widen(catalog, columns or {})
        elif step == "cells":
            _append_cells(catalog, uid, indptr, columns or {})
        elif record is not None:
            commit_records(catalog, _adding(record.model_copy(update={"layout_uid": layout})))
            release_lease(catalog, uid)
        if step == last:
            break
    return uid


def _adding(record: DatasetRecord) -> Callable[[list[DatasetRecord]], Commit]:
    """Add a record whatever there is."""
    return lambda _old: Commit((record,))


def _write_arrays(
    catalog: Catalog, uid: str, name: str, counts: NDArray[Any]
) -> tuple[DatasetRecord, NDArray[np.int64]]:
    group = f"{uid}/{SPACE}"
    rows, indices = np.nonzero(counts)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(counts)))]).astype(np.int64)
    parts: dict[str, NDArray[Any]] = {
        "csr/indices": indices.astype(np.uint32),
        "csr/indptr": indptr,
        "csr/layers/counts": counts[rows, indices],
    }
    create_group(catalog.arrays, f"{group}/csr/layers")
    specs, checksums = {}, {}
    for path, values in parts.items():
        writer = ArrayWriter(catalog.arrays, f"{group}/{path}", values.dtype, profile=catalog.codec())
        writer.append(values)
        specs[path] = json.loads(writer.close().to_json())
        checksums[path] = writer.checksum
    record = DatasetRecord(
        uid=uid,
        zarr_group=group,
        feature_space=SPACE,
        n_cells=len(counts),
        pointer=SPACE,
        name=name,
        content_hash=uid,
        n_features=counts.shape[1],
        n_entries=len(indices),
        layers=["counts"],
        arrays=json.dumps(specs),
        checksums=json.dumps(checksums),
    )
    return record, indptr


def _columns(columns: Mapping[str, Sequence[Any]]) -> list[CellColumn]:
    kinds = {name: pa.array(values) for name, values in columns.items()}
    return [CellColumn(name, stored_type(a.type), ColumnFacts(name, "")) for name, a in kinds.items()]


def _widen(catalog: Catalog, columns: Mapping[str, Sequence[Any]]) -> None:
    add_cell_columns(catalog, _columns(columns), [pointer_field(SPACE, PointerKind.SPARSE, SPACE)])


def _append_cells(catalog: Catalog, uid: str, indptr: NDArray[np.int64], columns: Mapping[str, Sequence[Any]]) -> None:
    n = len(indptr) - 1
    parts = [pa.array([f"{uid}/{SPACE}"] * n), pa.array(indptr[:-1]), pa.array(indptr[1:]), pa.array(np.arange(n))]
    values: dict[str, Any] = {
        "uid": new_uids(n),
        "dataset_uid": pa.array([uid] * n, pa.string()),
        "cell_name": pa.array([f"cell-{i}" for i in range(n)], pa.string()),
        SPACE: pa.StructArray.from_arrays(parts, fields=list(SparseZarrPointer.arrow_type)),
    }
    for column in _columns(columns):
        values[column.stored] = pa.array(columns[column.stored]).cast(column.type)
    catalog.tables.append(CELLS, cell_rows(catalog.tables.schema(CELLS), values, n))

"""Small AnnData objects with the shape of real ones: counts, named genes, a few columns of several kinds."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.catalog.assets import Commit, commit_records, release_lease, take_lease
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.cells import CellColumn, add_cell_columns, cell_rows, stored_type
from raggedatlas.catalog.features import read_registry
from raggedatlas.catalog.layouts import ensure_layouts, register_features
from raggedatlas.catalog.validation import validate
from raggedatlas.catalog.versions import find_version
from raggedatlas.model.frames import ColumnFacts
from raggedatlas.model.ids import feature_uids, new_uid, new_uids
from raggedatlas.model.records import DatasetRecord
from raggedatlas.model.spaces import PointerKind, SparseZarrPointer, pointer_field
from raggedatlas.model.validation import Validation
from raggedatlas.store.arrays import ArrayWriter, create_group

if TYPE_CHECKING:
    import anndata as ad
    import pandas as pd

    from raggedatlas.atlas import RaggedAtlas

GENES = tuple(f"GENE{number}" for number in range(30))
"""Symbols to choose from."""


def verify(catalog: Catalog, version: int | str | None = None, **options: Any) -> Validation:
    """Read all files of an atlas, or of one of its snapshots, as `ReadOnlyAtlas.verify` does."""
    view = catalog if version is None else catalog.at(find_version(catalog, version))
    return validate(view, "files", **options)


def small_anndata(
    seed: int, n_cells: int = 10, genes: Sequence[str] = GENES[:12], extra: str | None = None
) -> "ad.AnnData":
    """Create a small dataset; equal arguments make equal ones, and another seed makes other counts.

    Parameters
    ----------
    seed : int
        Where chance starts.
    n_cells : int
        Rows.
    genes : sequence of str
        Symbols of the columns.
    extra : str or None
        Name of a further float column of `obs`, with missing values.

    Returns
    -------
    anndata.AnnData
        `X` (n_cells, n_genes) CSR float32 of whole counts, about three in ten not zero; `obs` with `cell_type` (category),
        `n_genes` (int64) and `good` (bool), indexed by barcodes.

    Examples
    --------
    >>> small_anndata(0, 3, ["CD3E", "MS4A1"]).shape
    (3, 2)
    """
    import anndata as ad
    import pandas as pd
    from scipy import sparse

    rng = np.random.default_rng([seed, n_cells, len(genes)])
    counts = rng.poisson(0.4, (n_cells, len(genes))).astype(np.float32)
    counts[0, 0] = seed + 1  # no two seeds make the same matrix
    kinds = pd.Categorical(np.array(["B", "NK", "T"])[rng.integers(0, 3, n_cells)], categories=["B", "NK", "T"])
    columns = {
        "cell_type": kinds,
        "n_genes": (counts > 0).sum(axis=1).astype(np.int64),
        "good": rng.random(n_cells) < 0.5,
    }
    obs = pd.DataFrame(columns, index=pd.Index([f"CELL{seed}-{i}" for i in range(n_cells)]))
    if extra is not None:
        obs[extra] = np.where(rng.random(n_cells) < 0.2, np.nan, rng.random(n_cells))
    return ad.AnnData(X=sparse.csr_matrix(counts), obs=obs, var=pd.DataFrame(index=pd.Index(list(genes))))


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
            # First, since `gc` removes arrays that neither a record nor a lease accounts for.
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
            # Only this makes the dataset visible; the record was made with the arrays, before its layout existed.
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
    specs, checksums = {}, dict[str, str]()
    for path, values in parts.items():
        writer = ArrayWriter(catalog.arrays, f"{group}/{path}", values.dtype, profile=catalog.codec())
        writer.append(values)
        specs[path] = json.loads(writer.close().to_json())
        checksums |= writer.checksums(path)
    record = DatasetRecord(
        uid=uid,
        zarr_group=group,
        feature_space=SPACE,
        n_cells=len(counts),
        pointer=SPACE,
        name=name,
        # Unique, so that the checks do not take two datasets of equal counts for copies.
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


@dataclass(frozen=True, repr=False)
class Modelled:
    """An atlas and what a model said of its cells.

    Parameters
    ----------
    folder : Path
        Folder of the atlas (``atlas``) and the results (``z``).
    uids : (n_cells,) object array of str
        All cells, in table order.
    known : (n_known,) int64
        Which of these have a result, in the order of the results.
    values : (n_known, width) float32
        The results.
    """

    folder: Path
    uids: NDArray[Any]
    known: NDArray[np.int64]
    values: NDArray[np.float32]

    def open(self) -> "RaggedAtlas":
        """Open the atlas."""
        from raggedatlas.atlas import RaggedAtlas

        return RaggedAtlas.open(str(self.folder / "atlas"))

    def moved(self, folder: Path) -> "Modelled":
        """Copy everything to a folder that a test may change."""
        import shutil

        shutil.copytree(self.folder, folder)
        return Modelled(folder, self.uids, self.known, self.values)

    def expected(self, values: NDArray[Any] | None = None) -> "pd.DataFrame":
        """Return the results of all cells in table order, NaN where there is none."""
        import pandas as pd

        return pd.DataFrame(self.values if values is None else values, index=self.uids[self.known]).reindex(self.uids)


def write_results(folder: Path, uids: Any, values: Any, **facts: str) -> Path:
    """Write and commit results.

    Parameters
    ----------
    folder : Path
        Result folder.
    uids : sequence of str
        Ids.
    values : array, or mapping of str to array
        Outputs.
    **facts
        What made them: ``model``, ``model_hash``, ``verb``.
    """
    from raggedatlas.wings.results.writer import ResultDatasetWriter

    metadata = {f"result:{name}": text for name, text in facts.items()}
    with ResultDatasetWriter(folder, facts=metadata) as writer:
        writer.original_dataset_config = {"atlas": {"query": "all cells"}}
        writer.write_batch(list(uids), values)
    return folder


def make_modelled(folder: Path, n_cells: tuple[int, int] = (14, 11), width: int = 5) -> Modelled:
    """Create the atlas with one snapshot, and results for four of five of its cells, in an order by chance.

    Examples
    --------
    >>> import tempfile
    >>> made = make_modelled(Path(tempfile.mkdtemp()))
    >>> made.values.shape
    (20, 5)
    """
    from raggedatlas.atlas import RaggedAtlas

    rng = np.random.default_rng(0)
    atlas = RaggedAtlas.create(str(folder / "atlas"))
    for i, n in enumerate(n_cells):
        atlas.add(small_anndata(i, n, GENES[3 * i : 3 * i + 8]), f"data-{i}", organism="human", progress=False)
    uids = atlas.checkout(atlas.snapshot("before")).query().to_pandas().index.to_numpy(dtype=object)
    # Results must be joined by uid: their order is not that of the table, and some are missing.
    known = rng.permutation(len(uids))[: len(uids) * 4 // 5]
    values = rng.normal(size=(len(known), width)).astype(np.float32)
    write_results(
        folder / "z", uids[known], values, model="encoder", model_hash="ab" * 32, verb="infer", parent="runs/y"
    )
    return Modelled(folder, uids, known, values)


CONFIG = 'x = 1\n\n[general]\ndata_dir = "d"\n'


def npy_run(folder: Path, batches: Sequence[tuple[Any, Any]], generation: str = "0.6") -> Path:
    """Write ``.npy`` results.

    Parameters
    ----------
    folder : pathlib.Path
        Where to; made if it is missing.
    batches : sequence of (ids, values)
        Ids, ``(n,)``, and values, ``(n, ...)``, of each.
    generation : str
        ``"0.2"`` has integer ids and neither configuration nor insertion order, ``"0.3"`` adds the configuration, ``"0.6"`` the order.

    Returns
    -------
    pathlib.Path
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dtype = (
        np.dtype(np.int64) if generation in {"0.2", "0.3"} else np.array([i for ids, _ in batches for i in ids]).dtype
    )
    index = []
    for number, (ids, given) in enumerate(batches):
        values = np.asarray(given)
        batch = np.zeros(len(ids), [("id", dtype), ("tensor", values.dtype, values.shape[1:])])
        batch["id"], batch["tensor"] = ids, values
        np.save(folder / f"batch_{number}.npy", batch, allow_pickle=False)
        index += [(each, number) for each in batch["id"]]
    written = np.array(index, [("id", dtype), ("batch_num", np.int64)])
    if generation == "0.6":
        np.save(folder / "batch_index_insertion_order.npy", written)
    # Sorts in place, so the insertion order has to be saved before.
    written.sort(order="id")
    np.save(folder / "batch_index.npy", written)
    if generation != "0.2":
        (folder / "original_dataset_config.toml").write_text(CONFIG)
    (folder / "inference_weights.pth").write_bytes(b"weights")
    return folder

"""One dataset on its own: what was added, given back."""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.datasets import find_dataset, group_by_dataset, read_records
from raggedatlas.catalog.frames import read_frame
from raggedatlas.errors import NotFoundError
from raggedatlas.model.frames import arrow_to_frame
from raggedatlas.model.records import COLUMNS, DatasetRecord
from raggedatlas.store.arrays import ArraySpec
from raggedatlas.store.ranges import ArrayReader, read_slice

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData
    from numpy.typing import NDArray


def list_datasets(catalog: Catalog) -> "pd.DataFrame":
    """List the datasets of an atlas, one row each, in the order of adding.

    Returns
    -------
    pandas.DataFrame
        Indexed by uid: name, n_cells, spaces, layers, n_features, source, created_at.
    """
    import pandas as pd

    rows = []
    for uid, records in group_by_dataset(read_records(catalog)).items():
        spaces = dict.fromkeys(r.feature_space for r in records)
        rows.append(
            {
                "uid": uid,
                "name": records[0].name,
                "n_cells": Dataset(catalog, tuple(records)).n_cells,
                "spaces": ", ".join(spaces),
                "layers": ", ".join(f"{r.feature_space}/{layer}" for r in records for layer in r.layers),
                "n_features": ", ".join(str(r.n_features) for r in records),
                "source": records[0].source,
                "created_at": records[0].created_at,
            }
        )
    columns = ["uid", "name", "n_cells", "spaces", "layers", "n_features", "source", "created_at"]
    return pd.DataFrame(rows, columns=columns).set_index("uid")


@dataclass(frozen=True)
class _Entries:
    """Which entries the layers of a sparse group have, in the file's column order, and where their stored values are."""

    indptr: "NDArray[np.int64]"
    indices: "NDArray[np.int32]"
    order: "NDArray[np.int64] | None"
    shape: tuple[int, int]
    shared: bool

    def matrix(self, values: "NDArray[Any]", form: str) -> Any:  # noqa: ANN401  (sparse or dense)
        """Make one layer, in the form that the file had."""
        from scipy.sparse import csr_matrix

        # SciPy turns no half-precision matrix into another form; float32 holds its values.
        halves = values.dtype == np.float16 and form != "csr"
        values = values if self.order is None else values[self.order]
        values = values.astype(np.float32) if halves else values
        indices, indptr = (a.copy() if self.shared else a for a in (self.indices, self.indptr))
        made = csr_matrix((values, indices, indptr), shape=self.shape)
        turned = made.tocsc() if form == "csc" else made.toarray() if form == "dense" else made
        return turned.astype(np.float16) if halves else turned


@dataclass(frozen=True)
class Dataset:
    """One dataset of an atlas or a view.

    Parameters
    ----------
    catalog : Catalog
        At the tip or pinned.
    records : tuple of DatasetRecord
        Its groups.
    """

    catalog: Catalog
    records: tuple[DatasetRecord, ...]

    @classmethod
    def find(cls, catalog: Catalog, uid_or_name: str) -> "Dataset":
        """Find a dataset by uid or name.

        Raises
        ------
        NotFoundError
            If none, or more than one, goes by that name.
        """
        return cls(catalog, tuple(find_dataset(catalog, uid_or_name)))

    @property
    def uid(self) -> str:
        """Its uid."""
        return self.records[0].uid

    @property
    def name(self) -> str:
        """What people call it."""
        return self.records[0].name

    @property
    def n_cells(self) -> int:
        """How many cells it was added with."""
        facts: dict[str, Any] = json.loads(self.records[0].facts)
        return int(facts.get("n_cells", self.records[0].n_cells))

    @property
    def left_out(self) -> dict[str, str]:
        """What the source held that the atlas did not take: element -> what it is."""
        return dict(json.loads(self.records[0].facts).get("left_out", {}))

    @cached_property
    def obs(self) -> "pd.DataFrame":
        """The file's own obs, with its index, columns, dtypes and categories."""
        return arrow_to_frame(read_frame(self.catalog, self.uid, "obs"))

    def var(self, space: str | None = None) -> "pd.DataFrame":
        """Give the file's own var of a feature space, with its index, columns, dtypes and categories; columns without names count."""
        record = self._main(space)
        if not record.layout_uid:
            import pandas as pd

            return pd.DataFrame(index=pd.RangeIndex(record.n_features).astype(str))
        return arrow_to_frame(read_frame(self.catalog, self.uid, f"var.{record.pointer}"))

    def to_anndata(self, space: str | None = None) -> "AnnData":
        """Give the dataset back as it was added: its own names, frames, matrix forms and dtypes.

        Parameters
        ----------
        space : str or None
            Feature space; None takes ``gene_expression`` where there is one, else the first.

        Returns
        -------
        anndata.AnnData
            X and layers where the file had them, in the form (CSR, CSC, dense) and dtype that they had; a matrix with other
            features is in ``raw`` if it was there. Cells without this modality are left out.

        Raises
        ------
        NotFoundError
            If the dataset has no such space.
        """
        from anndata import AnnData

        main = self._main(space)
        obs, var = self.obs, self.var(main.feature_space)
        n_rows = main.n_cells
        if n_rows != len(obs):
            obs = obs.iloc[self._cells_of(main)]
        parts: dict[str, Any] = {"layers": {}}
        for record in self.records:
            if record.feature_space == main.feature_space:
                for key, matrix in self._matrices(record).items():
                    self._place(parts, key, matrix, record)
        adata = AnnData(X=parts.get("X"), obs=obs, var=var, layers=parts["layers"])
        if "raw" in parts:
            matrix, features = parts["raw"]
            adata.raw = AnnData(X=matrix, obs=obs[[]], var=features)
        return adata

    def _main(self, space: str | None) -> DatasetRecord:
        spaces = list(dict.fromkeys(r.feature_space for r in self.records))
        wanted = space or ("gene_expression" if "gene_expression" in spaces else spaces[0])
        for record in self.records:
            if record.feature_space == wanted:
                return record
        raise NotFoundError(f"Dataset {self.name!r} has no feature space {wanted!r}, only {spaces}.")

    def _cells_of(self, record: DatasetRecord) -> Any:  # noqa: ANN401  (an index array)
        import pyarrow.compute as pc

        from raggedatlas.catalog.catalog import CELLS

        rows = self.catalog.tables.read(CELLS, [record.pointer], where=f"dataset_uid = '{self.uid}'")
        struct = rows.column(record.pointer).combine_chunks()
        at = pc.struct_field(struct, "zarr_row" if "zarr_row" in [f.name for f in struct.type] else "position")
        cells = np.flatnonzero(at.is_valid().to_numpy(zero_copy_only=False))
        return cells[np.argsort(at.drop_null().to_numpy())]

    def _place(self, parts: dict[str, Any], key: str, matrix: Any, record: DatasetRecord) -> None:  # noqa: ANN401
        pieces = key.split("/")
        if "raw" in pieces[:-1]:
            features = arrow_to_frame(read_frame(self.catalog, self.uid, f"var.{record.pointer}"))
            parts["raw"] = (matrix, features)
        elif "layers" not in pieces[:-1]:
            parts.setdefault("X", matrix)
        else:
            parts["layers"][pieces[-1]] = matrix

    def _matrices(self, record: DatasetRecord) -> dict[str, Any]:
        specs = {path: ArraySpec.from_json(json.dumps(spec)) for path, spec in record.array_specs.items()}
        facts = json.loads(record.facts)["layers"]
        entries = self._entries(record, specs) if "csr/indices" in specs else None
        found = {}
        for layer in record.layers:
            fact = facts[layer]
            dtype, form = np.dtype(fact["dtype"]), fact["form"]
            if entries is None:
                matrix: Any = self._read(specs[f"layers/{layer}"]).astype(dtype, copy=False)
                if form != "dense":
                    from scipy.sparse import csc_matrix, csr_matrix

                    matrix = (csc_matrix if form == "csc" else csr_matrix)(matrix)
                found[fact["key"]] = matrix
                continue
            values = self._read(specs[f"csr/layers/{layer}"])
            found[fact["key"]] = entries.matrix(values.astype(dtype, copy=False), form)
        return found

    def _entries(self, record: DatasetRecord, specs: dict[str, ArraySpec]) -> "_Entries":
        from raggedatlas.store.kernels import remap_csr

        indptr, indices = self._read(specs["csr/indptr"]), self._read(specs["csr/indices"])
        shape, order = (record.n_cells, record.n_features), None
        if COLUMNS in specs:
            of_file = np.argsort(self._read(specs[COLUMNS]))
            _, indices, order = remap_csr(indptr, indices, np.arange(len(indices)), of_file, record.n_features)
        return _Entries(indptr, indices.astype(np.int32, copy=False), order, shape, len(record.layers) > 1)

    def _read(self, spec: ArraySpec) -> Any:  # noqa: ANN401  (an array of the stored dtype)
        return read_slice(ArrayReader(self.catalog.arrays, spec), 0, spec.shape[0])

    def __repr__(self) -> str:
        """Say its name, cells and layers."""
        layers = ", ".join(f"{r.feature_space}/{layer}" for r in self.records for layer in r.layers)
        return f"Dataset {self.name!r} ({self.uid}): {self.n_cells:,} cells, {layers}"

    def _repr_html_(self) -> str:
        from html import escape

        return f"<code>{escape(repr(self))}</code>"


def describe(catalog: Catalog, what: str) -> str:
    """Say in lines where an atlas is and what is in it."""
    listed = list_datasets(catalog)
    lines = [
        f"{what} at {catalog.location.uri}: {len(listed):,} datasets, {int(listed['n_cells'].sum()) if len(listed) else 0:,} cells"
    ]
    shown = listed.head(10)
    lines += [f"  {row['name']}: {row['n_cells']:,} cells, {row['spaces']}" for _, row in shown.iterrows()]
    if len(listed) > len(shown):
        lines.append(f"  ... and {len(listed) - len(shown)} more")
    return "\n".join(lines)


def describe_html(catalog: Catalog, what: str) -> str:
    """Say the same as HTML, every text escaped."""
    from html import escape

    listed = list_datasets(catalog)
    columns = ["name", "n_cells", "spaces", "layers", "n_features"]
    head = "".join(f"<th>{escape(c)}</th>" for c in columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(str(row[c]))}</td>" for c in columns) + "</tr>"
        for _, row in listed.head(20).iterrows()
    )
    return f"<p><b>{escape(what)}</b> at <code>{escape(catalog.location.uri)}</code>, {len(listed):,} datasets</p><table><tr>{head}</tr>{rows}</table>"

"""One dataset of an atlas, read back as it was added: as a source, and as AnnData or MuData."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.catalog.assets import array_readers, find_dataset
from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.cells import open_frame, read_frame
from raggedatlas.catalog.deletion import rows_left
from raggedatlas.catalog.identity import GENE_SPACE
from raggedatlas.errors import CorruptError, NotFoundError, SourceError
from raggedatlas.formats.anndata.packing import unpack
from raggedatlas.formats.composite_source import CompositeSource, MatrixPart, SourceParts
from raggedatlas.formats.matrix_readers import BLOCK_BYTES, ENTRIES, stop_by_entries
from raggedatlas.formats.subset import select_cells
from raggedatlas.model.arguments import checked
from raggedatlas.model.assets import DeletionRecord
from raggedatlas.model.batch import Block, CsrBlock, DenseBlock
from raggedatlas.model.frames import ColumnTable, arrow_table, arrow_to_frame
from raggedatlas.model.protocols import NO_MATRIX, MatrixForm
from raggedatlas.model.records import COLUMNS, ELEMENTS, DatasetFacts, DatasetRecord, MatrixFacts
from raggedatlas.model.shown import Shown
from raggedatlas.model.spaces import PointerKind
from raggedatlas.query.cells import pointer_column
from raggedatlas.store.location import Address, as_path
from raggedatlas.store.read import ArrayReader, read_all, read_bounds, read_slice
from raggedatlas.store.sparse import remap_csr

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData
    from mudata import MuData

PRESENT = "present/"


class LinkableDataset(CompositeSource):
    """A dataset of a published atlas, as its arrays are stored there.

    `parts` are its contents, with the columns of sparse matrices in their stored order. The attribute `place` is the
    published atlas, `packed` its files.
    """

    def __init__(self, dataset: "Dataset", parts: SourceParts) -> None:
        record, location = dataset.records[0], dataset.catalog.location
        super().__init__(parts, name=record.name, uri=record.source, format="published atlas")
        self._dataset, self.place = dataset, as_path(location.uri)
        self.packed: Any = None if location.server is None else location.server.files

    def arrays(self, key: str) -> dict[str, ArrayReader]:
        """Return the stored arrays of a matrix; empty where it is copied."""
        return self._dataset._arrays_of(key)

    def indptr(self, key: str) -> NDArray[np.int64]:
        """Return the bounds of the rows of a matrix."""
        arrays = self._dataset._arrays_of(key)
        return read_bounds(arrays["indptr"], self.describe().n_cells, arrays["indices"].spec.n_rows)


def _array(readers: Mapping[str, ArrayReader], path: str, group: str) -> ArrayReader:
    """Return the reader of one array of a group; `CorruptError` if the record has none."""
    if path not in readers:
        raise CorruptError(f"The group {group} has no array {path!r}, only {sorted(readers)}; run validate().")
    return readers[path]


class _Entries:
    """The entries of a sparse group, which its layers share; the last rows are kept for the next layer."""

    def __init__(
        self,
        arrays: Mapping[str, ArrayReader],
        folder: str,
        shape: tuple[int, int],
        group: str,
        *,
        of_file: bool = True,
    ) -> None:
        self._indices, self._indptr = (_array(arrays, f"{folder}/{name}", group) for name in ("indices", "indptr"))
        # Only columns of the group itself are reordered; further matrices are stored as the file has them.
        self._columns = arrays.get(COLUMNS) if folder == "csr" and of_file else None
        self._last: tuple[tuple[int, int], tuple[NDArray[Any], NDArray[Any] | None]] | None = None
        self.shape, self.n_entries = shape, self._indices.spec.n_rows

    @cached_property
    def indptr(self) -> NDArray[np.int64]:
        """Bounds of the rows, (n_rows + 1,) int64."""
        return read_bounds(self._indptr, self.shape[0], self.n_entries)

    @cached_property
    def _of_file(self) -> NDArray[np.int64] | None:
        if self._columns is None:
            return None
        stored = read_all(self._columns)
        # The argsort of a permutation is its inverse: the column of the file for every stored column.
        order = np.argsort(stored, kind="stable")
        # Lengths first: a damaged record may name more columns than memory has room for.
        if len(stored) != self.shape[1] or not np.array_equal(stored[order], np.arange(len(stored))):
            raise CorruptError(
                f"{self._columns.name} does not give each of {self.shape[1]:,} columns a place of its own; restore it from a copy."
            )
        return order

    def rows(self, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Return the columns of some rows as the file has them, and which stored entry each one is (None for its own)."""
        if self._last is not None and self._last[0] == (start, stop):
            return self._last[1]
        bounds = self.indptr[start : stop + 1]
        indices, order = read_slice(self._indices, int(bounds[0]), int(bounds[-1])), None
        # A column beyond the last would let SciPy's compiled loops leave their memory.
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < self.shape[1]:
            raise CorruptError(
                f"{self._indices.name} names a column outside of its {self.shape[1]:,}; run validate('deep')."
            )
        if self._of_file is not None:
            pointers = bounds - bounds[0]
            # Positions travel in place of values, so that every layer can put its own into the new order.
            places = np.arange(len(indices), dtype=np.int32 if len(indices) < 2**31 else np.int64)
            _, indices, order = remap_csr(pointers, indices, places, self._of_file, len(self._of_file))
        self._last = ((start, stop), (indices.astype(np.int32, copy=False), order))
        return self._last[1]


class _GroupRows:
    """One layer of a group, or another stored matrix, in its original form and dtype."""

    def __init__(
        self,
        entries: _Entries | None,
        values: ArrayReader,
        facts: MatrixFacts,
        shape: tuple[int, ...],
    ) -> None:
        self._entries, self._values, self.shape = entries, partial(read_slice, values), shape
        self.form: MatrixForm = facts.form
        self.dtype: np.dtype[Any] = np.dtype(facts.dtype)
        self.wide: tuple[bool, bool] = facts.wide
        if entries is not None and values.spec.shape != (entries.n_entries,):
            raise CorruptError(
                f"{values.name} has shape {values.spec.shape} for {entries.n_entries:,} entries; run validate()."
            )
        sparse = entries is not None and self.form != "dense"
        self.n_entries: int | None = entries.n_entries if sparse and entries is not None else None

    def stop(self, start: int, stop: int) -> int:
        """Return the end of one step."""
        if self.n_entries is None:
            # Multiplied as Python integers: a recorded shape may be too large for int64.
            width = max(1, int(np.prod(self.shape[1:], dtype=object)))
            stop = min(stop, start + max(1, BLOCK_BYTES // (width * self.dtype.itemsize)))
        return stop if self._entries is None else stop_by_entries(self._entries.indptr, start, stop, ENTRIES)

    def read(self, start: int, stop: int) -> Block:
        """Read rows ``[start, stop)``."""
        if self._entries is None:
            dense = self._values(start, stop).astype(self.dtype, copy=False)
            if self.form == "dense":
                return DenseBlock({"values": dense})
            rows, columns = np.nonzero(dense)
            pointers = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(dense)))])
            return CsrBlock(pointers, columns.astype(np.int32), {"values": dense[rows, columns]}, dense.shape[1])
        bounds = self._entries.indptr[start : stop + 1]
        values = self._values(int(bounds[0]), int(bounds[-1]))
        indices, order = self._entries.rows(start, stop)
        values = (values if order is None else values[order]).astype(self.dtype, copy=False)
        pointers = bounds - bounds[0]
        if self.form != "dense":
            # A copy, as `_Entries` keeps its array for the next layer and the caller may change the block.
            return CsrBlock(pointers, indices.copy(), {"values": values}, self.shape[1])
        made = np.zeros((stop - start, self.shape[1]), self.dtype)
        made[np.repeat(np.arange(stop - start), np.diff(pointers)), indices] = values
        return DenseBlock({"values": made})

    def close(self) -> None:
        """Keep nothing."""


@checked
@dataclass(frozen=True)
class Dataset(Shown):
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
        """Display name."""
        return self.records[0].name

    @property
    def n_cells(self) -> int:
        """Number of cells: those it was added with, less those deleted since."""
        return self.records[0].n_cells_added - self.catalog.n_deleted().get(self.uid, 0)

    @property
    def deletions(self) -> tuple[DeletionRecord, ...]:
        """What `delete_cells` took out of it, oldest first: condition, time, and number of its cells."""
        return tuple(record.of([self.uid]) for record in self.catalog.deletions() if self.uid in record.datasets)

    @property
    def left_out(self) -> dict[str, str]:
        """Elements of the source that the atlas did not store: key -> description."""
        return dict(self.records[0].file_facts.left_out)

    @cached_property
    def obs(self) -> "pd.DataFrame":
        """The file's own obs, with its index, columns, dtypes and categories; without deleted cells."""
        frame = self._table("obs")
        return frame if self._rows is None else frame.iloc[self._rows]

    def var(self, space: str | None = None) -> "pd.DataFrame":
        """Return the `var` of the source file for a feature space, with its index, columns, dtypes and categories; unnamed columns are numbered."""
        record = self._main(space)
        if not record.layout_uid:
            import pandas as pd

            return pd.DataFrame(index=pd.RangeIndex(record.n_features).astype(str))
        return self._table(_frame_of(record))

    @cached_property
    def elements(self) -> tuple[str, ...]:
        """Keys of the elements other than cells, features and layers: ``"uns/neighbors"``, ``"obsp/distances"``, ``"obsm/X_umap"``, ..."""
        schema = self.source().describe()
        keys = [*schema.elements, *(i.key for i in schema.others), *(i.key for i in schema.matrices if _is_side(i.key))]
        return tuple(dict.fromkeys(keys))

    def element(self, key: str) -> Any:  # noqa: ANN401  (any element that AnnData knows)
        """Read one of the `elements`, or a matrix such as ``"X"`` or ``"layers/spliced"``, as the file has it.

        Raises
        ------
        NotFoundError
            If there is none; the message lists them.
        """
        return self.source().element(key)

    def source(self) -> CompositeSource:
        """Return the dataset as a source equal to the added file, less deleted cells, for `copy` or for `add` of another atlas."""
        # Called for its error: a dataset with shapes alone has no values to return.
        self._main(None)
        record = self.records[0]
        return CompositeSource(self._parts(), name=record.name, uri=record.source, format=self._facts[0].format)

    def linkable(self) -> LinkableDataset:
        """Return a source with which `add` links the dataset of a published atlas, whose values then stay there.

        Raises
        ------
        SourceError
            If the atlas is not a published one, or cells of the dataset were deleted.
        """
        self._main(None)
        where = f"{self.name!r} of {self.catalog.location.uri}"
        if self.catalog.location.server is None:
            raise SourceError(
                f"{where} is in an atlas that is not published; only files and published datasets are linked. Add a copy of it instead."
            )
        address = self.catalog.location.uri
        if address.startswith(("hf:", "doi:")):
            raise SourceError(
                f"{address} is no address that a record can name; link {where} at its folder on a web server, or add a copy of it."
            )
        if self._rows is not None:
            raise SourceError(
                f"Cells of {where} were deleted, whose values a link would bring back; add a copy of it instead."
            )
        return LinkableDataset(self, self._parts(stored=True))

    def to_anndata(self, space: str | None = None) -> "AnnData":
        """Read the dataset as it was added: original names, frames, matrix formats, dtypes and all other elements.

        Parameters
        ----------
        space : str or None
            Feature space; None takes ``gene_expression`` where there is one, else the first. Of several modalities it is
            the one that holds the space; `to_mudata` reads all.

        Returns
        -------
        anndata.AnnData
            Equal to what was added. A space that was made of a member of `obsm` comes as X, with the table of cells alone. If cells
            were deleted, it is without them and has ``uns["deleted_cells"]``: ``cell_name``, and of each deletion ``where``,
            ``n_cells`` and ``deleted_at``. Categories that only deleted cells had stay.

        Raises
        ------
        NotFoundError
            If the dataset has no such space.
        """
        from raggedatlas.formats.copying import read_source
        from raggedatlas.formats.modalities import split_modalities

        source, record = self.source(), self._main(space)
        keys = [fact.key for fact in record.file_facts.layers.values()]
        units = split_modalities(source).modalities
        if keys == [NO_MATRIX] and len(units) == 1:
            return read_source(source, units[0].name)
        deleted = {} if self._rows is None else {"deleted_cells": self._deleted()}
        for unit in units:
            if any(info.key in keys for matrix in unit.matrices for info in matrix.infos) and not _is_side(keys[0]):
                found = read_source(source, unit.name)
                # Of several modalities, what concerns all cells is beside them.
                found.uns.update({key: value for key, value in deleted.items() if len(units) > 1})
                return found
        from anndata import AnnData

        cells = source.present(keys[0])
        obs = self.obs if cells is None else self.obs.iloc[cells]
        return AnnData(X=source.matrix(keys[0]), obs=obs, var=self.var(record.feature_space), uns=deleted)

    def to_mudata(self) -> "MuData":
        """Read all modalities of the dataset as they were added.

        Returns
        -------
        mudata.MuData
            Equal to what mudata reads from the file that was added; of a dataset without modalities it holds the only one.

        Raises
        ------
        MissingExtraError
            If mudata is not installed.
        """
        from raggedatlas.formats.copying import read_source

        return read_source(self.source(), multimodal=True)

    def write(self, path: Address, **options: Any) -> str:  # noqa: ANN401  (options of the format)
        """Write the dataset as it was added to ``.h5ad``, ``.zarr``, ``.h5mu`` or ``.cxg``, in bounded memory.

        Parameters
        ----------
        path : str or Path
            Where; its ending decides the format.
        **options
            Of the format: ``overwrite``, ``compression``, ``zarr_format``.

        Returns
        -------
        str
            The path.

        Raises
        ------
        SourceError
            If it has several modalities and the file has room for one.
        SchemaError
            If it holds what such a file cannot; the message names it.
        DuplicateError, StoreError
            If the path exists or refuses.
        """
        from raggedatlas.formats.copying import copy
        from raggedatlas.formats.modalities import is_multimodal
        from raggedatlas.formats.registry import open_sink

        source = self.source()
        # The ending `.zarr` is that of AnnData and MuData, so the dataset decides.
        if as_path(path).suffix == ".zarr" and is_multimodal(source):
            options = {"multimodal": True, **options}
        storage_options = options.pop("storage_options", None) or self.catalog.location.storage_options
        return copy(source, open_sink(path, storage_options=storage_options, **options))

    @cached_property
    def _facts(self) -> list[DatasetFacts]:
        return [record.file_facts for record in self.records]

    @cached_property
    def _readers(self) -> list[dict[str, ArrayReader]]:
        return [array_readers(self.catalog, record) for record in self.records]

    @cached_property
    def _stored_elements(self) -> dict[str, Callable[[], Any]]:
        """Elements stored in one file: key -> function that reads it."""
        reader = self._readers[0].get(ELEMENTS)
        return {} if reader is None else unpack(read_all(reader).tobytes())

    def _parts(self, *, stored: bool = False) -> SourceParts:
        """Return the contents: as they were in the file, or sparse matrices with their columns in the order in which they are stored."""
        record, facts = self.records[0], self._facts[0]
        matrices, tables = [], {}
        for i, group in enumerate(self.records):
            shape = (group.n_cells, group.n_features)
            # Layers of a group share their entries, and through this the columns that were read last.
            arrays = self._readers[i]
            sparse = "csr/indices" in arrays
            shared = _Entries(arrays, "csr", shape, group.zarr_group, of_file=not stored) if sparse else None
            for layer in group.layers:
                fact = self._facts[i].layers.get(layer)
                if fact is None:
                    raise CorruptError(
                        f"The facts of {group.zarr_group} in table 'datasets' have no layer {layer!r}, only {list(self._facts[i].layers)}; "
                        "run validate()."
                    )
                if fact.key == NO_MATRIX:
                    continue
                values = _array(arrays, f"csr/layers/{layer}" if shared else f"layers/{layer}", group.zarr_group)
                form = fact.model_copy(update={"form": "csr"}) if stored and shared else fact
                rows = _GroupRows(shared, values, form, shape if shared else values.spec.shape)
                part = MatrixPart.of(fact.key, rows, fact.features if group.layout_uid else "", group.feature_space)
                matrices.append(part)
                if part.info.features:
                    read = partial(self._stored_features, i) if stored else partial(self._table, _frame_of(group))
                    tables[part.info.features] = read
        others, arrays, left_out = [], self._readers[0], dict[str, str]()
        reordered = stored and any(COLUMNS in readers for readers in self._readers)
        for key, extra in self._facts[0].extras.items():
            if reordered and _is_of_features(key):
                left_out[key] = "by feature, and the columns are linked in another order"
                continue
            data, entries = _array(arrays, f"{extra.path}/data", record.zarr_group), None
            if extra.form != "dense":
                if len(extra.shape) != 2:
                    raise CorruptError(
                        f"{data.name} is recorded as a sparse matrix of shape {extra.shape}; run validate()."
                    )
                entries = _Entries(arrays, extra.path, (extra.shape[0], extra.shape[1]), record.zarr_group)
            elif extra.shape != data.spec.shape:
                raise CorruptError(
                    f"{data.name} has shape {data.spec.shape}, {extra.shape} is recorded; run validate()."
                )
            others.append(MatrixPart.of(key, _GroupRows(entries, data, extra, extra.shape)))
        elements = {key: read for key, read in self._stored_elements.items() if not key.startswith(PRESENT)}
        for key in [key for key in elements if reordered and _is_of_features(key)]:
            left_out[key] = "by feature, and the columns are linked in another order"
            del elements[key]
        present = {
            key.removeprefix(PRESENT): read() for key, read in self._stored_elements.items() if key.startswith(PRESENT)
        }
        n_cells = record.n_cells if facts.n_cells is None else facts.n_cells
        for part in matrices:
            # The key of a modality's `obs`; rows that are all cells in order need no list.
            cells = present.get("/".join([*part.info.key.split("/")[:2], "obs"]))
            if cells is not None and not np.array_equal(cells, np.arange(n_cells)):
                present[part.info.key] = cells

        def cells_table() -> ColumnTable:
            frame = open_frame(self.catalog, record, "obs")
            return arrow_table(frame.schema, n_cells, frame.chunks)

        parts = SourceParts(
            n_cells,
            partial(self._table, "obs"),
            tuple(matrices),
            tables,
            left_out,
            present=present,
            others=tuple(others),
            elements=elements,
            tables={"obs": cells_table},
        )
        if self._rows is not None:
            parts, key = select_cells(parts, self._rows), "uns/deleted_cells"
            # The file may come from an atlas that had cells of it deleted.
            while key in parts.elements:
                key += "_"
            parts = replace(parts, elements={**parts.elements, key: self._deleted})
        return parts

    def _stored_features(self, number: int) -> "pd.DataFrame":
        """Return the features of a group in the order of its stored columns."""
        frame, columns = self._table(_frame_of(self.records[number])), self._readers[number].get(COLUMNS)
        return frame if columns is None else frame.iloc[np.argsort(read_all(columns), kind="stable")]

    def _arrays_of(self, key: str) -> dict[str, ArrayReader]:
        """Return the arrays of a matrix: ``"data"``, and of a sparse one ``"indices"`` and ``"indptr"``; empty for others than layers."""
        for i, group in enumerate(self.records):
            for layer in group.layers:
                if self._facts[i].layers[layer].key == key and key != NO_MATRIX:
                    arrays, names = self._readers[i], {"data": f"layers/{layer}"}
                    if "csr/indices" in arrays:
                        names = {"data": f"csr/layers/{layer}", "indices": "csr/indices", "indptr": "csr/indptr"}
                    return {name: _array(arrays, path, group.zarr_group) for name, path in names.items()}
        return {}

    @cached_property
    def _rows(self) -> NDArray[np.int64] | None:
        """Rows of the file whose cells were not deleted, ascending; None if all are there."""
        return rows_left(self.catalog, self.records[0])

    def _deleted(self) -> dict[str, Any]:
        """Return which cells were deleted, and why: their names; and of each deletion its condition, number of cells and time."""
        uid = self.records[0].uid
        deletions = [record for record in self.catalog.deletions() if uid in record.datasets]
        names = np.delete(np.asarray(self._table("obs").index, dtype=object), () if self._rows is None else self._rows)
        return {
            "cell_name": names,
            "where": np.array([record.where for record in deletions], dtype=object),
            "n_cells": np.array([record.datasets[uid].n_cells for record in deletions], dtype=np.int64),
            "deleted_at": np.array([record.created_at for record in deletions], dtype=object),
        }

    def _table(self, name: str) -> "pd.DataFrame":
        return arrow_to_frame(read_frame(self.catalog, self.records[0], name))

    def _main(self, space: str | None) -> DatasetRecord:
        known = self.catalog.spaces()
        kinds = {r.feature_space: known[r.feature_space].kind for r in self.records if r.feature_space in known}
        spaces = list(
            dict.fromkeys(
                s for s in (r.feature_space for r in self.records) if kinds.get(s) is not PointerKind.GEOMETRY
            )
        )
        if not spaces or kinds.get(space or "") is PointerKind.GEOMETRY:
            shapes = sorted(s for s in kinds if s not in spaces)
            raise NotFoundError(
                f"Dataset {self.name!r} has shapes in {shapes}, no values; read them with view.query().geometry(...)."
            )
        wanted = space or (GENE_SPACE if GENE_SPACE in spaces else spaces[0])
        for record in self.records:
            if record.feature_space == wanted:
                return record
        raise NotFoundError(f"Dataset {self.name!r} has no feature space {wanted!r}, only {spaces}.")

    def __repr__(self) -> str:
        """Return name, number of cells, how many were deleted, and layers."""
        layers = ", ".join(f"{r.feature_space}/{layer}" for r in self.records for layer in r.layers or ("shapes",))
        n_deleted = self.records[0].n_cells_added - self.n_cells
        deleted = f" ({n_deleted:,} deleted)" if n_deleted else ""
        return f"Dataset {self.name!r} ({self.uid}): {self.n_cells:,} cells{deleted}, {layers}"


def _frame_of(record: DatasetRecord) -> str:
    """Return the name of the frame of the features of a group."""
    return f"var.{pointer_column(record)}"


def _is_of_features(key: str) -> bool:
    """Return whether an element has an axis of features: of `varm` or `varp`, of a modality too."""
    return any(part in ("varm", "varp") for part in key.split("/")[:-1])


def _is_side(key: str) -> bool:
    return "obsm" in key.split("/")[:-1]

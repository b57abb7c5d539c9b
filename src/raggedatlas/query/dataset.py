"""One dataset of an atlas, read back as it was added."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raggedatlas.catalog.assets import find_dataset
from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.frames import read_frame
from raggedatlas.errors import NotFoundError
from raggedatlas.model.arguments import checked
from raggedatlas.model.frames import arrow_to_frame
from raggedatlas.model.pointers import PointerKind
from raggedatlas.model.protocols import NO_MATRIX
from raggedatlas.model.records import DatasetRecord

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData
    from mudata import MuData

    from raggedatlas.formats.composite_source import CompositeSource
    from raggedatlas.query.roundtrip import StoredDataset


@checked
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
        """Display name."""
        return self.records[0].name

    @property
    def n_cells(self) -> int:
        """Number of cells it was added with."""
        n_cells = self.records[0].file_facts.n_cells
        return self.records[0].n_cells if n_cells is None else n_cells

    @property
    def left_out(self) -> dict[str, str]:
        """Elements of the source that the atlas did not store: key -> description."""
        return dict(self.records[0].file_facts.left_out)

    @cached_property
    def obs(self) -> "pd.DataFrame":
        """The file's own obs, with its index, columns, dtypes and categories."""
        return arrow_to_frame(read_frame(self.catalog, self.records[0], "obs"))

    def var(self, space: str | None = None) -> "pd.DataFrame":
        """Return the `var` of the source file for a feature space, with its index, columns, dtypes and categories; unnamed columns are numbered."""
        record = self._main(space)
        if not record.layout_uid:
            import pandas as pd

            return pd.DataFrame(index=pd.RangeIndex(record.n_features).astype(str))
        return arrow_to_frame(read_frame(self.catalog, self.records[0], f"var.{record.pointer}"))

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

    def source(self) -> "CompositeSource":
        """Return the dataset as a source equal to the added file, for `copy` or for `add` of another atlas."""
        self._main(None)
        return self._returning.source()

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
            Equal to what was added. A space that was made of a member of `obsm` comes as X, with the table of cells alone.

        Raises
        ------
        NotFoundError
            If the dataset has no such space.
        """
        from raggedatlas.formats.modalities import as_anndata, split_modalities

        source, record = self.source(), self._main(space)
        keys = [fact.key for fact in record.file_facts.layers.values()]
        units = split_modalities(source).modalities
        if keys == [NO_MATRIX] and len(units) == 1:
            return as_anndata(source, units[0])
        for unit in units:
            if any(info.key in keys for matrix in unit.matrices for info in matrix.infos) and not _is_side(keys[0]):
                return as_anndata(source, unit)
        return self._side(source, record, keys[0])

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
        from raggedatlas.formats.modalities import as_mudata

        return as_mudata(self.source())

    def write(self, path: str | Path, **options: Any) -> str:  # noqa: ANN401  (options of the format)
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
        from raggedatlas.formats.copying import copy, is_multimodal
        from raggedatlas.formats.registry import open_sink

        source = self.source()
        several = Path(path).suffix == ".zarr" and is_multimodal(source)
        return copy(source, open_sink(path, **({"multimodal": True} if several else {}), **options))

    @cached_property
    def _returning(self) -> "StoredDataset":
        from raggedatlas.query.roundtrip import StoredDataset

        return StoredDataset(self.catalog, self.records)

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
        wanted = space or ("gene_expression" if "gene_expression" in spaces else spaces[0])
        for record in self.records:
            if record.feature_space == wanted:
                return record
        raise NotFoundError(f"Dataset {self.name!r} has no feature space {wanted!r}, only {spaces}.")

    def _side(self, source: "CompositeSource", record: DatasetRecord, key: str) -> "AnnData":
        from anndata import AnnData

        cells = source.present(key)
        obs = self.obs if cells is None else self.obs.iloc[cells]
        return AnnData(X=source.matrix(key), obs=obs, var=self.var(record.feature_space))

    def __repr__(self) -> str:
        """Return name, number of cells and layers."""
        layers = ", ".join(f"{r.feature_space}/{layer}" for r in self.records for layer in r.layers or ("shapes",))
        return f"Dataset {self.name!r} ({self.uid}): {self.n_cells:,} cells, {layers}"

    def _repr_html_(self) -> str:
        from html import escape

        return f"<code>{escape(repr(self))}</code>"


def _is_side(key: str) -> bool:
    return "obsm" in key.split("/")[:-1]

"""Sources for AnnData: `.h5ad` files, Zarr folders and objects."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from raggedatlas.errors import SourceError
from raggedatlas.formats.anndata.memory import read_object_parts
from raggedatlas.formats.anndata.stored import read_stored_parts
from raggedatlas.formats.composite_source import CompositeSource
from raggedatlas.formats.containers import Container, open_hdf5, open_object, open_zarr, readable

if TYPE_CHECKING:
    from anndata import AnnData


def h5ad_source(path: str | Path) -> CompositeSource:
    """Open an `.h5ad` file of any age; its matrices are streamed.

    Raises
    ------
    NotFoundError
        If there is no such file.
    SourceError
        If it is damaged, or does not fit together.
    LimitError
        If it declares more than may be read.

    Examples
    --------
    >>> source = h5ad_source("tests/data/pbmc_5k_protein_v3.h5ad")  # doctest: +SKIP
    """
    return _stored_source(open_hdf5(Path(path)), Path(path), "h5ad")


def zarr_source(path: str | Path) -> CompositeSource:
    """Open an AnnData that was written as a Zarr folder, format 2 or 3, sharded or not, or such a folder in a zip file.

    Raises
    ------
    NotFoundError
        If there is no such folder.
    SourceError
        If it is damaged, or does not fit together.
    LimitError
        If it declares more than may be read.
    """
    return _stored_source(open_zarr(Path(path)), Path(path), "zarr")


def group_source(group: Any) -> CompositeSource:  # noqa: ANN401  (an h5py.Group or zarr.Group)
    """Take an open HDF5 file or Zarr group that holds an AnnData as a source; it stays open.

    Raises
    ------
    SourceError
        If it is closed, damaged, holds no AnnData, or does not fit together.
    LimitError
        If it declares more than may be read.
    """
    container = open_object(group)
    name = Path(container.uri.rpartition(":")[2]).stem or "group"
    return _stored_source(container, Path(container.uri), "h5ad" if hasattr(group, "id") else "zarr", name)


def object_source(adata: "AnnData") -> CompositeSource:
    """Take an AnnData in memory, a view, or a backed one as a source.

    Raises
    ------
    SourceError
        If it has a matrix of a type that cannot be read by rows.
    """
    if type(adata.obs).__name__ == "Dataset2D":
        raise SourceError(
            "The AnnData is one of read_lazy, whose tables are not in memory; give the path of its file, which is read in blocks "
            "too, or adata.to_memory()."
        )
    uri = str(Path(str(adata.filename)).absolute()) if adata.isbacked else ""
    name = Path(uri).stem if uri else "anndata"
    return CompositeSource(read_object_parts(adata), name=name, uri=uri, format="anndata")


def _stored_source(container: Container, path: Path, form: str, name: str = "") -> CompositeSource:
    try:
        with readable(container.uri, "its structure"):
            parts = read_stored_parts(container)
        name = name or path.stem.removesuffix(".zarr")
        return CompositeSource(parts, name=name, uri=str(path), format=form, close=container.close)
    except BaseException:
        container.close()
        raise

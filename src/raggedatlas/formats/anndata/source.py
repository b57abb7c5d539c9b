"""Sources for AnnData: `.h5ad` files, Zarr folders and objects."""

from pathlib import Path
from typing import TYPE_CHECKING

from raggedatlas.errors import SourceError
from raggedatlas.formats.anndata.memory import object_parts
from raggedatlas.formats.anndata.stored import stored_parts
from raggedatlas.formats.containers import Container, open_hdf5, open_zarr, readable
from raggedatlas.formats.parts import PartsSource

if TYPE_CHECKING:
    from anndata import AnnData


def h5ad_source(path: str | Path) -> PartsSource:
    """Open an `.h5ad` file of any age; its matrices are streamed.

    Raises
    ------
    NotFoundError
        If there is no such file.
    SourceError
        If it is damaged, holds no cells, or does not fit together.
    LimitError
        If it declares more than may be read.

    Examples
    --------
    >>> source = h5ad_source("tests/data/pbmc_5k_protein_v3.h5ad")  # doctest: +SKIP
    """
    return _stored_source(open_hdf5(Path(path)), Path(path), "h5ad")


def zarr_source(path: str | Path) -> PartsSource:
    """Open an AnnData that was written as a Zarr folder, format 2 or 3, sharded or not.

    Raises
    ------
    NotFoundError
        If there is no such folder.
    SourceError
        If it is damaged, holds no cells, or does not fit together.
    LimitError
        If it declares more than may be read.
    """
    return _stored_source(open_zarr(Path(path)), Path(path), "zarr")


def object_source(adata: "AnnData") -> PartsSource:
    """Take an AnnData in memory, a view, or a backed one as a source.

    Raises
    ------
    SourceError
        If it has no cells or a matrix of a type that cannot be read by rows.
    """
    if not adata.n_obs:
        raise SourceError("The AnnData has no cells; there is nothing to add.")
    uri = str(Path(str(adata.filename)).absolute()) if adata.isbacked else ""
    name = Path(uri).stem if uri else "anndata"
    return PartsSource(object_parts(adata), name=name, uri=uri, format="anndata")


def _stored_source(container: Container, path: Path, form: str) -> PartsSource:
    try:
        with readable(container.uri, "its structure"):
            parts = stored_parts(container)
        return PartsSource(parts, name=path.stem, uri=str(path), format=form, close=container.close)
    except BaseException:
        container.close()
        raise

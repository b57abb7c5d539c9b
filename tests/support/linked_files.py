"""Files of cells in all the ways in which linked matrices are stored."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import anndata as ad

CHUNK = 13
"""Entries of a chunk, few so that small files have many."""


def _plain(adata: "ad.AnnData", path: Path) -> None:
    adata.write_h5ad(path)


def _rechunked(**options: Any) -> Any:
    def write(adata: "ad.AnnData", path: Path) -> None:
        import h5py

        adata.write_h5ad(path)
        with h5py.File(path, "r+") as file:
            for name in ("data", "indices"):
                values, attributes = file[f"X/{name}"][...], dict(file[f"X/{name}"].attrs)
                del file[f"X/{name}"]
                made = file.create_dataset(
                    f"X/{name}", data=values, chunks=(min(CHUNK, max(1, len(values))),), **options
                )
                made.attrs.update(attributes)

    return write


def _zarr(version: int, *, shards: bool = False) -> Any:
    def write(adata: "ad.AnnData", path: Path) -> None:
        import anndata as ad
        import zarr

        # Of releases to come, in which other formats and shards are the default.
        with warnings.catch_warnings(action="ignore"), ad.settings.override(zarr_write_format=version):
            adata.write_zarr(path)
        root: Any = zarr.open_group(path, mode="r+", use_consolidated=False)
        for name in ("data", "indices"):
            values, attributes = root[f"X/{name}"][...], dict(root[f"X/{name}"].attrs)
            chunk = min(CHUNK, max(1, len(values)))
            made = root.create_array(
                f"X/{name}", shape=values.shape, dtype=values.dtype, chunks=(chunk,), shards=(4 * chunk,) if shards else None,
                overwrite=True, attributes=attributes,
            )  # fmt: skip
            made[...] = values
        with warnings.catch_warnings(action="ignore"):
            zarr.consolidate_metadata(path)

    return write


def _dense(**options: Any) -> Any:
    def write(adata: "ad.AnnData", path: Path) -> None:
        import h5py

        copy = adata.copy()
        copy.X = copy.X.toarray()
        copy.write_h5ad(path)
        if options:
            with h5py.File(path, "r+") as file:
                values, attributes = file["X"][...], dict(file["X"].attrs)
                del file["X"]
                chunks = tuple(max(1, min(n, most)) for n, most in zip(values.shape, (3, 4), strict=True))
                file.create_dataset("X", data=values, chunks=chunks, **options).attrs.update(attributes)

    return write


def _by_column(write: Any) -> Any:
    def transposed(adata: "ad.AnnData", path: Path) -> None:
        copy = adata.copy()
        copy.X = copy.X.tocsc()
        write(copy, path)

    return transposed


WRITERS: dict[str, Any] = {
    "dense.h5ad": _dense(),
    "tiled.h5ad": _dense(compression="gzip"),
    "plain.h5ad": _plain,
    "chunked.h5ad": _rechunked(),
    "gzip.h5ad": _rechunked(compression="gzip", shuffle=True, fletcher32=True),
    "lzf.h5ad": _rechunked(compression="lzf"),
    "v2.zarr": _zarr(2),
    "v3.zarr": _zarr(3),
    "sharded.zarr": _zarr(3, shards=True),
    "columns.h5ad": _by_column(_rechunked(compression="gzip")),
    "columns.zarr": _by_column(_zarr(3)),
}
"""Kind of file -> its writer."""


def write_file(adata: "ad.AnnData", folder: Path, name: str, kind: str) -> Path:
    """Write a dataset as a file of one kind.

    Parameters
    ----------
    adata : AnnData
        With a CSR matrix.
    folder : Path
        Where.
    name : str
        Stem of the file.
    kind : str
        One of `WRITERS`.
    """
    path = folder / f"{name}-{kind}"
    assert adata.X is None or np.dtype(adata.X.dtype).kind in "iuf"
    WRITERS[kind](adata, path)
    return path

"""What tests read back of files that were written."""

import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import scipy.sparse as sp

from raggedatlas.formats.copying import copy, read
from raggedatlas.formats.registry import open_sink, open_source


def dense(matrix: Any) -> Any:
    """Return a matrix of any form as an array."""
    return matrix.toarray() if sp.issparse(matrix) else np.asarray(matrix)


def read_anndata(path: str | Path) -> ad.AnnData:
    """Read a file as anndata does."""
    with warnings.catch_warnings(action="ignore"):
        return ad.read_h5ad(path) if str(path).endswith(".h5ad") else ad.read_zarr(path)


def read_source(path: str | Path, **options: Any) -> ad.AnnData:
    """Read a file of any format through its source."""
    source = open_source(path, **options)
    try:
        with warnings.catch_warnings(action="ignore"):
            return read(source)
    finally:
        source.close()


def read_element(path: str | Path, key: str, **options: Any) -> Any:
    """Read one element of a file of any format through its source."""
    source = open_source(path, **options)
    try:
        return source.element(key)
    finally:
        source.close()


def array_metadata(path: Path | str) -> dict[str, Any]:
    """Read the metadata of a TileDB array."""
    from raggedatlas.wings.cxg.tiledb_arrays import open_array

    with open_array(Path(path)) as array:
        return dict(array.meta.items())


def array_values(path: Path | str) -> Any:
    """Read the values of a TileDB array: those of its only attribute if that is anonymous, else all by name."""
    from raggedatlas.wings.cxg.tiledb_arrays import open_array

    with open_array(Path(path)) as array:
        read = array[:]
    return read[""] if isinstance(read, dict) and set(read) == {""} else read


def copy_with_losses(given: Any, path: Path, **options: Any) -> tuple[Path, Any]:
    """Write a CXG; return its path and what the sink reports as lost or changed."""
    sink = open_sink(path, **options)
    made = Path(copy(given, sink))
    return made, sink.losses  # type: ignore[attr-defined]

"""Loom files as a source, read into memory by anndata."""

from pathlib import Path

from raggedatlas.errors import MissingExtraError, SourceError
from raggedatlas.formats.anndata.source import read_object_parts
from raggedatlas.formats.composite_source import CompositeSource
from raggedatlas.formats.containers import readable
from raggedatlas.store.runtime import warnings_as

CELL_NAMES = ("CellID", "obs_names", "cell_names", "barcode")
FEATURE_NAMES = ("Gene", "var_names", "gene_names", "Accession")
"""Attributes that name cells and features; of several in a file the first counts, and the others become columns."""


def loom_source(path: str | Path) -> CompositeSource:
    """Open a loom file: its main matrix becomes X, transposed to cells by features, and its layers keep their names.

    Parameters
    ----------
    path : str or Path
        The file, which is read into memory at once.

    Raises
    ------
    MissingExtraError
        If loompy is not installed.
    SourceError
        If the file does not read, or lacks the groups of a loom file.
    """
    import h5py

    with readable(str(path), "its structure"), h5py.File(path) as file:
        lacking = sorted({"matrix", "row_attrs", "col_attrs"} - set(file))
        if lacking:
            raise SourceError(f"{path} is no loom file: it has no {', '.join(lacking)}.")
        names = [
            next((name for name in known if name in file[axis]), known[0])
            for axis, known in (("col_attrs", CELL_NAMES), ("row_attrs", FEATURE_NAMES))
        ]
        # anndata converts the matrix to float32 unless it is told another dtype.
        dtype = file["matrix"].dtype.name
    try:
        with warnings_as("ignore", FutureWarning):
            from anndata.io import read_loom

        # Deprecated since anndata 0.13, because loom files hold less than an AnnData.
        with readable(str(path), "its contents"), warnings_as("ignore", FutureWarning, "The function read_loom"):
            data = read_loom(str(path), X_name="", obs_names=names[0], var_names=names[1], dtype=dtype, validate=False)
    except ImportError as error:
        raise MissingExtraError(
            f"{path} is a loom file, which anndata reads with loompy ({error}); install it: pip install 'raggedatlas[loom]'."
        ) from error
    return CompositeSource(read_object_parts(data), name=Path(path).stem, uri=str(path), format="loom")

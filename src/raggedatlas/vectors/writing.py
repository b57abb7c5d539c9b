"""Writing a geometry store: staged beside its place, moved there when it is whole."""

import os

from raggedatlas.store.location import Location
from raggedatlas.vectors.geometry import Geometry

LAYOUTS = ("0.9", "0.7")


def write(
    geometry: Geometry,
    location: Location | str | os.PathLike[str],
    *,
    layout: str = "0.9",
    overwrite: bool = False,
    shards: bool = True,
    compression: str | None = None,
    compat: str | None = None,
) -> None:
    """Write a geometry store; other readers see nothing of it, or all of it.

    Parameters
    ----------
    geometry : Geometry
        What `make_geometry` or `VectorStore.load` gives.
    location : Location, str or path
        Where the store shall lie: a folder or an object-store prefix.
    layout : str
        ``"0.9"`` (one array for each family) or ``"0.7"`` (one array for each chunk, as seed 002 says).
    overwrite : bool
        Whether a store that is there is replaced.
    shards : bool
        Layout 0.9: many chunks in one file, or a file for each.
    compression : str or None
        ``"zstd"`` or ``"blosc"`` for vertices, links and attributes; None: none.
    compat : str or None
        ``"0.2"``: links as int64 and bytes spelled as the package zarr-vectors 0.2.0 reads them (layout 0.7).

    Raises
    ------
    DuplicateError
        If there is something already.
    SourceError, ValuesError
        If the geometry does not hold together; nothing is written then.
    MissingExtraError
        For Draco without its library.
    """
    raise AssertionError

"""Writing a geometry store: staged beside its place, moved there when it is whole."""

import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from raggedatlas.errors import DuplicateError
from raggedatlas.model.arguments import checked
from raggedatlas.store.location import Location
from raggedatlas.vectors import layout_07, layout_09
from raggedatlas.vectors.builder import check_choice
from raggedatlas.vectors.geometry import Geometry
from raggedatlas.vectors.geometry_checks import check_geometry
from raggedatlas.vectors.local_links import merge_local_links
from raggedatlas.vectors.metadata import root_json
from raggedatlas.vectors.publish import publish_files
from raggedatlas.vectors.zarr_nodes import COMPRESSORS, CellGridOptions, File, group_json

LAYOUTS = ("0.9", "0.7")


@checked
def write(
    geometry: Geometry,
    location: Location | str | os.PathLike[str],
    *,
    layout: str = "0.9",
    overwrite: bool = False,
    shards: bool = True,
    compression: str | None = "default",
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
        ``"zstd"``, ``"blosc"`` (zstd, shuffled) or ``"lz4"`` (LZ4 by Blosc, shuffled) for vertices, links and attributes; None: none.
        ``"default"``: in layout 0.9 ``"lz4"`` for the attributes of vertices without objects and none for the rest, in layout 0.7
        ``"blosc"``, as seed 002 §7.1 asks.
    compat : str or None
        ``"0.2"``: links as int64, the only type that the package zarr-vectors 0.2.0 reads (layout 0.7).

    Raises
    ------
    DuplicateError
        If there is something already.
    SourceError, ValuesError
        If the geometry does not hold together; nothing is written then.
    MissingExtraError
        For Draco without its library.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from raggedatlas.vectors.builder import make_geometry
    >>> from raggedatlas.vectors.reader import open_vectors
    >>> from raggedatlas.vectors.shapes import Shapes
    >>> folder = tempfile.mkdtemp() + "/points"
    >>> write(make_geometry(Shapes("point_cloud", np.array([[1.0, 2.0], [3.0, 4.0]]))), folder)
    >>> open_vectors(folder).read().n_vertices
    2
    """
    place = Location.of(location)
    check_choice("layout", layout, LAYOUTS)
    if compression is not None:
        check_choice("compression", compression, ("default", *COMPRESSORS))
    chosen = "blosc" if (layout, compression) == ("0.7", "default") else compression
    check_geometry(geometry)
    if compat is not None:
        check_choice("compat", compat, ("0.2",))
        geometry = _widen_links(geometry)
    if any(level.encoding == "draco" for level in geometry.levels) and layout == "0.7":
        chosen = None
    if not overwrite and place.exists():
        raise DuplicateError(
            f"There is something at {place.uri} already; choose another place, or pass overwrite=True."
        )
    publish_files(place, _files(geometry, layout, place.name, (shards, chosen)), overwrite=overwrite)


def _files(geometry: Geometry, layout: str, name: str, options: tuple[bool, str | None]) -> Iterator[File]:
    """Yield all files of a store."""
    shards, compression = options
    if layout == "0.9":
        geometry = replace(geometry, levels=tuple(merge_local_links(level) for level in geometry.levels))
    yield group_json("", root_json(geometry, layout, name))
    none = np.zeros(0, np.int64)
    for k in range(len(geometry.levels)):
        if layout == "0.9":
            yield from layout_09.level_files(geometry, k, CellGridOptions(none, none, shards, compression))
        else:
            yield from layout_07.level_files(geometry, k, compression)


def _widen_links(geometry: Geometry) -> Geometry:
    """Return the geometry with links as int64, the only type that zarr-vectors 0.2.0 reads."""
    levels = [
        level
        if level.links is None
        else replace(level, links=replace(level.links, rows=level.links.rows.astype(np.int64)))
        for level in geometry.levels
    ]
    return replace(geometry, levels=tuple(levels))

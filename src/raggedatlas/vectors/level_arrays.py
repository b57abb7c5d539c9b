"""The arrays of a level that have one piece for each chunk, as bytes: the same in both layouts (seed 002 §7.1-7.11)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.vectors.blobs import Blobs, to_bytes
from raggedatlas.vectors.fragment_index import encode_fragments
from raggedatlas.vectors.geometry import Level
from raggedatlas.vectors.shapes import Attribute


@dataclass(frozen=True)
class ArrayData:
    """One array of a level, a byte string for each chunk.

    Parameters
    ----------
    path : str
        Below the level, e.g. ``vertex_attributes/intensity``.
    blobs : Blobs
        One for each chunk of the level.
    attributes : dict
        Its block, in the spelling of layout 0.7.
    dtype : numpy dtype or None
        Of the values; None for bytes of our own framing.
    columns : int or None
        Values in a row; None: rows are single values.
    """

    path: str
    blobs: Blobs
    attributes: dict[str, Any]
    dtype: np.dtype[Any] | None = None
    columns: int | None = None


def attribute_metadata(kind: str, name: str, attribute: Attribute, shape: list[int]) -> dict[str, Any]:
    """Return the attributes of an attribute's array."""
    block: dict[str, Any] = {
        "zv_array": kind,
        "name": name,
        "dtype": _type_name(attribute.values.dtype),
        "shape": shape,
    }
    if attribute.channels:
        block["channel_names"] = list(attribute.channels)
    return block | dict(attribute.metadata)


def _type_name(dtype: np.dtype[Any]) -> str:
    """Name an element type as ``dtype`` does."""
    return "string" if dtype.kind in "UTO" else str(dtype.name)


def encode_rows(values: NDArray[Any], bounds: NDArray[np.int64]) -> Blobs:
    """Return rows as bytes, cut by chunk."""
    size = values.dtype.itemsize * int(np.prod(values.shape[1:], dtype=np.int64))
    return Blobs(to_bytes(values), bounds * size)


def vertex_array(level: Level, width: int | None) -> ArrayData:
    """Return the positions, raw or as Draco; a Draco cell of a mesh has its faces in it."""
    block = {"zv_array": "vertices", "dtype": level.positions.dtype.name, "encoding": level.encoding}
    if level.encoding == "draco":
        from raggedatlas.vectors.draco import encode_cells

        return ArrayData("vertices", encode_cells(level, width), block)
    return ArrayData(
        "vertices",
        encode_rows(level.positions, level.bounds),
        block,
        level.positions.dtype,
        level.positions.shape[1],
    )


def chunk_arrays(level: Level) -> Iterator[ArrayData]:
    """Yield every array of a level that has one piece for each chunk; `path` is as in layout 0.7."""
    yield vertex_array(level, None if level.links is None else level.links.width)
    for name, attribute in level.vertex_attributes.items():
        yield _attribute_array(f"vertex_attributes/{name}", ("attribute", name, attribute), level.bounds)
    if level.fragments is not None:
        yield ArrayData("vertex_fragments", encode_fragments(level.fragments), {"zv_array": "vertex_fragments"})
        for name, attribute in level.fragment_attributes.items():
            path = f"fragment_attributes/{name}"
            yield _attribute_array(path, ("fragment_attribute", name, attribute), level.fragments.bounds)
    links = level.links
    if links is None:
        return
    if level.encoding != "draco":
        block = {
            "zv_array": "links",
            "level_delta": 0,
            "link_width": links.width,
            "num_links": len(links.rows),
            "dtype": links.rows.dtype.name,
        }
        yield ArrayData("links/0", encode_rows(links.rows, links.bounds), block, links.rows.dtype, links.width)
    if links.fragments is not None:
        yield ArrayData("link_fragments", encode_fragments(links.fragments), {"zv_array": "link_fragments"})
    for name, attribute in links.attributes.items():
        family = _attribute_array(f"link_attributes/{name}/0", ("link_attribute", name, attribute), links.bounds)
        family.attributes["level_delta"] = 0
        yield family


def _attribute_array(path: str, described: tuple[str, str, Attribute], bounds: NDArray[np.int64]) -> ArrayData:
    """Return an attribute cut by chunk."""
    kind, name, attribute = described
    values = attribute.values
    if values.dtype.kind not in "iuf":
        raise SourceError(
            f"The attribute {path!r} is of type {values.dtype}; numbers are stored beside vertices, fragments and links. "
            "Store codes, with the categories in its metadata."
        )
    columns = None if values.ndim == 1 else int(values.shape[1])
    block = attribute_metadata(kind, name, attribute, [] if columns is None else [columns])
    return ArrayData(path, encode_rows(values, bounds), block, values.dtype, columns)


def present_families(level: Level) -> list[str]:
    """Return the names of the families that a level has, for ``arrays_present``."""
    has = {
        "vertices": True,
        "vertex_fragments": level.fragments is not None,
        "vertex_attributes": bool(level.vertex_attributes),
        "fragment_attributes": bool(level.fragment_attributes),
        "links": level.links is not None or bool(level.cross_links),
        "link_fragments": level.links is not None and level.links.fragments is not None,
        "link_attributes": level.links is not None and bool(level.links.attributes),
        "object_index": level.objects is not None,
        "object_attributes": bool(level.object_attributes),
        "groups": level.groups is not None,
        "group_attributes": level.groups is not None and bool(level.groups.attributes),
    }
    return [name for name, there in has.items() if there]

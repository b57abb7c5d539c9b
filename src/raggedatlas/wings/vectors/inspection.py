"""Summary of a geometry store: version, type, axes, bounds, levels, arrays, counts and sizes, without reading values."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from raggedatlas.errors import AtlasError, NotFoundError
from raggedatlas.formats.containers import HDF5_ENDINGS
from raggedatlas.model.arguments import checked
from raggedatlas.model.reports import Element, Inspection
from raggedatlas.store.location import Address, AnyPath, Location
from raggedatlas.wings.vectors.geometry import parse_root
from raggedatlas.wings.vectors.storage.zarr_reader import StoreFiles, codec_names, node_attributes

# What damaged metadata may raise while it is parsed; the element then shows the message.
_UNREADABLE = (AtlasError, KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)


@dataclass(frozen=True, slots=True)
class VectorInspection(Inspection):
    """Result of `inspect` for a geometry store; prints as a tree and renders as one in a notebook.

    `store` is ``"zarr-vectors"`` with the version.
    """

    layout: str = ""  # "0.7" or "0.9"
    types: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()  # with their units
    bounds: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())  # minimum and maximum coordinates
    capabilities: tuple[str, ...] = ()  # tokens of `format_capabilities`


@checked
def inspect(location: Address) -> VectorInspection:
    """Summarize a geometry store without reading its values.

    Parameters
    ----------
    location : Location, str or path
        The store.

    Returns
    -------
    VectorInspection
        A tree of levels and arrays; unreadable ones are included with the reason.

    Raises
    ------
    NotFoundError
        If the store does not exist.
    SourceError
        If it is not a geometry store, or of an unsupported version.
    CorruptError
        If its root metadata is inconsistent.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from raggedatlas.wings.vectors.builder import make_geometry
    >>> from raggedatlas.wings.vectors.shapes import Shapes
    >>> from raggedatlas.wings.vectors.writer import write
    >>> folder = tempfile.mkdtemp() + "/points"
    >>> write(make_geometry(Shapes("point_cloud", np.zeros((3, 2), "f4"))), folder)
    >>> found = inspect(folder)
    >>> found.layout, found.types, [child.name for child in found.root.children]
    ('0.9', ('point_cloud',), ['0'])
    """
    place = Location.of(location)
    files = StoreFiles(place)
    node = files.node("")
    if node is None:
        raise NotFoundError(f"There is no geometry store at {place.uri}: it has no zarr.json.")
    root = parse_root(node_attributes(node), place.uri)
    geometry = root.geometry
    axes = " ".join(axis.name if axis.unit is None else f"{axis.name}/{axis.unit}" for axis in geometry.axes)
    words = [", ".join(geometry.types) or "no type", f"{geometry.n_dims} axes ({axes})"]
    for title, edges in (("chunks", geometry.chunk_shape), ("bins", geometry.bin_shape)):
        words += [] if edges is None else [f"{title} {' x '.join(f'{edge:g}' for edge in edges)}"]
    words.append("bounds " + " to ".join(f"({', '.join(f'{value:g}' for value in end)})" for end in geometry.bounds))
    words.append(f"links {geometry.links_convention}")
    if geometry.index_convention != "standard":
        words.append(f"ids by {geometry.index_convention}")
    if geometry.capabilities:
        words.append("capabilities " + ", ".join(geometry.capabilities))
    tree = Element("", "", ", ".join(words), "group", children=tuple(_level(files, str(n)) for n in files.levels()))
    # The bytes of the files below every folder, by path; that of the store is empty.
    sizes = Counter[str]()
    for key, n_bytes, _ in place.list_objects():
        folder = key
        while folder:
            folder = folder.rpartition("/")[0]
            sizes[folder] += n_bytes
    top = _with_sizes(tree, sizes)
    return VectorInspection(
        path=place.uri,
        store=f"zarr-vectors {root.version}",
        n_bytes=top.n_stored,
        root=replace(top, name=place.name),
        layout=root.layout,
        types=geometry.types,
        axes=tuple(axis.name if axis.unit is None else f"{axis.name} ({axis.unit})" for axis in geometry.axes),
        bounds=geometry.bounds,
        capabilities=geometry.capabilities,
    )


def _level(files: StoreFiles, name: str) -> Element:
    """Return the element of a level and its arrays."""
    try:
        node = files.node(name)
        facts = {} if node is None else dict(node_attributes(node).get("zarr_vectors_level") or {})
        words = [f"level, {int(facts.get('vertex_count') or 0):,} vertices"]
        words += [f"{key} {facts[key]}" for key in ("bin_shape", "parent_level", "coarsening_method") if facts.get(key)]
        children = tuple(_family(files, f"{name}/{own}") for own in files.children(name))
    except _UNREADABLE as error:
        return Element(name, "", "level", "array", fault=str(error))
    return Element(name, "", ", ".join(words), "group", children=children)


def _family(files: StoreFiles, path: str) -> Element:
    """Return the element of an array or a group of arrays."""
    try:
        node = files.node(path)
        if node is None:
            return Element(path, "", "folder", "array", fault="it has no zarr.json")
        block = node_attributes(node)
        if node["node_type"] == "array":
            listed = block.get("nonempty_chunks")
            codecs = node.get("codecs") or []
            first = codecs[0] if codecs else {}
            sharded = isinstance(first, dict) and first.get("name") == "sharding_indexed"
            names = codec_names(first["configuration"]["codecs"] if sharded else codecs)
            summary = _array_summary(block, None if listed is None else len(listed)) or "array"
            # The shape of a grid of cells says nothing about the data.
            shape = None if listed is not None else tuple(int(size) for size in node["shape"])
            dtype = str(block.get("dtype") or ("" if listed is not None else node.get("data_type", "")))
            summary += ", sharded" if sharded else ""
            return Element(path, "", summary, "array", shape, dtype, compression=" + ".join(names[1:]))
        inner = files.children(path)
        # Keys have two axes or more, so the dot tells them from deltas of links, such as 0 or -1.
        chunks = [own for own in inner if own.lstrip("-")[:1].isdigit() and "." in own]
        # These arrays are parts of one element, and are not listed.
        is_index_folder = set(inner) <= {"data", "offsets", "manifests", "object_ids", "present_mask"}
        children = () if chunks or is_index_folder else tuple(_family(files, f"{path}/{own}") for own in inner)
        summary = _array_summary(block, len(chunks) if chunks else None) or "group"
    except _UNREADABLE as error:
        return Element(path, "", "array", "array", fault=str(error))
    return Element(path, "", summary, "group", dtype=str(block.get("dtype", "")), children=children)


def _array_summary(block: dict[str, Any], n_chunks: int | None) -> str:
    """Return a summary of an array's metadata."""
    words = [str(block.get("zv_array", block.get("zvf_array", "")))]
    if n_chunks is not None:
        words.append(f"{n_chunks:,} chunks")
    for key, title in (("num_objects", "objects"), ("num_groups", "groups"), ("num_links", "links")):
        if isinstance(block.get(key), int):
            words.append(f"{block[key]:,} {title}")
    if block.get("encoding") in {"draco", "dictionary"}:
        words.append(str(block["encoding"]))
    if block.get("channel_names"):
        words.append("channels " + ", ".join(map(str, block["channel_names"])))
    return ", ".join(word for word in words if word)


def _with_sizes(element: Element, sizes: Mapping[str, int]) -> Element:
    """Return an element and those below it with their names, kinds and the bytes of the files below their paths."""
    path = element.path
    return replace(
        element,
        name=path.rpartition("/")[2],
        kind="group" if element.children else "array",
        n_stored=sizes[path],
        children=tuple(_with_sizes(child, sizes) for child in element.children),
    )


def is_store_path(path: AnyPath) -> bool:
    """Return whether a path is a geometry store; asks no server where an ending tells that it is none (web servers have none)."""
    of_cells = isinstance(path, Location) and (path.is_web or path.suffix in (*HDF5_ENDINGS, ".cxg"))
    return not of_cells and is_geometry_store(path)


def is_geometry_store(place: Address) -> bool:
    """Return whether a folder or an object-store prefix holds a geometry store, including one with damaged metadata.

    Raises `StoreError` if an object store cannot be accessed.
    """
    location = Location.of(place)
    try:
        # Searched as bytes, because damaged metadata may not parse.
        return b'"zarr_vectors"' in location.read_bytes("zarr.json")
    except NotFoundError:
        return False
    except (AtlasError, OSError):
        if location.is_local:
            return False
        raise

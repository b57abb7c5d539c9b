"""Attributes of the root and level groups, as JSON (seed 002 chapter 8)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, SourceError
from raggedatlas.vectors.geometry import (
    CAPABILITIES,
    CONVENTIONS,
    CROSS_CHUNK,
    CROSS_LEVEL,
    INDEX_CONVENTIONS,
    Axis,
    Geometry,
    Level,
)
from raggedatlas.vectors.grids import bins_per_chunk, check_edges

VERSIONS = {"0.7": "0.7.0", "0.9": "0.9.2"}
"""Value of ``zv_version`` in each layout."""

# Keys with a field of their own in `Geometry`; all others are preserved in its `metadata`.
_OWN_KEYS = (
    *("zv_version", "chunk_shape", "bounds", "geometry_types", "links_convention", "object_index_convention"),
    *("cross_chunk_strategy", "base_bin_shape", "cross_level_depth", "cross_level_storage", "format_capabilities"),
)
_OWN_LEVEL_KEYS = ("level", "vertex_count", "arrays_present", "fragments_tile")


def root_json(geometry: Geometry, layout: str, name: str) -> dict[str, Any]:
    """Return the attributes of the root group."""
    facts: dict[str, Any] = {
        # First, so that no preserved key replaces one of those below.
        **geometry.metadata,
        "zv_version": VERSIONS[layout],
        "format_capabilities": list(geometry.capabilities),
        "chunk_shape": list(geometry.chunk_shape),
        "bounds": [list(end) for end in geometry.bounds],
        "geometry_types": list(geometry.types),
        "links_convention": geometry.links_convention,
        "object_index_convention": geometry.index_convention,
        "cross_chunk_strategy": geometry.cross_chunk,
        "cross_level_depth": geometry.cross_level_depth,
        "cross_level_storage": geometry.cross_level_storage,
    }
    if geometry.bin_shape is not None:
        facts["base_bin_shape"] = list(geometry.bin_shape)
    axes = [
        {"name": axis.name, "type": axis.type} | ({} if axis.unit is None else {"unit": axis.unit})
        for axis in geometry.axes
    ]
    scales = {
        "version": "0.4",
        "name": name,
        "axes": axes,
        "datasets": [_dataset_json(geometry, k) for k in range(len(geometry.levels))],
        "metadata": {"format": "zarr_vectors"},
    }
    return {"zarr_vectors": facts, "multiscales": [scales]}


def _dataset_json(geometry: Geometry, k: int) -> dict[str, Any]:
    """Return the entry of one level in ``multiscales``: its bins, as other implementations write it (no coordinate transform)."""
    metadata = geometry.levels[k].metadata
    base = geometry.bin_shape or geometry.chunk_shape
    bins = metadata.get("bin_shape") or base
    ratio = metadata.get("bin_ratio") or [1] * geometry.n_dims
    lead = len(geometry.axes) - len(bins)
    transforms = [
        {"type": "scale", "scale": [1.0] * lead + [float(times) for times in ratio]},
        {"type": "translation", "translation": [0.0] * lead + [float(edge) / 2 for edge in bins]},
    ]
    return {"path": str(k), "coordinateTransformations": transforms}


def level_json(level: Level, k: int, arrays: list[str]) -> dict[str, Any]:
    """Return the attributes of a level group, without those that the layout adds."""
    parent = level.metadata.get("parent_level")
    facts: dict[str, Any] = {
        "object_sparsity": 1.0,
        "coarsening_method": "none",
        **level.metadata,
        "level": k,
        "vertex_count": level.n_vertices,
        "parent_level": None if k == 0 else int(k - 1 if parent is None else parent),
        "arrays_present": arrays,
    }
    return {"zarr_vectors_level": facts}


@dataclass(frozen=True)
class Root:
    """Contents of the root attributes: a `Geometry` without levels, the level names and the layout.

    Parameters
    ----------
    geometry : Geometry
        Without levels.
    layout : str
        ``"0.7"`` or ``"0.9"``, from ``zv_version``.
    version : str
        ``zv_version``.
    """

    geometry: Geometry
    layout: str
    version: str


def parse_root(attributes: Mapping[str, Any], where: str) -> Root:
    """Parse the attributes of a root group.

    Raises
    ------
    SourceError
        If it is not a zarr-vectors store, has an unsupported version, or requires an unknown capability.
    CorruptError
        If a required key is missing or has an invalid value.
    """
    facts = attributes.get("zarr_vectors")
    if not isinstance(facts, Mapping):
        raise SourceError(f"{where} is not a geometry store: its root has no 'zarr_vectors' attributes.")
    for key in ("zv_version", "chunk_shape", "bounds", "geometry_types"):
        if key not in facts:
            raise CorruptError(f"{where}: the root has no {key!r}.")
    version = str(facts["zv_version"])
    # The third part of the version is ignored: 0.9.x is layout 0.9.
    layout = ".".join(version.split(".")[:2])
    if layout not in VERSIONS:
        raise SourceError(
            f"{where} is of zarr-vectors {version}; supported are 0.7 and 0.9. Write it again from its source in one of these."
        )
    # Unknown tokens of `format_capabilities` are tolerated (V099), so only required ones are refused.
    unknown = sorted(set(facts.get("required_capabilities") or ()) - set(CAPABILITIES))
    if unknown:
        raise SourceError(f"{where} requires {unknown[0]!r}, which is not supported; a newer raggedatlas may read it.")
    axes = _parse_axes(attributes, len(facts["chunk_shape"]), where)
    geometry = Geometry(
        types=tuple(str(kind) for kind in facts["geometry_types"]),
        axes=axes,
        chunk_shape=_parse_numbers(facts["chunk_shape"], where),
        bounds=_parse_bounds(facts["bounds"], where),
        levels=(),
        bin_shape=None if facts.get("base_bin_shape") is None else _parse_numbers(facts["base_bin_shape"], where),
        links_convention=_parse_choice(facts, "links_convention", "implicit_sequential", CONVENTIONS, where),
        index_convention=_parse_choice(facts, "object_index_convention", "standard", INDEX_CONVENTIONS, where),
        cross_chunk=_parse_choice(facts, "cross_chunk_strategy", "explicit_links", CROSS_CHUNK, where),
        cross_level_storage=_parse_choice(facts, "cross_level_storage", "explicit", CROSS_LEVEL, where),
        cross_level_depth=int(facts.get("cross_level_depth", 1)),
        capabilities=tuple(str(token) for token in facts.get("format_capabilities") or ()),
        metadata={key: value for key, value in facts.items() if key not in _OWN_KEYS},
    )
    n_dims = len(geometry.chunk_shape)
    if len(geometry.bounds[0]) != n_dims or len(geometry.bounds[1]) != n_dims or len(geometry.axes) != n_dims:
        raise CorruptError(f"{where}: chunk_shape, bounds and axes do not have the same number of axes.")
    check_edges(geometry.chunk_shape, n_dims, f"{where}: chunk_shape")
    if geometry.bin_shape is not None:
        bins_per_chunk(geometry.chunk_shape, geometry.bin_shape)
    return Root(geometry, layout, version)


def parse_level(attributes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Parse the attributes of a level group, without keys that follow from the arrays."""
    facts = attributes.get("zarr_vectors_level")
    if not isinstance(facts, Mapping):
        raise CorruptError(f"{where} has no 'zarr_vectors_level' attributes.")
    return dict(facts)


def extra_level_metadata(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a level's metadata without the keys that follow from its arrays."""
    return {key: value for key, value in facts.items() if key not in _OWN_LEVEL_KEYS}


def level_chunk_shape(geometry: Geometry, metadata: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the edge lengths of a level's chunks."""
    own = metadata.get("chunk_shape")
    return geometry.chunk_shape if own is None else tuple(float(edge) for edge in own)


def level_scale(geometry: Geometry, metadata: Mapping[str, Any], n_parts: int) -> NDArray[np.int64]:
    """Return how many root chunks a chunk of this level spans, per key part; 1 for parts that are not axes."""
    shape = level_chunk_shape(geometry, metadata)
    # A multiple of the root's chunk (V100), except for rounding of the stored edges.
    scale = np.rint(np.asarray(shape) / np.asarray(geometry.chunk_shape)).astype(np.int64)
    lead = np.ones(n_parts - len(scale), np.int64)
    return np.concatenate([lead, scale])


def with_levels(root: Root, levels: list[Level]) -> Geometry:
    """Return the geometry of a root with its levels."""
    return replace(root.geometry, levels=tuple(levels))


def _parse_axes(attributes: Mapping[str, Any], n_dims: int, where: str) -> tuple[Axis, ...]:
    """Parse the space axes; x, y, z, w if none are named."""
    scales = attributes.get("multiscales") or [{}]
    try:
        axes = [
            Axis(str(axis["name"]), axis.get("unit"), str(axis.get("type", "space")))
            for axis in scales[0].get("axes", [])
        ]
    except (TypeError, KeyError, AttributeError):
        raise CorruptError(f"{where}: the axes of 'multiscales' cannot be parsed.") from None
    space = tuple(axis for axis in axes if axis.type == "space")
    return space or tuple(Axis(f"axis{i}" if i > 3 else "xyzw"[i]) for i in range(n_dims))


def _parse_numbers(values: Any, where: str) -> tuple[float, ...]:  # noqa: ANN401 - any JSON value
    try:
        return tuple(float(value) for value in values)
    except (TypeError, ValueError):
        raise CorruptError(f"{where}: {values!r} is not a list of numbers.") from None


def _parse_bounds(values: Any, where: str) -> tuple[tuple[float, ...], tuple[float, ...]]:  # noqa: ANN401 - any JSON value
    if not isinstance(values, list) or len(values) != 2:
        raise CorruptError(f"{where}: bounds are {values!r}; expected minimum and maximum coordinates.")
    return _parse_numbers(values[0], where), _parse_numbers(values[1], where)


def _parse_choice(facts: Mapping[str, Any], key: str, default: str, known: tuple[str, ...], where: str) -> str:
    """Parse a value from a fixed vocabulary."""
    value = facts.get(key) or default
    if value not in known:
        raise CorruptError(f"{where}: {key} is {value!r}; expected one of {', '.join(known)}.")
    return str(value)

"""Build a geometry store in memory: chunks, fragments, object index, cross-chunk links and levels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError, ValuesError
from raggedatlas.model.arguments import checked
from raggedatlas.wings.vectors.chunking import (
    ChunkedLevel,
    Grid,
    chunk_shapes,
    find_infinite,
    omits_parent_links,
    row_blocks,
)
from raggedatlas.wings.vectors.geometry import (
    CROSS_CHUNK,
    CROSS_LEVEL,
    INDEX_CONVENTIONS,
    METHODS,
    Axis,
    CrossLinks,
    Geometry,
    Level,
    bins_per_chunk,
    check_edges,
    default_axes,
)
from raggedatlas.wings.vectors.shapes import SEQUENTIAL, Shapes, counts_to_offsets, pad_attribute

_VERTICES_PER_CHUNK = 16_384


@dataclass(frozen=True)
class CoarseLevel:
    """The shapes of one coarser level, as input of `make_geometry`.

    Parameters
    ----------
    shapes : Shapes
        Fewer vertices of the same objects. `ids` are those of the finer level; dropped objects may be omitted (they
        remain in the index as empty objects).
    bin_ratio : tuple of D ints
        Number of level 0 bins that one bin of this level spans, per axis.
    chunk_ratio : tuple of D ints or None
        Number of level 0 chunks that one chunk of this level spans, per axis; None: `bin_ratio`, or 1 if the grid has bins
        (``ChunkingOptions.bin_shape``).
    parents : (N_finer,) int64 or None
        For each vertex of the next finer level, in the order of its shapes, the row in `shapes` that represents it, or -1;
        only needed for links across levels.
    method : str
        ``"per_object"``, ``"manual"`` or ``"none"``.
    sparsity : float
        Fraction of objects kept, in (0, 1].
    """

    shapes: Shapes
    bin_ratio: tuple[int, ...]
    chunk_ratio: tuple[int, ...] | None = None
    parents: NDArray[np.int64] | None = None
    method: str = "per_object"
    sparsity: float = 1.0


@checked
@dataclass(frozen=True)
class ChunkingOptions:
    """Chunking options of `make_geometry`.

    Parameters
    ----------
    chunk_shape : tuple of D floats or None
        Edge lengths of a chunk; None: cubes of about 16,384 vertices.
    bin_shape : tuple of D floats or None
        Edge lengths of a bin, a divisor of those of a chunk: points without objects are sorted by bin. None: one bin.
    axes : tuple of Axis or None
        None: ``x``, ``y``, ``z``, ``w``, ... without units.
    bounds : ((float, ...), (float, ...)) or None
        Minimum and maximum coordinates, which every vertex must respect; None: those of the vertices.
    boundary : str
        ``"explicit_links"`` (store links across chunks), ``"boundary_deduplication"`` (repeat the far end in the near
        chunk) or ``"both"``.
    cross_level_storage : str
        ``"none"``, ``"implicit"`` (from finer to coarser) or ``"explicit"`` (both ways), where `CoarseLevel.parents` are given.
    encoding : str
        ``"raw"``, or ``"draco"`` for meshes (extra ``draco``; positions are quantised).
    index_convention : str
        ``"standard"``, or ``"identity"``: one chunk, ids 0 to B - 1 and no object index.
    """

    chunk_shape: tuple[float, ...] | None = None
    bin_shape: tuple[float, ...] | None = None
    axes: tuple[Axis, ...] | None = None
    bounds: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    boundary: str = "explicit_links"
    cross_level_storage: str = "none"
    encoding: str = "raw"
    index_convention: str = "standard"


@checked
def make_geometry(
    shapes: Shapes,
    cutting: ChunkingOptions = ChunkingOptions(),
    *,
    coarser: Sequence[CoarseLevel] = (),
    metadata: dict[str, Any] | None = None,
) -> Geometry:
    """Divide shapes into chunks, ready for `raggedatlas.wings.vectors.writer.write`.

    Parameters
    ----------
    shapes : Shapes
        Shapes of the finest level.
    cutting : ChunkingOptions
        Chunks, bins, axes, bounds and boundary policy.
    coarser : sequence of CoarseLevel
        Coarser levels, finest first.
    metadata : dict or None
        Additional keys of the root metadata, e.g. ``crs``.

    Returns
    -------
    Geometry
        Links with an implicit convention are not stored; if there are objects, an int64 fragment attribute ``object_id`` names
        the object of each fragment.

    Raises
    ------
    SourceError
        If links are out of range, lengths do not match, bins do not divide chunks, or something that the kind requires is missing.
    ValuesError
        If a position is NaN, infinite or outside the bounds.

    References
    ----------
    zarr-vectors §7.1 (chunks), §7.3 (vertex fragments), §7.5 and §7.7 (links), §7.6 (object index).

    Examples
    --------
    >>> import numpy as np
    >>> points = Shapes("point_cloud", np.array([[0.5, 0.5], [1.5, -0.5]], np.float32))
    >>> make_geometry(points, ChunkingOptions(chunk_shape=(1, 1))).levels[0].chunks.tolist()
    [[0, 0], [1, -1]]
    """
    _check(shapes, cutting)
    axes = cutting.axes or default_axes(shapes.n_dims)
    chunk_shape = tuple(float(edge) for edge in cutting.chunk_shape or default_chunk_shape(shapes.positions))
    check_edges(chunk_shape, shapes.n_dims, "chunk_shape")
    bounds = _resolve_bounds(shapes, cutting.bounds)
    identity = cutting.index_convention == "identity"
    grid = Grid(chunk_shape, cutting.bin_shape, cutting.boundary, identity)
    cuts = [chunk_shapes(shapes, grid)]
    levels = [replace(cuts[0].level, encoding=cutting.encoding)]
    for step in coarser:
        _check(step.shapes, cutting)
        number = len(levels)
        n_dims = step.shapes.n_dims
        if len(step.bin_ratio) != n_dims or min(step.bin_ratio) < 1:
            raise SourceError(f"Level {number}: bin_ratio is {step.bin_ratio}; expected {n_dims} positive integers.")
        # Without bins a chunk is one bin, so chunks have to grow with the bins.
        ratio = step.chunk_ratio or (step.bin_ratio if grid.bin_shape is None else (1,) * n_dims)
        if len(ratio) != n_dims or min(ratio) < 1:
            raise SourceError(f"Level {number}: chunk_ratio is {ratio}; expected {n_dims} positive integers.")
        base = grid.bin_shape or grid.chunk_shape
        bins = tuple(float(edge) * times for edge, times in zip(base, step.bin_ratio, strict=True))
        chunks = tuple(float(edge) * times for edge, times in zip(grid.chunk_shape, ratio, strict=True))
        # Called for its error: bins of every level must divide its chunks (V100).
        bins_per_chunk(chunks, bins)
        check_choice("method", step.method, METHODS)
        if not 0 < step.sparsity <= 1:
            raise SourceError(f"sparsity is {step.sparsity}; expected a fraction in (0, 1].")
        facts = {
            "bin_shape": list(bins),
            "bin_ratio": [int(times) for times in step.bin_ratio],
            "chunk_shape": list(chunks),
            "coarsening_method": step.method,
            "object_sparsity": float(step.sparsity),
        }
        cuts.append(chunk_shapes(step.shapes, replace(grid, chunk_shape=chunks, bin_shape=bins)))
        levels.append(_with_all_objects(replace(cuts[-1].level, metadata=facts), levels[0]))
    levels = _add_cross_level_links(levels, cuts, coarser, cutting.cross_level_storage)
    convention = "explicit" if shapes.kind in ("graph", "mesh", "skeleton") else "implicit_sequential"
    if omits_parent_links(shapes, grid):
        convention = "implicit_sequential_with_branches"
    tokens = {"multiscale_links": any(links.delta for level in levels for links in level.cross_links)}
    tokens["preserved_object_ids"] = len(levels) > 1 and shapes.ids is not None
    return Geometry(
        types=(shapes.kind,),
        axes=axes,
        chunk_shape=chunk_shape,
        bounds=bounds,
        levels=tuple(levels),
        bin_shape=None if cutting.bin_shape is None else tuple(float(edge) for edge in cutting.bin_shape),
        links_convention=convention,
        index_convention=cutting.index_convention,
        cross_chunk=cutting.boundary,
        cross_level_storage=cutting.cross_level_storage,
        cross_level_depth=1 if tokens["multiscale_links"] else 0,
        capabilities=tuple(name for name, is_so in tokens.items() if is_so),
        metadata=dict(metadata or {}),
    )


def default_chunk_shape(positions: NDArray[Any]) -> tuple[float, ...]:
    """Return the edge lengths of cubes that hold about 16,384 evenly spaced vertices each."""
    n_dims = int(positions.shape[1])
    if not len(positions):
        return (1.0,) * n_dims
    # Converted before the subtraction, because the span of integers may exceed their dtype.
    span = positions.max(axis=0).astype(np.float64) - positions.min(axis=0).astype(np.float64)
    wide = span[span > 0]
    if not wide.size:
        return (1.0,) * n_dims
    # Geometric mean of the spans above 0, by logarithms, because their product may overflow.
    edge = float(np.exp(np.log(wide).mean()) * (_VERTICES_PER_CHUNK / len(positions)) ** (1 / len(wide)))
    return (min(edge, float(wide.max())),) * n_dims


def _check(shapes: Shapes, cutting: ChunkingOptions) -> None:
    """Validate shapes and chunking options."""
    if shapes.n_dims < 2:
        raise SourceError(f"Positions have {shapes.n_dims} coordinates; expected 2 or more.")
    check_choice("boundary", cutting.boundary, CROSS_CHUNK)
    check_choice("cross_level_storage", cutting.cross_level_storage, CROSS_LEVEL)
    check_choice("index_convention", cutting.index_convention, INDEX_CONVENTIONS)
    check_choice("encoding", cutting.encoding, ("raw", "draco"))
    if cutting.encoding == "draco" and (shapes.kind != "mesh" or shapes.n_dims != 3):
        raise SourceError(
            f"Draco encodes meshes with three axes; these are {shapes.kind} of {shapes.n_dims}. Use 'raw'."
        )
    row = find_infinite(shapes.positions)[0]
    if row is not None:
        raise ValuesError(f"Vertex {row} is at {shapes.positions[row].tolist()}; positions must be finite numbers.")
    links, kind = shapes.links, shapes.kind
    if links is None:
        if kind in ("graph", "mesh", "skeleton"):
            raise SourceError(f"A {kind} needs links; pass an empty array if there are none.")
    elif kind in (*SEQUENTIAL, "point_cloud"):
        raise SourceError(f"A {kind} has no links of its own; omit them, or write a graph.")
    else:
        width = links.shape[1]
        if (kind == "mesh") != (width >= 3) or (kind == "skeleton" and width != 2):
            expected = "3 or more" if kind == "mesh" else "2"
            raise SourceError(f"A {kind} has links with {width} ends; expected {expected}.")
        bad = ((links < 0) | (links >= shapes.n_vertices)).any(axis=1)
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise SourceError(
                f"Link {row} refers to vertices {links[row].tolist()}; there are {shapes.n_vertices}, counted from 0."
            )
        # Readers give a child that has a stored link no implicit parent, so a child can only have one parent.
        if kind == "skeleton" and len(np.unique(links[:, 0])) != len(links):
            raise SourceError(
                "A skeleton vertex has two parents; links are (child, parent). Write a graph if the shapes are not trees."
            )
    if shapes.groups is not None and shapes.ids is not None:
        stray = np.setdiff1d(shapes.groups.ids, shapes.ids)
        if stray.size:
            raise SourceError(f"A group refers to object {stray[0]}, which does not exist.")


def _resolve_bounds(shapes: Shapes, given: tuple[Any, Any] | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the given bounds, or those of the vertices; refuse vertices outside the given bounds."""
    positions = shapes.positions
    if given is None:
        if not len(positions):
            return (0.0,) * shapes.n_dims, (0.0,) * shapes.n_dims
        columns = positions.T  # NumPy reduces a contiguous column faster than an axis
        return tuple(float(x.min()) for x in columns), tuple(float(x.max()) for x in columns)
    try:
        low, high = (tuple(float(x) for x in corner) for corner in given)
    except (TypeError, ValueError) as error:
        raise SourceError(
            f"bounds are {given!r:.200}; expected a pair of corners: minimum and maximum coordinates."
        ) from error
    if len(low) != shapes.n_dims or len(high) != shapes.n_dims or any(a > b for a, b in zip(low, high, strict=True)):
        raise SourceError(f"bounds are {given}; expected minimum and maximum coordinates on {shapes.n_dims} axes.")
    for rows in row_blocks(len(positions)):
        outside = ((positions[rows] < np.asarray(low)) | (positions[rows] > np.asarray(high))).any(axis=1)
        if outside.any():
            row = rows.start + int(np.flatnonzero(outside)[0])
            raise ValuesError(f"Vertex {row} is at {positions[row].tolist()}, outside the bounds {low} to {high}.")
    return low, high


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not one of the choices."""
    if value not in choices:
        raise SourceError(f"{name} is {value!r}; expected one of {', '.join(choices)}.")


def _with_all_objects(level: Level, finest: Level) -> Level:
    """Return a coarser level with an index that lists every object of the finest level."""
    if finest.objects is None or level.objects is None:
        return level
    # All levels list the same objects, so the count of the finest is that of the parent, as V101 requires.
    counted = {"preserves_object_ids": True, "inherited_num_objects": finest.objects.n_objects}
    objects, ids = level.objects, finest.objects.ids
    stray = np.setdiff1d(objects.ids, ids)
    if stray.size:
        raise SourceError(f"Object {stray[0]} of a coarser level is not in the finest level.")
    # Both lists of ids ascend, so the blocks keep their order and only the bounds change.
    at = np.searchsorted(ids, objects.ids)
    counts = np.zeros(len(ids), np.int64)
    counts[at] = np.diff(objects.bounds)
    attributes = {name: pad_attribute(attribute, at, len(ids)) for name, attribute in level.object_attributes.items()}
    index = replace(objects, ids=ids, bounds=counts_to_offsets(counts))
    return replace(level, objects=index, object_attributes=attributes, metadata={**level.metadata, **counted})


def _add_cross_level_links(
    levels: list[Level], cuts: list[ChunkedLevel], coarser: Sequence[CoarseLevel], storage: str
) -> list[Level]:
    """Add links from finer to coarser levels, and the reverse links if both directions are requested."""
    result = list(levels)
    for k, step in enumerate(coarser):
        if storage == "none" or step.parents is None:
            continue
        parents = np.asarray(step.parents)
        n_finer = len(cuts[k].where)
        if parents.shape != (n_finer,) or (parents >= step.shapes.n_vertices).any():
            raise SourceError(
                f"Level {k + 1}: parents have shape {parents.shape}; expected one row of the coarser shapes "
                f"(or -1) for each of {n_finer} finer vertices."
            )
        fine = np.flatnonzero(parents >= 0)
        ends = [(levels[k], cuts[k], fine), (levels[k + 1], cuts[k + 1], parents[fine])]
        for delta, order in ((1, ends), (-1, ends[::-1]))[: 2 if storage == "explicit" else 1]:
            placed = [(level, *place.place(rows)) for level, place, rows in order]
            chunks = np.stack([level.chunks[chunk] for level, chunk, _ in placed], axis=1)
            rows = np.stack([row for *_, row in placed], axis=1)
            at = k if delta == 1 else k + 1
            result[at] = replace(result[at], cross_links=(*result[at].cross_links, CrossLinks(delta, chunks, rows)))
    return result

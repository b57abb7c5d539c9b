"""Writer of geometry stores: staged next to the target, renamed when complete."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import get_args
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import DuplicateError, NameRefusedError, SourceError, ValuesError
from raggedatlas.formats.output_files import written_aside
from raggedatlas.model.arguments import checked
from raggedatlas.model.choices import Layout
from raggedatlas.store.location import Address, Location, write_pieces
from raggedatlas.store.runtime import map_requests
from raggedatlas.store.shards import forget_indexes
from raggedatlas.store.storage_errors import store_errors
from raggedatlas.wings.vectors.builder import check_choice
from raggedatlas.wings.vectors.chunking import find_infinite, find_keys, smallest_unsigned_dtype
from raggedatlas.wings.vectors.geometry import CrossLinks, Fragments, Geometry, Level, Links, range_fragments, root_json
from raggedatlas.wings.vectors.shapes import (
    POSITION_TYPES,
    Attributes,
    check_rows,
    concat_attributes,
    counts_to_offsets,
    take_attributes,
)
from raggedatlas.wings.vectors.storage.codecs import (
    LIST,
    chunks_as_fragments,
    find_missing_blocks,
    fragment_rows,
    lacks_rows,
)
from raggedatlas.wings.vectors.storage.cross_links import select_links
from raggedatlas.wings.vectors.storage.layouts import (
    COMPRESSORS,
    File,
    group_json,
    level_files_07,
    level_files_09,
    with_parent_groups,
)

_PUT_BATCH = 64
_PUT_BATCH_BYTES = 64 << 20
"""Maximum number of objects, and of their bytes, in one batch of PUT requests; bounds the memory."""


def publish_files(location: Location, files: Iterable[File], *, overwrite: bool) -> None:
    """Write files below a location atomically: readers see all of them or none.

    A local folder is staged next to its target and renamed. In an object store the root's ``zarr.json`` is written
    last, and everything written is removed again on failure. A store that is overwritten stays readable until the new
    one is complete beside it, which is then copied to its place by the object store. Raises `DuplicateError` if the
    location exists and `overwrite` is false.
    """
    is_there = location.holds_files()
    if is_there and not overwrite:
        raise DuplicateError(f"{location.uri} already exists; choose another location, or pass overwrite=True.")
    if location.is_local:
        _publish_local(location, files, overwrite=overwrite)
    elif is_there:
        _replace_objects(location, files)
    else:
        _put_files(location, files)


def _publish_local(location: Location, files: Iterable[File], *, overwrite: bool) -> None:
    """Write a folder aside, and rename it to its final name."""
    target, what = location.checked_path(), f"write {location.uri}"
    with store_errors(what):
        target.parent.mkdir(parents=True, exist_ok=True)
    # `store_errors` is within: it would convert the refusal of a store that appeared meanwhile.
    with written_aside(target, overwrite=overwrite) as stage, store_errors(what):
        stage.mkdir()
        result: set[str] = set()
        for key, pieces in files:
            path = f"{stage}/{validate_key(key)}"
            folder = path.rpartition("/")[0]
            if folder not in result:
                Path(folder).mkdir(parents=True, exist_ok=True)
                result.add(folder)
            # A key that is yielded twice fails here.
            with open(path, "xb", buffering=0) as file:  # noqa: PTH123 - thousands of them
                write_pieces(file.fileno(), pieces)


def _replace_objects(location: Location, files: Iterable[File]) -> None:
    """Put objects beside an existing store, which stays until all of them are there, and copy them to its place."""
    import obstore

    above, _, name = location.uri.rstrip("/").rpartition("/")
    stage = replace(location, uri=f"{above}/{name}.{uuid4().hex[:8]}.tmp")
    _put_files(stage, files)
    store, keys = replace(location, uri=above).store(), [key for key, *_ in stage.list_objects()]
    # The root goes first and comes last, so readers find no store instead of one that is partly replaced.
    with store_errors(f"replace {location.uri} by {stage.uri}, which is complete"):
        with contextlib.suppress(FileNotFoundError):
            obstore.delete(location.store(), "zarr.json")
        location.delete_prefix()
        # Cached indexes belong to the old shards, whose keys the new ones may have.
        forget_indexes(location)
        others = [key for key in keys if key != "zarr.json"]
        map_requests(lambda key: obstore.copy(store, f"{stage.name}/{key}", f"{name}/{key}"), others)
        if "zarr.json" in keys:
            obstore.copy(store, f"{stage.name}/zarr.json", f"{name}/zarr.json")
    stage.delete_prefix()


def _put_files(location: Location, files: Iterable[File]) -> None:
    """Put objects where there are none, the root metadata last; remove them again on failure."""
    import obstore

    store = location.store()
    last: bytes | None = None
    waiting: list[tuple[str, bytes]] = []

    def put(waiting: list[tuple[str, bytes]]) -> None:
        map_requests(lambda item: obstore.put(store, *item), waiting)
        waiting.clear()

    try:
        with store_errors(f"write {location.uri}"):
            for key, pieces in files:
                left = iter(pieces)
                data = b"".join(_take_bytes(left, _PUT_BATCH_BYTES))
                # A large file is sent in parts, as its pieces are made.
                if (piece := next(left, None)) is not None:
                    obstore.put(store, validate_key(key), map(bytes, chain([data, piece], left)))
                    continue
                if key == "zarr.json":
                    last = data
                    continue
                waiting.append((validate_key(key), data))
                if len(waiting) == _PUT_BATCH or sum(len(data) for _, data in waiting) >= _PUT_BATCH_BYTES:
                    put(waiting)
            put(waiting)
            if last is not None:
                obstore.put(store, "zarr.json", last)
    except BaseException:
        location.delete_prefix()
        raise


def _take_bytes(pieces: Iterator[bytes | memoryview], n_bytes: int) -> Iterator[bytes | memoryview]:
    """Yield pieces until there are about so many bytes."""
    while n_bytes > 0 and (piece := next(pieces, None)) is not None:
        n_bytes -= len(piece)
        yield piece


def validate_key(key: str) -> str:
    """Return a key after refusing parts that could escape the store."""
    for part in key.split("/"):
        if not part or part.startswith(".") or any(ord(sign) < 32 or sign in '\\:*?"<>|' for sign in part):
            raise NameRefusedError(
                f"{part!r} cannot be part of a path in a store; expected a name without slashes, colons, quotes, "
                "question marks, stars or control characters that does not begin with a dot."
            )
    return key


def check_geometry(geometry: Geometry) -> None:
    """Refuse a geometry with inconsistent arrays (`SourceError`) or positions that are not finite (`ValuesError`)."""
    if not geometry.levels:
        raise SourceError("A geometry store needs at least one level.")
    for k, level in enumerate(geometry.levels):
        _check_level(level, f"Level {k}", geometry.n_dims)
        deltas = [links.delta for links in level.cross_links]
        if len(set(deltas)) < len(deltas):
            raise SourceError(f"Level {k} has two sets of links for one of the deltas {deltas}; concatenate them.")
        for links in level.cross_links:
            if not 0 <= k + links.delta < len(geometry.levels):
                raise SourceError(f"Level {k} has links to level {k + links.delta}, which does not exist.")
            if links.delta and geometry.cross_level_storage == "none":
                raise SourceError(f"Level {k} has links across levels, but cross_level_storage is 'none'.")
            _check_ends(geometry, k, links)
    one_chunk = all(len(level.chunks) <= 1 for level in geometry.levels)
    if geometry.index_convention == "identity" and not one_chunk:
        raise SourceError("The identity convention needs exactly one chunk; write an object index.")


def _check_level(level: Level, where: str, n_dims: int) -> None:
    """Check the arrays of one level."""
    positions = level.positions
    if positions.ndim != 2 or positions.shape[1] != n_dims or positions.dtype.name not in POSITION_TYPES:
        raise SourceError(
            f"{where}: positions are {positions.dtype} of shape {positions.shape}; expected (N, {n_dims})."
        )
    if find_infinite(positions)[1]:
        raise ValuesError(f"{where}: a position is not finite.")
    _check_bounds(level.bounds, len(level.chunks), len(positions), f"{where}: vertices")
    # Keys are searched by bisection, in `find_keys` and in readers.
    steps = np.diff(level.chunks, axis=0)
    # The first part that differs must grow. Equal keys differ nowhere: `argmax` gives 0, where the step is 0.
    first = (steps != 0).argmax(axis=1) if len(steps) else np.zeros(0, np.int64)
    if (steps[np.arange(len(steps)), first] <= 0).any():
        raise SourceError(f"{where}: chunk keys are not ascending.")
    check_rows(level.vertex_attributes, len(positions), "vertex")
    sizes = np.diff(level.bounds)
    if level.fragments is not None:
        _check_fragments(level.fragments, sizes, f"{where}: vertex_fragments")
        check_rows(level.fragment_attributes, level.fragments.n_fragments, "fragment")
    links = level.links
    if links is not None:
        _check_bounds(links.bounds, len(level.chunks), len(links.rows), f"{where}: links")
        limit = np.repeat(sizes, np.diff(links.bounds))
        if ((links.rows < 0) | (links.rows >= limit[:, None])).any():
            raise SourceError(f"{where}: a link refers to a row that its chunk does not have.")
        check_rows(links.attributes, len(links.rows), "link")
        if links.fragments is not None:
            _check_fragments(links.fragments, np.diff(links.bounds), f"{where}: link_fragments")
    if level.objects is not None:
        check_rows(level.object_attributes, level.objects.n_objects, "object")
        objects = level.objects
        n_blocks, n_parts = len(objects.starts), level.chunks.shape[1]
        _check_bounds(objects.bounds, objects.n_objects, n_blocks, f"{where}: object index")
        lengths = {len(objects.modes), len(objects.counts), len(objects.chunks)}
        if lengths != {n_blocks} or objects.chunks.shape[1:] != (n_parts,):
            raise SourceError(
                f"{where}: the object index has {n_blocks} starts, and chunks of shape {objects.chunks.shape}; expected modes, counts "
                f"and chunks for each, of {n_parts} parts."
            )
        listed = objects.modes == LIST
        if (objects.modes > LIST).any() or (objects.counts < 0).any() or (objects.starts < 0).any():
            raise SourceError(f"{where}: the object index has an unknown mode, or a negative start or count.")
        if (objects.starts[listed] > len(objects.fragments) - objects.counts[listed]).any():
            raise SourceError(f"{where}: a list of the object index exceeds the given fragments.")
        at = find_keys(level.chunks, objects.chunks) if len(level.chunks) else np.full(n_blocks, -1)
        ones = np.ones(len(level.chunks), np.int64)
        sizes = ones if level.fragments is None else np.diff(level.fragments.bounds)
        bad = np.flatnonzero(find_missing_blocks(objects, np.append(sizes, 0)[at]))
        if bad.size:
            owner = objects.ids[np.searchsorted(objects.bounds, bad[0], side="right") - 1]
            raise SourceError(
                f"{where}: object {owner} refers to a missing fragment of chunk {objects.chunks[bad[0]].tolist()}; expected one of "
                f"the {np.append(sizes, 0)[at[bad[0]]]} fragments of that chunk."
            )
    if level.groups is not None:
        check_rows(level.groups.attributes, level.groups.n_groups, "group")
    families: list[Attributes] = [level.vertex_attributes, level.fragment_attributes, level.object_attributes]
    families += [links.attributes for links in (level.links, *level.cross_links) if links is not None]
    if level.groups is not None:
        families.append(level.groups.attributes)
    for names in families:
        for name in names:
            # A slash would make two valid parts of a name; as a backslash it is refused.
            validate_key(name.replace("/", "\\"))


def _check_ends(geometry: Geometry, k: int, links: CrossLinks) -> None:
    """Refuse links across chunks with inconsistent arrays, or that refer to a missing chunk or row."""
    level = geometry.levels[k]
    n_parts = level.chunks.shape[1]
    if links.rows.ndim != 2 or links.chunks.shape != (*links.rows.shape, n_parts):
        raise SourceError(
            f"Level {k}: links across chunks have rows of shape {links.rows.shape} and chunks of shape {links.chunks.shape}; "
            f"expected (links, ends) and (links, ends, {n_parts})."
        )
    check_rows(links.attributes, links.n_links, "cross-chunk link")
    for end in range(links.width):
        target = level if end == 0 else geometry.levels[k + links.delta]
        place = find_keys(target.chunks, links.chunks[:, end])
        rows = links.rows[:, end]
        sizes = np.append(np.diff(target.bounds), 0)
        if ((place < 0) | (rows < 0) | (rows >= sizes[place])).any():
            raise SourceError(f"Level {k}: a link across chunks refers to a missing chunk or row.")


def _check_bounds(bounds: NDArray[np.int64], n_chunks: int, total: int, what: str) -> None:
    """Refuse bounds that do not go from 0 to the number of rows."""
    fits = len(bounds) == n_chunks + 1 and bounds[0] == 0 and bounds[-1] == total and (np.diff(bounds) >= 0).all()
    if not fits:
        raise SourceError(f"{what}: bounds do not divide {total} rows into {n_chunks} chunks.")


def _check_fragments(fragments: Fragments, sizes: NDArray[np.int64], what: str) -> None:
    """Refuse fragments with rows that their chunk does not have."""
    _check_bounds(fragments.bounds, len(sizes), fragments.n_fragments, what)
    if (fragments.starts < 0).any() or (fragments.counts < 0).any():
        raise SourceError(f"{what}: a start or a count is negative.")
    listed = ~fragments.is_range
    if (fragments.starts[listed] > len(fragments.rows) - fragments.counts[listed]).any():
        raise SourceError(f"{what}: a list exceeds the given rows.")
    lacking = np.flatnonzero(lacks_rows(fragments, sizes))
    if lacking.size:
        kind = "list" if listed[lacking[0]] else "range"
        raise SourceError(f"{what}: a {kind} exceeds the rows of its chunk.")


def merge_local_links(level: Level) -> Level:
    """Move cross-chunk links of delta 0 whose ends share a chunk to the links within chunks."""
    crossing = next((links for links in level.cross_links if links.delta == 0), None)
    if crossing is None:
        return level
    crosses_chunks = (crossing.chunks != crossing.chunks[:, :1]).any(axis=(1, 2))
    if crosses_chunks.all():
        return level
    others = tuple(links for links in level.cross_links if links.delta)
    left = () if not crosses_chunks.any() else (select_links(crossing, np.flatnonzero(crosses_chunks)),)
    # These join the links within chunks, sorted by the fragment of their first end.
    links = select_links(crossing, np.flatnonzero(~crosses_chunks))
    chunk = find_keys(level.chunks, links.chunks[:, 0])
    own = level.links
    rows, places, attributes, counts = [links.rows], [chunk], [links.attributes], [links.n_links]
    if own is not None:
        if own.width != links.width:
            raise SourceError(
                f"Links within chunks have {own.width} ends, links across chunks {links.width}; expected the same number."
            )
        rows.insert(0, own.rows.astype(np.int64))
        places.insert(0, np.repeat(np.arange(len(level.chunks)), np.diff(own.bounds)))
        attributes.insert(0, own.attributes)
        counts.insert(0, len(own.rows))
    ends, chunk = np.concatenate(rows), np.concatenate(places)
    values: Attributes = concat_attributes(attributes, counts)
    fragments = level.fragments
    if fragments is None:
        fragments = chunks_as_fragments(np.diff(level.bounds))
    owner = _vertex_fragments(level, fragments)[level.bounds[chunk] + ends[:, 0]]
    # By chunk first, since `bounds` bisects the chunks, then by fragment.
    order = np.lexsort((owner, chunk))
    bounds = np.searchsorted(chunk[order], np.arange(len(level.chunks) + 1)).astype(np.int64)
    # In a chunk without fragments, `owner` is the first fragment of a later chunk, which does not have these links.
    has_fragments = np.diff(fragments.bounds)[chunk] > 0
    sizes = np.bincount(owner[has_fragments], minlength=fragments.n_fragments).astype(np.int64)
    begin = counts_to_offsets(sizes)
    starts = begin[:-1] - np.repeat(begin[fragments.bounds[:-1]], np.diff(fragments.bounds))
    parts = range_fragments(fragments.bounds, starts, sizes)
    kind = smallest_unsigned_dtype(int(np.diff(level.bounds).max(initial=0)))
    return replace(
        level,
        links=Links(bounds, ends[order].astype(kind), parts, take_attributes(values, order)),
        cross_links=(*left, *others),
    )


def _vertex_fragments(level: Level, fragments: Fragments) -> NDArray[np.int64]:
    """Return the first fragment of each vertex, or the first of its chunk if it is in none.

    In a chunk without fragments it is the first one after the chunk, or their number if there is none.
    """
    every = np.arange(fragments.n_fragments)
    local, counts = fragment_rows(fragments, every)
    chunk = np.repeat(np.arange(len(level.chunks)), np.diff(fragments.bounds))
    rows = local + np.repeat(level.bounds[chunk], counts)
    owner = np.repeat(fragments.bounds[:-1], np.diff(level.bounds))
    # In reverse order, so that a vertex of several fragments gets the first one.
    owner[rows[::-1]] = np.repeat(every, counts)[::-1]
    return owner


LAYOUTS = get_args(Layout)


@checked
def write(
    geometry: Geometry,
    location: Address,
    *,
    layout: str = "0.9",
    overwrite: bool = False,
    shards: bool = True,
    compression: str | None = "default",
    compat: str | None = None,
) -> None:
    """Write a geometry store atomically; other readers see either nothing or the complete store.

    Parameters
    ----------
    geometry : Geometry
        The result of `make_geometry` or `VectorStore.load`.
    location : Location, str or path
        Target: a folder or an object-store prefix.
    layout : str
        ``"0.9"`` (one array for each family) or ``"0.7"`` (one array for each chunk).
    overwrite : bool
        Whether to replace an existing store.
    shards : bool
        Layout 0.9: many chunks per file, or one file each.
    compression : str or None
        ``"zstd"``, ``"blosc"`` (zstd, shuffled) or ``"lz4"`` (LZ4 by Blosc, shuffled) for vertices, links and attributes; None: none.
        ``"default"``: in layout 0.9 ``"lz4"`` for the attributes of vertices without objects and none for the rest, in layout 0.7
        ``"blosc"``, as required by zarr-vectors §7.1.
    compat : str or None
        ``"0.2"``: links as int64, the only dtype that the package zarr-vectors 0.2.0 reads (layout 0.7).

    Raises
    ------
    DuplicateError
        If the target exists and `overwrite` is false.
    SourceError, ValuesError
        If the geometry is inconsistent; nothing is written then.
    MissingExtraError
        For Draco, if its library is not installed.

    References
    ----------
    zarr-vectors §7.1 to §7.11 (core arrays).

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from raggedatlas.wings.vectors.builder import make_geometry
    >>> from raggedatlas.wings.vectors.reader import open_vectors
    >>> from raggedatlas.wings.vectors.shapes import Shapes
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
        levels = [
            level
            if level.links is None
            else replace(level, links=replace(level.links, rows=level.links.rows.astype(np.int64)))
            for level in geometry.levels
        ]
        geometry = replace(geometry, levels=tuple(levels))
    if any(level.encoding == "draco" for level in geometry.levels) and layout == "0.7":
        chosen = None

    def files() -> Iterator[File]:
        # Links that cannot be merged are refused before the first file.
        whole = geometry
        if layout == "0.9":
            whole = replace(geometry, levels=tuple(map(merge_local_links, geometry.levels)))
        yield group_json("", root_json(whole, layout, place.name))
        for k in range(len(whole.levels)):
            if layout == "0.9":
                own = level_files_09(whole, k, shards=shards, compression=chosen)
            else:
                own = level_files_07(whole, k, compression=chosen)
            yield from with_parent_groups(own)

    publish_files(place, files(), overwrite=overwrite)

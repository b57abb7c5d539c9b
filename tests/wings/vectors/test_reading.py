"""Reading: what was written comes back whole, by box, by object and by group, in any number of axes and of any kind."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raggedatlas.errors import NotFoundError, QueryError
from raggedatlas.wings.vectors.builder import ChunkingOptions, make_geometry
from raggedatlas.wings.vectors.geometry import Fragments, Geometry
from raggedatlas.wings.vectors.reader import open_vectors
from raggedatlas.wings.vectors.shapes import POSITION_TYPES, Shapes, take_objects
from raggedatlas.wings.vectors.storage.zarr_reader import StoreFiles
from raggedatlas.wings.vectors.writer import write
from support.geometry_stores import CUT, LAYOUTS, stored, with_level
from support.hypothesis_profile import examples
from support.spatial import (
    ALL,
    cloud,
    corners_of,
    graph,
    mesh,
    paths,
    rows_of,
    spots,
    tree,
    walk,
)

FEW = settings(examples(10), suppress_health_check=[HealthCheck.function_scoped_fixture])


def inside(positions: Any, low: Any, high: Any) -> Any:
    return ((positions >= np.asarray(low)) & (positions <= np.asarray(high))).all(axis=1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["point_cloud", "polyline", "skeleton", "mesh"])
def test_a_box_of_a_level_without_vertices_is_empty(tmp_path: Path, layout: str, kind: str) -> None:
    """A store that holds nothing, as a coarse level may, has chunks in neither layout; what a box finds in it is empty."""
    links = {"skeleton": np.zeros((0, 2), np.int64), "mesh": np.zeros((0, 3), np.int64)}.get(kind)
    nothing = Shapes(kind, np.zeros((0, 3)), np.zeros(2, np.int64), np.array([7]), links)
    store = stored(tmp_path / "s", nothing, layout=layout)
    for whole in (True, False):
        assert store.box([0, 0, 0], [1, 1, 1], whole=whole).n_vertices == 0
    assert store.objects([7]).vertex_counts.tolist() == [0]
    assert store.read().ids.tolist() == [7]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("boundary", ["explicit_links", "boundary_deduplication", "both"])
def test_every_kind_comes_back(tmp_path: Path, name: str, layout: str, boundary: str) -> None:
    """Items 45, 60 to 63, 72: every kind, layout and boundary policy gives the vertices, links, attributes and groups that were written."""
    shapes = ALL[name]()
    store = stored(tmp_path / "s", shapes, replace(CUT, boundary=boundary), layout=layout)
    found = store.read()
    if shapes.kind in {"line", "polyline", "streamline"}:
        assert np.array_equal(found.positions, shapes.positions)
        assert np.array_equal(found.offsets, shapes.offsets)
    elif boundary == "explicit_links":
        assert rows_of(found.positions) == rows_of(shapes.positions)
    if shapes.links is not None:
        assert corners_of(found) == corners_of(shapes)
    for attribute in shapes.vertex_attributes:
        values = found.vertex_attributes[attribute].values.reshape(found.n_vertices, -1)
        wanted = shapes.vertex_attributes[attribute].values.reshape(shapes.n_vertices, -1)
        pairs = np.concatenate([found.positions, values], axis=1)
        assert set(rows_of(pairs)) == set(rows_of(np.concatenate([shapes.positions, wanted], axis=1)))
    if shapes.groups is not None:
        assert np.array_equal(found.groups.ids, shapes.groups.ids)
        assert np.array_equal(found.groups.offsets, shapes.groups.offsets)


def test_objects_come_in_the_asked_order(tmp_path: Path) -> None:
    """Items 65, 69, 72, 90: some objects, in any order, with their attributes; an empty one is empty and no error."""
    shapes = spots()
    for layout in LAYOUTS:
        store = stored(tmp_path / "s", shapes, layout=layout)
        found = store.objects([4, 2**40, 3])
        assert found.ids.tolist() == [4, 2**40, 3]
        assert found.vertex_counts.tolist() == [33, 5, 0]
        assert rows_of(found.positions[33:]) == rows_of(shapes.positions[:5])
        assert found.object_attributes["name"].values.tolist() == ["z", "x", "yy"]
        assert found.object_attributes["v"].values.tolist() == [2, 0, 1]
        assert store.objects([]).n_vertices == 0
        assert store.read().offsets[-1] == 38  # two points belong to no object and come last
        with pytest.raises(NotFoundError, match="Object 5 does not exist"):
            store.objects([5])
        with pytest.raises(QueryError, match="whole numbers"):
            store.objects([0.5])


def test_lines_keep_their_way(tmp_path: Path) -> None:
    """Items 60, 72: a line that comes back into a chunk has several pieces there, and is read in its order."""
    way = np.array([[0.0, 0], [4, 0], [0, 1], [4, 1], [1, 1], [1, 2]])
    shapes = Shapes("polyline", way, offsets=np.array([0, 6]))
    store = stored(tmp_path / "s", shapes, ChunkingOptions(chunk_shape=(3, 3)))
    index = store.load().levels[0].objects
    assert len(index.starts) == 5
    assert np.array_equal(store.objects([0]).positions, way)
    assert np.array_equal(store.read().fragment_offsets, [0, 1, 2, 3, 4, 6])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_by_number_and_name(tmp_path: Path, layout: str) -> None:
    """Items 42, 44, 45: groups overlap, may be empty, and are had by number or by name."""
    store = stored(tmp_path / "s", spots(), layout=layout)
    assert store.group("A").ids.tolist() == [3, 4]
    assert store.group(1).n_objects == 0
    assert store.group(2).ids.tolist() == [2**40]
    for missing in ("D", 3, -1):
        with pytest.raises(NotFoundError, match="does not exist"):
            store.group(missing)


@pytest.mark.parametrize("name", ALL)
def test_boxes(tmp_path: Path, name: str) -> None:
    """Both ends are inclusive; points, graphs and meshes are cut to the box, lines and skeletons come whole, and either can be asked."""
    shapes = ALL[name]()
    store = stored(tmp_path / "s", shapes)
    low, high = [-2.0, -2, -2], np.maximum(shapes.positions[0], 0).astype(float) + 1e-3
    high[0] = shapes.positions[:, 0].max()
    hit = inside(shapes.positions, low, high)
    cut, whole = store.box(low, high, whole=False), store.box(low, high, whole=True)
    assert rows_of(cut.positions) == rows_of(shapes.positions[hit])
    if shapes.links is not None:
        kept = hit[shapes.links].all(axis=1)
        part = replace(shapes, links=shapes.links[kept], link_offsets=None, link_attributes={k: v.take(np.flatnonzero(kept)) for k, v in shapes.link_attributes.items()})  # fmt: skip
        assert corners_of(cut) == corners_of(part)
    if shapes.ids is not None:
        owner = np.repeat(np.arange(shapes.n_objects), shapes.vertex_counts)
        ids = sorted({int(shapes.ids[owner[i]]) for i in np.flatnonzero(hit) if i < len(owner)})
        assert whole.ids.tolist() == ids
        assert whole.n_vertices == sum(shapes.vertex_counts[list(shapes.ids).index(i)] for i in ids)
    default = store.box(low, high)
    assert (
        default.n_vertices
        == (whole if shapes.kind in {"line", "polyline", "streamline", "skeleton"} else cut).n_vertices
    )
    assert store.box([1e6] * 3, [2e6] * 3).n_vertices == 0


def test_lines_cut_to_a_box_say_what_is_joined(tmp_path: Path) -> None:
    """Lines cut to a box have links between neighbours that are both inside."""
    way = np.array([[0.0, 0], [1, 0], [5, 0], [1, 1], [0, 1]])
    found = stored(tmp_path / "s", Shapes("polyline", way), ChunkingOptions(chunk_shape=(3, 3))).box(
        [-1, -1], [2, 2], whole=False
    )
    assert found.positions[found.links].tolist() == [[[0, 0], [1, 0]], [[1, 1], [0, 1]]]


def test_boxes_of_any_type(tmp_path: Path) -> None:
    """Item 13: integer positions with boxes of floats, and the reverse; also of unsigned ones and below zero."""
    whole = np.random.default_rng(0).integers(0, 100, (200, 2))
    for kind in ("uint8", "int16", "float32"):
        store = stored(
            tmp_path / kind, Shapes("point_cloud", whole.astype(kind)), ChunkingOptions(chunk_shape=(7.5, 10))
        )
        assert rows_of(store.box([-0.5, 10], [30.5, 60]).positions) == rows_of(
            whole[inside(whole, [-0.5, 10], [30.5, 60])]
        )
        assert rows_of(store.box([0, 10], [30, 60]).positions) == rows_of(whole[inside(whole, [0, 10], [30, 60])])
        assert store.box([-np.inf, -np.inf], [np.inf, np.inf]).n_vertices == 200


@pytest.mark.parametrize("kind", POSITION_TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_of_any_type(tmp_path: Path, kind: str, layout: str) -> None:
    """Item 11: all floats and integers come back in their type, bit by bit."""
    info = np.iinfo(kind) if "int" in kind else np.finfo(kind)
    values = np.array([[1, 2], [3, 100], [7, 7]]).astype(kind)
    if "int" in kind and "64" not in kind:
        values[0] = info.min, info.max
    found = stored(
        tmp_path / "s", Shapes("point_cloud", values), ChunkingOptions(chunk_shape=(1000, 1000)), layout=layout
    ).read()
    assert found.positions.dtype == np.dtype(kind)
    assert sorted(map(tuple, found.positions.tolist())) == sorted(map(tuple, values.tolist()))


COORDINATE = st.integers(-6, 6).map(lambda i: i * 1.5) | st.floats(-20, 20, width=32)


@FEW
@given(
    data=st.data(),
    n_dims=st.integers(2, 4),
    kind=st.sampled_from(["point_cloud", "polyline", "graph", "mesh", "skeleton"]),
)
def test_anything_comes_back(tmp_path: Path, data: st.DataObject, n_dims: int, kind: str) -> None:
    """Items 17, 74, 100: any vertices, on seams and below zero, in two to four axes, in objects of any size and id, by either layout."""
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    n = sum(sizes)
    flat = data.draw(st.lists(COORDINATE, min_size=n * n_dims, max_size=n * n_dims))
    positions = np.array(flat, np.float32).reshape(n, n_dims)
    ids = data.draw(st.lists(st.integers(0, 2**62), min_size=len(sizes), max_size=len(sizes), unique=True))
    width = {"mesh": 3}.get(kind, 2)
    links: Any = None
    if kind in {"graph", "mesh"}:
        links = np.array(data.draw(st.lists(st.lists(st.integers(0, n - 1), min_size=width, max_size=width), max_size=6)) if n else [], np.int64).reshape(-1, width)  # fmt: skip
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    if kind == "skeleton":
        child = [int(i) for a, b in pairwise(offsets) for i in range(a + 1, b)]
        start = np.repeat(offsets[:-1], sizes)
        links = np.array([[i, data.draw(st.integers(int(start[i]), i - 1))] for i in child], np.int64).reshape(-1, 2)
    shapes = Shapes(kind, positions, offsets=offsets, ids=np.array(ids, np.int64), links=links)
    cutting = ChunkingOptions(
        chunk_shape=(3.0,) * n_dims, boundary=data.draw(st.sampled_from(["explicit_links", "boundary_deduplication"]))
    )
    store = stored(tmp_path / "s", shapes, cutting, layout=data.draw(st.sampled_from(["0.7", "0.9"])))
    found = store.read()
    order = np.argsort(shapes.ids)
    assert found.ids.tolist() == sorted(ids)
    if cutting.boundary == "explicit_links" or kind == "polyline":
        assert found.vertex_counts.tolist() == [sizes[i] for i in order]
        for i in order:
            one = store.objects([ids[i]]).positions
            mine = positions[offsets[i] : offsets[i + 1]]
            assert np.array_equal(one, mine) if kind in {"polyline", "skeleton"} else rows_of(one) == rows_of(mine)
    if links is not None:
        assert corners_of(found) == corners_of(shapes)


def test_only_what_is_asked_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items 23, 24, 95: an attribute that is not asked for is not touched, and of those asked only the chunks of the box."""
    seen: list[str] = []
    original = StoreFiles.read

    def read(files: StoreFiles, key: str) -> Any:
        seen.append(key)
        return original(files, key)

    monkeypatch.setattr(StoreFiles, "read", read)
    shapes = replace(paths(), vertex_attributes={"a": np.zeros(40), "b": np.ones(40)})
    for layout in LAYOUTS:
        store = stored(tmp_path / layout, shapes, layout=layout, **({} if layout == "0.7" else {"shards": False}))
        seen.clear()
        found = store.box([-1, -1, -1], [0.5, 0.5, 0.5], attributes=["a"], whole=False)
        assert list(found.vertex_attributes) == ["a"]
        assert not [key for key in seen if "vertex_attributes/b" in key or "object_attributes/v/" in key]
        chunks = {key.split("/vertices/")[1] for key in seen if "/vertices/" in key and "/c" in key}
        assert 0 < len(chunks) <= 8
        seen.clear()
        store.objects([2], attributes=[])
        assert len([key for key in seen if "/vertices/" in key and "/c" in key]) == 1
        assert not [key for key in seen if "attributes/a" in key]


def shared_rows() -> Geometry:
    """Two paths that share vertices, by explicit fragments at one level (item 33)."""
    shapes = replace(paths(), positions=walk(40) + 500, groups=None, object_attributes={})
    geometry = make_geometry(shapes, ChunkingOptions(chunk_shape=(1000.0,) * 3))
    level = geometry.levels[0]
    n = level.fragments.n_fragments if level.fragments is not None else 0
    lists = [np.array([3, 1, 3]), np.array([1, 2])] * n
    counts = np.array([len(part) for part in lists[:n]])
    starts = np.concatenate([[0], np.cumsum(counts)])[:-1]
    made = Fragments(level.fragments.bounds, np.zeros(n, bool), starts, counts, np.concatenate(lists[:n]))
    return with_level(geometry, fragments=made, fragment_attributes={})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fragments_share_rows(tmp_path: Path, layout: str) -> None:
    """Items 32, 33: explicit fragments share rows with each other; order and repetition are kept, object by object."""
    geometry = shared_rows()
    write(geometry, tmp_path / "s", layout=layout)
    store = open_vectors(tmp_path / "s")
    level = geometry.levels[0]
    for i in store.object_ids():
        one = store.objects([i]).positions
        assert not len(one) or len(one) in {2, 3}
        if len(one) == 3:
            assert (one[0] == one[2]).all()
    assert store.read().n_vertices == level.fragments.counts.sum()
    assert store.box([0] * 3, [900] * 3).n_objects == np.count_nonzero(store.read().vertex_counts)


def test_links_among_objects_that_share_rows(tmp_path: Path) -> None:
    """Item 33: where two meshes share vertices, each has the links among its own, and both together have them once each."""
    square = np.array([[0.0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]])
    geometry = make_geometry(
        Shapes("mesh", square, links=np.array([[0, 1, 2], [0, 2, 3]])), ChunkingOptions(chunk_shape=(9.0,) * 3)
    )
    level = geometry.levels[0]
    two = Fragments(
        np.array([0, 2]), np.zeros(2, bool), np.array([0, 3]), np.array([3, 3]), np.array([0, 1, 2, 0, 2, 3])
    )
    index = replace(level.objects, ids=np.arange(2), bounds=np.array([0, 1, 2]), chunks=np.zeros((2, 3), np.int64), modes=np.zeros(2, np.uint8), starts=np.arange(2), counts=np.ones(2, np.int64))  # fmt: skip
    own = replace(level.links, fragments=Fragments(np.array([0, 2]), np.ones(2, bool), np.arange(2), np.ones(2, np.int64), np.zeros(0, np.int64)))  # fmt: skip
    write(
        replace(geometry, levels=(replace(level, fragments=two, objects=index, links=own, fragment_attributes={}),)),
        tmp_path / "s",
    )
    found = open_vectors(tmp_path / "s").read()
    assert found.vertex_counts.tolist() == [3, 3]
    assert found.links.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_identity(tmp_path: Path, layout: str) -> None:
    """Item 70: one chunk, no object index, the id is the number of the fragment; also for an object without vertices."""
    far = ChunkingOptions(chunk_shape=(1000.0,) * 3, index_convention="identity")
    shapes = replace(paths(), positions=paths().positions + 500, groups=None)
    store = stored(tmp_path / "s", shapes, far, layout=layout)
    assert not (tmp_path / "s/0/object_index").exists()
    assert store.object_ids().tolist() == [0, 1, 2, 3]
    assert np.array_equal(
        store.objects([3, 1, 0]).positions, np.concatenate([shapes.positions[6:], shapes.positions[:5]])
    )
    assert np.array_equal(store.read().positions, shapes.positions)
    assert store.box(shapes.positions[5], shapes.positions[5]).ids.tolist() == [2]
    with pytest.raises(NotFoundError, match="Object 4 does not exist"):
        store.objects([4])


def test_meshes_and_trees_of_one_id(tmp_path: Path) -> None:
    """One mesh, one skeleton and one graph by id have the links among their vertices, across chunks too."""
    for shapes in (mesh(), tree()):
        store = stored(tmp_path / "s", shapes)
        for i in (0, 1):
            one = store.objects([i])
            part = (shapes.links // 20 == i).all(axis=1)
            mine = replace(shapes, links=shapes.links[part], link_attributes={k: v.take(np.flatnonzero(part)) for k, v in shapes.link_attributes.items()})  # fmt: skip
            assert corners_of(one) == corners_of(mine)
    assert corners_of(stored(tmp_path / "g", graph()).objects([0])) == corners_of(graph())


def test_levels_and_budgets(tmp_path: Path) -> None:
    """The finest level within a budget is read, else the coarsest; a level that is not there, or both, are refused."""
    store = stored(tmp_path / "s", cloud())
    assert store.vertex_counts() == [40]
    assert store.read(budget=5).n_vertices == 40
    with pytest.raises(QueryError, match="Level 3 does not exist"):
        store.read(level=3)
    with pytest.raises(QueryError, match="not both"):
        store.read(level=0, budget=5)
    with pytest.raises(NotFoundError, match="no objects"):
        store.objects([0])


@pytest.mark.parametrize("box", [([0, 0], [1, 1]), ([1, 0, 0], [0, 0, 0]), ([np.nan] * 3, [1] * 3)])
def test_boxes_that_are_none(tmp_path: Path, box: Any) -> None:
    """A box of other axes, crossed or of NaN is refused."""
    with pytest.raises(QueryError, match="box"):
        stored(tmp_path / "s", cloud()).box(*box)


def test_bins(tmp_path: Path) -> None:
    """Items 16, 31, 38, 96: points stand bin by bin, one fragment for each, also for an empty one, in C order."""
    points = np.array([[0.1, 0.1], [0.9, 0.9], [0.1, 0.9], [-0.1, 0.2]])
    cutting = ChunkingOptions(chunk_shape=(1, 1), bin_shape=(0.5, 0.5))
    store = stored(tmp_path / "s", Shapes("point_cloud", points), cutting)
    fragments = store.load().levels[0].fragments
    assert fragments.counts.reshape(2, 4).tolist() == [[0, 0, 1, 0], [1, 1, 0, 1]]
    assert store.geometry.bin_shape == (0.5, 0.5)
    assert store.box([0, 0.5], [1, 1]).n_vertices == 2


def test_links_to_objects_that_are_not_taken_are_dropped() -> None:
    """Some objects of shapes whose links are listed by object keep the links among themselves, with their attributes."""
    links = np.array([[0, 1], [1, 2], [2, 3], [3, 5], [4, 5], [5, 0]])
    own = Shapes("graph", walk(6), np.array([0, 2, 4, 6]), links=links, link_attributes={"w": np.arange(6)})
    listed = replace(own, link_offsets=np.array([0, 2, 4, 6]))
    for shapes in (own, listed):
        found = take_objects(shapes, np.array([2, 0]))
        assert rows_of(np.column_stack([found.links, found.link_attributes["w"].values])) == [
            (0, 1, 4),
            (1, 2, 5),
            (2, 3, 0),
        ]
    assert found.link_offsets.tolist() == [0, 2, 3]


@pytest.mark.parametrize("kind", ["graph", "skeleton", "mesh"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_links_between_vertices_of_no_object_come_back(tmp_path: Path, kind: str, layout: str) -> None:
    """Links between vertices after the last object are read, and kept in a box, although they are those of no object."""
    links = [[1, 0, 2], [4, 3, 5]] if kind == "mesh" else [[1, 0], [4, 3], [5, 4]]
    shapes = Shapes(kind, walk(6), offsets=np.array([0, 3]), links=np.array(links))
    store = stored(tmp_path / "s", shapes, layout=layout)
    found = store.read()
    assert corners_of(found) == corners_of(shapes)
    assert found.link_offsets is None
    assert take_objects(found, np.array([0])).n_links == 1
    if kind != "skeleton":
        assert corners_of(store.box([-50] * 3, [np.inf] * 3)) == corners_of(shapes)

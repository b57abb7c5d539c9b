"""Pyramids: ids stay, counts fall, bounds hold, topology stays; equal seeds give equal levels."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import trimesh
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csgraph

from raggedatlas.errors import SourceError
from raggedatlas.wings.vectors.builder import ChunkingOptions, CoarseLevel, make_geometry
from raggedatlas.wings.vectors.pyramid import PyramidOptions, decimate, is_closed, make_pyramid, z_order_ranks
from raggedatlas.wings.vectors.reader import open_vectors
from raggedatlas.wings.vectors.shapes import Attribute, Groups, Shapes, counts_to_offsets, object_rows
from raggedatlas.wings.vectors.writer import write

pytestmark = pytest.mark.fast

KINDS = ["point_cloud", "line", "polyline", "streamline", "graph", "skeleton"]


@st.composite
def shapes_of(draw: st.DrawFn, kind: str) -> Shapes:
    """Draw objects of any size, empty ones too, in 2 to 4 axes, with negative coordinates and repeated places."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    counts = np.array(draw(st.lists(st.integers(0, 40), min_size=1, max_size=6)))
    if kind == "line":
        counts[:] = 2
    n = int(counts.sum())
    positions = (rng.normal(size=(n, draw(st.integers(2, 4)))) * 10).astype(draw(st.sampled_from(["f4", "f8", "i4"])))
    offsets = counts_to_offsets(counts)
    links = None
    if kind in ("graph", "skeleton"):
        rows = [
            (first + child, first + int(rng.integers(child)))
            for first, count in zip(offsets[:-1], counts, strict=True)
            for child in range(1, count)
            if rng.random() < 0.9
        ]
        if kind == "graph":
            rows += [
                (first + int(rng.integers(count)), first + int(rng.integers(count)))
                for first, count in zip(offsets[:-1], counts, strict=True)
                for _ in range(min(3, count))
            ]
        links = np.array(rows, np.int64).reshape(-1, 2)
    ids = rng.permutation(1000)[: len(counts)]
    groups = Groups(np.array([0, 1]), ids[:1], {"name": Attribute(np.array(["one"]))})
    return Shapes(
        kind, positions, offsets, ids, links, vertex_attributes={"row": np.arange(n)},
        object_attributes={"id": ids.copy()}, groups=groups,
    )  # fmt: skip


def check_levels(shapes: Shapes, levels: tuple[CoarseLevel, ...], steps: PyramidOptions) -> None:
    """Hold every level against the laws that all kinds share."""
    finer = shapes
    assert len(levels) == steps.n_levels
    for number, level in enumerate(levels, 1):
        coarse = level.shapes
        assert coarse.kind == shapes.kind
        assert coarse.positions.dtype == shapes.positions.dtype
        assert set(np.asarray(coarse.ids)) <= set(np.asarray(finer.ids))
        assert np.array_equal(coarse.object_attributes["id"].values, coarse.ids)
        assert coarse.groups is shapes.groups
        assert coarse.n_vertices <= finer.n_vertices
        if coarse.n_vertices:
            assert (coarse.positions.min(0) >= shapes.positions.min(0)).all()
            assert (coarse.positions.max(0) <= shapes.positions.max(0)).all()
        assert level.parents.shape == (finer.n_vertices,)
        stands = np.flatnonzero(level.parents >= 0)
        numbers = [np.asarray(s.ids)[object_rows(s)] for s in (finer, coarse)]
        assert np.array_equal(numbers[0][stands], numbers[1][level.parents[stands]])
        assert set(numbers[0][level.parents < 0]).isdisjoint(np.asarray(coarse.ids))
        assert level.bin_ratio == tuple(r**number for r in steps.bins(shapes.n_dims))
        finer = coarse


def rows_at(level: Shapes) -> list[int]:
    return list(level.vertex_attributes["row"].values.tolist())


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_every_level_keeps_ids_and_some_of_the_vertices(kind: str, data: st.DataObject) -> None:
    """Ids, groups and attributes stay; counts never grow; every vertex is one of the finer level, in place; parents are of the same object."""
    shapes = data.draw(shapes_of(kind))
    steps = PyramidOptions(
        data.draw(st.integers(0, 3)), data.draw(st.sampled_from([2.0, 4.0, 8.0])), seed=data.draw(st.integers(0, 9))
    )
    levels = make_pyramid(shapes, steps)
    check_levels(shapes, levels, steps)
    finer = shapes
    for level in levels:
        rows = rows_at(level.shapes)
        assert set(rows) <= set(rows_at(finer))
        assert np.array_equal(shapes.positions[rows], level.shapes.positions)
        assert np.array_equal(np.asarray(level.shapes.ids), np.asarray(shapes.ids))
        assert ((level.shapes.vertex_counts > 0) == (shapes.vertex_counts > 0)).all()
        at = {row: place for place, row in enumerate(rows_at(finer))}
        parents: Any = level.parents
        assert parents[[at[row] for row in rows]].tolist() == list(range(len(rows)))
        finer = level.shapes


def summary(shapes: Shapes) -> tuple[int, int, int, list[int]]:
    """Return the number of parts, of independent loops, of vertices, and the rows of those that do not have two edges."""
    n, links = shapes.n_vertices, shapes.edges()
    ends = sp.coo_matrix((np.ones(len(links)), links.T), (n, n))
    parts = int(csgraph.connected_components(ends, directed=False, return_labels=False)) if n else 0
    rows, degrees = rows_at(shapes), np.bincount(links.ravel(), minlength=n)
    return parts, len(links) - n + parts, n, sorted(rows[row] for row in np.flatnonzero(degrees != 2))


@given(data=st.data(), kind=st.sampled_from(["graph", "skeleton"]))
def test_branches_ends_roots_parts_and_loops_stay(data: st.DataObject, kind: str) -> None:
    """A coarser graph has the same branch points, ends, parts and loops; no new double edges; a skeleton the same roots, and it is a forest."""
    shapes = data.draw(shapes_of(kind))
    (level,) = make_pyramid(shapes, PyramidOptions(1, tolerances=(1e9,)))
    before, after = summary(shapes), summary(level.shapes)
    assert (before[0], before[1], before[3]) == (after[0], after[1], after[3])
    new = np.asarray(level.shapes.links)
    old = np.asarray(shapes.links)
    kinds = [len(links) - len({(min(a, b), max(a, b)) for a, b in links.tolist()}) for links in (old, new)]
    assert kinds[1] <= kinds[0]
    if kind == "skeleton":
        roots = [
            set(range(s.n_vertices)) - set(links[:, 0].tolist()) for s, links in ((shapes, old), (level.shapes, new))
        ]
        assert roots[0] == {rows_at(level.shapes)[row] for row in roots[1]}
        assert len(set(new[:, 0].tolist())) == len(new)


def test_links_point_as_before() -> None:
    """In a chain that is simplified, a link still goes from the far end to the near one."""
    line = np.stack([np.arange(6.0), np.zeros(6)], 1)
    shapes = Shapes("skeleton", line, links=np.array([[1, 0], [2, 1], [3, 2], [4, 3], [5, 4]]))
    (level,) = make_pyramid(shapes, PyramidOptions(1, tolerances=(0.0,)))
    assert level.shapes.positions[:, 0].tolist() == [0, 5]
    assert np.asarray(level.shapes.links).tolist() == [[1, 0]]
    assert np.asarray(level.parents).tolist() == [0, 0, 0, 1, 1, 1]


@given(data=st.data(), tolerance=st.floats(0, 20))
def test_no_vertex_lies_further_than_the_tolerance(data: st.DataObject, tolerance: float) -> None:
    """What Douglas and Peucker's algorithm leaves out lies within the tolerance of the line that stays; both ends stay."""
    shapes = data.draw(shapes_of("streamline"))
    (level,) = make_pyramid(shapes, PyramidOptions(1, tolerances=(tolerance,)))
    kept = set(rows_at(level.shapes))
    points = shapes.positions.astype(np.float64)
    for first, last in zip(shapes.offsets, shapes.offsets[1:], strict=False):
        rows = [row for row in range(first, last) if row in kept]
        assert not last - first or (rows[0] == first and rows[-1] == last - 1)
        for a, b in pairwise(rows):
            edge = points[b] - points[a]
            share = np.clip((points[a : b + 1] - points[a]) @ edge / max(edge @ edge, 1e-300), 0, 1)
            gaps = np.linalg.norm(points[a : b + 1] - points[a] - share[:, None] * edge, axis=1)
            assert gaps.max() <= tolerance + 1e-9


def test_rings_stay_rings() -> None:
    """A closed line keeps two inner vertices at any tolerance, so that it still goes round something."""
    angles = np.linspace(0, 2 * np.pi, 50)
    ring = np.stack([np.cos(angles), np.sin(angles)], 1)
    ring[-1] = ring[0]
    (level,) = make_pyramid(Shapes("polyline", ring), PyramidOptions(1, tolerances=(100.0,)))
    assert level.shapes.n_vertices == 4
    assert (level.shapes.positions[0] == level.shapes.positions[-1]).all()


@given(data=st.data())
def test_points_add_up(data: st.DataObject) -> None:
    """What each level has beyond the coarser ones is disjoint and together says every point once; one of each object stays."""
    shapes = data.draw(shapes_of("point_cloud"))
    levels = make_pyramid(shapes, PyramidOptions(3, 4.0))
    sets = [set(rows_at(s)) for s in (shapes, *(level.shapes for level in levels))]
    added = [finer - coarser for finer, coarser in zip(sets, [*sets[1:], set()], strict=True)]
    assert sum(map(len, added)) == shapes.n_vertices
    assert set.union(*added) == set(range(shapes.n_vertices))
    for number, level in enumerate(levels, 1):
        assert level.shapes.vertex_counts.tolist() == np.ceil(shapes.vertex_counts / 4**number).astype(int).tolist()


def test_points_are_taken_evenly() -> None:
    """Every eighth of 32,768 points on a grid: each cell of 2 x 2 x 2 keeps exactly one."""
    axis = np.arange(32.0)
    grid = np.stack(np.meshgrid(axis, axis, axis, indexing="ij"), -1).reshape(-1, 3)
    shuffled = np.random.default_rng(0).permutation(grid)
    (level,) = make_pyramid(Shapes("point_cloud", shuffled.astype(np.float32)), PyramidOptions(1))
    cells = (level.shapes.positions // 2).astype(int)
    assert len(cells) == len(np.unique(cells, axis=0)) == 16**3
    assert len(np.unique(z_order_ranks(grid))) == len(grid)


@given(data=st.data(), kind=st.sampled_from(KINDS), keep=st.sampled_from(["random", "largest"]))
def test_equal_seeds_give_equal_levels(data: st.DataObject, kind: str, keep: str) -> None:
    """The same shapes and steps give the same levels; objects that go stay gone; their vertices have no parents."""
    shapes = data.draw(shapes_of(kind))
    steps = PyramidOptions(2, 2.0, sparsity=0.5, keep=keep, seed=data.draw(st.integers(0, 5)))
    one, other = make_pyramid(shapes, steps), make_pyramid(shapes, steps)
    check_levels(shapes, one, steps)
    for a, b in zip(one, other, strict=True):
        assert np.array_equal(a.shapes.positions, b.shapes.positions)
        assert np.array_equal(np.asarray(a.shapes.ids), np.asarray(b.shapes.ids))
    sizes = [int((level.shapes.vertex_counts > 0).sum()) for level in one]
    for size, share in zip(sizes, (0.5, 0.25), strict=True):
        assert size <= np.ceil(shapes.n_objects * share)
    assert [level.sparsity for level in one] == [0.5, 0.25]
    if keep == "largest" and sizes[0]:
        left = set(np.asarray(one[0].shapes.ids)[one[0].shapes.vertex_counts > 0])
        gone = [c for i, c in zip(np.asarray(shapes.ids), shapes.vertex_counts, strict=True) if i not in left]
        assert max(gone, default=0) <= min(
            c for i, c in zip(np.asarray(shapes.ids), shapes.vertex_counts, strict=True) if i in left
        )


def meshes() -> Shapes:
    """Return a ball, a torus, an open sheet, a single triangle and an object without faces."""
    x, y = np.meshgrid(np.arange(9.0), np.arange(9.0))
    sheet = np.stack([x.ravel(), y.ravel(), np.sin(x.ravel())], 1)
    corner = np.array([[r * 9 + c, r * 9 + c + 1, (r + 1) * 9 + c] for r in range(8) for c in range(8)])
    other = np.array([[r * 9 + c + 1, (r + 1) * 9 + c + 1, (r + 1) * 9 + c] for r in range(8) for c in range(8)])
    ball, torus = trimesh.creation.icosphere(3), trimesh.creation.torus(3, 1)
    parts = [
        (ball.vertices, ball.faces), (torus.vertices + 10, torus.faces), (sheet, np.concatenate([corner, other])),
        (np.eye(3), np.array([[0, 1, 2]])), (np.zeros((0, 3)), np.zeros((0, 3), int)),
    ]  # fmt: skip
    offsets = counts_to_offsets(np.array([len(points) for points, _ in parts]))
    ids = np.array([40, 3, 17, 2**40, 5])
    n = int(offsets[-1])
    return Shapes(
        "mesh", np.concatenate([points for points, _ in parts]).astype(np.float32), offsets, ids,
        np.concatenate([faces + first for (_, faces), first in zip(parts, offsets, strict=False)]),
        vertex_attributes={"row": np.arange(n)}, object_attributes={"id": ids.copy()},
    )  # fmt: skip


def test_meshes_keep_ids_and_closed_ones_stay_closed() -> None:
    """Faces fall by the factor, object by object; what was closed stays closed, with the same number of holes; boxes hold."""
    shapes, steps = meshes(), PyramidOptions(2, 4.0)
    levels = make_pyramid(shapes, steps)
    check_levels(shapes, levels, steps)
    for level in levels:
        assert np.asarray(level.shapes.ids).tolist() == np.asarray(shapes.ids).tolist()
        bounds: Any = level.shapes.link_offsets
        for row, euler in ((0, 2), (1, 0)):
            faces = np.asarray(level.shapes.links)[bounds[row] : bounds[row + 1]]
            assert is_closed(faces)
            edges = np.unique(np.sort(faces[:, [0, 1, 1, 2, 2, 0]].reshape(-1, 2), 1), axis=0)
            assert len(np.unique(faces)) - len(edges) + len(faces) == euler
            finest = level.shapes.positions[level.shapes.offsets[row] : level.shapes.offsets[row + 1]]
            whole = shapes.positions[shapes.offsets[row] : shapes.offsets[row + 1]]
            assert (finest.min(0) >= whole.min(0)).all()
            assert (finest.max(0) <= whole.max(0)).all()
        assert bounds[4] - bounds[3] == 1
        assert bounds[5] - bounds[4] == 0
    counts = [len(shapes.links) if shapes.links is not None else 0, *(level.shapes.n_links for level in levels)]
    assert counts[1] <= 0.27 * counts[0]
    assert counts[2] <= 0.3 * counts[1]


def test_decimated_vertices_have_the_values_of_near_ones() -> None:
    """A new vertex takes its attributes from the nearest of those it stands for; dropped meshes leave no parents."""
    shapes = meshes()
    level, _ = make_pyramid(shapes, PyramidOptions(2, 4.0, sparsity=0.5, keep="largest"))
    rows = level.shapes.vertex_attributes["row"].values
    parents: Any = level.parents
    assert np.array_equal(parents[rows][parents[rows] >= 0], np.arange(level.shapes.n_vertices)[parents[rows] >= 0])
    gaps = np.linalg.norm(shapes.positions[rows] - level.shapes.positions, axis=1)
    assert gaps.max() < 1.5
    gone = ~np.isin(np.asarray(shapes.ids)[object_rows(shapes)], np.asarray(level.shapes.ids))
    assert (parents[gone] == -1).all()


def test_small_and_flat_meshes_are_taken_as_they_are() -> None:
    """Four faces stay four; a flat mesh in 2-D keeps its outline; other faces than triangles and other axes are refused."""
    tetrahedron = np.array([[0, 1, 2], [0, 3, 1], [0, 2, 3], [1, 3, 2]])
    same = decimate(np.concatenate([np.zeros((1, 3)), np.eye(3)]), tetrahedron, 1)
    assert np.array_equal(same.faces, tetrahedron)
    x, y = np.meshgrid(np.arange(6.0), np.arange(6.0))
    faces = np.array([[r * 6 + c, r * 6 + c + 1, (r + 1) * 6 + c] for r in range(5) for c in range(5)])
    flat = Shapes("mesh", np.stack([x.ravel(), y.ravel()], 1), links=faces)
    (level,) = make_pyramid(flat, PyramidOptions(1, 4.0))
    assert level.shapes.n_dims == 2
    quads = Shapes("mesh", np.zeros((4, 3)), links=np.array([[0, 1, 2, 3]]))
    with pytest.raises(SourceError, match="only triangles"):
        make_pyramid(quads)
    with pytest.raises(SourceError, match="4 dimensions"):
        make_pyramid(Shapes("mesh", np.zeros((3, 4)), links=np.array([[0, 1, 2]])))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n_levels": -1}, "n_levels"),
        ({"factor": 1.0}, "factor"),
        ({"sparsity": 0.0}, "sparsity"),
        ({"keep": "best"}, "keep"),
        ({"tolerances": (2.0, 1.0)}, "tolerances"),
        ({"tolerances": (1.0,)}, "tolerances"),
        ({"bin_ratio": (0, 1, 1)}, "bin_ratio"),
    ],
)
def test_steps_that_lead_nowhere_are_refused(options: dict[str, Any], said: str) -> None:
    """Each setting out of its range is refused by its name."""
    with pytest.raises(SourceError, match=said):
        PyramidOptions(**options)


def test_what_does_not_fit_the_shapes_is_refused() -> None:
    """Objects cannot be dropped where there are none; bins need a ratio for each axis; a graph's links have two ends."""
    points = Shapes("point_cloud", np.zeros((3, 3)))
    with pytest.raises(SourceError, match="no objects"):
        make_pyramid(points, PyramidOptions(sparsity=0.5))
    with pytest.raises(SourceError, match="expected 3 numbers"):
        make_pyramid(points, PyramidOptions(bin_ratio=(2, 2)))
    with pytest.raises(SourceError, match="have 3 ends"):
        make_pyramid(Shapes("graph", np.zeros((3, 3)), links=np.array([[0, 1, 2]])))


@pytest.mark.parametrize("storage", ["none", "implicit", "explicit"])
@pytest.mark.parametrize("layout", ["0.9", "0.7"])
def test_a_pyramid_is_stored_and_read_level_by_level(tmp_path: Path, layout: str, storage: str) -> None:
    """Item 101: levels come back with the same ids; dropped objects are empty, not gone; parents are links between levels on request."""
    rng = np.random.default_rng(0)
    lines = Shapes(
        "streamline", rng.normal(size=(60, 3)).astype(np.float32) * 20, np.array([0, 20, 40, 60]), np.array([3, 9, 4]),
        object_attributes={"score": np.array([1.0, 2.0, 3.0])},
    )  # fmt: skip
    steps = PyramidOptions(2, 4.0, sparsity=0.67, seed=1)
    levels = make_pyramid(lines, steps)
    cutting = ChunkingOptions(chunk_shape=(10, 10, 10), cross_level_storage=storage)
    write(make_geometry(lines, cutting, coarser=levels), tmp_path / "a.zv", layout=layout)
    store = open_vectors(tmp_path / "a.zv")
    assert store.n_levels == 3
    for number, level in enumerate(levels, 1):
        assert np.asarray(store.object_ids(number)).tolist() == [3, 4, 9]
        for row, one in enumerate(np.asarray(level.shapes.ids).tolist()):
            first, last = level.shapes.offsets[row : row + 2]
            assert np.array_equal(store.objects([one], level=number).positions, level.shapes.positions[first:last])
        gone = set(np.asarray(lines.ids)) - set(np.asarray(level.shapes.ids))
        assert store.objects(sorted(gone), level=number).n_vertices == 0
        assert store.load().levels[number].metadata["parent_level"] == number - 1
        up, down = store.cross_links(1, level=number - 1), store.cross_links(-1, level=number)
        parents: Any = level.parents
        assert (up.n_links if up else 0) == (0 if storage == "none" else int((parents >= 0).sum()))
        assert (down is not None and down.n_links > 0) == (storage == "explicit")


def test_levels_made_from_the_finest_keep_it_as_parent(tmp_path: Path) -> None:
    """A level 2 whose parent is level 0 does not become one of level 1."""
    line = Shapes("polyline", np.cumsum(np.ones((60, 3)), axis=0))
    geometry = make_geometry(line, coarser=make_pyramid(line, PyramidOptions(2, 4.0)))
    last = replace(geometry.levels[2], metadata={**geometry.levels[2].metadata, "parent_level": 0})
    write(replace(geometry, levels=(*geometry.levels[:2], last)), tmp_path / "s")
    assert open_vectors(tmp_path / "s").load().levels[2].metadata["parent_level"] == 0


@pytest.mark.parametrize("kind", ["point_cloud", "polyline", "graph", "skeleton"])
@pytest.mark.parametrize("sparsity", [1.0, 0.5])
def test_vertices_of_no_object_stay_of_none(tmp_path: Path, kind: str, sparsity: float) -> None:
    """Coarser levels hold vertices of no object as well, after those of all objects, with parents of their own."""
    links = np.array([[i + 1, i] for i in range(39) if i not in (9, 29)]) if kind in ("graph", "skeleton") else None
    points = np.random.default_rng(0).normal(size=(40, 3)).cumsum(axis=0)
    shapes = Shapes(kind, points, np.array([0, 10, 30]), links=links, vertex_attributes={"row": np.arange(40)})
    assert object_rows(shapes).tolist() == [0] * 10 + [1] * 20 + [2] * 10
    levels = make_pyramid(shapes, PyramidOptions(2, 4.0, sparsity=sparsity))
    cutting = ChunkingOptions(chunk_shape=(5, 5, 5), cross_level_storage="explicit")
    write(make_geometry(shapes, cutting, coarser=levels), tmp_path / "s")
    finer = shapes
    for number, level in enumerate(levels, 1):
        rows = level.shapes.vertex_attributes["row"].values
        loose = rows[level.shapes.offsets[-1] :]
        assert loose.size
        assert loose.min() >= 30
        assert np.array_equal(level.shapes.positions, shapes.positions[rows])
        parents: Any = level.parents
        there = parents >= 0
        old = finer.vertex_attributes["row"].values[there]
        assert np.array_equal(object_rows(shapes)[old], object_rows(shapes)[rows[parents[there]]])
        found = open_vectors(tmp_path / "s").read(level=number)
        assert sorted(found.vertex_attributes["row"].values[found.offsets[-1] :]) == sorted(loose)
        finer = level.shapes


def test_meshes_with_vertices_of_no_object_are_refused() -> None:
    """Meshes are decimated object by object, so vertices of none are not left out without a word."""
    links = np.array([[0, 1, 2], [3, 4, 5]])
    with pytest.raises(SourceError, match="3 vertices belong to no object"):
        make_pyramid(Shapes("mesh", np.eye(6)[:, :3], np.array([0, 3]), links=links))

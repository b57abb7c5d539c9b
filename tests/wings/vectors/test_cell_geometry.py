"""Queries over geometry: boxes by box, centroid and shape; shapes aligned to rows; centroids beside values."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.atlas import AtlasView, RaggedAtlas
from raggedatlas.errors import DuplicateError, NotFoundError, QueryError, SourceError
from raggedatlas.store.filters import col
from raggedatlas.wings.vectors.attachment import make_transcripts, transcripts_to_counts
from raggedatlas.wings.vectors.attachment_plan import object_centroids
from raggedatlas.wings.vectors.builder import make_geometry
from raggedatlas.wings.vectors.cell_geometry import intersects_box, simplices_intersect_box
from raggedatlas.wings.vectors.converters.content import decode_categories
from raggedatlas.wings.vectors.converters.geospatial import shapes_of_geometries
from raggedatlas.wings.vectors.shapes import Attribute, Shapes
from support.hypothesis_profile import examples
from support.spatial import Slide, make_slide

BOUNDARY = "segmentation_boundary"
HOLED = shapely.box(0, 0, 4, 4).difference(shapely.box(1, 1, 3, 3))


@pytest.fixture(scope="module")
def slides() -> tuple[Slide, Slide]:
    return make_slide(30, seed=3), make_slide(12, seed=4, first=500)


@pytest.fixture(scope="module")
def view(slides: tuple[Slide, Slide], tmp_path_factory: pytest.TempPathFactory) -> AtlasView:
    """Two slides with outlines, the first with transcripts, and a dataset that has no shapes."""
    atlas = RaggedAtlas.create(str(tmp_path_factory.mktemp("spatial") / "atlas"))
    for name, slide in zip("ab", slides, strict=True):
        atlas.add(slide.data, name, progress=False)
        atlas.add(slide.outlines, link="segment_id", dataset=name, progress=False)
    atlas.add(
        slides[0].transcripts, link="segment_id", dataset="a", cells="cell_id", space="transcripts", progress=False
    )
    atlas.add(make_slide(4, seed=5, first=900).data, "plain", progress=False)
    return atlas.checkout(atlas.snapshot())


def rings(slide: Slide) -> np.ndarray[Any, Any]:
    return slide.outlines.positions.reshape(-1, 16, 2)


def centres(slide: Slide) -> np.ndarray[Any, Any]:
    return shapely.get_coordinates(shapely.centroid(shapely.polygons(rings(slide))))


@st.composite
def polygons(draw: st.DrawFn) -> Any:
    """A polygon around a centre: with a hole or not, of one part or two, and now and then with a ring that crosses itself."""
    near = st.integers(-8, 8)
    kind = draw(st.sampled_from(["plain", "hole", "parts", "crossing"]))
    x, y = draw(near), draw(near)
    angles = np.sort(draw(st.lists(st.floats(0, 6.28), min_size=5, max_size=9, unique_by=lambda a: round(a, 1))))
    far = np.array(draw(st.lists(st.integers(3, 8), min_size=len(angles), max_size=len(angles))))
    ring = np.round(np.stack([x + far * np.cos(angles), y + far * np.sin(angles)], 1), 2)
    if kind == "crossing":
        return shapely.Polygon(draw(st.permutations(ring.tolist())))
    shape = shapely.Polygon(ring).buffer(0)
    if kind == "hole":
        shape = shape.difference(shapely.box(x - 1, y - 1, x + 1, y + 1))
    if kind == "parts":
        shape = shape.union(shapely.box(x + 9, y, x + 11, y + 3))
    return shape


@examples(25)
@given(
    st.lists(polygons(), min_size=1, max_size=4), st.tuples(*[st.integers(-12, 12)] * 2), st.sampled_from([0.5, 3, 20])
)
def test_boxes_and_centres_of_polygons_are_those_of_shapely(
    shapes: list[Any], corner: tuple[int, int], edge: float
) -> None:
    """Whether a box meets a polygon, and its centre of area, agree with shapely: box in, across, around, and in a hole."""
    drawn = [shape for shape in shapes if shape.geom_type in ("Polygon", "MultiPolygon") and not shape.is_empty]
    made = shapes_of_geometries(np.array(drawn, object), {}, "polygons") if drawn else None
    for read in [] if made is None else [made, shapes_of_geometries(np.array([*drawn, HOLED], object), {}, "polygons")]:
        lo, hi = np.array(corner, float), np.array(corner, float) + edge
        met = intersects_box(read, lo, hi, closed=True)[: len(drawn)]
        # Even-odd, as `make_valid` takes rings that cross themselves.
        valid = [shapely.make_valid(shape) for shape in drawn]
        assert met.tolist() == shapely.intersects(valid, shapely.box(*lo, *hi)).tolist()
        sound = [row for row, shape in enumerate(drawn) if shape.is_valid and shape.area > 0.01]
        expected = shapely.get_coordinates(shapely.centroid([drawn[row] for row in sound]))
        assert np.allclose(object_centroids(read)[sound], expected.reshape(-1, 2), atol=1e-6)


def test_polygons_with_holes_are_boundaries(tmp_path: Path) -> None:
    """A file in which one polygon has a hole is added as outlines, and a box inside a plain cell or a hole is answered by the shapes."""
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    plain = shapely.box(20, 0, 24, 4)
    atlas.add(
        shapes_of_geometries(np.array([HOLED, plain], object), {"cell": Attribute(np.array(["a", "b"]))}, "cells"),
        progress=False,
    )
    query = atlas.checkout(atlas.snapshot()).query()
    found = {
        x: query.within((x, 1.9, x + 0.2, 2.1), BOUNDARY, by="exact").to_pandas()["cell"].tolist() for x in (0.5, 2, 22)
    }
    assert found == {0.5: ["a"], 2: [], 22: ["b"]}
    assert query.within((1.9, 1.9, 2.1, 2.1), by="centroid").to_pandas()["cell"].tolist() == ["a"]


@pytest.mark.long
@examples(15)
@given(st.lists(st.floats(-20, 120), min_size=4, max_size=4))
def test_a_box_by_boxes_and_centroids(view: AtlasView, slides: tuple[Slide, Slide], ends: list[float]) -> None:
    """Cells whose box meets the asked one, ends included, or whose centroid lies in it; as computed from the outlines."""
    lo, hi = np.minimum(ends[:2], ends[2:]), np.maximum(ends[:2], ends[2:])
    wanted: dict[str, int] = {"bbox": 0, "centroid": 0}
    for slide in slides:
        ring = rings(slide)
        wanted["bbox"] += int(((ring.max(axis=1) >= lo) & (ring.min(axis=1) <= hi)).all(axis=1).sum())
        middle = centres(slide)
        wanted["centroid"] += int(((middle >= lo) & (middle <= hi)).all(axis=1).sum())
    for by, n in wanted.items():
        assert view.query().within([*lo, *hi], BOUNDARY, by=by).count() == n  # type: ignore[arg-type]


@examples(10)
@given(st.floats(0, 95), st.floats(0, 95), st.floats(0.01, 20))
def test_a_box_by_shapes(view: AtlasView, slides: tuple[Slide, Slide], x: float, y: float, edge: float) -> None:
    """by="exact" keeps cells of which a point of a fine grid over the box lies inside, and none that no edge or inside touches."""
    exact = set(view.query().within((x, y, x + edge, y + edge), BOUNDARY, by="exact").to_pandas()["segment_id"])
    grid = np.stack(np.meshgrid(np.linspace(x, x + edge, 12), np.linspace(y, y + edge, 12)), axis=-1).reshape(-1, 2)
    inside, near = set(), set()
    for slide in slides:
        ring = rings(slide)
        a, b = ring[:, :, None], np.roll(ring, -1, axis=1)[:, :, None]
        spans = (a[..., 1] > grid[:, 1]) != (b[..., 1] > grid[:, 1])
        rise = np.where(b[..., 1] == a[..., 1], 1, b[..., 1] - a[..., 1])
        right = grid[:, 0] < a[..., 0] + (grid[:, 1] - a[..., 1]) * (b[..., 0] - a[..., 0]) / rise
        odd = ((spans & right).sum(axis=1) % 2 == 1).any(axis=1)
        inside |= set(slide.outlines.ids[odd].tolist())
        boxed = ((ring.max(axis=1) >= [x, y]) & (ring.min(axis=1) <= [x + edge, y + edge])).all(axis=1)
        near |= set(slide.outlines.ids[boxed].tolist())
    assert inside <= exact <= near


def test_a_box_composes_with_every_other_condition(view: AtlasView) -> None:
    """within() narrows like where(), before or after it; sampling, order, limit and joins follow; provenance says it."""
    box = (10.0, 10, 60, 60)
    plain = view.query().within(box, BOUNDARY).to_pandas()
    both = view.query().within(box, BOUNDARY).where(col("region") == "tumour")
    assert sorted(both.to_pandas().index) == sorted(plain.index[plain["region"] == "tumour"])
    assert both.to_anndata().n_obs == both.count()
    again = view.query().where({"region": "tumour"}).within(box, BOUNDARY).order_by("segment_id").limit(2)
    assert len(again.to_pandas()) == 2
    assert "within([10.0, 10.0, 60.0, 60.0]" in repr(again)
    assert both.to_anndata().uns["atlas"]["summary"].startswith("where within")
    twice = view.query().within(box, BOUNDARY).within((0, 0, 30, 30), BOUNDARY, by="centroid")
    assert twice.count() < len(plain)
    assert view.query().within((-np.inf, -np.inf, np.inf, np.inf), BOUNDARY).count() == 42


def test_shapes_stand_row_by_row(view: AtlasView, slides: tuple[Slide, Slide]) -> None:
    """Object i is that of row i, whatever the order; cells of other stores are joined, cells without are empty and say so."""
    query = view.query().order_by("segment_id", descending=True)
    shapes = query.geometry(BOUNDARY)
    rows = query.to_pandas()
    assert shapes.object_attributes["uid"].values.tolist() == rows.index.tolist()
    outlines = {int(i): ring for slide in slides for i, ring in zip(slide.outlines.ids, rings(slide), strict=True)}
    for i, segment in enumerate(rows["segment_id"]):
        own = shapes.positions[shapes.offsets[i] : shapes.offsets[i + 1]]
        assert np.array_equal(own, outlines.get(segment, np.zeros((0, 2))))
    present = shapes.object_attributes["present"].values.astype(bool)
    assert present.tolist() == [segment in outlines for segment in rows["segment_id"]]
    assert shapes.object_attributes["object_id"].values[~present].tolist() == [-1] * 4
    assert np.isnan(shapes.object_attributes["area"].values[~present]).all()
    assert view.query().where({"dataset": "plain"}).geometry(BOUNDARY).vertex_counts.tolist() == [0] * 4
    assert view.query().limit(0).geometry(BOUNDARY).n_objects == 0
    few = view.query().geometry(BOUNDARY, attributes=[])
    assert "area" not in few.object_attributes


def test_transcripts_of_cells_agree_with_counts(view: AtlasView, slides: tuple[Slide, Slide]) -> None:
    """The points of a cell, by their own attribute, are as many as its counts, gene by gene; others belong to nobody."""
    query = view.query().where({"dataset": "a"}).within((20, 20, 70, 70), BOUNDARY)
    points = query.geometry("transcripts")
    data = query.to_anndata()
    gene = points.vertex_attributes["gene"]
    names = np.array(gene.metadata["categories"])[gene.values]
    for i in range(data.n_obs):
        own = names[points.offsets[i] : points.offsets[i + 1]]
        found = {str(g): int(n) for g, n in zip(*np.unique(own, return_counts=True), strict=True)}
        row = data.X[i].toarray().ravel()
        assert found == {g: int(n) for g, n in zip(data.var_names, row, strict=True) if n}


def test_centroids_come_along(view: AtlasView, slides: tuple[Slide, Slide], tmp_path: Path) -> None:
    """obsm["spatial"] has the centre of every outline in row order, NaN without one, in memory, in batches and in files."""
    import anndata as ad

    query = view.query().with_centroids(BOUNDARY)
    data = query.to_anndata()
    wanted = {int(i): middle for s in slides for i, middle in zip(s.outlines.ids, centres(s), strict=True)}
    expected = np.array([wanted.get(i, [np.nan, np.nan]) for i in data.obs["segment_id"]])
    assert np.allclose(data.obsm["spatial"], expected, equal_nan=True)
    batches = np.concatenate([batch.obsm["spatial"] for batch in query.batches(7)])
    assert np.array_equal(batches, data.obsm["spatial"], equal_nan=True)
    query.write(str(tmp_path / "a.h5ad"))
    assert np.array_equal(ad.read_h5ad(tmp_path / "a.h5ad").obsm["spatial"], data.obsm["spatial"], equal_nan=True)
    assert "X_cells" in view.query().with_centroids(BOUNDARY, key="X_cells").to_anndata().obsm


@pytest.mark.nightly
def test_a_feature_space_is_asked_over_stores_of_several_names(slides: tuple[Slide, Slide], tmp_path: Path) -> None:
    """Stores of one feature space under different names answer together, one geometry a cell; only a cell with two is refused."""
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    for name, slide in zip("ab", slides, strict=True):
        atlas.add(slide.data, name, progress=False)
        called = {"link": "segment_id", "dataset": name, "space": BOUNDARY, "name": f"outlines_{name}"}
        atlas.add(slide.outlines, progress=False, **called)
    view = atlas.checkout(atlas.snapshot())
    n = [len(slide.outlines.ids) for slide in slides]
    box = (-np.inf, -np.inf, np.inf, np.inf)
    for space in (BOUNDARY, None):
        assert view.query().within(box, space).count() == sum(n)
        assert view.query().within(box, space, by="exact").count() == sum(n)
        assert view.query().geometry(space).vertex_counts.tolist() == [16] * sum(n)
        assert not np.isnan(view.query().with_centroids(space).to_anndata().obsm["spatial"]).any()
    assert view.query().within(box, "outlines_b").count() == n[1]
    assert view.query().where({"dataset": "b"}).geometry(BOUNDARY).n_objects == n[1]

    atlas.add(slides[0].outlines, link="segment_id", dataset="a", space=BOUNDARY, name="nuclei", progress=False)
    view = atlas.checkout(atlas.snapshot())
    for ask in (
        lambda query: query.geometry(BOUNDARY),
        lambda query: query.within(box, BOUNDARY).count(),
        lambda query: query.with_centroids(BOUNDARY).to_anndata(),
    ):
        with pytest.raises(QueryError, match=r"\['nuclei', 'outlines_a'\]"):
            ask(view.query())
        ask(view.query().where({"dataset": "b"}))
    with pytest.raises(NotFoundError, match="Several geometries"):
        atlas.drop_geometry(BOUNDARY)

    atlas.add(slides[0].outlines, link="segment_id", dataset="a", space=BOUNDARY, progress=False)
    view = atlas.checkout(atlas.snapshot())
    assert view.query().within(box, BOUNDARY).count() == sum(n)
    assert view.query().geometry(BOUNDARY).vertex_counts.tolist() == [16] * sum(n)
    assert atlas.drop_geometry(BOUNDARY).n_cells == n[0]


def test_attributes_of_several_stores_are_joined_by_name(slides: tuple[Slide, Slide], tmp_path: Path) -> None:
    """Categories are joined, what a store or a cell lacks is absent, and categories beside plain numbers are refused."""
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    least, first = slides[0].outlines.ids.min(), slides[1].outlines.ids.min()
    for name, slide, labels in zip("ab", slides, (["low", "high"], ["high", "top"]), strict=True):
        ids = slide.outlines.ids
        own = {"grade": Attribute(ids % 2, metadata={"categories": labels})}
        if name == "a":
            own["size"] = Attribute((ids - least).astype(np.uint8), present=ids > least)
        atlas.add(slide.data, name, progress=False)
        outlines = replace(slide.outlines, object_attributes=own)
        atlas.add(outlines, link="segment_id", dataset=name, space=BOUNDARY, progress=False)
    found = atlas.checkout(atlas.snapshot()).query().geometry(BOUNDARY).object_attributes
    ids, size = found["object_id"].values, found["size"]
    grades = [["low", "high", "top"][i % 2 + (i >= first)] for i in ids.tolist()]
    assert decode_categories(found["grade"]).tolist() == grades
    assert np.array_equal(size.present, (ids > least) & (ids < first))
    assert np.array_equal(size.values[size.present], (ids - least)[size.present])

    plain = replace(slides[1].outlines, object_attributes={"grade": Attribute(slides[1].outlines.ids)})
    atlas.add(plain, link="segment_id", dataset="b", space=BOUNDARY, on_duplicate="replace", progress=False)
    with pytest.raises(QueryError, match="'grade' has different shapes or types"):
        atlas.checkout(atlas.snapshot()).query().geometry(BOUNDARY)


def test_what_cannot_be_asked(view: AtlasView) -> None:
    """Boxes that are none, more axes than the shapes have, unknown geometry and levels are refused by name."""
    query = view.query()
    for box, words in (
        ((0, 0, 1), "got 3 numbers"),
        ((5, 0, 1, 1), "ends before it begins"),
        ((0, 0, np.nan, 1), "NaN"),
        ("abcd", "a box is numbers"),
        ((0, 0, 0, 1, 1, 1), "has the axes"),
        (range(10), "got 10 numbers"),
    ):
        with pytest.raises(QueryError, match=words):
            query.within(box, BOUNDARY)
    with pytest.raises(QueryError, match="by as 'bbox', 'centroid' or 'exact'"):
        query.within((0, 0, 1, 1), BOUNDARY, by="middle")  # type: ignore[arg-type]
    with pytest.raises(QueryError, match="has the geometries"):
        query.within((0, 0, 1, 1))
    with pytest.raises(NotFoundError, match="no geometry 'nuclei'"):
        query.geometry("nuclei")
    with pytest.raises(QueryError, match="not both"):
        query.geometry(BOUNDARY, level=0, budget=10)
    with pytest.raises(QueryError, match="There is no level -1"):
        query.geometry(BOUNDARY, level=-1)


def test_transcripts_are_counted_exactly() -> None:
    """Counts are those of a plain loop; cells by number or name, those of no cell counted apart."""
    rng = np.random.default_rng(0)
    genes, cells = rng.choice(["A", "B", "C"], 500), rng.choice(["x", "y", "NONE", "z"], 500)
    places = rng.normal(size=(500, 3))
    counted = transcripts_to_counts(
        make_transcripts(places, genes.tolist(), cells.tolist()), cells="cell_id", unassigned=["NONE"]
    )
    assert counted.obs_names.tolist() == ["x", "y", "z"]
    for i, cell in enumerate(counted.obs_names):
        for j, gene in enumerate(counted.var_names):
            assert counted.X[i, j] == np.count_nonzero((cells == cell) & (genes == gene))
        assert np.allclose(counted.obsm["spatial"][i], places[cells == cell].mean(axis=0))
    facts = counted.uns["transcripts"]
    assert (facts["n_transcripts"], facts["n_unassigned"]) == (500, int((cells == "NONE").sum()))


def test_transcripts_made_here_are_counted_without_naming_their_cell() -> None:
    """The column that make_transcripts calls cell_id is the cell, also of an empty name; points that tell no cell are refused."""
    spots = make_transcripts([[0.0, 0], [1, 1], [2, 2]], ["A", "B", "A"], ["x", "y", "x"])
    counts, named = transcripts_to_counts(spots), transcripts_to_counts(spots, cells="cell_id")
    assert counts.obs_names.tolist() == named.obs_names.tolist() == ["x", "y"]
    assert counts.X.toarray().tolist() == named.X.toarray().tolist() == [[2, 0], [0, 1]]
    stored = transcripts_to_counts(make_geometry(spots), cells="cell_id")
    assert stored.obs_names.tolist() == ["x", "y"]
    assert stored.X.toarray().tolist() == [[2, 0], [0, 1]]
    lost = Shapes("point_cloud", spots.positions, vertex_attributes={"gene": spots.vertex_attributes["gene"]})
    with pytest.raises(SourceError, match="name the vertex attribute that tells the cell"):
        transcripts_to_counts(lost)


def test_counts_and_transcripts_become_visible_together(slides: tuple[Slide, Slide], tmp_path: Path) -> None:
    """counts=True adds expression of registered genes and the points of the same cells; the same again is known."""
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    report = atlas.add(
        slides[0].transcripts, space="transcripts", counts=True, cells="cell_id", dataset="spots", progress=False
    )
    assert any("40 points belong to no cell" in note for note in report.notes)
    view = atlas.checkout(atlas.snapshot())
    data = view.query().to_anndata()
    there = slides[0].data[np.argsort(slides[0].outlines.ids)].X
    order = [slides[0].data.var_names.get_loc(gene) for gene in data.var_names]
    assert np.array_equal(data.X.toarray(), there.toarray()[:, order])
    assert set(data.var_names) <= set(view.features()["feature_id"])
    assert view.query().geometry("transcripts").vertex_counts.tolist() == data.X.toarray().sum(axis=1).tolist()
    with pytest.raises(DuplicateError):
        atlas.add(
            slides[0].transcripts, space="transcripts", counts=True, cells="cell_id", dataset="spots", progress=False
        )
    assert len(atlas.list_datasets()) == len(atlas.geometries()) == 1
    assert atlas.validate("deep") == []


@examples(60)
@given(st.integers(2, 3), st.integers(2, 3), st.integers(0, 2**32 - 1))
def test_separating_axes_agree_with_points(n_dims: int, corners: int, seed: int) -> None:
    """An edge or triangle of which a point of a fine mesh lies in the box meets it; one that does not meet it has none."""
    rng = np.random.default_rng(seed)
    simplex = rng.normal(size=(1, corners, n_dims))
    lo = rng.normal(size=n_dims) - 0.3
    hi = lo + rng.uniform(0.05, 1, n_dims)
    weights = rng.dirichlet(np.ones(corners), 4000)
    points = weights @ simplex[0]
    sampled = ((points >= lo) & (points <= hi)).all(axis=1).any()
    met = bool(simplices_intersect_box(simplex, lo, hi)[0])
    assert met or not sampled
    if met:
        gap = np.maximum(np.maximum(lo - points, points - hi), 0)
        assert np.sqrt((gap**2).sum(axis=1)).min() < 0.35


def test_meshes_and_skeletons_meet_boxes() -> None:
    """Faces count where no vertex lies in the box; polygons of more corners too; edges of a skeleton alone do not enclose."""
    square = np.array([[0.0, 0, 0], [10, 0, 0], [10, 10, 0], [0, 10, 0]])
    mesh = Shapes("mesh", square, links=np.array([[0, 1, 2, 3]]))
    lo, hi = np.array([2.0, 6, -1]), np.array([3.0, 7, 1])
    assert intersects_box(mesh, lo, hi).tolist() == [True]
    assert intersects_box(mesh, lo + np.array([0, 0, 2]), hi + np.array([0, 0, 2])).tolist() == [False]
    tree = Shapes("skeleton", square, links=np.array([[1, 0], [2, 1], [3, 2]]))
    assert intersects_box(tree, lo, hi).tolist() == [False]
    assert intersects_box(tree, np.array([4.0, -1, -1]), np.array([5.0, 1, 1])).tolist() == [True]

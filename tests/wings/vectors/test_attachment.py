"""Geometry in the atlas: linked with cells or made into cells, all or nothing, refused by name."""

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import geopandas
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import shapely

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.catalog import assets
from raggedatlas.catalog.catalog import CELLS
from raggedatlas.errors import (
    ArgumentError,
    AtlasError,
    CorruptError,
    DuplicateError,
    NotFoundError,
    QueryError,
    SchemaError,
    SourceError,
    StoreError,
    ValuesError,
)
from raggedatlas.ingest import add as adding
from raggedatlas.ingest.annotations import text_of_column
from raggedatlas.model.frames import find_column
from raggedatlas.model.ids import integer_ids
from raggedatlas.model.spaces import FeatureSpace, GeometryPointer, PointerKind, pointer_columns, pointer_field
from raggedatlas.store.arrays import write_group_attributes
from raggedatlas.store.location import Location, list_files, read_blocks
from raggedatlas.store.tables import Tables
from raggedatlas.wings.results.schema import as_ids
from raggedatlas.wings.vectors import attachment as geometry
from raggedatlas.wings.vectors import attachment_plan as geometry_plan
from raggedatlas.wings.vectors.assets import GEOMETRY, SHAPE_ENDINGS
from raggedatlas.wings.vectors.attachment import make_transcripts, transcripts_to_counts
from raggedatlas.wings.vectors.attachment_plan import comparable_keys, object_bounds, owner_codes
from raggedatlas.wings.vectors.builder import make_geometry
from raggedatlas.wings.vectors.converters.content import table_content
from raggedatlas.wings.vectors.converters.convert import ENDINGS, REORDERED, read_file, write_file
from raggedatlas.wings.vectors.converters.geospatial import frame_content
from raggedatlas.wings.vectors.reader import open_vectors
from raggedatlas.wings.vectors.shapes import Attribute, Groups, Shapes, take_objects
from raggedatlas.wings.vectors.writer import write
from support.spatial import Slide, make_slide, spots

BOUNDARY = "segmentation_boundary"
LINKED: dict[str, Any] = {"link": "segment_id", "progress": False}
DEAD_PROCESS = int(
    subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True).stdout
)


@pytest.fixture(scope="module")
def slide() -> Slide:
    return make_slide(20)


@pytest.fixture(scope="module")
def template(slide: Slide, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An atlas that has the slide's counts, copied for every test; moving the folder moves the atlas."""
    folder = tmp_path_factory.mktemp("template") / "atlas"
    made = RaggedAtlas.create(str(folder))
    made.add(slide.data, "slide", progress=False)
    made.optimize()
    write(make_geometry(slide.outlines), folder.with_name("cells.zv"))
    write(make_geometry(slide.outlines), folder.with_name("old.zv"), layout="0.7")
    return folder


@pytest.fixture
def atlas(template: Path, tmp_path: Path) -> RaggedAtlas:
    shutil.copytree(template, tmp_path / "atlas")
    return RaggedAtlas.open(str(tmp_path / "atlas"))


def view_of(atlas: RaggedAtlas) -> Any:
    return atlas.checkout(atlas.snapshot())


def test_a_pointer_is_a_struct_that_names_its_space() -> None:
    """The column of a geometry pointer tells kind and feature space by itself, and a box that is none is refused."""
    import pyarrow as pa

    field = pointer_field("nuclei", PointerKind.GEOMETRY, BOUNDARY)
    assert pointer_columns(pa.schema([field])) == {"nuclei": (BOUNDARY, PointerKind.GEOMETRY)}
    assert list(GeometryPointer.model_fields) == [f.name for f in GeometryPointer.arrow_type]
    with pytest.raises(ValueError, match="x_min <= x_max"):
        GeometryPointer(zarr_group="a/b", object_id=1, x_min=2, x_max=1)
    with pytest.raises(SchemaError, match="a geometry space has shapes"):
        FeatureSpace("shapes", PointerKind.GEOMETRY)


@pytest.mark.parametrize("store", ["cells.zv", "old.zv"])
def test_a_store_is_copied_byte_for_byte_and_linked(
    atlas: RaggedAtlas, slide: Slide, template: Path, store: str
) -> None:
    """A store of either layout lies under the atlas as it was; every cell points to its object, box and centroid."""
    origin = Location(str(template.with_name(store)))
    report = atlas.add(origin.uri, **LINKED)
    assert (report.status, report.n_cells, report.n_datasets, report.n_new_cells) == ("added", 20, 1, 0)
    copied = atlas._catalog.arrays.child(*report.zarr_group.split("/"))
    assert list_files(copied) == list_files(origin)
    assert all(
        b"".join(read_blocks(copied, key)) == b"".join(read_blocks(origin, key)) for key, _ in list_files(origin)
    )
    rows = atlas._catalog.tables.read(CELLS, ["segment_id", BOUNDARY]).to_pylist()
    lo, hi = object_bounds(slide.outlines)
    for row in rows:
        pointer = GeometryPointer(**row[BOUNDARY])
        at = int(np.flatnonzero(slide.outlines.ids == row["segment_id"])[0])
        assert pointer.object_id == row["segment_id"]
        assert pointer.bbox == (tuple(lo[at]), tuple(hi[at]))
        middle = slide.outlines.positions[at * 16 : at * 16 + 16].mean(axis=0)
        assert np.allclose(pointer.centroid, middle)
    assert atlas.validate("deep") == []


def test_shapes_in_memory_are_linked_by_an_attribute(atlas: RaggedAtlas, slide: Slide) -> None:
    """{column: attribute} matches values of the objects, text with text; a name of their own is the cell column."""
    names = np.array([f"cell-{i}" for i in range(20)])
    named = replace(slide.outlines, object_attributes={"label": names}, ids=np.arange(20) * 10**15)
    report = atlas.add(named, "nuclei", link={"cell_name": "label"}, space=BOUNDARY, progress=False)
    assert (report.name, report.column, report.space) == ("nuclei", "nuclei", BOUNDARY)
    shapes = view_of(atlas).query().geometry("nuclei")
    assert np.array_equal(shapes.positions, slide.outlines.positions)


def test_objects_without_a_link_become_cells(atlas: RaggedAtlas, slide: Slide) -> None:
    """Every object is a cell of a new dataset, named by its id, with the attributes as columns; its dataset has shapes alone."""
    report = atlas.add(slide.outlines, dataset="outlines", progress=False)
    assert (report.n_new_cells, report.n_datasets) == (20, 1)
    view = view_of(atlas)
    frame = view.query().where({"dataset": "outlines"}).to_pandas()
    assert frame["cell_name"].tolist() == [str(i) for i in slide.outlines.ids]
    assert np.array_equal(frame["area"], slide.outlines.object_attributes["area"].values)
    shapes = view.query().geometry()
    assert shapes.object_attributes["present"].values.tolist() == [0] * 20 + [1] * 20
    with pytest.raises(NotFoundError, match=r"shapes in .*no values"):
        view.dataset("outlines").to_anndata()
    assert atlas.validate("deep") == []
    with pytest.raises(DuplicateError, match="same cells already"):
        atlas.add(slide.outlines, dataset="again", progress=False)


@pytest.mark.long
def test_new_cells_beside_linked_ones(atlas: RaggedAtlas, slide: Slide) -> None:
    """With new_cells=True objects without a cell become cells of a dataset of their own; both become visible at once."""
    moved = replace(
        slide.outlines, ids=np.where(slide.outlines.ids < 105, slide.outlines.ids + 900, slide.outlines.ids)
    )
    report = atlas.add(moved, link="segment_id", new_cells=True, lacking="allow", progress=False)
    assert (report.n_cells, report.n_new_cells, report.n_datasets) == (20, 5, 2)
    shapes = view_of(atlas).query().geometry()
    assert (shapes.n_objects, int(shapes.object_attributes["present"].values.sum())) == (25, 20)
    atlas.drop_dataset(report.dataset_uid)
    assert view_of(atlas).query().geometry().object_attributes["present"].values.sum() == 15
    assert atlas.validate("deep") == []


Refusal = Callable[[Slide], tuple[Any, dict[str, Any]]]
REFUSED: dict[str, tuple[Refusal, type[AtlasError], str]] = {
    "link column": (lambda s: (s.outlines, {"link": "segment"}), NotFoundError, "no such column"),
    "object attribute": (lambda s: (s.outlines, {"link": {"segment_id": "label"}}), NotFoundError, "no attribute 'label'"),
    "link of two": (lambda s: (s.outlines, {"link": {"a": "b", "c": "d"}}), SourceError, "is not understood"),
    "ids without a cell": (
        lambda s: (replace(s.outlines, ids=s.outlines.ids + 3), {"link": "segment_id"}),
        SourceError,
        "3 of 20 objects .* have no cell .*unknown='skip'",
    ),
    "cells without a shape": (
        lambda s: (take_objects(s.outlines, np.arange(5)), {"link": "segment_id"}),
        SourceError,
        "15 cells of .'slide'. have no shape, first .*lacking='allow'",
    ),
    "no cell at all": (
        lambda s: (replace(s.outlines, ids=s.outlines.ids + 1000), {"link": "segment_id"}), SourceError, "No cell has a value",
    ),
    "cells that share a value": (
        lambda s: (replace(s.outlines, object_attributes={"region": np.array(["x"] * 19 + ["tumour"])}), {"link": "region"}),
        SourceError,
        "more than once",
    ),
    "values that several cells have": (
        lambda s: (
            take_objects(replace(s.outlines, object_attributes={"region": np.array(["tumour"] * 20)}), np.arange(1)),
            {"link": "region", "lacking": "allow"},
        ),
        SourceError,
        "stand in several cells, first tumour",
    ),
    "positions that are not finite": (
        lambda s: (replace(s.outlines, positions=np.where(np.arange(320)[:, None] == 40, np.nan, s.outlines.positions)), {}),
        ValuesError,
        "1 positions are not finite, first in object",
    ),
    "wrong type": (lambda s: (s.outlines, {"space": "morphology"}) and (s.transcripts, {"space": "tract", "cells": "cell_id"}),
                   SchemaError, "takes streamline .* holds a point_cloud"),
    "more than a point": (
        lambda s: (s.transcripts, {"space": "position", "cells": "cell_id"}), SchemaError, "takes one point a cell",
    ),
    "no space for shapes": (lambda s: (s.outlines, {"space": "gene_expression"}), SchemaError, "holds sparse matrices"),
    "unknown space": (lambda s: (s.outlines, {"space": "outlines"}), NotFoundError, "knows no feature space"),
    "unknown dataset": (lambda s: (s.outlines, {"link": "segment_id", "dataset": "other"}), NotFoundError, "no dataset"),
    "taken column": (lambda s: (s.outlines, {"name": "region"}), SchemaError, "have a column 'region'"),
    "name of another space": (lambda s: (s.outlines, {"name": "tract"}), SchemaError, "another feature space"),
    "bad name": (lambda s: (s.outlines, {"name": "a-b"}), AtlasError, "cannot be a geometry's"),
    "points without objects": (lambda s: (s.transcripts, {}), SourceError, "points without objects"),
    "unknown owner": (lambda s: (s.transcripts, {"cells": "cell"}), NotFoundError, "no attribute 'cell'"),
    "cells of what is no points": (
        lambda s: (
            replace(s.outlines, kind="graph", links=np.array([[0, 1]]), vertex_attributes={"cell": np.arange(320)}), {"cells": "cell"},
        ),
        SourceError, "would take a graph apart; leave it out",
    ),
    "unknown gene": (lambda s: (s.transcripts, {"cells": "cell_id", "counts": True, "genes": "g"}), NotFoundError, "no attribute 'g'"),
    "counts of linked cells": (
        lambda s: (s.transcripts, {"cells": "cell_id", "counts": True, "link": "segment_id"}), SourceError, "leave one out",
    ),
    "unknown choice": (lambda s: (s.outlines, {"lacking": "no"}), ArgumentError, "takes lacking as"),
    "choice of files": (lambda s: (s.outlines, {"embeddings": ["a"]}), SourceError, "does not know"),
    "two ways": (
        lambda s: (s.outlines, {"link": "segment_id", "new_cells": True, "unknown": "skip"}), SourceError, "choose one",
    ),
}  # fmt: skip


def test_what_is_refused_leaves_the_atlas_as_it_was(atlas: RaggedAtlas, slide: Slide) -> None:
    """Every way to be wrong is refused by name before anything is written."""
    tables = atlas._catalog.tables

    def state() -> Any:
        folders = atlas._catalog.arrays.list_children()
        return {name: tables.version(name) for name in tables.names()}, folders

    before = state()
    for way, (make, error, words) in REFUSED.items():
        source, choices = make(slide)
        with pytest.raises(error, match=words):
            atlas.add(source, progress=False, **choices)
        assert state() == before, way


def test_a_matrix_is_no_shape(atlas: RaggedAtlas, slide: Slide) -> None:
    """A matrix cannot go into a feature space of shapes."""
    with pytest.raises(SchemaError, match="holds shapes, X is a matrix"):
        atlas.add(slide.data, "other", spaces={"X": "morphology"}, progress=False)


@pytest.mark.long
def test_the_same_shapes_are_known_again(atlas: RaggedAtlas, slide: Slide, template: Path) -> None:
    """Again is an error, 'skip' leaves them, 'replace' puts others in their place; a dataset has one geometry of a name."""
    store = str(template.with_name("cells.zv"))
    first = atlas.add(store, **LINKED)
    with pytest.raises(DuplicateError, match="of the same cells already"):
        atlas.add(store, **LINKED)
    assert atlas.add(store, on_duplicate="skip", **LINKED).status == "skipped"
    assert atlas.add(store, dry_run=True, name="again", **LINKED).status == "dry run"
    old = view_of(atlas)
    moved = replace(slide.outlines, positions=slide.outlines.positions + 500)
    second = atlas.add(moved, on_duplicate="replace", **LINKED)
    assert second.status == "replaced"
    assert second.column != first.column
    new = view_of(atlas)
    assert old.query().geometry().positions.max() < 300 < new.query().geometry().positions.min()
    assert atlas.geometries().index.tolist() == [second.zarr_group.split("/")[0]]
    assert atlas.validate("deep") == []
    third = atlas.add(slide.outlines, on_duplicate="replace", **LINKED)
    assert third.column == BOUNDARY
    assert pointer_columns(atlas._catalog.tables.schema(CELLS)).keys() == {"gene_expression", BOUNDARY}


MEMBERS = np.array([0, 2]), np.array([100, 101])


@pytest.mark.parametrize(
    "changes",
    [
        {"object_attributes": {"area": Attribute(np.ones((20, 2)), present=np.arange(20) > 3)}},
        {"object_attributes": {"area": Attribute(np.ones((20, 2)), ("before", "after"))}},
        {"groups": Groups(*MEMBERS)},
        {"groups": Groups(*MEMBERS, {"name": Attribute(np.array(["left"]))})},
    ],
)
def test_shapes_that_differ_anywhere_are_not_the_same(
    atlas: RaggedAtlas, slide: Slide, changes: dict[str, Any]
) -> None:
    """Missing values, names of channels and groups are stored too: with others shapes are no duplicate to skip, and the error says what helps."""
    first = replace(slide.outlines, object_attributes={"area": Attribute(np.ones((20, 2)))})
    atlas.add(first, **LINKED)
    with pytest.raises(DuplicateError, match="on_duplicate='replace'"):
        atlas.add(replace(first, **changes), on_duplicate="skip", **LINKED)
    assert atlas.add(first, on_duplicate="skip", **LINKED).status == "skipped"


@pytest.mark.long
def test_two_datasets_share_a_column(atlas: RaggedAtlas, template: Path) -> None:
    """Values that stand in two datasets need dataset=...; the geometry of both is one name, in one column."""
    other = make_slide(20, seed=1)
    atlas.add(other.data, "second", progress=False)
    with pytest.raises(SourceError, match=r"several cells, first .* in the datasets \['second', 'slide'\]; say which"):
        atlas.add(str(template.with_name("cells.zv")), **LINKED)
    a = atlas.add(str(template.with_name("cells.zv")), dataset="slide", **LINKED)
    b = atlas.add(other.outlines, dataset="second", **LINKED)
    assert a.column == b.column == BOUNDARY
    shapes = view_of(atlas).query().geometry()
    assert shapes.object_attributes["present"].values.all()
    assert len(view_of(atlas).query().within((0, 0, 50, 50)).where({"dataset": "second"}).to_pandas()) > 0
    atlas.drop_geometry(BOUNDARY, "second")
    left = view_of(atlas).query().geometry()
    assert left.object_attributes["present"].values.tolist() == [1] * 20 + [0] * 20


def _die(atlas: RaggedAtlas, monkeypatch: pytest.MonkeyPatch, step: str, add: Callable[[Any], Any]) -> None:
    """Add, and stop at a step as a killed process does: nothing is tidied up, and its lease is a dead one's."""

    class Killed(BaseException):
        pass

    def progress(now: str, *_: int) -> None:
        if now == step:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(geometry.GeometryAttachment, "discard", lambda *_: None)
        with contextlib.suppress(Killed):
            add(progress)
    catalog = atlas._catalog
    for uid in catalog.arrays.list_children():
        lease = assets.read_lease(catalog, uid)
        if lease:
            write_group_attributes(catalog.arrays, uid, {"raggedatlas": {"ingest": {**lease, "pid": DEAD_PROCESS}}})


@pytest.mark.long
@pytest.mark.parametrize("linked", [True, False])
def test_killed_anywhere(atlas: RaggedAtlas, slide: Slide, monkeypatch: pytest.MonkeyPatch, linked: bool) -> None:
    """Killed at any step, nothing is visible or all of it; repair removes what was left, and the call can be run again."""
    choices: dict[str, Any] = {"link": "segment_id"} if linked else {"dataset": "outlines"}
    for step in ("lease", "store", "columns", "pointers", "cells"):
        _die(atlas, monkeypatch, step, lambda progress: atlas.add(slide.outlines, progress=progress, **choices))
        assert len(atlas.geometries()) == 0, step
        assert len(atlas.list_datasets()) == 1, step
        assert [p for p in atlas.validate("rows") if p.rule != "uncommitted-cells"] == [], step
    atlas.repair()
    assert atlas.repair().groups == ()
    assert GEOMETRY.read(atlas._catalog) == []
    assert atlas._catalog.tables.count(CELLS, f"{BOUNDARY}.zarr_group IS NOT NULL") == 0
    assert len(atlas._catalog.arrays.list_children()) == 1
    assert atlas.add(slide.outlines, progress=False, **choices).status == "added"
    assert atlas.validate("deep") == []


def test_a_drop_beside_an_add_spares_its_column(
    atlas: RaggedAtlas, slide: Slide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drop of other geometry between the column of an `add` and its pointers, which once were dropped with the column."""
    atlas.add(slide.outlines, **LINKED)
    fill, dropped = geometry.update_columns, list[Any]()

    def after_a_drop(*words: Any) -> None:
        # The drop conflicts with the pointers, which are written again.
        if BOUNDARY in list(atlas.geometries()["name"]):
            with monkeypatch.context() as patch:
                patch.setattr(Tables, "drop_columns", lambda tables, name, columns, kept: dropped.extend(columns))
                RaggedAtlas.open(atlas.uri).drop_geometry(BOUNDARY)
        fill(*words)

    monkeypatch.setattr(geometry, "update_columns", after_a_drop)
    assert atlas.add(slide.outlines, **{**LINKED, "name": "mine"}).status == "added"
    assert dropped == []
    monkeypatch.undo()
    atlas.drop_geometry("mine")
    assert "mine" not in atlas._catalog.tables.schema(CELLS).names


@pytest.mark.long
def test_snapshots_keep_their_shapes(atlas: RaggedAtlas, slide: Slide) -> None:
    """An old snapshot reads the old shapes after a drop; restore brings them back; gc frees only what none reaches; diff names them."""
    report = atlas.add(slide.outlines, **LINKED)
    first = atlas.snapshot()
    atlas.drop_geometry(BOUNDARY)
    second = atlas.snapshot()
    assert atlas.gc(dry_run=False).groups == ()
    old = atlas.checkout(first)
    assert np.array_equal(old.query().geometry().positions, slide.outlines.positions)
    assert BOUNDARY in repr(old)
    assert f"geometry {BOUNDARY}: " in repr(old)
    with pytest.raises(NotFoundError, match="no geometry"):
        atlas.checkout(second).query().geometry(BOUNDARY)
    uid = report.zarr_group.split("/")[0]
    assert atlas.diff(first, second).assets_removed == {"geometry": (f"{BOUNDARY} ({uid})",)}
    assert atlas.diff(second, first).assets_added == {"geometry": (f"{BOUNDARY} ({uid})",)}
    atlas.restore(first)
    assert atlas.geometries().index.tolist() == [uid]
    assert atlas.validate("deep") == []
    atlas.drop_geometry(BOUNDARY)
    from raggedatlas.catalog.snapshots import drop_snapshot

    drop_snapshot(atlas._catalog, first)
    assert atlas.gc(dry_run=False).groups == (uid,)


def test_shapes_that_are_cells_go_with_their_dataset(atlas: RaggedAtlas, slide: Slide) -> None:
    """`drop_geometry` refuses a store whose objects became cells, which once left a dataset that no snapshot accepts."""
    atlas.add(slide.outlines, "outlines", dataset="shapes", progress=False)
    shown = atlas.geometries()
    with pytest.raises(QueryError, match=r"cells of the dataset 'shapes'.*drop_dataset\('[0-9a-f]{16}'\)"):
        atlas.drop_geometry("outlines")
    assert atlas.geometries().equals(shown)
    atlas.drop_dataset("shapes")
    assert atlas.geometries().empty
    atlas.snapshot()


@pytest.mark.long
def test_a_purge_takes_the_shapes_too(atlas: RaggedAtlas, slide: Slide) -> None:
    """A purged dataset's shapes go from the tip, from every snapshot, and from the disk."""
    report = atlas.add(slide.outlines, **LINKED)
    atlas.add(make_slide(9, seed=2, first=1000).data, "other", progress=False)
    version = atlas.snapshot()
    atlas.purge("slide")
    assert GEOMETRY.read(atlas._catalog) == []
    view = atlas.checkout(version)
    assert view.geometries().empty
    assert not atlas._catalog.arrays.child(report.zarr_group.split("/")[0]).exists()
    assert atlas.validate("deep") == []


@pytest.mark.long
def test_damage_is_found(atlas: RaggedAtlas, slide: Slide) -> None:
    """Lost or changed files, lost pointers, wrong boxes and columns are named by rule."""
    report = atlas.add(slide.outlines, **LINKED)
    catalog = atlas._catalog
    place = catalog.arrays.child(*report.zarr_group.split("/"))
    key = next(key for key, size in list_files(place) if "vertices" in key and not key.endswith("zarr.json"))
    file = Path(place.uri, key)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert {p.rule for p in atlas.validate("deep")} == {"store-files"}
    file.write_bytes(whole)
    root = Path(place.uri, "zarr.json")
    kept = root.read_bytes()
    root.unlink()
    assert {p.rule for p in atlas.validate("rows")} == {"missing-store"}
    root.write_bytes(kept)
    catalog.tables.open(CELLS).delete("cell_name = 'cell-3'")
    assert "geometry-count" in {p.rule for p in atlas.validate("rows")}
    catalog.tables.drop_columns(CELLS, [BOUNDARY])
    assert {p.rule for p in atlas.validate("quick")} == {"geometry-column"}


def test_what_counts_as_geometry(template: Path, slide: Slide, tmp_path: Path) -> None:
    """A store on disk or shapes in memory are geometry; an empty folder, a file or AnnData are not."""
    assert GEOMETRY.accepts(str(template.with_name("cells.zv")))
    assert GEOMETRY.accepts(slide.outlines)
    assert GEOMETRY.accepts(make_geometry(slide.outlines))
    (tmp_path / "a.h5ad").write_bytes(b"")
    assert {*SHAPE_ENDINGS} == {*ENDINGS} - {".csv", ".tsv"}
    for other in (tmp_path, tmp_path / "a.h5ad", slide.data, "https://a/b.zv", 3):
        assert not GEOMETRY.accepts(other)


@pytest.mark.parametrize("file", ["a.geojson", "a.geoparquet", "a.parquet", "a.zarr", "a.zarr/shapes/elements"])
@pytest.mark.parametrize("index", ["segment_id", "cell_name", "EntityID"])
def test_a_file_of_shapes_is_added_by_what_is_in_it(
    atlas: RaggedAtlas, slide: Slide, tmp_path: Path, file: str, index: str
) -> None:
    """GeoJSON, GeoParquet under either ending and SpatialData give cells their outlines, linked by a property or the index by its name."""
    ids = slide.data.obs_names if index == "cell_name" else slide.data.obs["segment_id"]
    outlines = [shapely.Polygon(ring) for ring in np.split(slide.outlines.positions, slide.outlines.offsets[1:-1])]
    frame = geopandas.GeoDataFrame({"area": 1.5}, geometry=outlines[::-1], index=pd.Index(ids[::-1], name=index))
    place = tmp_path / file.split("/", maxsplit=1)[0]
    if file.endswith(".geojson"):
        place.write_text(frame.reset_index().to_json())
    elif "zarr" not in file:
        frame.to_parquet(place)
    else:
        write_file(frame_content(frame, "the frame"), place, format="spatialdata")
    link = {"segment_id": index} if index == "EntityID" else index
    report = atlas.add(tmp_path / file, link=link, progress=False)
    assert (report.n_cells, report.n_new_cells, report.space) == (20, 0, BOUNDARY)
    found = view_of(atlas).query().geometry()
    assert np.array_equal(found.positions, np.concatenate([shapely.get_coordinates(outline) for outline in outlines]))
    assert found.object_attributes["uid"].values.tolist() == view_of(atlas).query().to_pandas().index.tolist()
    assert atlas.validate("deep") == []


def test_a_store_of_several_elements_is_refused_with_their_paths(atlas: RaggedAtlas, tmp_path: Path) -> None:
    """Of a SpatialData store each element is added by its path; what of a store is not read is told."""
    square = Shapes("polyline", np.array([[0.0, 0], [1, 0], [1, 1], [0, 0]]), np.array([0, 4]))
    write_file(square, tmp_path / "a.zarr", format="spatialdata")
    (tmp_path / "a.zarr" / "images" / "he").mkdir(parents=True)
    with pytest.raises(SourceError, match=r"of 2 elements: shapes/elements, images/he. Add each by its path"):
        atlas.add(tmp_path / "a.zarr", progress=False)
    assert read_file(tmp_path / "a.zarr").left == ("element 'images/he' is left out",)
    assert read_file(tmp_path / "a.zarr", element="shapes/elements").left == ()


def test_what_a_file_of_shapes_lacks_stays_missing(atlas: RaggedAtlas, tmp_path: Path) -> None:
    """A property that a feature lacks is missing in the cell column, and no id of a link; what was not read is in the report."""
    square = shapely.geometry.mapping(shapely.Point(0, 0).buffer(1, quad_segs=1))
    told = [{"n": 3, "ok": True, "label": "a"}, {"label": "b"}, {"n": 2**60 + 1, "ok": False}]
    features = [{"type": "Feature", "properties": of, "geometry": square, "extra": 1} for of in told]
    file = tmp_path / "new.geojson"
    file.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    report = atlas.add(file, progress=False)
    assert "'extra' of 3 features is left out" in report.notes
    obs = view_of(atlas).query().where("dataset == 'new'").to_pandas()
    assert obs[["n", "ok", "label"]].astype(object).where(obs[["n", "ok", "label"]].notna(), None).to_numpy().tolist() == [
        [3, True, "a"], [None, None, "b"], [2**60 + 1, False, None],
    ]  # fmt: skip
    with pytest.raises(SourceError, match=r"1 of 3 objects .* have no cell by 'label', first None"):
        atlas.add(file, link="label", name="again", progress=False)


def test_an_order_that_is_not_kept_is_in_the_report(atlas: RaggedAtlas, slide: Slide) -> None:
    """Vertices that a store numbers anew are told; outlines keep their order."""
    ring = np.array([[0.0, 0], [9, 0], [0, 1]])
    links = np.array([[0, 1], [1, 2]])
    cut = Shapes("graph", ring, ids=np.array([0]), links=links)
    assert REORDERED in atlas.add(cut, progress=False).notes
    assert REORDERED not in atlas.add(slide.outlines, **LINKED).notes


def test_coarser_levels_and_empty_objects(atlas: RaggedAtlas, slide: Slide) -> None:
    """A pointer names the coarsest level that holds its object; an object without vertices has no box, and is told."""
    offsets = slide.outlines.offsets.copy()
    offsets[1] = 0
    emptied = replace(slide.outlines, offsets=offsets, positions=slide.outlines.positions)
    report = atlas.add(emptied, **LINKED)
    assert any("1 objects have no vertices" in note for note in report.notes)
    pointer = atlas._catalog.tables.read(CELLS, [BOUNDARY]).column(0).to_pylist()[0]
    assert pointer["x_min"] is None
    assert pointer["object_id"] == int(slide.outlines.ids[0])
    view = view_of(atlas)
    assert view.query().within((-1e9, -1e9, 1e9, 1e9)).count() == 19
    assert view.query().geometry().vertex_counts[0] == 0
    assert atlas.validate("deep") == []


def test_the_row_of_the_registry(atlas: RaggedAtlas, slide: Slide) -> None:
    """The registry tells what was added, where it lies and how it is linked."""
    atlas.add(slide.outlines, **LINKED)
    (record,) = GEOMETRY.read(atlas._catalog)
    assert json.loads(record.link) == {"segment_id": ""}
    assert (record.types, record.axes, record.n_objects, record.n_vertices) == (["polyline"], ["x", "y"], 20, 320)
    assert record.extent[0] == tuple(slide.outlines.positions.min(axis=0))
    assert record.cells_of == {atlas.list_datasets().index[0]: 20}
    assert atlas._catalog.tables.has(GEOMETRY.table)


def test_a_gene_that_has_no_name_is_refused(atlas: RaggedAtlas) -> None:
    """Transcripts whose gene is none of the categories, or that have none, are refused."""
    points = Shapes(
        "point_cloud", np.zeros((2, 2)), vertex_attributes={"gene": np.array([0, 5]), "cell_id": np.array([1, 1])}
    )
    from raggedatlas.wings.vectors.attachment import transcripts_to_counts

    with pytest.raises(SourceError, match="numbers without names"):
        transcripts_to_counts(points, cells="cell_id")
    with pytest.raises(CorruptError, match="1 transcripts name a gene"):
        transcripts_to_counts(points, cells="cell_id", gene_names=["A"])


@pytest.mark.long
def test_counts_first_and_other_shapes_linked_with_them(tmp_path: Path) -> None:
    """What `counts=True` with a link is refused for has a way: transcripts make the cells, outlines are linked with these by name."""
    slide = make_slide(20, seed=5)
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    made = atlas.add(
        slide.transcripts, space="transcripts", counts=True, cells="cell_id", dataset="slide", progress=False
    )
    linked = atlas.add(slide.outlines, link="cell_name", space="segmentation_boundary", progress=False)
    assert (made.n_new_cells, linked.n_cells, linked.n_new_cells) == (20, 20, 0)
    query = atlas.checkout(atlas.snapshot()).query().within((10, 10, 60, 60), "segmentation_boundary")
    data, points, outlines = query.to_anndata(), query.geometry("transcripts"), query.geometry("segmentation_boundary")
    assert 0 < data.n_obs < 20
    assert data.obs["cell_name"].tolist() == [str(i) for i in outlines.object_attributes["object_id"].values]
    assert np.array_equal(np.asarray(data.X.sum(axis=1)).ravel(), points.vertex_counts)


@pytest.mark.parametrize("cells", [1, 500_000])
def test_counts_that_fill_a_commit_keep_their_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cells: int
) -> None:
    """Transcripts whose counts are as many cells as one commit takes are linked like those of fewer cells."""
    monkeypatch.setattr(adding, "COMMIT_CELLS", cells)
    slide = make_slide(20, seed=5)
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(slide.transcripts, space="transcripts", counts=True, cells="cell_id", dataset="slide", progress=False)
    assert len(atlas.geometries()) == 1
    assert view_of(atlas).query().geometry("transcripts").n_objects == 20
    assert atlas.validate("deep") == []


def test_missing_values_match_no_object(atlas: RaggedAtlas, slide: Slide) -> None:
    """A cell without a value in the linked column is not linked with an object whose value is missing, too."""
    label = np.arange(20.0)
    label[[3, 7]] = np.nan
    frame = pd.DataFrame({"uid": view_of(atlas).query().to_pandas().index, "place": [None, 7.0, *np.arange(2.0, 20.0)]})
    atlas.annotate(frame, name="places")
    named = replace(slide.outlines, object_attributes={"label": label})
    report = atlas.add(
        named, "nuclei", link={"place": "label"}, space=BOUNDARY, lacking="allow", unknown="skip", progress=False
    )
    table = atlas._catalog.tables.read(CELLS)
    place = find_column(table.schema, "place")
    linked = {row[place]: row["nuclei"]["object_id"] for row in table.to_pylist() if row["nuclei"] is not None}
    assert linked == {float(i): int(slide.outlines.ids[i]) for i in range(2, 20) if i not in (3, 7)}
    assert report.n_cells == 16


def test_ids_beyond_int64_are_compared_as_text() -> None:
    """Integers of 2**63 and more are matched as they are."""
    big = pa.array([2**63, 5], pa.uint64())
    keys, values = comparable_keys(big, pa.chunked_array([pa.array([5, 2**63 + 1], pa.uint64())]), "id")
    assert (keys.to_pylist(), values.to_pylist()) == ([str(2**63), "5"], ["5", str(2**63 + 1)])


def test_values_that_are_no_ids_are_refused() -> None:
    """The refusal of a link by dates says what can be matched."""
    dates = pa.chunked_array([pa.array([0], pa.date32())])
    with pytest.raises(SourceError, match=r"'born' are date32\[day\]; whole numbers or text can be matched\.$"):
        comparable_keys(pa.array([1]), dates, "born")


def _points(values: Any) -> Shapes:
    return Shapes("point_cloud", np.zeros((len(values), 2)), vertex_attributes={"cell": values})


DOORS: dict[str, Callable[[Any], Any]] = {
    "link, objects": lambda ids: comparable_keys(pa.array(ids), pa.chunked_array([[1]]), "id")[0].to_pylist(),
    "link, cells": lambda ids: comparable_keys(pa.array([1]), pa.chunked_array([pa.array(ids)]), "id")[1].to_pylist(),
    "owner": lambda ids: geometry_plan.group_by_owner(_points(ids), "cell")[0].ids.tolist(),
    "transcripts": lambda ids: transcripts_to_counts(
        make_transcripts(np.zeros((len(ids), 2)), ["A"] * len(ids), ids)
    ).obs_names.tolist(),
    "table": lambda ids: table_content(
        pa.table({"x": ids, "y": ids, "cell": ids}), "points", objects="cell"
    ).shapes.ids.tolist(),
    "column of shapes": lambda ids: frame_content(
        geopandas.GeoDataFrame({"object_id": ids}, geometry=[shapely.box(0, 0, 1, 1)] * len(ids)), "cells"
    ).shapes.ids.tolist(),
    "results": lambda ids: as_ids(ids, 0),
    "results, a list": lambda ids: as_ids(ids.tolist(), 0),
    "names of cells": lambda ids: text_of_column(pa.table({"uid": ids}), "uid", "uid").to_pylist(),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("wrong", [1.5, np.inf, 2.0**53, 1020035400000100001.0])
def test_ids_as_floats_are_integers_or_refused(door: str, wrong: float) -> None:
    """Floats that are exact integers are these integers at every door; any other float is refused, as it may have been another id."""
    assert sorted(map(int, DOORS[door](np.array([7.0, 2.0**53 - 1])))) == [7, 2**53 - 1]
    with pytest.raises(SourceError, match=r"floats, with .* an id is an integer or text"):
        DOORS[door](np.array([7.0, wrong]))


def test_narrow_floats_are_exact_ids_below_their_own_limit() -> None:
    """Floats of 32 bits hold integers exactly below 2**24."""
    assert integer_ids(np.array([2**24 - 1, np.nan], np.float32), "ids").to_pylist() == [2**24 - 1, None]
    with pytest.raises(SourceError, match=r"below 2\*\*24"):
        integer_ids(np.array([2**24], np.float32), "ids")


def test_a_cell_number_beyond_int64_is_refused() -> None:
    """The greatest number marks a missing value; any other of 2**63 or more is refused instead of taken for no cell."""
    most = np.iinfo(np.uint64).max
    assert owner_codes(Attribute(np.array([most, 4], np.uint64)), "cell").tolist() == [-1, 4]
    with pytest.raises(SourceError, match="2\\*\\*63 or more"):
        owner_codes(Attribute(np.array([2**63, 4], np.uint64)), "cell")


@pytest.mark.parametrize(
    "inside", ["shapes", "shapes/elements", "shapes/elements/shapes.parquet", "shapes/elements/zarr.json"]
)
def test_a_symlink_in_a_spatialdata_store_is_refused(atlas: RaggedAtlas, tmp_path: Path, inside: str) -> None:
    """A folder, an element or a file of it, even if it leads to the same bytes; the path that is given may lead through symlinks."""
    square = Shapes("polyline", np.array([[0.0, 0], [1, 0], [1, 1], [0, 0]]), np.array([0, 4]))
    store = tmp_path / "a.zarr"
    write_file(square, store, format="spatialdata")
    (store / inside).rename(tmp_path / "moved")
    (store / inside).symlink_to(tmp_path / "moved")
    for act in (read_file, lambda path: atlas.add(path, progress=False)):
        for path in [store, *([store / "shapes" / "elements"] if inside.startswith("shapes/elements/") else [])]:
            with pytest.raises(StoreError, match="is a symlink"):
                act(path)
    assert len(atlas.geometries()) == 0


def test_a_symlink_in_a_geometry_store_is_refused(atlas: RaggedAtlas, tmp_path: Path) -> None:
    """Each file of a store that is read, whichever it is, by a reader and by `add`."""
    store = tmp_path / "a.zv"
    write(make_geometry(spots()), store)
    for file in sorted(path for path in store.rglob("*") if path.is_file()):
        file.rename(tmp_path / "moved")
        file.symlink_to(tmp_path / "moved")
        for act in (open_vectors, lambda path: atlas.add(path, progress=False)):
            with pytest.raises(StoreError, match="is a symlink"):
                act(store)
        file.unlink()
        (tmp_path / "moved").rename(file)
    assert atlas.add(store, progress=False).n_objects == len(spots().ids)

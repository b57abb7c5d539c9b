"""Geometry in an object store: stores by themselves, and shapes of cells in an atlas there, give what folders give."""

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.command import ask

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.errors import DuplicateError, NotFoundError, SourceError
from raggedatlas.store.location import Location
from raggedatlas.wings.vectors import validate
from raggedatlas.wings.vectors.builder import ChunkingOptions, CoarseLevel, make_geometry
from raggedatlas.wings.vectors.geometry import Geometry
from raggedatlas.wings.vectors.inspection import inspect
from raggedatlas.wings.vectors.reader import open_vectors
from raggedatlas.wings.vectors.shapes import Attribute, Shapes
from raggedatlas.wings.vectors.storage.layouts import File
from raggedatlas.wings.vectors.writer import publish_files, write
from support.object_store import Remote
from support.spatial import ALL, make_slide

pytestmark = [
    pytest.mark.s3,
    pytest.mark.filterwarnings("ignore:The '(future.infer_string|mode.chained_assignment)' option:DeprecationWarning"),
]
EDGE = (14.0, 14.0, 14.0)
BOUNDARY = "segmentation_boundary"


def stores() -> dict[str, Geometry]:
    """Objects with huge ids and groups, faces across chunks, and two levels with links between them."""
    made = {name: make_geometry(ALL[name](), ChunkingOptions(chunk_shape=EDGE)) for name in ("spots", "mesh")}
    fine = ALL["streamline"]()
    coarse = Shapes("streamline", fine.positions[::2], np.array([0, 3, 3, 4, 20]), groups=fine.groups)
    step = CoarseLevel(coarse, (2, 2, 2), parents=np.arange(40) // 2)
    cutting = ChunkingOptions(chunk_shape=EDGE, cross_level_storage="explicit")
    return made | {"levels": make_geometry(replace(fine, vertex_attributes={}), cutting, coarser=[step])}


def same(one: Shapes, other: Shapes) -> bool:
    """Compare shapes, whatever lies in them."""
    arrays = ("positions", "offsets", "ids", "links", "link_offsets")
    pairs: list[tuple[Any, Any]] = [(getattr(one, name), getattr(other, name)) for name in arrays]
    for family in ("vertex_attributes", "link_attributes", "object_attributes", "fragment_attributes"):
        a, b = getattr(one, family), getattr(other, family)
        assert list(a) == list(b)
        pairs += [(a[name].values, b[name].values) for name in a]
    return all((a is None) == (b is None) and (a is None or np.array_equal(a, b)) for a, b in pairs)


@pytest.mark.long
@pytest.mark.parametrize("layout", [pytest.param("0.7", marks=pytest.mark.nightly), "0.9"])
def test_stores_in_a_bucket(layout: str, remote: Remote, tmp_path: Path) -> None:
    """Items 23, 95, 100: written there and read whole, by box, id, group and level; validated; inspected; replaced; in either layout."""
    root = Location(remote.uri, remote.options)
    for name, geometry in stores().items():
        if layout == "0.7" and name == "mesh":
            continue  # an array for each chunk: many requests, which tell no more than the others
        place, folder = root.child(f"{name}.zv"), tmp_path / f"{name}.zv"
        for where in (place, folder):
            write(geometry, where, layout=layout)
        there, here = open_vectors(place), open_vectors(folder)
        for level in range(here.n_levels):
            assert same(there.read(level=level), here.read(level=level))
            assert same(there.box([-3] * 3, [2] * 3, level=level), here.box([-3] * 3, [2] * 3, level=level))
        ids = here.object_ids()
        assert np.array_equal(there.object_ids(), ids)
        if len(ids):
            assert same(there.objects(ids[[-1, 0]]), here.objects(ids[[-1, 0]]))
        if here.groups() is not None:
            assert same(there.group(1), here.group(1))
        assert validate(place) == validate(folder) == []
        found, known = inspect(place), inspect(folder)
        assert (found.n_bytes, found.root.children) == (known.n_bytes, known.root.children)
        assert "levels" not in name or there.cross_links(1).n_links == here.cross_links(1).n_links == 40
    assert same(pickle.loads(pickle.dumps(there)).read(), here.read())
    with pytest.raises(DuplicateError, match="overwrite"):
        write(geometry, place)
    write(stores()["spots"], place, layout=layout, overwrite=True)
    assert open_vectors(place).kind == "point_cloud"
    broken = replace(geometry, levels=(replace(geometry.levels[0], bounds=geometry.levels[0].bounds[:-1]),))
    with pytest.raises(SourceError):
        write(broken, root.child("never.zv"), layout=layout)
    with pytest.raises(NotFoundError):
        open_vectors(root.child("never.zv"))


@pytest.mark.long
def test_many_objects_are_put_at_once_or_none_stays(remote: Remote) -> None:
    """Files go up together, the root's metadata after all others; where making them fails in the midst, nothing is left."""
    root = Location(remote.uri, remote.options)

    def files(n: int, *, fails: bool) -> Iterator[File]:
        yield "zarr.json", [b"{}"]
        for i in range(n):
            yield f"0/c/{i}", [b"a", b"b"]
        if fails:
            raise SourceError("The disk of the source is gone.")

    remote.proxy.forget()
    remote.proxy.most_at_once, remote.proxy.latency = 0, 0.01
    publish_files(root.child("whole"), files(70, fails=False), overwrite=False)
    puts = [request.path for request in remote.proxy.requests if request.method == "PUT"]
    assert len(puts) == 71
    assert puts[-1].endswith("whole/zarr.json")
    assert 1 < remote.proxy.most_at_once <= 16
    assert root.child("whole").read_bytes("0/c/69") == b"ab"
    with pytest.raises(SourceError, match="gone"):
        publish_files(root.child("torn"), files(70, fails=True), overwrite=False)
    assert not root.child("torn").exists()
    with pytest.raises(SourceError, match="gone"):
        publish_files(root.child("whole"), files(80, fails=True), overwrite=True)
    assert root.child("whole").read_bytes("0/c/69") == b"ab"
    publish_files(root.child("whole"), files(3, fails=False), overwrite=True)
    assert sorted(key for key, *_ in root.child("whole").list_objects()) == ["0/c/0", "0/c/1", "0/c/2", "zarr.json"]
    assert not [name for name in root.list_children() if "tmp" in name]


@pytest.mark.nightly
def test_the_command_on_a_store_in_a_bucket(remote: Remote, tmp_path: Path) -> None:
    """`validate` and `inspect` take the address of a geometry store; one that is broken ends with exit code 1."""
    root = Location(remote.uri, remote.options)
    write(stores()["mesh"], root.child("mesh.zv"))
    options = [f"--storage-option={key}={value}" for key, value in remote.options.items()]

    def call(*words: str) -> Any:
        return ask(*words, *options)

    address = f"{remote.uri}/mesh.zv"
    sound = call("validate", address, "--level", "conformance")
    assert (sound.exit_code, sound.stdout) == (0, "Nothing is wrong (conformance).\n"), sound.output
    seen = call("inspect", address, "--depth", "1")
    assert seen.exit_code == 0, seen.output
    assert seen.stdout.startswith("mesh.zv: zarr-vectors 0.9.2")
    assert '"layout": "0.9"' in call("inspect", address, "--json").stdout
    assert call("validate", address, "--level", "rows").exit_code == 2
    assert call("fix", address, str(tmp_path / "x")).exit_code == 2
    nothing = call("inspect", f"{remote.uri}/none.zv")
    assert nothing.exit_code == 1
    assert "no geometry store at s3://" in nothing.stderr
    root.child("mesh.zv", "0", "vertices").delete_prefix()
    broken = call("validate", address)
    assert broken.exit_code == 1
    assert "V000 must" in broken.stdout


@pytest.mark.nightly
def test_shapes_of_cells_in_a_remote_atlas(remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store here and one in a bucket go into an atlas there; `within`, `geometry`, `validate` and `drop_geometry` do what they do in a folder."""
    slide = make_slide(30, seed=3)
    write(make_geometry(slide.outlines, ChunkingOptions(chunk_shape=(25, 25))), tmp_path / "cells.zv")
    spots = Location(remote.uri, remote.options).child("spots.zv")
    write(make_geometry(slide.transcripts, ChunkingOptions(chunk_shape=(70, 70))), spots, layout="0.7")
    for key, value in remote.options.items():
        monkeypatch.setenv(key.upper(), value)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    found: list[Any] = []
    for uri, options in ((remote.uri.replace("my.", "other."), remote.options), (str(tmp_path / "atlas"), None)):
        atlas = RaggedAtlas.create(uri, storage_options=options)
        atlas.add(slide.data, "slide", progress=False)
        atlas.add(str(tmp_path / "cells.zv"), link="segment_id", space=BOUNDARY, progress=False)
        more = {"link": "segment_id", "space": "transcripts", "cells": "cell_id", "progress": False}
        atlas.add(spots.uri, **more)
        view = atlas.checkout(atlas.snapshot())
        assert view.validate("deep") == []
        query = view.query().within((10, 10, 60, 60), BOUNDARY, by="exact").with_centroids(BOUNDARY)
        found.append((query.to_anndata(), query.geometry(BOUNDARY), query.geometry("transcripts")))
        atlas.drop_geometry("transcripts")
        assert list(atlas.geometries()["name"]) == [BOUNDARY]
    (data, outlines, points), (known, *shapes) = found
    assert 5 < data.n_obs < 30
    assert data.obs["segment_id"].tolist() == known.obs["segment_id"].tolist()
    assert np.array_equal(data.obsm["spatial"], known.obsm["spatial"])
    for one, other in zip((outlines, points), shapes, strict=True):
        assert same(without_uids(one), without_uids(other))


def without_uids(shapes: Shapes) -> Shapes:
    """Leave out what differs between two atlases."""
    kept: dict[str, Attribute] = {name: own for name, own in shapes.object_attributes.items() if name != "uid"}
    return replace(shapes, object_attributes=kept)

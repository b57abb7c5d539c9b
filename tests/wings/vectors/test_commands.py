"""The command with geometry: a store is linked, a box is asked for, what is refused is one line."""

import json
import shutil
from pathlib import Path

import anndata as ad
import pytest

from command import ask, done, read
from raggedatlas.wings.vectors.builder import make_geometry
from raggedatlas.wings.vectors.writer import write
from support.spatial import make_slide

BOUNDARY = "segmentation_boundary"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    slide, folder = make_slide(16), tmp_path_factory.mktemp("cli")
    slide.data.write_h5ad(folder / "slide.h5ad")
    write(make_geometry(slide.outlines), str(folder / "cells.zv"))
    write(make_geometry(slide.transcripts), str(folder / "spots.zv"))
    for words in (("create",), ("add", folder / "slide.h5ad")):
        assert ask(words[0], folder / "atlas", *words[1:]).exit_code == 0
    return folder


@pytest.mark.nightly
def test_shapes_from_the_shell(place: Path) -> None:
    """add --link, query --within and export --within give what the library gives."""
    added = ask(
        "add",
        place / "atlas",
        place / "cells.zv",
        "--link-by",
        "segment_id",
        "--space",
        "segmentation_boundary",
        "--json",
    )
    assert '"n_cells": 16' in added.stdout, added.output
    refused = ask("add", place / "atlas", place / "cells.zv", "--link-by", "segment_id")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert len(refused.stderr.strip().splitlines()) == 1
    done(f"add {place}/atlas {place}/spots.zv --space transcripts --counts --cells cell_id --dataset spots")
    assert ask("snapshot", place / "atlas").exit_code == 0
    box = ("--within", "0,0,50,50", "--space", "segmentation_boundary")
    n = int(ask("query", place / "atlas", *box, "--count").stdout)
    assert 0 < n < 16
    out = place / "box.h5ad"
    done("export", place / "atlas", out, *box, "--centroids", "segmentation_boundary")
    assert ad.read_h5ad(out).obsm["spatial"].shape == (n, 2)
    assert ask("query", place / "atlas", "--within", "a,b", "--space", "segmentation_boundary").exit_code == 2
    twice = ask("add", place / "atlas", place / "cells.zv", "--space", "a=b")
    assert twice.exit_code == 2


@pytest.mark.long
def test_a_file_of_shapes_from_the_shell(place: Path, tmp_path: Path) -> None:
    """`add x.geojson --link` links by a property, as the library does."""
    shutil.copytree(place / "atlas", tmp_path / "atlas")
    rows = ad.read_h5ad(place / "slide.h5ad").obs["segment_id"].tolist()
    triangle = {"type": "Polygon", "coordinates": [[[0, 0], [1, 0], [1, 1], [0, 0]]]}
    features = [{"type": "Feature", "properties": {"EntityID": row}, "geometry": triangle} for row in rows]
    file = tmp_path / "x.geojson"
    file.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    added = read("add", tmp_path / "atlas", file, "--link-by", "segment_id=EntityID")
    assert (added["n_cells"], added["n_new_cells"], added["space"]) == (16, 0, BOUNDARY)


@pytest.mark.nightly
def test_geometry_is_listed_and_dropped(place: Path, tmp_path: Path) -> None:
    """`info` and `geometries` tell what shapes cells have; `drop-geometry` takes them out of the newest state, and snapshots keep them."""
    atlas = tmp_path / "atlas"
    for words in (("create", atlas), ("add", atlas, place / "slide.h5ad")):
        assert ask(*words).exit_code == 0
    assert "No geometry yet" in ask("geometries", atlas).stdout
    assert read("info", atlas)["assets"] == {}
    for name in ("outlines", "rings"):
        store = ("add", atlas, place / "cells.zv", "--link-by", "segment_id", "--space", BOUNDARY, "--name", name)
        assert ask(*store).exit_code == 0
    assert ask("snapshot", atlas, "--label", "both").exit_code == 0
    assert read("info", atlas)["assets"] == {"geometry": {"outlines": 16, "rings": 16}}
    assert "outlines: 16 cells" in ask("info", atlas).stdout
    listed = read("geometries", atlas)
    assert [(row["name"], row["space"], row["n_objects"]) for row in listed] == [
        ("outlines", BOUNDARY, 16),
        ("rings", BOUNDARY, 16),
    ]
    assert "polyline" in ask("geometries", atlas).stdout
    assert ask("drop-geometry", atlas, "outlines", "--dataset", "nope").exit_code == 1
    gone = ask("drop-geometry", atlas, "outlines", "--dataset", "slide")
    assert gone.stdout.startswith("Done: 16 cells"), gone.output
    assert read("drop-geometry", atlas, "rings")["n_cells"] == 16
    assert read("geometries", atlas) == []
    assert len(read("geometries", atlas, "--at", "both")) == 2
    again = ask("drop-geometry", atlas, "rings")
    assert (again.exit_code, len(again.stderr.strip().splitlines())) == (1, 1)

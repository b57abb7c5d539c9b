"""CXGs of Visium and Slide-seq as the Explorer of today asks for them: the requests that it answers are made here in a few lines."""

import json
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest

pytest.importorskip("tiledb", reason="CXG needs the extra cxg")

import raggedatlas as ra
from raggedatlas.formats.cxg import validate
from raggedatlas.formats.cxg.tiledb_arrays import open_array
from raggedatlas.testing.cxg_files import LIBRARIES

SCALES = {
    "tissue_hires_scalef": 0.17,
    "tissue_lowres_scalef": 0.051,
    "fiducial_diameter_fullres": 144.4,
    "spot_diameter_fullres": 89.4,
}


def visium(images: dict[str, Any], **more: Any) -> ad.AnnData:
    """Make an AnnData as scanpy reads a Visium run."""
    rng = np.random.default_rng(0)
    obs = pd.DataFrame(
        {"in_tissue": rng.integers(0, 2, 30), "array_row": rng.integers(0, 78, 30)},
        index=pd.Index([f"spot{i}" for i in range(30)], dtype=object),
    )
    made = ad.AnnData(rng.poisson(1, (30, 6)).astype(np.float32), obs)
    made.obsm["spatial"] = rng.integers(0, 11000, (30, 2))
    library = {"images": images, "scalefactors": dict(SCALES), "metadata": {"chemistry_description": "Spatial 3' v1"}}
    made.uns["spatial"] = {**more, "V1_Lymph": library}
    return made


def stored(path: str) -> Any:
    """Read ``spatial`` as the server does."""
    with open_array(Path(path) / "uns") as array:
        return json.loads(array.meta["spatial"])


def shown(path: str) -> dict[str, Any]:
    """Answer the requests of the server: uns, by the first library, and the layout of the embedding by what that says."""
    spatial = stored(path)
    with open_array(Path(path) / "emb" / "spatial") as array:
        places = array[:, 0:2]
    if not spatial:
        return {"uns": {}, "layout": places}
    library = spatial[next(iter(spatial))]
    image, scales = library["image_properties"], library["scalefactors"]
    scale = 1 if image["resolution"] == "fullres" else scales["tissue_hires_scalef"]
    left, upper, _, _ = image["crop_coords"]
    layout = (places * scale - [left, upper]) / [image["width"], image["height"]]
    return {"uns": {**image, "spot": scales["spot_diameter_fullres"], "scale": scale}, "layout": layout}


def test_visium_is_served_by_the_explorer_of_today(tmp_path: Path) -> None:
    """The server finds image size, crop, spot and scale of each library, and places the spots; pixels and all else are told as lost."""
    rng = np.random.default_rng(1)
    images = {"hires": rng.random((200, 260, 3), np.float32), "lowres": rng.random((60, 78, 3), np.float32)}
    given = visium(images, is_single=True)
    sink = ra.open_sink(tmp_path / "v.cxg")
    path = ra.copy(given, sink)
    crop = {"resolution": "hires", "crop_coords": [30, 0, 230, 200], "width": 200, "height": 200}
    scales = {key: SCALES[key] for key in ("spot_diameter_fullres", "tissue_hires_scalef")}
    assert stored(path) == {"V1_Lymph": {"image_properties": crop, "scalefactors": scales}}
    answered = shown(path)
    assert answered["uns"] == {**crop, "spot": 89.4, "scale": 0.17}
    np.testing.assert_allclose(answered["layout"], (given.obsm["spatial"] * 0.17 - [30, 0]) / 200, rtol=1e-5)
    lost = {loss.key.removeprefix("uns/spatial/") for loss in sink.losses if loss.fate == "lost"}
    assert lost == {
        "is_single",
        "V1_Lymph/images",
        "V1_Lymph/metadata",
        "V1_Lymph/scalefactors/tissue_lowres_scalef",
        "V1_Lymph/scalefactors/fiducial_diameter_fullres",
    }
    assert validate(path, "full") == []


def test_full_resolution_wins(tmp_path: Path) -> None:
    """Where the image in full resolution is there, coordinates are not scaled; an empty one, as the Portal leaves it, does not count."""
    hires = np.zeros((20, 30, 3), np.uint8)
    full = ra.copy(visium({"hires": hires, "fullres": np.zeros((150, 100, 3), np.uint8)}), tmp_path / "f.cxg")
    assert shown(full)["uns"]["resolution"] == "fullres"
    assert shown(full)["uns"]["crop_coords"] == [0, 25, 100, 125]
    empty = ra.copy(visium({"hires": hires, "fullres": np.empty(0)}), tmp_path / "e.cxg")
    assert shown(empty)["uns"]["crop_coords"] == [5, 0, 25, 20]


NOTHING: dict[str, Any] = {
    "Slide-seq": {"is_single": True},
    "no image": {"library": {"scalefactors": dict(SCALES), "images": {}}},
    "only lowres": {"library": {"scalefactors": dict(SCALES), "images": {"lowres": np.zeros((9, 9, 3))}}},
    "no scales": {"library": {"scalefactors": {}, "images": {"hires": np.zeros((9, 9, 3))}}},
    "missing scales": {
        "library": {"scalefactors": dict.fromkeys(SCALES, np.nan), "images": {"hires": np.zeros((9, 9, 3))}}
    },
    "no libraries": {"fov": np.zeros(3), "note": "Xenium"},
}


@pytest.mark.parametrize("name", NOTHING)
def test_what_has_no_image_is_an_empty_table(name: str, tmp_path: Path) -> None:
    """Where no library has what the server asks for, it finds none, shows the embedding as any other, and the loss is told."""
    given = visium({})
    given.uns["spatial"] = NOTHING[name]
    sink = ra.open_sink(tmp_path / "s.cxg")
    path = ra.copy(given, sink)
    assert stored(path) == {}
    np.testing.assert_array_equal(shown(path)["layout"], given.obsm["spatial"].astype(np.float32))
    assert {loss.key for loss in sink.losses if loss.key.startswith("uns/")} == {
        f"uns/spatial/{key}" for key in NOTHING[name]
    }
    given.uns["spatial"] = np.zeros(3)
    sink = ra.open_sink(tmp_path / "n.cxg")
    assert not (Path(ra.copy(given, sink)) / "uns").exists()
    assert "uns/spatial" in {loss.key for loss in sink.losses}


def test_in_tissue_is_boolean(tmp_path: Path) -> None:
    """0 and 1 of in_tissue are written as booleans, which is told; other numbers are not."""
    given = visium({})
    sink = ra.open_sink(tmp_path / "v.cxg")
    back = ad.read_h5ad(ra.copy(ra.copy(given, sink), tmp_path / "v.h5ad"))
    assert back.obs["in_tissue"].dtype == bool
    assert back.obs["in_tissue"].tolist() == given.obs["in_tissue"].astype(bool).tolist()
    assert "obs/in_tissue" in {loss.key for loss in sink.losses}
    given.obs["in_tissue"] += 1
    path = ra.copy(given, tmp_path / "w.cxg")
    assert ra.open_source(path).element("obs")["in_tissue"].tolist() == given.obs["in_tissue"].tolist()


def test_a_second_trip_keeps_libraries(tmp_path: Path) -> None:
    """What came from a CXG goes back into one as it was, also through h5ad, and nothing of it is lost."""
    given = visium({})
    given.uns["spatial"] = LIBRARIES
    first = ra.copy(given, tmp_path / "a.cxg")
    sink = ra.open_sink(tmp_path / "b.cxg", strict=True)
    second = ra.copy(ra.copy(first, tmp_path / "a.h5ad"), sink)
    assert stored(second) == stored(first) == LIBRARIES

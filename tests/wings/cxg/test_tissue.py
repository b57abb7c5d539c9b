"""CXGs of Visium and Slide-seq as the Explorer of today asks for them: the requests that it answers are made here in a few lines."""

import json
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest

import raggedatlas as ra
from raggedatlas.wings.cxg import validate
from reading import array_metadata, array_values, copy_with_losses, read_element
from support.cxg_files import LIBRARIES

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


def stored(path: Path) -> Any:
    """Read ``spatial`` as the server does."""
    return json.loads(array_metadata(path / "uns")["spatial"])


def shown(path: Path) -> dict[str, Any]:
    """Answer the requests of the server: uns, by the first library, and the layout of the embedding by what that says."""
    spatial = stored(path)
    places = array_values(path / "emb" / "spatial")[:, :2]
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
    path, losses = copy_with_losses(given, tmp_path / "v.cxg")
    crop = {"resolution": "hires", "crop_coords": [30, 0, 230, 200], "width": 200, "height": 200}
    scales = {key: SCALES[key] for key in ("spot_diameter_fullres", "tissue_hires_scalef")}
    assert stored(path) == {"V1_Lymph": {"image_properties": crop, "scalefactors": scales}}
    answered = shown(path)
    assert answered["uns"] == {**crop, "spot": 89.4, "scale": 0.17}
    np.testing.assert_allclose(answered["layout"], (given.obsm["spatial"] * 0.17 - [30, 0]) / 200, rtol=1e-5)
    lost = {loss.key.removeprefix("uns/spatial/") for loss in losses if loss.fate == "lost"}
    scalefactors = {f"scalefactors/{key}" for key in SCALES if key not in scales}
    assert lost == {"is_single", *(f"V1_Lymph/{part}" for part in ("images", "metadata", *scalefactors))}
    assert validate(path, "full") == []


def test_full_resolution_wins(tmp_path: Path) -> None:
    """Where the image in full resolution is there, coordinates are not scaled; an empty one, as the Portal leaves it, does not count."""
    hires = np.zeros((20, 30, 3), np.uint8)
    for i, (fullres, resolution, crop) in enumerate(
        (
            (np.zeros((150, 100, 3), np.uint8), "fullres", [0, 25, 100, 125]),
            (np.empty(0), "hires", [5, 0, 25, 20]),
        )
    ):
        path, _ = copy_with_losses(visium({"hires": hires, "fullres": fullres}), tmp_path / f"{i}.cxg")
        assert (shown(path)["uns"]["resolution"], shown(path)["uns"]["crop_coords"]) == (resolution, crop)


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
    path, losses = copy_with_losses(given, tmp_path / "s.cxg")
    assert stored(path) == {}
    np.testing.assert_array_equal(shown(path)["layout"], given.obsm["spatial"].astype(np.float32))
    lost = {loss.key for loss in losses if loss.key.startswith("uns/")}
    assert lost == {f"uns/spatial/{key}" for key in NOTHING[name]}
    given.uns["spatial"] = np.zeros(3)
    path, losses = copy_with_losses(given, tmp_path / "n.cxg")
    assert not (path / "uns").exists()
    assert "uns/spatial" in {loss.key for loss in losses}


def test_in_tissue_is_boolean(tmp_path: Path) -> None:
    """0 and 1 of in_tissue are written as booleans, which is told; other numbers are not."""
    given = visium({})
    path, losses = copy_with_losses(given, tmp_path / "v.cxg")
    back = ad.read_h5ad(ra.copy(path, tmp_path / "v.h5ad"))
    assert back.obs["in_tissue"].dtype == bool
    assert back.obs["in_tissue"].tolist() == given.obs["in_tissue"].astype(bool).tolist()
    assert "obs/in_tissue" in {loss.key for loss in losses}
    given.obs["in_tissue"] += 1
    path, _ = copy_with_losses(given, tmp_path / "w.cxg")
    assert read_element(path, "obs")["in_tissue"].tolist() == given.obs["in_tissue"].tolist()


def test_a_second_trip_keeps_libraries(tmp_path: Path) -> None:
    """What came from a CXG goes back into one as it was, also through h5ad, and nothing of it is lost."""
    given = visium({})
    given.uns["spatial"] = LIBRARIES
    first, _ = copy_with_losses(given, tmp_path / "a.cxg")
    second, _ = copy_with_losses(ra.copy(first, tmp_path / "a.h5ad"), tmp_path / "b.cxg", strict=True)
    assert stored(second) == stored(first) == LIBRARIES

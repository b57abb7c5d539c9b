"""Laws of the plan: what can be refused without reading values is refused before anything is written."""

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from raggedatlas.errors import ArgumentError, AtlasError, NameRefusedError, NotFoundError, SourceError
from raggedatlas.model.spaces import FeatureSpace

pytestmark = pytest.mark.fast


def plain(n: int = 3, m: int = 2, seed: int = 0) -> ad.AnnData:
    x = np.random.default_rng(seed).poisson(2, (n, m)).astype(np.float32)
    return ad.AnnData(
        x, obs=pd.DataFrame(index=[f"c{i}" for i in range(n)]), var=pd.DataFrame(index=[f"g{j}" for j in range(m)])
    )


@pytest.mark.parametrize("name", ["a/b", "../evil", "..", "a\\b", "", "  ", "a\nb"])
def test_names_that_could_be_paths_are_refused(atlas, unchanged, name) -> None:  # noqa: ANN001
    """A dataset's name may not look like a path or hold control characters."""
    with unchanged(atlas), pytest.raises(NameRefusedError, match="choose another name"):
        atlas.add(plain(), name, progress=False)


@pytest.mark.parametrize("name", ["PBMC 10k (v3)", "ü.1", "it's", "a.b-c"])
def test_other_names_are_taken_as_they_are(atlas, name) -> None:  # noqa: ANN001
    """Spaces, quotes, dots and letters of any script are fine in a name."""
    atlas.add(plain(), name, progress=False)
    assert atlas.dataset(name).to_anndata().n_obs == 3


def test_a_layer_name_that_could_be_a_path_is_refused(atlas, unchanged) -> None:  # noqa: ANN001
    """A layer with a slash in its name asks for another one, and takes it."""
    given = plain()
    given.layers["../x"] = given.X
    with unchanged(atlas), pytest.raises(NameRefusedError, match="layers="):
        atlas.add(given, "d", progress=False)
    atlas.add(given, "d", layers={"X": "counts", "layers/../x": "other"}, progress=False)
    assert [r.layers for r in atlas.dataset("d").records] == [["counts", "other"]]


def test_a_group_name_out_of_a_file_never_becomes_a_path(atlas) -> None:  # noqa: ANN001
    """Whatever odd characters a layer or obsm key has, groups have plain names below the dataset's uid."""
    given = plain()
    given.layers["a .. b;c"] = given.X * 0.5
    given.obsm["..pca"] = np.ones((3, 2))
    atlas.add(given, "d", spaces={"obsm/..pca": "embedding"}, progress=False)
    uid = atlas.dataset("d").uid
    assert all(r.zarr_group.startswith(f"{uid}/") and ".." not in r.zarr_group for r in atlas.dataset("d").records)


@pytest.mark.parametrize(
    ("choices", "error", "message"),
    [
        ({"layers": ["Y"]}, NotFoundError, r"no matrices \['Y'\]"),
        ({"layers": "some"}, ArgumentError, "takes layers as"),
        ({"spaces": {"obsm/nope": "embedding"}}, NotFoundError, "obsm/nope"),
        ({"spaces": {"X": "nope"}}, NotFoundError, "no feature space 'nope'"),
        ({"spaces": {"X": "image_tiles"}}, SourceError, "2 axes"),
        ({"nonsense": 1}, SourceError, "nonsense"),
    ],
)
def test_choices_that_name_what_is_not_there_are_refused(atlas, unchanged, choices, error, message) -> None:  # noqa: ANN001
    """Unknown matrices, spaces and arguments are refused by name, with what there is."""
    with unchanged(atlas), pytest.raises(error, match=message):
        atlas.add(plain(), "d", progress=False, **choices)


def test_empty_sources_are_refused(atlas, unchanged) -> None:  # noqa: ANN001
    """An empty list and what is no source are refused."""
    for given in ([], 7):
        with unchanged(atlas), pytest.raises(AtlasError):
            atlas.add(given, progress=False)


def test_one_name_for_several_sources_is_refused(atlas, unchanged) -> None:  # noqa: ANN001
    """A name with a list is refused: each takes its own."""
    with unchanged(atlas), pytest.raises(SourceError, match="one name for 2 sources"):
        atlas.add([plain(), plain(4)], "d", progress=False)


def test_groups_of_one_space_never_meet(atlas) -> None:  # noqa: ANN001
    """A layer called raw with entries of its own and raw/X get pointer columns and groups of their own."""
    given = plain(5)
    given.layers["raw"] = (given.X > 1) * 7.5
    given.raw = ad.AnnData(given.X * 2, obs=given.obs, var=pd.DataFrame(index=["p", "q"]))
    atlas.add(given, "d", progress=False)
    records = atlas.dataset("d").records
    assert len({r.pointer for r in records}) == len({r.zarr_group for r in records}) == 3
    back = atlas.dataset("d").to_anndata()
    np.testing.assert_array_equal(back.layers["raw"], given.layers["raw"])
    np.testing.assert_array_equal(back.raw.X, given.raw.X)


def test_a_new_space_beside_a_column_of_its_name(atlas) -> None:  # noqa: ANN001
    """An obs column that has the name of a later feature space keeps it; the pointer column takes another."""
    given = plain()
    given.obs["tf_activity"] = ["a", "b", "c"]
    atlas.add(given, "d", progress=False)
    atlas.register_space(FeatureSpace("tf_activity", "dense", is_counts=False))
    later = plain(4, seed=1)
    atlas.add(later, "e", spaces={"X": "tf_activity"}, progress=False)
    assert [r.pointer for r in atlas.dataset("e").records] == ["tf_activity_2"]
    np.testing.assert_array_equal(atlas.dataset("e").to_anndata().X, later.X)
    assert [p for p in atlas.validate("rows") if p.rule != "unassigned-index"] == []

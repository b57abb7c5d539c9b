"""Laws of the plan: what can be refused without reading values is refused before anything is written."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.errors import (
    ArgumentError,
    AtlasError,
    FeatureError,
    NameRefusedError,
    NotFoundError,
    SchemaError,
    SourceError,
    ValuesError,
)  # fmt: skip
from raggedatlas.model.spaces import FeatureSpace

pytestmark = pytest.mark.fast

Unchanged = Callable[[RaggedAtlas], AbstractContextManager[None]]


def plain(n: int = 3, m: int = 2, seed: int = 0, **columns: Any) -> ad.AnnData:
    x = np.random.default_rng(seed).poisson(2, (n, m)).astype(np.float32)
    obs = pd.DataFrame(columns, index=[f"c{i}" for i in range(n)])
    return ad.AnnData(x, obs=obs, var=pd.DataFrame(index=[f"g{j}" for j in range(m)]))


def with_layers(layers: dict[str, Any], x: Any = None) -> ad.AnnData:
    made = plain()
    made.X = made.X if x is None else x
    for name, values in layers.items():
        made.layers[name] = values
    return made


def with_ids(ids: list[str]) -> ad.AnnData:
    made = plain(m=len(ids))
    made.var["id"] = ids
    return made


def not_unicode() -> ad.AnnData:
    made = plain(c=[1, 2, 3])
    # As objects, because pandas 3 refuses such names in its own type of text.
    made.obs.columns = pd.Index(["a\ud800"], dtype=object)
    return made


def halves_of_characters() -> ad.AnnData:
    made = plain()
    # As objects, because pandas 3 refuses such values in its own type of text.
    made.obs["c"] = pd.Series(["a\ud800", "b", "c"], made.obs_names, dtype=object)
    return made


def with_embedding(name: str) -> ad.AnnData:
    made = plain()
    made.obsm[name] = np.ones((3, 2))
    return made


TWICE = sp.csr_matrix((np.ones(3, np.uint8), np.array([1, 1, 0]), np.array([0, 2, 3, 3])), shape=(3, 2))
HALVES = np.full((3, 2), 0.5, np.float32)
TEXTS: dict[str, Any] = {"c": ["a", "b", "c"]}

Refused = tuple[Callable[[], Any], dict[str, Any], type[AtlasError], str]
REFUSED: dict[str, Refused] = {
    **{f"name {name!r}": (plain, {"name": name}, NameRefusedError, "choose another")
       for name in ("a/b", "../evil", "..", "/etc/passwd", "a\\b", "", "  ", "a\nb", "a\0b")},
    **{f"layer name {name!r}": (plain, {"layers": {"X": name}}, SchemaError, "layer name")
       for name in ("bad name", "a/b", "..", "x;y")},
    "a layer that could be a path": (lambda: with_layers({"../x": HALVES}), {}, NameRefusedError, "layers="),
    "a matrix that is not there": (plain, {"layers": ["Y"]}, NotFoundError, r"no matrices \['Y'\]"),
    "no choice of layers": (plain, {"layers": "some"}, ArgumentError, "takes layers as"),
    "a member that is not there": (plain, {"spaces": {"obsm/nope": "embedding"}}, NotFoundError, "obsm/nope"),
    "an unknown space": (plain, {"spaces": {"X": "nope"}}, NotFoundError, "no feature space 'nope'"),
    "a space of other axes": (plain, {"spaces": {"X": "image_tiles"}}, SourceError, "2 axes"),
    "an unknown argument": (plain, {"nonsense": 1}, SourceError, "nonsense"),
    "an unknown order": (plain, {"column_order": "size"}, ArgumentError, "column_order"),
    "nothing": (list, {}, AtlasError, "empty sequence"),
    "a number": (lambda: 7, {}, AtlasError, "int"),
    "one name for two": (lambda: [plain(), plain(4)], {}, SourceError, "one name for 2 sources"),
    "a column that is not there": (lambda: plain(**TEXTS), {"obs": ["nope"]}, NotFoundError, r"no obs columns \['nope'\]"),
    "renaming such a column": (lambda: plain(**TEXTS), {"obs": {"nope": "x"}}, NotFoundError, r"no obs columns \['nope'\]"),
    "no choice of columns": (lambda: plain(**TEXTS), {"obs": "some"}, ArgumentError, "takes obs as"),
    "a cast of no column": (lambda: plain(**TEXTS), {"cast": {"nope": "str"}}, NotFoundError, "nope"),
    "a cast to no type": (lambda: plain(**TEXTS), {"cast": {"c": "complex"}}, SchemaError, "not understood"),
    "a cast that changes": (lambda: plain(**TEXTS), {"cast": {"c": "int"}}, SchemaError, "without changing a value"),
    "a name of the atlas": (lambda: plain(**TEXTS), {"obs": {"c": "uid"}}, SchemaError, "taken"),
    "a name of a space": (lambda: plain(**TEXTS), {"obs": {"c": "embedding"}}, SchemaError, "taken"),
    "mixed types": (lambda: plain(c=np.array(["a", 1, 2], object)), {}, SchemaError, "mixes"),
    "text of half characters": (halves_of_characters, {}, SchemaError, "Column 'c' has text that is not Unicode"),
    "a column named by one": (not_unicode, {}, SchemaError, "is not Unicode"),
    "a layer named by one": (lambda: with_layers({"a\ud800": HALVES}), {}, NameRefusedError, "is not Unicode"),
    "an embedding named by one": (lambda: with_embedding("a\ud800"), {}, NameRefusedError, "is not Unicode"),
    "more than 200 columns": (lambda: plain(**{f"c{i}": [i] * 3 for i in range(201)}), {}, SchemaError, "201 obs columns"),
    "counts that are none": (lambda: with_layers({"counts": HALVES}), {}, ValuesError, "another name"),
    "repeated entries": (
        lambda: with_layers({}, TWICE), {"duplicate_entries": "refuse"}, SourceError, "feature 1 twice in cell 0",
    ),
    "a feature without an id": (lambda: with_ids(["x", "", "z"]), {"feature_id": "id"}, FeatureError, r"column 1.*feature_id="),
    "no column of ids": (lambda: with_ids(["x"]), {"feature_id": "nope"}, NotFoundError, "no column 'nope'"),
}  # fmt: skip


def test_what_cannot_be_added_is_refused(atlas: RaggedAtlas, unchanged: Unchanged) -> None:
    """Names, choices, columns, layers, values and ids that cannot be are refused by name, and nothing is written."""
    for case, (make, choices, error, words) in REFUSED.items():
        with unchanged(atlas), pytest.raises(error) as caught:
            atlas.add(make(), **{"name": "d", "progress": False, **choices})
        assert re.search(words, str(caught.value)), case


@pytest.mark.parametrize("name", ["PBMC 10k (v3)", "ü.1", "it's", "a.b-c", ".hidden", "<b>", "' OR 1=1 --"])
def test_other_names_are_taken_as_they_are(atlas, name) -> None:  # noqa: ANN001
    """Spaces, quotes, dots and letters of any script are fine in a name, by which the dataset is found and dropped."""
    atlas.add(plain(), name, progress=False)
    assert atlas.dataset(name).to_anndata().n_obs == 3
    atlas.drop_dataset(name)
    assert len(atlas.list_datasets()) == 0


def test_a_layer_name_that_could_be_a_path_takes_another(atlas) -> None:  # noqa: ANN001
    """A layer with a slash in its name takes another one."""
    given = plain()
    given.layers["../x"] = given.X
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

"""The law of missing values: whatever a missing value is and by whichever door it comes, the same cells lack it on every way out."""

import datetime as dt
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import raggedatlas as ra
from raggedatlas.atlas import RaggedAtlas
from raggedatlas.errors import AtlasError, SchemaError
from support.atlases import write_results
from support.hypothesis_profile import examples

N = 4
TEXTS = ["a", "b", "a", "c"]

KINDS: dict[str, tuple[list[Any], Callable[[list[Any]], Any]]] = {
    "float_nan": ([0.5, 2.0, 0.0, -1.5], lambda v: np.array(v, float)),
    "float_na": ([0.5, 2.0, 0.0, -1.5], lambda v: pd.array(v, "Float64")),
    "int_na": ([0, 2, 3, 4], lambda v: pd.array(v, "Int64")),
    "int_none": ([0, 2**60 + 1, 3, 4], lambda v: np.array(v, object)),
    "bool_na": ([True, False, True, False], lambda v: pd.array(v, "boolean")),
    "bool_none": ([True, False, True, False], lambda v: np.array(v, object)),
    "text_none": (["", "nan", "NA", "None"], lambda v: np.array(v, object)),
    "text_nan": (TEXTS, lambda v: np.array([np.nan if one is None else one for one in v], object)),
    "text_na": (TEXTS, lambda v: pd.array(v, "string")),
    "categories": (TEXTS, pd.Categorical),
    "numbers": ([1.5, 2.5, 1.5, 4.0], pd.Categorical),
    "ordered": (TEXTS, lambda v: pd.Categorical(v, categories=list("abc"), ordered=True)),
    "date": (["2024-01-01", "2024-01-02 03:04:05", "2023-01-01", "1999-01-01"], lambda v: pd.to_datetime(v, format="mixed")),
    "date_none": ([dt.date(2024, 1, day) for day in (1, 2, 3, 4)], lambda v: np.array(v, object)),
    "span": ([dt.timedelta(hours=n) for n in range(4)], pd.to_timedelta),
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {".h5ad": {}, ".v2.zarr": {"zarr_format": 2}, ".v3.zarr": {"zarr_format": 3}}
DOORS = ("add", "cast", "clash first", "clash second", "empty first", "empty second", "annotate", "csv", "parquet")


def dataset(obs: pd.DataFrame, seed: int) -> ad.AnnData:
    x = np.random.default_rng(seed).poisson(1, (len(obs), 3)).astype(np.float32)
    return ad.AnnData(x, obs, pd.DataFrame(index=["g1", "g2", "g3"]))


def other(door: str, names: list[str]) -> pd.DataFrame:
    """Cells of another dataset, whose columns clash with all kinds or have no value."""
    clashing = {n: np.arange(2) if n.startswith(("text", "cat", "ord")) else ["x", "y"] for n in names}
    without = {n: [None, None] if i % 2 else [np.nan, np.nan] for i, n in enumerate(names)}
    return pd.DataFrame(clashing if door.startswith("clash") else without, index=["o1", "o2"])


def enter(atlas: RaggedAtlas, door: str, obs: pd.DataFrame, folder: Path) -> None:
    """Bring the columns of a frame into the atlas."""
    quiet: dict[str, Any] = {"progress": False}
    if door.startswith(("clash", "empty")):
        files = [(dataset(obs, 0), "d"), (dataset(other(door, list(obs)), 1), "o")]
        for file, name in files[:: -1 if door.endswith("first") else 1]:
            atlas.add(file, name, on_clash="text" if door.startswith("clash") else "error", **quiet)
    elif door in ("add", "cast"):
        atlas.add(dataset(obs, 0), "d", cast=dict.fromkeys(obs, "str") if door == "cast" else {}, **quiet)
    else:
        atlas.add(dataset(obs[[]], 0), "d", **quiet)
        table: Any = obs.rename_axis("cell_name")
        if door == "parquet":
            table.to_parquet(folder / "t.parquet")
        elif door == "csv":
            table.to_csv(folder / "t.csv")
        given: Any = table.reset_index() if door == "annotate" else folder / f"t.{door}"
        atlas.annotate(given, on="cell_name", dataset="d")


@pytest.mark.long
@pytest.mark.parametrize("door", DOORS)
@given(masks=st.lists(st.integers(0, 2**N - 1), min_size=len(KINDS), max_size=len(KINDS)))
@settings(parent=examples(1), phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_missing_stays_missing(tmp_path_factory: pytest.TempPathFactory, door: str, masks: list[int]) -> None:
    """For columns of every kind the set of cells without a value is that of the file, by every door and on every way out."""
    folder = tmp_path_factory.mktemp("missing")
    missing = {name: [bool(mask >> i & 1) for i in range(N)] for name, mask in zip(KINDS, masks, strict=True)}
    if door == "csv":
        # A CSV file says by an empty field or one of these words that a value is missing.
        missing["text_none"] = [True, True, True, True]
    if door in ("csv", "annotate", "parquet"):
        # Columns that say nothing of any cell are not written.
        missing = {name: mask for name, mask in missing.items() if not all(mask)}
        if not missing:
            return
    obs = pd.DataFrame(index=[f"c{i}" for i in range(N)])
    for name, mask in missing.items():
        values, make = KINDS[name]
        obs[name] = make([None if gone else value for value, gone in zip(values, mask, strict=True)])
    assert {name: obs[name].isna().tolist() for name in obs} == missing
    atlas = RaggedAtlas.create(str(folder / "atlas"))
    enter(atlas, door, obs, folder)
    view = atlas.checkout(atlas.snapshot())
    query = view.query().where(dataset="d")

    def check(frame: pd.DataFrame, way: str) -> None:
        frame = frame.set_index("cell_name").loc[list(obs.index)] if "cell_name" in frame else frame
        assert {name: frame[name].isna().tolist() for name in missing} == missing, way

    check(query.to_pandas(), "to_pandas")
    check(query.to_arrow().to_pandas(), "to_arrow")
    check(query.to_anndata().obs, "to_anndata")
    for name, options in WAYS.items():
        path = query.write(str(folder / f"out{name}"), **options)
        check((ad.read_h5ad if name == ".h5ad" else ad.read_zarr)(path).obs, name)
    if find_spec("tiledb"):
        cxg = query.write(str(folder / "out.cxg"), compute_embedding="pca", wide_integers="text")
        check(ra.read(cxg).obs, ".cxg")
    # As the modality has it: mudata copies its columns into those of all cells.
    check(ra.read(query.write(str(folder / "out.h5mu")))["gene_expression"].obs, ".h5mu")
    for name, mask in missing.items():
        assert query.where(f'"{name}" IS NULL').count() == sum(mask), name
        assert query.where(f'"{name}" IS NOT NULL').count() == N - sum(mask), name
    if door in ("add", "cast"):
        own = atlas.dataset("d").to_anndata().obs
        assert {name: own[name].isna().tolist() for name in missing} == missing
        for name in obs:
            assert own[name].dropna().tolist() == [
                pd.Timestamp(v) if type(v) is dt.date else v for v in obs[name].dropna()
            ]


def test_the_first_value_decides_the_type(tmp_path: Path) -> None:
    """Columns without values fit any type; from the first value on another type is refused, also within one call and for annotations."""
    empty = [pd.Categorical([None, None], categories=[]), [np.nan, np.nan], [None, None]]
    files = [
        dataset(pd.DataFrame({"c": values}, index=["a", "b"]), i) for i, values in enumerate([*empty, ["T", None]])
    ]
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(files[:2], progress=False)
    atlas.add(files[2:], progress=False)
    with pytest.raises(SchemaError, match="it is int64 here and string in the atlas"):
        atlas.add(dataset(pd.DataFrame({"c": [1, 2]}, index=["a", "b"]), 9), "ints", progress=False)
    query = atlas.checkout(atlas.snapshot()).query()
    assert (query.where("c = 'T'").count(), query.where("c IS NULL").count()) == (1, 7)

    other = RaggedAtlas.create(str(tmp_path / "other"))
    other.add(files[1], "d", progress=False)
    other.annotate(pd.DataFrame({"cell_name": ["b"], "c": ["T"]}), on="cell_name", dataset="d")
    other.add(files[3], "e", progress=False)
    with pytest.raises(SchemaError, match="it is int64 here and string in the atlas"):
        other.add(dataset(pd.DataFrame({"c": [1, 2]}, index=["a", "b"]), 9), "ints", progress=False)
    query = other.checkout(other.snapshot()).query()
    assert (query.where("c = 'T'").count(), query.where("c IS NULL").count()) == (2, 2)
    with pytest.raises(SchemaError, match="it is int64 here and string in the atlas"):
        other.annotate(pd.DataFrame({"cell_name": ["b"], "c": [1]}), on="cell_name", dataset="e")


@pytest.mark.parametrize("form", ["space", "vector"])
def test_results_that_are_missing_stay_missing(tmp_path: Path, form: Any) -> None:
    """Cells without a result have NaN in every output; NaN and masked values within a result are refused when it is added."""
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(dataset(pd.DataFrame(index=list("abcd")), 0), "d", progress=False)
    uids = atlas.checkout(atlas.snapshot()).query().to_anndata().obs_names.to_numpy()
    gone, values = np.array([False, True, False, True]), np.arange(4, dtype=np.float32)[:, None]
    for i, held in enumerate((np.where(gone[:, None], np.nan, values), np.ma.masked_array(values, gone[:, None]))):
        with pytest.raises(AtlasError, match="NaN"):
            atlas.add(write_results(tmp_path / str(i), uids, held), "r", as_=form, progress=False)
    atlas.add(write_results(tmp_path / "r", uids[~gone], values[~gone]), "r", as_=form, progress=False)
    query = atlas.checkout(atlas.snapshot()).query().with_results("r")
    outputs = [query.to_anndata(), next(iter(query.batches(9)))]
    for name, options in WAYS.items():
        outputs.append(ra.read(query.write(str(tmp_path / f"out{name}"), **options)))
    for made in outputs:
        assert np.isnan(made.obsm["r"][:, 0]).tolist() == gone.tolist()


def test_labels_that_are_missing_have_no_term(tmp_path: Path) -> None:
    """A cell without a label gets no id of a term, whatever says that the label is missing, and empty text is no label of a term."""
    pytest.importorskip("cellxgene_ontology_guide")
    labels = [
        np.array(["T cell", None, np.nan, "", "nan"], object),
        pd.Categorical(["T cell", None, None, "", "nan"]),
        pd.array(["T cell", None, pd.NA, "", "nan"], "string"),
    ]
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    for i, column in enumerate(labels):
        atlas.add(dataset(pd.DataFrame({"cell_type": column}, index=list("abcde")), i), f"d{i}", progress=False)
    atlas.map_terms("cell_type")
    query = atlas.checkout(atlas.snapshot()).query()
    ids, found = "cell_type_ontology_term_id", query.to_pandas()
    assert found["cell_type"].isna().tolist() == [False, True, True, False, False] * 3
    assert found[ids].isna().tolist() == [False, True, True, True, True] * 3
    assert query.where(f"{ids} IS NULL").count() == 12
    for name, options in WAYS.items():
        made = ra.read(query.write(str(tmp_path / f"out{name}"), **options)).obs
        assert made["cell_type"].isna().tolist() == found["cell_type"].isna().tolist()
        assert made[ids].isna().tolist() == found[ids].isna().tolist()

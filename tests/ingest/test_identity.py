"""Laws of feature identity: ids, symbols, versions and duplicates are told apart and reported."""

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.errors import FeatureError, NotFoundError, SchemaError
from raggedatlas.ingest.identity import identify
from raggedatlas.model.schemas import FeatureBaseSchema


class Gene(FeatureBaseSchema):
    """A registry with a column of its own, filled from var."""

    biotype: str | None = None


class StrictGene(FeatureBaseSchema):
    """A registry with a column that every feature must have."""

    biotype: str


def with_var(var: pd.DataFrame, seed: int = 0) -> ad.AnnData:
    x = np.random.default_rng(seed).poisson(1, (4, len(var))).astype(np.float32)
    return ad.AnnData(x, obs=pd.DataFrame(index=[f"c{i}" for i in range(4)]), var=var)


ENSEMBL = [f"ENSG{i:011d}" for i in range(3)]


def names_of(var: pa.Table) -> list[tuple[str, str]]:
    rows = identify(var, "gene_expression", "auto", "auto").rows
    return list(zip(rows["feature_id"].to_pylist(), rows["symbol"].to_pylist(), strict=True))


@pytest.mark.parametrize(
    "var",
    [
        {"_index": ["A", "B", "C"], "gene_ids": ENSEMBL},
        {"_index": ENSEMBL, "feature_name": ["A", "B", "C"]},
        {"_index": ["A", "B", "C"], "n": [1, 2, 3], "strange": [f"{e}.4" for e in ENSEMBL]},
        {"_index": ["x", "y", "z"], "ensembl_id": ENSEMBL, "gene_symbols": ["A", "B", "C"]},
    ],
)
def test_ids_and_symbols_are_found(var) -> None:  # noqa: ANN001
    """Ensembl ids in the index or a column are the ids; the usual symbol columns or the index are the symbols."""
    assert names_of(pa.table(var)) == list(zip(ENSEMBL, "ABC", strict=True))


@given(
    names=st.lists(
        st.sampled_from(["A", "B", "A-1", "A-2", "B.1", "ENSG00000000001.1", "ENSG00000000001.2"]),
        min_size=1,
        max_size=12,
    )
)
def test_features_of_one_file_are_all_different(names) -> None:  # noqa: ANN001
    """Whatever repeats, every column has a uid of its own, and first occurrences keep their id."""
    found = identify(pa.table({"_index": names}), "gene_expression", "index", "human")
    assert len(set(found.uids)) == len(names)
    again = identify(pa.table({"_index": names}), "gene_expression", "index", "human")
    assert again.uids == found.uids


@pytest.mark.filterwarnings("ignore:Variable names are not unique")
def test_repeated_features_are_kept_apart_and_reported(atlas) -> None:  # noqa: ANN001
    """Two columns of one name are two features; the report says so, and the file's var comes back as it was."""
    given = with_var(pd.DataFrame(index=["A", "B", "A", "A-1"]))
    report = atlas.add(given, "d", progress=False)
    assert any("kept apart" in note and "A -> A-2" in note for note in report.notes)
    assert sorted(atlas.features()["feature_id"]) == ["A", "A-1", "A-2", "B"]
    assert atlas.dataset("d").to_anndata().var_names.tolist() == ["A", "B", "A", "A-1"]


def test_versions_name_the_same_feature(atlas) -> None:  # noqa: ANN001
    """An id with a version suffix is the feature of the id without; the version becomes an alias."""
    atlas.add(with_var(pd.DataFrame(index=ENSEMBL)), "d", progress=False)
    report = atlas.add(with_var(pd.DataFrame(index=[f"{e}.7" for e in ENSEMBL]), 1), "e", progress=False)
    assert report.spaces[0].n_new_features == 0
    assert any("version suffixes" in note for note in report.notes)
    assert len(atlas.features()) == 3
    assert len(atlas.find_datasets_with_features([f"{ENSEMBL[0]}.7"])) == 2


def test_features_without_an_id_are_refused(atlas, unchanged) -> None:  # noqa: ANN001
    """An empty id is refused, with the column number and the mend."""
    given = with_var(pd.DataFrame({"id": ["x", "", "z"]}, index=["A", "B", "C"]))
    with unchanged(atlas), pytest.raises(FeatureError, match=r"column 1.*feature_id="):
        atlas.add(given, "d", feature_id="id", progress=False)
    with unchanged(atlas), pytest.raises(NotFoundError, match="no column 'nope'"):
        atlas.add(given, "d", feature_id="nope", progress=False)


def test_a_registry_of_ones_own_is_filled_from_var(tmp_path) -> None:  # noqa: ANN001
    """A column of the registry class is filled from the var column of the same name, and null where a file lacks it."""
    atlas = RaggedAtlas.create(str(tmp_path / "a"), registries={"gene_expression": Gene})
    var = pd.DataFrame({"biotype": pd.Categorical(["x", "y"])}, index=["A", "B"])
    atlas.add(with_var(var), "d", progress=False)
    atlas.add(with_var(pd.DataFrame(index=["B", "C"]), 1), "e", progress=False)
    assert atlas.features().set_index("feature_id")["biotype"].fillna("-").to_dict() == {"A": "x", "B": "y", "C": "-"}


def test_a_required_registry_column_is_asked_for(tmp_path, unchanged) -> None:  # noqa: ANN001
    """A file whose var lacks a required registry column is refused and leaves the atlas as it was."""
    atlas = RaggedAtlas.create(str(tmp_path / "a"), registries={"gene_expression": StrictGene})
    with unchanged(atlas), pytest.raises(SchemaError, match="biotype"):
        atlas.add(with_var(pd.DataFrame(index=["A", "B"])), "d", progress=False)
    atlas.add(with_var(pd.DataFrame({"biotype": ["x", "y"]}, index=["A", "B"])), "d", progress=False)
    assert atlas.features()["biotype"].tolist() == ["x", "y"]

"""Features of a result are named by their ids, or by their symbols."""

from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import scanpy as sc

import raggedatlas as ra
from raggedatlas.errors import ArgumentError


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> ra.AtlasView:
    """Two real files, one of which has ids and one symbols, and one with a symbol of two genes."""
    atlas = ra.RaggedAtlas.create(tmp_path_factory.mktemp("names") / "a.atlas")
    data = Path(__file__).parent.parent / "data"
    atlas.add([data / "lung_C144.h5", data / "pbmc68k_reduced.h5ad"], organism="human", progress=False)
    return atlas.checkout(atlas.snapshot())


def test_symbols_are_unique_names_and_ids_stay(view: ra.AtlasView, tmp_path: Path) -> None:
    """In memory, in files, summed up, compared and in lazy results."""
    query = view.query(names="symbol").where(dataset="lung_C144")
    by_id, found = view.query().where(dataset="lung_C144").to_anndata(), query.to_anndata()
    assert found.var_names.is_unique
    assert [*found.var["feature_id"]] == [*by_id.var["feature_id"]]
    np.testing.assert_array_equal(found.X.toarray(), by_id.X.toarray())
    first = ~by_id.var["symbol"].duplicated().to_numpy()
    assert [*found.var_names[first]] == [*by_id.var["symbol"][first]]
    assert all(
        name.rpartition("-")[0] == symbol
        for name, symbol in zip(found.var_names[~first], by_id.var["symbol"][~first], strict=True)
    )
    assert (~first).any()
    query.write(tmp_path / "a.h5ad")
    assert [*ad.read_h5ad(tmp_path / "a.h5ad").var_names] == [*found.var_names]
    assert [*query.lazy().var_names] == [*found.var_names]
    assert [*query.aggregate("dataset").var_names] == [*found.var_names]
    few = query.features("CD79A", "LYZ")
    assert [*few.to_anndata().var_names] == ["CD79A", "LYZ"]
    sc.get.obs_df(few.to_anndata(), ["CD79A"])


def test_it_is_a_part_of_the_query(view: ra.AtlasView) -> None:
    """Its dictionary, its description, the provenance of its results; other words are refused."""
    query = view.query(names="symbol")
    assert "names symbol" in query.explain()
    assert ra.Query.from_dict(view, query.to_dict()).spec == query.spec
    with pytest.raises(ArgumentError, match="names"):
        view.query(names="gene")  # type: ignore[arg-type]

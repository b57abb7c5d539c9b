"""What is written keeps the rules of names, tables and axes, or is refused by name before a matrix is written."""

import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr

from raggedatlas import RaggedAtlas
from raggedatlas.errors import SchemaError, SourceError
from raggedatlas.formats import element_writer
from raggedatlas.formats.anndata import validate
from raggedatlas.formats.copying import copy
from raggedatlas.formats.registry import open_sink
from raggedatlas.testing.anndata_strategies import assert_equal
from reading import read_anndata

TARGETS: list[tuple[str, dict[str, Any]]] = [("x.h5ad", {}), ("x.zarr", {"zarr_format": 2}), ("x.zarr", {})]
IDS = ["hdf5", "zarr2", "zarr3"]


def small(n: int = 3) -> ad.AnnData:
    obs = pd.DataFrame(
        {
            "kind": pd.Categorical(np.arange(n) % 2),
            "byte": np.zeros(n, np.int8),
            "score": np.arange(float(n)),
            "text": pd.Series([f"t{i}" for i in range(n)], dtype=object).to_numpy(),
            "holes": pd.array([None, *range(1, n)], dtype="Int32"),
        },
        index=[f"c{i}" for i in range(n)],
    )
    return ad.AnnData(sp.csr_matrix(np.eye(n, 3, dtype=np.float32)), obs=obs, var=pd.DataFrame(index=list("abc")))


@pytest.mark.parametrize(("name", "options"), TARGETS, ids=IDS)
def test_columns_of_a_table_share_their_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: Any
) -> None:
    """A76: all columns, codes, values, masks and the index of a table are cut by the same number of rows, the last chunk too."""
    monkeypatch.setattr(element_writer, "COLUMN_CHUNK", 4)
    path = copy(small(10), open_sink(tmp_path / name, **options))
    root: Any = h5py.File(path) if name == "x.h5ad" else zarr.open_group(path, mode="r")
    paths = ["_index", "byte", "score", "text", "kind/codes", "holes/values", "holes/mask"]
    nodes = [root[f"obs/{at}"] for at in paths]
    nodes = [node["values"] if isinstance(node, zarr.Group) else node for node in nodes]  # nullable text of pandas 3
    assert {node.chunks for node in nodes} == {(4,)}
    assert root["var/_index"].chunks == (3,)
    assert root["obs/kind/categories"].chunks == (2,)
    if name == "x.h5ad":
        root.close()
    assert validate(path, "full") == []
    found = read_anndata(path)
    assert found.obs["text"].tolist() == small(10).obs["text"].tolist()
    assert found.obs["holes"].isna().tolist() == [True, *[False] * 9]


def test_slashes_in_columns_are_kept_where_they_can_be(tmp_path: Path) -> None:
    """A77: HDF5 lists every column and finds one with a slash again, which the rule calls unusual; Zarr refuses it by name."""
    adata = small()
    adata.obs["CD4/CD8"] = [1, 2, 3]
    path = copy(adata, tmp_path / "x.h5ad")
    pd.testing.assert_series_equal(read_anndata(path).obs["CD4/CD8"], adata.obs["CD4/CD8"])
    assert [(p.rule, p.path) for p in validate(path, "full")] == [("A77", "obs")]
    for options in ({}, {"zarr_format": 2}):
        with pytest.raises(SchemaError, match="obs: the column 'CD4/CD8' has a name that Zarr"):
            copy(path, open_sink(tmp_path / "x.zarr", **options))
    assert [at.name for at in tmp_path.iterdir()] == ["x.h5ad"]


ONES, TWICE = np.ones((3, 3)), pd.DataFrame([[1, 2]] * 3, columns=["n", "n"], index=list("abc"))
NAMES: dict[str, tuple[str, Any]] = {
    "obs: the column '_index' bears the name": ("obs", pd.DataFrame({"_index": range(3)}, index=["c0", "c1", "c2"])),
    "uns/deep/table: the column '_index' bears the name": ("uns/deep", {"table": pd.DataFrame({"_index": [1]}, index=["r"])}),
    "var: the column 'n' stands there more than once": ("var", TWICE),
    "uns/table: the column 'n' stands there more than once": ("uns/table", TWICE),
    "'uns/a/b' has a '/' in its name": ("uns/a/b", 1),
    "uns/rank has the key 'T/NK'": ("uns/rank", {"T/NK": np.arange(3)}),
    "'layers/a/b' has a '/' in its name": ("layers/a/b", ONES),
    "'obsm/a/b' has a '/' in its name": ("obsm/a/b", ONES),
    "'varm/a/b' has a '/' in its name": ("varm/a/b", ONES),
}  # fmt: skip
"""What is refused -> the element that is set, and its value."""


@pytest.mark.parametrize("said", NAMES)
def test_names_that_no_reader_would_find_again_are_refused(tmp_path: Path, said: str) -> None:
    """A78 and its like: reserved, repeated and nested names are told before any matrix is written, for each kind of file."""
    adata, (key, value) = small(), NAMES[said]
    group, _, name = key.partition("/")
    with warnings.catch_warnings(action="ignore"):
        getattr(adata, group).__setitem__(name, value) if name else setattr(adata, group, value)
    for name, options in TARGETS:
        with pytest.raises(SchemaError, match=said):
            copy(adata, open_sink(tmp_path / name, **options))
        assert list(tmp_path.iterdir()) == []


def test_a_dataset_with_a_nested_key_is_kept_and_not_written(tmp_path: Path) -> None:
    """A key of `uns` with a slash comes back from an atlas as an object; writing it to a file is refused by name."""
    adata = small()
    adata.uns = {"plain": 1, "T/NK": {"n": 2}}
    atlas = RaggedAtlas.create(tmp_path / "a.atlas")
    dataset = atlas.dataset(atlas.add(adata, progress=False).dataset_uid)
    assert dataset.to_anndata().uns == adata.uns
    for name, _ in TARGETS[1:]:
        with pytest.raises(SchemaError, match="'uns/T/NK'"):
            dataset.write(tmp_path / name)
    assert [at.name for at in tmp_path.iterdir()] == ["a.atlas"]


@pytest.mark.parametrize("group", ["layers", "obsm", "varm", "obsp", "varp"])
@pytest.mark.parametrize("value", [1.5, "text", {"a": np.ones(3)}, np.float32(2), None], ids=lambda v: type(v).__name__)
def test_scalars_belong_into_uns(tmp_path: Path, group: str, value: Any) -> None:
    """A96: what has no rows is refused outside of `uns`, alone or in a mapping of members."""
    for key, given in ((f"{group}/x", value), (group, {"x": value})):
        sink = open_sink(tmp_path / "x.h5ad")
        with pytest.raises(SchemaError, match=f"{group}/x is of type .* put it into uns"):
            sink.element(key, given)
        sink.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("group", ["obsm", "varm"])
def test_members_have_the_rows_of_their_table(tmp_path: Path, group: str) -> None:
    """A table or array beside with more or fewer rows than its axis is refused, and nothing becomes visible."""
    for rows in (2, 4):
        sink = open_sink(tmp_path / "x.h5ad")
        sink.element("obs", small().obs)
        sink.element("var", small().var)
        sink.element(f"{group}/x", pd.DataFrame({"n": range(rows)}, index=[f"r{i}" for i in range(rows)]))
        with pytest.raises(SchemaError, match=rf"{group}/x has shape \({rows},\)"):
            sink.commit()
        sink.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_rankings_with_slashes_in_names_of_groups(tmp_path: Path) -> None:
    """Scanpy's rankings are records with a field per group: a group "T/NK" goes into every format."""
    adata = small()
    fields: Any = [("T/NK", "O"), ("B", "O")]
    names = np.array([("CD3E", "MS4A1"), ("NKG7", "CD79A")], dtype=fields)
    scores = np.array([(1.5, 2.5), (0.5, 1.0)], dtype=[("T/NK", "f4"), ("B", "f4")])
    adata.uns["rank_genes_groups"] = {"names": names, "scores": scores, "params": {"method": "t-test"}}
    for name, options in TARGETS:
        found = read_anndata(copy(adata, open_sink(tmp_path / name, overwrite=True, **options))).uns[
            "rank_genes_groups"
        ]
        assert found["names"].dtype.names == ("T/NK", "B")
        assert found["names"]["T/NK"].tolist() == ["CD3E", "NKG7"]
        np.testing.assert_array_equal(found["scores"]["B"], scores["B"])


@pytest.fixture(scope="module")
def atlas(tmp_path_factory: pytest.TempPathFactory) -> RaggedAtlas:
    """An atlas into which nothing gets."""
    return RaggedAtlas.create(tmp_path_factory.mktemp("atlas") / "a.atlas")


def _broken(where: str) -> ad.AnnData:
    """Give an AnnData with a sparse matrix that SciPy made without looking at its indices."""
    adata = small()
    wrong = sp.csr_matrix(np.eye(3))
    wrong.indices = np.array([0, 1, 9], np.int32)
    group, _, name = where.partition("/")
    if group == "raw":
        adata.raw = adata.copy()
        adata.raw.varm["g"] = wrong
    elif "/" in name:
        adata.uns["deep"] = {"g": wrong}
    else:
        getattr(adata, group)[name] = wrong
    return adata


@pytest.mark.parametrize(
    "where", ["obsp/g", "varp/g", "varm/g", "uns/g", "uns/deep/g", "raw/varm/g", "obsm/g", "layers/g"]
)
def test_objects_are_held_to_the_rules_of_entries(tmp_path: Path, atlas: RaggedAtlas, where: str) -> None:
    """A58 in memory: an entry outside of its matrix is refused by name, by a copy and by an atlas, and leaves nothing."""
    adata = _broken(where)
    with pytest.raises(SourceError, match=where):
        copy(adata, tmp_path / "x.h5ad")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SourceError, match=where):
        atlas.add(adata, progress=False)
    assert len(atlas.list_datasets()) == 0


def test_what_is_written_is_what_was_given(tmp_path: Path) -> None:
    """The file that the cases above start from is equal by anndata's own comparison, so that only what is changed is told."""
    with warnings.catch_warnings(action="ignore"):
        small().write_h5ad(tmp_path / "theirs.h5ad")
    assert_equal(read_anndata(tmp_path / "theirs.h5ad"), read_anndata(copy(small(), tmp_path / "ours.h5ad")))

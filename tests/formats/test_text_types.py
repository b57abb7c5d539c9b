"""Types of text: every kind of text that pandas has comes back from our files with the dtype that it has in anndata's own."""

from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.errors import SchemaError
from raggedatlas.formats.copying import copy
from raggedatlas.formats.registry import open_sink
from reading import read_anndata

KINDS = ("str", "object", "string[python]", "string[pyarrow]")

WAYS = {"h5ad": {}, "zarr 2": {"zarr_format": 2}, "zarr 3": {"zarr_format": 3}}


def texts(values: list[Any], kind: str) -> Any:
    return pd.Series(values, dtype=object).array if kind == "object" else pd.array(values, dtype=kind)


def cells(index: str, n_cells: int) -> ad.AnnData:
    """Return cells whose columns and categories have every type of text, with and without missing values, and their names one.

    Objects with missing values are left out: anndata writes them to no file.
    """
    words, holes = ["b", "", "ü"][:n_cells], ["b", None, "ü"][:n_cells]
    obs = {kind: texts(words, kind) for kind in KINDS}
    obs |= {f"{kind} with holes": texts(holes, kind) for kind in KINDS if kind not in ("object", "str")}
    # A generation of pandas whose ``str`` is of objects has no missing values in it.
    if isinstance(texts(words, "str").dtype, pd.StringDtype):
        obs["str with holes"] = texts(holes, "str")
    obs |= {f"categories of {kind}": pd.Categorical(texts(words, kind)) for kind in KINDS}
    obs |= {f"categories of {kind} with holes": pd.Categorical(texts(holes, kind)) for kind in KINDS}
    names = pd.Index(texts(["c1", "c2", "c3"][:n_cells], index), dtype=object if index == "object" else index)
    made = ad.AnnData(np.ones((n_cells, 1), np.float32), obs=pd.DataFrame(obs, index=names))
    # A table beside the cells is written as a whole, that of the cells column by column.
    made.obsm["table"] = made.obs.copy()
    return made


def types(frame: pd.DataFrame) -> dict[str, Any]:
    """Return every dtype, with how its text is stored and what stands for a missing one."""
    found = {str(name): column.dtype for name, column in frame.items()} | {"index": frame.index.dtype}
    inner = {
        f"categories of {name}": column.cat.categories.dtype
        for name, column in frame.items()
        if isinstance(column.dtype, pd.CategoricalDtype)
    }
    return {
        name: (str(dtype), getattr(dtype, "storage", ""), repr(getattr(dtype, "na_value", "")))
        for name, dtype in (found | inner).items()
    }


def written_by_anndata(adata: ad.AnnData, path: Path, way: str) -> Path:
    if way == "h5ad":
        adata.write_h5ad(path, convert_strings_to_categoricals=False)
    else:
        with ad.settings.override(zarr_write_format=int(way[-1])):
            adata.write_zarr(path, convert_strings_to_categoricals=False)
    return path


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("n_cells", [3, pytest.param(0, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("way", ["h5ad", "zarr 3", pytest.param("zarr 2", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("index", KINDS)
def test_text_comes_back_with_the_type_that_anndata_gives_it(
    tmp_path: Path, index: str, way: str, n_cells: int
) -> None:
    """Columns, names and categories of every type of text, from memory and from a file of anndata's, into each format and an atlas."""
    ending = "h5ad" if way == "h5ad" else "zarr"
    adata = cells(index, n_cells)
    with ad.settings.override(allow_write_nullable_strings=True):
        stored = written_by_anndata(adata.copy(), tmp_path / f"theirs.{ending}", way)
        theirs = read_anndata(stored)
    found = [
        read_anndata(copy(adata, open_sink(tmp_path / f"memory.{ending}", **WAYS[way]))),
        read_anndata(copy(stored, open_sink(tmp_path / f"file.{ending}", **WAYS[way]))),
    ]
    if way == "h5ad" and n_cells:
        atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
        atlas.add(stored, "d", progress=False)
        found.append(atlas.dataset("d").to_anndata())
    for ours in found:
        for found_table, table in ((ours.obs, theirs.obs), (ours.obsm["table"], theirs.obsm["table"])):
            assert types(found_table) == types(table)
            pd.testing.assert_frame_equal(found_table, table)


NO_TEXT = {
    "numbers among text": np.array([1, "a"], object),
    "nothing among text": np.array(["a", None], object),
    "a list of both": [1, "a"],
    "a masked number": np.ma.masked_array([1, 2], [False, True]),
    "numbers and a missing value": pd.DataFrame({"x": [1, "a", None]}, dtype=object),
    "lists": pd.DataFrame({"x": pd.Series([[1], [2]])}),
    "bytes and a missing value": pd.DataFrame({"x": [b"a", None]}),
    "categories of both": pd.DataFrame({"x": pd.Categorical([1, "a"])}),
    "categories of times": pd.DataFrame({"x": pd.Categorical(pd.to_datetime(["2020-01-01"]))}),
    "a nameless row": pd.DataFrame({"x": [1, 2]}, index=["a", None]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["h5ad", "zarr 3"])
@pytest.mark.parametrize("value", NO_TEXT)
def test_values_that_would_become_text_are_refused(tmp_path: Path, value: str, way: str) -> None:
    """Objects of which a file would hold no more than their representation as text, or another value, are refused by name."""
    given = ad.AnnData(np.ones((2, 1), np.float32), uns={"odd": NO_TEXT[value]})
    with pytest.raises(SchemaError, match="uns/odd cannot be written"):
        copy(given, open_sink(tmp_path / f"x.{way[:4]}", **WAYS[way]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["h5ad", "zarr 3"])
def test_objects_and_categories_keep_their_values(tmp_path: Path, way: str) -> None:
    """Booleans in a column of objects stay booleans, categories of nullable and Arrow numbers stay numbers."""
    obs = pd.DataFrame(
        {
            "flag": pd.Series([True, None, False], dtype=object),
            "nullable": pd.Categorical(pd.array([3, None, 1], dtype="Int64")),
            "arrow": pd.Categorical(pd.array([3, None, 1], dtype="int64[pyarrow]")),
        }
    ).set_axis(["a", "b", "c"])
    back = read_anndata(
        copy(ad.AnnData(np.ones((3, 1), np.float32), obs=obs), open_sink(tmp_path / f"x.{way[:4]}", **WAYS[way]))
    ).obs
    assert back["flag"].tolist() == [True, pd.NA, False]
    for name in ("nullable", "arrow"):
        assert back[name].cat.categories.tolist() == [1, 3]
        assert back[name].cat.codes.tolist() == [1, -1, 0]

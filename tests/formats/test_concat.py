"""Files concatenated without an atlas: what anndata makes of the same data in memory is what must be written."""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.errors import ArgumentError, AtlasError, FeatureError, NotFoundError, SourceError
from raggedatlas.formats.concat import ConcatInput, ConcatOptions, ConcatSource, concat, concat_cells
from raggedatlas.formats.copying import copy
from raggedatlas.formats.modalities import read, select_modalities
from raggedatlas.formats.registry import open_sink, open_source
from raggedatlas.model.frames import Column, ColumnTable, Texts
from raggedatlas.testing.anndata_strategies import assert_equal, assert_same, wholes
from raggedatlas.testing.hypothesis_profile import examples

DATA = Path(__file__).parent.parent / "data"


def read_back(path: str | Path) -> ad.AnnData:
    with warnings.catch_warnings(action="ignore"):
        return ad.read_zarr(path) if Path(path).is_dir() else ad.read_h5ad(path)


def expected(parts: Any, path: Path, **how: Any) -> ad.AnnData:
    """What anndata makes of it, through a file."""
    with warnings.catch_warnings(action="ignore"):
        made = ad.concat(parts, **how)
    return read_back(copy(made, path))


def comparable(adata: ad.AnnData) -> ad.AnnData:
    """Put a number where anndata's own comparison meets NaN, which is not equal to itself."""
    for group in (adata.layers, adata.obsm, adata.varm, adata.varp):
        for name, value in group.items():
            if isinstance(value, np.ndarray) and value.dtype.kind == "f":
                group[name] = np.nan_to_num(value, nan=-99)
    if isinstance(adata.X, np.ndarray) and adata.X.dtype.kind == "f":
        adata.X = np.nan_to_num(adata.X, nan=-99)
    return adata


@st.composite
def several(draw: st.DrawFn) -> list[ad.AnnData]:
    """Draw up to three objects with members of every kind, which share some names of features."""
    parts = draw(st.lists(wholes(), min_size=1, max_size=3))
    for part in parts:
        first = draw(st.integers(0, 3))
        names = draw(st.permutations([f"g{first + i}" for i in range(part.n_vars)]))
        for frames in (part.varm, part.varp):
            frames.clear() if draw(st.booleans()) else None
        for name in [name for name, value in part.varm.items() if isinstance(value, pd.DataFrame)]:
            del part.varm[name]
        part.var_names = names
    return parts


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Support for Awkward Arrays")
@pytest.mark.parametrize("join", ["inner", "outer"])
@given(parts=several(), data=st.data())
@examples(6)
def test_random_objects(
    tmp_path_factory: pytest.TempPathFactory, join: Any, parts: list[ad.AnnData], data: st.DataObject
) -> None:
    """Matrices, layers, raw, tables, obsm, varm and uns of any kind are those of anndata.concat, or both refuse."""
    folder = tmp_path_factory.mktemp("x")
    strategy = st.sampled_from([None, "same", "unique", "first", "only"])
    how: dict[str, Any] = {"join": join, "merge": data.draw(strategy), "uns_merge": data.draw(strategy)}
    how |= data.draw(st.sampled_from([{}, {"label": "part", "index_unique": "-"}, {"fill_value": 3}]))
    with warnings.catch_warnings(action="ignore"):
        try:
            asked = expected(parts, folder / "asked.h5ad", **how)
        except Exception:  # noqa: BLE001  (whatever anndata raises)
            with pytest.raises(AtlasError):
                concat(parts, folder / "made.h5ad", **how)
            return
        found = read_back(concat(parts, folder / "made.h5ad", **how))
    assert_same(asked, found)
    assert_equal(comparable(asked), comparable(found))


def one(names: str, n: int = 3, first: int = 0, **more: Any) -> ad.AnnData:
    """Return cells whose features are letters."""
    values = np.arange(first, first + n * len(names)).reshape(n, len(names)) % 5
    obs = pd.DataFrame({"kind": pd.Categorical([f"k{first}"] * n)}, index=[f"c{i}" for i in range(n)])
    return ad.AnnData(sp.csr_matrix(values, dtype=np.float32), obs=obs, var=pd.DataFrame(index=list(names)), **more)


@pytest.mark.long
@pytest.mark.parametrize("target", ["x.h5ad", "x.zarr", "x.h5mu"])
@pytest.mark.parametrize("join", ["inner", "outer"])
def test_real_files(tmp_path: Path, join: Any, target: str) -> None:
    """Files of other people, of several formats, are what anndata makes of them in memory, into every format."""
    paths = [DATA / name for name in ("lung_C144.h5", "lung_C149.h5", "pbmc_5k_protein_v3.h5ad")]
    with warnings.catch_warnings(action="ignore"):
        parts = [read(path) for path in paths]
        for part in parts:
            part.var_names_make_unique()
        asked = ad.concat(parts, join=join, label="batch", keys=["a", "b", "c"], index_unique="-", merge="first")
    made = concat(
        dict(zip("abc", parts, strict=True)),
        tmp_path / target,
        join=join,
        label="batch",
        index_unique="-",
        merge="first",
    )
    found = read(made, modality="rna" if target == "x.h5mu" else None)
    assert (found.X != asked.X).nnz == 0
    assert found.X.dtype == asked.X.dtype
    pd.testing.assert_frame_equal(found.obs, asked.obs)
    assert found.var_names.tolist() == asked.var_names.tolist()


@pytest.mark.long
def test_files_are_concatenated_as_they_are_stored(tmp_path: Path) -> None:
    """Paths of h5ad, Zarr and zipped Zarr are read by rows: the same result as of the objects."""
    parts = [one("abc"), one("bcd", 4, first=7), one("dab", 2, first=3)]
    with warnings.catch_warnings(action="ignore"):
        parts[0].write_h5ad(tmp_path / "a.h5ad")
        parts[1].write_zarr(tmp_path / "b.zarr")
        parts[2].write_zarr(tmp_path / "c.zarr")
        shutil.make_archive(str(tmp_path / "c.zarr"), "zip", tmp_path / "c.zarr")
    made = concat([tmp_path / name for name in ("a.h5ad", "b.zarr", "c.zarr.zip")], tmp_path / "x.zarr", join="outer")
    assert_same(expected(parts, tmp_path / "asked.zarr", join="outer"), read_back(made))


def test_long_text_is_joined_in_blocks() -> None:
    """Names of cells and columns of text of long tables come in blocks, and are never whole in memory."""

    def table(n: int, text: Any) -> ColumnTable:
        names = Column("barcode", lambda: Texts(n, lambda: iter([np.array([f"c{i}" for i in range(n)], object)])))
        return ColumnTable(n, names, (Column("text", lambda: text), Column("n", lambda: pd.Series(np.arange(n)))))

    long = Texts(3, lambda: iter([np.array(["x", "y"], object), np.array(["z"], object)]))
    short = pd.Series(["w"], dtype=object)
    how = ConcatOptions("inner", None, None, "from", ("p", "q"), "-", None)
    joined = concat_cells([table(3, long), table(1, short)], how)
    text, names = joined.columns[0].read(), joined.index.read()
    assert isinstance(text, Texts)
    assert isinstance(names, Texts)
    assert [len(block) for block in text.blocks()] == [2, 1, 1]
    frame = joined.frame()
    assert frame.index.tolist() == ["c0-p", "c1-p", "c2-p", "c0-q"]
    assert frame.index.name == "barcode"
    assert frame.to_dict("list") == {"text": [*"xyzw"], "n": [0, 1, 2, 0], "from": ["p", "p", "p", "q"]}
    missing = concat_cells([table(3, long), table(1, pd.Series([None], dtype=object))], how).frame()
    assert missing["text"].isna().tolist() == [False, False, False, True]


def test_a_walk_takes_the_steps_that_are_asked_for(tmp_path: Path) -> None:
    """Rows come at most so many a step, source by source, also of several matrices and of one that a source lacks."""
    parts = [one("ab", 5), one("bc", 4)]
    parts[1].layers["l"] = parts[1].X * 2
    members = [
        ConcatInput.of(source := open_source(part), *select_modalities(source, None, multimodal=False))
        for part in parts
    ]
    stacked = ConcatSource(members, ConcatOptions("outer", None, None, None, ("0", "1"), None, None))
    steps = list(stacked.blocks(("X", "layers/l"), 2, (1, 8)))
    assert [[block.n_rows for block in step] for step in steps] == [[2, 2], [2, 2], [2, 2], [1, 1]]
    with warnings.catch_warnings(action="ignore"):
        whole = ad.concat(parts, join="outer").layers["l"].toarray()
    blocks = [step[1] for step in steps]
    dense = [sp.csr_array((b.layers["values"], b.indices, b.indptr), (b.n_rows, 3)).toarray() for b in blocks]
    np.testing.assert_array_equal(np.concatenate(dense), whole[1:8])


@pytest.mark.parametrize(
    ("join", "fill_value", "told"),
    [("outer", None, (5, True)), ("inner", None, (5, False)), ("outer", 2, (None, True))],
)
def test_how_many_entries_come_is_told(join: Any, fill_value: float | None, told: tuple[int | None, bool]) -> None:
    """Steps are as large as the entries of the sources allow; where features are left out they are an upper bound, and none is known with values put in."""
    parts = [one("ab", 2, 1), one("b", 1, 1)]
    members = [
        ConcatInput.of(source := open_source(part), *select_modalities(source, None, multimodal=False))
        for part in parts
    ]
    (x,) = (
        ConcatSource(members, ConcatOptions(join, None, None, None, ("0", "1"), None, fill_value)).describe().matrices
    )
    assert (x.n_entries, x.exact) == told


def test_raw_of_some_is_left_out_with_a_warning(tmp_path: Path) -> None:
    """Where only some sources have raw it is left out, as by anndata, and this is said."""
    parts = [one("ab"), one("ab")]
    parts[0].raw = parts[0].copy()
    with pytest.warns(UserWarning, match="raw is left out: 1 of 2 sources have it"):
        made = concat(parts, tmp_path / "x.h5ad")
    assert read_back(made).raw is None


def no_x() -> list[ad.AnnData]:
    return [one("ab"), ad.AnnData(obs=one("ab").obs, var=one("ab").var)]


def table_and_array() -> list[ad.AnnData]:
    parts = [one("ab"), one("ab")]
    parts[0].obsm["m"], parts[1].obsm["m"] = pd.DataFrame({"t": ["u"] * 3}, index=parts[0].obs_names), np.ones((3, 2))
    return parts


@pytest.mark.parametrize(
    ("parts", "how", "error", "said"),
    [
        (lambda: [one("aa")], {}, FeatureError, "names several features 'a'"),
        (no_x, {}, SourceError, "has no X, and other sources have"),
        (table_and_array, {}, SourceError, "cannot be put together.*dataframe"),
        (list, {}, ArgumentError, "one or more sources"),
        (lambda: "a.h5ad", {}, ArgumentError, "put it into a list"),
        (lambda: [one("a")], {"keys": ["a", "b"]}, ArgumentError, "a key of its own for each of the 1 sources"),
        (lambda: [one("a")] * 2, {"keys": ["a", "a"]}, ArgumentError, "a key of its own"),
        (lambda: {"a": one("a")}, {"keys": ["a"]}, ArgumentError, "not both"),
        (lambda: [one("a")], {"join": "left"}, ArgumentError, "takes join as one of"),
        (lambda: [one("a")], {"merge": "all"}, ArgumentError, "takes merge as one of"),
        (lambda: [DATA / "wu2020.h5mu"], {}, SourceError, "choose it with modality="),
        (lambda: [one("a"), DATA / "absent.h5ad"], {}, NotFoundError, "absent.h5ad"),
    ],
)
def test_what_cannot_be_joined_is_refused(
    tmp_path: Path, parts: Callable[[], Any], how: Any, error: type[Exception], said: str
) -> None:
    """Each is refused with its own error and message, and nothing is left, also of a sink that was opened before."""
    with pytest.raises(error, match=said), warnings.catch_warnings(action="ignore"):
        concat(parts(), open_sink(tmp_path / "x.h5ad"), **how)
    assert not list(tmp_path.iterdir())


def test_truths_that_miss_a_value(tmp_path: Path) -> None:
    """Dense booleans of other features become what pandas makes of them: numbers, or objects, which are refused with the way out."""
    parts = [one("ab"), one("bc")]
    for part in parts:
        part.X = part.X.toarray() > 0
    with warnings.catch_warnings(action="ignore"):
        asked = ad.concat(parts, join="outer").X
    if asked.dtype == object:
        with pytest.raises(SourceError, match=r"X would have missing values.*fill_value="):
            concat(parts, tmp_path / "x.h5ad", join="outer")
    else:
        np.testing.assert_array_equal(read_back(concat(parts, tmp_path / "x.h5ad", join="outer")).X, asked)


@pytest.mark.long
def test_one_modality_of_several(tmp_path: Path) -> None:
    """Of MuData the modality that is named is concatenated, in the order of its own cells."""
    made = concat([DATA / "wu2020.h5mu"] * 2, tmp_path / "x.h5ad", modality="gex", index_unique="-", uns_merge="same")
    part = read(DATA / "wu2020.h5mu", modality="gex")
    assert_same(expected([part, part], tmp_path / "asked.h5ad", index_unique="-", uns_merge="same"), read_back(made))

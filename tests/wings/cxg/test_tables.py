"""Long tables of a CXG: columns wait in files and are written in bands, and everything is as if they were written whole."""

from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.errors import SourceError, StoreError
from raggedatlas.formats.copying import copy
from raggedatlas.formats.registry import open_sink
from raggedatlas.model.frames import ColumnTable, TableColumn, Texts
from raggedatlas.wings.cxg.options import CxgOptions
from raggedatlas.wings.cxg.table_encoder import BATCH_ROWS, encode_table, spill_column
from raggedatlas.wings.cxg.tiledb_arrays import context, import_tiledb, open_array
from raggedatlas.wings.cxg.validation import validate

N = 2300


def cells(n: int = N) -> pd.DataFrame:
    """Cells with a column of every kind that a CXG can hold."""
    rng = np.random.default_rng(n)
    return pd.DataFrame(
        {
            "kind": pd.Categorical(rng.choice(["T", "B"], n), ["T", "B", "NK"]),
            "holes": pd.Categorical.from_codes(rng.integers(-1, 2, n), ["x", "y"]),
            "barcode": [f"Zürich-{i}" for i in range(n)],
            "half": pd.Series([f"h{i}" if i % 3 else None for i in range(n)], dtype=object).to_numpy(),
            "count": rng.integers(0, 99, n),
            "share": np.where(rng.random(n) < 0.1, np.nan, rng.random(n)),
            "good": rng.random(n) < 0.5,
        },
        index=pd.Index([f"cell {i}" for i in range(n)], name="cell"),
    )


def held() -> ad.AnnData:
    """An AnnData of these cells, with an embedding."""
    made = ad.AnnData(sp.random(N, 4, 0.3, "csr", np.float32, random_state=0), obs=cells())
    made.var_names = [f"g{i}" for i in range(4)]
    made.obsm["X_umap"] = np.random.default_rng(0).normal(size=(N, 2)).astype(np.float32)
    return made


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in a file, whose text with gaps AnnData has made categories."""
    path = tmp_path_factory.mktemp("stored") / "x.h5ad"
    held().write_h5ad(path)
    return path


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every table for a long one: text comes in blocks, columns wait in files, a band has one tile."""
    for module in ("formats.anndata.elements", "wings.cxg.array_reader", "model.frames"):
        monkeypatch.setattr(f"raggedatlas.{module}.TEXT_ROWS", 500)
    monkeypatch.setattr("raggedatlas.wings.cxg.sink.SPILL_ROWS", 500)
    monkeypatch.setattr("raggedatlas.wings.cxg.table_encoder.BATCH_ROWS", 300)
    monkeypatch.setattr("raggedatlas.wings.cxg.array_writer.TABLE_BYTES", 1)


def contents(path: Path) -> dict[str, Any]:
    """Give all that a reader can see of a table: its schema, metadata and values."""
    with open_array(path) as array:
        schema = [(a.name, str(a.dtype), a.isvar, repr(a.filters)) for a in map(array.attr, range(array.nattr))]
        values = {name: repr(np.asarray(part).tolist()) for name, part in dict(array[:]).items()}
        return {"schema": (schema, repr(array.dim(0))), "metadata": dict(array.meta.items()), "values": values}


def fragments(path: Path) -> int:
    return len(import_tiledb().array_fragments(str(path), ctx=context()))


def write(what: Any, path: Path, **options: Any) -> Path:
    return Path(copy(what, open_sink(path, **options)))


@pytest.mark.long
@pytest.mark.parametrize("profile", ["0.3.0", "0.2.0"])
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_long_table_is_written_as_a_short_one(
    tmp_path: Path, stored: Path, kind: str, profile: str, request: pytest.FixtureRequest
) -> None:
    """Schema, hints, metadata, values and losses are the same, from a file and from memory; no temporary file is left."""
    told: list[Any] = []
    what = stored if kind == "file" else held()
    whole = write(what, tmp_path / "whole.cxg", profile=profile, on_losses=told.append)
    request.getfixturevalue("long")
    made = write(what, tmp_path / "made.cxg", profile=profile, on_losses=told.append)
    for table in ("obs", "var"):
        assert contents(made / table) == contents(whole / table)
    assert told[0] == told[1]
    assert (fragments(whole / "obs"), fragments(made / "obs")) == (1, 3)
    assert validate(made, "full") == validate(whole, "full")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made.cxg", "whole.cxg"]


@pytest.mark.nightly
def test_chosen_cells_and_those_of_an_atlas(tmp_path: Path, stored: Path, request: pytest.FixtureRequest) -> None:
    """Some cells of a file, and those of a query, are what they are where the table is short."""
    chosen = np.arange(3, N, 2)
    expected = Path(copy(stored, open_sink(tmp_path / "expected.cxg"), where=chosen))
    request.getfixturevalue("long")
    made = Path(copy(stored, open_sink(tmp_path / "some.cxg"), where=chosen))
    assert contents(made / "obs") == contents(expected / "obs")
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(stored, "d", progress=False)
    query = atlas.checkout(atlas.snapshot()).query()
    one = Path(query.write(str(tmp_path / "query.cxg"), compute_embedding="pca"))
    frame = query.to_anndata().obs
    with open_array(one / "obs") as array:
        found = dict(array[:])
    assert found["barcode"].tolist() == [f"Zürich-{i}" for i in range(N)]
    assert found["uid"].tolist() == frame.index.tolist()


@pytest.mark.long
@pytest.mark.parametrize("profile", ["0.3.0", "0.2.0"])
@pytest.mark.parametrize("ending", ["h5ad", "zarr", "cxg"])
def test_a_long_table_is_read_as_a_short_one(
    tmp_path: Path, stored: Path, ending: str, profile: str, request: pytest.FixtureRequest
) -> None:
    """What is made of a CXG whose table is read in blocks is what is made of it read whole."""
    given_ = write(stored, tmp_path / "given.cxg", profile=profile)
    whole = Path(copy(given_, tmp_path / f"whole.{ending}"))
    request.getfixturevalue("long")
    made = Path(copy(given_, tmp_path / f"made.{ending}"))
    if ending == "cxg":
        assert contents(made / "obs") == contents(whole / "obs")
        return
    read = ad.read_h5ad if ending == "h5ad" else ad.read_zarr
    pd.testing.assert_frame_equal(read(made).obs, read(whole).obs)


@pytest.mark.usefixtures("long")
def test_damage_found_by_column_leaves_nothing(tmp_path: Path, stored: Path) -> None:
    """A text whose bounds run beyond it is refused when its column is read, and nothing is under the name."""
    given_ = write(stored, tmp_path / "given.cxg")
    texts = sorted((given_ / "obs").glob("**/*_var.tdb"))
    texts[-1].write_bytes(texts[-1].read_bytes()[:-4])
    for ending in ("h5ad", "cxg"):
        with pytest.raises(SourceError, match="C00"):
            copy(given_, tmp_path / f"made.{ending}")
    assert [path.name for path in tmp_path.iterdir()] == ["given.cxg"]


@pytest.mark.usefixtures("long")
def test_many_bands_become_one_fragment(tmp_path: Path, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table in more fragments than readers like is consolidated, and holds the same."""
    first = write(stored, tmp_path / "bands.cxg")
    monkeypatch.setattr("raggedatlas.wings.cxg.array_writer.MAX_FRAGMENTS", 2)
    second = write(stored, tmp_path / "one.cxg")
    assert (fragments(first / "obs"), fragments(second / "obs")) == (3, 1)
    assert contents(first / "obs") == contents(second / "obs")


@pytest.mark.usefixtures("long")
def test_the_table_of_a_file_is_never_whole(tmp_path: Path, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells of an AnnData file and of a CXG are read one column at a time, and no frame is made of them."""

    def no_frame(self: ColumnTable) -> pd.DataFrame:
        raise AssertionError("the table was read whole")

    def element(self: Any, key: str) -> Any:
        assert key != "obs", "the table was read whole"
        return whole(self, key)

    from raggedatlas.formats.composite_source import CompositeSource

    whole = CompositeSource.element
    monkeypatch.setattr(CompositeSource, "element", element)
    monkeypatch.setattr(ColumnTable, "frame", no_frame)
    made = write(stored, tmp_path / "x.cxg")
    assert Path(copy(made, tmp_path / "again.cxg")).is_dir()


@pytest.mark.usefixtures("long")
def test_a_refusal_leaves_no_column_behind(tmp_path: Path, stored: Path) -> None:
    """What is refused once columns wait in files leaves nothing beside the target: a loss, and text that is no Unicode."""
    (tmp_path / "out").mkdir()
    with pytest.raises(SourceError, match="strict"):
        write(stored, tmp_path / "out" / "x.cxg", profile="0.2.0", strict=True)
    texts = Texts(2, lambda: iter([np.array(["a"], object), np.array(["\ud800"], object)]))
    table = ColumnTable(2, TableColumn(None, lambda: pd.Index(["a", "b"])), (TableColumn("t", lambda: texts),))
    for spool in (None, tmp_path / "spool"):
        with pytest.raises(SourceError, match="C28: obs column 't' has text that is not Unicode"):
            encode_table(table, CxgOptions(), spool=spool)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    """Where columns cannot be put, the refusal names the place and the way out."""
    with pytest.raises(StoreError, match="check the folder"):
        spill_column(tmp_path / "absent" / "spool" / "0.arrow", [np.zeros(3)])


@given(
    st.lists(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), max_size=5), min_size=1),
    st.integers(0, 30),
    st.integers(0, 30),
)
def test_text_comes_back_by_rows(tmp_path_factory: pytest.TempPathFactory, parts: Any, start: int, stop: int) -> None:
    """Any rows of text that was put away in any parts are those that were put away: empty ones and NUL too."""
    arrays = [np.array([*part, None], object)[:-1] for part in parts]
    kept = spill_column(tmp_path_factory.mktemp("spool") / "0.arrow", arrays)
    whole = [text for part in parts for text in part]
    assert len(kept) == len(whole)
    assert (kept[start:stop].tolist() if whole else []) == whole[start:stop]


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "f4"])
def test_numbers_come_back_to_the_last_bit(tmp_path: Path, dtype: str) -> None:
    """Numbers of every type that a table has come back with their type and bits, across batches."""
    values = np.random.default_rng(0).integers(0, 255, 4 * (BATCH_ROWS + 10), np.uint8).view(dtype)
    kept = spill_column(tmp_path / "spool" / "0.arrow", [values])
    for rows in (slice(0, len(values)), slice(5, 9), slice(len(values) - 3, None)):
        assert kept[rows].dtype == values.dtype
        assert kept[rows].tobytes() == values[rows].tobytes()

"""Laws of tables that are written column by column: the same file as of whole ones, and one column in memory at a time."""

import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import zarr
from anndata.io import write_elem

from raggedatlas.errors import SchemaError, SourceError
from raggedatlas.formats.anndata.elements import open_table, read_frame
from raggedatlas.formats.containers import Container, open_hdf5, open_zarr
from raggedatlas.formats.copying import copy
from raggedatlas.formats.element_writer import plain_text, write_element, write_table
from raggedatlas.formats.registry import open_sink, open_source
from raggedatlas.model.frames import ColumnTable, TableColumn, Texts, arrow_table, frame_to_arrow
from support.anndata_strategies import make_obs

TARGETS = ["gzip", "plain", "zarr2", "zarr3"]
STEPS = [4, 1 << 17]
"""Rows of a block of text, for a table of 23: many blocks with a rest, and one."""


@pytest.fixture(params=STEPS)
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Cut text into blocks of so many rows, in everything that reads or writes it."""
    places = ("formats.element_writer.COLUMN_CHUNK", "formats.anndata.elements.TEXT_ROWS", "model.frames.TEXT_ROWS")
    for place in places:
        monkeypatch.setattr(f"raggedatlas.{place}", request.param)
    return int(request.param)


def obs(n: int = 23) -> pd.DataFrame:
    """One column of every kind, text without missing values too, in an odd order."""
    made = make_obs(n, np.random.default_rng(3), ("percent.mt", "a b"))
    made.insert(0, "name", [f"ü{i}" if i % 3 else "" for i in range(n)])
    made["nullable"] = pd.array([None, *(["x"] * (n - 1))], dtype="string")
    made["objects"] = pd.Series([f"o{i}" for i in range(n)], dtype=object).array
    return made


def group_of(target: str, path: Path) -> tuple[Any, dict[str, Any]]:
    """Open a new file, and give the options that its sink writes tables with."""
    if target.startswith("zarr"):
        return zarr.open_group(str(path), mode="w", zarr_format=2 if target == "zarr2" else 3), {}
    return h5py.File(path, "w"), {"compression": "gzip", "compression_opts": 1} if target == "gzip" else {}


def contents(node: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Walk over all that a reader can see of a group: attributes, values, types; and how HDF5 keeps them."""
    told = {key: np.asarray(value).tolist() for key, value in dict(node.attrs).items()}
    if not hasattr(node, "dtype"):
        yield at, (sorted(node), told)
        for name in sorted(node):
            yield from contents(node[name], f"{at}/{name}")
        return
    kept = (node.chunks, node.compression, node.compression_opts, node.shuffle) if hasattr(node, "compression") else ()
    yield at, (node.shape, str(node.dtype), kept, repr(np.asarray(node[...]).tolist()), told)


def held(frame: pd.DataFrame) -> ColumnTable:
    """Make a table of a frame; text without missing values comes in blocks of five."""

    def texts(values: Any) -> Any:
        plain = pd.Series(values).to_numpy(object)
        if not all(isinstance(value, str) for value in plain) or isinstance(values, pd.Categorical):
            return None
        return Texts(len(plain), lambda: (plain[i : i + 5] for i in range(0, len(plain), 5)), pd.Series(values).dtype)

    def read(column: pd.Series) -> Any:
        is_na_text = isinstance(column.dtype, pd.StringDtype) and column.dtype.na_value is pd.NA
        return column if is_na_text or column.dtype == "category" else texts(column.array) or column

    columns = tuple(TableColumn(name, lambda name=name: read(frame[name])) for name in frame.columns)
    return ColumnTable(len(frame), TableColumn(frame.index.name, lambda: texts(frame.index.array)), columns)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.usefixtures("step")
def test_column_by_column_is_the_same_file(tmp_path: Path, target: str) -> None:
    """Columns of pandas, and of Arrow, give every member, type, attribute and value that the whole frame gives; in HDF5 also chunks and filters."""
    frame = obs()
    files = []
    kept = frame_to_arrow(frame)
    tables = {
        "columns": held(frame),
        "arrow": arrow_table(kept.schema, len(frame), lambda i: kept.column(i).chunks),
    }
    for name in ("whole", *tables):
        group, options = group_of(target, tmp_path / name)
        if name == "whole":
            write_element(group, "obs", frame, options)
        else:
            write_table(group, "obs", tables[name], options)
        files.append(dict(contents(group)))
    for other in files[1:]:
        assert list(files[0]) == list(other)
        for at, expected in files[0].items():
            assert other[at] == expected, at


@pytest.mark.parametrize("name", ["index", "no name"])
@pytest.mark.parametrize("n", [0, 23])
def test_an_index_and_empty_tables(tmp_path: Path, name: str, n: int) -> None:
    """An index without a name, one that is a column too, and tables without rows or columns are as when written whole."""
    index = pd.Index([f"c{i}" for i in range(n)], dtype=object, name="index" if name == "index" else None)
    for columns in ({}, {"index": index.to_numpy()}):
        frame = pd.DataFrame(columns, index=index)
        files = []
        for which in ("whole", "columns"):
            group, options = group_of("gzip", tmp_path / f"{which}{len(columns)}")
            if which == "whole":
                write_element(group, "obs", frame, options)
            else:
                write_table(group, "obs", held(frame), options)
            files.append(dict(contents(group)))
        assert files[0] == files[1]


@pytest.mark.parametrize("step", STEPS[:1], indirect=True)
@pytest.mark.parametrize("target", ["gzip", "zarr2", "zarr3"])
@pytest.mark.usefixtures("step")
def test_a_stored_table_is_the_stored_frame(tmp_path: Path, target: str) -> None:
    """Read column by column, whole or some rows of it, a table has the values and types of the frame read at once."""
    group, options = group_of(target, tmp_path / "file")
    write_element(group, "obs", obs(), options)
    if not target.startswith("zarr"):
        group.close()
    opened = open_zarr(tmp_path / "file") if target.startswith("zarr") else open_hdf5(tmp_path / "file")
    expected, table = read_frame(opened, "obs"), open_table(opened, "obs")
    assert table is not None
    found = table.frame()
    pd.testing.assert_frame_equal(found, expected, check_dtype=False)
    rows = np.array([0, 3, 4, 11, 22])
    pd.testing.assert_frame_equal(table.take(rows).frame(), expected.iloc[rows], check_dtype=False)
    numbers = [name for name in expected if expected[name].dtype.kind in "biuf" or expected[name].dtype == "category"]
    assert (found[numbers].dtypes == expected[numbers].dtypes).all()
    opened.close()


@pytest.mark.parametrize("n_chunks", [1, 3])
@pytest.mark.usefixtures("step")
def test_an_arrow_table_is_the_frame(n_chunks: int) -> None:
    """What was kept as Arrow, in one piece or several, comes back column by column with its types and categories."""
    frame = obs()
    kept = frame_to_arrow(frame)
    chunks = [kept.column(i).combine_chunks() for i in range(kept.num_columns)]
    cuts = np.linspace(0, len(frame), n_chunks + 1).astype(int).tolist()

    def walk(i: int) -> Iterator[Any]:
        return (chunks[i].slice(start, stop - start) for start, stop in itertools.pairwise(cuts))

    back = arrow_table(kept.schema, len(frame), walk).frame()
    pd.testing.assert_frame_equal(back, frame, check_dtype=False)
    kinds = [
        name for name in frame if not isinstance(frame[name].dtype, pd.StringDtype) and frame[name].dtype != object
    ]
    assert (back[kinds].dtypes == frame[kinds].dtypes).all()


class Watched:
    """Columns that notice when another is alive while they are read."""

    def __init__(self) -> None:
        self.alive: list[weakref.ref[Any]] = []
        self.asked: list[str] = []
        self.most = 0

    def column(self, name: str, n: int) -> TableColumn:
        """Make one column of numbers."""

        def read() -> pd.Series:
            self.look()
            self.asked.append(name)
            made = pd.Series(np.arange(n))
            self.alive.append(weakref.ref(made))
            return made

        return TableColumn(name, read)

    def texts(self, n: int, step: int) -> Texts:
        """Make text whose blocks are watched as the columns are."""

        def blocks() -> Iterator[Any]:
            for start in range(0, n, step):
                self.look()
                block = np.array([f"c{i}" for i in range(start, min(start + step, n))], object)
                self.alive.append(weakref.ref(block))
                yield block

        return Texts(n, blocks)

    def look(self) -> None:
        """Count what is alive."""
        self.alive = [ref for ref in self.alive if ref() is not None]
        self.most = max(self.most, len(self.alive))


@pytest.mark.parametrize("name", ["x.h5ad", "x.zarr"])
def test_one_column_is_alive_at_a_time(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink has let go of each column before it asks for the next, and of text holds a block or two."""
    monkeypatch.setattr("raggedatlas.formats.element_writer.COLUMN_CHUNK", 8)
    watched, n = Watched(), 64
    table = ColumnTable(
        n, TableColumn("cell", lambda: watched.texts(n, 8)), tuple(watched.column(f"n{i}", n) for i in range(6))
    )
    sink = open_sink(tmp_path / name)
    sink.begin(())
    sink.element("obs", table)
    assert watched.asked == [f"n{i}" for i in range(6)]
    assert watched.most <= 2
    watched.look()
    assert not watched.alive
    sink.abort()


def test_a_copy_asks_for_one_column_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying a file reads no table of cells whole, and writes each column before it reads the next."""
    frame = obs().drop(columns=["nullable"])
    with ad.settings.override(allow_write_nullable_strings=True):
        ad.AnnData(np.eye(23, dtype=np.float32), obs=frame).write_h5ad(tmp_path / "in.h5ad")
    steps: list[str] = []
    _note(monkeypatch, "formats.anndata.elements.read_element", steps, "read", lambda container, path: path)
    _note(monkeypatch, "formats.element_writer.write_member", steps, "write", lambda group, where, *rest: where[1])
    _note(monkeypatch, "formats.anndata.source.read_frame", steps, "frame", lambda container, path, *rest: path)
    copy(tmp_path / "in.h5ad", tmp_path / "out.h5ad")
    assert [step for step in steps if "frame obs" in step] == []
    # Codes and categories of a categorical column are read and written within it.
    of_cells = [step for step in steps if step.partition(" ")[2].startswith("obs/") and step.count("/") == 1]
    members = ["obs/barcode", *(f"obs/{name}" for name in frame.columns)]
    assert of_cells == [f"{what} {at}" for at in members for what in ("read", "write")]


def _note(monkeypatch: pytest.MonkeyPatch, place: str, steps: list[str], word: str, path: Any) -> None:
    module, _, name = f"raggedatlas.{place}".rpartition(".")
    real = getattr(__import__(module, fromlist=[name]), name)

    def noted(*args: Any, **more: Any) -> Any:
        steps.append(f"{word} {path(*args)}")
        return real(*args, **more)

    monkeypatch.setattr(f"raggedatlas.{place}", noted)


@pytest.mark.usefixtures("step")
def test_a_part_of_a_file_has_the_rows_that_were_chosen(tmp_path: Path) -> None:
    """Cells that are left out are left out of every column, also where text comes in blocks; categories are those of anndata's slice."""
    given = ad.AnnData(np.eye(23, dtype=np.float32), obs=obs().drop(columns=["nullable", "text"]))
    given.write_h5ad(tmp_path / "in.h5ad")
    copy(tmp_path / "in.h5ad", tmp_path / "out.h5ad", where=[22, 1, 7, 8])
    back = ad.read_h5ad(tmp_path / "out.h5ad")
    pd.testing.assert_frame_equal(back.obs, ad.read_h5ad(tmp_path / "in.h5ad")[[1, 7, 8, 22]].copy().obs)


@pytest.mark.parametrize("fault", ["short", "codes", "text"])
def test_a_damaged_column_leaves_no_file(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that shows when the last column is read is refused by its name, and nothing is left of the copy."""
    monkeypatch.setattr("raggedatlas.formats.anndata.elements.TEXT_ROWS", 4)
    frame = obs()[["count", "stage", "objects"]]
    ad.AnnData(np.eye(23, dtype=np.float32), obs=frame).write_h5ad(tmp_path / "in.h5ad")
    with h5py.File(tmp_path / "in.h5ad", "r+") as file:
        if fault == "short":
            del file["obs/count"]
            file["obs/count"] = np.arange(22)
        elif fault == "codes":
            file["obs/stage/codes"][7] = 9
        else:
            del file["obs/objects"]
            made = file["obs"].create_dataset("objects", data=[b"\xff\xfe"] * 23, dtype=h5py.string_dtype())
            made.attrs["encoding-type"], made.attrs["encoding-version"] = "string-array", "0.2.0"
    said = {"short": "obs/count", "codes": "obs/stage", "text": "obs/objects"}[fault]
    with pytest.raises(SourceError, match=said):
        copy(tmp_path / "in.h5ad", tmp_path / "out.h5ad")
    assert [path.name for path in tmp_path.iterdir()] == ["in.h5ad"]


def test_what_no_file_can_hold_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of one name, of reserved ones, whose path is that of others, or with text that HDF5 cannot hold."""
    monkeypatch.setattr("raggedatlas.formats.element_writer.COLUMN_CHUNK", 2)
    index = TableColumn(None, lambda: pd.Index(["a", "b", "c"]))
    ones = lambda name: TableColumn(name, lambda: pd.Series([1, 1, 1]))  # noqa: E731
    null = TableColumn("t", lambda: Texts(3, lambda: iter([np.array(["a", "b\0", "c"], object)])))
    for name, columns, said in (
        ("a.h5ad", (ones("n"), ones("n")), "duplicated"),
        ("b.h5ad", (ones("_index"),), "keeps for the index"),
        ("c.zarr", (ones("a/b"),), "groups within groups"),
        ("c.zarr", (ones("a\\b"),), "groups within groups"),
        ("c.zarr", (ones("zarr.json"),), "keeps for metadata"),
        ("c.zarr", (ones("x" * 256),), "more than 255 bytes"),
        ("c.h5ad", (ones("/a"),), "groups within groups"),
        ("c.h5ad", (ones("a/../b"),), "groups within groups"),
        ("c.h5ad", (ones("G1/S"), ones("G1")), "a member of 'G1'"),
        ("c.h5ad", (ones("_index/a"),), "a member of '_index'"),
        ("c.h5ad", (ones("a\0b"),), "no file can hold"),
        ("d.h5ad", (null,), "obs/t cannot be written"),
    ):
        sink = open_sink(tmp_path / name)
        with pytest.raises(SchemaError, match=said):
            sink.element("obs", ColumnTable(3, index, columns))
        sink.abort()
    assert not list(tmp_path.iterdir())


def test_old_tables_are_read_whole(tmp_path: Path) -> None:
    """Structured arrays, tables of version 0.1 and columns of an odd kind cannot be read by column, and are not."""
    with h5py.File(tmp_path / "old.h5", "w") as file:
        file["rows"] = np.array([(b"a", 1)], dtype=[("index", "S1"), ("n", "i4")])
        write_element(file, "odd", pd.DataFrame({"n": [1]}, index=["a"]), {})
        del file["odd/n"]
        write_element(file, "odd/n", {"a": 1}, {})
        write_element(file, "legacy", pd.DataFrame({"n": [1]}, index=["a"]), {})
        file["legacy"].attrs["encoding-version"] = "0.1.0"
    opened: Container = open_hdf5(tmp_path / "old.h5")
    assert [open_table(opened, name) for name in ("rows", "odd", "legacy", "absent")] == [None] * 4
    opened.close()


def test_objects_in_memory_need_no_table(tmp_path: Path) -> None:
    """A source whose tables are in memory gives them whole."""
    source = open_source(ad.AnnData(np.eye(3, dtype=np.float32)))
    assert source.table("obs") is None  # type: ignore[attr-defined]
    copy(source, tmp_path / "x.h5ad")
    assert ad.read_h5ad(tmp_path / "x.h5ad").shape == (3, 3)


@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "compression_opts": 1}], ids=["plain", "gzip"])
def test_hdf5_is_written_as_anndata_writes_it(tmp_path: Path, options: dict[str, Any]) -> None:
    """Groups, arrays, their types, chunks by rows aside, and attributes are those of anndata's own writer."""
    value = {
        "text": "a", "number": 3, "truth": True, "half": np.float16(0.5), "none": {}, "ints": np.arange(6).reshape(2, 3),
        "texts": np.array(["x", "yé", ""], dtype=object), "no texts": np.array([], dtype=object),
        "frame": pd.DataFrame(
            {"c": pd.Categorical(["b", "a", "b"], ordered=True), "n": [1.5, np.nan, 2], "t": ["p", "q", "r"],
             "i": pd.array([1, None, 3], dtype="Int64")},
            index=pd.Index(["r1", "r2", "r3"], name="rows"),
        ),
        "bare": pd.DataFrame(index=pd.Index(["a"], dtype=object)),
        "inside": {"codes": pd.Categorical([1, 2, 1]), "big": 2**40},
    }  # fmt: skip
    with h5py.File(tmp_path / "ours.h5", "w") as ours, h5py.File(tmp_path / "theirs.h5", "w") as theirs:
        write_element(ours, "at", value, options)
        plain = {**value, **{name: plain_text(value[name]) for name in ("frame", "bare")}}
        write_elem(theirs, "at", plain, dataset_kwargs=options)
        seen = [dict(contents(file)) for file in (ours, theirs)]
    assert seen[0] == seen[1]
    assert len(seen[0]) > 25

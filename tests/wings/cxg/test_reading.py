"""Reading a CXG: every version and layout by what is there, by rows and by columns, files of 2020 too, and refusals by rule."""

import builtins
import json
import pickle
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

import raggedatlas as ra
from raggedatlas.errors import FeatureError, MissingExtraError, NotFoundError, SourceError
from raggedatlas.formats.copying import copy
from raggedatlas.formats.registry import detect as detect_format
from raggedatlas.formats.registry import open_sink, open_source
from raggedatlas.testing.conformance import dense as dense_blocks
from raggedatlas.wings.cxg import inspect, validate
from raggedatlas.wings.cxg.array_reader import LazyArray
from raggedatlas.wings.cxg.inspection import detect, is_cxg, tiledb_kind
from raggedatlas.wings.cxg.source import cxg_source
from raggedatlas.wings.cxg.tiledb_arrays import context, import_tiledb, open_array
from reading import array_metadata, array_values, dense, read_source
from support import cxg_files
from support.cxg_files import FORMS, VALUES, write_cxg


@pytest.mark.parametrize("form", FORMS)
def test_every_version_and_layout_is_read(tmp_path: Path, form: Any) -> None:
    """Whatever the version and layout, the same cells, features, values, categories, embeddings and metadata come out."""
    path = write_cxg(tmp_path / "a.cxg", form)
    assert detect_format(path) == "cxg"
    found = detect(path)
    assert found.version == (cxg_files.VERSIONS[form] or "unnamed")
    assert found.layout == {"split": "split", "sparse": "sparse"}.get(form, "dense")
    back = read_source(path)
    np.testing.assert_array_equal(dense(back.X), VALUES)
    assert list(back.obs_names) == [f"cell {i}" for i in range(6)]
    assert back.obs_names.name is None
    assert list(back.var_names) == list(cxg_files.VAR["name_0"])
    assert list(back.var["feature_name"]) == list(cxg_files.VAR["feature_name"])
    kinds = [cxg_files.KINDS[code] if code >= 0 else None for code in cxg_files.OBS["kind"]]
    assert [v if isinstance(v, str) and v != "nan" else None for v in back.obs["kind"]] == kinds
    if form not in ("sparse", "old", "unnamed"):  # codes, whose categories have an order
        assert list(back.obs["kind"].cat.categories) == list(cxg_files.KINDS)
    assert back.obs["batch"].tolist() == [7, 7, 9, 9, 9, 7]
    assert list(back.obs["batch"].cat.categories) == [7, 9]
    assert back.obs["is_useful"].tolist() == [True, False, True, True, False, True]
    assert back.obs["sample"].tolist() == ["a", "ä", "", "b", "b", "a"]
    np.testing.assert_array_equal(back.obsm["X_umap"], cxg_files.EMBEDDINGS["umap"])
    assert back.uns["cxg"]["var_index"] == "feature_name"
    assert ("title" in back.uns) == (form != "unnamed")


@pytest.mark.parametrize("form", FORMS)
def test_rows_and_columns_are_parts_of_the_whole(tmp_path: Path, form: Any) -> None:
    """Any step down the rows, and any features by number or by name, give what the whole has there."""
    source = cxg_source(write_cxg(tmp_path / "a.cxg", form))
    for step in (1, 4, 100):
        blocks = [block for (block,) in source.blocks(("X",), step)]
        np.testing.assert_array_equal(dense_blocks(blocks, source.describe().matrices[0]), VALUES)
    np.testing.assert_array_equal(dense(source.columns([4, 0, 0])), VALUES[:, [4, 0, 0]])
    np.testing.assert_array_equal(dense(source.columns(["LYZ", "CD3D"])), VALUES[:, [3, 0]])
    np.testing.assert_array_equal(dense(source.columns([cxg_files.VAR["name_0"][2]])), VALUES[:, [2]])
    assert source.columns([]).shape == (6, 0)
    with pytest.raises(FeatureError):
        source.columns(["no such"])
    with pytest.raises(SourceError, match="columns 0 to 4"):
        source.columns([5])
    for many in (1, 2, None):
        walked = list(source.column_blocks(many))
        assert [first for first, _ in walked] == list(range(0, 5, many or 5))
        np.testing.assert_array_equal(np.concatenate([dense(values) for _, values in walked], axis=1), VALUES)
    with pytest.raises(SourceError, match="expected at least 1"):
        next(source.column_blocks(0))
    source.close()


@pytest.mark.parametrize("form", FORMS)
def test_blocks_of_columns_are_bounded(tmp_path: Path, form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of columns has as many as the mean of them says, one at least, whatever the layout."""
    source = cxg_source(write_cxg(tmp_path / "a.cxg", form))
    for size, most in ((1, 1), (100, 4)):
        monkeypatch.setattr("raggedatlas.wings.cxg.array_reader.BLOCK_BYTES", size)
        widths = [values.shape[1] for _, values in source.column_blocks()]
        assert sum(widths) == 5
        assert max(widths) <= most
    source.close()


def test_layout_goes_by_presence_not_by_version(tmp_path: Path) -> None:
    """The newest version with one sparse X, and the oldest with Xr and Xc, are read as what they are; both halves win over X."""
    new = write_cxg(tmp_path / "new.cxg", "sparse")
    cxg_files.set_meta(new / "cxg_group_metadata", cxg_version="0.3.0")
    assert (detect(new).version, detect(new).layout) == ("0.3.0", "sparse")
    np.testing.assert_array_equal(dense(read_source(new).X), VALUES)
    old = write_cxg(tmp_path / "old.cxg")
    cxg_files.set_meta(old / "cxg_group_metadata", cxg_version="0.1")
    cxg_files.write_dense(old / "X", np.zeros((6, 5), np.float32), names=("obs", "var"))
    assert (detect(old).version, detect(old).layout) == ("0.1", "split")
    np.testing.assert_array_equal(dense(read_source(old).X), VALUES)


def test_entries_may_lie_anywhere(cxg: Path) -> None:
    """Entries in several fragments and in no order come out sorted, by rows as by columns."""
    rng = np.random.default_rng(0)
    rows, columns = np.nonzero(VALUES)
    order = rng.permutation(len(rows))
    rows, columns = rows[order], columns[order]
    for part in (slice(0, 3), slice(3, None)):
        entries = (rows[part], columns[part].astype(np.uint32), VALUES[rows[part], columns[part]])
        if part.start == 0:
            cxg_files.write_half(cxg / "Xr", "obs", 6, entries)
        else:
            with open_array(cxg / "Xr", "w") as array:
                array[entries[0]] = {"": entries[2], "var": entries[1]}
    np.testing.assert_array_equal(read_source(cxg).X.toarray(), VALUES)


def test_what_a_column_is_follows_its_hint(cxg: Path) -> None:
    """Categories may be text or codes of any width, listed or not; all-true columns written as categories are booleans again."""
    columns = {
        "name_0": cxg_files.OBS["name_0"],
        "listed": np.array(["b", "a", "nan", "b", "c", "b"], object),
        "unlisted": np.array(["b", "a", "b", "b", "a", "b"], object),
        "wide": np.array([0, 1, 1, -1, 0, 1], np.int32),
        "unsigned": np.array([0, 1, 1, 1, 0, 1], np.uint8),
        "true": np.ones(6, np.uint8),
        "holed": np.array([1, np.nan, 2, 2, 1, 1], np.float32),
        "long": np.arange(6) * 2**40,
        "plain": np.arange(6, dtype=np.float32),
    }
    hints = {
        "index": "name_0",
        "listed": {"type": "categorical", "categories": ["z", "b", "a"]},
        "unlisted": {"type": "categorical"},
        "wide": {"type": "categorical", "categories": ["x", "y"]},
        "unsigned": {"type": "categorical", "categories": ["x", "y"]},
        "true": {"type": "categorical", "categories": ["False", "True"]},
        "holed": {"type": "categorical"},
        "long": {"type": "int64"},
    }
    cxg_files.write_frame(cxg / "obs", columns, hints)
    obs = read_source(cxg).obs
    assert list(obs["listed"].cat.categories) == ["z", "b", "a", "c"]
    assert obs["listed"].isna().tolist() == [False, False, True, False, False, False]
    assert list(obs["unlisted"].cat.categories) == ["a", "b"]
    assert [v if isinstance(v, str) else None for v in obs["wide"]] == ["x", "y", "y", None, "x", "y"]
    assert obs["unsigned"].tolist() == ["x", "y", "y", "y", "x", "y"]
    assert obs["true"].dtype == bool
    assert list(obs["holed"].cat.categories) == [1.0, 2.0]
    assert obs["long"].tolist() == (np.arange(6) * 2**40).tolist()
    assert obs["plain"].dtype == np.float32


def test_without_hints_types_speak(cxg: Path) -> None:
    """Tables without hints have the types of their attributes, and cells are numbered where nothing names them."""
    cxg_files.write_frame(cxg / "obs", {"kind": cxg_files.OBS["kind"], "text": cxg_files.OBS["sample"]}, None)
    obs = read_source(cxg).obs
    assert obs["kind"].dtype == np.int8
    assert list(obs.index) == [str(i) for i in range(6)]


@pytest.mark.parametrize("spelled", ["kind", "kind_colors"])
def test_colours_have_two_spellings(cxg: Path, spelled: str) -> None:
    """Colour tables are found by the column's name, as all real files have it, and with _colors, as the format says."""
    table = {"NK cell": "#000001", "T cell": "#000002", "B cell": "#000003"}
    cxg_files.set_meta(cxg / "cxg_group_metadata", cxg_category_colors=json.dumps({spelled: table}))
    assert list(read_source(cxg).uns["kind_colors"]) == ["#000002", "#000003", "#000001"]


@pytest.mark.long
def test_everything_else_is_carried_through(cxg: Path) -> None:
    """Gene sets, unknown metadata, and embeddings in 64 bits go through AnnData, and are put back; unknown arrays are told."""
    sets = {"s": {"geneset_name": "s", "genes": [{"gene_symbol": "LYZ", "gene_description": ""}]}}
    cxg_files.set_meta(cxg / "obs", genesets=json.dumps(sets), more="text")
    cxg_files.set_meta(
        cxg / "cxg_group_metadata",
        note="kept",
        cxg_properties=json.dumps({"title": "T", "about": "https://a.b", "x": 1}),
    )
    cxg_files.write_dense(cxg / "emb" / "fine", np.linspace(0, 1, 12).reshape(6, 2))
    cxg_files.write_dense(cxg / "scores", np.arange(6.0))
    cxg_files.make_group(cxg / "coverage")
    for name in ("obs", "cxg_group_metadata"):
        cxg_files.set_meta(cxg / name, pair=(1, 2))
    source = open_source(cxg)
    assert {"scores", "coverage"} <= set(source.describe().left_out)
    source.close()
    back = through_h5ad(cxg)
    obs, group = array_metadata(back / "obs"), array_metadata(back / "cxg_group_metadata")
    assert (json.loads(obs["genesets"]), obs["more"], group["note"]) == (sets, "text", "kept")
    assert json.loads(group["cxg_properties"]) == {"title": "T", "about": "https://a.b", "x": 1}
    assert json.loads(group["corpora"])["default_embedding"] == "X_umap"
    assert array_values(back / "emb" / "fine").dtype == np.float64
    assert (obs["pair"], group["pair"]) == ((1, 2), (1, 2))
    assert not (back / "scores").exists()


def through_h5ad(cxg: Path) -> Path:
    """Write a CXG as h5ad, and that as a CXG again."""
    return Path(copy(copy(cxg, cxg.with_name("b.h5ad")), open_sink(cxg.with_name("b.cxg"))))


def test_a_negative_row_is_refused_by_columns(cxg: Path) -> None:
    """An entry of Xc whose cell is below 0 is refused by rule when columns are read."""
    half("var", 5, [2], np.array([-1], np.int32), np.array([1], np.float32), other_dtype=np.int32)(cxg)
    source = cxg_source(cxg)
    with pytest.raises(SourceError, match=r"^C20: .*\(2, -1\)"):
        source.columns([2])
    source.close()


def test_columns_leave_no_array_open(cxg: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every array that is opened to read columns is closed."""
    source = cxg_source(cxg)
    opened: list[LazyArray] = []
    init = LazyArray.__init__

    def recorded(self: LazyArray, path: Path) -> None:
        init(self, path)
        opened.append(self)

    monkeypatch.setattr(LazyArray, "__init__", recorded)
    source.columns([0])
    assert [array.path.name for array in opened if array._array is not None] == []
    source.close()


def test_uns_may_be_a_group(cxg: Path) -> None:
    """Metadata and arrays of a group uns are read like metadata of an array."""
    tiledb = import_tiledb()
    shutil.rmtree(cxg / "uns")
    cxg_files.make_group(cxg / "uns")
    with tiledb.Group(str(cxg / "uns"), "w", ctx=context()) as group:
        group.meta["spatial"] = json.dumps({"is_single": False})
        group.meta["plain"] = "not json"
    cxg_files.write_dense(cxg / "uns" / "numbers", np.arange(3.0))
    uns = read_source(cxg).uns
    assert uns["spatial"] == {"is_single": False}
    assert uns["plain"] == "not json"
    np.testing.assert_array_equal(uns["numbers"], [0, 1, 2])
    note = next(file for file in (cxg / "uns" / "__meta").iterdir() if file.is_file())
    note.write_bytes(note.read_bytes()[:4] + b"\xff" * 6 + note.read_bytes()[10:])
    with pytest.raises(SourceError, match=r"^C00: .*uns is damaged"):
        open_source(cxg)


class Trap:
    """Unpickled, it would leave a mark."""

    def __reduce__(self) -> Any:
        return builtins.open, (str(TRAP), "w")


TRAP = Path("sprung")


def test_nothing_is_unpickled(cxg: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes in uns are refused, and nothing in them is run; without uns the rest is read."""
    monkeypatch.chdir(tmp_path)
    cxg_files.set_meta(cxg / "uns", spatial=pickle.dumps(Trap()))
    with pytest.raises(SourceError, match=r"^C27: .*uns=False"):
        open_source(cxg)
    assert not TRAP.exists()
    back = read_source(cxg, uns=False)
    assert "spatial" not in back.uns
    np.testing.assert_array_equal(dense(back.X), VALUES)


def test_unknown_versions_are_read_when_told(cxg: Path) -> None:
    """A version that nobody knows is refused with those that are known, and read as one of them on demand."""
    cxg_files.set_meta(cxg / "cxg_group_metadata", cxg_version="0.4.0")
    with pytest.raises(SourceError, match=r"^C50: .*'0.4.0'.*0.3.0.*allow_unknown"):
        open_source(cxg)
    np.testing.assert_array_equal(dense(read_source(cxg, version="0.3.0").X), VALUES)
    np.testing.assert_array_equal(dense(read_source(cxg, allow_unknown=True).X), VALUES)
    with pytest.raises(SourceError, match="Unknown CXG version '9'"):
        open_source(cxg, version="9")


def without(*names: str) -> Any:
    return lambda path: [shutil.rmtree(path / name) for name in names]


def truncate(path: Path) -> None:
    for file in path.rglob("a0*.tdb"):
        file.write_bytes(file.read_bytes()[:-20])


def cut_short(name: str) -> Any:
    return lambda path: truncate(path / name)


def meta(name: str, **values: Any) -> Any:
    return lambda path: cxg_files.set_meta(path / name, **values)


def half(axis: str, n: int, *entries: Any, **options: Any) -> Any:
    name = {"obs": "Xr", "var": "Xc"}[axis]
    made = tuple(np.array(part) for part in entries)
    return lambda path: cxg_files.write_half(path / name, axis, n, made, **options)


def hints(**values: Any) -> Any:
    return lambda path: cxg_files.set_hints(path, "obs", **values)


ENTRY = ([0], np.array([0], np.uint32), np.array([1], np.float32))
FAULTS: dict[str, tuple[Any, str]] = {
    "no obs": (without("obs"), r"^C10: .*obs"),
    "no var": (without("var"), r"^C11: .*var"),
    "half a matrix": (without("Xc"), r"^C17: .* has Xr and not Xc"),
    "no matrix": (without("Xr", "Xc"), r"^C17: .*neither X nor Xr and Xc"),
    "fewer cells in Xr": (half("obs", 5, *ENTRY), r"^C71: .*Xr .*\(5,\).*\(6,\)"),
    "fewer features in Xc": (half("var", 4, *ENTRY), r"^C71: .*Xc .*\(4,\).*\(5,\)"),
    "Xr without columns": (half("obs", 6, *ENTRY, other="other"), r"^C15: .*expected 'var'"),
    "Xc without rows": (half("var", 5, *ENTRY, other="other"), r"^C16: .*expected 'obs'"),
    "twice the same entry": (
        half("obs", 6, [2, 2], np.array([1, 1], np.uint32), np.array([1, 2], np.float32)),
        r"^C20: .*two entries at \(2, 1\)",
    ),
    "a column beyond": (half("obs", 6, [2], np.array([5], np.uint32), np.array([1], np.float32)), r"^C20: .*size 5"),
    "a column below": (
        half("obs", 6, [2], np.array([-1], np.int32), np.array([1], np.float32), other_dtype=np.int32),
        r"^C20: .*\(2, -1\)",
    ),
    "columns in fractions": (
        half("obs", 6, [2], np.array([1.5], np.float32), np.array([1], np.float32), other_dtype=np.float32),
        r"^C15: .*'var'.*float32; expected integers",
    ),
    "rows in fractions": (
        half("var", 5, [2], np.array([1.5], np.float32), np.array([1], np.float32), other_dtype=np.float32),
        r"^C16: .*'obs'.*float32; expected integers",
    ),
    "an axis from 1": (
        lambda path: cxg_files.write_dense(path / "emb" / "umap", np.zeros((6, 2)), start=1),
        r"^C02: .*integers from 0",
    ),
    "an embedding of one column": (
        lambda path: cxg_files.write_dense(path / "emb" / "umap", np.zeros((6, 1))),
        r"^C23: .*two or more",
    ),
    "an embedding of fewer cells": (
        lambda path: cxg_files.write_dense(path / "emb" / "umap", np.zeros((5, 2))),
        r"^C71: .*emb/umap .*\(5, 2\)",
    ),
    "codes without categories": (hints(kind={"type": "categorical"}), r"^C13: .*'kind'.*int8"),
    "a code beyond": (hints(kind={"type": "categorical", "categories": ["T"]}), r"^C31: .*code 1 in row 1.*1 categories"),
    "categories twice": (hints(kind={"type": "categorical", "categories": ["T", "T", "B"]}), r"^C30: .*unique"),
    "categories of lists": (hints(kind={"type": "categorical", "categories": [["T"], "B"]}), r"^C30: .*unique strings"),
    "hints that are no JSON": (meta("obs", cxg_schema="{"), r"^C30: .*not valid JSON"),
    "hints that are a list": (meta("obs", cxg_schema="[]x"[:2]), r"^C30: .*not a JSON object"),
    "properties that are no JSON": (meta("cxg_group_metadata", cxg_properties="x"), r"^C51: "),
    "colours that are no table": (meta("cxg_group_metadata", cxg_category_colors='{"kind": 1}'), r"^C53: .*'kind'"),
    "corpora that are no JSON": (meta("cxg_group_metadata", corpora="x"), r"^C60: "),
    "a damaged matrix": (cut_short("Xr"), r"^C00: .*Xr.*again"),
    "a damaged table": (cut_short("obs"), r"^C00: .*obs.*again"),
    "a table without rows": (lambda path: shutil.rmtree(path / "obs" / "__fragments"), r"^C00: .*obs"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_refused_by_rule(cxg: Path, fault: str) -> None:
    """Each way to be wrong is refused by the id of the rule, saying where, and what to do."""
    damage, message = FAULTS[fault]
    damage(cxg)
    with pytest.raises(SourceError, match=message):
        read_source(cxg)


def test_categories_that_no_reader_takes_are_told(cxg: Path) -> None:
    """Categories that are neither text nor numbers break a must, since reading refuses them."""
    FAULTS["categories of lists"][0](cxg)
    assert ("C30", "must", "obs/kind") in {(p.rule, p.level, p.path) for p in validate(cxg)}


def dense_array(name: str, values: Any) -> Any:
    return lambda path: cxg_files.write_dense(path / name, values, names=("obs", "var"))


OTHER_FORMS: dict[str, tuple[Any, Any, str]] = {
    "X of another shape": ("dense", dense_array("X", np.zeros((6, 4), np.float32)), r"^C71: .*X .*\(6, 4\)"),
    "X of text": ("dense", dense_array("X", np.full((6, 5), "a").astype("U1")), r"^C04: .*numbers"),
    "a shift of another length": ("sparse", dense_array("X_col_shift", np.zeros(4)), r"^C43: .*\(4,\).*\(5,\)"),
}


@pytest.mark.parametrize("fault", OTHER_FORMS)
def test_other_layouts_are_checked_too(tmp_path: Path, fault: str) -> None:
    """A dense matrix of another shape, or of text, and a column shift of another length are refused by rule."""
    form, damage, message = OTHER_FORMS[fault]
    path = write_cxg(tmp_path / "a.cxg", form)
    damage(path)
    with pytest.raises(SourceError, match=message):
        read_source(path)


def test_what_is_no_cxg_is_told(tmp_path: Path, cxg: Path) -> None:
    """A missing folder, another folder, and an array are refused; a folder of CXGs is listed."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError):
        cxg_source(tmp_path / "none.cxg")
    for path in (tmp_path / "empty", cxg / "obs"):
        with pytest.raises(SourceError, match=r"^C01: "):
            cxg_source(path)
    assert (tiledb_kind(cxg), tiledb_kind(cxg / "obs"), tiledb_kind(tmp_path)) == ("group", "array", None)
    for mark in ("__tiledb_group.tdb", "__group"):
        place = cxg / mark
        place.unlink() if place.is_file() else shutil.rmtree(place)
    assert is_cxg(cxg)


def test_the_extra_is_named(cxg: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library a CXG is still recognised, and the error says what to install."""
    monkeypatch.setitem(sys.modules, "tiledb", None)
    assert detect_format(cxg) == "cxg"
    with pytest.raises(MissingExtraError, match=r"raggedatlas\[cxg\]"):
        open_source(cxg)


# The input was written by anndata 0.7.
pytestmark = pytest.mark.filterwarnings("ignore::anndata.OldFormatWarning")

WRITERS = ("0.5.9", "0.6.6")
FILES = {
    "unnamed": ("unnamed", "dense"),
    "dense": ("0.1", "dense"),
    "sparse": ("0.1", "sparse"),
    "shifted": ("0.2.0", "sparse"),
}
SHIFT = 0.5
"""What the maker added to each value of ``shifted``."""


@pytest.fixture(scope="module", params=WRITERS)
def written(request: pytest.FixtureRequest, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CXGs of one release of TileDB, unpacked beside their input."""
    folder = tmp_path_factory.mktemp("foreign")
    with zipfile.ZipFile(data_dir / f"cxg_tiledb_{request.param}.zip") as stored:
        stored.extractall(folder)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_what_cellxgene_wrote_in_2020_is_read(written: Path, name: str, tmp_path: Path) -> None:
    """Values, names, columns, categories, embeddings, colours and title are those of the h5ad, by rows and by columns; no must is broken."""
    path, want = written / f"{name}.cxg", ad.read_h5ad(written / "input.h5ad")
    values = dense(want.X) + np.float32(SHIFT if name == "shifted" else 0)
    back = ad.read_h5ad(ra.copy(path, tmp_path / "back.h5ad"))
    np.testing.assert_array_equal(dense(back.X), values)
    assert sp.issparse(back.X) == (name == "sparse")
    source = cxg_source(path)
    np.testing.assert_array_equal(dense(source.columns([7, 3])), values[:, [7, 3]])
    np.testing.assert_array_equal(dense(source.columns(["GENE4"])), values[:, [4]])
    source.close()
    assert (list(back.obs_names), list(back.var_names)) == (list(want.obs_names), list(want.var_names))
    for table, given in ((back.obs, want.obs), (back.var, want.var)):
        assert list(table.columns) == list(given.columns)
        for column in given:
            assert table[column].tolist() == given[column].tolist(), column
    assert list(back.obs["cell_type"].cat.categories) == list(want.obs["cell_type"].cat.categories)
    for key in ("X_umap", "X_pca"):
        assert back.obsm[key].dtype == want.obsm[key].dtype
        np.testing.assert_array_equal(back.obsm[key], want.obsm[key])
    if name != "unnamed":
        assert back.uns["title"] == name
        assert back.uns["cell_type_colors"].tolist() == want.uns["cell_type_colors"].tolist()
    # Version and layout are as they were written, every array can be inspected, and every value is valid.
    assert [str(p) for p in validate(path, "full") if p.level != "practice"] == []
    found = inspect(path)
    assert (found.version, found.layout) == FILES[name]
    assert [(e.path, e.fault) for e in (found.root, *found.root.children) if e.fault] == []

"""What is told instead of passing in silence: titles, shown names, NaN, shared names, unwritten arrays, flipped bits, killed runs."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest

import raggedatlas as ra
from raggedatlas.errors import SourceError
from raggedatlas.wings.cxg import validate
from raggedatlas.wings.cxg.table_encoder import count_duplicates
from raggedatlas.wings.cxg.tiledb_arrays import context, import_tiledb, open_array
from reading import array_metadata, copy_with_losses, dense, read_element
from support.cxg_files import EMBEDDINGS, N_OBS, VALUES, Form, create, set_hints, set_meta, write_cxg
from support.processes import started

UPLOAD = json.dumps({"title": "upload_v3.h5ad", "about": "https://example.org/small"})


def given(values: Any = VALUES, **changes: Any) -> ad.AnnData:
    made = ad.AnnData(np.asarray(values, np.float32), obsm={"X_umap": EMBEDDINGS["umap"]})
    for name, names in changes.items():
        setattr(made, name, pd.Index(names, dtype=object))
    return made


def titles(path: Path | str) -> list[Any]:
    group = array_metadata(Path(path) / "cxg_group_metadata")
    return [json.loads(group.get(key, "{}")).get("title") for key in ("corpora", "cxg_properties")]


@pytest.mark.long
@pytest.mark.parametrize("form", ["split", "sparse"])
def test_the_title_of_corpora_is_taken(form: Form, tmp_path: Path) -> None:
    """Since 0.2.0 the title is that of corpora; the one of the properties, a file name in real files, is kept beside it and put back."""
    path = write_cxg(tmp_path / "x.cxg", form)
    set_meta(path / "cxg_group_metadata", cxg_properties=UPLOAD)
    assert read_element(path, "uns/title") == "Small"
    there = ra.copy(path, tmp_path / "x.h5ad")
    assert titles(ra.copy(there, tmp_path / "back.cxg")) == ["Small", "upload_v3.h5ad"]
    assert titles(ra.copy(there, ra.open_sink(tmp_path / "named.cxg", title="Mine"))) == ["Mine", "Mine"]
    assert "corpora is right" in next(str(p) for p in validate(path) if p.rule == "C61")


def test_the_title_of_properties_is_taken_in_0_1(tmp_path: Path) -> None:
    """In version 0.1, also where a file is read as that, the title of the properties wins; it is taken where corpora has none."""
    path = write_cxg(tmp_path / "x.cxg", "old")
    set_meta(path / "cxg_group_metadata", cxg_properties=UPLOAD, corpora=json.dumps({"title": "Small"}))
    assert read_element(path, "uns/title") == "upload_v3.h5ad"
    assert read_element(path, "uns/title", version="0.2.0") == "Small"
    set_meta(path / "cxg_group_metadata", cxg_version="0.2.0", corpora=json.dumps({"schema_version": "2.0.0"}))
    assert read_element(path, "uns/title") == "upload_v3.h5ad"


def test_the_shown_index_of_features_stays(cxg: Path) -> None:
    """A CXG that shows ids shows them after a way through h5ad, though there are names too."""
    set_hints(cxg, "var", index="name_0")
    back = ra.copy(ra.copy(cxg, cxg.with_name("x.h5ad")), cxg.with_name("back.cxg"))
    assert json.loads(array_metadata(Path(back) / "var")["cxg_schema"])["index"] == "name_0"


@pytest.mark.parametrize("layout", ["dense", "sparse"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_values_that_are_no_numbers_are_told(value: float, layout: str, tmp_path: Path) -> None:
    """NaN and infinite values are written as they are, counted for whoever listens, and told by C07."""
    values = VALUES.copy()
    values[[4, 2], [4, 2]] = value
    heard: list[str] = []
    options = {"layout": layout, "on_losses": lambda losses: heard.extend(map(str, losses))}
    path, losses = copy_with_losses(given(values), tmp_path / "x.cxg", **options)
    (said,) = (str(loss) for loss in losses if loss.fate == "kept")
    assert said in heard
    assert "2 values are NaN or infinite, first at cell 2, feature 2" in said
    assert {p.rule for p in validate(path, "full") if p.level == "practice"} == {"C07"}
    assert validate(path) == []
    np.testing.assert_array_equal(np.concatenate([dense(block) for block in column_blocks(path)], 1), values)


def column_blocks(path: Path) -> list[Any]:
    source: Any = ra.open_source(path)
    try:
        return [values for _, values in source.column_blocks()]
    finally:
        source.close()


def test_shared_names_are_told(tmp_path: Path) -> None:
    """Names that several cells or features have are written, told as a loss, and told by C32; unique ones are not."""
    cells, genes = ["a", "b", "a", "c", "a", "d"], ["x", "y", "z", "y", "w"]
    path, losses = copy_with_losses(given(obs_names=cells, var_names=genes), tmp_path / "x.cxg")
    kept = {loss.key: loss.what.split(" of ")[0] for loss in losses if loss.fate == "kept"}
    assert kept == {"obs/index": "2", "var/index": "1"}
    assert {p.path for p in validate(path, "full") if p.rule == "C32"} == {"obs/name_0", "var/name_0"}
    assert copy_with_losses(given(), tmp_path / "unique.cxg")[1] == ()


@pytest.mark.parametrize("name", ["X", "emb/umap", "obs", "X_col_shift"])
@pytest.mark.parametrize("rows", [(), (0,), (0, 4)], ids=["nothing", "the first rows", "not the middle"])
def test_what_was_never_written_is_refused(name: str, rows: tuple[int, ...], tmp_path: Path) -> None:
    """An array of which fragments are missing is not copied as NaN or 0, whichever of its rows are there."""
    path = write_cxg(tmp_path / "x.cxg", "sparse" if name == "X_col_shift" else "dense")
    again(path / name, rows)
    with pytest.raises(SourceError, match=r"^C00: .*(only partially written|not all of them are written)"):
        ra.copy(path, tmp_path / "x.h5ad")
    assert not (tmp_path / "x.h5ad").exists()
    assert any(p.level == "must" and p.path == name for p in validate(path))


def test_an_embedding_without_its_schema_is_refused(cxg: Path, data_dir: Path) -> None:
    """An array that has lost its schema is not left out as if it were no array, whichever release wrote it."""
    with zipfile.ZipFile(data_dir / "cxg_tiledb_0.5.9.zip") as stored:
        stored.extractall(cxg.with_name("2020"))
    written_2020 = cxg.with_name("2020") / "dense.cxg"
    shutil.rmtree(cxg / "emb" / "pca" / "__schema")
    (written_2020 / "emb" / "pca" / "__array_schema.tdb").unlink()
    for path in (cxg, written_2020):
        assert ("C00", "emb/pca") in {(p.rule, p.path) for p in validate(path)}
        with pytest.raises(SourceError, match=r"^C00: .*pca"):
            ra.copy(path, cxg.with_name("x.h5ad"))


def again(path: Path, rows: tuple[int, ...]) -> None:
    """Declare an array again, with one row in a tile, and write two rows from each start."""
    with open_array(path) as array:
        schema, values = array.schema, array[:]
    dims = [schema.domain.dim(i) for i in range(schema.domain.ndim)]
    tiles = [1, *(int(d.tile) for d in dims[1:])]
    axes = [
        import_tiledb().Dim(d.name, domain=d.domain, tile=tile, dtype=d.dtype, ctx=context())
        for d, tile in zip(dims, tiles, strict=True)
    ]
    create(path, axes, [schema.attr(i) for i in range(schema.nattr)])
    with open_array(path, "w") as array:
        for start in rows:
            at = slice(start, min(start + 2, schema.shape[0]))
            named = isinstance(values, dict)
            array[at] = {key: value[at] for key, value in values.items()} if named else values[at]


@pytest.mark.long
@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_flipped_bits_are_found(layout: str, tmp_path: Path) -> None:
    """One flipped bit in any stored chunk of numbers, text or bounds of text is refused in reading and told by C00."""
    made = given(np.random.default_rng(0).random((N_OBS, 5)))
    made.obs["label"] = [f"label {i}" for i in range(N_OBS)]
    path = Path(ra.copy(made, ra.open_sink(tmp_path / "x.cxg", layout=layout)))
    files = sorted(file for file in path.rglob("__fragments/*/[ad]*.tdb") if file.stat().st_size)
    assert len(files) >= 8
    for file in files:
        if "cxg_group_metadata" in str(file):
            continue  # the one value in it is never read
        raw = file.read_bytes()
        file.write_bytes(raw[:-2] + bytes([raw[-2] ^ 4]) + raw[-1:])
        assert "C00" in {p.rule for p in validate(path, "full")}, file
        with pytest.raises(SourceError, match=r"^C00"):
            read_all(path)
        file.write_bytes(raw)
    assert [p for p in validate(path, "full") if p.level == "must"] == []


def read_all(path: Path) -> None:
    ra.copy(path, ra.open_sink(path.with_name("y.h5ad"), overwrite=True))
    column_blocks(path)


KILLED = """
import os, signal, sys
import raggedatlas as ra
sink = ra.open_sink(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_folders_of_killed_runs_are_removed(tmp_path: Path) -> None:
    """The next run that writes a CXG beside it removes what a killed one left, but nothing of a run that lives, and nothing else."""
    with started([sys.executable, "-c", KILLED, tmp_path / "a.cxg"], stdin=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        other = tmp_path / ".notes.partial"
        other.mkdir()
        ra.copy(given(), tmp_path / "b.cxg")
        assert len(list(tmp_path.glob(".a.cxg.*.partial"))) == 1
        run.communicate("\n", timeout=60)
    assert len(list(tmp_path.glob(".a.cxg.*.partial"))) == 1
    # Killed in the middle of an overwrite, a run has put the old CXG aside.
    left = next(tmp_path.glob(".a.cxg.*.partial"))
    (tmp_path / "b.cxg").rename(left / "replaced")
    ra.copy(given(), tmp_path / "b.cxg")
    assert not left.exists()
    assert validate(tmp_path / "a.cxg", "full") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "a.cxg", "b.cxg"]


def test_shared_names_are_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many names are held at once, the same number of them is shared."""
    names = np.array([f"n{i % 70}" for i in range(100)], object)
    for most in (1, 30, 1000):
        monkeypatch.setattr("raggedatlas.wings.cxg.table_encoder.MAX_HASHES", most)
        assert count_duplicates(lambda: [names[:33], names[33:]], len(names)) == 30


def test_fragments_that_cut_an_array_finely_are_told_by_their_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond so many boxes only the outer bounds of all fragments count."""
    path = write_cxg(tmp_path / "x.cxg", "dense")
    again(path / "X", (0, 4))
    assert "C14" in {p.rule for p in validate(path)}
    monkeypatch.setattr("raggedatlas.wings.cxg.tiledb_arrays.MAX_BOXES", 1)
    assert "C14" not in {p.rule for p in validate(path)}
    again(path / "X", (0, 2))
    assert "C14" in {p.rule for p in validate(path)}

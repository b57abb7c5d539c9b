"""Damaged and hostile CXGs: each is read, or refused by an error of ours; nothing waits, and no process ends."""

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import zstd

from raggedatlas.errors import AtlasError, SourceError
from raggedatlas.formats.registry import open_source
from raggedatlas.model.reports import Element
from raggedatlas.wings.cxg import inspect, validate
from raggedatlas.wings.cxg.tiledb_arrays import (
    MAX_CHUNK_BYTES,
    attribute_files,
    check_file_sizes,
    check_text_offsets,
    context,
    import_tiledb,
    open_array,
)
from reading import array_metadata, read_element
from support import cxg_files
from support.cxg_files import FORMS, N_OBS, Form, create, set_meta, write_cxg
from support.hypothesis_profile import examples

ROOT = Path(__file__).parents[3]

DEEP = 100_000 * "[" + 100_000 * "]"
NESTED = '{"title": ' + 500 * '{"a": ' + "[1]" + 500 * "}" + "}"
"""Python parses this one, and fails where it walks through it."""

JSON_PLACES = {
    ("obs", "cxg_schema"): "C30",
    ("var", "cxg_schema"): "C30",
    ("cxg_group_metadata", "corpora"): "C60",
    ("cxg_group_metadata", "cxg_properties"): "C51",
    ("cxg_group_metadata", "cxg_category_colors"): "C53",
    ("uns", "spatial"): "C27",
}


def element(root: Element, path: str) -> Element:
    return next(
        one for one in (root, *root.children, *(e for c in root.children for e in c.children)) if one.path == path
    )


def read_all(path: Path) -> None:
    source = open_source(path)
    try:
        for key in ("obs", "var", *(f"uns/{name}" for name in ("title", "spatial", "cxg"))):
            source.element(key)
        for _ in source.blocks(tuple(matrix.key for matrix in source.describe().matrices), 2):
            pass
    finally:
        source.close()


def test_coverage_of_atac_is_inspected(cxg: Path) -> None:
    """An array with an axis of text, as the fragments of ATAC are stored, is looked at and passes."""
    tiledb = import_tiledb()
    axes = [
        tiledb.Dim("chrom", domain=(1, 25), tile=1, dtype=np.uint32, ctx=context()),
        tiledb.Dim("bin", domain=(0, 5000), tile=1000, dtype=np.uint32, ctx=context()),
        tiledb.Dim("cell_type", domain=(None, None), tile=None, dtype="ascii", ctx=context()),
    ]
    create(cxg / "coverage", axes, [tiledb.Attr("coverage", dtype=np.float32, ctx=context())], sparse=True)
    with open_array(cxg / "coverage", "w") as array:
        array[np.array([1, 1, 2]), np.array([0, 5, 7]), np.array(["T cell", "B", "B"], object)] = np.ones(3, "f4")
    found = element(inspect(cxg).root, "coverage")
    assert (found.shape, found.chunks, found.fault) == ((25, 5001, 0), (1, 1000, 0), "")
    assert validate(cxg, "full") == []


@pytest.mark.parametrize("text", [DEEP, NESTED, '{"index": ' + 5000 * "9" + "}"], ids=["brackets", "walked", "digits"])
def test_deep_json_is_refused(cxg: Path, text: str) -> None:
    """JSON that Python cannot follow, or whose numbers it does not read, is told by its rule, and inspected all the same."""
    for (array, key), rule in JSON_PLACES.items():
        sound = array_metadata(cxg / array)[key]
        set_meta(cxg / array, **{key: text})
        assert rule in {problem.rule for problem in validate(cxg)}
        assert element(inspect(cxg).root, f"{array}@{key}").kind == "metadata"
        if array == "uns":  # what is no JSON there stays text
            assert read_element(cxg, "uns/spatial") == text
        else:
            with pytest.raises(AtlasError, match=rf"^{rule}: "):
                read_all(cxg)
        set_meta(cxg / array, **{key: sound})


def test_numbers_beyond_float64_stay_text(cxg: Path) -> None:
    """A list with an integer that no float holds stays JSON text, which is what lists that are no arrays are."""
    set_meta(cxg / "uns", wide=f"[{10**400}, 0.5]")
    assert json.loads(read_element(cxg, "uns/wide")) == [10**400, 0.5]


PLACES: dict[str, Callable[[Path], Path]] = {
    "beside the schema": lambda path: path / "obs" / "pipe",
    "in the place of a file": lambda path: next((path / "Xr" / "__fragments").rglob("a0.tdb")),
    "of metadata": lambda path: path / "uns" / "__meta" / "pipe",
    "of an embedding": lambda path: path / "emb" / "umap" / "__schema" / "pipe",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.timeout(60)
def test_a_pipe_is_refused_and_not_waited_for(cxg: Path, place: str) -> None:
    """A pipe among the files of an array is told by C00 in reading, looking and validation; opening it would never return."""
    at = PLACES[place](cxg)
    at.unlink(missing_ok=True)
    os.mkfifo(at)
    array = str(at.relative_to(cxg)).split("/__")[0].removesuffix("/pipe")
    with pytest.raises(AtlasError, match=r"^C00: .* is not a regular file but a pipe"):
        read_all(cxg)
    assert ("C00", array) in {(problem.rule, problem.path) for problem in validate(cxg, "full")}
    inspect(cxg)


@pytest.mark.parametrize("name", ["name_0", "sample"])
def test_bytes_that_are_not_utf8_are_refused(cxg: Path, name: str) -> None:
    """A column of bytes is text in UTF-8; other bytes are refused by C00, in reading and in validation."""
    tiledb = import_tiledb()
    with tiledb.open(str(cxg / "obs")) as array:
        schema, values, notes = array.schema, dict(array[:]), dict(array.meta)
    kept = [schema.attr(i) for i in range(schema.nattr) if schema.attr(i).name != name]
    attributes = [tiledb.Attr(name, dtype="ascii", var=True, ctx=context()), *kept]

    def store(text: bytes) -> None:
        shutil.rmtree(cxg / "obs")
        tiledb.Array.create(
            str(cxg / "obs"), tiledb.ArraySchema(schema.domain, attributes, ctx=context()), ctx=context()
        )
        values[name] = np.array([text, *(b"%d" % i for i in range(1, N_OBS))], object)
        with tiledb.open(str(cxg / "obs"), "w") as array:
            array[:] = values
            for key, value in notes.items():
                array.meta[key] = value

    store("\u00e9".encode())
    assert "C00" not in {problem.rule for problem in validate(cxg, "full")}
    read_all(cxg)
    store(b"caf\xe9")
    assert ("C00", f"obs/{name}") in {(p.rule, p.path) for p in validate(cxg, "full")}
    with pytest.raises(
        SourceError, match=rf"^C00: obs column '{name}' .* has the text b'caf\\xe9', which is not UTF-8"
    ):
        read_all(cxg)


def test_linked_files_are_read(cxg: Path) -> None:
    """Files that are links to files, as data managers lay them out, are read; a link to itself is no endless walk."""
    at = next((cxg / "X" if (cxg / "X").is_dir() else cxg / "Xr").rglob("a0.tdb"))
    at.rename(cxg.with_name("kept"))
    at.symlink_to(cxg.with_name("kept"))
    (cxg / "obs" / "again").symlink_to(cxg / "obs")
    problems = validate(cxg, "full")
    if import_tiledb().version() < (0, 36):  # it takes the link to a folder for a fragment
        assert [problem.rule for problem in problems] == ["C00"]
    else:
        assert problems == []
        read_all(cxg)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_damaged_cxgs_are_refused_or_read() -> None:
    """Of damaged CXGs nothing but our errors comes, within the limit, and none is called sound that cannot be read.

    The long campaign is the same script with other numbers; docs/reference/cxg.md has its counts.
    """
    words = [sys.executable, ROOT / "scripts" / "fuzz_cxg.py", "--small", "--n", "20", "--limit", "100"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 sound CXGs, 20 damages" in done.stdout


STARTS = np.cumsum([0, *(len(f"cell {i}") for i in range(N_OBS - 1))]).astype("<u8")


def packed(bounds: "np.ndarray", length: int | None = None) -> bytes:
    """Pack bounds as one tile of one chunk, as the library does."""
    raw = bounds.astype("<u8").tobytes()
    inner = bytes(zstd.compress(raw))
    length = len(raw) if length is None else length
    described = struct.pack("<IIII", 0, 1, length, len(inner))
    return struct.pack("<QIII", 1, length, len(inner), len(described)) + described + inner


def unpacked(bounds: "np.ndarray") -> bytes:
    """Write bounds as one tile without a filter."""
    raw = bounds.astype("<u8").tobytes()
    return struct.pack("<QIII", 1, len(raw), len(raw), 0) + raw


def bounds_of(path: Path, field: str = "a0") -> Path:
    return next((path / "__fragments").glob(f"*/{field}.tdb"))


def changed(place: int, by: int) -> "np.ndarray":
    bounds = STARTS.copy()
    bounds[place] += np.uint64(by)
    return bounds


GOOD = packed(STARTS)
BROKEN: dict[str, tuple[bytes, str]] = {
    "beyond the texts": (packed(changed(-1, 100)), "decrease or exceed"),
    "far beyond": (packed(changed(-1, 2**60)), "decrease or exceed"),
    "backwards": (packed(STARTS[[0, 2, 1, 3, 4, 5]]), "decrease or exceed"),
    "not from the first": (packed(STARTS + np.uint64(1)), "decrease or exceed"),
    "not by zstd": (GOOD[:-8] + b"\xff" * 8, "cannot be decoded|decrease or exceed"),
    "another length": (packed(STARTS, 56), "part whose length differs"),
    "another length than its parts": (GOOD[:8] + struct.pack("<I", 56) + GOOD[12:], "chunk whose length differs"),
    "no parts": (GOOD[:24] + bytes(4) + GOOD[28:], "invalid header"),
    "parts that do not fill it": (GOOD[:32] + struct.pack("<I", 3) + GOOD[36:], "do not add up"),
    "a short description": (GOOD[:16] + struct.pack("<I", 4) + GOOD[20:], "invalid header"),
    "a huge chunk": (GOOD[:8] + struct.pack("<I", MAX_CHUNK_BYTES + 8) + GOOD[12:], "more bytes than it has"),
    "a chunk beyond the file": (GOOD[:12] + struct.pack("<I", 2**31) + GOOD[16:], "more bytes than it has"),
    "more chunks": (struct.pack("<Q", 2**60) + GOOD[8:], "truncated"),
    "half of a header": (GOOD[:10], "truncated"),
    "half of a bound": (struct.pack("<QIII", 1, 4, 4, 0) + bytes(4), "within an offset"),
    "two tiles": (GOOD + GOOD, "more tiles"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CXG of which one file is damaged at a time."""
    return write_cxg(tmp_path_factory.mktemp("whole") / "x.cxg")


@pytest.mark.parametrize("damage", BROKEN)
def test_broken_bounds_of_texts_are_refused(damage: str, whole: Path) -> None:
    """Bounds that lie beyond their texts, run backwards or cannot be read are told by C00, in reading and in validation; the process lives."""
    content, message = BROKEN[damage]
    path = whole
    bounds_of(path / "obs").write_bytes(content)
    source = open_source(path)
    with pytest.raises(SourceError, match=rf"^C00: .*obs is damaged: .*a0\.tdb .*({message}).*again"):
        source.element("obs")
    source.close()
    assert {(p.rule, p.path) for p in validate(path, "full")} == {("C00", "obs/name_0")}


def test_bounds_that_are_sound_are_read(tmp_path: Path) -> None:
    """What the damages are made of is what the library wrote, and is read as it was: only the damage is refused."""
    path = write_cxg(tmp_path / "x.cxg")
    assert bounds_of(path / "obs").read_bytes()[:8] == GOOD[:8]
    bounds_of(path / "obs").write_bytes(GOOD)
    assert validate(path, "full") == []
    assert list(open_source(path).element("obs").index) == [f"cell {i}" for i in range(N_OBS)]
    # Without a filter they can be judged all the same.
    bounds_of(path / "obs").write_bytes(unpacked(changed(-1, 100)))
    with open_array(path / "obs") as array, pytest.raises(SourceError, match="exceed its text"):
        check_text_offsets(path / "obs", array.schema)


@pytest.mark.parametrize("form", FORMS)
def test_sound_arrays_pass(form: Form, tmp_path: Path) -> None:
    """No array of any form is refused, and a damaged column leaves the others to be read."""
    path = write_cxg(tmp_path / "x.cxg", form)
    for name in ("obs", "var"):
        check_file_sizes(path / name)
        with open_array(path / name) as array:
            check_text_offsets(path / name, array.schema)
    bounds_of(path / "obs", "a2").write_bytes(b"\1")
    with open_array(path / "obs") as array:
        assert attribute_files(array.schema, "sample") == ("a2", "sample")
        check_text_offsets(path / "obs", array.schema, attribute_files(array.schema, "name_0"))
        with pytest.raises(SourceError, match="truncated"):
            check_text_offsets(path / "obs", array.schema, attribute_files(array.schema, "sample"))


def test_names_of_old_files_are_not_mistaken(tmp_path: Path) -> None:
    """Where files are named after attributes, one called n_var does not make the numbers of n into bounds; texts are still looked at."""
    path = tmp_path / "old"
    cxg_files.write_frame(
        path, {"n": np.arange(3), "n_var": np.arange(3), "t": np.array(["a", "b", "c"], object)}, None
    )
    with open_array(path) as array:
        schema = array.schema
    fragment = next((path / "__fragments").iterdir())
    old = path / fragment.name
    fragment.rename(old)
    for new, name in (("a0", "n"), ("a1", "n_var"), ("a2", "t"), ("a2_var", "t_var")):
        (old / f"{new}.tdb").rename(old / f"{name}.tdb")
    check_text_offsets(path, schema)
    (old / "t.tdb").write_bytes(packed(np.array([0, 9, 9])))
    with pytest.raises(SourceError, match=r"t\.tdb has offsets"):
        check_text_offsets(path, schema)


@given(st.lists(st.text(max_size=4), min_size=1, max_size=40), st.integers(1, 90))
@examples(10)
def test_any_texts_pass(tmp_path_factory: pytest.TempPathFactory, texts: list[str], times: int) -> None:
    """Tables of any texts, empty ones too, over several tiles, are not refused, and come back."""
    path = tmp_path_factory.mktemp("texts") / "table"
    values = pd.Series([text.replace("\0", "") for text in texts] * times, dtype=object).to_numpy()
    cxg_files.write_frame(path, {"a": values, "b": values[::-1].copy()}, None)
    with open_array(path) as array:
        check_text_offsets(path, array.schema)
        assert np.asarray(array.query(attrs=["b"])[:]["b"]).astype(object).tolist() == values[::-1].tolist()


@pytest.mark.long
def test_an_ignored_interrupt_stays_ignored(tmp_path: Path) -> None:
    """Where Ctrl-C is ignored, as in jobs of a script, it is still ignored once a CXG was opened: it ends nothing, least of all by a crash."""
    path = write_cxg(tmp_path / "x.cxg")
    script = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from raggedatlas.formats.registry import open_source\n"
        "open_source(sys.argv[1]).close()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "print('here')\n"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "here\n"), done.stderr


def schema_file(path: Path) -> Path:
    return next(file for file in sorted((path / "obs" / "__schema").iterdir()) if file.is_file())


def meta_file(path: Path) -> Path:
    return next(file for file in sorted((path / "obs" / "__meta").iterdir()) if file.is_file())


@pytest.mark.parametrize("file", [schema_file, meta_file])
@pytest.mark.parametrize("at", [4, 30])
def test_sizes_beyond_the_file_are_refused(file: Callable[[Path], Path], at: int, tmp_path: Path) -> None:
    """Lengths that a schema or metadata announce beyond their files are told by C00, and no memory is taken for them."""
    path = write_cxg(tmp_path / "x.cxg")
    damaged = file(path)
    raw = damaged.read_bytes()
    damaged.write_bytes(raw[:at] + b"\xff\xff\xff\x7f" + raw[at + 4 :])
    with pytest.raises(SourceError, match=r"^C00: .*obs is damaged: .* declares [\d,]{13,} bytes"):
        open_source(path)
    assert ("C00", "obs") in {(p.rule, p.path) for p in validate(path)}
    damaged.write_bytes(raw)
    assert validate(path) == []

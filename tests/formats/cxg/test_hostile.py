"""Text axes, deep JSON, pipes in the place of files: each is read, or refused by an error of ours, and nothing waits."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest

import raggedatlas as ra
from raggedatlas.errors import AtlasError
from raggedatlas.formats.cxg import inspect, validate
from raggedatlas.formats.cxg.tiledb_arrays import context, import_tiledb, open_array
from raggedatlas.formats.registry import open_source
from raggedatlas.model.reports import Element
from raggedatlas.testing.cxg_files import EMBEDDINGS, VALUES, create, set_meta
from reading import array_metadata, array_values, copy_with_losses, read_element

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
    """An array with an axis of text, as the fragments of ATAC are stored, is looked at, passes, and goes through h5ad."""
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
    there = ra.copy(cxg, cxg.with_name("there.h5ad"))
    back = ra.copy(there, ra.open_sink(cxg.with_name("back.cxg")))
    assert sorted(array_values(Path(back) / "coverage")["cell_type"].tolist()) == [b"B", b"B", b"T cell"]


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


def test_deep_uns_is_lost_and_told(tmp_path: Path) -> None:
    """Metadata that is nested deeper than JSON is read here is left out, and said to be."""
    deep: dict[str, Any] = {"end": 1}
    for _ in range(200):
        deep = {"a": deep}
    given = ad.AnnData(VALUES, obsm={"X_umap": EMBEDDINGS["umap"]}, uns={"deep": deep, "kept": 1})
    made, losses = copy_with_losses(given, tmp_path / "x.cxg")
    assert [loss.fate for loss in losses if loss.key == "uns/deep"] == ["lost"]
    assert read_element(made, "uns/kept") == 1


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

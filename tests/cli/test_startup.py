"""A command imports what it needs, and pyarrow knows pandas as soon as something imports it."""

import subprocess
import sys
from pathlib import Path

import anndata as ad
from anndata.tests.helpers import assert_equal

from raggedatlas import RaggedAtlas


def run_python(code: str, *arguments: str) -> str:
    """Run code in a fresh interpreter and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported_by(*words: str) -> set[str]:
    """Return the modules that a command imports."""
    code = """
import atexit, sys
from raggedatlas.cli import main
atexit.register(lambda: print("\\nimported:", *sys.modules))
sys.argv[:] = ["raggedatlas", *sys.argv[1:]]
main()
"""
    return set(run_python(code, *words).rpartition("\nimported:")[2].split())


def test_listings_and_snapshots_import_little(tmp_path: Path, data_dir: Path) -> None:
    """Frames, formats, queries and reports are not imported to create and list an atlas and to take a snapshot."""
    path = str(tmp_path / "atlas")
    heavy = {"pandas", "anndata", "scipy", "h5py", "lancedb", "zarr", "raggedatlas.formats.anndata"}
    heavy |= {"raggedatlas.query.dataset", "raggedatlas.query.query", "raggedatlas.model.reports"}
    assert not heavy & imported_by("create", path)
    RaggedAtlas.open(path).add(str(data_dir / "lung_C144.h5"))
    assert not (heavy | {"raggedatlas.formats", "raggedatlas.query"}) & imported_by("ls", path)
    assert not heavy & imported_by("snapshot", path)


def test_help_imports_no_array() -> None:
    """The help of all commands needs neither Arrow nor NumPy."""
    assert not {"numpy", "pyarrow", "lance", "pandas"} & imported_by("--help")


def test_series_become_arrow_as_ever() -> None:
    """With pandas put off, a series is still one once pandas is imported: its NaN is null, its text has its type."""
    code = """
from raggedatlas.cli import defer_pandas_import
defer_pandas_import()
import sys
import pyarrow as pa
pa.array([1, 2])
assert "pandas" not in sys.modules
import importlib.util
assert importlib.util.find_spec("pandas") is not None  # to look for it is not to import it
import pandas as pd
made = pa.array(pd.Series([1.5, None, 2.5]))
assert made.null_count == 1, made
assert pa.Table.from_pandas(pd.DataFrame({"a": pd.Categorical(["x", "y"])})).schema.field("a").type.index_type == pa.int8()
defer_pandas_import()
assert pa.array(pd.Series([None, 1.0])).null_count == 1
"""
    run_python(code)


def test_a_frequent_verb_comes_alone_and_anything_else_with_all() -> None:
    """The frequent verbs are in the modules that the table says; a mistake, or nothing, is answered with all of them."""
    code = """
import sys
import typer.main
from raggedatlas.cli import FREQUENT, import_command
def verbs(*words):
    return set(typer.main.get_command(import_command(*words)).commands)
for verb, home in FREQUENT.items():
    assert verb in verbs(verb), verb
assert "raggedatlas.wings.results.commands" in sys.modules or "infer" not in verbs("ls")
every = verbs("typo")
assert {*FREQUENT, "infer", "genes"} <= every and verbs() == every
"""
    run_python(code)


def test_a_query_to_h5ad_imports_little(tmp_path: Path, data_dir: Path) -> None:
    """Tables, text and values of a query are written without anndata, pandas, Zarr, SciPy and the formats that it does not write."""
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(str(data_dir / "lung_C144.h5"))
    atlas.snapshot()
    heavy = {
        "anndata",
        "scipy",
        "lancedb",
        "zarr",
        "pandas",
        "rich",
        "raggedatlas.wings.vectors.geometry",
        "raggedatlas.wings.cxg.sink",
    }
    out = tmp_path / "few.h5ad"
    assert not heavy & imported_by("query", str(tmp_path / "atlas"), "-f", "CD3E", "-o", str(out))
    atlas.checkout(1).query().features("CD3E").to_anndata().write_h5ad(tmp_path / "theirs.h5ad")
    assert_equal(ad.read_h5ad(out), ad.read_h5ad(tmp_path / "theirs.h5ad"))

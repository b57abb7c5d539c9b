"""A command imports what it needs, and pyarrow knows pandas as soon as something imports it."""

import subprocess
import sys
from pathlib import Path

from raggedatlas import RaggedAtlas


def run_python(code: str, *arguments: str) -> str:
    """Run code in a fresh interpreter and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ls_imports_no_library_of_frames(tmp_path: Path) -> None:
    """Listing an atlas needs neither pandas nor anndata, SciPy, h5py or lancedb."""
    RaggedAtlas.create(str(tmp_path / "atlas"))
    code = """
import atexit, sys
from raggedatlas.cli import main
heavy = {"pandas", "anndata", "scipy", "h5py", "lancedb", "numba", "zarr"}
atexit.register(lambda: print("heavy:", sorted(heavy & set(sys.modules))))
sys.argv[:] = ["raggedatlas", "ls", sys.argv[1]]
main()
"""
    assert run_python(code, str(tmp_path / "atlas")).endswith("heavy: []\n")


def test_series_become_arrow_as_ever() -> None:
    """With pandas put off, a series is still one once pandas is imported: its NaN is null, its text has its type."""
    code = """
from raggedatlas.cli.starting import put_off_pandas
put_off_pandas()
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
put_off_pandas()
assert pa.array(pd.Series([None, 1.0])).null_count == 1
"""
    run_python(code)

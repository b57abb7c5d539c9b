"""The package works where neither it nor the home folder can be written."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import raggedatlas
from raggedatlas.store.native import library_path

_WITHOUT_RIGHTS = """
import ctypes, os, sys
if os.getuid() == 0:  # root may write everywhere, unless it gives that up
    assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0
import raggedatlas
assert raggedatlas.__file__.startswith(sys.argv[1]), raggedatlas.__file__
from raggedatlas.store.codecs import crc32c
assert crc32c(b"123456789") == 0xE3069283
import raggedatlas.wings.vectors.storage.codecs
from support.atlases import small_anndata
atlas = raggedatlas.RaggedAtlas.create("atlas")
atlas.add(small_anndata(1), "d", organism="human", progress=False)
query = atlas.checkout(atlas.snapshot()).query()
assert query.to_anndata().shape == (10, 12)
query.write("out.h5ad")
assert not {"numba", "llvmlite"} & set(sys.modules)
"""


def test_compiled_loops_run_from_a_read_only_install_without_a_home(tmp_path: Path) -> None:
    """Adding, queries and export work where neither package nor home can be written: nothing is compiled or cached."""
    package = tmp_path / "site" / "raggedatlas"
    shutil.copytree(Path(raggedatlas.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(library_path(), package / "store" / f"libraggedatlas{library_path().suffix}")
    paths = [tmp_path / "site", *(tmp_path / "site").rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    environment = {key: value for key, value in os.environ.items() if key not in {"XDG_CACHE_HOME", "PYTHONPATH"}}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(Path(__file__).parents[1])]),
        "HOME": "/proc/nobody",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-c", _WITHOUT_RIGHTS, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env=environment, cwd=tmp_path
    )
    for path in paths:
        path.chmod(0o755)
    assert done.returncode == 0, done.stderr

"""Each wing can be left out: the package without it imports, adds, queries and has the other commands."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import raggedatlas
from raggedatlas.errors import MissingExtraError
from raggedatlas.model.wings import BUILT_IN, answer, built_in_wings
from raggedatlas.store.native import library_path

USE = """
import sys
from importlib import import_module
from pkgutil import walk_packages

import anndata as ad, numpy as np, pandas as pd
import typer.main
from typer.testing import CliRunner
import raggedatlas as ra
from raggedatlas.cli import import_command
from raggedatlas.model.wings import BUILT_IN, built_in_wings

folder, left_out, absent, present = sys.argv[1:]
assert [wing.name for wing in built_in_wings()] == [name for name in BUILT_IN if name != left_out]
atlas = ra.RaggedAtlas.create(folder + "/atlas")
cells = ad.AnnData(np.eye(3, dtype=np.float32), pd.DataFrame({"kind": list("aba")}, index=list("xyz")), pd.DataFrame(index=["g1", "g2", "g3"]))
cells.write_h5ad(folder + "/cells.h5ad")
atlas.add(folder + "/cells.h5ad", progress=False)
query = atlas.checkout(atlas.snapshot()).query().where(kind="a")
assert query.to_anndata().shape == (2, 3) and query.count() == 2
query.write(folder + "/out.h5ad")
assert len(next(iter(ra.Loader(query, batch_size=2))).uids) == 2
assert atlas.validate() == []
for module in walk_packages(ra.__path__, "raggedatlas."):
    if not module.name.endswith(".__main__"):
        import_module(module.name)
command = import_command()
commands = set(typer.main.get_command(command).commands)
assert not commands & set(absent.split()) and {"add", "convert", "validate", *present.split()} <= commands, commands
for words in (["convert", folder + "/cells.h5ad", folder + "/cells.zarr"], ["validate", folder + "/cells.zarr"], ["inspect", folder + "/cells.h5ad"], ["--help"]):
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, (words, done.output, done.exception)
"""


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_package_works_without_a_wing(name: str, tmp_path: Path) -> None:
    """A copy without the folder of one wing, in a process of its own: the commands of that wing are absent, the others work."""
    copy = tmp_path / "site" / "raggedatlas"
    shutil.copytree(Path(raggedatlas.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__", "testing"))
    shutil.rmtree(copy / "wings" / name)
    absent, present = (
        " ".join(command for wing in built_in_wings() if (wing.name == name) is own for command in wing.commands)
        for own in (True, False)
    )
    environment = {**os.environ, "PYTHONPATH": str(copy.parent), "RAGGEDATLAS_LIBRARY": str(library_path())}
    done = subprocess.run(
        [sys.executable, "-c", USE, str(tmp_path), name, absent, present],
        capture_output=True, text=True, check=False, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_what_no_wing_has_is_refused() -> None:
    """A function that the core asks for is that of the wing that has it; without one the error says what to install."""
    assert all(callable(answer(name)) for wing in built_in_wings() for name in wing.answers)
    with pytest.raises(MissingExtraError, match="No installed wing has 'nothing'"):
        answer("nothing")

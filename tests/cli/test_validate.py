"""The verbs for files: validate, its copy with mends, and inspect; validate of an atlas stays as it was."""

import json
from pathlib import Path
from typing import Any

import pytest

from command import ask
from support.anndata_faults import damage, write_good


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """A file with one fault that can be mended and one that cannot."""
    path = write_good(tmp_path / "bad.h5ad", "hdf5")

    def change(root: Any) -> None:
        del root["uns/list"].attrs["encoding-type"]
        root["X/indices"][0] = 99

    damage(path, change)
    return path


@pytest.mark.nightly
def test_validate_tells_and_ends_with_one(bad: Path, tmp_path: Path) -> None:
    """Problems come a line each, or as JSON; the exit code is 1 for a broken must and 0 without, at the level asked for."""
    said = ask("validate", bad, "--level", "full")
    assert said.exit_code == 1
    assert said.stdout.splitlines()[0].startswith("A58 must: X: 1 indices are outside its 4 columns")
    assert said.stdout.splitlines()[-1] == "2 must (full)."
    document = ask("validate", bad, "--json")
    assert document.exit_code == 1
    (problem,) = json.loads(document.stdout)
    assert (problem["rule"], problem["level"], problem["path"]) == ("A26", "must", "uns/list")
    assert set(problem) == {"rule", "level", "path", "message", "fix"}
    good = ask("validate", write_good(tmp_path / "good.zarr", "zarr3"))
    assert (good.exit_code, good.stdout) == (0, "Nothing is wrong (metadata).\n")


@pytest.mark.nightly
def test_fix_writes_a_copy_and_says_what_is_left(bad: Path, tmp_path: Path) -> None:
    """What was fixed is told; a copy that would break a must is refused, in place as well."""
    before = bad.read_bytes()
    said = ask("fix", bad, tmp_path / "copy.h5ad")
    assert said.exit_code == 1
    assert said.stderr.startswith(f"raggedatlas: {bad}: A58 must: X:")
    assert not (tmp_path / "copy.h5ad").exists()
    light = ask("fix", bad, tmp_path / "light.h5ad", "--level", "metadata", "--json")
    document = json.loads(light.stdout)
    assert (light.exit_code, document["left"]) == (0, [])
    assert document["fixed"] == ["A26 uns/list: declared as array 0.2.0"]
    assert bad.read_bytes() == before
    again = ask("fix", bad, bad)
    assert again.exit_code == 1
    assert again.stderr.startswith("raggedatlas: ")


def test_levels_and_options_belong_to_files_or_atlases(bad: Path, tmp_path: Path) -> None:
    """A level of the other kind, fix of an atlas and --at of a file are misuse."""
    assert ask("create", tmp_path / "a.atlas").exit_code == 0
    atlas = tmp_path / "a.atlas"
    for words in ((bad, "--level", "deep"), (atlas, "--level", "full"), (bad, "--at", "1")):
        assert ask("validate", *words).exit_code == 2, words
    assert ask("fix", atlas, tmp_path / "x").exit_code == 2
    assert ask("validate", atlas, "--level", "quick").stdout == "Nothing is wrong (quick).\n"


def test_inspect_draws_a_tree(bad: Path) -> None:
    """A line for each element as deep as asked for, or one JSON document."""
    lines = ask("inspect", bad, "--depth", "1").stdout.splitlines()
    assert lines[0].startswith("bad.h5ad: HDF5, ")
    assert lines[1] == "├── X: csr_matrix 0.1.0, 3 x 4, float32, 5 entries (41.7%), chunks 5, 56 B"
    assert len(lines) == 1 + len(json.loads(ask("inspect", bad, "--json").stdout)["root"]["children"])
    assert ask("inspect", bad.parent / "absent").exit_code == 1

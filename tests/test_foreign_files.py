"""The page of files of other software names every fixture, the test that reads it, and what is compared."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parent.parent
ROWS = json.loads((ROOT / "tests" / "data" / "foreign.json").read_text())


def test_the_page_is_what_the_list_makes() -> None:
    """`scripts/foreign_files.py` makes the page from the list, and nothing on it was written by hand."""
    command = [sys.executable, str(ROOT / "scripts" / "foreign_files.py"), "--check"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['file']} {row['version']}"[:60])
def test_each_file_has_a_test_that_reads_it(row: dict[str, str]) -> None:
    """Every entry says all five things, its file is among the fixtures, and its tests exist."""
    assert set(row) == {"file", "software", "version", "read_by", "compared"}
    assert all(row.values())
    assert (ROOT / "tests" / "data" / row["file"].split()[0]).exists()
    assert [name for name in row["read_by"].split(", ") if not (ROOT / name.split("::")[0]).exists()] == []


def test_every_fixture_is_on_the_page() -> None:
    """No file of other software is among the fixtures without an entry."""
    there = {path.name for path in (ROOT / "tests" / "data").iterdir() if path.suffix not in (".md", ".json")}
    ours = {
        "fuzz_inputs.bin",
    }  # written by the fuzz harness
    assert there - ours - {row["file"].split()[0] for row in ROWS} == set()

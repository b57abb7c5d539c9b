"""The verb concat: its options reach the library, warnings and refusals are one line."""

import json
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import pandas as pd
import pytest
from typer.testing import CliRunner

from raggedatlas.cli.commands import app
from raggedatlas.testing.atlases import small_anndata

# anndata 0.13 asks pandas 3 for options that pandas 3 deprecates.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The '(future.infer_string|mode.chained_assignment)' option:DeprecationWarning"
)


def ask(*words: object) -> Any:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(word) for word in words])


def test_files_become_one(tmp_path: Path) -> None:
    """Every option has its effect; the path goes to stdout, and that raw is left out is one line on stderr."""
    parts = [small_anndata(0), small_anndata(1)[:, 1:].copy()]
    parts[0].raw = parts[0].copy()
    parts[1].uns["x"] = 1
    with warnings.catch_warnings(action="ignore"):
        for name, part in zip("ab", parts, strict=True):
            part.write_h5ad(tmp_path / f"{name}.h5ad")
    line = [
        "concat",
        tmp_path / "a.h5ad",
        tmp_path / "b.h5ad",
        "-o",
        tmp_path / "x.h5ad",
        "--join",
        "outer",
        "--label",
        "from",
    ]
    line += [
        "--key",
        "p",
        "--key",
        "q",
        "--index-unique",
        "-",
        "--merge",
        "first",
        "--uns-merge",
        "only",
        "--fill-value",
        2,
        "--json",
    ]
    with warnings.catch_warnings(action="default"):
        said = ask(*line)
    assert said.exit_code == 0, said.stderr
    assert json.loads(said.stdout) == {"path": str(tmp_path / "x.h5ad")}
    assert "warning: raw is left out" in said.stderr
    with warnings.catch_warnings(action="ignore"):
        made = ad.read_h5ad(tmp_path / "x.h5ad")
        how: dict[str, Any] = {"index_unique": "-", "merge": "first", "uns_merge": "only", "fill_value": 2}
        asked = ad.concat(dict(zip("pq", parts, strict=True)), join="outer", label="from", **how)
    pd.testing.assert_frame_equal(made.to_df(), asked.to_df(), check_column_type=False, check_index_type=False)
    assert made.obs["from"].tolist() == asked.obs["from"].tolist()
    assert made.uns == {"x": 1}
    with warnings.catch_warnings(action="ignore"):
        again = ask(*line)
    assert (again.exit_code, again.stderr.count("\n")) == (1, 1)
    assert "x.h5ad exists" in again.stderr

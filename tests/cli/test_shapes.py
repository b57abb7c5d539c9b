"""The command with geometry: a store is linked, a box is asked for, what is refused is one line."""

from pathlib import Path
from typing import Any

import anndata as ad
import pytest
from typer.testing import CliRunner

from raggedatlas.cli import app
from raggedatlas.testing.slides import make_slide
from raggedatlas.vectors.building import make_geometry
from raggedatlas.vectors.writing import write


def ask(*words: object) -> Any:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    slide, folder = make_slide(16), tmp_path_factory.mktemp("cli")
    slide.data.write_h5ad(folder / "slide.h5ad")
    write(make_geometry(slide.outlines), str(folder / "cells.zv"))
    write(make_geometry(slide.transcripts), str(folder / "spots.zv"))
    for words in (("create",), ("add", folder / "slide.h5ad")):
        assert ask(words[0], folder / "atlas", *words[1:]).exit_code == 0
    return folder


def test_shapes_from_the_shell(place: Path) -> None:
    """add --link, query --within and export --within give what the library gives."""
    added = ask(
        "add", place / "atlas", place / "cells.zv", "--link", "segment_id", "--space", "segmentation_boundary", "--json"
    )
    assert '"n_cells": 16' in added.stdout, added.output
    refused = ask("add", place / "atlas", place / "cells.zv", "--link", "segment_id")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert len(refused.stderr.strip().splitlines()) == 1
    counted = ask(
        "add",
        place / "atlas",
        place / "spots.zv",
        "--space",
        "transcripts",
        "--counts",
        "--cells",
        "cell_id",
        "--dataset",
        "spots",
    )
    assert counted.exit_code == 0, counted.output
    assert ask("snapshot", place / "atlas").exit_code == 0
    box = ("--within", "0,0,50,50", "--space", "segmentation_boundary")
    n = int(ask("query", place / "atlas", *box, "--count").stdout)
    assert 0 < n < 16
    out = place / "box.h5ad"
    written = ask("export", place / "atlas", out, *box, "--centroids", "segmentation_boundary")
    assert written.exit_code == 0, written.output
    assert ad.read_h5ad(out).obsm["spatial"].shape == (n, 2)
    assert ask("query", place / "atlas", "--within", "a,b", "--space", "segmentation_boundary").exit_code == 2
    twice = ask("add", place / "atlas", place / "cells.zv", "--space", "a=b")
    assert twice.exit_code == 2

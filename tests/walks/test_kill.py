"""A process that is killed at any step of an add leaves nothing visible or all of it, and the add can be run again."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import anndata as ad
import pandas as pd
import pytest
import scipy.sparse as sp

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.errors import DuplicateError
from raggedatlas.model.options import STEPS
from support.anndata_strategies import assert_same

FILE = "pbmc68k_reduced.h5ad"
POINTS = (
    ("plan", 1), ("lease", 1), ("block", 1), ("block", 8), ("block", 25), ("arrays", 1), ("frames", 1), ("columns", 1),
    ("features", 1), ("layouts", 1), ("cells", 1), ("records", 1), ("done", 1),
)  # fmt: skip
"""Where the process dies: just after a step was told for the n-th time; the file has 19 blocks of X and 19 of raw/X."""

ADD_AND_DIE = """
import os
import signal
import sys
from raggedatlas.atlas import RaggedAtlas
from raggedatlas.ingest import values
values.BLOCK_BYTES = 1
uri, file, step, left = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
def die(told, done, total):
    global left
    left -= told == step
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
RaggedAtlas.open(uri).add(file, progress=die)
"""


def earlier() -> ad.AnnData:
    """A dataset that is in the atlas before; it shares a gene and the layer X with the file."""
    obs = pd.DataFrame({"bulk_labels": ["a", "b"]}, index=["c0", "c1"])
    return ad.AnnData(
        sp.csr_matrix([[0.5, 0], [2, 3]]).astype("float32"), obs=obs, var=pd.DataFrame(index=["HES4", "own"])
    )


USUAL = {"lease", "block", "features", "cells", "records"}
"""Steps of the usual run; the others run nightly."""


def points(*left_out: str) -> list[Any]:
    """Return the points as parameters."""
    return [
        pytest.param(
            point,
            id=f"{point[0]}-{point[1]}",
            marks=[] if point[0] in USUAL and point[1] == 1 else [pytest.mark.nightly],
        )
        for point in POINTS
        if point[0] not in left_out
    ]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Callable[[tuple[str, int]], Path]:
    """Return a function that gives an atlas in which a process was killed at a point."""
    root = tmp_path_factory.mktemp("kill")
    atlas = RaggedAtlas.create(str(root / "before"))
    atlas.add(earlier(), "earlier", progress=False)
    atlas.snapshot()

    @cache
    def kill(point: tuple[str, int]) -> Path:
        place = root / f"{point[0]}-{point[1]}"
        shutil.copytree(root / "before", place)
        command = [sys.executable, "-c", ADD_AND_DIE, str(place), str(data_dir / FILE), point[0], str(point[1])]
        done = subprocess.run(command, capture_output=True, check=False, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        return place

    return kill


def groups(atlas: RaggedAtlas) -> set[str]:
    return {name for name in atlas._catalog.arrays.list_children() if name != "zarr.json"}


def check_whole(atlas: RaggedAtlas, source: ad.AnnData) -> None:
    """The earlier dataset and the file are there, once each, and equal to what they were made of."""
    assert sorted(atlas.list_datasets()["name"]) == ["earlier", "pbmc68k_reduced"]
    assert_same(source, atlas.dataset("pbmc68k_reduced").to_anndata())
    assert_same(earlier(), atlas.dataset("earlier").to_anndata())
    view = atlas.checkout(atlas.snapshot())
    assert [problem for problem in view.validate("deep") if problem.level == "must"] == []
    assert view.query().to_anndata().n_obs == 302


def test_every_step_is_tried() -> None:
    """The process is killed at each step of an add, and inside both of its matrices."""
    assert {step for step, _ in POINTS} == set(STEPS)


@pytest.mark.long
@pytest.mark.parametrize("point", points())
def test_killed_then_added_again(killed, data_dir, tmp_path, point) -> None:  # noqa: ANN001
    """Nothing or all is visible, all that is visible is sound, and a second add leaves exactly one dataset, equal to the source."""
    place = shutil.copytree(killed(point), tmp_path / "atlas")
    atlas = RaggedAtlas.open(str(place))
    source = ad.read_h5ad(data_dir / FILE)
    visible = point[0] in ("records", "done")
    assert len(atlas.list_datasets()) == 1 + visible
    assert [problem for problem in atlas.validate("deep") if problem.level == "must"] == []
    assert atlas.checkout(1).query().to_anndata().n_obs == 2
    number = atlas.snapshot()
    assert atlas.checkout(number).query().to_anndata().n_obs == 2 + visible * 300
    if visible:
        with pytest.raises(DuplicateError):
            atlas.add(data_dir / FILE, progress=False)
    else:
        assert atlas.add(data_dir / FILE, progress=False).status == "added"
    check_whole(atlas, source)


@pytest.mark.parametrize("fix", ["repair", "gc"])
@pytest.mark.parametrize("point", points("plan"))
def test_what_the_dead_left_is_freed(killed, tmp_path, point, fix) -> None:  # noqa: ANN001
    """repair() and gc() leave exactly the groups of the visible datasets, and repair() no other cells."""
    atlas = RaggedAtlas.open(str(shutil.copytree(killed(point), tmp_path / "atlas")))
    left = groups(atlas) - set(atlas.list_datasets().index)
    assert len(left) == (point[0] not in ("lease", "records", "done"))
    report = atlas.repair() if fix == "repair" else atlas.gc(dry_run=False)
    assert set(report.groups) == left
    assert groups(atlas) == set(atlas.list_datasets().index)
    if fix == "repair":
        n_cells = atlas._catalog.tables.read("cells", ["uid"]).num_rows
        assert n_cells == int(atlas.list_datasets()["n_cells"].sum())
        assert all(problem.level == "practice" for problem in atlas.validate("rows"))

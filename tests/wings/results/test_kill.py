"""A process that is killed at any step of adding a result leaves nothing visible or all of it; two that add at once lose nothing."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.catalog.catalog import CELLS
from raggedatlas.errors import DuplicateError
from raggedatlas.model.assets import result_columns
from raggedatlas.wings.results.attachment import RESULT_STEPS
from support.atlases import Modelled, make_modelled
from support.processes import started

POINTS = [*((step, "space") for step in RESULT_STEPS), ("column", "vector"), ("record", "vector")]
"""Where the process dies: just after a step was told."""

VISIBLE = ("record", "done")

ADD_AND_DIE = """
import os
import signal
import sys
from raggedatlas.atlas import RaggedAtlas
uri, folder, step, form = sys.argv[1:]
def die(told, done, total):
    if told == step:
        os.kill(os.getpid(), signal.SIGKILL)
RaggedAtlas.open(uri).add(folder, "z", as_=form, progress=die)
"""

ADD = """
import sys
from raggedatlas.atlas import RaggedAtlas
from raggedatlas.errors import DuplicateError
uri, folder, *names = sys.argv[1:]
atlas = RaggedAtlas.open(uri)
print("ready", flush=True)
sys.stdin.readline()
for name in names:
    try:
        atlas.add(folder, name, as_="vector" if name.startswith("v") else "space", progress=False)
    except DuplicateError:
        print("taken", name, flush=True)
"""


def points(*left_out: str) -> list[Any]:
    """Return the points as parameters; the usual run takes every third one."""
    return [
        pytest.param(point, id="-".join(point), marks=[] if i % 3 == 1 else [pytest.mark.nightly])
        for i, point in enumerate(POINTS)
        if point[0] not in left_out
    ]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, str]], Modelled]:
    """Return a function that gives an atlas in which a process was killed at a point."""
    root = tmp_path_factory.mktemp("kill")
    made = make_modelled(root / "before")

    @cache
    def kill(point: tuple[str, str]) -> Modelled:
        own = made.moved(root / "-".join(point))
        command = [sys.executable, "-c", ADD_AND_DIE, str(own.folder / "atlas"), str(own.folder / "z"), *point]
        done = subprocess.run(command, capture_output=True, check=False, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        return own

    return kill


def check(atlas: RaggedAtlas, own: Modelled, names: list[str]) -> None:
    view = atlas.checkout(atlas.snapshot())
    assert sorted(view.results().index) == sorted(names)
    assert view.validate("deep") == []
    if names:
        adata = view.query().with_results(names).to_anndata()
        for name in names:
            np.testing.assert_array_equal(adata.obsm[name], own.expected())


def groups(atlas: RaggedAtlas) -> set[str]:
    return {name for name in atlas._catalog.arrays.list_children() if name != "zarr.json"}


@pytest.mark.long
@pytest.mark.parametrize("point", points())
def test_killed_then_added_again(killed: Any, tmp_path: Path, point: tuple[str, str]) -> None:
    """Nothing or all is visible, all that is visible is sound, and a second add leaves exactly one result, equal to its source."""
    own = killed(point).moved(tmp_path / "own")
    atlas = own.open()
    visible = point[0] in VISIBLE
    assert len(atlas.results()) == visible
    assert atlas.validate("deep") == []
    check(atlas, own, ["z"] * visible)
    assert "z" not in atlas.checkout(1).query().to_anndata().obs
    if visible:
        with pytest.raises(DuplicateError):
            atlas.add(own.folder / "z", "z", as_=point[1], progress=False)
    else:
        atlas.add(own.folder / "z", "z", as_=point[1], progress=False)
    check(atlas, own, ["z"])


@pytest.mark.parametrize("point", points("plan"))
def test_what_the_dead_left_is_freed(killed: Any, tmp_path: Path, point: tuple[str, str]) -> None:
    """repair() leaves exactly the groups and columns of what is visible."""
    own = killed(point).moved(tmp_path / "own")
    atlas = own.open()
    atlas.repair()
    results = atlas.results()
    expected = set(atlas.list_datasets().index) | set(results["uid"][results["kind"] == "space"])
    assert groups(atlas) - set(results["uid"]) == expected - set(results["uid"])
    assert {uid for uid, _ in result_columns(atlas._catalog.tables.schema(CELLS)).values()} == set(results["uid"])
    check(atlas, own, list(results.index))


@pytest.mark.nightly
def test_two_processes_lose_nothing(tmp_path: Path) -> None:
    """Two processes that add results, one name of them the same, while datasets come and go: each name is there once, and whole."""
    own = make_modelled(tmp_path / "own")
    atlas = own.open()
    names = [["z0", "v0", "both"], ["z1", "v1", "both"]]
    place = [str(own.folder / "atlas"), str(own.folder / "z")]
    from support.atlases import small_anndata

    with ExitStack() as stack:
        processes = [
            stack.enter_context(started([sys.executable, "-c", ADD, *place, *each], stdin=subprocess.PIPE))
            for each in names
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for i in range(3):
            atlas.add(small_anndata(20 + i, 6), f"later-{i}", organism="human", progress=False)
        told = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    taken = [line for out, _ in told for line in out.splitlines() if line.startswith("taken")]
    assert taken == ["taken both"]
    assert sorted(atlas.results().index) == ["both", "v0", "v1", "z0", "z1"]
    view = atlas.checkout(atlas.snapshot())
    assert view.validate("deep") == []
    adata = view.query().with_results(["both", "v0", "v1", "z0", "z1"]).to_anndata()
    assert adata.n_obs == 25 + 18
    for name in adata.obsm:
        np.testing.assert_array_equal(adata.obsm[name], own.expected().reindex(adata.obs_names))
    shutil.rmtree(own.folder)

"""The example of a third-party package works as an installed package does: by its entry points alone."""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import raggedatlas as ra
from raggedatlas.catalog.assets import asset_kinds
from raggedatlas.errors import DuplicateError, MissingExtraError, SourceError
from raggedatlas.model import spaces
from raggedatlas.model.wings import asset_tables, installed_wings

EXAMPLE = Path(__file__).parent.parent / "examples" / "raggedatlas-myformat"
LINES = "AAAC-1\tguide2\t3\nAAAC-1\tguide1\t1\nAAAG-1\tguide2\t5\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install the example into a folder on the path: its package and the entry points that pip would write."""
    folder = tmp_path / "site"
    shutil.copytree(EXAMPLE / "src", folder)
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text("utf-8"))["project"]
    info = folder / "raggedatlas_myformat-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    (info / "entry_points.txt").write_text(
        "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups)
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(spaces, "_KNOWN", dict(spaces._KNOWN))
    cached = (installed_wings, asset_tables, asset_kinds)
    for function in cached:
        function.cache_clear()
    yield folder
    for function in cached:
        function.cache_clear()
    for name in [name for name in sys.modules if name.startswith("raggedatlas_myformat")]:
        del sys.modules[name]


def test_the_example_adds_a_format_a_space_and_a_command(site: Path, tmp_path: Path) -> None:
    """A file of the new format is added under the new space, comes back equal, and the new command reads it."""
    file = tmp_path / "screen.guides"
    file.write_text(LINES)

    class Cells(ra.HoxBaseSchema):
        guide_counts: ra.SparseZarrPointer | None = None

    atlas = ra.RaggedAtlas.create(str(tmp_path / "atlas"), Cells)
    atlas.add(tmp_path / "screen.guides", progress=False)
    query = atlas.checkout(atlas.snapshot()).query().spaces("guide_counts")
    assert query.to_anndata().to_df().to_numpy().sum() == 9
    copied = tmp_path / "copy.guides"
    ra.copy(file, copied)
    assert sorted(copied.read_text().splitlines()) == sorted(LINES.splitlines())
    query.write(str(tmp_path / "query.guides"))
    assert sorted(line.split("\t")[1:] for line in (tmp_path / "query.guides").read_text().splitlines()) == [
        ["guide1", "1"], ["guide2", "3"], ["guide2", "5"],
    ]  # fmt: skip
    with pytest.raises(DuplicateError):
        ra.open_sink(copied)
    run = subprocess.run(
        [Path(sys.executable).parent / "raggedatlas", "top-guides", tmp_path / "atlas", "--n", "1"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(site)},
    )  # fmt: skip
    assert (run.stdout, run.stderr, run.returncode) == ("guide2\t8\n", "", 0)


def test_the_example_adds_a_kind_of_asset(site: Path, tmp_path: Path) -> None:
    """What is attached to cells by another package is pinned, listed, compared, mirrored, checked, restored, dropped, freed and purged."""
    (tmp_path / "screen.guides").write_text(LINES)
    (tmp_path / "mine.library").write_text("guide1\tACGT\nguide2\tTTGA\n")

    class Cells(ra.HoxBaseSchema):
        guide_counts: ra.SparseZarrPointer | None = None

    atlas = ra.RaggedAtlas.create(str(tmp_path / "atlas"), Cells)
    atlas.add(tmp_path / "screen.guides", progress=False)
    first = atlas.snapshot()
    assert atlas.add(tmp_path / "mine.library", dataset="screen", progress=False).status == "added"
    with pytest.raises(DuplicateError, match="has a library 'mine'"):
        atlas.add(tmp_path / "mine.library", dataset="screen", progress=False)
    second = atlas.snapshot()
    assert "library mine: 2 cells, 2 guides of screen" in repr(atlas)
    assert atlas.list_assets("libraries").loc["mine", "n_guides"] == 2
    assert [*atlas.diff(first, second).assets_added] == ["libraries"]
    assert atlas.validate("deep") == []
    atlas.sync(tmp_path / "mirror")
    assert [*ra.RaggedAtlas.open(tmp_path / "mirror").list_assets("libraries").index] == ["mine"]

    (file,) = (tmp_path / "atlas" / "zarr_store").glob("*/library/guides.library")
    content = file.read_bytes()
    file.write_bytes(content.replace(b"A", b"C"))
    assert {(p.rule, p.level) for p in atlas.validate("deep")} == {("store-files", "must")}
    file.write_bytes(content)
    assert atlas.drop_asset("libraries", "mine").groups == (f"{file.parent.parent.name}/library",)
    atlas.gc(dry_run=False)
    assert file.exists()
    atlas.restore(second)
    assert [*atlas.list_assets("libraries").index] == ["mine"]
    atlas.purge("screen")
    assert not file.exists()
    assert len(atlas.list_assets("libraries")) == 0
    assert atlas.validate("deep") == []


def test_assets_of_a_package_that_is_not_installed_are_not_lost(site: Path, tmp_path: Path) -> None:
    """Without the package everything can be read, and what would lose its assets is refused."""
    (tmp_path / "mine.library").write_text("guide1\tACGT\n")
    code = """
import sys
import anndata as ad, numpy as np
import raggedatlas as ra
atlas = ra.RaggedAtlas.create(sys.argv[1])
atlas.add(ad.AnnData(np.eye(3, dtype=np.float32)), "screen", progress=False)
atlas.add(sys.argv[2], dataset="screen", progress=False)
atlas.snapshot()
"""
    run = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "atlas", tmp_path / "mine.library"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{Path(ra.__file__).parent.parent}"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    shutil.rmtree(site)
    installed_wings.cache_clear(), asset_tables.cache_clear(), asset_kinds.cache_clear()
    atlas = ra.RaggedAtlas.open(tmp_path / "atlas")
    assert atlas.checkout(1).query().to_anndata().shape == (3, 3)
    calls = (atlas.gc, atlas.snapshot, atlas.repair, lambda: atlas.restore(1), lambda: atlas.purge("screen"))
    for call in calls:
        with pytest.raises(MissingExtraError, match=r"tables \['_libraries'\]"):
            call()
    with pytest.raises(MissingExtraError, match="kind 'libraries'"):
        atlas.list_assets("libraries")
    assert len([*(tmp_path / "atlas" / "zarr_store").glob("*/library/guides.library")]) == 1


def test_without_the_extension_its_names_are_unknown(tmp_path: Path) -> None:
    """A suffix or space that no installed package registers is refused as before."""
    file = tmp_path / "screen.guides"
    file.write_text(LINES)
    with pytest.raises(SourceError, match=r"has the ending '\.guides'"):
        ra.open_source(file)
    with pytest.raises(SourceError, match=r"has the ending '\.guides'"):
        ra.open_sink(tmp_path / "other.guides")
    assert "guide_counts" not in spaces.known_spaces()


def test_a_broken_command_and_a_taken_name_change_nothing(site: Path) -> None:
    """A wing or command of another package that cannot be imported is named in a warning; the name of a built-in command stays ours."""
    points = site / "raggedatlas_myformat-0.1.dist-info" / "entry_points.txt"
    points.write_text("[raggedatlas.wings]\ntaken = taken:WING\ngone = no_such_module:WING\n")
    commands = "{'broken': 'no_such_module:run', 'ls': 'raggedatlas_myformat.command:top_guides'}"
    site.joinpath("taken.py").write_text(
        f"from raggedatlas.model.wings import Wing\nWING = Wing(name='taken', commands={commands})\n"
    )
    run = subprocess.run(
        [Path(sys.executable).parent / "raggedatlas", "--help"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(site)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "'broken' of another package cannot be loaded" in run.stderr
    assert "'gone' of another package cannot be loaded" in run.stderr
    assert "guides" not in run.stdout


def test_the_example_passes_the_tests_of_formats(site: Path) -> None:
    """Its own tests, which are those of `raggedatlas.testing.conformance`, pass outside this project."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(EXAMPLE), EXAMPLE / "tests"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(site)}, cwd=site,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
    assert "9 passed" in run.stdout

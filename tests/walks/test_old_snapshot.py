"""Snapshots do not rot: clean-up of the strictest kind leaves what they name, and removes what nothing names."""

import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import lance
import numpy as np
import pytest

import raggedatlas as ra
from raggedatlas.catalog.assets import GRACE
from raggedatlas.catalog.catalog import CELLS, DATASETS, open_catalog
from raggedatlas.catalog.collectors import KEEP
from raggedatlas.catalog.maintenance import gc
from raggedatlas.catalog.versions import list_versions
from raggedatlas.store.location import Location
from support.anndata_strategies import assert_same
from support.atlases import GENES, small_anndata

EIGHT_DAYS = timedelta(days=8)
LATER = KEEP - EIGHT_DAYS
"""An age that every version has reached, if the clock of a clean-up with the default age stands eight days ahead."""


def clean_by_gc(folder: str) -> None:
    gc(open_catalog(Location(folder)), dry_run=False, grace=GRACE - EIGHT_DAYS, keep=LATER)


def clean_by_lance(folder: str) -> None:
    for table in Path(folder, "lance_db").glob("*.lance"):
        lance.dataset(str(table)).cleanup_old_versions(older_than=LATER, error_if_tagged_old_versions=False)


@pytest.mark.parametrize("clean", [clean_by_gc, clean_by_lance])
def test_an_old_snapshot_reads_equal(tmp_path: Path, clean: Callable[[str], None]) -> None:
    """A snapshot that is eight days old, by the clean-up's clock, answers as it did.

    The versions between snapshots are gone afterwards: this clean-up does remove what no snapshot names.
    """
    atlas = ra.RaggedAtlas.create(str(tmp_path / "old.atlas"))
    atlas.add(small_anndata(1), "first", organism="human")
    number = atlas.snapshot("then")
    before = atlas.checkout(number).query().to_anndata()
    named = {table: {r.table_versions[table] for r in list_versions(atlas._catalog)} for table in (CELLS, DATASETS)}
    for seed in (2, 3):
        atlas.add(small_anndata(seed, genes=GENES[5:20], extra="age"), f"later-{seed}", organism="human")
    atlas.drop_dataset("first")
    unnamed = {table: atlas._catalog.tables.version(table) for table in (CELLS, DATASETS)}
    atlas.add(small_anndata(4), "last", organism="human")
    atlas.optimize()
    clean(atlas.uri)
    clean(atlas.uri)

    after = ra.RaggedAtlas.open(atlas.uri).checkout("then").query().to_anndata()
    np.testing.assert_array_equal(after.X.toarray(), before.X.toarray())
    assert after.obs.equals(before.obs)
    assert after.var.equals(before.var)
    assert after.varm["measured"].equals(before.varm["measured"])
    reopened = ra.RaggedAtlas.open(atlas.uri)
    assert reopened.validate("deep") == []
    assert reopened.list_datasets()["name"].tolist() == ["later-2", "later-3", "last"]
    for table in (CELLS, DATASETS):
        there = {entry["version"] for entry in lance.dataset(atlas._catalog.tables.uri(table)).versions()}
        assert named[table] <= there
        assert unnamed[table] not in there


CLEANED = """
import sys
from raggedatlas import RaggedAtlas
atlas = RaggedAtlas.open(sys.argv[1])
atlas.delete_cells("number < 5 OR number >= 170")
atlas.drop_dataset("d2")
for _ in range(2):
    atlas.snapshot()
    atlas.optimize()
    atlas.gc()
"""


@pytest.mark.long
def test_readers_go_on_while_another_process_cleans(tmp_path: Path) -> None:
    """A loader, a query and a lazy table that are open keep their cells while another process deletes, optimizes and frees."""
    folder = str(tmp_path / "atlas")
    atlas = ra.RaggedAtlas.create(folder)
    for part in range(4):
        data = small_anndata(part, 50)
        data.obs["number"] = np.arange(50) + 50 * part
        data.obs_names = [f"cell-{i}" for i in data.obs["number"]]
        atlas.add(data, f"d{part}", progress=False)
    view = atlas.checkout(atlas.snapshot())
    # Another reader of the same snapshot, so that nothing below is answered from what this one has read.
    expected = ra.RaggedAtlas.open(folder).checkout("1").query().order_by("number").to_anndata()
    values = dict(zip(expected.obs["number"], expected.X.toarray().sum(1), strict=True))
    batches = iter(ra.Loader(view.query(), 16, obs=["number"], seed=1))
    read = [next(batches)]
    subprocess.run([sys.executable, "-c", CLEANED, folder], check=True)
    read += batches
    seen = {
        number: total
        for batch in read
        for number, total in zip(batch.obs["number"], batch.X.toarray().sum(1), strict=True)
    }
    assert seen == values
    assert_same(view.query().order_by("number").to_anndata(), expected)
    left = atlas.checkout(atlas.snapshot()).query().to_anndata()
    assert sorted(left.obs["number"]) == [n for n in range(5, 170) if not 100 <= n < 150]
    assert dict(zip(left.obs["number"], left.X.toarray().sum(1), strict=True)).items() <= values.items()

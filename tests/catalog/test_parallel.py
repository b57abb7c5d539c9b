"""Many processes at once: nothing lost, nothing twice, every snapshot whole."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from raggedatlas.catalog import optimization, snapshots, validation
from raggedatlas.catalog.assets import read_records
from raggedatlas.catalog.catalog import CELLS, LAYOUTS, Catalog
from support.atlases import SPACE
from support.processes import started

ADD = """
import sys
import time
import numpy as np
from raggedatlas.catalog.catalog import open_catalog
from raggedatlas.catalog.snapshots import list_versions
from raggedatlas.store.location import Location
from support.atlases import write_dataset
catalog, me = open_catalog(Location(sys.argv[1])), int(sys.argv[2])
for i in range(5):
    for _ in range(300):
        if i == 0 or max((r.n_datasets for r in list_versions(catalog)), default=0) > 4 * (i - 1):
            break
        time.sleep(0.1)
    genes = [f"g{(me + i + k) % 9}" for k in range(5)] + [f"own{me}-{i}"]
    write_dataset(catalog, f"{me}-{i}", genes, np.full((6, 6), 1 + i, "u1"), {"kind": [str(me)] * 6, f"only{me}": [i] * 6})
"""

SNAPSHOT = """
import sys
from raggedatlas.catalog.catalog import open_catalog
from raggedatlas.catalog.snapshots import snapshot
from raggedatlas.store.location import Location
catalog = open_catalog(Location(sys.argv[1]))
for _ in range(int(sys.argv[2])):
    print(snapshot(catalog).version)
"""

SNAPSHOT_ALONG = """
import sys
import time
from raggedatlas.catalog.catalog import open_catalog
from raggedatlas.catalog.snapshots import snapshot
from raggedatlas.store.location import Location
catalog = open_catalog(Location(sys.argv[1]))
end = time.monotonic() + 240
while snapshot(catalog).n_datasets < int(sys.argv[2]):
    assert time.monotonic() < end, "those who add did not come to their end"
    time.sleep(0.05)
"""


def run(catalog: Catalog, jobs: Sequence[tuple[str, int]]) -> list[str]:
    """Run scripts at once, each in a process of its own, and return what they print."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                started([sys.executable, "-W", "error", "-c", script, catalog.location.uri, str(number)])
            )
            for script, number in jobs
        ]
        said = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0] * len(jobs), "\n".join(errors for _, errors in said)
    return [printed for printed, _ in said]


@pytest.mark.long
def test_parallel_snapshots_get_different_numbers(two: tuple[Catalog, str, str]) -> None:
    """Four processes that snapshot at once record as many snapshots as they took, each with its own number."""
    catalog = two[0]
    printed = run(catalog, [(SNAPSHOT, 3)] * 4)
    numbers = sorted(int(line) for text in printed for line in text.split())
    assert numbers == list(range(1, 13))
    records = snapshots.list_versions(catalog)
    assert [record.version for record in records] == numbers
    for record in records:
        assert catalog.tables.tags(CELLS)[record.tag] == record.table_versions[CELLS]
        assert not validation.validate(catalog.at(record), "rows")


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_four_add_while_a_fifth_snapshots(atlas: Catalog) -> None:
    """Nothing is lost, no feature is twice there, indices are contiguous, and every snapshot opens and validates."""
    run(atlas, [*((ADD, i) for i in range(4)), (SNAPSHOT_ALONG, 20)])
    records = read_records(atlas)
    assert len(records) == len({record.uid for record in records}) == 20
    assert atlas.tables.count(CELLS) == 120
    optimization.optimize(atlas)
    assert validation.validate(atlas, "deep") == []
    index = atlas.tables.read(f"{SPACE}_registry", ["global_index"]).column(0).to_pylist()
    assert sorted(index) == list(range(9 + 20))
    layouts = atlas.tables.read(LAYOUTS, ["layout_uid", "local_index"]).to_pylist()
    assert len(layouts) == len({tuple(row.values()) for row in layouts})
    found = snapshots.list_versions(atlas)
    assert [record.version for record in found] == list(range(1, len(found) + 1))
    assert len({record.n_datasets for record in found}) >= 4
    for record in found:
        view = atlas.at(record)
        assert not [p for p in validation.validate(view, "deep") if p.level == "must"]
        assert record.n_cells == 6 * record.n_datasets == 6 * len(read_records(view))

"""Many processes at once: nothing lost, nothing twice, every snapshot whole."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from raggedatlas.catalog import snapshots, validation
from raggedatlas.catalog.catalog import CELLS, Catalog
from support.processes import started

SNAPSHOT = """
import sys
from raggedatlas.catalog.catalog import open_catalog
from raggedatlas.catalog.snapshots import snapshot
from raggedatlas.store.location import Location
catalog = open_catalog(Location(sys.argv[1]))
for _ in range(int(sys.argv[2])):
    print(snapshot(catalog).version)
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

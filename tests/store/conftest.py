"""Locations in a folder and in a bucket, and the levels of vector instructions."""

from collections.abc import Iterator

import pytest

from raggedatlas.store.location import Location
from raggedatlas.store.native import LEVELS, library
from support.object_store import Remote


@pytest.fixture
def s3(remote: Remote) -> Location:
    return Location(remote.uri, remote.options)


@pytest.fixture
def local(tmp_path) -> Location:  # noqa: ANN001
    return Location(str(tmp_path / "zarr_store"))


@pytest.fixture(params=range(len(LEVELS)), ids=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    """Use each level that this machine has."""
    best = library().ra_best_level()
    if request.param > best:
        pytest.skip(f"this machine has no {LEVELS[request.param]}")
    library().ra_set_level(request.param)
    yield request.param
    library().ra_set_level(best)

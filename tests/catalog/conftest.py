"""Small atlases, and a way to let a process die before any of its writes."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from raggedatlas.catalog import optimization
from raggedatlas.catalog.catalog import Catalog, create_catalog
from raggedatlas.store.location import Location
from raggedatlas.store.tables import Tables
from raggedatlas.store.upkeep import RowRemoval
from support.atlases import write_dataset

WRITES = (
    "append", "append_alone", "merge", "delete", "delete_rows", "delete_at", "overwrite_if", "tag", "untag", "restore", "update_metadata", "update_metadata_if",
)  # fmt: skip
FILES = ("write_bytes", "delete_prefix")
FUNCTIONS = ("compact", "index")


class DiedError(BaseException):
    """Stands for the end of the process: no handler of the library may catch it."""


@pytest.fixture
def atlas(tmp_path: Path) -> Catalog:
    return create_catalog(Location(str(tmp_path / "atlas")))


@pytest.fixture
def two(atlas: Catalog) -> tuple[Catalog, str, str]:
    """An atlas of two datasets that share one gene, and their uids."""
    rng = np.random.default_rng(0)
    first = write_dataset(atlas, "a", ["A", "B", "C"], rng.poisson(0.7, (30, 3)).astype("u1"), {"kind": ["x"] * 30})
    second = write_dataset(atlas, "b", ["B", "D"], rng.poisson(0.7, (20, 2)).astype("u1"), {"kind": ["y"] * 20})
    return atlas, first, second


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], contextlib.AbstractContextManager[list[str]]]:
    """Give a context in which the process dies before its n-th write to a table; it lists the writes that were done.

    With `files`, those of single files and the removal of folders count too.
    """

    @contextlib.contextmanager
    def context(n: int, *, files: bool = False) -> Iterator[list[str]]:
        done: list[str] = []

        def patched(owner: object, name: str) -> Callable[..., object]:
            original = getattr(owner, name)

            def call(tables: object, *args: object, **kwargs: object) -> object:
                if len(done) == n:
                    raise DiedError
                done.append(" ".join([name, *(str(argument) for argument in args[:1])]))
                return original(tables, *args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            of_files = ("delete_objects", *(FILES if files else ()))
            owners = ((Tables, WRITES), (Location, of_files), (optimization, FUNCTIONS), (RowRemoval, ("write",)))
            for owner, names in owners:
                for name in names:
                    patch.setattr(owner, name, patched(owner, name))
            with contextlib.suppress(DiedError):
                yield done

    return context

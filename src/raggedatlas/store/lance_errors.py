"""Lance's errors as ours: what was lost in a race, what is missing, what is damaged, and what failed."""

import contextlib
from collections.abc import Iterator

import pyarrow as pa

from raggedatlas.errors import AtlasError, ConflictError, CorruptError, NotFoundError, StoreError
from raggedatlas.store.failures import failure, lance_kind, plain_reason

LANCE_ERRORS = (OSError, ValueError, RuntimeError, NotImplementedError, pa.ArrowException)
"""What Lance raises, and Arrow on what Lance gives it."""


def is_panic(error: BaseException) -> bool:
    """Tell whether Lance's code in Rust panicked; pyo3 raises that as a `BaseException` without a public name."""
    return type(error).__name__ == "PanicException"


def panicked(place: str, error: BaseException) -> CorruptError:
    """Say that Lance failed on what it read."""
    reason = str(error).split("\n", 1)[0]
    return CorruptError(
        f"Lance cannot read {place} ({reason}); its files are damaged. Run validate('deep'), and restore the atlas from a copy."
    )


@contextlib.contextmanager
def lance_errors(place: str) -> Iterator[None]:
    """Turn Lance's errors into ours.

    `ConflictError` for lost races, `NotFoundError` for what is not there, `CorruptError` for a panic, else `StoreError`.
    """
    try:
        yield
    except AtlasError:
        raise
    except BaseException as error:
        if is_panic(error):
            raise panicked(place, error) from error
        if not isinstance(error, LANCE_ERRORS):
            raise
        kind = lance_kind(error)
        if kind == "conflict":
            raise ConflictError(f"Another writer changed {place} at the same time: {plain_reason(error)}.") from error
        if kind == "missing":
            raise NotFoundError(f"{place} is not there: {plain_reason(error)}.") from error
        raise StoreError(f"{place}: {failure(error)}") from error

"""Lance's errors as ours: what was lost in a race, and what failed."""

import contextlib
import re
from collections.abc import Iterator

from raggedatlas.errors import AtlasError, ConflictError, StoreError

_CONFLICTS = ("conflict", "concurrent", "Retryable", "retries")
_PATH = re.compile(r"\S*/\S*")


@contextlib.contextmanager
def lance_errors(place: str) -> Iterator[None]:
    """Turn Lance's errors into ours: `ConflictError` for lost races, `StoreError` for the rest."""
    try:
        yield
    except AtlasError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        text = str(error).split("\n", 1)[0]
        # A path may hold one of the words.
        said = _PATH.sub("", text.replace(place.partition("://")[2] or place.lstrip("/"), ""))
        if any(word in said for word in _CONFLICTS) or "Conflict" in type(error).__name__:
            raise ConflictError(f"Another writer changed {place} at the same time: {text}") from error
        raise StoreError(f"{place}: {text}. Check that the place exists, is writable, and has space left.") from error

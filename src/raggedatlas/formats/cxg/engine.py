"""The one door to TileDB: the library, its context, and arrays opened with errors that say what to do."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from raggedatlas.errors import AtlasError, MissingExtraError, SourceError, StoreError
from raggedatlas.formats.cxg.soundness import refuse_wild_sizes
from raggedatlas.store.runtime import DECODE_THREADS

BUFFER_BYTES = 1 << 20
"""What a read takes per attribute to begin with; point reads are several times slower with the library's 10 MB."""


def open_tiledb() -> Any:  # noqa: ANN401  (a module)
    """Import TileDB.

    Raises
    ------
    MissingExtraError
        If it is not installed.

    Examples
    --------
    >>> open_tiledb().__name__
    'tiledb'
    """
    try:
        import tiledb
    except ImportError as error:
        raise MissingExtraError(
            "CXG is read and written by the package tiledb; install it with: pip install 'raggedatlas[cxg]'."
        ) from error
    return tiledb


def context() -> Any:  # noqa: ANN401  (a tiledb.Ctx)
    """Return the TileDB context of this process, with few threads and small buffers.

    A forked child has another process id and so its own context; the threads of its parent's would never answer.
    """
    return _context(os.getpid())


@cache
def _context(pid: int) -> Any:  # noqa: ANN401
    del pid
    tiledb = open_tiledb()
    return tiledb.Ctx(
        {
            "sm.compute_concurrency_level": str(DECODE_THREADS),
            "sm.io_concurrency_level": str(DECODE_THREADS),
            "py.init_buffer_bytes": str(BUFFER_BYTES),
            # Its handler of Ctrl-C calls the one before, and crashes where that is none: in jobs that a script starts.
            "sm.enable_signal_handlers": "false",
        }
    )


def low_level() -> Any:  # noqa: ANN401  (a module)
    """Return the library's low-level module where it can write in global order, else None.

    The way there has a private name, `Query._submit`, which a release may take away.
    """
    engine = getattr(open_tiledb(), "libtiledb", None)
    names = ("Query", "QueryType", "LayoutType")
    whole = all(hasattr(engine, name) for name in names) and hasattr(getattr(engine, "Query", None), "_submit")
    return engine if whole else None


def uri_of(path: Path) -> str:
    """Name a place for TileDB: whole, since it takes what is relative from the folder where the process was when it first asked."""
    return str(path.absolute())


@contextmanager
def open_array(path: Path, mode: str = "r") -> Iterator[Any]:
    """Open an array, to read (``"r"``) or write (``"w"``), and close it at the end.

    Raises
    ------
    SourceError
        If it is damaged or absent, also where a read finds so within the ``with``.
    StoreError
        If a write is refused.
    """
    tiledb = open_tiledb()
    with answering(path, writes=mode == "w"):
        if mode == "r":
            refuse_wild_sizes(path)
        opened = tiledb.open(uri_of(path), mode, ctx=context())
        try:
            yield opened
        finally:
            opened.close()


def attribute_names(schema: Any) -> list[str]:  # noqa: ANN401  (a tiledb.ArraySchema)
    """List the attributes of an array, the anonymous one as ``""``.

    ``schema.has_attr("")`` is False for arrays that TileDB 1 wrote, where the anonymous attribute is stored under another name.
    """
    return [schema.attr(i).name for i in range(schema.nattr)]


def query_of(array: Any, *names: str, **options: Any) -> Any:  # noqa: ANN401  (a tiledb.Array, a tiledb query)
    """Query attributes of an open array, in any order.

    Parameters
    ----------
    array : tiledb.Array
        Open for reading.
    *names : str
        Its attributes that are read. All of them are asked for without names, since TileDB does not find the anonymous attribute
        of arrays of TileDB 1 by any name.
    **options
        Of ``Array.query``.
    """
    every = set(names) == set(attribute_names(array.schema))
    return array.query(attrs=None if every else list(names), **options)


@contextmanager
def answering(path: Path, *, writes: bool = False) -> Iterator[None]:
    """Turn TileDB's errors into ours: damage of what is read, refusal of what is written."""
    tiledb = open_tiledb()
    try:
        yield
    except AtlasError:
        raise
    except (tiledb.TileDBError, OSError, UnicodeError) as error:
        said = " ".join(str(error).split())
        if writes:
            raise StoreError(
                f"C01: {path} cannot be written ({said:.300}), so no TileDB group can be made there; check the folder, its permissions and the space left."
            ) from error
        raise SourceError(
            f"C00: {path} cannot be opened or decoded ({said:.300}); it is damaged or incomplete. Fetch or write the CXG again."
        ) from error

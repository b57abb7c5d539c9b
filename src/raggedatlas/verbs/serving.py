"""Serve cells with CELLxGENE Explorer: the CXG that it takes is prepared, then its web client is launched."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from raggedatlas.errors import SourceError
from raggedatlas.verbs.explorer import ExplorerServer, require_explorer

if TYPE_CHECKING:
    from raggedatlas.query.query import Query

PROFILE = "0.2.0"
"""What cellxgene 0.16.8 serves."""

ENDING = ".cxg"
SYMBOL = "symbol"
"""The column of features in an atlas by which they are shown."""

NAME = f"cells{ENDING}"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A CXG that can be served.

    Parameters
    ----------
    path : Path
        Its folder.
    made : bool
        Whether it was written for this; False where what was given can be served as it is.
    """

    path: Path
    made: bool


def is_served(path: str | Path) -> bool:
    """Say whether cellxgene 0.16.8 takes a CXG as it is: of version 0.2.0 or older, and with X as one array.

    Raises
    ------
    SourceError
        If it is damaged.

    Examples
    --------
    >>> from raggedatlas.testing.cxgs import write_cxg
    >>> (
    ...     is_served(write_cxg(tempfile.mkdtemp() + "/x.cxg", "sparse")),
    ...     is_served(write_cxg(tempfile.mkdtemp() + "/x.cxg")),
    ... )
    (True, False)
    """
    from raggedatlas.formats.cxg.inspection import detect
    from raggedatlas.formats.cxg.schema import VERSIONS

    found = detect(path)
    return found.version in VERSIONS[: VERSIONS.index(PROFILE) + 1] and found.layout in ("dense", "sparse")


def prepare(
    what: "Query | str | Path | Any",  # noqa: ANN401  (anything that can be read)
    target: str | Path,
    **options: Any,  # noqa: ANN401  (fields of CxgOptions)
) -> Prepared:
    """Make a CXG of cells that cellxgene 0.16.8 serves.

    Parameters
    ----------
    what : Query, path, AnnData or Source
        Cells of an atlas, or anything that `open_source` takes.
    target : str or Path
        The folder to write, which ends in ``.cxg``; not written where `what` is a CXG that is served as it is.
    **options
        How it is written, as `formats.cxg.options.CxgOptions` has them: ``title``, ``embeddings``, ``compute_embedding``, ``x``,
        ``overwrite``, ``strict``, ``on_losses``. The profile is 0.2.0.

    Returns
    -------
    Prepared
        Where it is.

    Raises
    ------
    SourceError
        If it cannot become a CXG, for want of an embedding say (C22).
    DuplicateError
        If the target exists.
    """
    from raggedatlas.formats.copying import copy
    from raggedatlas.formats.cxg.inspection import is_cxg
    from raggedatlas.formats.registry import open_sink
    from raggedatlas.query.query import Query

    if isinstance(what, str | Path) and is_cxg(Path(what)) and is_served(what):
        return Prepared(Path(what), made=False)
    if Path(target).suffix != ENDING:
        raise SourceError(f"{target} is no name for a CXG; let it end in {ENDING}.")
    chosen = {"profile": PROFILE, **{name: value for name, value in options.items() if value is not None}}
    if isinstance(what, Query):
        # Cells of an atlas are shown by the symbols of their genes, which people look for, and not by ids.
        chosen = {"var_index": SYMBOL, **chosen} if _has_symbols(what) else chosen
        return Prepared(Path(what.write(str(target), **chosen)), made=True)
    return Prepared(Path(copy(what, open_sink(target, **chosen))), made=True)


def _has_symbols(query: "Query") -> bool:
    found = query.limit(1).to_anndata()
    return SYMBOL in found.var and bool(found.var[SYMBOL].notna().any())


class Served:
    """A CXG and the server of it; what was written for it into a temporary folder goes away at the end.

    Parameters
    ----------
    server : ExplorerServer
        What serves.
    path : Path
        The CXG.
    folder : Path, optional
        What is removed at the end.
    """

    def __init__(self, server: ExplorerServer, path: Path, folder: Path | None) -> None:
        self._server = server
        self.path = path
        self._folder = folder

    @property
    def url(self) -> str:
        """Address of the page."""
        return self._server.url

    def wait(self) -> None:
        """Serve until Ctrl-C."""
        self._server.wait()

    def close(self) -> None:
        """Stop serving, and remove what was written for it."""
        self._server.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        """Serve within a block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop at its end."""
        self.close()

    def __repr__(self) -> str:
        """Say where the page is."""
        return f"Served {self.path} at {self.url}"


def serve(
    what: "Query | str | Path | Any",  # noqa: ANN401  (anything that can be read)
    *,
    target: str | Path | None = None,
    port: int = 0,
    title: str | None = None,
    **options: Any,  # noqa: ANN401  (those of `prepare`)
) -> Served:
    """Serve cells with the web client of CELLxGENE Explorer, on loopback.

    Parameters
    ----------
    what : Query, path, AnnData or Source
        Cells of an atlas, or anything that `open_source` takes; a CXG that can be served is served as it is.
    target : str or Path, optional
        Where the CXG is kept; None takes a temporary folder that goes away at the end.
    port : int
        Port; 0 takes a free one.
    title : str, optional
        What the page is called.
    **options
        Of `prepare`: ``embeddings``, ``compute_embedding``, ``x``, ``overwrite``, ...

    Returns
    -------
    Served
        It serves already; close it, or use it in a ``with``.

    Raises
    ------
    MissingExtraError
        If cellxgene is not here, before anything is written; the message says how to get it.
    SourceError, StoreError
        If the cells cannot become a CXG, or the server refuses it.

    Examples
    --------
    >>> with serve("tests/data/pbmc68k_reduced.h5ad") as page:  # doctest: +SKIP
    ...     print(page.url)
    ...     page.wait()
    """
    program = require_explorer()
    folder = None if target is not None else Path(tempfile.mkdtemp(prefix="raggedatlas-serve-"))
    try:
        at = Path(target) if target is not None else Path(str(folder)) / NAME
        found = prepare(what, at, title=title, **options)
        server = ExplorerServer(found.path, port=port, title=title, program=program)
    except BaseException:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return Served(server, found.path, folder)

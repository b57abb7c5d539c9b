"""The web client of CELLxGENE Explorer on loopback: cellxgene 0.16.8, in an environment of its own, serving one CXG."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from raggedatlas.errors import MissingExtraError, NotFoundError, SourceError, StoreError

if TYPE_CHECKING:
    from raggedatlas.query.query import Query

LOOPBACK = "127.0.0.1"
VARIABLE = "RAGGEDATLAS_EXPLORER"
"""Environment variable that names the environment, or the program in it."""

FOLDER = ".venv-explorer"
PROGRAM = "cellxgene"
API = "api/v0.2"
PATIENCE = 120.0
"""Seconds until a server that does not answer is given up."""

REQUIREMENTS = Path(__file__).with_name("explorer-requirements.txt")
"""Releases that work together; those that cellxgene itself asks for do not any more, so none is resolved."""

PYTHON = "3.11"

HOW = (
    f"install it with raggedatlas serve --install, which needs Python {PYTHON} on the path and the network; or by hand: python{PYTHON} -m venv DIR && "
    f"DIR/bin/pip install --no-deps -r {REQUIREMENTS}, where {VARIABLE}=DIR names it"
)

_ENDS = 10.0
_PAUSE = 0.1
_LOG_LINES = 3


def home() -> Path:
    """Return the folder of this user where `install_explorer` makes the environment: below ``$XDG_DATA_HOME``, or ``~/.local/share``."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "raggedatlas" / "explorer"


def install_explorer(python: str | Path | None = None) -> Path:
    """Make the environment of cellxgene from the pinned requirements that this package ships.

    Parameters
    ----------
    python : str or Path, optional
        Interpreter of Python 3.11; None takes this one, or ``python3.11`` from the path.

    Returns
    -------
    Path
        The program, where `find_explorer` finds it. What is there already is kept.

    Raises
    ------
    MissingExtraError
        If there is no such Python.
    StoreError
        If the environment cannot be made; nothing of it is left.
    """
    found = find_explorer()
    if found is not None:
        return found
    own = sys.executable if sys.version_info[:2] == (3, 11) else shutil.which(f"python{PYTHON}")
    chosen = python or own
    if chosen is None:
        raise MissingExtraError(
            f"cellxgene needs Python {PYTHON}, and there is no python{PYTHON} on the path; install it, or {HOW}."
        )
    folder = home()
    try:
        _run(chosen, "-m", "venv", "--clear", folder)
        _run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", REQUIREMENTS)
        _run(folder / "bin" / PROGRAM, "--version")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder / "bin" / PROGRAM


def _run(*line: str | Path) -> None:
    """Run a step of the installation; what it says last is the reason of a failure."""
    words = [str(word) for word in line]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, env=_environment(), check=False)
    except OSError as error:
        raise StoreError(f"{words[0]} cannot be run: {error.strerror}. Or {HOW}.") from error
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())
        raise StoreError(
            f"The environment of cellxgene cannot be made: {' '.join(words[:5])} ... said {said[-300:] or 'nothing'}"
        )


def find_explorer() -> Path | None:
    """Find the program: where the variable RAGGEDATLAS_EXPLORER says, in `.venv-explorer` here, or where `install_explorer` put it.

    Returns
    -------
    Path or None
        None where there is none.

    Raises
    ------
    NotFoundError
        If the variable names something that is not there.
    """
    named = os.environ.get(VARIABLE)
    if named:
        found = next((at for at in (Path(named) / "bin" / PROGRAM, Path(named)) if at.is_file()), None)
        if found is None:
            raise NotFoundError(f"{VARIABLE} names {named}, where there is no {PROGRAM}; {HOW}.")
        return found.absolute()
    places = (Path.cwd() / FOLDER, Path(__file__).parents[3] / FOLDER, home())
    return next((at for place in places if (at := place / "bin" / PROGRAM).is_file()), None)


def require_explorer() -> Path:
    """Find the program, or say how to get it.

    Raises
    ------
    MissingExtraError
        If there is none.
    """
    found = find_explorer()
    if found is None:
        raise MissingExtraError(f"The web client of CELLxGENE Explorer is not here; {HOW}.")
    return found


class ExplorerServer:
    """Serves one CXG to this machine's browsers until it is closed.

    Parameters
    ----------
    path : str or Path
        A CXG of version 0.2.0 or older.
    port : int
        Port on loopback; 0 takes a free one.
    title : str, optional
        What the page is called; None takes what the CXG says.
    program : Path, optional
        Which cellxgene; None looks for it.
    patience : float
        Seconds to wait until it answers.

    Raises
    ------
    MissingExtraError
        If there is no cellxgene.
    NotFoundError
        If there is no such folder.
    StoreError
        If it does not serve the CXG, with what it said.

    Notes
    -----
    cellxgene has no password: every user of this machine can open the address while it serves, and no other machine can. Annotations
    are switched off, so that nothing is written.

    Examples
    --------
    >>> with ExplorerServer("cells.cxg") as server:  # doctest: +SKIP
    ...     print(server.url)
    ...     server.wait()
    """

    def __init__(
        self,
        path: str | Path,
        *,
        port: int = 0,
        title: str | None = None,
        program: Path | None = None,
        patience: float = PATIENCE,
    ) -> None:
        path = Path(path)
        if not path.is_dir():
            raise NotFoundError(f"There is no folder {path} to serve; check the path.")
        program = program or require_explorer()
        self.port = port or _free_port()
        line = [str(program), "launch", str(path.absolute()), "--host", LOOPBACK, "--port", str(self.port)]
        line += ["--disable-annotations", *(["--title", title] if title else [])]
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (`close` closes it)
        try:
            # In a session of its own, so that Ctrl-C comes to us alone and the server is ended in order.
            self._process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
            )
            self._wait_for_answer(path, patience)
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{LOOPBACK}:{self.port}/"

    @property
    def is_alive(self) -> bool:
        """Whether it still serves."""
        return self._process is not None and self._process.poll() is None

    def wait(self) -> None:
        """Serve until Ctrl-C, or until the server ends by itself."""
        try:
            if self._process is not None:
                self._process.wait()
        except KeyboardInterrupt:
            self.close()

    def close(self) -> None:
        """Stop serving; the server is gone after, also where a second Ctrl-C comes while it ends in order."""
        try:
            if self._process is not None:
                end(self._process)
        finally:
            self._log.close()

    def said(self) -> str:
        """Give the last lines that it wrote."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return " ".join(" ".join(line.split()) for line in lines[-_LOG_LINES:]) or "nothing"

    def _wait_for_answer(self, path: Path, patience: float) -> None:
        end = time.monotonic() + patience
        while not _answers(f"{self.url}{API}/config"):
            if not self.is_alive:
                raise StoreError(
                    f"cellxgene does not serve {path}; it said: {self.said():.500}. Check it with: raggedatlas validate {path}"
                )
            if time.monotonic() > end:
                raise StoreError(
                    f"cellxgene did not answer on {self.url} within {patience:g} s; it said: {self.said():.500}."
                )
            time.sleep(_PAUSE)

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
        return f"ExplorerServer at {self.url}"


def end(process: "subprocess.Popen[Any]", patience: float = _ENDS) -> None:
    """Ask a process to end, and kill it where it does not; it has been waited for in any case.

    Parameters
    ----------
    process : subprocess.Popen
        A child.
    patience : float
        Seconds until it is killed.

    Examples
    --------
    >>> process = subprocess.Popen(["sleep", "60"])
    >>> end(process)
    >>> process.returncode
    -15
    """
    try:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience)
    finally:
        # Whatever stopped the wait, nothing stops a kill.
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _environment() -> dict[str, str]:
    """Give the environment without what would lead another Python astray."""
    away = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP", "PYTHONWARNINGS"}
    return {key: value for key, value in os.environ.items() if key not in away} | {"PYTHONUNBUFFERED": "1"}


def _answers(address: str) -> bool:
    # Without proxies: the address is this machine's.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(address, timeout=_ENDS) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError:
        return False
    except OSError:
        return False


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
    >>> from raggedatlas.testing.cxg_files import write_cxg
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

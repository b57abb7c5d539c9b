"""CELLxGENE Explorer on loopback: prepare a CXG that cellxgene 0.16.8 accepts, and serve it from a separate environment."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raggedatlas.errors import MissingExtraError, NotFoundError, SourceError, StoreError
from raggedatlas.store.cache_folder import user_folder
from raggedatlas.store.location import as_path, local_path
from raggedatlas.store.loopback import LOOPBACK, LoopbackServer

if TYPE_CHECKING:
    from raggedatlas.query.query import Query

VARIABLE = "RAGGEDATLAS_EXPLORER"
"""Environment variable that names the environment, or the program in it."""

FOLDER = ".venv-explorer"
PROGRAM = "cellxgene"
API = "api/v0.2"
STARTUP_TIMEOUT = 120.0
"""Seconds to wait for the first answer of the server."""

REQUIREMENTS = Path(__file__).with_name("explorer-requirements.txt")
"""Pinned releases that work together. The versions that cellxgene itself requires no longer do, so pip resolves nothing."""

PYTHON = "3.11"

INSTALL_HINT = (
    f"install it with raggedatlas serve --install, which needs Python {PYTHON} on the path and the network; or by hand: python{PYTHON} -m venv DIR && "
    f"DIR/bin/pip install --no-deps -r {REQUIREMENTS}, where {VARIABLE}=DIR names it"
)

_STOP_TIMEOUT = 10.0
_PAUSE = 0.1
_LOG_LINES = 3


def install_folder() -> Path:
    """Return the folder where `install_explorer` creates the environment: below ``$XDG_DATA_HOME``, or ``~/.local/share``."""
    folder = user_folder("XDG_DATA_HOME", ".local/share")
    if folder is None:
        raise StoreError("There is no home directory to install cellxgene in; set XDG_DATA_HOME to a folder.")
    return folder / "raggedatlas" / "explorer"


def install_explorer(python: str | Path | None = None) -> Path:
    """Create the environment of cellxgene from the pinned requirements in this package.

    Parameters
    ----------
    python : str or Path, optional
        Interpreter of Python 3.11; by default this one, or ``python3.11`` from the path.

    Returns
    -------
    Path
        The program, where `find_explorer` finds it. An existing installation is kept.

    Raises
    ------
    MissingExtraError
        If there is no such Python.
    NotFoundError
        If the variable RAGGEDATLAS_EXPLORER names a path that does not exist.
    StoreError
        If the environment cannot be created; nothing of it remains.
    """
    found = find_explorer()
    if found is not None:
        return found
    own = sys.executable if sys.version_info[:2] == (3, 11) else shutil.which(f"python{PYTHON}")
    chosen = python or own
    if chosen is None:
        raise MissingExtraError(
            f"cellxgene needs Python {PYTHON}, and there is no python{PYTHON} on the path; install it, or {INSTALL_HINT}."
        )
    folder = install_folder()
    try:
        _run_command(chosen, "-m", "venv", "--clear", folder)
        _run_command(
            folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", REQUIREMENTS
        )
        # Started once, because `find_explorer` takes any file of this name for an installation.
        _run_command(folder / "bin" / PROGRAM, "--version")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder / "bin" / PROGRAM


def _run_command(*line: str | Path) -> None:
    """Run a step of the installation, and report its last output on failure."""
    words = [str(word) for word in line]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, env=_environment(), check=False)
    except OSError as error:
        raise StoreError(f"{words[0]} cannot be run: {error.strerror}. Or {INSTALL_HINT}.") from error
    if done.returncode:
        reason = " ".join(done.stderr.decode(errors="replace").split())
        raise StoreError(
            f"The environment of cellxgene cannot be made: {' '.join(words[:5])} ... said {reason[-300:] or 'nothing'}"
        )


def find_explorer() -> Path | None:
    """Find the program; return None if it is not installed.

    The variable RAGGEDATLAS_EXPLORER names it; without, it is looked for in `.venv-explorer` of the working directory,
    then of the checkout that this package is imported from, and where `install_explorer` puts it. Raises
    `NotFoundError` if the variable names a path that does not exist.
    """
    named = os.environ.get(VARIABLE)
    if named:
        found = next((at for at in (Path(named) / "bin" / PROGRAM, Path(named)) if at.is_file()), None)
        if found is None:
            raise NotFoundError(f"{VARIABLE} names {named}, where there is no {PROGRAM}; {INSTALL_HINT}.")
        return found.absolute()
    places = [Path.cwd() / FOLDER, Path(__file__).parents[4] / FOLDER]
    with contextlib.suppress(StoreError):
        places.append(install_folder())
    return next((at for place in places if (at := place / "bin" / PROGRAM).is_file()), None)


def require_explorer() -> Path:
    """Find the program, or raise an error that says how to install it."""
    found = find_explorer()
    if found is None:
        raise MissingExtraError(f"CELLxGENE Explorer is not installed; {INSTALL_HINT}.")
    return found


class ExplorerServer(LoopbackServer):
    """Server of one CXG of version 0.2.0 or older for the browsers of this machine.

    Port 0 picks a free one. `title` is that of the page, by default that of the CXG; `program` is by default that of
    `find_explorer`; `timeout` is the number of seconds to wait for the first answer, after which `StoreError` has the
    last output of the program. `temporary` is a folder that is removed when the server is closed.

    Notes
    -----
    cellxgene has no password: every user of this machine can open the address while it runs, and no other machine can. Annotations
    are disabled, so nothing is written.

    Examples
    --------
    >>> with ExplorerServer("cells.cxg") as server:  # doctest: +SKIP
    ...     print(server.url)
    ...     server.wait()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        port: int = 0,
        title: str | None = None,
        program: Path | None = None,
        timeout: float = STARTUP_TIMEOUT,
        temporary: Path | None = None,
    ) -> None:
        self.path = path = local_path(path)
        self._temporary = temporary
        if not path.is_dir():
            raise NotFoundError(f"There is no folder {path} to serve; check the path.")
        program = program or require_explorer()
        self.port = port
        if not port:
            with socket.socket() as probe:
                probe.bind((LOOPBACK, 0))
                # Free once the probe is closed. If another process takes it first, cellxgene cannot bind it and exits, which is then reported.
                self.port = int(probe.getsockname()[1])
        line = [str(program), "launch", str(path.absolute()), "--host", LOOPBACK, "--port", str(self.port)]
        line += ["--disable-annotations", *(["--title", title] if title else [])]
        self._process: subprocess.Popen[bytes] | None = None
        # A file, not a pipe: nobody reads it while the server runs, and a full pipe would block the server.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (`close` closes it)
        try:
            # A separate session: Ctrl-C reaches only this process, which then stops the server.
            self._process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
            )
            deadline = time.monotonic() + timeout
            while not _is_responding(f"{self.url}{API}/config"):
                if not self.is_alive:
                    raise StoreError(
                        f"cellxgene does not serve {path}; its output: {self.log_tail():.500}. Check it with: raggedatlas validate {path}"
                    )
                if time.monotonic() > deadline:
                    raise StoreError(
                        f"cellxgene did not answer on {self.url} within {timeout:g} s; its output: {self.log_tail():.500}."
                    )
                time.sleep(_PAUSE)
        except BaseException:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the server is running."""
        return self._process is not None and self._process.poll() is None

    def _join(self) -> None:
        if self._process is not None:
            self._process.wait()

    def close(self) -> None:
        """Stop the server, even if a second Ctrl-C arrives meanwhile."""
        try:
            if self._process is not None:
                terminate_process(self._process)
        finally:
            self._log.close()
            if self._temporary is not None:
                shutil.rmtree(self._temporary, ignore_errors=True)

    def log_tail(self) -> str:
        """Return the last lines of its output."""
        # The child writes at the same file offset; reading to the end puts it back.
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return " ".join(" ".join(line.split()) for line in lines[-_LOG_LINES:]) or "nothing"


def terminate_process(process: "subprocess.Popen[Any]", timeout: float = _STOP_TIMEOUT) -> None:
    """Terminate a child process, and kill it if it does not exit within `timeout` seconds; it is always waited for.

    Examples
    --------
    >>> process = subprocess.Popen(["sleep", "60"])
    >>> terminate_process(process)
    >>> process.returncode
    -15
    """
    try:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
    finally:
        # Also after an exception during the wait: no child outlives this call.
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    """Return the environment without variables that configure this Python, which is not the one that runs cellxgene."""
    away = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP", "PYTHONWARNINGS"}
    return {key: value for key, value in os.environ.items() if key not in away} | {"PYTHONUNBUFFERED": "1"}


def _is_responding(address: str) -> bool:
    # No proxy: the address is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(address, timeout=_STOP_TIMEOUT) as answer:
            return bool(answer.status == 200)
    except OSError:  # also an answer that is an error
        return False


PROFILE = "0.2.0"
"""Newest CXG version that cellxgene 0.16.8 serves."""

ENDING = ".cxg"
SYMBOL = "symbol"
"""Column of the feature registry used as display name."""

NAME = f"cells{ENDING}"


@dataclass(frozen=True, slots=True)
class PreparedCxg:
    """Result of `prepare`: a CXG that can be served."""

    path: Path
    written: bool  # False if the input can be served unchanged


def is_servable(path: Path) -> bool:
    """Return whether cellxgene 0.16.8 can serve a CXG unchanged: version 0.2.0 or older, with X as one array.

    Examples
    --------
    >>> import raggedatlas as ra
    >>> path = tempfile.mkdtemp() + "/x.cxg"
    >>> is_servable(Path(ra.copy("tests/data/pbmc68k_reduced.h5ad", path)))
    False
    """
    from raggedatlas.wings.cxg.inspection import detect
    from raggedatlas.wings.cxg.options import VERSIONS

    found = detect(path)
    return found.version in VERSIONS[: VERSIONS.index(PROFILE) + 1] and found.layout in ("dense", "sparse")


def prepare(
    what: "Query | str | os.PathLike[str] | Any",  # noqa: ANN401  (anything that can be read)
    target: str | os.PathLike[str],
    **options: Any,  # noqa: ANN401  (fields of CxgOptions)
) -> PreparedCxg:
    """Write cells to a CXG that cellxgene 0.16.8 can serve.

    Parameters
    ----------
    what : RaggedAtlas, AtlasView, Query, path, AnnData or Source
        Cells of an atlas (of its newest snapshot), or anything that `open_source` accepts.
    target : str or Path
        Folder to write, ending in ``.cxg``; not written if `what` is a CXG that can be served unchanged.
    **options
        Options of `CxgOptions`: ``title``, ``embeddings``, ``compute_embedding``, ``x``,
        ``overwrite``, ``strict``, ``on_losses``. The profile is 0.2.0.

    Returns
    -------
    PreparedCxg
        Its path.

    Raises
    ------
    SourceError
        If the cells cannot be written as a CXG, for example without an embedding (C22).
    DuplicateError
        If the target exists.
    """
    from raggedatlas.atlas import find_query
    from raggedatlas.formats.copying import copy
    from raggedatlas.formats.registry import open_sink
    from raggedatlas.wings.cxg.inspection import is_cxg

    path = as_path(what) if isinstance(what, str | os.PathLike) else None
    if isinstance(path, Path) and is_cxg(path) and is_servable(path):
        return PreparedCxg(path, written=False)
    # What is served must be on this machine, and is refused before it is written elsewhere.
    target = local_path(target)
    if target.suffix != ENDING:
        raise SourceError(f"{target} is not a valid name for a CXG; it must end in {ENDING}.")
    query = find_query(what)
    chosen = {"profile": PROFILE, **{name: value for name, value in options.items() if value is not None}}
    if query is not None:
        # People search for genes by symbol, and the features of an atlas are indexed by id.
        var = query.limit(1).to_anndata().var
        chosen = {"var_index": SYMBOL, **chosen} if SYMBOL in var and var[SYMBOL].notna().any() else chosen
        query.write(target, **chosen)
    else:
        copy(what, open_sink(target, **chosen))
    return PreparedCxg(target, written=True)


def serve(
    what: "Query | str | os.PathLike[str] | Any",  # noqa: ANN401  (anything that can be read)
    *,
    target: str | os.PathLike[str] | None = None,
    port: int = 0,
    title: str | None = None,
    **options: Any,  # noqa: ANN401  (those of `prepare`)
) -> ExplorerServer:
    """Serve cells with the web client of CELLxGENE Explorer, on loopback.

    Parameters
    ----------
    what : RaggedAtlas, AtlasView, Query, path, AnnData or Source
        Cells of an atlas (of its newest snapshot), or anything that `open_source` accepts; a CXG that can be served is used unchanged.
    target : str or Path, optional
        Where to keep the CXG; by default a temporary folder that is removed at the end.
    port : int
        Port; 0 picks a free one.
    title : str, optional
        Title of the page.
    **options
        Options of `prepare`: ``embeddings``, ``compute_embedding``, ``x``, ``overwrite``, ...

    Returns
    -------
    ExplorerServer
        The running server; close it, or use it in a ``with`` statement.

    Raises
    ------
    MissingExtraError
        If cellxgene is not installed, before anything is written; the message says how to install it.
    SourceError, StoreError
        If the cells cannot be written as a CXG, or the server rejects it.

    Examples
    --------
    >>> with serve("tests/data/pbmc68k_reduced.h5ad") as page:  # doctest: +SKIP
    ...     print(page.url)
    ...     page.wait()
    """
    program = require_explorer()
    folder = None if target is not None else Path(tempfile.mkdtemp(prefix="raggedatlas-serve-"))
    try:
        at = local_path(target) if target is not None else Path(str(folder)) / NAME
        found = prepare(what, at, title=title, **options)
        return ExplorerServer(found.path, port=port, title=title, program=program, temporary=folder)
    except BaseException:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise

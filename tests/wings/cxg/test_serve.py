"""Serving: what is prepared, how the server is started, waited for and ended; a small program stands for cellxgene here."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.command import ask

from raggedatlas import RaggedAtlas
from raggedatlas.errors import DuplicateError, MissingExtraError, NotFoundError, SourceError, StoreError
from raggedatlas.wings.cxg import explorer, inspect, validate
from raggedatlas.wings.cxg.explorer import (
    REQUIREMENTS,
    VARIABLE,
    ExplorerServer,
    find_explorer,
    install_explorer,
    is_servable,
    prepare,
    require_explorer,
    serve,
    terminate_process,
)
from support.cxg_files import write_cxg
from support.processes import started

COMMAND = Path(sys.executable).parent / "raggedatlas"
REAL = "tests/data/pbmc68k_reduced.h5ad"

STAND_IN = """#!{python}
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
words = sys.argv[1:]
open(words[1] + ".pid", "w").write(str(os.getpid()))
if "bad" in words[1]:
    print("Error: cxg matrix is not valid")
    sys.exit(1)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if "slow" in words[1]:
            self.send_error(503)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({{"words": words, "pid": os.getpid()}}).encode())
    def log_message(self, *_):
        pass
HTTPServer((words[words.index("--host") + 1], int(words[words.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What stands for cellxgene: it serves what it was called with, and refuses paths that are called bad."""
    path = tmp_path_factory.mktemp("environment") / "bin" / "cellxgene"
    path.parent.mkdir()
    path.write_text(STAND_IN.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


def asked(url: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(urllib.request.urlopen(f"{url}api/v0.2/config", timeout=60).read())
    return found


def is_running(pid: object) -> bool:
    return Path(f"/proc/{pid}").exists()


def awaited(condition: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_the_program_is_looked_for(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable names an environment or a program; without one it is looked for here; else the way to get it is said."""
    monkeypatch.setattr(explorer, "FOLDER", "no-such-folder")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    assert find_explorer() is None
    with pytest.raises(MissingExtraError, match=r"raggedatlas serve --install") as caught:
        require_explorer()
    # the way out works where nothing of the repository is: every file that it names comes with the package
    assert "benchmarks" not in str(caught.value)
    assert str(REQUIREMENTS) in str(caught.value)
    assert REQUIREMENTS.parent == Path(explorer.__file__).parent
    assert "cellxgene==0.16.8" in REQUIREMENTS.read_text().splitlines()
    for named in (program, program.parents[1]):
        monkeypatch.setenv(VARIABLE, str(named))
        assert find_explorer() == program
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(NotFoundError, match="there is no cellxgene"):
        find_explorer()
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(explorer, "FOLDER", program.parents[1].name)
    monkeypatch.chdir(program.parents[2])
    assert find_explorer() == program
    # and in the checkout, from any working directory
    monkeypatch.chdir(tmp_path)
    assert find_explorer() is None
    module = Path(explorer.__file__).relative_to(Path(explorer.__file__).parents[4])
    monkeypatch.setattr(explorer, "__file__", str(program.parents[2] / module))
    assert find_explorer() == program


PYTHON = """#!/bin/sh
case "$*" in
  *venv*) for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python"; cp "$0" "$last/bin/cellxgene";;
  *pip*) test -z "$REFUSES" || { echo "no network" >&2; exit 1; };;
esac
"""


def test_the_client_is_installed_where_it_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is made in the user's folder from the shipped list; a step that fails says why and leaves nothing."""
    monkeypatch.setattr(explorer, "FOLDER", "no-such-folder")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv(VARIABLE, raising=False)
    python = tmp_path / "python3.11"
    python.write_text(PYTHON)
    python.chmod(0o755)
    monkeypatch.setenv("REFUSES", "1")
    with pytest.raises(StoreError, match="no network"):
        install_explorer(python)
    assert find_explorer() is None
    assert not (tmp_path / "data" / "raggedatlas" / "explorer").exists()
    monkeypatch.delenv("REFUSES")
    assert install_explorer(python) == find_explorer() == require_explorer()
    assert install_explorer(tmp_path / "nothing") == find_explorer()


def test_a_server_is_started_and_ended(program: Path, tmp_path: Path) -> None:
    """It is asked for loopback, a free port and no annotations, answers once it is there, and is gone after."""
    path = write_cxg(tmp_path / "x.cxg", "old")
    with ExplorerServer(path, program=program, title="Cells") as server:
        found = asked(server.url)
        words = found["words"]
        assert isinstance(words, list)
        assert words[:2] == ["launch", str(path)]
        assert words[words.index("--host") + 1] == "127.0.0.1"
        assert words[words.index("--title") + 1] == "Cells"
        assert "--disable-annotations" in words
        assert server.is_alive
    assert not is_running(found["pid"])


def test_what_is_not_served_is_told(program: Path, tmp_path: Path) -> None:
    """A server that ends or does not answer is told with what it said, and nothing of it stays; so is a path that is not there."""
    for name, log_tail in (("bad.cxg", "cxg matrix is not valid"), ("slow.cxg", "did not answer")):
        (tmp_path / name).mkdir()
        with pytest.raises(StoreError, match=log_tail):
            ExplorerServer(tmp_path / name, program=program, timeout=0.8)
    with pytest.raises(NotFoundError, match="check the path"):
        ExplorerServer(tmp_path / "absent.cxg", program=program)


@pytest.mark.long
def test_what_can_be_served_is_taken_as_it_is(tmp_path: Path) -> None:
    """A CXG of 0.2.0 or older is not written again; one of 0.3.0 is, and so is any file, without a must broken."""
    for form in ("sparse", "old", "unnamed"):
        path = write_cxg(tmp_path / f"{form}.cxg", form)
        assert is_servable(path)
        assert prepare(path, tmp_path / "unused.cxg").path == path
    assert not (tmp_path / "unused.cxg").exists()
    for form in ("split", "dense"):
        path = write_cxg(tmp_path / f"{form}.cxg", form)
        made = prepare(path, tmp_path / f"{form}-served.cxg")
        assert made.written
        assert is_servable(made.path)
        assert inspect(made.path).version == "0.2.0"
        assert [str(p) for p in validate(made.path, "full") if p.level == "must"] == []


@pytest.mark.nightly
def test_a_file_and_a_query_are_prepared(tmp_path: Path) -> None:
    """An h5ad and the cells of an atlas become CXGs; a bad name, a taken one, and cells without an embedding are refused."""
    made = prepare(REAL, tmp_path / "file.cxg", title="Blood")
    assert inspect(made.path).version == "0.2.0"
    with pytest.raises(DuplicateError):
        prepare(REAL, made.path)
    with pytest.raises(SourceError, match=r"end in \.cxg"):
        prepare(REAL, tmp_path / "file")
    atlas = RaggedAtlas.create(str(tmp_path / "a.atlas"))
    atlas.add("tests/data/pbmc_5k_protein_v3.h5ad", progress=False)
    query = atlas.checkout(atlas.snapshot()).query().limit(30)
    with pytest.raises(SourceError, match="C22"):
        prepare(query, tmp_path / "query.cxg")
    assert not (tmp_path / "query.cxg").exists()
    few = prepare(query, tmp_path / "query.cxg", compute_embedding="pca")
    assert inspect(few.path).root.shape == (30, 16581)
    # the atlas, its snapshot and its address mean all cells of the newest snapshot
    for i, what in enumerate((atlas, atlas.checkout(1), atlas.uri)):
        alone = prepare(what, tmp_path / f"{i}.cxg", compute_embedding="pca")
        assert inspect(alone.path).root.shape == (200, 16581)
    assert [str(p) for p in validate(few.path, "full") if p.level == "must"] == []


@pytest.mark.long
def test_a_temporary_folder_goes_away(program: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a target the CXG lives as long as the server; with one it stays; without a program nothing is written."""
    monkeypatch.setenv(VARIABLE, str(program))
    split = write_cxg(tmp_path / "split.cxg")
    with serve(split) as page:
        assert page.path.is_dir()
        assert asked(page.url)["words"]
    assert not page.path.exists()
    with serve(split, target=tmp_path / "kept.cxg") as page:
        pass
    assert (tmp_path / "kept.cxg").is_dir()
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(explorer, "FOLDER", "no-such-folder")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with pytest.raises(MissingExtraError):
        serve(split, target=tmp_path / "never.cxg")
    assert not (tmp_path / "never.cxg").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_stopped(ending: signal.Signals, program: Path, tmp_path: Path) -> None:
    """It prints the address once the page answers; Ctrl-C, or being ended, ends the server and removes what was written for it."""
    path = write_cxg(tmp_path / "x.cxg")
    environment = {**os.environ, VARIABLE: str(program), "TMPDIR": str(tmp_path)}
    with started([COMMAND, "serve", path, "--no-browser", "--json"], env=environment) as running:
        told = json.loads(until(running, "}\n"))
        pid = asked(told["url"])["pid"]
        assert Path(told["path"]).is_dir()
        running.send_signal(ending)
        running.wait(90)
        assert running.returncode == 0
    assert awaited(lambda: not is_running(pid))
    assert not Path(told["path"]).parent.exists()


def until(running: "subprocess.Popen[str]", last_line: str) -> str:
    """Read what a process prints up to a line, which must come."""
    assert running.stdout is not None
    lines = []
    for line in running.stdout:
        lines.append(line)
        if line == last_line:
            return "".join(lines)
    assert running.stderr is not None
    raise AssertionError(running.stderr.read())


@pytest.mark.nightly
def test_a_command_that_is_ended_early_leaves_no_server(program: Path, tmp_path: Path) -> None:
    """Asked to end while it still waits for the page to answer, the command ends the server too."""
    path = write_cxg(tmp_path / "slow.cxg", "old")
    note = tmp_path / "slow.cxg.pid"
    environment = {**os.environ, VARIABLE: str(program), "TMPDIR": str(tmp_path)}
    with started([COMMAND, "serve", path, "--no-browser"], env=environment) as running:
        assert awaited(lambda: note.exists() and note.read_text() != "")
        running.send_signal(signal.SIGTERM)
        running.wait(90)
        assert running.returncode == 130
    assert awaited(lambda: not is_running(note.read_text()))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["slow.cxg", "slow.cxg.pid"]


class Impatient:
    """Stands for Ctrl-C while a process is waited for."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.wait, self.n = process.wait, 0
        process.wait = self  # type: ignore[assignment, method-assign]

    def __call__(self, timeout: float | None = None) -> int:
        self.n += 1
        if self.n == 1:
            raise KeyboardInterrupt
        return self.wait(timeout)


def test_no_child_is_left_unwaited(program: Path, tmp_path: Path) -> None:
    """A Ctrl-C while the server ends does not leave it behind; nor does one that does not heed the request to end."""
    server = ExplorerServer(write_cxg(tmp_path / "x.cxg", "old"), program=program)
    process = server._process
    assert process is not None
    Impatient(process)
    with pytest.raises(KeyboardInterrupt):
        server.close()
    assert process.returncode is not None
    assert not server.is_alive
    server.close()
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    with started([sys.executable, "-c", deaf]) as running:
        assert until(running, "1\n") == "1\n"
        terminate_process(running, timeout=0.05)
        assert running.returncode == -signal.SIGKILL


def test_the_command_prepares_without_serving(tmp_path: Path) -> None:
    """With --prepare-only a CXG is written where --output says, and no cellxgene is needed; selections are for atlases."""

    def run(*words: str) -> Any:
        return ask("serve", *words)

    done = run(REAL, "--prepare-only", "-o", str(tmp_path / "x.cxg"), "--json")
    assert json.loads(done.stdout) == {"path": str(tmp_path / "x.cxg"), "made": True}
    assert inspect(tmp_path / "x.cxg").version == "0.2.0"
    assert run(REAL, "--prepare-only").exit_code == 2
    assert run(REAL, "--where", "n_counts > 3").exit_code == 2

"""The page and its server: one file with nothing from elsewhere, hostile names, the built bundle, tokens and policies."""

import hashlib
import http.client
import json
import re
import shutil
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterator
from gzip import decompress
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from raggedatlas.errors import DuplicateError, FeatureError, StoreError
from raggedatlas.wings.viewer.page import LICENCES, PROGRAM, RECORD, STYLE, bundled, write_page
from raggedatlas.wings.viewer.palette import CATEGORICAL
from raggedatlas.wings.viewer.scene import Look, Scene, make_scene
from raggedatlas.wings.viewer.server import ViewerServer

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[3]
EVIL = "</script><script>window.pwned=1</script><img src=x onerror=alert(1)>\u2028&quot;'\""


def hostile() -> Scene:
    """A scene whose every text tries to be HTML."""
    obs = pa.table({"uid": [EVIL, "b", "c"], EVIL: [EVIL, "x", EVIL], f"n{EVIL}": [0.5, 1.5, 2.5]})
    look = Look(title=EVIL, subtitle=EVIL)
    return make_scene([EVIL, "b", "c"], [[0, 0], [1, 1], [2, 0]], obs, genes={EVIL: np.array([1, 0, 2])}, look=look)


class Elements(HTMLParser):
    """Every element of a page, with its attributes and the text within."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.found:
            tag, attributes, text = self.found[-1]
            self.found[-1] = (tag, attributes, text + data)


def test_no_text_becomes_an_element(tmp_path: Path) -> None:
    """Whatever ids, names, values and titles hold, the page has its own elements only, and its own script only."""
    text = write_page(hostile(), tmp_path / "x.html", genes=[EVIL]).read_text("utf-8")
    elements = Elements(text).found
    assert {tag for tag, _, _ in elements} == {"html", "head", "meta", "link", "title", "style", "body", "script"}
    programs = [text for tag, attributes, text in elements if tag == "script" and "type" not in attributes]
    assert [program.rstrip() for program in programs] == [bundled(PROGRAM).rstrip()]
    manifest = json.loads(next(text for _, attributes, text in elements if attributes.get("id") == "manifest"))
    assert manifest["title"] == EVIL
    assert [column["name"] for column in manifest["columns"]] == [EVIL, f"n{EVIL}"]


def test_the_policy_allows_this_program_and_nothing_else(tmp_path: Path) -> None:
    """The policy names the hashes of the page's own program and looks, and no place to fetch from or send to."""
    elements = Elements(write_page(hostile(), tmp_path / "x.html").read_text("utf-8")).found
    rules = next(a["content"] or "" for _, a, _ in elements if a.get("http-equiv") == "Content-Security-Policy")
    policy = dict(rule.split(" ", 1) for rule in rules.split("; "))
    digest = b64encode(hashlib.sha256(bundled(PROGRAM).encode()).digest()).decode()
    assert policy["script-src"] == f"'sha256-{digest}' 'unsafe-eval'"
    assert policy["default-src"] == policy["connect-src"] == policy["form-action"] == "'none'"
    assert "unsafe-inline" not in rules


def test_the_file_holds_all_data(tmp_path: Path) -> None:
    """Each part in the file is an Arrow stream; the gene that is first coloured by comes along, and means of all its genes."""
    obs = pa.table({"uid": ["a", "b"], "n": [1.5, 2.5], "type": pa.array(["B", "T"]).dictionary_encode()})
    scene = make_scene(["a", "b"], [[0, 0], [1, 1]], obs, genes={"G": np.array([1, 2]), "H": np.array([3, 4])}, look=Look(color="G"))  # fmt: skip
    elements = Elements(write_page(scene, tmp_path / "x.html", genes=["H"]).read_text("utf-8")).found
    parts = {str(a["id"]): text for _, a, text in elements if str(a.get("id")).startswith("part-")}
    assert list(parts) == ["part-points", "part-ids", "part-c0", "part-c1", "part-g0", "part-g1"]
    tables = {name: pa.ipc.open_stream(decompress(b64decode(text))).read_all() for name, text in parts.items()}
    gene = dict(zip(tables["part-ids"]["v"].to_pylist(), tables["part-g0"]["v"].to_pylist(), strict=True))
    assert gene == {"a": 1, "b": 2}
    means = json.loads(next(text for _, a, text in elements if a.get("id") == "manifest"))["means"]
    assert list(means) == ["type"]
    assert (means["type"]["genes"], means["type"]["groups"]) == (["G", "H"], ["B", "T"])
    assert means["type"]["mean"] == [[1, 3], [2, 4]]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """What is there is kept unless asked otherwise; a refusal leaves nothing behind."""
    target = tmp_path / "x.html"
    write_page(hostile(), target)
    with pytest.raises(DuplicateError, match="overwrite=True"):
        write_page(hostile(), target)
    write_page(hostile(), target, overwrite=True)
    with pytest.raises(FeatureError, match="'NOGENE'"):
        write_page(hostile(), tmp_path / "y.html", genes=["NOGENE"])
    with pytest.raises(StoreError, match="no folder"):
        write_page(hostile(), tmp_path / "missing" / "x.html")
    assert list(tmp_path.iterdir()) == [target]


def test_the_bundle_is_what_its_record_says() -> None:
    """The committed page has the recorded hashes, half a megabyte at most, and the licence of every package in it."""
    record = json.loads(bundled(RECORD))
    for name, digest in record["files"].items():
        assert hashlib.sha256(bundled(name).encode()).hexdigest() == digest, name
    assert set(record["files"]) == {PROGRAM, STYLE, LICENCES}
    assert len(bundled(PROGRAM)) + len(bundled(STYLE)) < 600_000
    assert {"apache-arrow", "regl", "regl-scatterplot"} <= set(record["packages"])
    for name, version in record["packages"].items():
        assert f"{name} {version} (" in bundled(LICENCES)


def test_the_bundle_is_built_of_these_sources() -> None:
    """Every source, pin and colour that the page is built of is the recorded one; else scripts/build_viewer.py is to be run."""
    sources = ROOT / "viewer"
    if not sources.is_dir():
        pytest.skip("the page's sources are not part of this copy")
    recorded = json.loads(bundled(RECORD))["inputs"]
    palette = f"export const CATEGORICAL = {json.dumps(list(CATEGORICAL))};\n".encode()
    assert recorded.pop("src/palette.js") == hashlib.sha256(palette).hexdigest()
    named = [sources / "package.json", sources / "package-lock.json", *sorted((sources / "src").iterdir())]
    assert {str(path.relative_to(sources)): hashlib.sha256(path.read_bytes()).hexdigest() for path in named} == recorded


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_the_bundle_is_built_again_byte_for_byte() -> None:
    """A new build from the pinned packages gives the committed bytes."""
    subprocess.run([sys.executable, "scripts/build_viewer.py", "--check"], cwd=ROOT, check=True)


def test_no_program_is_inline_twice() -> None:
    """The program cannot end the script element that it stands in."""
    assert not re.search(r"</script|<!--", bundled(PROGRAM), re.IGNORECASE)
    assert "</style" not in bundled(STYLE)


@pytest.fixture
def server() -> Iterator[ViewerServer]:
    """A server of the hostile scene."""
    with ViewerServer(hostile()) as server:
        yield server


def ask(
    server: ViewerServer, path: str, *, method: str = "GET", host: str | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Send one plain request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{server.port}"})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, body


@pytest.mark.parametrize("path", ["/", "/{wrong}/", "/{half}/", "/viewer.js", "/parts/points", "/{wrong}/parts/ids", "/%2e%2e/{token}/"])  # fmt: skip
def test_nothing_is_given_without_the_token(server: ViewerServer, path: str) -> None:
    """A request whose path does not begin with the whole token is refused, and told nothing."""
    asked = path.format(wrong="A" * 32, half=server.token[:16], token=server.token)
    status, _, body = ask(server, asked)
    assert status == 403
    assert server.token.encode() not in body


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1:1", "127.0.0.1"])
def test_another_host_is_refused(server: ViewerServer, host: str) -> None:
    """Also with the token: a name that another site has pointed at this machine is not served."""
    assert ask(server, f"/{server.token}/", host=host.format(port=server.port))[0] == 403


@pytest.mark.parametrize("path", ["nothing", "parts/c99", "parts/../viewer.js", "../../etc/passwd", "parts/gene?name=NOGENE", "parts/gene"])  # fmt: skip
def test_what_is_not_there_is_not_found(server: ViewerServer, path: str) -> None:
    """Behind the token there are the page's parts and no files."""
    assert ask(server, f"/{server.token}/{path}")[0] == 404


def test_every_answer_has_its_policy(server: ViewerServer) -> None:
    """Page, parts and refusals come with the policy, cannot be framed, sniffed, cached or read by another site."""
    for path in ("/", f"/{server.token}/", f"/{server.token}/parts/points"):
        _, headers, _ = ask(server, path)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe-inline" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["cache-control"] == "no-store"
        assert "set-cookie" not in headers


def test_only_reading_is_served(server: ViewerServer) -> None:
    """HEAD gives no body; other methods, and what is sent without being JSON of the page, are refused."""
    status, headers, body = ask(server, f"/{server.token}/viewer.js", method="HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) == len(bundled(PROGRAM).encode())
    assert ask(server, f"/{server.token}/", method="POST")[0] == 415
    assert ask(server, f"/{server.token}/", method="PUT")[0] == 501


def test_served_data_are_those_of_the_scene(server: ViewerServer) -> None:
    """Parts are Arrow streams; a gene is read by name and found by a part of it, whatever it is called."""
    status, _, body = ask(server, f"/{server.token}/parts/c0")
    assert status == 200
    assert set(pa.ipc.open_stream(body).read_all()["v"].to_pylist()) == {EVIL, "x"}
    found = json.loads(ask(server, f"/{server.token}/genes?q=pwned&most=5")[2])
    assert found == [{"name": EVIL, "note": ""}]
    from urllib.parse import quote

    gene = ask(server, f"/{server.token}/parts/gene?name={quote(EVIL)}")[2]
    assert sorted(pa.ipc.open_stream(gene).read_all()["v"].to_pylist()) == [0, 1, 2]


def test_a_taken_port_is_refused(server: ViewerServer) -> None:
    """The message names the port and the way out."""
    with pytest.raises(StoreError, match=f"port {server.port} .* port 0 picks a free one"):
        ViewerServer(hostile(), server.port)

"""Which linked files are read: their recorded addresses, and what `open(sources=...)` allows."""

import io
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import raggedatlas as ra
from raggedatlas.errors import SourceError, StoreError
from raggedatlas.store.location import Location
from raggedatlas.store.sources import SourceAccess, recorded_address
from support.atlases import small_anndata


@pytest.mark.parametrize(
    ("path", "recorded"),
    [
        ("/data/atlas/files/x.h5ad", "files/x.h5ad"),
        ("/data/x.h5ad", "../x.h5ad"),
        ("/data/more/x.h5ad", "../more/x.h5ad"),
        ("/other/x.h5ad", "/other/x.h5ad"),
    ],
)
def test_local_files_near_the_atlas_are_recorded_relative_to_it(path: str, recorded: str) -> None:
    atlas = Location("/data/atlas")
    assert recorded_address(Path(path), atlas) == recorded
    assert SourceAccess(atlas).open(recorded, "a").location.path.resolve() == Path(path)


def test_addresses_of_stores_and_servers_are_recorded_as_they_are() -> None:
    atlas = Location("s3://bucket/atlas", {"aws_region": "eu-central-1"})
    for address in ("s3://bucket/x.h5ad", "https://example.org/x.h5ad", "https://example.org/x.h5ad?download=1"):
        assert recorded_address(Location(address), atlas) == address
    # Options of the atlas are those of a file in a store of its kind, and of no other.
    assert SourceAccess(atlas).open("s3://bucket/x.h5ad", "a").location.storage_options == {
        "aws_region": "eu-central-1"
    }
    assert SourceAccess(atlas).open("gs://bucket/x.h5ad", "a").location.storage_options == {}


@pytest.mark.parametrize(
    "address",
    [
        "https://example.org/x.h5ad?X-Amz-Signature=0123",
        "https://example.org/x.h5ad?download=1&token=a",
    ],
)
def test_addresses_that_may_hold_a_secret_are_refused(address: str) -> None:
    with pytest.raises(SourceError, match="secret") as refused:
        recorded_address(Location(address), Location("/data/atlas"))
    assert "0123" not in str(refused.value)


def test_an_atlas_in_a_store_is_linked_to_no_local_file() -> None:
    atlas = Location("s3://bucket/atlas")
    with pytest.raises(SourceError, match="on this machine"):
        recorded_address(Path("/data/x.h5ad"), atlas)
    # One that a stranger made reads none either.
    for source in ("/etc/passwd", "../x.h5ad"):
        with pytest.raises(StoreError, match="local file"):
            SourceAccess(atlas).open(source, "a")


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an atlas with a linked and a copied dataset."""
    folder = tmp_path_factory.mktemp("linked")
    atlas = ra.RaggedAtlas.create(folder / "atlas")
    for name in ("far", "near"):
        small_anndata(len(name)).write_h5ad(folder / f"{name}.h5ad")
    atlas.add(folder / "far.h5ad", "far", copy=False, organism="human")
    atlas.add(folder / "near.h5ad", "near", organism="human")
    atlas.snapshot()
    return folder


def test_deny_reads_no_file_and_everything_else(linked: Path) -> None:
    view = ra.RaggedAtlas.checkout_latest(linked / "atlas", sources="deny")
    with pytest.raises(StoreError, match=r"may not be read.*sources='deny'"):
        view.query().to_anndata()
    assert view.query().where(dataset="near").to_anndata().n_obs == 10
    assert len(view.query().to_pandas()) == 20


def test_ask_reads_nothing_where_nobody_answers(linked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(text: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", closed)
    view = ra.RaggedAtlas.checkout_latest(linked / "atlas", sources="ask")
    with pytest.raises(StoreError, match="may not be read"):
        view.query().to_anndata()


@pytest.mark.parametrize(("answer", "reads"), [("y", True), ("n", False), ("", False)])
def test_ask_asks_once_for_each_file(linked: Path, monkeypatch: pytest.MonkeyPatch, answer: str, reads: bool) -> None:
    asked: list[str] = []

    def reply(text: str) -> str:
        asked.append(text)
        return answer

    monkeypatch.setattr("builtins.input", reply)
    view = ra.RaggedAtlas.open(linked / "atlas", sources="ask").checkout(1)
    for _ in range(2):
        if reads:
            assert view.query().to_anndata().n_obs == 20
        else:
            with pytest.raises(StoreError, match="sources='ask'"):
                view.query().to_anndata()
    assert len(asked) == 1
    assert "far.h5ad" in asked[0]


def test_threads_that_come_at_once_ask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def reply(text: str) -> str:
        asked.append(text)
        time.sleep(0.05)
        return "y"

    monkeypatch.setattr("builtins.input", reply)
    access = SourceAccess(Location("/data/atlas"), "ask")
    with ThreadPoolExecutor(4) as pool:
        found = {str(link.location) for link in pool.map(lambda _: access.open("../x.h5ad", "a"), range(4))}
    assert found == {"/data/x.h5ad"}
    assert len(asked) == 1


@pytest.mark.parametrize("answer", [True, False, {}, None, 1])
def test_a_callable_decides(linked: Path, answer: Any) -> None:
    """It gets the address; True or storage options read the file, anything else does not."""
    seen: list[str] = []

    def decide(address: str) -> Any:
        seen.append(address)
        return answer

    view = ra.RaggedAtlas.checkout_latest(linked / "atlas", sources=decide)
    if answer is True or answer == {}:
        assert view.query().to_anndata().n_obs == 20
    else:
        with pytest.raises(StoreError, match="<callable>"):
            view.query().to_anndata()
    assert seen == [str(linked / "far.h5ad")]


def test_nobody_who_answers_is_a_no(linked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(StoreError, match="sources='ask'"):
        ra.RaggedAtlas.checkout_latest(linked / "atlas", sources="ask").query().to_anndata()


@pytest.mark.parametrize("rule", ["ask", lambda _: {"aws_region": "eu-central-1"}])
def test_answers_go_to_other_processes(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were given do, with the storage options; for more, nobody can be asked there."""
    monkeypatch.setattr("builtins.input", lambda _: "y")
    access = SourceAccess(Location("/data/atlas"), rule)
    asked = access.open("s3://bucket/x.h5ad", "a")
    sent = pickle.loads(pickle.dumps(access))
    assert sent.open("s3://bucket/x.h5ad", "a") == asked
    assert sent.open("s3://bucket/x.h5ad", "a").location.storage_options == asked.location.storage_options
    with pytest.raises(StoreError, match="may not be read"):
        sent.open("s3://bucket/y.h5ad", "b")


def allows(address: str) -> bool:
    """Allow one address."""
    return address.endswith("y.h5ad")


@pytest.mark.parametrize("rule", ["allow", "deny", allows])
def test_rules_that_can_be_sent_hold_in_other_processes(rule: Any) -> None:
    sent = pickle.loads(pickle.dumps(SourceAccess(Location("/data/atlas"), rule)))
    assert sent.rule == rule


def test_unknown_rules_are_refused(linked: Path) -> None:
    with pytest.raises((SourceError, ra.AtlasError), match="sources"):
        ra.RaggedAtlas.open(linked / "atlas", sources="sometimes")  # type: ignore[arg-type]

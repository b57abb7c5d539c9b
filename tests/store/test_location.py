"""Laws of locations: names, whole writes, safe removal, object stores."""

import multiprocessing
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.errors import NameRefusedError, NotFoundError, StoreError
from raggedatlas.store.location import Location, probe_conditional_puts, refuse_symlinks

pytestmark = pytest.mark.fast

BAD_NAMES = ["", ".", "..", ".hidden", "a/b", "a\\b", "/etc", "a b", "é", "a..b", "a\n", "%2e%2e"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_children_with_bad_names_are_refused(name: str) -> None:
    """A part of a path is a plain name or it is refused."""
    with pytest.raises(NameRefusedError, match="Choose another name"):
        Location("/data").child(name)


@given(st.text(max_size=8))
def test_a_child_never_leaves_its_parent(name: str) -> None:
    """Whatever the name, the child lies directly below its parent or is refused."""
    try:
        child = Location("/data/x").child(name)
    except NameRefusedError:
        return
    assert os.path.realpath(child.uri) == f"/data/x/{name}"


def test_uris_are_normalised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A location says its full place whatever way it was given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Location("a/../b").uri == str(tmp_path / "b")
    assert Location("~/b").path == tmp_path / "b"
    assert Location(f"file://{tmp_path}/b%20c").uri == str(tmp_path / "b c")
    assert Location("s3://bucket//a/b/").uri == "s3://bucket/a/b"
    assert Location("s3://bucket/a/b").name == "b"
    assert Location("gs://bucket").child("x").uri == "gs://bucket/x"


@pytest.mark.parametrize(
    "uri", ["ftp://x/y", "s3://", "http://x", "", " ", "a\0b", "file://host/x", 5, None, b"a", ["a"]]
)
def test_unknown_schemes_are_refused(uri: Any) -> None:
    """What is neither a folder nor a known store is refused by name, and so is what is no address at all."""
    with pytest.raises(StoreError, match="expected"):
        Location.of(uri)


def test_a_login_in_an_address_is_refused_and_not_repeated() -> None:
    """Keys in an address would end up in messages, reports and `uns`; the refusal does not repeat them."""
    for uri in ("s3://KEY:SECRET@host/x", "az://KEY@host", "gs://:SECRET@host/x"):
        with pytest.raises(StoreError, match="'host' holds a login") as caught:
            Location.of(uri)
        assert not any(word in str(caught.value) for word in ("KEY", "SECRET"))
    with pytest.raises(StoreError, match="mapping"):
        Location.of("s3://b/x", [("aws_region", "x")])  # type: ignore[arg-type]


def test_remote_dots_and_unknown_options_are_refused() -> None:
    """Prefixes hold no dots that climb; option names are checked and secrets stay out of the repr."""
    with pytest.raises(NameRefusedError):
        Location("s3://bucket/a/../b")
    with pytest.raises(StoreError, match="aws_acces_key"):
        Location("s3://bucket", {"aws_acces_key": "x"})
    assert "hunter2" not in repr(Location("s3://bucket", {"aws_secret_access_key": "hunter2"}))
    with pytest.raises(StoreError, match="no local path"):
        _ = Location("s3://bucket").path


def test_locations_are_values() -> None:
    """Equal locations are equal, hash alike and survive pickling."""
    location = Location("s3://bucket/a", {"aws_region": "x"}).child("b")
    assert pickle.loads(pickle.dumps(location)) == location
    assert hash(location) == hash(Location("s3://bucket/a/b", {"aws_region": "x"}))
    assert location.lance_options() == {"aws_region": "x"}
    assert location.lance_uri() == "s3://bucket/a/b"


def test_options_are_added_to_those_of_a_location() -> None:
    """Options that are given beside a location count, before those that it has."""
    given = Location("s3://bucket/a", {"aws_region": "x", "timeout": "9s"})
    assert Location.of(given) is given
    assert Location.of(given, {"aws_region": "y"}) == Location("s3://bucket/a", {"aws_region": "y", "timeout": "9s"})
    with pytest.raises(StoreError, match="Unknown storage option 'region'"):
        Location.of(given, {"region": "y"})


def check_objects(location: Location) -> None:
    """Write, list, read and remove objects."""
    assert not location.holds_files()
    assert location.list_children() == []
    assert location.last_modified() is None
    assert location.delete_prefix() == 0
    assert location.write_bytes("d1/x/one", b"1234")
    assert location.write_bytes("d2/two", b"56")
    assert location.holds_files()
    assert location.child("d1").holds_files()
    assert not location.child("d").holds_files()
    assert location.list_children() == ["d1", "d2"]
    assert location.size() == 6
    when = location.last_modified()
    assert when is not None
    assert when.tzinfo is not None
    assert location.read_bytes("d1/x/one") == b"1234"
    assert location.write_bytes("d2/two", b"789")
    assert location.read_bytes("d2/two") == b"789"
    assert location.write_bytes("d2/two", b"789", only_if_absent=True)
    assert not location.write_bytes("d2/two", b"other", only_if_absent=True)
    assert location.write_bytes("d2/three", b"3", only_if_absent=True)
    assert location.read_bytes("d2/two") == b"789"
    with pytest.raises(NotFoundError, match="no 'd2/four'"):
        location.read_bytes("d2/four")
    with pytest.raises(NameRefusedError):
        location.read_bytes("../x")
    assert location.child("d1").delete_prefix() == 4
    assert location.list_children() == ["d2"]
    probe_conditional_puts(location)
    assert location.size() == 4


def test_objects_in_a_folder(local: Location) -> None:
    """What is written is read, listed, counted and removed; create-if-absent keeps the first."""
    check_objects(local)


@pytest.mark.s3
def test_objects_in_s3(s3: Location) -> None:
    """The same calls give the same answers on an object store."""
    check_objects(s3)
    with pytest.raises(StoreError, match="whole bucket"):
        Location(f"s3://{s3.uri.split('/')[2]}", s3.storage_options).delete_prefix()


def test_symlinks_below_a_location_are_refused(tmp_path: Path) -> None:
    """Neither reads, writes nor removals follow a symlink in what `child` added; the root itself may be one."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "root").symlink_to(real)
    root = Location(str(tmp_path / "root"))
    (real / "d1").symlink_to(outside)
    for call in (
        lambda: root.write_bytes("d1/x", b"1"),
        lambda: root.read_bytes("d1/kept"),
        lambda: root.child("d1").delete_prefix(),
        lambda: root.child("d1", "deep").delete_prefix(),
        lambda: root.child("d1").list_children(),
        lambda: root.child("d1").zarr_store(),
        lambda: root.child("d1").store(),
    ):
        with pytest.raises(StoreError, match="symlink"):
            call()
    (real / "d2").mkdir()
    (real / "d2" / "link").symlink_to(outside)
    root.child("d2").delete_prefix()
    assert (outside / "kept").read_text() == "kept"
    assert root.write_bytes("d3/x", b"1")


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    """Also where a location is the file itself, and where its folder is a file."""
    (tmp_path / "file").write_text("1")
    assert Location(str(tmp_path / "file")).read_bytes() == b"1"
    with pytest.raises(NotFoundError, match=f"There is no file {tmp_path}/none"):
        Location(str(tmp_path / "none")).read_bytes()
    for place in (tmp_path, tmp_path / "file" / "x"):
        with pytest.raises(StoreError, match=f"Could not read {place}"):
            Location(str(place)).read_bytes()


@pytest.mark.parametrize("age", [0, 10**11])
def test_a_symlink_that_comes_later_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: int) -> None:
    """A folder is listed again after it changed, also where the clock of its file system has not moved on."""
    (tmp_path / "data").mkdir()
    listed: list[str] = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: listed.append(folder) or scan(folder))
    when = time.time_ns() - age
    for folder in (tmp_path / "data", tmp_path):
        os.utime(folder, ns=(when, when))
    for _ in range(2):
        refuse_symlinks(Location(str(tmp_path)))
    assert len(listed) == (2 if age else 4)
    (tmp_path / "data" / "link").symlink_to(tmp_path)
    # As if the time had been the same; it is as old as the folder was, and so was seen.
    if not age:
        os.utime(tmp_path / "data", ns=(when, when))
    with pytest.raises(StoreError, match="is a symlink"):
        refuse_symlinks(Location(str(tmp_path)))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """A place where no folder can be made is named, with the reason."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="Could not write into"):
        probe_conditional_puts(Location(str(tmp_path / "file" / "atlas")))
    with pytest.raises(StoreError, match="Could not write"):
        Location(str(tmp_path)).write_bytes("file/x", b"1")


def test_a_folder_is_not_overwritten_by_an_object(local: Location) -> None:
    """A key that is a folder already is refused."""
    local.write_bytes("a/b", b"1")
    with pytest.raises(StoreError, match="plain file"):
        local.write_bytes("a", b"1")


@pytest.mark.s3
def test_an_unreachable_store_is_a_store_error() -> None:
    """A store that does not answer is named in one error of ours."""
    options = {
        "aws_endpoint": "http://127.0.0.1:1",
        "allow_http": "true",
        "aws_access_key_id": "x",
        "aws_secret_access_key": "x",
        "aws_region": "us-east-1",
    }
    location = Location("s3://bucket/atlas", options)
    with pytest.raises(StoreError, match="bucket/atlas"):
        location.read_bytes("x")


def _child(location: Location, answers) -> None:  # noqa: ANN001
    try:
        answers.put(location.read_bytes("x").decode())
    except StoreError as error:
        answers.put(str(error))


@pytest.mark.s3
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("method", "answer"), [("fork", "spawn method"), ("spawn", "hello")])
def test_a_forked_child_is_refused_and_a_spawned_one_works(s3: Location, method: str, answer: str) -> None:
    """After the parent used an object store, a forked child gets an error that names spawn instead of hanging."""
    s3.write_bytes("x", b"hello")
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    process = context.Process(target=_child, args=(s3, answers))
    process.start()
    assert answer in answers.get(timeout=60)
    process.join(10)


@pytest.mark.parametrize("most", [None, 1, 1000])
def test_pieces_are_written_as_their_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int | None) -> None:
    """Many pieces, also empty ones, make the file that their join makes, however little a system takes at once, or none at all."""
    pieces: list[bytes | memoryview] = [os.urandom(i % 7) for i in range(3000)]
    pieces[5] = memoryview(b"0123456789" * 300)[3:]
    original = os.writev

    def few(descriptor: int, buffers: list[memoryview]) -> int:
        assert len(buffers) <= 1024
        data = b"".join(buffers)[:most]
        return original(descriptor, [data])

    if most == 1000:
        monkeypatch.delattr(os, "writev")
    elif most is not None:
        monkeypatch.setattr(os, "writev", few)
    location = Location(str(tmp_path))
    assert location.write_bytes("a/b", pieces)
    assert location.read_bytes("a/b") == b"".join(pieces)
    assert location.write_bytes("a/b", pieces, only_if_absent=True)
    assert not location.write_bytes("a/b", pieces[:9], only_if_absent=True)


def test_pieces_go_to_object_stores_too(s3: Location) -> None:
    """An object store gets the pieces as one object."""
    assert s3.write_bytes("pieces", [b"ab", memoryview(b"cd")])
    assert s3.read_bytes("pieces") == b"abcd"

"""Places that fail are told apart from writers that lose a race, with the reason and the way out, and without Rust's source lines."""

import contextlib
import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lance
import obstore
import pyarrow as pa
import pytest

import raggedatlas as ra
from raggedatlas.errors import AtlasError, ConflictError, CorruptError, NotFoundError, StoreError
from raggedatlas.store.location import Location
from raggedatlas.store.storage_errors import failure, lance_errors, plain_reason, store_errors
from raggedatlas.store.tables import Tables, filter_errors

pytestmark = pytest.mark.fast

RUST = ", /build/lance/rust/lance-io/src/object_store.rs:1576:42"
REQUEST = "LanceError(IO): Generic S3 error: Error performing list request: Error performing GET http://key:word@host:1/b?x in 5ms"
RETRIED = ", after 10 retries, max_retries: 10, retry_timeout: 180s "

FAILURES = {
    f"{REQUEST} - Server returned non-2xx status code: 403 Forbidden: <Error><Code>AccessDenied</Code></Error>": (
        "the store refuses access (403 AccessDenied). Check the credentials"
    ),
    f"{REQUEST} - Server returned non-2xx status code: 404 Not Found: <Error><Code>NoSuchBucket</Code></Error>": (
        "there is no such bucket (404 NoSuchBucket). Check the address"
    ),
    f"{REQUEST}{RETRIED} - HTTP error: error sending request": "no answer from host:1. Check the address, the endpoint",
    f"{REQUEST} - Received redirect without LOCATION, this normally indicates an incorrectly configured region": (
        "the bucket is in another region. Give its region"
    ),
    f"{REQUEST}{RETRIED} - Server returned non-2xx status code: 503 X: <Error><Code>SlowDown</Code></Error>": (
        "the store is busy (503 SlowDown) and stayed so through all retries. Run it again later"
    ),
    f"{REQUEST}{RETRIED} - Server returned non-2xx status code: 507 X: <Error><Code>XMinioStorageFull</Code></Error>": (
        "the store has no room left (507 XMinioStorageFull). Free some space"
    ),
    f"{REQUEST}{RETRIED} - Server returned non-2xx status code: 500 X: <Error><Code>InternalError</Code></Error>": (
        "the store failed (500 InternalError). Run it again"
    ),
    "LanceError(IO): Generic N/A error: LanceError(IO): Failed to get AWS credentials: ProviderError(X)": (
        "no credentials were found. Give them as storage options"
    ),
    "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 1ms - HTTP error: error sending": (
        "no credentials were found"
    ),
    "LanceError(IO): Generic LocalFileSystem error: Unable to write: No space left on device (os error 28)": (
        "No space left on device. Free some space"
    ),
    "LanceError(IO): Read-only file system (os error 30)": "Read-only file system. Choose a place that can be written",
    "External error: LanceError(IO): Generic N/A error: Not found: /a/t.lance/data/1.lance": (
        "the file /a/t.lance/data/1.lance is missing. If the atlas was open during a purge()"
    ),
}
RACES = [
    "Too many concurrent writers. Attempted 0 retries.",
    "Retryable commit conflict for version 5: This Merge transaction was preempted by concurrent transaction Merge.",
    "Commit conflict for version 6: Failed to commit the transaction after 0 retries.",
    "Incompatible transaction: This Append is incompatible with concurrent transaction Restore at version 3.",
]


@pytest.mark.parametrize(("text", "reason"), FAILURES.items())
def test_failures_say_why_and_what_to_do(text: str, reason: str) -> None:
    """What Lance reports of a place that fails is one sentence of the reason and one of the way out, by the status alone."""
    for kind in (OSError, ValueError, RuntimeError):
        with pytest.raises(StoreError) as caught, lance_errors("s3://b/conflict/concurrent retries.lance"):
            raise kind(text + RUST)
        assert reason in str(caught.value)
        for leak in (".rs", "/build", "retry_timeout", "key:word", "LanceError"):
            assert leak not in str(caught.value)


@pytest.mark.parametrize("text", RACES)
def test_lost_races_are_conflicts(text: str) -> None:
    """What Lance reports of another writer is a conflict, also from within another error, and is tried again."""
    for wrapper in ("", "External error: ", "LanceError(Arrow): Wrapped error: "):
        with pytest.raises(ConflictError, match="Another writer") as caught, lance_errors("t.lance"):
            raise OSError(wrapper + text + RUST)
        assert ".rs" not in str(caught.value)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EMFILE])
def test_errors_of_the_system_are_named(number: int) -> None:
    """An error of the operating system keeps its words and gets its own way out."""
    with pytest.raises(StoreError) as caught, store_errors("write /a/b"):
        raise OSError(number, "Words")
    assert str(caught.value) == f"Could not write /a/b: {failure(OSError(number, ''))}"
    assert "Check that the place exists" not in str(caught.value)


class PanicException(BaseException):  # the name that pyo3 gives it
    """What a panic in Rust looks like from Python."""


@pytest.mark.parametrize("guard", [lance_errors, lambda place: filter_errors("a = 1", lance.dataset(place))])
def test_a_panic_of_lance_is_damage(
    tmp_path: Path, guard: Callable[[str], contextlib.AbstractContextManager[None]]
) -> None:
    """A panic, which no ``except Exception`` catches, is `CorruptError` with the table and its first line; others pass."""
    place = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"a": [1]}), place)
    with (
        pytest.raises(CorruptError, match=r"cannot read .*t\.lance \(index out of bounds\); its files are damaged"),
        guard(place),
    ):
        raise PanicException("index out of bounds\nstack backtrace: /rustc/a.rs")
    with pytest.raises(KeyboardInterrupt), guard(place):
        raise KeyboardInterrupt


def test_source_lines_are_left_out() -> None:
    """Lines of source that Rust names are cut wherever they are; paths of the user stay."""
    text = "Invalid user input: x /data/a.rs.lance: no" + RUST + ", /rustc/48a2/library/core/src/ops/function.rs:250:5"
    assert plain_reason(ValueError(text)) == "Invalid user input: x /data/a.rs.lance: no"


def test_missing_tables_and_versions_are_not_found(tmp_path: Path) -> None:
    """A table or a version that is not there is `NotFoundError`; a damaged manifest is not."""
    tables = Tables(Location(str(tmp_path)))
    with pytest.raises(NotFoundError, match="no table 't'"):
        tables.open("t")
    tables.create("t", pa.schema([("a", pa.int64())]))
    with pytest.raises(NotFoundError, match="no version 9"):
        tables.tag("t", "x", 9)
    for file in (tmp_path / "t.lance" / "_versions").iterdir():
        file.write_bytes(b"short")
    with pytest.raises(StoreError) as caught:
        tables.open("t")
    assert ".rs" not in str(caught.value)


_WITHOUT_RIGHTS = """
import ctypes, os, sys
if os.getuid() == 0:  # root may write everywhere, unless it gives that up
    assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0
import raggedatlas as ra
from raggedatlas.errors import StoreError
for act in (lambda: ra.RaggedAtlas.create(sys.argv[1] + "/new"), lambda: ra.RaggedAtlas.open(sys.argv[1] + "/old").snapshot("x")):
    try:
        act()
    except StoreError as error:
        print(error)
"""


@pytest.mark.long
def test_a_folder_without_write_access_is_a_store_error(tmp_path: Path) -> None:
    """Where a folder cannot be written, making an atlas and changing one say so, with the reason."""
    ra.RaggedAtlas.create(str(tmp_path / "old"))
    paths = [tmp_path, *tmp_path.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    command = [sys.executable, "-c", _WITHOUT_RIGHTS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    for path in paths:
        path.chmod(0o755)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert all("Permission denied. Check who owns the folder" in line for line in lines), lines


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a Linux file system")
def test_a_place_that_holds_no_folders_is_named() -> None:
    """Where no folder can be made, `create` says so with an error of ours."""
    with pytest.raises(AtlasError, match="Could not write into /proc/x"):
        ra.RaggedAtlas.create("/proc/x")


@pytest.mark.s3
def test_a_bucket_that_is_not_there_is_named(s3: Location) -> None:
    """A missing bucket is no missing object: writing, listing and opening a table all name the bucket as the reason."""
    gone = Location("s3://nobody-made-this/atlas", s3.storage_options)
    for act in (
        lambda: gone.write_bytes("x", b"1"),
        gone.list_children,
        lambda: Tables(gone).open("t"),
    ):
        with pytest.raises(StoreError, match=r"there is no such bucket \(404 NoSuchBucket\)"):
            act()
    with pytest.raises(NotFoundError):
        s3.read_bytes("x")


@pytest.mark.s3
def test_what_a_missing_object_is_called_by_lance(s3: Location) -> None:
    """On an object store too, a missing table is not found and a missing data file is a failure that names it."""
    tables = Tables(s3)
    with pytest.raises(NotFoundError, match="no table"):
        tables.open("t")
    uri, options = tables.uri("t"), s3.lance_options()
    lance.write_dataset(pa.table({"a": [1]}), uri, storage_options=options)
    keys = [item["path"] for page in obstore.list(s3.store()) for item in page if "/data/" in item["path"]]
    obstore.delete(s3.store(), keys)
    with pytest.raises(StoreError, match=r"the file my.atlas/t\.lance/data/\w+\.lance is missing"):
        tables.read("t", where="a = 1")

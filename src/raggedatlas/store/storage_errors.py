"""What Lance, obstore and the operating system report, by kind and status: the one place that reads their texts.

obstore has exception classes, but a listing that fails has the generic one; Lance raises `OSError`, `ValueError` or
`RuntimeError` for everything except commit conflicts. Both always format their texts in the same way, which this module relies on:

- Lance begins with the name of the kind (``Commit conflict for version 3: ...``, ``LanceError(IO): ...``), after the
  wrappers that a kind may be nested in, and ends with the line of its source, which is removed.
- object_store (below both) reports the HTTP status and the body of the response, or ``HTTP error`` without a response.
- Rust reports the number of an error of the operating system: ``(os error 28)``.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, TypeVar
from xml.sax.saxutils import unescape

import pyarrow as pa

from raggedatlas.errors import (
    AtlasError,
    ConflictError,
    CorruptError,
    LimitError,
    MissingFileError,
    NotFoundError,
    QueryError,
    SchemaError,
    StoreError,
)

if TYPE_CHECKING:
    import lance

SERVED_ERROR = "RaggedAtlas"
"""What the code of an error begins with that the gateway of a published atlas answers with; the name of its class follows."""

Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)
Kind = Literal["conflict", "missing", "exists", "schema", "other"]

FILE_FORMAT: Literal["2.2"] = "2.2"
"""Lance file format that both pylance and lancedb read (decided in the design)."""

_WRAPPERS = r"(?:(?:External error|Wrapped error|Cloned error|Query Execution error|LanceError\(\w+\)): )*"
_KINDS: dict[Kind, re.Pattern[str]] = {
    kind: re.compile(_WRAPPERS + begin)  # type: ignore[misc]
    for kind, begin in {
        "conflict": r"(?:Too many concurrent writers|(?:Retryable c|C)ommit conflict for version|Incompatible transaction)",
        "missing": r"(?:Dataset at path .* was not found|Not found: |Version not found|Ref not found)",
        "exists": r"(?:Dataset already exists|Ref conflict error)",
        "schema": r"Append with different schema",
    }.items()
}
_LEADING = re.compile(_WRAPPERS + r"(?:Generic \S+ error: )?")
_SOURCE_LINE = re.compile(r"(?:,? location:|,)? /?[\w.@/+-]+\.rs:\d+(?::\d+)?")
_GONE = re.compile(r"Not found: (\S+)")
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([\w.-]{1,60})</Code>|\"code\": ?\"?([\w.-]{1,60})")
_SERVED = re.compile(rf"<Code>{SERVED_ERROR}(\w+)</Code><Message>(.*?)</Message>", re.DOTALL)
_ENDPOINT = re.compile(r"https?://(?:[^/@\s]*@)?([^/\s?]+)")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|The specified bucket does not exist")
_LOGIN = re.compile(r"redential|169\.254\.|metadata\.google|[Tt]oken|No access key|anonymous")
_FULL = re.compile(r"Full|Quota|InsufficientStorage|EntityTooLarge")

_GIVE_LOGIN = "Give them as storage options or in the environment (AWS_ACCESS_KEY_ID, GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_ACCOUNT_KEY and so on)"
_NO_ACCOUNT = (
    "no storage account of Azure is named",
    "Give it as the storage option azure_storage_account_name, or as AZURE_STORAGE_ACCOUNT_NAME in the environment",
)
_UNMADE = (
    (
        "resolve region",
        "the region of the bucket cannot be found",
        "Check the name of the bucket and the network, or give the storage option aws_region",
    ),
    (
        "service account file",
        "the file of the service account of Google is missing or is not its JSON",
        "Check the path in the storage option google_service_account, or in GOOGLE_SERVICE_ACCOUNT",
    ),
    ("no storage account configured", *_NO_ACCOUNT),
    ("Account must be specified", *_NO_ACCOUNT),
)
"""What the text of an error contains where a store could not even be asked, the reason, and the way out."""
_IF_GONE = "If the atlas was open during a purge() or gc(), open it again; else run validate() to see what else is missing, and restore it from a copy"
"""A purge removes what older versions of a table consist of."""

_WAYS_OUT = {
    errno.EACCES: "Check who owns the folder and its permissions",
    errno.EPERM: "Check who owns the folder and its permissions",
    errno.EROFS: "Choose a place that can be written, or open the atlas for reading only",
    errno.ENOSPC: "Free some space or choose another disk, and run it again",
    errno.EDQUOT: "Free some space or choose another disk, and run it again",
    errno.EFBIG: "Choose a file system that takes files of this size",
    errno.EMFILE: "Raise the limit of open files (ulimit -n)",
    errno.ENOMEM: "Free some memory, or raise the limit of mapped files (vm.max_map_count)",
    errno.ENAMETOOLONG: "Choose a shorter name",
    errno.ENOTDIR: "Choose a place whose parents are folders",
}


def lance_kind(error: BaseException) -> Kind:
    """Return what kind of error Lance raised.

    Examples
    --------
    >>> lance_kind(OSError("Too many concurrent writers. Attempted 0 retries., src/retry.rs:103:9"))
    'conflict'
    >>> lance_kind(OSError("LanceError(IO): Generic S3 error: ..., after 10 retries"))
    'other'
    """
    if type(error).__name__ == "CommitConflictError":
        return "conflict"
    text = str(error)
    kind: Kind = next((kind for kind, pattern in _KINDS.items() if pattern.match(text)), "other")
    status = _STATUS.search(text)
    # With another status the store did not answer the question, and a table must not count as missing.
    if kind == "missing" and (is_missing_bucket(error) or (status and status[1] != "404")):
        return "other"
    return kind


def plain_reason(error: BaseException) -> str:
    """Return the first line of an error without the lines of source that Rust names, and without a debug print."""
    text = str(error).split("\n\nDebug source", 1)[0].strip().split("\n", 1)[0]
    return _LEADING.sub("", _SOURCE_LINE.sub("", text)).rstrip(" .,")


def served_error(error: BaseException) -> AtlasError | None:
    """Return the error of a published atlas that its gateway answered with, or None for any other."""
    found = _SERVED.search(str(error))
    if found is None:
        return None
    kind = {"CorruptError": CorruptError, "LimitError": LimitError}.get(found[1], StoreError)
    return kind(unescape(found[2]))


def is_missing_bucket(error: BaseException) -> bool:
    """Return whether an object store says that the bucket or container does not exist."""
    return bool(_NO_BUCKET.search(str(error)))


def is_remote_error(error: BaseException) -> bool:
    """Return whether obstore raised an error; its own module is not imported to find out."""
    return any(kind.__module__ == "obstore.exceptions" for kind in type(error).__mro__)


def failure(error: BaseException) -> str:
    """Return why a folder or object store failed and what to do, as the end of a sentence and a sentence.

    `error` is what obstore, Lance or the operating system raised; the result is ``<reason>. <way out>.``.
    """
    text = str(error)
    number = error.errno if isinstance(error, OSError) and error.errno else None
    os_error = _OS_ERROR.search(text)
    # Lance and obstore leave `errno` empty; Rust writes the number into the text.
    if number is None and os_error:
        number = int(os_error[1])
    status = _STATUS.search(text)
    unmade = next((words for pattern, *words in _UNMADE if pattern in text), None)
    if unmade:
        reason, out = unmade
    elif status or "HTTP error" in text or "Received redirect" in text or _LOGIN.search(text):
        reason, out = _remote(text, int(status[1]) if status else 0)
    elif number is not None:
        reason = os.strerror(number)
        out = _WAYS_OUT.get(number, "Check that the place exists and can be read and written")
    else:
        reason = plain_reason(error)
        gone = _GONE.match(reason)
        if gone:
            reason, out = f"the file {gone[1]} is missing", _IF_GONE
        else:
            out = "Check that the place exists, can be written, and has space left"
    if "Commit result for version" in text:
        out += "; the last commit may have been made, so look before you run it again"
    return f"{reason}. {out}."


def _remote(text: str, status: int) -> tuple[str, str]:
    """Return why an object store failed, by the status of its response, and the way out."""
    code_match = _CODE.search(text)
    code = (code_match[1] or code_match[2]) if code_match else ""
    answer = f"{status} {code}".strip()
    where = _ENDPOINT.search(text)
    host = where[1] if where else "the store"
    no_login = "169.254." in text or "metadata.google" in text or "FailedToLoad" in text
    no_login = no_login or (not status and bool(_LOGIN.search(text)))
    # The first rule that holds wins, so particular causes come before ranges of statuses.
    rules = (
        (no_login, "no credentials were found", _GIVE_LOGIN),
        (
            "Received redirect" in text or status in {301, 307},
            "the bucket is in another region",
            "Give its region as the storage option aws_region",
        ),
        (not status, f"no answer from {host}", "Check the address, the endpoint and the network, and run it again"),
        (
            status in {401, 403},
            f"the store refuses access ({answer})",
            "Check the credentials, and that they may read and write there",
        ),
        (
            bool(_NO_BUCKET.search(text)),
            f"there is no such bucket ({answer})",
            "Check the address, or make the bucket",
        ),
        (
            status == 507 or bool(_FULL.search(code)),
            f"the store has no room left ({answer})",
            "Free some space, and run it again",
        ),
        (
            status in {429, 503},
            f"the store is busy ({answer}) and stayed so through all retries",
            "Run it again later",
        ),
        (
            status >= 500,
            f"the store failed ({answer})",
            "Run it again; if it fails again, ask those who run the store",
        ),
        (True, f"the store answered {answer}", "Check the address and the storage options"),
    )
    return next((reason, out) for holds, reason, out in rules if holds)


LANCE_ERRORS = (OSError, ValueError, RuntimeError, NotImplementedError, pa.ArrowException)
"""Exceptions of Lance, and of Arrow on data from Lance."""


def is_panic(error: BaseException) -> bool:
    """Return whether Lance's Rust code panicked; pyo3 raises that as a `BaseException` without a public name."""
    return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def lance_errors(place: str) -> Iterator[None]:
    """Convert Lance's errors to ours.

    `ConflictError` for lost races, `NotFoundError` for what is not there, `CorruptError` for a panic, else
    `StoreError`.
    """
    try:
        yield
    except AtlasError:
        raise
    except BaseException as error:
        if is_panic(error):
            reason = str(error).split("\n", 1)[0]
            raise CorruptError(
                f"Lance cannot read {place} ({reason}); its files are damaged. Run validate('deep'), and restore the atlas from a copy."
            ) from error
        # `BaseException` was caught for panics alone; KeyboardInterrupt and the like pass through.
        if not isinstance(error, LANCE_ERRORS):
            raise
        if served := served_error(error):
            raise served from error
        kind = lance_kind(error)
        if kind == "conflict":
            raise ConflictError(f"Another writer changed {place} at the same time: {plain_reason(error)}.") from error
        if kind == "missing":
            raise NotFoundError(f"{place} is not there: {plain_reason(error)}. {_IF_GONE}.") from error
        raise StoreError(f"{place}: {failure(error)}") from error


@contextlib.contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Convert errors of the operating system and of obstore to `StoreError`, `MissingFileError` where a file or object is missing."""
    from obstore.exceptions import BaseError

    try:
        yield
    # `StoreError` is an `OSError` too: in nested contexts the message of the inner one stays.
    except StoreError:
        raise
    except FileNotFoundError as error:
        # Callers take `MissingFileError` as "nothing is there", which is not true of a bucket that does not exist.
        if is_missing_bucket(error):
            raise StoreError(f"Could not {what}: {failure(error)}") from error
        raise MissingFileError(f"Could not {what}: there is no such file, object or folder.") from error
    except (OSError, BaseError) as error:
        if served := served_error(error):
            raise served from error
        raise StoreError(f"Could not {what}: {failure(error)}") from error


@contextlib.contextmanager
def filter_errors(where: str | None, table: "lance.LanceDataset") -> Iterator[None]:
    """Convert errors of a filter to `QueryError`, which lists the existing columns."""
    with lance_errors(table.uri):
        try:
            yield
        except AtlasError:
            raise
        except LANCE_ERRORS as error:
            if served := served_error(error):
                raise served from error
            # Of the kind IO: it failed to read or write, and not over what it was asked.
            if where is None or "LanceError(IO)" in str(error) or lance_kind(error) == "missing":
                raise StoreError(f"{table.uri}: {failure(error)}") from error
            reason = plain_reason(error).removeprefix("Invalid user input: ")
            # The schema of a damaged table may not be readable either.
            names = table.schema.names
            raise QueryError(f"The filter {where!r} cannot be used: {reason}. Columns are {names}.") from error


def check_rows(rows: Rows, place: str) -> Rows:
    """Return rows from Lance after Arrow has validated them: offsets within their buffers, and text in UTF-8.

    Lance checks neither, and what reads such a column later could leave its memory.
    """
    try:
        rows.validate(full=True)
    except (pa.ArrowException, ValueError) as error:
        reason = str(error).split("\n", 1)[0]
        raise CorruptError(
            f"The rows of {place} are damaged ({reason}); run validate('deep'), and restore the atlas from a copy."
        ) from error
    return rows


def refused_columns(schema: pa.Schema) -> dict[str, str]:
    """Return the columns that Lance does not store or read back, by an empty table in memory: name -> reason.

    Adding a column to a table checks fewer rules than creating one, and leaves a table that cannot be read.
    """
    import lance

    def reason(fields: pa.Schema) -> str:
        try:
            table = lance.write_dataset(
                fields.empty_table(), "memory://schema", mode="overwrite", data_storage_version=FILE_FORMAT,
                enable_stable_row_ids=True,
            )  # fmt: skip
            table.to_table(with_row_id=True)
        except BaseException as error:
            if not is_panic(error) and not isinstance(error, LANCE_ERRORS):
                raise
            return plain_reason(error).removeprefix("Invalid user input: ")
        return ""

    if not reason(schema):
        return {}
    return {one.name: found for one in schema if (found := reason(pa.schema([one])))}


def check_schema(schema: pa.Schema, place: str) -> None:
    """Raise `SchemaError` for the first column that Lance cannot store, before anything is written."""
    for name, reason in refused_columns(schema).items():
        raise SchemaError(f"{place} cannot have the column {name!r}: {reason}; choose another name or type.")

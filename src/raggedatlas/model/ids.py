"""Identifiers: random cell uids, stable feature uids, content-hashed layout uids, and user-supplied names."""

import hashlib
import re
import secrets
from collections.abc import Container, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.errors import LimitError, NameRefusedError, SourceError
from raggedatlas.model.accessions import UNKNOWN, Accession, parse_accession

LONGEST_NAME = 200
"""Characters of a name; with a suffix it still fits into the name of a file (255 bytes)."""

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
COLUMN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

RESERVED = ("_rowid", "_rowaddr", "_rowoffset", "_row_created_at_version", "_row_last_updated_at_version")
"""Names that Lance gives to columns of its own; a table that has another column of such a name cannot be read."""


_MOST_UIDS = 1 << 27
_BLOCK = 1 << 16
_NO_DIGITS = np.zeros((0, 16), np.uint8)
_DIGITS = np.full(256, 255, np.uint8)
_DIGITS[list(b"0123456789abcdef")] = np.arange(16)
"""Value of each hex digit as `new_uids` writes it; 255 for all other bytes."""


def new_uids(n: int) -> pa.StringArray:
    """Draw `n` random uids of 16 hex digits, all different.

    Each has 64 random bits, so that writers that know nothing of each other can draw them.
    """
    # Offsets of `pa.string()` are int32.
    if n >= _MOST_UIDS:
        raise LimitError(f"{n:,} cells are added at once, fewer than {_MOST_UIDS:,} can be; divide them into datasets.")
    drawn = secrets.token_bytes(8 * n)
    numbers = np.sort(np.frombuffer(drawn, np.uint64))
    if (numbers[1:] == numbers[:-1]).any():
        return new_uids(n)
    ends = np.arange(0, 16 * n + 16, 16, dtype=np.int32)
    return pa.StringArray.from_buffers(n, pa.py_buffer(ends), pa.py_buffer(drawn.hex().encode()))


def integer_ids(values: Any, what: str) -> pa.Array:  # noqa: ANN401  (an Arrow or NumPy array of floats)
    """Return ids that are floats as int64, null where they are missing.

    pandas makes floats of integers as soon as one of them is missing. Floats of 64 bits hold integers exactly only
    below 2**53 (those of 32 bits below 2**24), so that larger ids are rounded already, and different ones may have
    become the same: these are refused, as are fractions and infinities. `what` says in the message what the values are.
    """
    floats = np.asarray(values.to_numpy(zero_copy_only=False) if isinstance(values, pa.Array) else values)
    exact = np.finfo(floats.dtype).nmant + 1
    missing = np.isnan(floats)
    wrong = ~missing & ((np.abs(floats) >= 2.0**exact) | (floats != np.floor(floats)))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise SourceError(
            f"{what} are floats, with {float(floats[row])!r} in row {row}; an id is an integer or text, and {floats.dtype} holds integers exactly "
            f"only below 2**{exact}. Read the source again with the ids as integers or text, e.g. dtype={{'id': 'Int64'}} in pandas."
        )
    return pa.array(np.where(missing, 0, floats).astype(np.int64), mask=missing)


def uid_numbers(uids: pa.Array) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Return the numbers that uids of 16 hex digits write; they take 8 bytes each, and compare fast.

    The other array says which texts are uids; all others have the number 0. At most some megabytes are used in addition
    to the result.
    """
    numbers = np.zeros(len(uids), np.uint64)
    valid = pc.fill_null(pc.equal(pc.binary_length(uids), 16), fill_value=False).to_numpy(zero_copy_only=False)
    for start in range(0, len(uids), _BLOCK):
        among = valid[start : start + _BLOCK]
        block = uids.slice(start, len(among))
        block = block if among.all() else block.filter(pa.array(among))
        offsets, data = block.buffers()[1:]
        # These texts have 16 bytes each and none is null, so they lie back to back from `first` on.
        first = int(np.frombuffer(offsets, np.int32)[block.offset]) if len(block) else 0
        digits = (
            _DIGITS[np.frombuffer(data, np.uint8)[first : first + 16 * len(block)].reshape(-1, 16)]
            if len(block)
            else _NO_DIGITS
        )
        right = (digits < 16).all(axis=1)
        # Pairs of digits become bytes; `& 15` keeps the 255 of a wrong digit out of its neighbor's half.
        packed = (digits[:, ::2] << 4 | digits[:, 1::2] & 15).view(">u8").ravel()
        numbers[start : start + _BLOCK][among] = np.where(right, packed, 0)
        # `among` is a view of `valid`: this also clears texts of 16 characters that are no hex digits.
        among[among] = right
    return numbers, valid


class UidIndex:
    """Finds uids among many, in any order; a text of them takes 20 bytes and a hash table of texts some 100, this 16."""

    def __init__(self, uids: pa.Array) -> None:
        numbers, valid = uid_numbers(uids)
        rows = np.flatnonzero(valid)
        # Stable: of equal uids the first row stays first, and `find` returns the leftmost.
        order = np.argsort(numbers[rows], kind="stable")
        self._rows = rows[order]
        self._numbers = numbers[self._rows]

    def find(self, uids: pa.Array) -> NDArray[np.int64]:
        """Return the first row of each uid, -1 for none."""
        numbers, valid = uid_numbers(uids)
        if not len(self._numbers):
            return np.full(len(uids), -1)
        order = np.argsort(numbers)  # neighbors are looked up one after the other: memory is read in order
        at = np.empty(len(uids), np.int64)
        # A number above the largest gets the last place, which the comparison below rejects.
        at[order] = np.minimum(np.searchsorted(self._numbers, numbers[order]), len(self._numbers) - 1)
        # A text that is no uid has the number 0, which is that of a uid, too.
        return np.where(valid & (self._numbers[at] == numbers), self._rows[at], -1)

    def repeated(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows whose uid an earlier row has too, and the first row of each."""
        again = np.flatnonzero(self._numbers[1:] == self._numbers[:-1]) + 1
        return self._rows[again], self._rows[np.searchsorted(self._numbers, self._numbers[again])]


def new_uid() -> str:
    """Draw one random uid of 16 hex digits."""
    return secrets.token_hex(8)


def feature_uids(space: str, features: Iterable[str | Accession], organism: str = UNKNOWN) -> list[str]:
    """Hash the identities of features to 16 hex digits each, so that writers in any process agree.

    A uid is the start of a sha256 over fields that each end in a NUL byte: space, namespace and accession without its
    version where the accession denotes one species by itself, else space, organism, ``symbol`` and the name. The case
    of space and organism does not matter. `organism` is that of the features whose identifier does not name one.

    Examples
    --------
    >>> feature_uids("gene_expression", ["ENSG00000105369", "ENSG00000105369.12"])
    ['0233ff74629f0165', '0233ff74629f0165']
    >>> feature_uids("gene_expression", ["CD79A"], "human") == feature_uids("gene_expression", ["CD79A"], "mouse")
    False
    """
    start = f"{space.strip().lower()}\0"
    uids = []
    for feature in features:
        parsed = parse_accession(feature) if isinstance(feature, str) else feature
        if parsed.namespace == "symbol":
            of = organism if parsed.organism == UNKNOWN else parsed.organism
            text = f"{start}{of.strip().lower()}\0symbol\0{parsed.name}\0"
        else:
            text = f"{start}{parsed.namespace}\0{parsed.name}\0"
        uids.append(hashlib.sha256(text.encode()).hexdigest()[:16])
    return uids


def repeated_uids(uids: Iterable[str]) -> list[str]:
    r"""Return unique uids for the columns of a matrix in which several columns are one feature.

    The mapping of features says that these count as one; the columns stay as they are. The first of each uid stays; the
    n-th, counted from 0, is the first 16 hex digits of a sha256 over the uid, ``repeat`` and n, each followed by a NUL
    byte.
    """
    uids = list(uids)
    if len(set(uids)) == len(uids):
        return uids
    seen: dict[str, int] = {}
    repeated = []
    for uid in uids:
        n = seen[uid] = seen.get(uid, -1) + 1
        repeated.append(hashlib.sha256(f"{uid}\0repeat\0{n}\0".encode()).hexdigest()[:16] if n else uid)
    return repeated


def layout_uid(uids: Iterable[str]) -> str:
    r"""Hash feature uids in column order to the first 16 hex digits of the sha256 over each uid followed by a NUL byte."""
    return hashlib.sha256("\0".join([*uids, ""]).encode()).hexdigest()[:16]


def check_name(name: str, what: str) -> str:
    """Return `name` if it may become part of a path or a table name; `what` says in the message what it names."""
    if NAME.fullmatch(str(name)) is None or ".." in name or name in RESERVED:
        raise NameRefusedError(
            f"The {what} name {name!r} may hold only letters, digits, '_', '-' and single dots, not start with a dot, and be none "
            f"of {RESERVED}; choose another name."
        )
    return name


def is_unicode(name: str) -> bool:
    """Return whether a name can be stored as UTF-8; halves of characters, as h5py reads from damaged files, cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def check_length(name: str, what: str) -> str:
    """Return a user-supplied name if it is printable and short enough to be displayed."""
    if len(name) > LONGEST_NAME or not name.isprintable():
        raise NameRefusedError(
            f"The {what} of {len(name)} characters is longer than {LONGEST_NAME} or holds some that cannot be printed; "
            "choose another."
        )
    return name


_UNFIT = re.compile(r"\.{2,}|[/\\\x00-\x1f\x7f]")
_UID = re.compile(r"[0-9a-f]{16}")


def check_license(text: str) -> str:
    """Return the name or address of a licence, if it may be one."""
    if not text.strip() or len(text) > LONGEST_NAME or not text.isprintable():
        raise NameRefusedError(
            f"The licence {text[:50]!r} is empty, has more than {LONGEST_NAME} characters, or cannot be printed; give its name or address."
        )
    return text


def check_given_name(name: str, what: str) -> str:
    """Return a name that a person gives to a dataset, result, annotation, geometry or snapshot, if it may be one.

    A name in the form of a uid is refused, because another object could be meant by it.
    """
    if not name or name != name.strip() or _UNFIT.search(name):
        raise NameRefusedError(
            f"The {what} {name!r} is empty, begins or ends with a blank, or holds '/', '\\\\', '..' or control characters; choose another."
        )
    if _UID.fullmatch(name):
        raise NameRefusedError(f"The {what} {name!r} has the form of a uid (16 hex digits); choose another.")
    return check_length(name, what)


def fit_name(text: str) -> str:
    """Return the name that a source without a given one gets.

    Examples
    --------
    >>> fit_name("a/b"), fit_name("0123456789abcdef"), len(fit_name("a" * 1000))
    ('a_b', 'dataset-0123456789abcdef', 200)
    """
    printable = "".join(char if char.isprintable() else "_" for char in text)
    name = _UNFIT.sub("_", printable)[:LONGEST_NAME].strip() or "dataset"
    return f"dataset-{name}" if _UID.fullmatch(name) else name


def column_name(name: str) -> str:
    """Convert a file's column name to one that tables and SQL accept; the original is kept in its metadata.

    Examples
    --------
    >>> column_name("percent.mt"), column_name("2nd pass"), column_name("")
    ('percent_mt', '_2nd_pass', 'column')
    """
    text = re.sub(r"\W", "_", str(name), flags=re.ASCII)
    if not text:
        return "column"
    return text if COLUMN.fullmatch(text) else f"_{text}"


def free_name(wanted: str, taken: Container[str], joint: str = "_") -> str:
    """Return a name, with the first number from 2 on that makes it free where it is taken."""
    name, n = wanted, 2
    while name in taken:
        name, n = f"{wanted}{joint}{n}", n + 1
    return name

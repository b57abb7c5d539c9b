"""Identifiers: random cell uids, stable feature uids, content-hashed layout uids, and the names people give."""

import hashlib
import re
import secrets
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from raggedatlas.errors import NameRefusedError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
COLUMN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VERSIONED = re.compile(r"(?P<id>ENS[A-Z]*\d{6,})\.(?P<version>\d+)(?P<rest>_PAR_Y)?")
_ENSEMBL = re.compile(r"ENS[A-Z]*\d{6,}(\.\d+)?(_PAR_Y)?")


def new_uids(n: int) -> pa.StringArray:
    """Draw `n` random uids of 16 hex digits, all different (seed 000, cell table).

    Parameters
    ----------
    n : int
        How many.

    Returns
    -------
    pyarrow.StringArray
        Each 64 random bits; safe for writers that know nothing of each other.

    Examples
    --------
    >>> [len(uid) for uid in new_uids(3).to_pylist()]
    [16, 16, 16]
    """
    drawn = secrets.token_bytes(8 * n)
    numbers = np.sort(np.frombuffer(drawn, np.uint64))
    if (numbers[1:] == numbers[:-1]).any():
        return new_uids(n)
    ends = np.arange(0, 16 * n + 16, 16, dtype=np.int32)
    return pa.StringArray.from_buffers(n, pa.py_buffer(ends), pa.py_buffer(drawn.hex().encode()))


def new_uid() -> str:
    """Draw one random uid of 16 hex digits.

    Examples
    --------
    >>> len(new_uid())
    16
    """
    return secrets.token_hex(8)


def feature_uids(organism: str, namespace: str, identifiers: Iterable[str]) -> list[str]:
    """Hash features' identities to 16 hex digits each, so that parallel writers agree.

    Parameters
    ----------
    organism, namespace : str
        For instance ``"human"`` and ``"gene_expression"``; case does not matter.
    identifiers : iterable of str
        The features' ids without their versions.

    Returns
    -------
    list of str
        First 16 hex digits of the sha256 of organism, namespace and id, each followed by a NUL byte.

    Examples
    --------
    >>> feature_uids("human", "gene_expression", ["ENSG00000105369"])
    ['75bd9972429b821b']
    >>> feature_uids("Human", "gene_expression", ["ENSG00000105369"])
    ['75bd9972429b821b']
    """
    start = "".join(f"{part.strip().lower()}\0" for part in (organism, namespace))
    return [hashlib.sha256(f"{start}{identifier}\0".encode()).hexdigest()[:16] for identifier in identifiers]


def layout_uid(uids: Iterable[str]) -> str:
    r"""Hash an ordered list of features to 16 hex digits (seed 000, `_feature_layouts`).

    Parameters
    ----------
    uids : iterable of str
        Feature uids in column order.

    Returns
    -------
    str
        First 16 hex digits of the sha256 over each uid followed by a NUL byte.

    Examples
    --------
    >>> layout_uid(["a", "b"]) == layout_uid(["ab"]), layout_uid(["a", "b"]) == layout_uid(["b", "a"])
    (False, False)
    """
    return hashlib.sha256("\0".join([*uids, ""]).encode()).hexdigest()[:16]


def split_version(identifier: str) -> tuple[str, str | None]:
    """Split the version suffix off an Ensembl id; other ids stay whole.

    Examples
    --------
    >>> split_version("ENSG00000105369.12")
    ('ENSG00000105369', '12')
    >>> split_version("RP11-34P13.7")
    ('RP11-34P13.7', None)
    """
    match = _VERSIONED.fullmatch(identifier) if identifier.startswith("ENS") and "." in identifier else None
    if match is None:
        return identifier, None
    return match["id"] + (match["rest"] or ""), match["version"]


def looks_like_ensembl(identifiers: Sequence[str]) -> bool:
    """Tell whether most of some identifiers have the form of Ensembl gene ids.

    Examples
    --------
    >>> looks_like_ensembl(["ENSG00000105369", "ENSMUSG00000000001.4"]), looks_like_ensembl(["CD79A"])
    (True, False)
    """
    sample = identifiers[:: max(1, len(identifiers) // 200)]
    hits = sum(_ENSEMBL.fullmatch(str(i)) is not None for i in sample)
    return bool(sample) and hits > len(sample) / 2


def check_name(name: str, what: str) -> str:
    """Return `name` if it may become part of a path or a table name.

    Parameters
    ----------
    name : str
        The name.
    what : str
        What it names, for the message.

    Raises
    ------
    NameRefusedError
        If it is empty, starts with a dot, or holds anything but letters, digits, ``_``, ``-`` and ``.``.

    Examples
    --------
    >>> check_name("gene_expression", "feature space")
    'gene_expression'
    """
    if NAME.fullmatch(str(name)) is None or ".." in name:
        raise NameRefusedError(
            f"The {what} name {name!r} may hold only letters, digits, '_', '-' and single dots, and not start with a dot; "
            "choose another name."
        )
    return name


def column_name(name: str) -> str:
    """Turn a file's column name into one that tables and SQL accept; the original is kept beside it.

    Examples
    --------
    >>> column_name("percent.mt"), column_name("2nd pass"), column_name("")
    ('percent_mt', '_2nd_pass', 'column')
    """
    text = re.sub(r"\W", "_", str(name), flags=re.ASCII)
    if not text:
        return "column"
    return text if COLUMN.fullmatch(text) else f"_{text}"

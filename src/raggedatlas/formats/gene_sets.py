"""Files of gene sets: GMT, a set a line."""

import gzip
import zlib
from pathlib import Path
from typing import Any

from raggedatlas.errors import LimitError, SourceError
from raggedatlas.store.copies import local_copy
from raggedatlas.store.location import Address
from raggedatlas.store.storage_errors import store_errors

MOST_BYTES = 2**28
"""Largest file, unpacked, that is read."""

_GZIP = b"\x1f\x8b"


def read_gmt(path: Address) -> dict[str, tuple[str, ...]]:
    """Read gene sets: on each line a name, a description and the genes, separated by tabs.

    The file is plain or gzipped, here, in an object store or on a web server, and at most 256 MiB unpacked. The result
    has the genes of each set, in the order of the file.
    """
    with local_copy(path) as place:
        text = _text_of(place)
    found: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        name, *rest = (part.strip() for part in line.split("\t"))
        genes = tuple(filter(None, rest[1:]))
        if not name or not genes:
            raise SourceError(
                f"Line {number} of {place.name} is no gene set; each line of a GMT file has a name, a description and genes, separated by tabs."
            )
        if name in found:
            raise SourceError(
                f"Line {number} of {place.name} has a second set {name!r}; give the sets of a file different names."
            )
        found[name] = genes
    return found


def _text_of(place: Path) -> str:
    with store_errors(f"read gene sets from {place}"), place.open("rb") as raw:
        packed = raw.read(2) == _GZIP
        raw.seek(0)
        try:
            stream: Any = gzip.GzipFile(fileobj=raw) if packed else raw
            data: bytes = stream.read(MOST_BYTES + 1)
            if len(data) <= MOST_BYTES:
                return data.decode("utf-8-sig")
        # `BadGzipFile` is an `OSError`, which would count as one of the store.
        except (EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
            raise SourceError(f"{place.name} is no GMT file, which is text, plain or gzipped: {error}.") from error
    raise LimitError(f"{place.name} is larger than {MOST_BYTES:,} bytes; a file of gene sets is smaller.")

"""Checksums: the crc32c of numbers, computed without the interpreter's lock, and the SHA-256 of files."""

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import NotFoundError, StoreError
from raggedatlas.store.native import library


def crc32c(data: bytes | bytearray | memoryview | NDArray[np.uint8]) -> int:
    """Return the crc32c of contiguous bytes."""
    raw = np.frombuffer(data, np.uint8)
    return int(library().ra_crc32c(0, raw, raw.size))


def extend_checksum(crc: int, values: NDArray[Any]) -> int:
    """Extend a crc32c by the little-endian bytes of values."""
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return int(library().ra_crc32c(crc, raw, raw.size))


def has_checksum(data: NDArray[np.uint8]) -> bool:
    """Tell whether bytes end with the crc32c of those before."""
    return data.size >= 4 and crc32c(np.ascontiguousarray(data[:-4])) == int.from_bytes(data[-4:].tobytes(), "little")


def with_checksum(data: bytes) -> bytes:
    """Return bytes with their crc32c behind them."""
    return data + crc32c(data).to_bytes(4, "little")


def file_digest(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file in hex.

    Raises
    ------
    NotFoundError
        If there is no such file.
    StoreError
        If it cannot be read.
    """
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise NotFoundError(f"There is no file {os.fspath(path)}.") from error
    except OSError as error:
        raise StoreError(f"{os.fspath(path)} cannot be read: {error.strerror or error}.") from error

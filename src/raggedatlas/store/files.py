"""Writing local files whole."""

import os
import stat
from pathlib import Path
from typing import TypeAlias
from uuid import uuid4

from raggedatlas.errors import StoreError

Piece: TypeAlias = bytes | memoryview
"""Bytes that are or will be a part of an object."""

Buffers: TypeAlias = Piece | list[Piece]
"""Bytes to write, in one piece or several."""

_MOST_PIECES = 1024
"""Pieces of one call of ``writev``; systems take no more."""


def joined(data: Buffers) -> bytes:
    """Give bytes in one piece."""
    return b"".join(data) if isinstance(data, list) else bytes(data)


def _write_pieces(file: Path, pieces: list[Piece]) -> None:
    """Write a file from many pieces: to join them would take fresh memory, and the interpreter's lock all the while."""
    if not hasattr(os, "writev"):
        file.write_bytes(joined(pieces))
        return
    with file.open("wb", buffering=0) as opened:
        waiting = [memoryview(piece) for piece in pieces]
        while waiting:
            written, done = os.writev(opened.fileno(), waiting[:_MOST_PIECES]), 0
            while done < len(waiting) and written >= len(waiting[done]):
                written -= len(waiting[done])
                done += 1
            waiting = waiting[done:]
            if written:
                waiting[0] = waiting[0][written:]


def write_file(file: Path, data: Buffers, *, only_if_absent: bool) -> bool:
    """Write a local file by a temporary neighbour and a rename (or a hard link for create-if-absent)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_dir() or (file.exists() and not stat.S_ISREG(file.lstat().st_mode)):
        raise StoreError(f"{file} is not a plain file and is not overwritten.")
    if only_if_absent and file.exists():
        return file.read_bytes() == joined(data)
    temporary = file.with_name(f".{file.name}.{uuid4().hex[:8]}.tmp")
    try:
        if isinstance(data, list):
            _write_pieces(temporary, data)
        else:
            temporary.write_bytes(data)
        if not only_if_absent:
            temporary.replace(file)
            return True
        try:
            file.hardlink_to(temporary)
        except FileExistsError:
            return file.read_bytes() == joined(data)
        return True
    finally:
        temporary.unlink(missing_ok=True)

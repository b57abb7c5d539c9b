"""What the library believes of the files of an array, looked at before it does: where damage there ends the process or takes its memory."""

import os
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError

TEXTS = "_var.tdb"
"""Ending of the file with the texts of a field; the one with their bounds has the same name without it."""

LARGEST_CHUNK = 64 << 20
"""Bytes of a decoded chunk beyond which its header is damaged; the library makes them of 64 KiB, or of one cell."""

_FRAGMENTS = "__fragments"
_HEADER = Struct("<IQQBQBI")
_TILE, _CHUNK, _PARTS, _PART = Struct("<Q"), Struct("<III"), Struct("<II"), Struct("<II")

_CHECKSUM_BYTES = 24
"""Of a length and an MD5."""


class _UnsoundError(Exception):
    """What is wrong, in a few words."""


def refuse_wild_sizes(path: Path) -> None:
    """Refuse an array or group whose files the library should not open.

    It would wait for pipes and devices, and allocate what schemas and metadata announce, even if that is more than their files have.

    Parameters
    ----------
    path : Path
        Of the array or group.

    Raises
    ------
    SourceError
        C00 with the file.
    """
    odd = _odd_file(path)
    if odd is not None:
        raise _refusal(path, odd, "is no file but a pipe, a device or a broken link")
    inner = [file for name in ("__schema", "__group", "__meta") for file in _files(path / name)]
    for file in (path / "__array_schema.tdb", *inner):
        if not file.is_file():
            continue
        with file.open("rb") as opened:
            head, size = opened.read(_HEADER.size), file.stat().st_size
        if len(head) == _HEADER.size:
            _, stored, _, _, _, _, filters = _HEADER.unpack(head)
            if _HEADER.size + filters + stored > size:
                raise _refusal(path, file, f"announces {filters + stored:,} bytes, and has {size - _HEADER.size:,}")


def refuse_broken_texts(path: Path, schema: Any, fields: tuple[str, ...] = ()) -> None:  # noqa: ANN401  (a tiledb.ArraySchema)
    """Refuse an array of which the bounds of texts lie beyond them or run backwards: the library would read memory that is not there.

    Parameters
    ----------
    path : Path
        Of the array.
    schema : tiledb.ArraySchema
        Its schema. Bounds that are packed by anything but zstd, with or without checksums, are not looked at.
    fields : tuple of str
        Names of the files without their ending, as of `file_names`; all where there are none.

    Raises
    ------
    SourceError
        C00 with the file.
    """
    packed = [type(schema.offsets_filters[i]).__name__ for i in range(len(schema.offsets_filters))]
    if packed[:1] not in ([], ["ZstdFilter"]) or packed[1:] not in ([], ["ChecksumMD5Filter"]):
        return
    for texts in sorted(path.glob(f"**/*{TEXTS}")):
        field = texts.name.removesuffix(TEXTS)
        bounds = texts.with_name(f"{field}.tdb")
        # Before 2020 files were named after attributes, of which one may end as the texts of another would.
        of_numbers = schema.has_attr(field) and not schema.attr(field).isvar and bounds.parents[1].name != _FRAGMENTS
        if (not fields or field in fields) and bounds.is_file() and not of_numbers:
            try:
                _hold(bounds, texts, checked=len(packed) > 1)
            except _UnsoundError as error:
                raise _refusal(path, bounds, str(error)) from error


def file_names(schema: Any, attribute: str) -> tuple[str, ...]:  # noqa: ANN401
    """Name the files of an attribute, without their ending, as releases of today and those before 2020 do.

    Parameters
    ----------
    schema : tiledb.ArraySchema
        Of the array.
    attribute : str
        One of its attributes.
    """
    number = next(i for i in range(schema.nattr) if schema.attr(i).name == attribute)
    return f"a{number}", attribute


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file()) if folder.is_dir() else []


def _odd_file(path: Path) -> Path | None:
    """Find the first thing below a folder that is neither a file nor a folder; links are followed."""
    folders, seen = [path], set()
    while folders:
        folder = folders.pop()
        real = os.path.realpath(folder)
        if real in seen:
            continue
        seen.add(real)
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    folders.append(Path(entry.path))
                elif not entry.is_file():
                    return Path(entry.path)
    return None


def _refusal(path: Path, file: Path, what: str) -> SourceError:
    return SourceError(
        f"C00: {path} is damaged: {file.relative_to(path)} {what}. Fetch or write the CXG again."
    )  # fmt: skip


def _hold(bounds: Path, texts: Path, *, checked: bool) -> None:
    """Hold the bounds of each tile against the length of its texts; `checked` says whether chunks of bounds have checksums."""
    with bounds.open("rb") as of_bounds, texts.open("rb") as of_texts:
        tiles = _tiles(of_texts, bounds=False)
        for begin in _tiles(of_bounds, bounds=True, checked=checked):
            length = next(tiles, None)
            if length is None:
                raise _UnsoundError("has more tiles than its texts")
            found = begin.view(np.uint64)
            if not len(found):
                continue
            # Releases whose fragments lay beside each other did not say that the first bound of a tile is 0.
            first = np.uint64(0) if bounds.parents[1].name == _FRAGMENTS else found[0]
            if (found[1:] < found[:-1]).any() or found[0] != first or found[-1] - first > length[0]:
                raise _UnsoundError("has bounds that run backwards or beyond its texts")


def _tiles(file: BinaryIO, *, bounds: bool, checked: bool = False) -> Iterator[NDArray[Any]]:
    """Walk over the tiles of a file: the decoded bytes of each where it has bounds, else how many they are."""
    end = file.seek(0, 2)
    file.seek(0)
    while file.tell() < end:
        (n,) = _taken(file, _TILE, end)
        chunks = [_chunk(file, end, decoded=bounds, checked=checked) for _ in range(min(n, end))]
        if bounds:
            whole = np.concatenate([np.empty(0, np.uint8), *chunks])
            if len(whole) % 8:
                raise _UnsoundError("has a tile that ends within a bound")
            yield whole
        else:
            yield np.array([sum(int(chunk[0]) for chunk in chunks)], np.uint64)


def _taken(file: BinaryIO, form: Struct, end: int) -> tuple[int, ...]:
    if file.tell() + form.size > end:
        raise _UnsoundError("is cut short")
    return form.unpack(file.read(form.size))


def _chunk(file: BinaryIO, end: int, *, decoded: bool, checked: bool) -> NDArray[Any]:
    """Read the next chunk: what it holds, or how many bytes that are."""
    length, stored, described = _taken(file, _CHUNK, end)
    if file.tell() + described + stored > end or (length > LARGEST_CHUNK and decoded):
        raise _UnsoundError("announces more bytes than it has")
    if not decoded:
        file.seek(described + stored, 1)
        return np.array([length], np.uint64)
    parts = _parts(file.read(described), stored, checked=checked) if described else []
    if (sum(part[0] for part in parts) if described else stored) != length:
        raise _UnsoundError("has a chunk of another length than it says")
    values = file.read(stored)
    return _unpacked(values, parts) if described else np.frombuffer(values, np.uint8)


def _parts(described: bytes, stored: int, *, checked: bool) -> list[tuple[int, int]]:
    """Read the lengths of the parts of a packed chunk, decoded and stored; checksums, which the library compares, come first."""
    if checked:
        n_sums = sum(_PARTS.unpack_from(described)) if len(described) >= _PARTS.size else 0
        described = described[_PARTS.size + n_sums * _CHECKSUM_BYTES :]
    n_described, n = _PARTS.unpack_from(described) if len(described) >= _PARTS.size else (1, 0)
    if n_described or len(described) != _PARTS.size + n * _PART.size:
        raise _UnsoundError("has a chunk that is described wrongly")
    parts = [_PART.unpack_from(described, _PARTS.size + i * _PART.size) for i in range(n)]
    if sum(part[1] for part in parts) != stored:
        raise _UnsoundError("has a chunk whose parts do not fill it")
    return [(int(length), int(size)) for length, size in parts]


def _unpacked(values: bytes, parts: list[tuple[int, int]]) -> NDArray[Any]:
    from numcodecs import zstd

    made, at = [np.empty(0, np.uint8)], 0
    for length, size in parts:
        try:
            out = bytes(zstd.decompress(values[at : at + size]))
        except (RuntimeError, ValueError, MemoryError) as error:
            raise _UnsoundError(f"cannot be decoded ({error})") from error
        if len(out) != length:
            raise _UnsoundError("has a part of another length than it says")
        made.append(np.frombuffer(out, np.uint8))
        at += size
    return np.concatenate(made)

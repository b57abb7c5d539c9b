"""What Neuroglancer's precomputed formats share: the info file, transforms, and blobs by id, each a file or several in shards."""

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.vectors.shapes import Attribute

TYPES = ("float32", "int8", "uint8", "int16", "uint16", "int32", "uint32")
"""Element types of values."""

PER_MINISHARD = 512
"""About how many blobs one list of a shard names."""

IDENTITY = [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0]


@dataclass(frozen=True)
class Blob:
    """The bytes of one id, and where they stand in their shard.

    Parameters
    ----------
    key : int
        The id.
    data : bytes
        What is stored for it.
    shard : bytes
        The whole shard, or nothing where each id has a file of its own.
    start : int
        Where the data begin there.
    """

    key: int
    data: bytes
    shard: bytes = b""
    start: int = 0


def read_info(path: Path) -> dict[str, Any]:
    """Return the ``info`` of a folder; `SourceError` if there is none that can be read."""
    try:
        info = json.loads((path / "info").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise SourceError(f"{path} has no file 'info' in JSON; it is no precomputed folder.") from None
    if not isinstance(info, dict):
        raise SourceError(f"{path}/info is no JSON object; it is no precomputed folder.")
    for key in ("skeletons", "mesh"):
        if isinstance(info.get(key), str) and "scales" in info:
            raise SourceError(f"{path} is a volume of images; its shapes lie in {path / info[key]}. Give that folder.")
    return info


def moved(positions: NDArray[Any], info: Mapping[str, Any], path: Path) -> NDArray[Any]:
    """Return stored positions in the space of the model; `SourceError` if the transform is none."""
    try:
        matrix = np.array(info.get("transform", IDENTITY), np.float64).reshape(3, 4)
    except (TypeError, ValueError):
        raise SourceError(f"{path}/info has a transform that is not 12 numbers.") from None
    if np.array_equal(matrix.ravel(), IDENTITY):
        return positions
    return (positions.astype(np.float64) @ matrix[:, :3].T + matrix[:, 3]).astype(np.float32)


def read_blobs(path: Path, sharding: Mapping[str, Any] | None, suffix: str = "") -> Iterator[Blob]:
    """Yield the blobs of a folder by ascending id.

    Parameters
    ----------
    path : Path
        The folder.
    sharding : mapping or None
        What ``info`` says of it; None: a file for each id, named by it and `suffix`.

    Raises
    ------
    SourceError
        If a shard is cut off or written in a way that is not known.
    """
    if sharding is not None:
        shards = [blob for file in sorted(path.glob("*.shard")) for blob in _read_shard(file, sharding)]
        yield from sorted(shards, key=lambda blob: blob.key)
        return
    names = [
        file for file in path.iterdir() if file.name.endswith(suffix) and file.name.removesuffix(suffix).isdecimal()
    ]
    for file in sorted(names, key=lambda file: int(file.name.removesuffix(suffix))):
        yield Blob(int(file.name.removesuffix(suffix)), file.read_bytes())


def _read_shard(file: Path, sharding: Mapping[str, Any]) -> Iterator[Blob]:
    data = file.read_bytes()
    codecs: dict[str, Callable[[bytes], bytes]] = {"raw": bytes, "gzip": gzip.decompress}
    try:
        unpack_list = codecs[sharding.get("minishard_index_encoding", "raw")]
        unpack = codecs[sharding.get("data_encoding", "raw")]
        n_lists = 1 << int(sharding["minishard_bits"])
        base = 16 * n_lists
        for first, last in np.frombuffer(data, "<u8", 2 * n_lists).reshape(-1, 2).tolist():
            packed = data[base + first : base + last]
            if base + last > len(data):
                raise ValueError("it ends inside a list of its blobs")
            if last > first:
                keys, gaps, sizes = np.frombuffer(unpack_list(packed), "<u8").reshape(3, -1)
                ends = np.cumsum(gaps + sizes).tolist()
                for key, size, end in zip(np.cumsum(keys).tolist(), sizes.tolist(), ends, strict=True):
                    if base + end > len(data):
                        raise ValueError("it ends inside a blob")
                    start = base + end - size
                    yield Blob(key, unpack(data[start : start + size]), data, start)
    except (KeyError, ValueError, TypeError, EOFError, OSError) as error:
        raise SourceError(f"{file} is no shard that can be read: {type(error).__name__}: {error}.") from None


def write_shard(
    path: Path, ids: NDArray[np.uint64], blobs: Sequence[bytes], ahead: Sequence[bytes] | None = None
) -> dict[str, Any]:
    """Write blobs into one shard of a folder; return what ``info`` says of it. What stands `ahead` of each is named by no list.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> sharding = write_shard(folder, np.array([7, 9], np.uint64), [b"a", b"bc"])
    >>> [(blob.key, blob.data) for blob in read_blobs(folder, sharding)]
    [(7, b'a'), (9, b'bc')]
    """
    bits = max(0, int(np.ceil(np.log2(max(len(ids), 1) / PER_MINISHARD))))
    lists = (ids & np.uint64((1 << bits) - 1)).astype(np.int64)
    order = np.lexsort((ids, lists))
    before = [b""] * len(blobs) if ahead is None else ahead
    sizes = np.array([len(blobs[row]) for row in order], np.uint64)
    leads = np.array([len(before[row]) for row in order], np.uint64)
    ends = np.cumsum(sizes + leads)
    bounds, found, at = np.zeros((1 << bits, 2), "<u8"), [], int(ends[-1]) if len(ends) else 0
    for number in range(1 << bits):
        rows = np.flatnonzero(lists[order] == number)
        if len(rows):
            keys = np.diff(ids[order[rows]], prepend=np.uint64(0))
            gaps = leads[rows]
            gaps[0] = ends[rows[0]] - sizes[rows[0]]
            found.append(np.stack([keys, gaps, sizes[rows]]).astype("<u8").tobytes())
            bounds[number] = at, at + len(found[-1])
            at += len(found[-1])
    path.mkdir(parents=True, exist_ok=True)
    (path / "0.shard").write_bytes(
        bounds.tobytes() + b"".join(before[row] + blobs[row] for row in order) + b"".join(found)
    )
    return {
        "@type": "neuroglancer_uint64_sharded_v1",
        "preshift_bits": 0,
        "hash": "identity",
        "minishard_bits": bits,
        "shard_bits": 0,
        "minishard_index_encoding": "raw",
        "data_encoding": "raw",
    }


def take_bytes(data: bytes, at: int, count: int, kind: str, where: str) -> tuple[NDArray[Any], int]:
    """Return `count` values at a place of a blob and the place behind them; `SourceError` if it ends before."""
    size = np.dtype(kind).itemsize * count
    if at + size > len(data):
        raise SourceError(f"{where} has {len(data)} bytes; expected {at + size} or more. It is cut off.")
    return np.frombuffer(data, kind, count, at), at + size


def stored_type(attribute: Attribute) -> str | None:
    """Return the element type that holds an attribute, or None: wide integers become narrow where they fit, doubles become floats."""
    values = attribute.values
    if values.dtype.kind == "f":
        return "float32"
    if values.dtype.kind not in "iu":
        return None
    if values.dtype.name in TYPES:
        return str(values.dtype.name)
    fits = (kind for kind in ("int32", "uint32") if _fits(values, kind))
    return next(fits, None)


def _fits(values: NDArray[Any], kind: str) -> bool:
    limits = np.iinfo(kind)
    return not values.size or bool(limits.min <= values.min() and values.max() <= limits.max)


def value_losses(family: str, name: str, attribute: Attribute) -> Iterator[str]:
    """Yield what becomes of an attribute's values."""
    kind = stored_type(attribute)
    if kind is None:
        if "categories" not in attribute.metadata and attribute.values.dtype.kind in "iuf":
            yield f"{family} attribute {name!r} is left out: it needs 64 bits"
    elif attribute.values.dtype.kind == "f" and attribute.values.dtype.itemsize > 4:
        yield f"rounded: {family} attribute {name!r}, to 32-bit floats"

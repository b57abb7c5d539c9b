"""Zarr v3 arrays and groups: their metadata, the limits on what metadata may declare, and writing arrays as a stream."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from raggedatlas.errors import AtlasError, CorruptError, SchemaError, StoreError
from raggedatlas.model.arrays import DTYPES, ArraySpec, shards_path
from raggedatlas.model.records import Span
from raggedatlas.store.bundle import MEMBER_BYTES, Bundle
from raggedatlas.store.codecs import (
    NO_BREAKS,
    EncodedChunks,
    Piece,
    array_decoder,
    chunk_encoder,
    codecs_json,
    count_chunks,
    encode_run,
    extend_checksum,
    is_exact,
    refuse_unknown_codecs,
    split_chunks,
)
from raggedatlas.store.location import Location
from raggedatlas.store.runtime import BackgroundWriter
from raggedatlas.store.shards import (
    compose_shard,
    hash_shard,
    hash_shards,
    index_bytes,
    parse_index,
    shard_key,
)

_ROW_CHUNK_BYTES = 64 * 2**10
_INDEX_CODECS: list[dict[str, Any]] = [
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "crc32c"},
]


def read_spec(location: Location, path: str) -> ArraySpec:
    """Read what must be known of a stored array from its ``zarr.json``; `path` is below the Zarr store `location`."""
    text = location.read_bytes(f"{path}/zarr.json")
    try:
        metadata: dict[str, Any] = json.loads(text)
        if metadata["node_type"] != "array" or metadata["zarr_format"] != 3:
            raise CorruptError(f"{path} is not a Zarr v3 array but a {metadata['node_type']}.")
        codecs = metadata["codecs"]
        refuse_unknown_codecs(codecs, path)
        outer = tuple(metadata["chunk_grid"]["configuration"]["chunk_shape"])
        chunk, shard = outer, None
        key = metadata["chunk_key_encoding"]
        plain_key = key["name"] == "default" and key.get("configuration", {}).get("separator", "/") == "/"
        first = codecs[0]
        settings = first.get("configuration") or {}
        # Other index codecs and key encodings are valid Zarr too: `shard_shape` stays None and zarr-python reads them.
        if (
            plain_key
            and len(codecs) == 1
            and first["name"] == "sharding_indexed"
            and settings.get("index_location", "end") == "end"
            and codecs_json(settings["index_codecs"]) == codecs_json(_INDEX_CODECS)
        ):
            chunk, shard, codecs = tuple(settings["chunk_shape"]), outer, settings["codecs"]
        spec = ArraySpec(
            path=path,
            shape=tuple(metadata["shape"]),
            dtype=str(metadata["data_type"]),
            chunk_shape=chunk,
            shard_shape=shard,
            codecs=codecs_json(codecs),
            fill_value=json.dumps(metadata["fill_value"]),
        )
        array_decoder(spec)
        spec.fill()
    except AtlasError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise CorruptError(f"{location.uri}/{path}/zarr.json is not Zarr v3 array metadata: {error!r}.") from error
    return spec


def array_metadata(spec: ArraySpec) -> dict[str, Any]:
    """Return the metadata of a sharded array that we wrote."""
    sharding = {
        "chunk_shape": list(spec.chunk_shape),
        "codecs": json.loads(spec.codecs),
        "index_codecs": _INDEX_CODECS,
        "index_location": "end",
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(spec.shape),
        "data_type": spec.dtype,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(spec.shard_shape or spec.chunk_shape)},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": json.loads(spec.fill_value),
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {},
        "storage_transformers": [],
    }


def part_of(spec: ArraySpec) -> Span | None:
    """Return where an array is within a larger file, or the references to one that is linked; None where it has files of its own."""
    return spec.within if spec.linked is None else spec.linked.references


def is_described(location: Location, spec: ArraySpec) -> bool:
    """Return whether the ``zarr.json`` of a sharded array is exactly what a writer writes; True for other arrays."""
    if spec.shard_shape is None:
        return True
    return bool(json.loads(location.read_bytes(f"{spec.path}/zarr.json")) == array_metadata(spec))


def _decode_all(spec: ArraySpec, chunks: Sequence[Piece]) -> NDArray[Any]:
    """Decode consecutive full chunks."""
    out = np.empty((len(chunks) * spec.chunk_shape[0], *spec.row_shape), spec.dtype)
    decoder = array_decoder(spec)
    if decoder is None:
        raise StoreError(f"{spec.path} is written with codecs that cannot be read back directly: {spec.codecs}.")
    for i, chunk in enumerate(chunks):
        decoder(chunk, out[i * spec.chunk_shape[0] : (i + 1) * spec.chunk_shape[0]])
    return out


class ArrayWriter:
    """Writes one array along its first axis, a piece at a time, in the memory of one shard.

    The ``zarr.json`` comes last, so an unfinished array is none.

    `path` is below the Zarr store `location`; every part of it is checked before the first write. `row_shape` is empty
    for a 1-D array. `shard_rows` is rounded up to whole chunks. By default a chunk and a shard of a 1-D array have as
    many elements as the profile says (``standard``: 4,096 and 4 Mi), those of others about 64 KiB and 4 Mi elements. An
    array smaller than one shard gets one shard of as many chunks as it needs, and an array smaller than one chunk a
    chunk of exactly its size.
    """

    def __init__(
        self,
        location: Location,
        path: str,
        dtype: DTypeLike,
        row_shape: tuple[int, ...] = (),
        *,
        profile: str = "standard",
        chunk_rows: int | None = None,
        shard_rows: int | None = None,
    ) -> None:
        self._send: BackgroundWriter | None = None
        self.target = location.child(*path.split("/"))
        if location.is_local:
            self.target.checked_path()
        self.location, self.path, self.profile = location, path, profile
        self.row_shape = tuple(int(size) for size in row_shape)
        if 0 in self.row_shape:
            raise SchemaError(f"{self.path} has rows of shape {self.row_shape}, which hold no elements; leave it out.")
        # `_set_dtype` chooses an encoder by the number of axes of `_rest`; the dtype of `_rest` is corrected below.
        self._rest = np.empty((0, *self.row_shape), np.uint8)
        self._set_dtype(np.dtype(dtype))
        row_bytes = max(1, math.prod(self.row_shape)) * self.dtype.itemsize
        default = max(1, _ROW_CHUNK_BYTES // row_bytes) if self.row_shape else self.encoder.chunk_elements
        self.chunk_rows = chunk_rows or default
        wanted_rows = shard_rows or max(1, self.encoder.shard_elements // max(1, math.prod(self.row_shape)))
        self.shard_rows = -(-wanted_rows // self.chunk_rows) * self.chunk_rows
        self.n_rows = 0
        self.n_shards = 0
        self._runs: list[EncodedChunks] = []
        self._rest = self._rest.astype(self.dtype)
        self._breaks = NO_BREAKS
        self._crc = 0
        self._hashed: dict[int, bytes] = {}
        self._open = True
        self._spec(self.chunk_rows, self.shard_rows)

    def behind(self, send: BackgroundWriter | None) -> Self:
        """Write shards and metadata in the background; they are complete when the context of `send` ends.

        `send` is used from the thread that appends and closes; None writes on that thread from now on.
        """
        self._send = send
        return self

    @property
    def checksum(self) -> str:
        """crc32c of the little-endian bytes of all values so far, as eight hex digits."""
        return f"{self._crc:08x}"

    def checksums(self, path: str) -> dict[str, str]:
        """Wait until all shards are written, and return what a record holds of the array.

        The result maps `path`, that of the array below its group, to `checksum`, and the folder of its shards to
        `hash_shards` of them.
        """
        if self._send is not None:
            self._send.join()
        return {path: self.checksum, shards_path(path): hash_shards(self._hashed)}

    def append(self, values: NDArray[Any], breaks: NDArray[np.int64] | None = None) -> None:
        """Append rows of the array's dtype, or of one that it holds exactly.

        `breaks` are the places in `values`, ascending, where rows of a matrix begin: packed blocks that follow them are
        smaller.
        """
        self._refuse_closed()
        values = np.asarray(values)
        if values.shape[1:] != self.row_shape or values.ndim == 0:
            raise SchemaError(
                f"{self.path} takes rows of shape {self.row_shape}, got an array of shape {values.shape}."
            )
        if not is_exact(values.dtype, self.dtype):
            raise SchemaError(
                f"{self.path} holds {self.dtype}, which cannot hold every {values.dtype}; promote() it first."
            )
        values = np.ascontiguousarray(values, dtype=self.dtype)
        # Before values are cut and padded: `read_all` compares this with the crc32c of the values alone.
        self._crc = extend_checksum(self._crc, values)
        self.n_rows += len(values)
        step = self.shard_rows
        places = NO_BREAKS if breaks is None else breaks
        # At most one shard at a time, so that encoded chunks waiting in memory do not grow with `values`.
        for start in range(0, len(values), step):
            inside = places[np.searchsorted(places, start) : np.searchsorted(places, start + step)]
            self._take(values[start : start + step], inside - start)

    def promote(self, dtype: DTypeLike) -> None:
        """Rewrite what was written so far in a wider element type, shard by shard, exactly."""
        self._refuse_closed()
        new = np.dtype(dtype).newbyteorder("=")
        if self.dtype == new:
            return
        if not is_exact(self.dtype, new):
            raise SchemaError(f"{self.path} holds {self.dtype}; {new} cannot hold all its values. Choose a wider type.")
        # Shards that are still in the queue must be in the store before they are read back below.
        if self._send is not None:
            self._send.join()
        before = self._spec(self.chunk_rows, self.shard_rows)
        runs, self._runs = self._runs, []
        self._set_dtype(new)
        # The checksum covers bytes of the stored type, so it starts again: shards, then chunks, then the rest.
        self._crc = 0
        for shard in range(self.n_shards):
            data = self.target.read_bytes(shard_key(self.row_shape, shard))
            index = parse_index(data[-index_bytes(before.chunks_per_shard) :], len(data), before.path)
            stored = _decode_all(before, [data[at : at + size] for at, size in index.tolist()]).astype(new)
            self._crc = extend_checksum(self._crc, stored)
            self._put_shard(shard, self._encode(stored))
        if runs:
            stored = _decode_all(before, [chunk for run in runs for chunk in run.chunks()]).astype(new)
            self._crc = extend_checksum(self._crc, stored)
            self._runs = self._encode(stored)
        self._rest = self._rest.astype(new)
        self._crc = extend_checksum(self._crc, self._rest)

    def close(self, *, listed: bool = False, bundle: Bundle | None = None) -> ArraySpec:
        """Write the last shard and the metadata; return the spec of the array.

        `listed` says that the metadata of the group describe the array (see `describe_group`), so it gets none of its
        own. An array of one small shard is put into `bundle` instead, with metadata of its own.
        """
        self._refuse_closed()
        self._open = False
        if len(self._rest):
            if not self._runs and not self.n_shards:
                self.chunk_rows = len(self._rest)
            # Chunks are stored full; `shape` says which rows of the last one count.
            padded = np.zeros((self.chunk_rows, *self.row_shape), self.dtype)
            padded[: len(self._rest)] = self._rest
            self._runs += self._encode(padded, self._breaks)
            self._rest = self._rest[:0]
        if not self.n_shards:
            self.shard_rows = max(1, count_chunks(self._runs)) * self.chunk_rows
        spec = self._spec(self.chunk_rows, self.shard_rows)
        metadata = json.dumps(array_metadata(spec), indent=2).encode()
        n_bytes = sum(memoryview(run.data).nbytes for run in self._runs)
        if bundle is not None and self._runs and not self.n_shards and n_bytes <= MEMBER_BYTES:
            key = f"{self.path}/{shard_key(self.row_shape, 0)}"
            added = bundle.add({key: self._compose(0, self._runs), f"{self.path}/zarr.json": metadata})
            if added is not None:
                return replace(spec, within=added[key])
        if self._runs:
            self._flush()
        if not listed:
            create_group(self.location, self.path.rpartition("/")[0])
            self._write(lambda: self.target.write_bytes("zarr.json", metadata))
        return spec

    def _set_dtype(self, dtype: np.dtype[Any]) -> None:
        """Set the element type and its encoder."""
        self.dtype = dtype.newbyteorder("=")
        if self.dtype.name not in DTYPES:
            raise SchemaError(f"{self.path} cannot hold {dtype}; expected one of {', '.join(DTYPES)}.")
        self.encoder = chunk_encoder(self.profile, self.dtype, self._rest)
        self._judged = False

    def _refuse_closed(self) -> None:
        """Refuse a second close and late rows."""
        if not self._open:
            raise StoreError(f"The writer of {self.path} is closed; open a new one at a new path.")

    def _take(self, values: NDArray[Any], breaks: NDArray[np.int64]) -> None:
        """Encode all full chunks, keep the rest, write a shard when it is full."""
        kept, step = len(self._rest), self.chunk_rows
        if kept:
            head = np.concatenate([self._rest, values[: step - kept]])
            if len(head) < step:
                self._rest, self._breaks = head, np.concatenate([self._breaks, breaks + kept])
                return
            inside = breaks[: np.searchsorted(breaks, step - kept)]
            self._runs += self._encode(head, np.concatenate([self._breaks, inside + kept]))
            values, breaks = values[step - kept :], breaks[len(inside) :] - (step - kept)
        full = len(values) // step * step
        per_shard = self.shard_rows // step
        self._runs += self._encode(values[:full], breaks)
        # A view would keep the caller's block alive, and change when its buffer is reused.
        self._rest = values[full:].copy()
        self._breaks = breaks[np.searchsorted(breaks, full) :] - full
        while count_chunks(self._runs) >= per_shard:
            self._runs, later = split_chunks(self._runs, per_shard)
            self._flush()
            self._runs = later

    def _encode(self, values: NDArray[Any], breaks: NDArray[np.int64] = NO_BREAKS) -> list[EncodedChunks]:
        """Encode full chunks of rows; the first ones decide whether differences are stored."""
        if not self._judged and len(values):
            self.encoder = chunk_encoder(self.profile, self.dtype, values[: self.chunk_rows])
            self._judged = True
        return encode_run(self.encoder, values, self.chunk_rows, breaks)

    def _flush(self) -> None:
        """Write the gathered chunks as the next shard."""
        self._put_shard(self.n_shards, self._runs)
        self.n_shards += 1
        self._runs = []

    def _put_shard(self, shard: int, runs: list[EncodedChunks]) -> None:
        """Write one shard in one piece."""
        key = shard_key(self.row_shape, shard)
        self._write(lambda: self.target.write_bytes(key, self._compose(shard, runs)))

    def _compose(self, shard: int, runs: list[EncodedChunks]) -> list[Piece]:
        """Return the parts of one shard, whose hash replaces that of one that is written anew."""
        pieces = compose_shard(runs, self.shard_rows // self.chunk_rows)
        self._hashed[shard] = hash_shard(pieces)
        return pieces

    def _write(self, job: Callable[[], object]) -> None:
        """Write something now, or after what was sent before it."""
        if self._send is None:
            job()
        else:
            self._send(job)

    def _spec(self, chunk_rows: int, shard_rows: int) -> ArraySpec:
        """Return the spec of the array in its current state."""
        zero = np.zeros((), self.dtype).item()
        return ArraySpec(
            path=self.path,
            shape=(self.n_rows, *self.row_shape),
            dtype=self.dtype.name,
            chunk_shape=(chunk_rows, *self.row_shape),
            shard_shape=(shard_rows, *self.row_shape),
            codecs=codecs_json(self.encoder.codecs()),
            fill_value=json.dumps([0.0, 0.0] if isinstance(zero, complex) else zero),
        )


def create_group(location: Location, path: str, attributes: Mapping[str, Any] | None = None) -> None:
    """Write the metadata of a Zarr v3 group and of the groups above it, where they are missing.

    `path` is slash-separated, below the Zarr store `location`; the empty string is the root. `attributes` are those of
    the group itself, and replace those of an existing group.
    """
    parts = path.split("/") if path else []
    location.child(*parts)
    # `ensure_bytes` replaces nothing, so parallel writers may create the groups above at the same time.
    steps: list[Callable[[], object]] = [
        partial(location.ensure_bytes, "/".join([*parts[:n], "zarr.json"]), _group_metadata({}))
        for n in range(len(parts) + (attributes is None))
    ]
    if attributes is not None:
        steps.append(partial(write_group_attributes, location, path, attributes))
    location.side_by_side(steps)


def write_group_attributes(location: Location, path: str, attributes: Mapping[str, Any]) -> None:
    """Write the metadata of one group with these attributes, replacing what was there."""
    location.write_bytes(f"{path}/zarr.json" if path else "zarr.json", _group_metadata(attributes))


def describe_group(
    location: Location,
    path: str,
    attributes: Mapping[str, Any],
    specs: Mapping[str, ArraySpec],
    kept: Mapping[str, Any] | None = None,
) -> None:
    """Write the metadata of one group and of all arrays and groups below it, which need none of their own, as one file.

    `location` is the Zarr store. Keys of `specs` and `kept` are paths below the group; `kept` has metadata that are
    listed too.
    """
    location.write_bytes(f"{path}/zarr.json", group_metadata(attributes, specs, kept))


def group_metadata(
    attributes: Mapping[str, Any], specs: Mapping[str, ArraySpec], kept: Mapping[str, Any] | None = None
) -> bytes:
    """Return the ``zarr.json`` that `describe_group` writes."""
    listing = {"kind": "inline", "must_understand": False, "metadata": {**(kept or {}), **listed_nodes(specs)}}
    metadata = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": dict(attributes),
        "consolidated_metadata": listing,
    }
    return json.dumps(metadata, indent=2).encode()


def listed_nodes(specs: Mapping[str, ArraySpec]) -> dict[str, Any]:
    """Return the metadata of arrays and of the groups that hold them: path -> metadata; arrays within other files, of the store or not, are not listed."""
    listed = {path: array_metadata(spec) for path, spec in specs.items() if spec.within is None and spec.linked is None}
    parts = [path.split("/")[:-1] for path in listed]
    groups = {"/".join(part[:n]) for part in parts for n in range(1, len(part) + 1)}
    node = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    return dict(sorted({**listed, **dict.fromkeys(groups, node)}.items()))


@dataclass(frozen=True)
class GroupMetadata:
    """The metadata of one group."""

    attributes: dict[str, Any]
    # Path below the group -> metadata of an array or group; None where each has a file of its own.
    listed: dict[str, Any] | None


def read_group(location: Location, path: str) -> GroupMetadata:
    """Read the metadata of one group."""
    text = location.read_bytes(f"{path}/zarr.json" if path else "zarr.json")
    try:
        metadata = json.loads(text)
        if metadata["node_type"] != "group":
            raise CorruptError(f"{location.uri}/{path} is not a group but a {metadata['node_type']}.")
        unknown = sorted(set(metadata) - {"zarr_format", "node_type", "attributes", "consolidated_metadata"})
        if metadata["zarr_format"] != 3 or unknown:
            raise CorruptError(
                f"{location.uri}/{path}/zarr.json is not Zarr v3 group metadata: format {metadata['zarr_format']}, keys {unknown}."
            )
        listing = metadata.get("consolidated_metadata")
        if listing is not None and (listing["kind"] != "inline" or listing["must_understand"] is not False):
            raise CorruptError(f"{location.uri}/{path}/zarr.json has consolidated metadata of an unknown kind.")
        listed = None if listing is None else dict(listing["metadata"])
        return GroupMetadata(dict(metadata.get("attributes") or {}), listed)
    except CorruptError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"{location.uri}/{path}/zarr.json is not Zarr v3 group metadata: {error!r}.") from error


def _group_metadata(attributes: Mapping[str, Any]) -> bytes:
    """Return the ``zarr.json`` of a group."""
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}, indent=2).encode()

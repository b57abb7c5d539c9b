"""Find where the chunks of a source's matrices are, so that they can be read from its file without copying them."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.formats.containers import is_tree, readable
from raggedatlas.formats.hdf5_chunks import FILTERS, filters_of, is_native, locate_chunks, remote_file
from raggedatlas.model.arrays import DTYPES, ArraySpec
from raggedatlas.model.protocols import Source
from raggedatlas.store.codecs import chunk_decoder, codecs_json
from raggedatlas.store.linked import file_probe
from raggedatlas.store.location import AnyPath, Location
from raggedatlas.store.published import PublishedFiles
from raggedatlas.store.ranges import ObjectFacts, RemoteFile
from raggedatlas.store.read import ArrayReader
from raggedatlas.store.references import MOST_CHUNKS, ChunkTable, References, SourceObjects
from raggedatlas.store.runtime import map_requests
from raggedatlas.store.storage_errors import store_errors
from raggedatlas.store.untrusted import StoredArray, check_array_metadata, shard_index

PIECE_BYTES = 1 << 16
"""Bytes of the rows that are read at once of an array in one piece."""

_DEFLATE, _SHUFFLE, _FLETCHER, _LZF, _BLOSC, _ZSTD = 1, 2, 3, 32_000, 32_001, 32_015
_FLETCHER_BYTES = 4
_BLOSC_NAMES = ("blosclz", "lz4", "lz4hc", "snappy", "zlib", "zstd")
_BLOSC_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")

_OF_VALUES = frozenset({"delta", "astype", "bitround", "fixedscaleoffset", "packbits", "quantize", "categorize"})
"""Filters of numcodecs that change values before they become bytes."""

Codecs = list[dict[str, Any]]


class Linker:
    """Collects references to the arrays of an open source; `place` is the file or Zarr folder that it reads."""

    def __init__(self, source: Source, place: AnyPath) -> None:
        self._source, self._place = source, place
        self._files: _Hdf5File | _ZarrFolder | _Packs | None = None
        packed = getattr(source, "packed", None)
        if packed is not None:
            self._files = _Packs(self._place, packed)
        elif self._place.suffix != ".zip":
            self._files = _ZarrFolder(self._place) if is_tree(self._place) else _Hdf5File(self._place)
        self._tables: dict[str, ChunkTable] = {}

    def add(self, key: str) -> dict[str, ArraySpec]:
        """Register the arrays of a matrix: ``"data"``, and ``"indices"`` of a sparse one.

        Path and name among the references are ``<key>/<name>``; shape, dtype, chunks and codecs are those of the file.
        Raises `SourceError` if its chunks cannot be read without its own library, or are no chunks of a file, or the
        file has changed.
        """
        where = f"{self._place}: {key}"
        if self._files is None:
            raise _refusal(where, "its file is a zip file, which is copied where it is not unpacked")
        # Sources of wings, and those of copies, have no arrays that are in the file.
        find = getattr(self._source, "arrays", None)
        arrays = {} if find is None else find(key)
        if not arrays:
            form = self._source.describe().format
            raise _refusal(where, f"it is no array in its file ({form}) but read from others, converted or computed")
        if "\n" in key:
            raise _refusal(f"{self._place}: {key!r}", "its name has several lines")
        found = {name: self._files.find(f"{key}/{name}", array) for name, array in arrays.items() if name != "indptr"}
        self._tables |= {spec.path: table for spec, table in found.values()}
        if sum(len(table.sizes) for table in self._tables.values()) > MOST_CHUNKS:
            raise _refusal(where, f"the arrays have more than {MOST_CHUNKS:,} chunks")
        return {name: spec for name, (spec, _) in found.items()}

    def references(self) -> References:
        """Return the references to all arrays that were added; raise `SourceError` if the file has changed since the source was opened."""
        if self._files is None:
            raise _refusal(str(self._place), "it is a zip file")
        return References(self._files.objects(), dict(self._tables))


def decodable(codecs: Codecs) -> bool:
    """Return whether chunks of this encoding can be read without zarr-python and HDF5."""
    try:
        return chunk_decoder(codecs) is not None
    except SourceError:
        return False


class _Hdf5File:
    """An HDF5 file, which is one object.

    As of all kinds of files, `find` returns the description of an array and where its chunks are, `objects` the files as
    they were when their chunks were found.
    """

    def __init__(self, place: AnyPath) -> None:
        self._place = place
        with store_errors(f"read {place}"):
            self._stamp = _stamp(place.stat()) if isinstance(place, Path) else None
        self._remote: RemoteFile | None = None
        self._end = 0

    def find(self, path: str, array: Any) -> tuple[ArraySpec, ChunkTable]:  # noqa: ANN401
        where = f"{self._place}: {path}"
        if type(array).__module__.partition(".")[0] != "h5py":
            raise _no_array(where, array)
        file = array.file
        if file.mode != "r":
            raise _refusal(where, "its file is open for writing")
        remote = remote_file(file)
        if isinstance(self._place, Path):
            if file.driver != "sec2":
                raise _refusal(where, f"its file is read through HDF5's driver {file.driver!r}")
            if _stamp(os.fstat(file.id.get_vfd_handle())) != self._stamp:
                raise _changed(str(self._place))
        elif remote is None or not remote.is_of(str(self._place)):
            raise _refusal(where, f"the source reads {file.filename}")
        self._remote = remote
        if array.is_virtual or array.external:
            raise _refusal(where, "it keeps its values in other files")
        dtype = _native(where, array)
        if not is_native(array):
            raise _refusal(where, f"its values are not stored as {dtype} but in a type of HDF5's own")
        # Rows that are read at once of an array in one piece.
        across = tuple(max(1, n) for n in array.shape[1:])
        n_rows = max(1, min(array.shape[0], PIECE_BYTES // (math.prod(across) * dtype.itemsize)))
        chunks = array.chunks or (n_rows, *across)
        with readable(str(self._place), path):
            _check_number(where, array.shape, array.chunks or array.shape)
            # The codecs of Zarr that do what the filters of the dataset do.
            codecs = [_bytes_codec(array.dtype)]
            for code, settings in filters_of(array):
                codec = _hdf5_codec(code, settings, dtype)
                if codec is None:
                    name = FILTERS.get(code, "of a plugin")
                    raise _refusal(
                        where, f"its chunks are encoded by HDF5's filter {code} ({name}), which only HDF5 decodes"
                    )
                codecs.append(codec)
            _check_codecs(where, codecs)
            # The piece of a contiguous array has no offset if it was never written, or is within the array's description.
            if array.chunks is None and array.id.get_offset() is None and array.id.get_storage_size():
                raise _refusal(where, "its values are within its description (HDF5: compact)")
            table, skipped = locate_chunks(array)
            _check_skipped(where, array, table, skipped)
        self._end = max(self._end, int((table.offsets + table.sizes).max(initial=0)))
        spec = ArraySpec(
            path, tuple(array.shape), dtype.name, chunks, None, codecs_json(codecs), _json(array.fillvalue)
        )  # fmt: skip
        return spec, table

    def objects(self) -> SourceObjects:
        if isinstance(self._place, Path):
            with store_errors(f"read {self._place}"), self._place.open("rb") as opened:
                info = os.fstat(opened.fileno())
                probe = file_probe(partial(_seek, opened), info.st_size)
                facts = ObjectFacts(info.st_size, info.st_mtime_ns, "")
                # The name, since the file may have been replaced.
                now = _stamp(self._place.stat())
            if not _stamp(info) == now == self._stamp:
                raise _changed(str(self._place))
        else:
            # Its blocks are of one version, so that what h5py has read and the probe are, too.
            remote = self._remote or self._place.open()

            def read_at(start: int, n_bytes: int) -> bytes:
                room = bytearray(n_bytes)
                return bytes(room[: remote.read_at(start, memoryview(room))])

            facts, probe = remote.facts, file_probe(read_at, remote.facts.n_bytes)
        if self._end > facts.n_bytes:
            raise SourceError(
                f"{self._place} has {facts.n_bytes:,} bytes and a chunk that ends at byte {self._end:,}; it was cut short. Fetch or write it again."
            )
        return _objects(("",), [facts], probe)


class _ZarrFile(NamedTuple):
    """A chunk or shard of a Zarr array: its place in the grid, its key in the folder, and what is known of it."""

    at: tuple[int, ...]
    key: str
    facts: ObjectFacts


class _ZarrFolder:
    """A Zarr folder, of which each chunk or shard is an object."""

    def __init__(self, place: AnyPath) -> None:
        self._place = place
        self._numbers: dict[str, int] = {}
        self._facts: list[ObjectFacts] = []

    def find(self, path: str, array: Any) -> tuple[ArraySpec, ChunkTable]:  # noqa: ANN401
        where = f"{self._place}: {path}"
        if type(array).__module__.partition(".")[0] != "zarr":
            raise _no_array(where, array)
        dtype = _native(where, array)
        from zarr.core.buffer import default_buffer_prototype

        files = array.metadata.to_buffer_dict(default_buffer_prototype())
        file = ".zarray" if ".zarray" in files else "zarr.json"
        metadata = json.loads(files[file].to_bytes())
        if _file_facts(self._place, [f"{array.path}/{file}".lstrip("/")])[0] is None:
            raise _refusal(where, "the source reads another folder")
        stored = check_array_metadata(where, metadata)
        outer, inner, codecs = _zarr_chunks(where, metadata, array.dtype)
        _check_codecs(where, codecs)
        if codecs[0]["name"].endswith("delta") and np.dtype(codecs[0]["configuration"]["dtype"]) != array.dtype:
            raise _refusal(where, f"its chunks are stored as differences of another type than {array.dtype}")
        _check_number(where, array.shape, inner)
        coordinates = [*np.ndindex(*_grid(array.shape, outer))]
        keys = [f"{array.path}/{array.metadata.encode_chunk_key(at)}".lstrip("/") for at in coordinates]
        found = [
            _ZarrFile(at, key, facts)
            for at, key, facts in zip(coordinates, keys, _file_facts(self._place, keys), strict=True)
            if facts
        ]
        grid = _grid(array.shape, inner)
        n = math.prod(grid)
        table = ChunkTable(np.zeros(n, np.int32), np.zeros(n, np.int64), np.full(n, -1, np.int64))
        if stored.slots:
            indexes = map_requests(lambda one: self._index(where, stored, one), found)
            per_shard = tuple(o // i for o, i in zip(outer, inner, strict=True))
            within = np.indices(per_shard).reshape(len(inner), -1).T
            for one, index in zip(found, indexes, strict=True):
                chunks = within + np.multiply(one.at, per_shard)
                # The last shards have room for chunks beyond the array.
                inside = (chunks < grid).all(axis=1)
                numbers = np.ravel_multi_index(tuple(chunks[inside].T), grid)
                table.objects[numbers] = self._number(one)
                table.offsets[numbers], table.sizes[numbers] = index[inside].T
        elif found:
            numbers = np.ravel_multi_index(tuple(np.array([one.at for one in found]).T), grid)
            table.objects[numbers] = [self._number(one) for one in found]
            table.sizes[numbers] = [one.facts.n_bytes for one in found]
        spec = ArraySpec(
            path, tuple(array.shape), dtype.name, inner, None, codecs_json(codecs), _json(array.fill_value)
        )
        return spec, table

    def objects(self) -> SourceObjects:
        return _objects(tuple(self._numbers), self._facts)

    def _number(self, file: _ZarrFile) -> int:
        number = self._numbers.setdefault(file.key, len(self._facts))
        if number == len(self._facts):
            self._facts.append(file.facts)
        return number

    def _index(self, where: str, stored: StoredArray, shard: _ZarrFile) -> NDArray[np.int64]:
        """Return offset and size of each chunk in a shard."""
        n = min(stored.index_size, shard.facts.n_bytes)
        start = 0 if stored.index_first else shard.facts.n_bytes - n
        with store_errors(f"read {self._place}/{shard.key}"):
            if isinstance(self._place, Location):
                import obstore

                answer = obstore.get(*(self._place / shard.key).bucket(), options={"range": (start, start + n)})
                data, seen = bytes(answer.bytes()), ObjectFacts.of(answer.meta)
            else:
                with (self._place / shard.key).open("rb") as opened:
                    data, info = _seek(opened, start, n), os.fstat(opened.fileno())
                seen = ObjectFacts(info.st_size, info.st_mtime_ns, "")
        if not seen.is_same(shard.facts) or len(data) != n:
            raise _changed(f"{where}: {shard.key}")
        return shard_index(stored, np.frombuffer(data, np.uint8), shard.facts.n_bytes)


class _Packs:
    """The packs of a published atlas, in which the chunks of its arrays are."""

    def __init__(self, place: AnyPath, files: PublishedFiles) -> None:
        self._place, self._files = place, files
        self._numbers: dict[str, int] = {}

    def find(self, path: str, array: ArrayReader) -> tuple[ArraySpec, ChunkTable]:
        spec = array.spec
        where = f"{self._place}: {spec.path}"
        if spec.linked is not None or spec.shard_shape is None or array.decoder is None:
            raise _refusal(where, "its chunks are not stored in a way that is read from another atlas")
        per_shard, n = spec.chunks_per_shard, math.prod(_grid(spec.shape, spec.chunk_shape))
        table = ChunkTable(np.zeros(n, np.int32), np.zeros(n, np.int64), np.full(n, -1, np.int64))

        def enter(number: int) -> None:
            shard, (folder, key) = array.shard(number), array.file(number)
            name = f"{folder.uri}/{key}".removeprefix(f"{self._files.address.rstrip('/')}/")
            packed = self._files.places[name]
            part = slice(number * per_shard, min((number + 1) * per_shard, n))
            offsets, sizes = shard.index[: part.stop - part.start].T
            start = packed.offset + (0 if spec.within is None else spec.within.offset)
            table.objects[part] = self._numbers.setdefault(packed.pack, len(self._numbers))
            table.offsets[part], table.sizes[part] = (
                np.where(sizes < 0, 0, offsets + start),
                np.where(sizes < 0, -1, sizes),
            )

        for number in range(-(-n // per_shard)):
            enter(number)
        return replace(spec, path=path, shard_shape=None, within=None), table

    def objects(self) -> SourceObjects:
        keys = tuple(self._numbers)
        facts = [one for one in _file_facts(self._place, keys) if one is not None]
        if len(facts) < len(keys):
            raise _changed(str(self._place))
        return _objects(keys, facts)


def _objects(keys: tuple[str, ...], facts: Sequence[ObjectFacts], probe: str = "") -> SourceObjects:
    # A time after the year 2262 does not fit; it is taken for one that is not known.
    modified = [one.modified if abs(one.modified) < 2**63 else 0 for one in facts]
    n_bytes = np.array([one.n_bytes for one in facts], np.int64)
    return SourceObjects(keys, n_bytes, np.array(modified, np.int64), tuple(one.etag for one in facts), probe)


def _refusal(where: str, why: str) -> SourceError:
    return SourceError(f"{where} cannot be linked: {why}; add it with copy=True.")


def _no_array(where: str, array: Any) -> SourceError:  # noqa: ANN401
    return _refusal(where, f"it is no array in its file but a {type(array).__name__.lstrip('_')}, made or in memory")


def _changed(where: str) -> SourceError:
    return SourceError(f"{where} changed while it was read; wait until it is written, and add it again.")


def _stamp(info: os.stat_result) -> tuple[int, int, int]:
    """Return what tells that a file was written or replaced."""
    return info.st_size, info.st_mtime_ns, info.st_ino


def _file_facts(folder: AnyPath, keys: Sequence[str]) -> list[ObjectFacts | None]:
    """Return what is known of files of a folder; None for those that do not exist."""
    if isinstance(folder, Location):
        return folder.facts(keys)
    found: list[ObjectFacts | None] = []
    with store_errors(f"look for files of {folder}"):
        for key in keys:
            try:
                info = (folder / key).stat()
            except (FileNotFoundError, NotADirectoryError):
                found.append(None)
            else:
                found.append(ObjectFacts(info.st_size, info.st_mtime_ns, ""))
    return found


def _seek(file: BinaryIO, start: int, n_bytes: int) -> bytes:
    file.seek(start)
    return file.read(n_bytes)


def _native(where: str, array: Any) -> np.dtype[Any]:  # noqa: ANN401
    """Return the dtype of an array in native byte order, if it is one of numbers and has axes."""
    if not array.shape:
        raise _refusal(where, "it has no axes")
    dtype: np.dtype[Any] = array.dtype.newbyteorder("=")
    if dtype.name not in DTYPES:
        raise _refusal(where, f"it holds values of type {array.dtype}")
    return dtype


def _grid(shape: Sequence[int], chunks: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-n // max(1, c)) for n, c in zip(shape, chunks, strict=True))


def _check_number(where: str, shape: Sequence[int], chunks: Sequence[int]) -> None:
    n = math.prod(_grid(shape, chunks))
    if n > MOST_CHUNKS:
        raise _refusal(where, f"it has {n:,} chunks, and {MOST_CHUNKS:,} are the most")


def _check_codecs(where: str, codecs: Codecs) -> None:
    if any(codec["name"] == "transpose" for codec in codecs):
        raise _refusal(where, "its chunks are stored with their axes exchanged")
    if not decodable(codecs):
        names = ", ".join(codec["name"].removeprefix("numcodecs.") for codec in codecs)
        raise _refusal(where, f"its chunks are encoded by {names}, which only its own library decodes")


def _bytes_codec(dtype: np.dtype[Any]) -> dict[str, Any]:
    return {"name": "bytes", "configuration": {"endian": "big" if dtype.str[0] == ">" else "little"}}


def _hdf5_codec(code: int, settings: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, Any] | None:
    if code == _SHUFFLE:
        return {
            "name": "numcodecs.shuffle",
            "configuration": {"elementsize": settings[0] if settings else dtype.itemsize},
        }
    if code == _BLOSC:
        # What the filter takes where fewer settings are given: BloscLZ with shuffled bytes.
        shuffle, compressor = (*settings[5:7], *(1, 0)[len(settings[5:7]) :])
        if compressor >= len(_BLOSC_NAMES) or shuffle >= len(_BLOSC_SHUFFLES):
            return None
        return _blosc(_BLOSC_NAMES[compressor], shuffle, dtype)
    names = {_DEFLATE: "numcodecs.zlib", _FLETCHER: "numcodecs.fletcher32", _LZF: "numcodecs.lzf", _ZSTD: "zstd"}
    return {"name": names[code]} if code in names else None


def _blosc(name: str, shuffle: int, dtype: np.dtype[Any]) -> dict[str, Any]:
    settings = {"cname": name, "shuffle": _BLOSC_SHUFFLES[shuffle], "typesize": dtype.itemsize}
    return {"name": "blosc", "configuration": settings}


def _check_skipped(where: str, array: Any, table: ChunkTable, skipped: NDArray[np.uint32]) -> None:  # noqa: ANN401
    """Refuse chunks that skipped a filter, which references cannot tell: but for LZF, whose output is smaller unless it was skipped."""
    codes = [code for code, _ in filters_of(array)]
    lzf = 1 << codes.index(_LZF) if _LZF in codes and set(codes) <= {_SHUFFLE, _FLETCHER, _LZF} else 0
    full = math.prod(array.chunks or array.shape) * array.dtype.itemsize
    full += _FLETCHER_BYTES * codes.count(_FLETCHER)
    odd = (skipped & ~np.uint32(lzf)) != 0
    if lzf:
        odd |= (skipped != 0) != (table.sizes == full)
    if odd.any():
        raise _refusal(where, f"{np.count_nonzero(odd):,} of its {len(odd):,} chunks skipped a filter")


def _zarr_chunks(
    where: str, metadata: Mapping[str, Any], dtype: np.dtype[Any]
) -> tuple[tuple[int, ...], tuple[int, ...], Codecs]:
    """Return the shape of one stored object of a Zarr array, that of the chunks in it, and how these are encoded."""
    if metadata["zarr_format"] == 2:
        chunks = tuple(max(1, n) for n in metadata["chunks"])
        if metadata["order"] == "F" and len(chunks) > 1:
            raise _refusal(where, "its chunks are stored in Fortran order")
        steps = [*(metadata["filters"] or []), *([metadata["compressor"]] if metadata["compressor"] else [])]
        n = next((i for i, step in enumerate(steps) if step["id"] not in _OF_VALUES), len(steps))
        codecs = [_of_numcodecs(step["id"], step, dtype) for step in steps]
        return chunks, chunks, [*codecs[:n], _bytes_codec(dtype), *codecs[n:]]
    if metadata["chunk_grid"]["name"] != "regular":
        raise _refusal(where, "its chunks are not of one shape")
    outer = inner = tuple(max(1, n) for n in metadata["chunk_grid"]["configuration"]["chunk_shape"])
    codecs = metadata["codecs"]
    if len(codecs) == 1 and codecs[0]["name"] == "sharding_indexed":
        settings = codecs[0]["configuration"]
        inner, codecs = tuple(settings["chunk_shape"]), settings["codecs"]
    # Codecs of numcodecs have names of their own for what Zarr has, too.
    return (
        outer,
        inner,
        [
            _of_numcodecs(codec["name"].removeprefix("numcodecs."), codec.get("configuration") or {}, dtype)
            if codec["name"].startswith("numcodecs.")
            else codec
            for codec in codecs
        ],
    )


def _of_numcodecs(name: str, settings: Mapping[str, Any], dtype: np.dtype[Any]) -> dict[str, Any]:
    """Return the codec of Zarr format 3 that a codec of numcodecs is."""
    if name == "blosc":
        # -1 lets Blosc choose: bits of single bytes, bytes of all else.
        shuffle = settings.get("shuffle", 1)
        chosen = shuffle if shuffle in (0, 1, 2) else 2 if dtype.itemsize == 1 else 1
        return _blosc(settings.get("cname", "lz4"), chosen, dtype)
    kept = {key: value for key, value in settings.items() if key != "id"}
    return {"name": name if name in ("zstd", "gzip") else f"numcodecs.{name}", "configuration": kept}


def _json(fill_value: Any) -> str:  # noqa: ANN401
    """Return a fill value as metadata of Zarr format 3 have it; 0 where there is none."""
    value = np.asarray(0 if fill_value is None else fill_value).item()
    if isinstance(value, complex):
        return json.dumps([_number(value.real), _number(value.imag)])
    return json.dumps(_number(value) if isinstance(value, float) else value)


def _number(value: float) -> float | str:
    """Return a float as JSON takes it."""
    if np.isfinite(value):
        return value
    return "NaN" if np.isnan(value) else "Infinity" if value > 0 else "-Infinity"

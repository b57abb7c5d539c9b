"""The files of a store, wherever it lies: small ones whole, listings, and arrays that only zarr-python knows."""

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from raggedatlas.errors import CorruptError
from raggedatlas.store.arrays import check_chunk_bytes
from raggedatlas.store.codecs import blosc_declared_bytes, has_checksum, refuse_unknown_codecs, zstd_declared_bytes
from raggedatlas.store.location import Location, store_errors
from raggedatlas.vectors.blobs import Bytes, to_bytes


class StoreFiles:
    """Reads what lies below a location.

    Parameters
    ----------
    location : Location
        The root of a store.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        self.root = location.uri
        self._parsed: dict[bytes, dict[str, Any]] = {}

    def read(self, key: str) -> Bytes | None:
        """Return the bytes of a file, or None where there is none."""
        with store_errors(f"read {self.root}/{key}"):
            if self.location.is_local:
                try:
                    with open(f"{self.root}/{key}", "rb", buffering=0) as file:  # noqa: PTH123 - many small ones
                        return np.frombuffer(file.read(), np.uint8)
                except (FileNotFoundError, NotADirectoryError):
                    return None
            import obstore

            try:
                found = obstore.get(self.location.store(), key).bytes()
            except FileNotFoundError:
                return None
            return np.frombuffer(memoryview(found), np.uint8)

    def node(self, path: str) -> dict[str, Any] | None:
        """Return the ``zarr.json`` of a node, or None where there is none; equal ones are parsed once."""
        raw = self.read(f"{path}/zarr.json" if path else "zarr.json")
        if raw is None:
            return None
        text = raw.tobytes()
        if text not in self._parsed:
            try:
                found = json.loads(text)
            except ValueError:
                raise CorruptError(f"{self.root}/{path}/zarr.json is no JSON. Restore it from a copy.") from None
            if not isinstance(found, dict) or found.get("zarr_format") != 3:
                raise CorruptError(f"{self.root}/{path} is no Zarr v3 node.")
            self._parsed[text] = found
        return self._parsed[text]

    def children(self, path: str) -> list[str]:
        """Return the names of the folders below a path, sorted."""
        with store_errors(f"list {self.root}/{path}"):
            if self.location.is_local:
                try:
                    return sorted(entry.name for entry in os.scandir(f"{self.root}/{path}") if entry.is_dir())
                except FileNotFoundError:
                    return []
            import obstore

            found = obstore.list_with_delimiter(self.location.store(), prefix=f"{path}/" if path else None)
            return sorted(prefix.rstrip("/").rsplit("/", 1)[-1] for prefix in found["common_prefixes"])

    def foreign(self, path: str) -> Any:  # noqa: ANN401 - a zarr array
        """Return an array by zarr-python, for pipelines that are not read here."""
        import zarr

        from raggedatlas.store.untrusted import guarded_zarr_store

        return zarr.open_array(guarded_zarr_store(self.location.zarr_store()), path=path, mode="r")


def node_attributes(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node's attributes."""
    return dict(node.get("attributes") or {})


def codec_names(codecs: list[Any]) -> list[str]:
    """Return the names of codecs, after refusing those that may not be read at all."""
    refuse_unknown_codecs(codecs)
    return [str(codec.get("name") if isinstance(codec, dict) else codec) for codec in codecs]


def decompress(data: Bytes, names: list[str], where: str) -> Bytes:
    """Undo compressors and checksums; `names` are those after the first codec.

    Raises
    ------
    CorruptError
        If a frame is damaged.
    """
    from numcodecs import blosc, gzip, zstd

    for name in reversed(names):
        try:
            if name == "crc32c":
                data = _verify_crc32c(data, where)
            elif name == "zstd":
                check_chunk_bytes(where, zstd_declared_bytes(data))
                data = np.frombuffer(zstd.decompress(np.ascontiguousarray(data)), np.uint8)
            elif name == "blosc":
                check_chunk_bytes(where, blosc_declared_bytes(data))
                data = np.frombuffer(blosc.decompress(np.ascontiguousarray(data)), np.uint8)
            else:
                data = np.frombuffer(gzip.GZip().decode(data.tobytes()), np.uint8)
        except (RuntimeError, ValueError, OSError, EOFError) as error:
            raise CorruptError(f"{where} does not decode ({name}): {error}. Restore it from a copy.") from error
    return data


def _verify_crc32c(data: Bytes, where: str) -> Bytes:
    """Return the bytes before a trailing crc32c, after checking it."""
    if not has_checksum(data):
        raise CorruptError(f"{where} has a chunk that does not match its crc32c. Restore it from a copy.")
    return data[:-4]


SUPPORTED_CODECS = {"zstd", "blosc", "gzip", "crc32c"}
"""Codecs that `decompress` undoes."""


def read_small_array(files: StoreFiles, path: str) -> Bytes | None:
    """Return the values of a small array as little-endian bytes, or None where there is none.

    Raises
    ------
    CorruptError
        If a stored chunk has other bytes than the array declares.
    """
    node = files.node(path)
    if node is None:
        return None
    if node.get("node_type") != "array":
        raise CorruptError(f"{files.root}/{path} is a group where an array was expected.")
    shape = [int(size) for size in node["shape"]]
    if not np.prod(shape):
        return np.zeros(0, np.uint8)
    names = codec_names(node["codecs"])
    chunk = node["chunk_grid"]["configuration"]["chunk_shape"]
    endian = (node["codecs"][0].get("configuration") or {}).get("endian", "little")
    plain = names[0] == "bytes" and endian == "little" and set(names[1:]) <= SUPPORTED_CODECS and list(chunk) == shape
    if not plain:
        return to_bytes(np.asarray(files.foreign(path)[...]))
    separator = (node.get("chunk_key_encoding", {}).get("configuration") or {}).get("separator", "/")
    raw = files.read(f"{path}/" + separator.join(["c", *("0" for _ in shape)]))
    if raw is None:
        raise CorruptError(f"{files.root}/{path} declares {shape} values, but its chunk is missing.")
    data = decompress(raw, names[1:], f"{files.root}/{path}")
    expected = int(np.prod(shape)) * np.dtype(str(node["data_type"])).itemsize
    if data.size != expected:
        raise CorruptError(f"{files.root}/{path} has {data.size:,} bytes; expected {expected:,}. It was cut short.")
    return data

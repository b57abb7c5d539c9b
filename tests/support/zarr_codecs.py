"""Codecs of the profiles as zarr-python takes them."""

from typing import Any

from numpy.typing import DTypeLike, NDArray
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec
from zarr.registry import get_codec_class

from raggedatlas.store.codecs import PACKED, chunk_encoder


def array_codecs(profile: str, dtype: DTypeLike, first: NDArray[Any] | None = None) -> dict[str, Any]:
    """Return the arguments of zarr-python's ``create_array`` that write a 1-D array as `chunk_encoder` does."""
    known: dict[str, Any] = {"blosc": BloscCodec, "crc32c": Crc32cCodec, "bytes": BytesCodec}
    codecs = chunk_encoder(profile, dtype, first).codecs()
    classes = [known.get(item["name"]) or get_codec_class(item["name"]) for item in codecs]
    built = [kind.from_dict(item) for kind, item in zip(classes, codecs, strict=True)]
    place = next(i for i, item in enumerate(codecs) if item["name"] in {"bytes", PACKED})
    return {"filters": built[:place] or None, "serializer": built[place], "compressors": built[place + 1 :]}

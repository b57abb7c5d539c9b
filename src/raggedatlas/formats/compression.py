"""Compressions of the files we write: what each is called in HDF5 and in both Zarr formats."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from raggedatlas.errors import MissingExtraError, SourceError
from raggedatlas.formats.containers import filter_available
from raggedatlas.formats.deflate import deflate


@dataclass(frozen=True, slots=True)
class Compression:
    """One way to compress arrays.

    Parameters
    ----------
    name : str
        What people call it.
    level : int
        How hard it tries; 0 where that means nothing.
    hdf5 : mapping
        What h5py calls it.
    chunk : callable or None
        Shuffled bytes of a chunk -> what an HDF5 file keeps of them, where we compress; None where the library must.
    plugin : int
        HDF5's number of the filter where that is a plugin, else 0.
    """

    name: str
    level: int
    hdf5: dict[str, Any]
    chunk: Callable[[Any], bytes] | None = None
    plugin: int = 0

    def zarr(self, zarr_format: int, dtype: np.dtype[Any]) -> Any:  # noqa: ANN401  (a codec of zarr or numcodecs, or None)
        """Return the compressor of an array of values of this type in Zarr format 2 or 3.

        Raises
        ------
        SourceError
            If Zarr does not know the compression.
        """
        from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

        codec = self._codec(dtype)
        if codec is None or zarr_format == 2:
            return codec
        if codec.codec_id == "blosc":
            return BloscCodec(cname=codec.cname, clevel=codec.clevel, shuffle="shuffle")
        return (ZstdCodec if codec.codec_id == "zstd" else GzipCodec)(level=codec.level)

    def zarr_encoder(self, zarr_format: int, dtype: np.dtype[Any]) -> Callable[[Any], bytes] | None:
        """Return what encodes the values of one chunk as that compressor does; None where nothing is compressed."""
        from numcodecs import GZip

        codec = GZip(self.level) if (self.name, zarr_format) == ("gzip", 3) else self._codec(dtype)
        return None if codec is None else codec.encode

    def _codec(self, dtype: np.dtype[Any]) -> Any:  # noqa: ANN401
        """Return the codec of numcodecs."""
        from numcodecs import Blosc, Zlib, Zstd

        if self.name == "lzf":
            raise SourceError("Zarr knows no lzf; choose zstd, gzip or blosc, or None.")
        if self.name == "blosc":
            return Blosc("lz4", self.level, Blosc.SHUFFLE)
        if self.name == "zstd" and dtype.kind in "iu" and dtype.itemsize > 1:
            # The high bytes of indices are alike: shuffled they take a third less, in a quarter of the time. Floats repeat whole.
            # Blosc calls every second level of zstd one of its own.
            return Blosc("zstd", min((self.level + 1) // 2, 9), Blosc.SHUFFLE)
        if self.name == "none":
            return None
        return (Zstd if self.name == "zstd" else Zlib)(self.level)


def compression_of(asked: str | None) -> Compression:
    """Understand ``"gzip"``, ``"zstd:9"`` and so on; None is none.

    Parameters
    ----------
    asked : str or None
        One of gzip (levels 1 to 9, by default 1), zstd (1 to 22, by default 3), blosc (LZ4, 1 to 9, by default 5), lzf,
        and where given a level after a colon.

    Raises
    ------
    SourceError
        If there is no such compression or level.

    Examples
    --------
    >>> compression_of("zstd:9").level
    9
    >>> compression_of(None).name
    'none'
    """
    name, colon, text = ("none", "", "") if asked is None else asked.partition(":")
    known = _KNOWN.get(name)
    if known is None:
        raise SourceError(
            f"There is no compression {asked!r}; choose one of {[n for n in _KNOWN if n != 'none']}, or None."
        )
    usual, most, make = known
    if colon and not (text.isdecimal() and 1 <= int(text) <= most):
        levels = f"levels 1 to {most}" if most else "no levels"
        raise SourceError(f"There is no compression {asked!r}; {name} has {levels}, as in 'gzip:4'.")
    return make(int(text) if colon else usual)


def require_plugin(compression: Compression) -> None:
    """Refuse a compression of HDF5 whose plugin is not installed.

    Raises
    ------
    MissingExtraError
        Naming the extra.
    """
    if compression.plugin and not filter_available(compression.plugin):
        raise MissingExtraError(
            f"HDF5 files with {compression.name} need a plugin, to write as to read them; install raggedatlas[plugins]."
        )


def _none(level: int) -> Compression:
    return Compression("none", level, {})


def _gzip(level: int) -> Compression:
    # Shuffled gzip 1 is both smaller and faster than the plain gzip 4 of h5py.
    options = {"compression": "gzip", "compression_opts": level, "shuffle": True}
    return Compression("gzip", level, options, partial(deflate, level=level))


def _lzf(level: int) -> Compression:
    return Compression("lzf", level, {"compression": "lzf", "shuffle": True})


def _zstd(level: int) -> Compression:
    from numcodecs import Zstd

    options = {"compression": 32015, "compression_opts": (level,), "shuffle": True}
    return Compression("zstd", level, options, Zstd(level).encode, 32015)


def _blosc(level: int) -> Compression:
    # Four numbers that the filter fills in itself, the level, its own shuffling of bytes, and LZ4.
    options = {"compression": 32001, "compression_opts": (0, 0, 0, 0, level, 1, 1)}
    return Compression("blosc", level, options, plugin=32001)


_KNOWN: dict[str, tuple[int, int, Callable[[int], Compression]]] = {
    "none": (0, 0, _none),
    "gzip": (1, 9, _gzip),
    "zstd": (3, 22, _zstd),
    "blosc": (5, 9, _blosc),
    "lzf": (0, 0, _lzf),
}

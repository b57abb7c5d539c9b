"""What must be known of a stored array to read it, and the limits on what may be declared."""

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import AtlasError, CorruptError, LimitError, SchemaError
from raggedatlas.model.records import Link, Span

MAX_CHUNK_BYTES = 512 * 2**20
MAX_SHARD_CHUNKS = 2**22
MAX_RANK = 32

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
"""Element types of the arrays that are read and written in ranges."""

COLUMNS_CODEC = "columns of complete rows"
"""In place of codecs: see `ArraySpec.is_columns`."""


def shards_path(path: str) -> str:
    """Return the path of the folder of an array's shards, by which `DatasetRecord.array_checksums` has their hash."""
    return f"{path}/c"


def check_shapes(
    path: str, shape: tuple[int, ...], chunk: tuple[int, ...], shard: tuple[int, ...] | None = None
) -> None:
    """Refuse shapes that are no shapes, do not fit each other, or need an absurd shard index."""
    for sizes, least in ((shape, 0), (chunk, 1), (shard if shard is not None else chunk, 1)):
        # `isinstance` would take the `true` of JSON, a bool, for an integer.
        valid = all(type(size) is int and size >= least for size in sizes)
        if not valid or len(sizes) != len(shape):
            raise CorruptError(f"{path} declares the shape {shape} with chunks {chunk} and shards {shard}.")
    if not 1 <= len(shape) <= MAX_RANK or math.prod(shape) >= 2**60:
        raise LimitError(
            f"{path} declares the shape {shape}; expected 1 to {MAX_RANK} axes and less than 2**60 elements."
        )
    if shard is None:
        return
    if any(outer % inner for outer, inner in zip(shard, chunk, strict=True)):
        raise CorruptError(f"{path} declares shards {shard} that are no multiples of its chunks {chunk}.")
    # A shard index has 16 bytes a chunk and is read in one piece, so this bounds it to 64 MiB.
    if math.prod(shard) // math.prod(chunk) > MAX_SHARD_CHUNKS:
        raise LimitError(f"{path} declares shards {shard} of more than {MAX_SHARD_CHUNKS:,} chunks {chunk}.")


def check_chunk_bytes(path: str, n_bytes: int) -> None:
    """Refuse chunks that decode to more than `MAX_CHUNK_BYTES`."""
    if n_bytes > MAX_CHUNK_BYTES:
        raise LimitError(
            f"{path} declares chunks of {n_bytes:,} bytes; at most {MAX_CHUNK_BYTES:,} are read. "
            "Write it again with smaller chunks."
        )


@dataclass(frozen=True)
class ArraySpec:
    """What must be known of a stored array to read it; kept in the datasets table, so opening costs no request."""

    path: str  # below the Zarr store
    shape: tuple[int, ...]
    dtype: str  # one of `DTYPES`
    chunk_shape: tuple[int, ...]  # of what is decoded at once (the inner chunk of a shard)
    # Shape of one stored object; None where the array is not sharded in a way that is read directly.
    shard_shape: tuple[int, ...] | None
    # JSON list of the codecs of one chunk (of the array where `shard_shape` is None), or `COLUMNS_CODEC`.
    codecs: str
    fill_value: str = "0"  # JSON of the value of elements that are not stored
    within: Span | None = None  # where the array's only shard is, if it is part of a larger file
    # Largest absolute value of an array of 64-bit integers, None where not known; no part of the array's metadata.
    largest: int | None = field(default=None, compare=False)
    # Where the bytes are, if they stay in a file outside of the atlas. Then `chunk_shape` and `codecs` are those of
    # this file: of HDF5, filters are written as the Zarr codecs that do the same.
    linked: Link | None = None

    def __post_init__(self) -> None:
        """Check the declared sizes before any memory is taken."""
        check_shapes(self.path, self.shape, self.chunk_shape, self.shard_shape)
        if self.dtype not in DTYPES:
            raise SchemaError(
                f"{self.path} has the dtype {self.dtype!r}; arrays read in ranges have {', '.join(DTYPES)}."
            )
        check_chunk_bytes(self.path, math.prod(self.chunk_shape) * np.dtype(self.dtype).itemsize)
        if self.largest is not None and (type(self.largest) is not int or self.largest < 0):
            raise CorruptError(
                f"{self.path} is described with the largest value {self.largest!r}, which is no whole number."
            )
        if self.within is not None and (self.shard_shape is None or self.shape[0] > self.shard_shape[0]):
            raise CorruptError(f"{self.path} is described as part of {self.within.file}, but has more than one shard.")

    @property
    def n_rows(self) -> int:
        """Length of the first axis."""
        return self.shape[0]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.shape[1:]

    @property
    def chunks_per_shard(self) -> int:
        """Number of inner chunks of a shard; 1 where the array is not sharded."""
        if self.shard_shape is None:
            return 1
        return math.prod(self.shard_shape) // math.prod(self.chunk_shape)

    @property
    def is_columns(self) -> bool:
        """Whether nothing is stored, as the entries are the columns of complete rows: 0, 1, ... up to the length of a chunk, again and again."""
        return self.codecs == COLUMNS_CODEC

    def fill(self) -> NDArray[Any]:
        """Return the fill value as a 0-d array of the array's dtype."""
        # Zarr v3 writes NaN and infinities as text, and a complex number as a list of its two parts.
        value = json.loads(self.fill_value)
        if isinstance(value, list):
            value = complex(*(float(part) for part in value))
        return np.array(value if not isinstance(value, str) else float(value), dtype=self.dtype)

    def to_json(self) -> str:
        """Return the spec as compact JSON."""
        fields = {name: value for name, value in asdict(self).items() if value is not None or name == "shard_shape"}
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "ArraySpec":
        """Read the JSON of `to_json`."""
        try:
            data = json.loads(text)
            for key in ("shape", "chunk_shape", "shard_shape"):
                data[key] = tuple(data[key]) if data[key] is not None else None
            data["within"] = None if data.get("within") is None else Span(**data["within"])
            data["linked"] = None if data.get("linked") is None else Link(**data["linked"])
            spec = cls(**data)
            # Called for their errors: a damaged record fails here, with its text, and not in a later read.
            spec.path.split("/")
            json.loads(spec.codecs)
            spec.fill()
        except AtlasError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise CorruptError(
                f"The description of an array does not parse ({error!r}): {text[:200]}. Run validate()."
            ) from error
        return spec

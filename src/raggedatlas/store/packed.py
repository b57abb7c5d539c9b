"""The packed codec as zarr-python knows it: registered by entry point, so that any zarr-python reads packed arrays.

Only zarr-python imports this module, when it meets a packed array.
"""

# ruff: noqa: TID253

from dataclasses import dataclass
from typing import Any

import numpy as np
from zarr.abc.codec import ArrayBytesCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, NDBuffer

from raggedatlas.errors import CorruptError, SchemaError
from raggedatlas.store.codecs import PACKED, decode_packed, encode_packed


@dataclass(frozen=True)
class PackedCodec(ArrayBytesCodec):
    """Blocks of about 256 unsigned integers packed to as few bits as they need; lossless for any content.

    Every chunk is self-contained; ``docs/reference/packed-codec.md`` describes it byte by byte. It takes no settings
    and takes the place of the ``bytes`` codec, best followed by ``crc32c``.
    """

    is_fixed_size = False

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "PackedCodec":
        """Create the codec from its entry in ``zarr.json``."""
        if data.get("configuration"):
            raise SchemaError(f"The codec {PACKED} takes no settings, got {data['configuration']}.")
        return cls()

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of the codec in ``zarr.json``."""
        return {"name": PACKED}

    def validate(self, *, shape: tuple[int, ...], dtype: Any, chunk_grid: Any) -> None:  # noqa: ANN401 (zarr-python's)
        """Refuse element types other than unsigned integers."""
        kind: np.dtype[Any] = dtype.to_native_dtype()
        if kind.kind != "u":
            raise SchemaError(f"The codec {PACKED} holds unsigned integers, not {kind}; choose another codec.")

    def compute_encoded_size(self, input_byte_length: int, _chunk_spec: ArraySpec) -> int:
        """Refuse to compute a size in advance, as it depends on the values."""
        raise CorruptError(f"The size of a chunk in the codec {PACKED} depends on its values.")

    async def _encode_single(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> Buffer | None:
        """Pack a chunk."""
        values = np.ascontiguousarray(chunk_array.as_numpy_array()).reshape(-1)
        # The compiled packer reads the machine's byte order; zarr-python may pass the other one.
        values = values.astype(values.dtype.newbyteorder("="), copy=False)
        packed = encode_packed(values, np.empty(0, np.int64))
        return chunk_spec.prototype.buffer.from_bytes(packed.tobytes())

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        """Check and unpack a chunk."""
        out = np.empty(chunk_spec.shape, chunk_spec.dtype.to_native_dtype())
        decode_packed(np.ascontiguousarray(chunk_bytes.as_numpy_array()).view(np.uint8), out.reshape(-1))
        return chunk_spec.prototype.nd_buffer.from_numpy_array(out)

"""Limits on what array metadata may declare, checked before memory is taken."""

from collections.abc import Iterable

from raggedatlas.errors import CorruptError, LimitError

MAX_CHUNK_BYTES = 512 * 2**20
MAX_SHARD_CHUNKS = 2**22
MAX_RANK = 32


def product(sizes: Iterable[int]) -> int:
    """Multiply integers without overflow."""
    result = 1
    for size in sizes:
        result *= size
    return result


def check_shapes(
    path: str, shape: tuple[int, ...], chunk: tuple[int, ...], shard: tuple[int, ...] | None = None
) -> None:
    """Refuse shapes that are no shapes, do not fit each other, or need an absurd shard index.

    Raises
    ------
    CorruptError, LimitError
    """
    for sizes, least in ((shape, 0), (chunk, 1), (shard if shard is not None else chunk, 1)):
        whole = all(type(size) is int and size >= least for size in sizes)
        if not whole or len(sizes) != len(shape):
            raise CorruptError(f"{path} declares the shape {shape} with chunks {chunk} and shards {shard}.")
    if not 1 <= len(shape) <= MAX_RANK or product(shape) >= 2**60:
        raise LimitError(
            f"{path} declares the shape {shape}; expected 1 to {MAX_RANK} axes and less than 2**60 elements."
        )
    if shard is None:
        return
    if any(outer % inner for outer, inner in zip(shard, chunk, strict=True)):
        raise CorruptError(f"{path} declares shards {shard} that are no multiples of its chunks {chunk}.")
    if product(shard) // product(chunk) > MAX_SHARD_CHUNKS:
        raise LimitError(f"{path} declares shards {shard} of more than {MAX_SHARD_CHUNKS:,} chunks {chunk}.")


def check_chunk_bytes(path: str, n_bytes: int) -> None:
    """Refuse chunks that decode to more than `MAX_CHUNK_BYTES`.

    Raises
    ------
    LimitError
    """
    if n_bytes > MAX_CHUNK_BYTES:
        raise LimitError(
            f"{path} declares chunks of {n_bytes:,} bytes; at most {MAX_CHUNK_BYTES:,} are read. "
            "Write it again with smaller chunks."
        )

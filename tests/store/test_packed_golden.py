"""The packed codec writes the bytes of its format."""

import hashlib
import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from raggedatlas.store.codecs import encode_packed

DATA = Path(__file__).parents[1] / "data"
CASES = list(
    product(("u1", "u2", "u4", "u8"), ("noise", "few", "rows", "dense", "giants"), (1, 63, 64, 700, 5000), (0, 1))
)


def chunk_of(dtype: str, shape: str, n: int, seed: int) -> tuple[NDArray[np.unsignedinteger], NDArray[np.int64]]:
    """Make the values of a case and where rows begin."""
    rng = np.random.Generator(np.random.PCG64(seed))
    top = min(int(np.iinfo(dtype).max), (2**40, 30_000)[seed])
    values = rng.integers(0, top, n, dtype=np.uint64)
    if shape == "few":
        values %= 5
    elif shape == "rows":
        values = np.concatenate([np.sort(part) for part in np.array_split(values, 1 + n // 300)])
    elif shape == "dense":
        values = np.cumsum(values % 3 + 1) % top
    elif shape == "giants":
        values = np.where(values % 50 == 0, values, values % 7)
    return values.astype(dtype), np.flatnonzero(rng.integers(0, 90, n) == 0)


def digest(dtype: str, shape: str, n: int, seed: int) -> str:
    """Pack the values of a case and hash the bytes."""
    values, breaks = chunk_of(dtype, shape, n, seed)
    return hashlib.sha256(encode_packed(values, breaks).tobytes()).hexdigest()[:16]


@pytest.mark.usefixtures("level")
def test_packed_bytes_do_not_change() -> None:
    """Chunks of every width, shape and length have the bytes that are recorded."""
    golden = json.loads((DATA / "packed.json").read_text("utf-8"))
    assert {"-".join(map(str, case)): digest(*case) for case in CASES} == golden

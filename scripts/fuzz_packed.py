"""The long campaign behind the short one in tests/store/test_packed.py: damaged packed chunks by the million.

``python scripts/fuzz_packed.py --chunks 1000000 --seed 0`` ends with 0 when every damaged chunk was refused or unpacked
without touching a byte beside the output; a crash or a changed guard shows the seed to repeat it.
"""

import argparse
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.store.codecs import decode_packed
from raggedatlas.store.packing import encode_packed, packed_bound

GUARD = 512
DTYPES = ("u1", "u2", "u4", "u8")


def sound_chunk(rng: np.random.Generator) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Pack values of a random kind; return the chunk and the values."""
    dtype = np.dtype(DTYPES[int(rng.integers(4))])
    n = int(rng.integers(1, 1500))
    top = min(int(rng.choice([1, 9, 300, 70_000, 2**32 - 1])), int(np.iinfo(dtype).max))
    values = rng.integers(0, top, n, dtype=dtype, endpoint=True)
    if rng.random() < 0.5:
        values = np.concatenate([np.unique(part) for part in np.array_split(values, 1 + n // 300)])
    out = np.empty(packed_bound(values.size, values.itemsize), np.uint8)
    return out[: encode_packed(values, np.empty(0, np.int64), out)].copy(), values


def damaged(raw: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Change up to four bytes, most often of the head and the tables; sometimes cut the end."""
    made = raw.copy()
    reach = made.size if rng.random() < 0.4 else min(made.size, 16 + made.size // 20)
    made[rng.integers(0, reach, int(rng.integers(1, 5)))] = rng.integers(0, 256)
    return made[: int(rng.integers(0, made.size))].copy() if rng.random() < 0.05 else made


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    refused = 0
    for number in range(options.chunks // 100):
        rng = np.random.default_rng([options.seed, number])
        raw, values = sound_chunk(rng)
        room = np.full(values.size + 2 * GUARD, 173, values.dtype)
        for _ in range(100):
            try:
                decode_packed(damaged(raw, rng), room[GUARD:-GUARD])
            except CorruptError:
                refused += 1
            if (room[:GUARD] != 173).any() or (room[-GUARD:] != 173).any():
                print(f"a guard was written over: --seed {options.seed}, chunk {number}")
                return 1
        if number % 1000 == 999:
            print(f"{100 * (number + 1):,} damaged chunks, {refused:,} refused", flush=True)
    print(f"{100 * (options.chunks // 100):,} damaged chunks, {refused:,} refused, no guard touched")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The compiled library: its declarations, the crc32c and the frames it decodes, at every level of vector instructions."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from numcodecs import blosc
from numpy.typing import NDArray

from raggedatlas.errors import ArgumentError
from raggedatlas.store import native
from raggedatlas.store.native import BLOSC, GOOD, I64, OTHER_FRAME, PLAIN, U64, Chunks, Pieces, library

HEADER = Path(__file__).parents[2] / "native" / "raggedatlas.h"
C_TYPES = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "uint32_t": ctypes.c_uint32, "void": None}


def declared(argument: str) -> object:
    """Return the Python type that belongs to an argument in C."""
    words = argument.split()
    base, pointer, const = words[-2], "*" in argument, words[0] == "const"
    if not pointer:
        return C_TYPES[base]
    if "struct" in words:
        name = base.removeprefix("ra_").capitalize()
        # Where Python has another class of the name, that of the library has the prefix too.
        return ctypes.POINTER(getattr(native, name, None) or getattr(native, f"Ra{name}"))
    dtype = {"void": "", "double": "float64"}.get(base, base.removesuffix("_t"))
    kind = native.ArrayArgument(dtype, writable=not const)
    return ctypes.POINTER(C_TYPES[base]) if words[-1] in {"*where", "*which"} else kind


def test_declarations_are_those_of_the_header() -> None:
    """Python declares every function of the header with its types, and the same version."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text("utf-8"), flags=re.DOTALL)
    found = {}
    for result, name, arguments in re.findall(r"RA_API (\w+) (\w+)\(([^)]*)\);", text):
        types = [] if arguments == "void" else [declared(" ".join(item.split())) for item in arguments.split(",")]
        found[name] = (C_TYPES[result], tuple(types))
    assert found == native.FUNCTIONS
    assert int(re.findall(r"#define RA_ABI (\d+)", text)[0]) == native.ABI == library().ra_abi()


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ | environment
    )


@pytest.mark.parametrize("content", [None, b"no library"])
def test_a_missing_library_says_how_to_build_it(content: bytes | None, tmp_path: Path) -> None:
    """Where the library is not there or is none, one error names the file and the way to build it."""
    path = tmp_path / "libraggedatlas.so"
    if content is not None:
        path.write_bytes(content)
    done = run_python("from raggedatlas.store.native import library; library()", RAGGEDATLAS_LIBRARY=os.fspath(path))
    assert "MissingExtraError" in done.stderr
    assert os.fspath(path) in done.stderr
    assert "pip install" in done.stderr


@pytest.mark.parametrize("wanted", ["baseline", "sse9"])
def test_the_environment_forces_a_level(wanted: str) -> None:
    """RAGGEDATLAS_SIMD chooses a level; one that is none is refused with those there are."""
    done = run_python(
        "from raggedatlas.store.codecs import crc32c; print(crc32c(b'123456789'))", RAGGEDATLAS_SIMD=wanted
    )
    if wanted == "baseline":
        assert done.stdout.strip() == str(0xE3069283)
    else:
        assert "baseline, avx2, avx512" in done.stderr


@pytest.mark.parametrize(
    "array", [np.zeros(3, np.int32), np.zeros(6, np.int64)[::2], np.frombuffer(bytes(24), np.int64)], ids=str
)
def test_arrays_of_another_form_are_refused(array: NDArray[np.int64]) -> None:
    """An array of another dtype, not contiguous, or read-only where it is written to, never reaches C."""
    with pytest.raises((ArgumentError, ctypes.ArgumentError), match="contiguous writable array of int64"):
        library().ra_split_ranges(None, None, 0, 1, array, 0)


@pytest.mark.usefixtures("level")
def test_crc32c_is_that_of_google() -> None:
    """Any number of bytes at any address has the crc32c that google-crc32c gives, at once or in two parts."""
    data = np.random.default_rng(1).integers(0, 256, 5000, dtype=np.uint8)
    for start, n in [(0, 0), (0, 1), (1, 7), (3, 8), (5, 511), (0, 512), (2, 1535), (0, 1536), (7, 3080), (1, 4999)]:
        part = data[start : start + n]
        expected = google_crc32c.value(part.tobytes())
        assert library().ra_crc32c(0, part, n) == expected
        half = library().ra_crc32c(0, part[: n // 2], n // 2)
        assert library().ra_crc32c(half, part[n // 2 :], n - n // 2) == expected


def test_permutations_of_many_sizes_at_once() -> None:
    """Each number gets its image under the permutation that seed and size select, wherever it stands; others are refused."""
    rng = np.random.default_rng(3)
    for size in (1, 2, 3, 64, 4095, 4096, 4097, 70_000):
        for seed in (0, 2**64 - 1):
            made = np.arange(size)
            assert library().ra_permute_each(made, np.full(size, size), np.full(size, seed, np.uint64), size) == 0
            assert sorted(made.tolist()) == list(range(size))
            # The same one by one, between others.
            at = rng.integers(0, size, 50)
            mixed, sizes = np.repeat(at, 2), np.tile([size, 10**15], 50)
            seeds = np.tile(np.array([seed, 7], np.uint64), 50)
            mixed[1::2] = 123
            assert library().ra_permute_each(mixed, sizes, seeds, 100) == 0
            np.testing.assert_array_equal(mixed[::2], made[at])
    for number, size in ((-1, 5), (5, 5), (0, 0), (0, 2**62 + 1)):
        assert library().ra_permute_each(np.array([number]), np.array([size]), np.zeros(1, np.uint64), 1) == 4


def test_permutations_of_few_items_are_uniform() -> None:
    """All orders of four items come equally often, and every item of sixty is anywhere: chi square stays in its bounds."""
    n = 24_000
    made = np.tile(np.arange(4), n)
    seeds = np.repeat(np.random.default_rng(5).integers(0, 2**64, n, np.uint64), 4)
    assert library().ra_permute_each(made, np.full(4 * n, 4), seeds, 4 * n) == 0
    _, counts = np.unique(made.reshape(n, 4), axis=0, return_counts=True)
    assert len(counts) == 24
    assert ((counts - n / 24) ** 2 / (n / 24)).sum() < 60
    n = 3000
    made = np.tile(np.arange(60), n)
    seeds = np.repeat(np.arange(n, dtype=np.uint64), 60)
    assert library().ra_permute_each(made, np.full(60 * n, 60), seeds, 60 * n) == 0
    table = np.stack([np.bincount(column, minlength=60) for column in made.reshape(n, 60).T])
    chi, free = ((table - n / 60) ** 2 / (n / 60)).sum(), 59 * 59
    assert abs(chi - free) < 4 * np.sqrt(2 * free)


def decode(frame: bytes, n_bytes: int, kind: int = BLOSC, *, checksum: bool = False) -> tuple[int, NDArray[np.uint8]]:
    """Decode one frame between untouched bytes."""
    stored, out = np.frombuffer(frame, np.uint8).copy(), np.full(n_bytes + 64, 173, np.uint8)
    parts = np.array([[0, 1], [0, 0], [n_bytes, 0], [0, 0]])
    frames = np.array([stored.ctypes.data], np.uint64), np.array([stored.size])
    room = np.empty((2, n_bytes), np.uint8)
    status = library().ra_decode_chunks(
        Chunks(*map(U64.address, frames[:1]), *map(I64.address, frames[1:]), 1),
        Pieces(*(I64.address(part) for part in parts), 1),
        kind, checksum, n_bytes, room[0], room[1], np.zeros(1, np.uint8), 1, out[:n_bytes], n_bytes, ctypes.c_int64(),
    )  # fmt: skip
    assert (out[n_bytes:] == 173).all()
    return status, out[:n_bytes]


def content(kind: str, n: int) -> NDArray[np.uint8]:
    """Make bytes of a kind."""
    rng = np.random.default_rng(n)
    made = {
        "noise": rng.integers(0, 256, n, dtype=np.uint8),
        "zero": np.zeros(n, np.uint8),
        "counts": rng.poisson(0.5, n // 4 + 1).astype("<f4").view(np.uint8)[:n],
        "runs": np.repeat(rng.integers(0, 9, n // 37 + 1, dtype=np.uint8), 37)[:n],
    }
    return made[kind]


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("kind", ["noise", "zero", "counts", "runs"])
@pytest.mark.parametrize("name", [b"lz4", b"lz4hc", b"zstd"])
def test_frames_decode_as_by_numcodecs(kind: str, name: bytes) -> None:
    """What numcodecs compresses with LZ4 decodes to the same bytes, of any size and width; other frames are named as such."""
    for n in (1, 15, 1000, 4096 * 4, 300_001):
        for width in (1, 2, 3, 4, 8, 16):
            for shuffle in (blosc.NOSHUFFLE, blosc.SHUFFLE, blosc.BITSHUFFLE):
                plain = content(kind, n)
                frame = blosc.compress(plain, name, 5, shuffle, typesize=width)
                status, out = decode(frame, n)
                if status == OTHER_FRAME:
                    assert name == b"zstd" or shuffle == blosc.BITSHUFFLE
                else:
                    assert status == GOOD
                    assert np.array_equal(out, plain)


def test_damaged_frames_never_reach_beyond() -> None:
    """Changed or cut frames give a status or other bytes, and nothing outside the output is written."""
    rng = np.random.default_rng(3)
    bad = 0
    for i in range(3000):
        plain = content(("counts", "runs", "zero")[i % 3], 2000)
        frame = bytearray(blosc.compress(plain, b"lz4", 5, i % 2, typesize=4))
        for _ in range(rng.integers(1, 4)):
            frame[int(rng.integers(16 if i % 4 else 0, len(frame)))] = int(rng.integers(0, 256))
        if i % 5 == 0:
            frame = frame[: int(rng.integers(0, len(frame)))]
            frame[12:16] = len(frame).to_bytes(4, "little") if len(frame) >= 16 else frame[12:16]
        status, _ = decode(bytes(frame), 2000)
        bad += status != GOOD
    assert bad > 500


def test_plain_chunks_are_checked() -> None:
    """A chunk that is not compressed has the size it should, and its crc32c matches."""
    data = bytes(range(100))
    sealed = data + google_crc32c.value(data).to_bytes(4, "little")
    assert decode(data, 100, PLAIN)[0] == GOOD
    assert decode(sealed, 100, PLAIN, checksum=True)[0] == GOOD
    assert decode(sealed, 100, PLAIN)[0] == native.BAD_SIZE
    assert decode(data, 96, PLAIN, checksum=True)[0] == native.BAD_CHECKSUM
    assert decode(b"abc", 3, PLAIN, checksum=True)[0] == native.BAD_CHECKSUM


@pytest.mark.parametrize("piece", [(-1, 1, 0), (5, 6, 0), (0, 11, 0), (0, 1, -1), (0, 5, 16), (0, -1, 0)])
def test_pieces_outside_are_refused(piece: tuple[int, int, int]) -> None:
    """A piece that lies outside its chunk or the output is refused before anything is copied."""
    parts = np.array([[0, 1], *([number, 0] for number in piece)])
    out, room = np.zeros(20, np.uint8), np.zeros((2, 10), np.uint8)
    sizes = np.array([-1])
    status = library().ra_decode_chunks(
        Chunks(U64.address(sizes.view(np.uint64)), I64.address(sizes), 1),
        Pieces(*(I64.address(part) for part in parts), 1),
        PLAIN, False, 10, room[0], room[1], np.ones(1, np.uint8), 1, out, 20, ctypes.c_int64(),
    )  # fmt: skip
    assert status == native.BAD_SIZE
    assert not out.any()


def test_ranges_are_cut_at_chunk_borders() -> None:
    """Pieces, put together, are the ranges, and none crosses a border; empty ranges have none."""
    rng = np.random.default_rng(2)
    starts = rng.integers(0, 1000, 50)
    ends = starts + rng.integers(-5, 90, 50)
    n = library().ra_count_pieces(starts, ends, 50, 32)
    pieces = np.empty((4, n), np.int64)
    library().ra_split_ranges(starts, ends, 50, 32, pieces, n)
    chunks, sources, lengths, targets = pieces
    assert ((lengths > 0) & (sources >= 0) & (sources + lengths <= 32)).all()
    rows = [row for c, s, k in zip(chunks, sources, lengths, strict=True) for row in range(c * 32 + s, c * 32 + s + k)]
    assert rows == [row for a, b in zip(starts, ends, strict=True) for row in range(a, b)]
    assert targets.tolist() == (np.cumsum(lengths) - lengths).tolist()

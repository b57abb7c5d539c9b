"""The packed codec writes the bytes it has always written, and what was written before reads as it did."""

import hashlib
import json
import zipfile
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import raggedatlas
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
    """Chunks of every width, shape and length have the bytes that the first release wrote."""
    golden = json.loads((DATA / "packed.json").read_text("utf-8"))
    assert {"-".join(map(str, case)): digest(*case) for case in CASES} == golden


def matrix(kind: str, n_cells: int, n_genes: int) -> NDArray[np.float32]:
    """Return counts or fractions, each a function of its place."""
    i, j = np.indices((n_cells, n_genes))
    counts = np.where((i * 7 + j * 13) % 11 < 3, (i * 31 + j * 17) % 23 + (i == j) * 70_000, 0)
    return (counts / (4 if kind == "fractions" else 1)).astype(np.float32)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("profile", ["packed", "standard", "archive"])
def test_an_atlas_of_the_first_format_reads_equal(profile: str, tmp_path: Path) -> None:
    """Atlases written when loops were numba's give the values that were put in, by rows, few features and column-sorted copies."""
    with zipfile.ZipFile(DATA / "atlases_0.1.zip") as archive:
        archive.extractall(tmp_path)
    view = raggedatlas.RaggedAtlas.checkout_latest(tmp_path / f"{profile}.atlas")
    for name, shape in (("counts", (90, 500)), ("fractions", (40, 300))):
        query = view.query().where({"dataset": [name]})
        found = query.to_anndata()
        expected = matrix(name, *shape)
        rows = found.obs["cell_name"].str.removeprefix("c").astype(int)
        columns = [int(str(gene).removeprefix("g")) for gene in found.var["feature_id"]]
        assert np.array_equal(found.X.toarray(), expected[np.ix_(rows, columns)])
        few = query.features("g7", "g201", "g3").to_anndata().X.toarray()
        assert np.array_equal(few, expected[rows][:, [7, 201, 3]])

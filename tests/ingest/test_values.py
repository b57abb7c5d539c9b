"""Laws of the value policy: nothing changes silently, the smallest exact type is stored, bad values are named."""

import hashlib
import tempfile
from itertools import product

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import assume, given
from hypothesis import strategies as st

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.errors import ValuesError
from raggedatlas.ingest import values
from raggedatlas.store.content_hash import HASH_LANES, StreamingHash
from raggedatlas.store.sparse import scan_integers
from support.anndata_strategies import (
    DTYPES,
    anndatas,
    assert_same,
    assert_same_matrix,
    in_form,
    make_values,
)


def simple(x, **layers) -> ad.AnnData:  # noqa: ANN001
    n, m = x.shape
    obs = pd.DataFrame(index=[f"c{i}" for i in range(n)])
    return ad.AnnData(x, obs=obs, var=pd.DataFrame(index=[f"g{j}" for j in range(m)]), layers=layers)


def stored(atlas: RaggedAtlas, name: str = "d") -> dict[str, str]:
    """Array below the group -> stored dtype, over all groups of a dataset."""
    return {
        f"{r.pointer}/{path.rpartition('/')[2]}": str(np.dtype(spec["dtype"]))
        for r in atlas.dataset(name).records
        for path, spec in r.array_specs.items()
        if "layers/" in path
    }


@given(given=anndatas(), rows=st.sampled_from([1, 3, 1000]))
def test_what_is_added_comes_back(given, rows) -> None:  # noqa: ANN001
    """X, layers, raw, obs and var come back in value, dtype, form and order, however the blocks fall."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "block_rows", lambda info: rows)
        patch.setattr("raggedatlas.ingest.group_writer.block_rows", lambda info: rows)
        atlas = RaggedAtlas.create(f"{folder}/atlas")
        report = atlas.add(given, "d", progress=False)
        assert_same(given, atlas.dataset("d").to_anndata())
        assert {c.name for c in report.columns} == set(given.obs.columns)
        assert [p for p in atlas.validate("deep") if p.rule != "unassigned-index"] == []


@pytest.mark.nightly
@given(
    dtype=st.sampled_from(DTYPES), high=st.integers(0, 2**70), rows=st.sampled_from([1, 2, 50]), seed=st.integers(0, 99)
)
def test_counts_take_the_smallest_exact_unsigned_type(dtype, high, rows, seed) -> None:  # noqa: ANN001
    """Whole non-negative values go to `counts` in the smallest unsigned type that holds the largest, whatever came first."""
    kind = np.dtype(dtype)
    top = 1 if kind.kind == "b" else int(np.iinfo(kind).max) if kind.kind in "iu" else int(np.finfo(kind).max)
    largest = int(np.array(min(high, top, 2**63)).astype(kind))
    assume(largest <= min(top, 2**63))
    x = make_values("counts", "bool", (5, 3), np.random.default_rng(seed)).astype(kind)
    x[-1, -1] = largest
    expected = next(t for t in ("uint8", "uint16", "uint32", "uint64") if int(x.max()) <= np.iinfo(t).max)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("raggedatlas.ingest.group_writer.block_rows", lambda info: rows)
        atlas = RaggedAtlas.create(f"{folder}/atlas")
        atlas.add(simple(in_form(x, "csr", np.random.default_rng(0))), "d", progress=False)
        assert stored(atlas) == {"gene_expression/counts": expected}
        assert_same_matrix("X", in_form(x, "csr", np.random.default_rng(0)), atlas.dataset("d").to_anndata().X)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("first", [3, 300, 70_000, 2**40])
def test_a_late_fraction_renames_and_rewrites(atlas, monkeypatch, dtype, first) -> None:  # noqa: ANN001
    """Where the first block looks like counts and the last is not, the layer is `X` in the source's dtype, nothing lost."""
    x = np.array([[first, 0], [0, 1], [0, 0.5]]).clip(max=np.finfo(dtype).max / 2).astype(dtype)
    monkeypatch.setattr("raggedatlas.ingest.group_writer.block_rows", lambda info: 1)
    atlas.add(simple(x, named=x.copy()), "d", progress=False)
    assert stored(atlas) == {"gene_expression/X": dtype, "gene_expression/named": dtype}
    assert_same_matrix("X", x, atlas.dataset("d").to_anndata().X)
    assert_same_matrix("named", x, atlas.dataset("d").to_anndata().layers["named"])
    assert [p for p in atlas.validate("deep") if p.rule != "unassigned-index"] == []


@pytest.mark.parametrize(
    ("x", "raw", "layer", "expected"),
    [
        ("counts", None, None, {"counts"}),
        ("fractions", None, None, {"X"}),
        ("fractions", "counts", None, {"X", "counts"}),
        ("fractions", "fractions", None, {"X", "raw"}),
        ("counts", "counts", None, {"counts", "raw"}),
        ("fractions", "counts", "counts", {"X", "raw", "counts"}),
        ("counts", None, "counts", {"X", "counts"}),
        ("counts", None, "X", {"counts", "X"}),
        ("fractions", None, "X", {"X", "X_2"}),
        ("counts", "fractions", "raw", {"counts", "raw", "raw_2"}),
    ],
)
def test_layers_are_named_by_their_values(atlas, x, raw, layer, expected) -> None:  # noqa: ANN001
    """X and raw/X become `counts` when whole and non-negative and the name is free, else `X` and `raw`; no name is used twice."""
    rng = np.random.default_rng(1)
    whole = rng.poisson(2, (9, 4)).astype(np.float32)
    values = {"counts": whole, "fractions": whole + 0.5}
    given = simple(sp.csr_matrix(values[x]))
    if layer:
        given.layers[layer] = sp.csr_matrix(values["counts"] * 2)
    if raw:
        wide = np.hstack([values[raw], values[raw]])
        given.raw = ad.AnnData(wide, obs=given.obs, var=pd.DataFrame(index=[f"g{j}" for j in range(8)]))
    atlas.add(given, "d", progress=False)
    names = [name for r in atlas.dataset("d").records for name in r.layers]
    assert len(names) == len(set(names))
    assert set(names) == expected
    assert_same(given, atlas.dataset("d").to_anndata())


def test_layers_with_equal_entries_share_their_indices(atlas) -> None:  # noqa: ANN001
    """Layers that have the same entries stand in one group, others in a group of their own."""
    x = sp.random(30, 8, 0.4, "csr", np.float32, random_state=0)
    twice, other = (x * 2).astype(np.float64), sp.random(30, 8, 0.4, "csr", np.float32, random_state=1)
    atlas.add(simple(x, twice=twice, other=other), "d", progress=False)
    assert [r.layers for r in atlas.dataset("d").records] == [["X", "twice"], ["other"]]


def test_bad_counts_are_refused_by_name(atlas, unchanged, monkeypatch) -> None:  # noqa: ANN001
    """NaN, infinities and negative counts are refused with cell and feature; the atlas stays as it was."""
    for form, bad, block in product(("csr", "csc", "dense"), (np.nan, np.inf, -np.inf, -3.0), (1, 100)):
        monkeypatch.setattr("raggedatlas.ingest.group_writer.block_rows", lambda info, block=block: block)
        x = np.random.default_rng(0).poisson(1, (6, 4)).astype(np.float32)
        x[4, 2] = bad
        with (
            unchanged(atlas),
            pytest.raises(ValuesError, match=r"X holds .* at cell 'c4' \(row 4\), feature 'g2' \(column 2"),
        ):
            atlas.add(simple(in_form(x, form, np.random.default_rng(0))), "d", progress=False)


def test_nonfinite_values_stay_when_asked(atlas) -> None:  # noqa: ANN001
    """nonfinite='keep' keeps NaN and infinities of a matrix of values exactly."""
    x = np.array([[0.5, np.nan], [np.inf, 0]], np.float32)
    atlas.add(simple(sp.csr_matrix(x)), "d", nonfinite="keep", progress=False)
    np.testing.assert_array_equal(atlas.dataset("d").to_anndata().X.toarray(), x)
    assert stored(atlas) == {"gene_expression/X": "float32"}


def test_a_layer_called_counts_that_are_none_takes_another_name(atlas) -> None:  # noqa: ANN001
    """Fractions under the name `counts` are taken under another name."""
    x = np.array([[0.5, 1], [2, 0]], np.float32)
    atlas.add(
        simple(np.ones((2, 2), np.float32), counts=x), "d", layers={"X": "counts", "layers/counts": "z"}, progress=False
    )
    assert set(stored(atlas)) == {"gene_expression/counts", "gene_expression__counts/z"}


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int32", "float32", "float64"])
def test_repeated_entries_are_summed_without_overflow(atlas, dtype) -> None:  # noqa: ANN001
    """Entries that name a column twice are summed, exactly even where the source's dtype could not hold the sum."""
    data = np.array([1, 1, 1] if dtype == "bool" else [100, 100, 7], dtype)
    x = sp.csr_matrix((data, np.array([1, 1, 0]), np.array([0, 2, 3])), shape=(2, 2))
    report = atlas.add(simple(x, signed=x), "d", progress=False)
    expected = [[0, 2], [1, 0]] if dtype == "bool" else [[0, 200], [7, 0]]
    back = atlas.dataset("d").to_anndata()
    np.testing.assert_array_equal(back.X.toarray(), expected)
    np.testing.assert_array_equal(back.layers["signed"].toarray(), expected)
    assert any("repeated entries summed" in note for note in report.notes)


def test_negative_sums_do_not_overflow(atlas) -> None:  # noqa: ANN001
    """A named layer of differences keeps negative integers, and sums of them."""
    x = sp.csr_matrix((np.array([-100, -100, 7], np.int8), np.array([1, 1, 0]), np.array([0, 2, 3])), shape=(2, 2))
    one = sp.csr_matrix(np.ones((2, 2), np.uint8))
    atlas.add(simple(one, delta=x), "d", progress=False)
    np.testing.assert_array_equal(atlas.dataset("d").to_anndata().layers["delta"].toarray(), [[0, -200], [7, 0]])


def test_explicit_zeros_stay(atlas) -> None:  # noqa: ANN001
    """A stored zero is an entry of the file and comes back as one."""
    x = sp.csr_matrix((np.array([0, 5], np.float32), np.array([0, 1]), np.array([0, 1, 2])), shape=(2, 2))
    atlas.add(simple(x), "d", progress=False)
    assert atlas.dataset("d").to_anndata().X.nnz == 2


def test_embeddings_keep_what_they_are(atlas) -> None:  # noqa: ANN001
    """A dense space without counts keeps its dtype, NaN and negative values."""
    given = simple(np.eye(3, dtype=np.uint8))
    values = np.array([[1, -2], [np.nan, 4], [0, 0]], np.float64)
    given.obsm["X_pca"] = values
    report = atlas.add(given, "d", spaces={"obsm/X_pca": "embedding"}, progress=False)
    assert stored(atlas)["embedding/X"] == "float64"
    np.testing.assert_array_equal(atlas.dataset("d").to_anndata("embedding").X, values)
    assert {e.name: e.fate for e in report.elements} == {"X": "kept", "obsm/X_pca": "kept"}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(
    values=st.lists(
        st.one_of(
            st.integers(-300, 70_000).map(float),
            st.sampled_from(
                [0.5, -0.0, 2.0**31 - 128, -(2.0**31) + 128, 2.0**31, -(2.0**31), 2.0**40, np.nan, np.inf, -np.inf]
            ),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_whole_numbers_of_32_bits_are_told_from_all_else(dtype: type, values: list[float]) -> None:
    """Bounds come with numbers that are all whole and small; fractions, large numbers, NaN and infinities are found anywhere."""
    low, high, whole = scan_integers(np.array(values, dtype))
    assert whole is all(np.isfinite(v) and v == int(v) and abs(v) < 2.0**31 for v in values)
    if whole:
        assert (low, high) == (min(values), max(values))


HASHED = st.lists(st.integers(0, 255), max_size=70)
HASHED_KINDS = st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64, np.float32])


def hashed(*parts: np.ndarray) -> bytes:
    stream = StreamingHash()
    for part in parts:
        stream.update(part)
    return stream.digest()


def plainly(values: list[int]) -> bytes:
    """The hash as it is described, number by number."""
    mask = 2**64 - 1
    lanes = [i * 0x243F6A8885A308D3 & mask for i in range(HASH_LANES)]
    for i, value in enumerate(values):
        mixed = (lanes[i % HASH_LANES] ^ value) * 0x9E3779B97F4A7C15 & mask
        lanes[i % HASH_LANES] = mixed ^ mixed >> 29
    return hashlib.sha256(np.array([*lanes, len(values)], np.uint64).tobytes()).digest()[:16]


@given(HASHED, st.lists(st.integers(0, 70), max_size=5), st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]))
def test_blocks_make_no_difference(numbers: list[int], cuts: list[int], kind: type) -> None:
    """Wherever a stream is cut, and whatever the width of its numbers, its hash is that of the numbers one by one."""
    values = np.array(numbers, kind)
    assert hashed(*np.split(values, sorted(min(cut, len(numbers)) for cut in cuts))) == plainly(numbers)


@given(HASHED, HASHED, HASHED_KINDS)
def test_other_numbers_have_another_hash(one: list[int], other: list[int], kind: type) -> None:
    """Equal numbers in equal order have equal hashes; others, also of another order or length, have others."""
    assert (hashed(np.array(one, kind)) == hashed(np.array(other, kind))) is (one == other)

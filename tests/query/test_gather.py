"""Reading by the compiled gather and from column-sorted copies: the same results as any other way, in every codec."""

import dataclasses
import pickle
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import raggedatlas as ra
from raggedatlas.errors import CorruptError
from raggedatlas.model.batch import CsrBlock
from raggedatlas.query.plan import plan_read
from raggedatlas.query.read import PartReader, SpaceReader, choose_column_copies
from raggedatlas.store.codecs import PROFILES
from raggedatlas.store.runtime import BufferPool
from support.hypothesis_profile import examples

N_CELLS, N_GENES = 700, (120, 90)


def matrices() -> dict[str, sp.csr_matrix]:
    """Make two files of counts whose genes overlap in part and come in different orders."""
    rng = np.random.default_rng(3)
    return {
        name: sp.csr_matrix(rng.poisson(rng.gamma(0.3, 1.5, n), (N_CELLS, n)).astype(np.float32))
        for name, n in zip(("a", "b"), N_GENES, strict=True)
    }


def genes(name: str) -> list[str]:
    """Name the genes of a file."""
    rng = np.random.default_rng(len(name) + ord(name))
    return [f"g{i}" for i in rng.permutation(140)[: N_GENES[name == "b"]]]


@pytest.fixture(scope="module", params=PROFILES)
def view(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ra.AtlasView:
    """Two datasets in one codec, with float layers beside the counts."""
    uri = str(tmp_path_factory.mktemp("gather") / request.param)
    atlas = ra.RaggedAtlas.create(uri, codec=request.param)
    for name, counts in matrices().items():
        file = ad.AnnData(counts, obs=pd.DataFrame(index=[f"{name}{i}" for i in range(N_CELLS)]))
        file.var_names = genes(name)
        file.layers["log"] = counts.copy()
        file.layers["log"].data = np.log1p(counts.data)
        atlas.add(file, name=name)
    atlas.snapshot()
    return ra.RaggedAtlas.checkout_latest(uri)


def expected(view: ra.AtlasView, layer: str, missing: float = 0) -> pd.DataFrame:
    """Join the two matrices with pandas, cells in table order."""
    frames = {}
    for name, counts in matrices().items():
        values = counts.toarray() if layer == "counts" else np.log1p(counts.toarray())
        index = [f"{name}{i}" for i in range(N_CELLS)]
        frames[name] = pd.DataFrame(values, index=index, columns=genes(name))
    return pd.concat(frames.values()).fillna(missing)


def dense(block: CsrBlock, layer: str) -> NDArray[np.float64]:
    """Write a block out."""
    made = sp.csr_matrix((block.layers[layer], block.indices, block.indptr), shape=(block.n_rows, block.n_cols))
    found: NDArray[np.float64] = made.toarray().astype(np.float64)
    return found


@pytest.mark.long
@examples(15)
@given(data=st.data())
def test_any_rows_in_any_order(view: ra.AtlasView, data: st.DataObject) -> None:
    """Rows in any order and number, sorted or not, by one thread or several, with or without reused memory, are right."""
    layer = data.draw(st.sampled_from(["counts", "log"]))
    wanted = data.draw(st.one_of(st.none(), st.lists(st.sampled_from(genes("a")), min_size=1, unique=True)))
    query = view.query().layers(layer)
    plan = plan_read((query.features(wanted) if wanted else query).spec, query.catalog)
    space = plan.single()
    rows = np.array(data.draw(st.lists(st.integers(0, plan.n_cells - 1), max_size=60)), np.int64)
    pool = data.draw(st.sampled_from([None, BufferPool(2)]))
    reader = SpaceReader(space, threads=data.draw(st.integers(1, 2)), pool=pool)
    block = reader.read(rows, sort=data.draw(st.booleans()))
    assert isinstance(block, CsrBlock)
    names = [feature.rsplit(":", 1)[-1] for feature in view.query().to_anndata().var_names]
    whole = expected(view, layer)
    order = plan.obs.column("cell_name").to_pylist()
    columns = wanted or names
    right = whole.loc[[order[i] for i in rows], columns].to_numpy()
    assert np.allclose(dense(block, layer), right)
    assert (block.layers[layer] != 0).all()


def test_held_results_never_change(view: ra.AtlasView) -> None:
    """Memory is used again only when nothing looks at it: a held batch, or a view of one, stays as it was."""
    query = view.query()
    space = plan_read(query.spec, query.catalog).single()
    pool = BufferPool(4)
    reader = SpaceReader(space, pool=pool)
    rows = np.resize(np.arange(N_CELLS), 4000)
    first = reader.read(rows)
    assert isinstance(first, CsrBlock)
    part, copy = first.indices[10:20], first.indices[10:20].copy()
    del first
    for shift in range(1, 6):
        reader.read(np.roll(rows, shift))
    assert np.array_equal(part, copy)
    del part
    assert pool.free


def test_threads_change_nothing(view: ra.AtlasView) -> None:
    """One and several threads give the same bytes."""
    query = view.query()
    space = plan_read(query.spec, query.catalog).single()
    rows = np.random.default_rng(0).integers(0, 2 * N_CELLS, 40_000)
    one, more = (SpaceReader(space, threads=n).read(rows, sort=False) for n in (1, 3))
    assert isinstance(one, CsrBlock)
    assert isinstance(more, CsrBlock)
    for a, b in ((one.indptr, more.indptr), (one.indices, more.indices), (one.layers["counts"], more.layers["counts"])):
        assert a.tobytes() == b.tobytes()


@pytest.mark.long
def test_copies_give_the_same(tmp_path: Path) -> None:
    """Few features come from the column-sorted copies, which `explain` names, and equal what the rows give."""
    uri = str(tmp_path / "atlas")
    atlas = ra.RaggedAtlas.create(uri)
    for name, counts in matrices().items():
        file = ad.AnnData(
            sp.vstack([counts] * 30).tocsr(), obs=pd.DataFrame(index=[f"{name}{i}" for i in range(30 * N_CELLS)])
        )
        file.var_names = genes(name)
        atlas.add(file, name=name)
    atlas.snapshot()
    few = ["g3", "g120", "g77"]
    before = ra.RaggedAtlas.checkout_latest(uri).query().features(few)
    atlas.add_csc("a")
    atlas.snapshot()
    after = ra.RaggedAtlas.checkout_latest(uri).query().features(few)
    space = plan_read(after.spec, after.catalog).single()
    assert tuple(choose_column_copies(space, space.parts[0])) == tuple(
        i for i, g in enumerate(space.parts[0].groups) if g.copy
    )
    assert "1 groups by column" in after.explain()
    assert "by column" not in before.explain()
    assert "in memory only" not in after.explain()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raggedatlas.query.read.BLOCK_BYTES", 1)
        assert "column-sorted copies, for a result in memory only" in after.explain()
    for one, other in (
        (before, after),
        (before.limit(50), after.limit(50)),
        (before.where(dataset="a"), after.where(dataset="a")),
    ):
        a, b = one.to_anndata(), other.to_anndata()
        assert (a.X != b.X).nnz == 0
        assert a.obs_names.equals(b.obs_names)
        assert a.var_names.equals(b.var_names)
    whole = after.catalog
    everything = plan_read(dataclasses.replace(after.spec, features=()), whole).single()
    assert choose_column_copies(everything, everything.parts[0]) == {}


def test_readers_kept_with_a_snapshot_are_pickled_bare(view: ra.AtlasView) -> None:
    """Equal queries share their readers; in another process a reader checks its path anew."""
    query = view.query()
    one, two = (plan_read(query.spec, query.catalog).single().parts[0].groups for _ in range(2))
    assert one is two
    reader = one[0].indices
    assert reader is not None
    assert reader.folder is not None
    sent = pickle.loads(pickle.dumps(reader))
    assert sent == reader
    assert "folder" not in vars(sent)


def test_damaged_chunk_is_named(tmp_path: Path) -> None:
    """A changed byte in a stored chunk is found before anything is unpacked, and the file is named."""
    uri = tmp_path / "atlas"
    atlas = ra.RaggedAtlas.create(str(uri))
    file = ad.AnnData(matrices()["a"])
    atlas.add(file, name="a")
    atlas.snapshot()
    (shard,) = (uri / "zarr_store").glob("*/gene_expression/csr/layers/counts/c/0")
    raw = bytearray(shard.read_bytes())
    raw[100] ^= 4
    shard.write_bytes(bytes(raw))
    query = ra.RaggedAtlas.checkout_latest(str(uri)).query()
    space = plan_read(query.spec, query.catalog).single()
    reader = PartReader(space, space.parts[0])
    with pytest.raises(CorruptError, match=r"csr/layers/counts.*crc32c"):
        reader.read(np.array([3]), sort=False)

"""Laws of `materialize`: the dataset that `add` would have made of the file, whatever was linked, and the old or the new one at any time."""

import tempfile
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from anndata.tests.helpers import assert_equal
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.catalog import linked_values
from raggedatlas.catalog.assets import array_readers, read_links
from raggedatlas.ingest.linking import SAMPLE_ROWS
from raggedatlas.store.read import read_all

N_CELLS = SAMPLE_ROWS * 8


def made(n: int = 40, width: int = 9, seed: int = 0, dtype: str = "f4") -> ad.AnnData:
    """Return counts, a layer of other values with the same entries, and an embedding."""
    x = sp.random(n, width, 0.3, "csr", random_state=seed)
    x.data = np.ceil(x.data * 300).astype(dtype)
    obs, var = pd.DataFrame(index=[f"c{i}" for i in range(n)]), pd.DataFrame(index=[f"g{j}" for j in range(width)])
    embedding = np.random.default_rng(seed).random((n, 3)).astype("f4")
    return ad.AnnData(x, obs=obs, var=var, layers={"half": x * 0.5}, obsm={"X_pca": embedding})


def arrays_of(atlas: RaggedAtlas, name: str) -> dict[str, tuple[str, np.ndarray]]:
    """Return the values of all arrays of a dataset, with their dtypes."""
    found = {}
    for record in atlas.dataset(name).records:
        for path, reader in array_readers(atlas._catalog, record).items():
            found[f"{record.zarr_group.partition('/')[2]}/{path}"] = (reader.spec.dtype, read_all(reader))
    return found


def assert_alike(one: RaggedAtlas, other: RaggedAtlas, name: str = "d") -> None:
    """Compare two datasets: values, dtypes, hash, form, and what is said of the values."""
    ours, theirs = arrays_of(one, name), arrays_of(other, name)
    assert ours.keys() == theirs.keys()
    for path, (dtype, values) in ours.items():
        assert dtype == theirs[path][0], path
        np.testing.assert_array_equal(values, theirs[path][1], err_msg=path)
    for mine, their in zip(one.dataset(name).records, other.dataset(name).records, strict=True):
        assert (mine.content_hash, mine.layers, mine.n_entries) == (their.content_hash, their.layers, their.n_entries)
        assert mine.file_facts.layers == their.file_facts.layers
        largest = [{path: spec.get("largest") for path, spec in r.array_specs.items()} for r in (mine, their)]
        assert largest[0] == largest[1]
    assert_equal(one.dataset(name).to_anndata(), other.dataset(name).to_anndata(), exact=True)


def is_linked(atlas: RaggedAtlas, name: str = "d") -> bool:
    records = atlas.dataset(name).records
    linked = any(map(read_links, records))
    assert linked == (records[0].file_facts.linked is not None)
    return linked


def problems(atlas: RaggedAtlas) -> list[str]:
    return [str(problem) for problem in atlas.validate("deep") if problem.level == "must"]


@given(
    n=st.integers(1, 60), width=st.integers(1, 12), seed=st.integers(0, 99), dtype=st.sampled_from(["f4", "f8", "i4", "i8", "u2"]),
    embedded=st.booleans(), full=st.booleans(), step=st.integers(1, 400), gzip=st.booleans(),
)  # fmt: skip
def test_it_equals_what_add_would_have_made(
    n: int, width: int, seed: int, dtype: str, embedded: bool, full: bool, step: int, gzip: bool
) -> None:
    """Whatever the form, dtypes, chunks and steps: the arrays, their types, the hash, and the dataset as it is read back."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(linked_values, "STEP_BYTES", step)
        place = Path(folder) / "d.h5ad"
        adata = made(n, width, seed, dtype)
        adata.write_h5ad(place, compression="gzip" if gzip else None)
        options = {"embeddings": ["X_pca"]} if embedded else {}
        linked, copied = (RaggedAtlas.create(f"{folder}/{name}") for name in ("linked", "copied"))
        linked.add(place, copy=False, hash="full" if full else "metadata", progress=False, **options)
        copied.add(place, column_order="file", progress=False, **options)
        before = linked.dataset("d").to_anndata()
        assert problems(linked) == []
        was = linked.dataset("d").records
        assert linked.materialize() == ("d",)
        assert not is_linked(linked)
        assert [record.uid for record in linked.dataset("d").records] == [record.uid for record in was]
        assert_equal(linked.dataset("d").to_anndata(), before, exact=True)
        assert_alike(linked, copied)
        assert problems(linked) == []

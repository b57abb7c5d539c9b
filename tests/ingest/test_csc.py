"""Laws of the column-sorted copy: equal to SciPy's, idempotent, in bounded bands, safe to interrupt."""

import json
import tempfile
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.errors import ConflictError, NotFoundError, QueryError
from raggedatlas.ingest import csc
from raggedatlas.model.arrays import ArraySpec
from raggedatlas.store.read import ArrayReader, read_slice


def make(n: int, m: int, density: float, seed: int) -> ad.AnnData:
    x = sp.random(n, m, density, "csr", np.float32, random_state=seed)
    x.data = np.ceil(x.data * 300)
    obs, var = pd.DataFrame(index=[f"c{i}" for i in range(n)]), pd.DataFrame(index=[f"g{j}" for j in range(m)])
    return ad.AnnData(x, obs=obs, var=var, layers={"half": x * 0.5})


def read_csc(atlas: RaggedAtlas, name: str, layer: str) -> sp.csc_matrix:
    """Read a copy, its columns put back into the file's order."""
    record = atlas.dataset(name).records[0]

    def read(path: str) -> np.ndarray:
        spec = ArraySpec.from_json(json.dumps(record.array_specs[path]))
        return read_slice(ArrayReader(atlas._catalog.arrays, spec), 0, spec.shape[0])

    parts = (read(f"csc/layers/{layer}"), read("csc/indices").astype(np.int64), read("csc/indptr"))
    stored = sp.csc_matrix(parts, shape=(record.n_cells, record.n_features))
    return stored[:, read("columns")] if "columns" in record.array_specs else stored


def assert_copied(atlas: RaggedAtlas, file: ad.AnnData, layers: dict[str, str]) -> None:
    for stored, key in layers.items():
        expected = sp.csc_matrix(file.X if key == "X" else file.layers[key])
        found = read_csc(atlas, "d", stored)
        np.testing.assert_array_equal(found.indptr, expected.indptr)
        np.testing.assert_array_equal(found.indices, expected.indices)
        np.testing.assert_array_equal(found.data.astype(np.float32), expected.data)


@given(
    n=st.integers(1, 30), m=st.integers(1, 12), density=st.floats(0, 1), seed=st.integers(0, 99),
    band=st.integers(1, 60), step=st.integers(1, 60),
)  # fmt: skip
def test_the_copy_equals_scipys(n, m, density, seed, band, step) -> None:  # noqa: ANN001
    """Whatever the bands and steps, indptr, indices and values are those of tocsc()."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(csc, "BAND_BYTES", band * 9)
        patch.setattr(csc, "STEP_ENTRIES", step)
        atlas = RaggedAtlas.create(f"{folder}/a")
        file = make(n, m, density, seed)
        atlas.add(file, "d", progress=False)
        layers = dict(zip(atlas.dataset("d").records[0].layers, ["X", "half"], strict=True))
        assert set(atlas.add_csc("d")) == set(layers)
        assert_copied(atlas, file, layers)
        assert [p for p in atlas.validate("deep") if p.rule != "unassigned-index"] == []


def test_it_is_idempotent_and_takes_a_second_layer_later(atlas, unchanged) -> None:  # noqa: ANN001
    """Copied layers are left alone; a further layer shares the indices that are there."""
    file = make(20, 6, 0.4, 0)
    atlas.add(file, "d", progress=False)
    assert atlas.add_csc("d", layers=["counts"]) == ("counts",)
    with unchanged(atlas):
        assert atlas.add_csc("d", layers=["counts"]) == ()
    assert atlas.add_csc("d") == ("half",)
    with unchanged(atlas):
        assert atlas.add_csc("d") == ()
    assert_copied(atlas, file, {"counts": "X", "half": "half"})


@pytest.mark.parametrize("at", [1, 2, 4])
def test_it_can_be_interrupted_and_run_again(atlas, monkeypatch, at) -> None:  # noqa: ANN001
    """A copy that dies while it writes any of its arrays is not seen, and the next run makes it whole."""
    file = make(20, 6, 0.4, 0)
    atlas.add(file, "d", progress=False)
    original, calls = csc.ArrayWriter.append, []

    def dying(self, *values):  # noqa: ANN001, ANN002, ANN202
        calls.append(self.path)
        original(self, *values)
        if len(calls) == at:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(csc.ArrayWriter, "append", dying)
        with pytest.raises(KeyboardInterrupt):
            atlas.add_csc("d")
    assert "csc/indptr" not in atlas.dataset("d").records[0].array_specs
    np.testing.assert_array_equal(atlas.dataset("d").to_anndata().X.toarray(), file.X.toarray())
    assert set(atlas.add_csc("d")) == {"counts", "half"}
    assert_copied(atlas, file, {"counts": "X", "half": "half"})


@pytest.mark.parametrize("layers", [None, ["counts"], ["half"]])
@pytest.mark.parametrize("packed", [False, True])
def test_what_a_snapshot_has_is_taken(atlas, monkeypatch, layers, packed) -> None:  # noqa: ANN001
    """After `restore`, what is copied again is what the snapshot names, and no file of it is touched."""
    monkeypatch.setattr("raggedatlas.catalog.bundles.WORTH", 1 if packed else 9)
    file = make(20, 6, 0.4, 0)
    atlas.add(file, "d", progress=False)
    atlas.snapshot()
    atlas.add_csc("d", layers=["counts"])
    atlas.optimize()
    atlas.snapshot()
    atlas.restore(1)
    files = {path: path.stat().st_mtime_ns for path in Path(atlas.uri).rglob("csc/**/c/*")}
    assert atlas.add_csc("d", layers=layers) == (("counts", "half") if layers is None else tuple(layers))
    assert files == {path: path.stat().st_mtime_ns for path in files}
    assert_copied(atlas, file, {name: {"counts": "X"}.get(name, name) for name in layers or ("counts", "half")})
    for there in (atlas, atlas.checkout(2)):
        assert [p for p in there.validate("deep") if p.level == "must"] == []


def test_a_dataset_that_is_dropped_meanwhile(atlas, monkeypatch) -> None:  # noqa: ANN001
    """The call does not say that it has written what nobody can read."""
    atlas.add(make(20, 6, 0.4, 0), "d", progress=False)
    copy = csc._copy_group

    def dropping(*given):  # noqa: ANN002, ANN202
        RaggedAtlas.open(atlas.uri).drop_dataset("d")
        return copy(*given)

    monkeypatch.setattr(csc, "_copy_group", dropping)
    with pytest.raises(ConflictError, match="was dropped while add_csc"):
        atlas.add_csc("d")
    assert len(atlas.gc(dry_run=False).groups) == 1


def test_what_cannot_be_copied_is_refused(atlas, unchanged) -> None:  # noqa: ANN001
    """A dense space, an unknown dataset, space or layer: refused by name."""
    atlas.add(make(5, 3, 0.5, 0), "d", progress=False)
    with unchanged(atlas):
        with pytest.raises(QueryError, match="dense"):
            atlas.add_csc("d", space="embedding")
        with pytest.raises(NotFoundError, match="nope"):
            atlas.add_csc("nope")
        with pytest.raises(NotFoundError, match="nope"):
            atlas.add_csc("d", layers=["nope"])
        with pytest.raises(NotFoundError):
            atlas.add_csc("d", space="chromatin_accessibility")

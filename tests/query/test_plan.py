"""Laws of the plan: types that hold every value, compiled loops that equal NumPy, refusals of what does not fit."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from raggedatlas.catalog.catalog import create_catalog
from raggedatlas.catalog.features import Layout, Registry
from raggedatlas.catalog.snapshots import snapshot
from raggedatlas.errors import CorruptError, QueryError
from raggedatlas.ingest.add import add
from raggedatlas.query.modalities import FeatureRows, join_dtypes
from raggedatlas.query.plan import plan_read
from raggedatlas.query.query import Query
from raggedatlas.query.read import SpaceReader
from raggedatlas.store.location import Location

pytestmark = pytest.mark.fast

DTYPES = [
    np.dtype(name) for name in ("uint8", "uint16", "uint32", "uint64", "int8", "int32", "int64", "float32", "float64")
]


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_joined_dtypes_hold_every_value(size: int, nan: bool) -> None:
    """The extreme values of every stored type come through the joined type, or there is none."""
    for stored in itertools.combinations(DTYPES, size):
        joined = join_dtypes(set(stored), nan=nan)
        extremes = [v for d in stored if d.kind in "iu" for v in (int(np.iinfo(d).min), int(np.iinfo(d).max))]
        if joined is None:
            assert max(extremes) > 2**53
            continue
        assert all(int(np.array(v).astype(joined)) == v for v in extremes)
        assert joined.kind == "f" if nan or any(d.kind == "f" for d in stored) else joined.kind in "iu"


def test_damaged_groups_are_refused(query: Query) -> None:
    """A group that does not fit its feature list is refused by name."""
    space = plan_read(query.where(dataset="first").spec, query.catalog).single()
    ((layout, column_map),) = space.column_maps.items()
    short = dataclasses.replace(space, column_maps={layout: column_map[:2]})
    with pytest.raises(CorruptError, match="has not got"):
        SpaceReader(short).read_batch(np.arange(20))
    folded = dataclasses.replace(space, column_maps={layout: np.zeros_like(column_map)})
    with pytest.raises(CorruptError, match="twice"):
        SpaceReader(folded).read_batch(np.arange(20))


@pytest.mark.parametrize("index", [3, 2**40, 2**62])
def test_an_index_beyond_the_features_is_refused(index: int) -> None:
    """Indices of features are dense; memory for a larger one, which only damage brings, is not taken."""
    table = pa.table({"uid": ["a", "b", "c"], "global_index": [0, index, None]})
    registry = Registry("gene_expression", table, pa.table({"feature_uid": [""], "target_uid": [""]}))
    rows = FeatureRows(registry, {"list": Layout("list", registry.uids, np.arange(3))})
    with pytest.raises(CorruptError, match=f"has 3 features and the index {index:,}"):
        rows.rows("list")


def vectors(n: int, width: tuple[int, ...], key: str) -> ad.AnnData:
    file = ad.AnnData(np.ones((n, 2), np.float32), var=pd.DataFrame(index=["g1", "g2"]))
    file.obs_names = [f"c{i}" for i in range(n)]
    file.obsm[key] = np.arange(n * int(np.prod(width)), dtype=np.float32).reshape(n, *width)
    return file


def test_vectors_of_different_width_are_refused(tmp_path: Path) -> None:
    """Embeddings that do not agree are refused, and each can be had by itself."""
    catalog = create_catalog(Location(str(tmp_path / "atlas")))
    for name, width in (("a", 3), ("b", 4)):
        add(catalog, vectors(width, (width,), "X_pca"), {"name": name, "spaces": {"obsm/X_pca": "embedding"}}, False)
    query = Query(catalog.at(snapshot(catalog))).spaces("embedding")
    with pytest.raises(QueryError, match="different shapes"):
        query.to_anndata()
    assert query.where(dataset="b").to_anndata().shape == (4, 4)


def test_tiles_come_in_batches(tmp_path: Path) -> None:
    """Image tiles keep their axes in batches; AnnData refuses them with the way out."""
    catalog = create_catalog(Location(str(tmp_path / "atlas")))
    file = vectors(5, (2, 3, 4), "tiles")
    add(catalog, file, {"name": "a", "spaces": {"obsm/tiles": "image_tiles"}}, False)
    query = Query(catalog.at(snapshot(catalog))).spaces("image_tiles")
    found: list[Any] = [b.spaces["image_tiles"].block.layers for b in query.batches(2)]
    assert [next(iter(layers.values())).shape for layers in found] == [(2, 2, 3, 4), (2, 2, 3, 4), (1, 2, 3, 4)]
    np.testing.assert_array_equal(np.concatenate([next(iter(layers.values())) for layers in found]), file.obsm["tiles"])
    with pytest.raises(QueryError, match="batches"):
        query.to_anndata()


def test_an_atlas_without_datasets_says_so(tmp_path: Path) -> None:
    """Nothing was added: the refusal says it; counts and tables are empty."""
    query = Query(create_catalog(Location(str(tmp_path / "atlas"))))
    assert query.count() == 0
    assert len(query.to_pandas()) == 0
    with pytest.raises(QueryError, match="no dataset"):
        query.to_anndata()

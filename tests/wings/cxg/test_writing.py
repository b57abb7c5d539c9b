"""Writing a CXG: the arrays of each profile to the last filter, the traps of viewers, and nothing half done."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from raggedatlas.errors import (
    CorruptError,
    DuplicateError,
    QueryError,
    SchemaError,
    SourceError,
    StoreError,
    ValuesError,
)
from raggedatlas.formats.copying import copy
from raggedatlas.formats.registry import open_sink, open_source
from raggedatlas.model.batch import CsrBlock, DenseBlock
from raggedatlas.model.protocols import SinkMatrix
from raggedatlas.wings.cxg import array_writer, sink, tiledb_arrays
from raggedatlas.wings.cxg.inspection import detect
from raggedatlas.wings.cxg.options import Embedder
from raggedatlas.wings.cxg.sink import principal_components
from raggedatlas.wings.cxg.tiledb_arrays import context, import_tiledb, open_array
from raggedatlas.wings.results.verbs.reduction import embedder
from reading import array_metadata, array_values, read_element
from support.processes import started

N, M = 700, 2100


def small(n: int = 30, m: int = 12, **obs: Any) -> ad.AnnData:
    """A small AnnData with an embedding."""
    rng = np.random.default_rng(n)
    frame = pd.DataFrame({"kind": pd.Categorical(rng.choice(["T", "B"], n), ["T", "B", "NK"]), **obs})
    frame.index = pd.Index([f"cell {i}" for i in range(n)])
    made = ad.AnnData(sp.csr_matrix(rng.poisson(0.2, (n, m)).astype(np.float32)), obs=frame)
    made.var_names = [f"g{i}" for i in range(m)]
    made.obsm["X_umap"] = rng.normal(size=(n, 2)).astype(np.float32)
    return made


def write(given: Any, path: Path, **options: Any) -> Path:
    return Path(copy(given, open_sink(path, **options)))


@pytest.mark.parametrize(("gone", "rule"), [(("var",), "C11"), (("X", "Xr"), "C17")], ids=["var", "X"])
def test_what_cannot_be_opened_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: tuple[str, ...], rule: str
) -> None:
    """A CXG that breaks a rule of its readers is an error of ours, and nothing has its name; one that was there stays."""
    target = write(small(7), tmp_path / "x.cxg")
    finish = sink.write_metadata_array

    def odd(path: Path, metadata: Any) -> None:
        finish(path, metadata)
        for name in gone:
            shutil.rmtree(path.parent / name, ignore_errors=True)

    monkeypatch.setattr(sink, "write_metadata_array", odd)
    for name in ("x.cxg", "new.cxg"):
        with pytest.raises(CorruptError, match=f"{rule}.*nothing was kept"):
            write(small(), tmp_path / name, overwrite=True)
    assert [at.name for at in tmp_path.iterdir()] == ["x.cxg"]
    assert open_source(target).describe().n_cells == 7


TIES = {"Xc": lambda entry: (entry[1], entry[0])}


def iter_entries(path: Path) -> list[tuple[int, int, float]]:
    """Read all entries of a sparse array in the order of its fragments.

    Releases that give no way to write in order leave the order of entries with one coordinate open; those are sorted here.
    """
    with open_array(path) as array:
        found = array.query(dims=True, order="G")[:]
    if not {"obs", "var"} & set(found):
        return []
    entries = list(zip(found["obs"].tolist(), found["var"].tolist(), found[""].tolist(), strict=True))
    return entries if tiledb_arrays.low_level_module() is not None else sorted(entries, key=TIES.get(path.name))


def hints_of(path: Path) -> Any:
    return json.loads(array_metadata(path)["cxg_schema"])


def n_fragments(path: Path) -> int:
    return len(import_tiledb().array_fragments(str(path), ctx=context()))


def schema_of(path: Path) -> dict[str, Any]:
    """Describe the schema of an array in plain data."""
    with open_array(path) as array:
        schema, domain = array.schema, array.schema.domain
        axes = [domain.dim(i) for i in range(domain.ndim)]
        attributes = [schema.attr(i) for i in range(schema.nattr)]
        return {
            "axes": [(a.name, str(a.dtype), *(int(v) for v in a.domain), int(a.tile), filters_of(a)) for a in axes],
            "attributes": [
                (a.name, "text" if a.isvar else str(a.dtype), a.isnullable, filters_of(a)) for a in attributes
            ],
            "sparse": schema.sparse,
            "orders": (schema.cell_order, schema.tile_order),
            "capacity": schema.capacity,
            "duplicates": schema.sparse and schema.allows_duplicates,
        }


def filters_of(part: Any) -> list[str]:
    named = {"ByteShuffleFilter": "shuffle", "ChecksumMD5Filter": "md5"}
    return [named.get(type(f).__name__) or f"zstd {f.level}" for f in part.filters]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> ad.AnnData:
    """Larger than every tile."""
    rng = np.random.default_rng(0)
    made = ad.AnnData(sp.random(N, M, 0.02, "csr", dtype=np.float32, rng=rng))
    made.obs["flag"] = rng.random(N) < 0.5
    made.obs["n"] = rng.integers(0, 9, N).astype(np.int32)
    made.obs["kind"] = pd.Categorical(rng.choice(["T", "B"], N), ["T", "B"])
    made.var["type"] = pd.Categorical(["a"] * M)
    made.obsm["X_umap"] = rng.normal(size=(N, 2)).astype(np.float32)
    made.obsm["spatial"] = rng.normal(size=(N, 3))
    return made


ZSTD, SHUFFLED, DEFAULT = ["zstd 3", "md5"], ["shuffle", "zstd 3", "md5"], ["zstd -1"]
TABLE = {"sparse": False, "orders": ("row-major", "row-major"), "capacity": 10_000, "duplicates": False}
HALF = {"sparse": True, "orders": ("row-major", "row-major"), "capacity": 262_144, "duplicates": True}
HOLDER = {
    "axes": [("__dim_0", "uint64", 0, 0, 1, DEFAULT)], "attributes": [("", "float64", False, SHUFFLED)], **TABLE
}  # fmt: skip


def grid(n_columns: int, dtype: str) -> dict[str, Any]:
    axes = [("__dim_0", "uint32", 0, N - 1, N, DEFAULT), ("__dim_1", "uint32", 0, n_columns - 1, n_columns, DEFAULT)]
    return {"axes": axes, "attributes": [("", dtype, False, SHUFFLED)], **TABLE}


EMBEDDINGS = {"emb/umap": grid(2, "float32"), "emb/spatial": grid(3, "float64"), "cxg_group_metadata": HOLDER}
VAR_TABLE = {
    "axes": [("__dim_0", "uint32", 0, M - 1, 1000, DEFAULT)],
    "attributes": [("name_0", "text", False, ZSTD), ("type", "text", False, ZSTD)],
    **TABLE,
}


def obs_table(kind: tuple[Any, ...]) -> dict[str, Any]:
    return {
        "axes": [("__dim_0", "uint32", 0, N - 1, N, DEFAULT)],
        "attributes": [
            ("name_0", "text", False, ZSTD), ("flag", "uint8", False, ZSTD), ("n", "int32", False, SHUFFLED), kind,
        ],
        **TABLE,
    }  # fmt: skip


CODED, SPELLED = obs_table(("kind", "int8", False, ZSTD)), obs_table(("kind", "text", False, ZSTD))
DENSE_X = {
    "axes": [("obs", "uint32", 0, N - 1, 256, DEFAULT), ("var", "uint32", 0, M - 1, 2048, DEFAULT)],
    "attributes": [("", "float32", False, SHUFFLED)],
    **TABLE,
}


def half(axis: str, n: int, other: str) -> dict[str, Any]:
    attributes = [("", "float32", False, SHUFFLED), (other, "uint32", False, SHUFFLED)]
    return {"axes": [(axis, "uint32", 0, n - 1, 256, SHUFFLED)], "attributes": attributes, **HALF}


SPARSE_X = {
    "axes": [("obs", "uint32", 0, N - 1, 512, SHUFFLED), ("var", "uint32", 0, M - 1, 2048, SHUFFLED)],
    "attributes": [("", "float32", False, SHUFFLED)],
    **HALF,
    "orders": ("row-major", "col-major"),
}
GOLDEN: dict[tuple[str, str], dict[str, Any]] = {
    ("0.3.0", "sparse"): {"obs": CODED, "Xr": half("obs", N, "var"), "Xc": half("var", M, "obs")},
    ("0.3.0", "dense"): {"obs": CODED, "X": DENSE_X},
    ("0.2.0", "sparse"): {"obs": SPELLED, "X": SPARSE_X},
    ("0.2.0", "dense"): {"obs": SPELLED, "X": DENSE_X},
}


@pytest.mark.parametrize(("profile", "layout"), list(GOLDEN))
def test_the_arrays_of_each_profile(tmp_path: Path, wide: ad.AnnData, profile: Any, layout: Any) -> None:
    """Every array has exactly these axes, domains, tiles, attributes, filters and orders, and is one fragment."""
    made = write(wide, tmp_path / "a.cxg", profile=profile, layout=layout)
    expected = {**GOLDEN[profile, layout], "var": VAR_TABLE, **EMBEDDINGS}
    found = [name for name, kind in detect(made).members.items() if kind == "array"]
    assert sorted([*found, *(f"emb/{name}" for name in detect(made).embeddings)]) == sorted(expected)
    for name, schema in expected.items():
        assert schema_of(made / name) == schema, name
        assert n_fragments(made / name) == 1, name


@pytest.mark.parametrize("profile", ["0.3.0", "0.2.0"])
def test_the_metadata_of_each_profile(tmp_path: Path, wide: ad.AnnData, profile: Any) -> None:
    """The metadata that viewers read is there to the letter: version, properties, colours, hints; values are text, never bytes."""
    given = wide.copy()
    given.uns = {"kind_colors": ["#00f", "red"], "title": "T", "spatial": {"is_single": True}}
    given.uns |= {"schema_version": "5.2.0", "default_embedding": "X_umap"}
    made = write(given, tmp_path / "a.cxg", profile=profile, title="Mine", about="https://example.org")
    group = array_metadata(made / "cxg_group_metadata")
    np.testing.assert_array_equal(array_values(made / "cxg_group_metadata"), [0.0])
    assert all(isinstance(value, str) for value in group.values())
    assert group["cxg_version"] == profile
    assert json.loads(group["cxg_properties"]) == {"title": "Mine", "about": "https://example.org"}
    assert json.loads(group["cxg_category_colors"]) == {"kind": {"T": "#0000ff", "B": "#ff0000"}}
    assert json.loads(group["corpora"]) == {"schema_version": "5.2.0", "title": "Mine", "default_embedding": "X_umap"}
    assert array_metadata(made / "uns") == {"spatial": "{}"}
    types = {"name_0": "string", "flag": "boolean", "n": "int32"}
    assert hints_of(made / "obs") == {
        "index": "name_0",
        **{name: {"type": kind} for name, kind in types.items()},
        "kind": {"type": "categorical", "categories": ["T", "B"]},
    }
    assert hints_of(made / "var")["type"] == {"type": "categorical", "categories": ["a"]}


def test_properties_are_written_even_if_empty(tmp_path: Path) -> None:
    """Without a title there are properties all the same, for viewers fail on every request without; and no corpora."""
    group = array_metadata(write(small(), tmp_path / "a.cxg") / "cxg_group_metadata")
    assert json.loads(group["cxg_properties"]) == {"title": None, "about": None}
    assert json.loads(group["cxg_category_colors"]) == {}
    assert "corpora" not in group


@pytest.mark.parametrize("profile", ["0.3.0", "0.2.0"])
def test_columns_avoid_the_traps_of_viewers(tmp_path: Path, profile: Any) -> None:
    """No column without a hint or in 64 bits; all-true booleans list both truths as categories; categories of features are text."""
    given = small(all=True, some=[True, False] * 15, wide=np.arange(30), fine=np.linspace(0, 1, 30))
    given.obs["holes"] = pd.array([1, None] * 15, dtype="Int64")
    given.var["kind"] = pd.Categorical(["x", "y"] * 6)
    made = write(given, tmp_path / "a.cxg", profile=profile)
    hints = hints_of(made / "obs")
    with open_array(made / "obs") as array:
        types = {array.schema.attr(i).name: str(array.schema.attr(i).dtype) for i in range(array.schema.nattr)}
    assert set(types) == set(hints) - {"index"}
    assert set(types.values()) <= {"<U0", "int8", "uint8", "int32", "float32"}
    new = {"type": "categorical", "categories": ["False", "True"]}
    assert hints["all"] == (new if profile == "0.3.0" else {"type": "boolean"})
    assert array_values(made / "obs")["all"].tolist() == [1] * 30
    expected = {"some": "boolean", "wide": "int32", "fine": "float32", "holes": "float32"}
    assert {name: hints[name]["type"] for name in expected} == expected
    assert types["kind"] == ("int8" if profile == "0.3.0" else "<U0")
    with open_array(made / "var") as array:
        assert array.schema.attr("kind").isvar


def test_missing_categories_are_a_code_below_none(tmp_path: Path) -> None:
    """Codes are those of pandas, -1 where a value is missing, and categories keep their order, unused ones too, unless told."""
    given = small()
    given.obs["kind"] = pd.Categorical([None, "T", "B"] * 10, ["T", "B", "NK"])
    given.uns["kind_colors"] = ["#000001", "#000002", "#000003"]
    for options, categories, codes in (
        ({}, ["T", "B", "NK"], [-1, 0, 1]),
        ({"sort_categories": True}, ["B", "NK", "T"], [-1, 2, 0]),
    ):
        made = write(given, tmp_path / f"{len(options)}.cxg", **options)
        assert array_values(made / "obs")["kind"][:3].tolist() == codes
        assert hints_of(made / "obs")["kind"]["categories"] == categories
    colors = json.loads(array_metadata(made / "cxg_group_metadata")["cxg_category_colors"])["kind"]
    assert colors == {"T": "#000001", "B": "#000002", "NK": "#000003"}


def test_categories_that_are_numbers_are_written_as_numbers(tmp_path: Path) -> None:
    """Categories of numbers are values with a hint and no list, also with missing ones; their colours are found by their labels."""
    given = small()
    given.obs["cluster"] = pd.Categorical([2, 0, None] * 10, [2, 0, 7])
    given.uns["cluster_colors"] = ["#000002", "#000000", "#000007"]
    made = write(given, tmp_path / "a.cxg")
    assert hints_of(made / "obs")["cluster"] == {"type": "categorical"}
    np.testing.assert_array_equal(array_values(made / "obs")["cluster"][:3], np.array([2, 0, np.nan], np.float32))
    assert list(read_element(made, "obs")["cluster"].cat.categories) == [0, 2]
    assert read_element(made, "uns/cluster_colors").tolist() == ["#000000", "#000002"]


def test_both_halves_hold_the_same_entries_in_order(tmp_path: Path, wide: ad.AnnData) -> None:
    """Xr is sorted by cell and feature, Xc by feature and cell; both hold each non-zero once."""
    given = wide.copy()
    given.X.data[:50] = 0
    given.X.indices[: given.X.indptr[1]] = given.X.indices[: given.X.indptr[1]][::-1]
    given.X.has_sorted_indices = False
    made = write(given, tmp_path / "a.cxg")
    by_row, by_column = iter_entries(made / "Xr"), iter_entries(made / "Xc")
    expected = sp.csr_matrix(given.X, copy=True)
    expected.eliminate_zeros()
    expected.sort_indices()
    coo = expected.tocoo()
    assert by_row == list(zip(coo.row.tolist(), coo.col.tolist(), coo.data.tolist(), strict=True))
    assert by_column == sorted(by_row, key=lambda entry: (entry[1], entry[0]))


@pytest.mark.long
@pytest.mark.parametrize("profile", ["0.3.0", "0.2.0"])
@pytest.mark.parametrize("run", [50, 1000])
def test_small_runs_give_the_same_arrays(
    tmp_path: Path, wide: ad.AnnData, monkeypatch: pytest.MonkeyPatch, profile: Any, run: int
) -> None:
    """Entries sorted in many runs through a file are those that are sorted at once, and the file is gone."""
    given = wide[:60].copy()
    whole = write(given, tmp_path / "a.cxg", profile=profile)
    monkeypatch.setattr("raggedatlas.wings.cxg.column_sort.RUN_ENTRIES", run)
    parts = write(given, tmp_path / "b.cxg", profile=profile)
    for name in ("Xr", "Xc") if profile == "0.3.0" else ("X",):
        assert iter_entries(parts / name) == iter_entries(whole / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.cxg", "b.cxg"]


@pytest.mark.long
@pytest.mark.parametrize("profile", ["0.3.0", "0.2.0"])
@pytest.mark.parametrize("missing", ["module", "handle"])
def test_the_public_call_writes_the_same(
    tmp_path: Path, wide: ad.AnnData, monkeypatch: pytest.MonkeyPatch, profile: Any, missing: str
) -> None:
    """Without the library's private names the arrays hold the same, in one fragment each."""
    given = wide[:60].copy()
    fast = write(given, tmp_path / "a.cxg", profile=profile)
    if missing == "module":
        monkeypatch.delattr(import_tiledb().libtiledb, "LayoutType", raising=False)
        assert tiledb_arrays.low_level_module() is None
        monkeypatch.undo()
        monkeypatch.setattr(array_writer, "low_level_module", lambda: None)
    else:
        monkeypatch.setattr(array_writer, "_global_query", lambda _: [][:].no_such_name)
    slow = write(given, tmp_path / "b.cxg", profile=profile)
    for name in ("Xr", "Xc") if profile == "0.3.0" else ("X",):
        assert sorted(iter_entries(slow / name)) == sorted(iter_entries(fast / name))
        assert n_fragments(slow / name) == 1


def test_dense_arrays_in_many_bands_are_joined(
    tmp_path: Path, wide: ad.AnnData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bands of a dense matrix that make too many fragments become one, and hold the same."""
    monkeypatch.setattr(array_writer, "BAND_BYTES", 256 * M * 4)
    monkeypatch.setattr(array_writer, "MAX_FRAGMENTS", 2)
    made = write(wide, tmp_path / "a.cxg", layout="dense")
    assert n_fragments(made / "X") == 1
    np.testing.assert_array_equal(array_values(made / "X"), wide.X.toarray())


@pytest.mark.long
@pytest.mark.parametrize(("share", "layout"), [(0.24, "split"), (0.26, "dense")])
@pytest.mark.parametrize("known", [True, False])
def test_density_decides(tmp_path: Path, share: float, layout: str, known: bool) -> None:
    """Below a quarter of non-zeros the matrix is sparse; told so or not, sparse or dense in its source."""
    values = np.zeros((100, 10), np.float32)
    rng = np.random.default_rng(0)
    values.reshape(-1)[rng.permutation(1000)[: round(1000 * share)]] = 1
    given = ad.AnnData(sp.csr_matrix(values) if known else values, obsm={"X_umap": rng.normal(size=(100, 2))})
    assert detect(write(given, tmp_path / "a.cxg")).layout == layout
    assert detect(write(given, tmp_path / "b.cxg", sparse_below=0)).layout == "dense"
    assert detect(write(given, tmp_path / "c.cxg", sparse_below=100)).layout == "split"


def test_features_are_shown_by_the_names_that_are_unique(tmp_path: Path) -> None:
    """A column feature_name is the index that viewers show where its names are unique; another one where it is asked."""
    given = small()
    given.var["feature_name"] = [f"SYM{i}" for i in range(12)]
    given.var["other"] = "x"

    assert hints_of(write(given, tmp_path / "a.cxg") / "var")["index"] == "feature_name"
    assert hints_of(write(given, tmp_path / "b.cxg", var_index="other") / "var")["index"] == "other"
    given.var["feature_name"] = "same"
    assert hints_of(write(given, tmp_path / "c.cxg") / "var")["index"] == "name_0"
    with pytest.raises(SourceError, match=r"^C30: .*'nothing'"):
        write(given, tmp_path / "d.cxg", var_index="nothing")


@pytest.mark.long
def test_an_embedding_is_computed_on_request(tmp_path: Path) -> None:
    """Principal components are those of the logged matrix, the same every time, whatever the layout; a file's own are kept."""
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 3, 200)
    counts = rng.poisson(0.3 + 3 * (np.arange(20) % 3 == groups[:, None]))
    given = ad.AnnData(sp.csr_matrix(counts.astype(np.float32)))
    logged = np.log1p(counts * 1e4 / np.maximum(counts.sum(axis=1, keepdims=True), 1))
    left, lengths, _ = np.linalg.svd(logged - logged.mean(axis=0), full_matrices=False)
    found = {}
    for profile, layout in GOLDEN:
        path = write(
            given, tmp_path / f"{profile}{layout}.cxg", profile=profile, layout=layout, compute_embedding="pca"
        )
        found[profile, layout] = array_values(path / "emb" / "pca")
    first = found["0.3.0", "sparse"]
    for other in found.values():
        np.testing.assert_allclose(other, first, atol=1e-3)
    np.testing.assert_allclose(np.abs(first), np.abs(left[:, :2] * lengths[:2]), atol=2e-3)
    given.obsm["X_pca"] = np.ones((200, 2))
    path = write(given, tmp_path / "own.cxg", compute_embedding="pca")
    assert detect(path).embeddings == ("pca",)
    np.testing.assert_array_equal(read_element(path, "obsm/X_pca"), np.ones((200, 2)))


def test_another_way_to_embed_is_handed_over(tmp_path: Path) -> None:
    """An embedder is given as many components as it asks for, and what it makes of them is the embedding."""
    seen = []

    def halves(components: Any) -> Any:
        seen.append(components.shape)
        return components[:, :2] / 2

    given = small()
    del given.obsm["X_umap"]
    path = write(given, tmp_path / "a.cxg", compute_embedding=Embedder("half", 5, halves))
    assert seen == [(30, 5)]
    assert detect(path).embeddings == ("half",)
    assert embedder("pca").layout is None
    with pytest.raises(SourceError, match="verbs"):
        open_sink(tmp_path / "b.cxg", compute_embedding="umap")


def test_a_umap_is_made_of_thirty_components(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedder of the verbs fits a UMAP to principal components, with no more neighbours than there are cells."""
    from raggedatlas.wings.results.verbs import reduction

    def fit(sample: Any, settings: Any) -> Any:
        assert sample.shape == (10, 30)
        assert settings.n_neighbors == 9
        return reduction.UmapModel(settings, sample, sample[:, :2])

    monkeypatch.setattr(reduction, "fit_umap", fit)
    given = small(10)
    del given.obsm["X_umap"]
    path = write(given, tmp_path / "a.cxg", compute_embedding=embedder("umap"))
    assert read_element(path, "obsm/X_umap").shape == (10, 2)
    with pytest.raises(QueryError, match="'pca' or 'umap'"):
        embedder("tsne")  # type: ignore[arg-type]


def test_components_of_little_are_filled_up() -> None:
    """A matrix of one feature or one cell has fewer components than asked; the rest is zero."""
    for shape in ((1, 5), (5, 1), (2, 2)):
        values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        found = principal_components(lambda values=values: iter([DenseBlock({"values": values})]), shape, 2)
        assert found.shape == (shape[0], 2)
        assert np.isfinite(found).all()


def changed(**values: Any) -> ad.AnnData:
    """Make a small AnnData with another X or embedding, or without one."""
    made = small()
    if "X" in values:
        made = ad.AnnData(values["X"], obs=made.obs, obsm=dict(made.obsm))
    if "umap" in values:
        made.obsm["X_umap"] = values["umap"]
    return made


INFINITE = np.where(np.arange(60).reshape(30, 2) == 7, np.inf, 0.0)
BAD: dict[str, tuple[Any, type[Exception], str, dict[str, Any]]] = {
    "infinite coordinates": (lambda: changed(umap=INFINITE), ValuesError, r"^C24: obsm/X_umap .*cell 3", {}),
    "no coordinates": (lambda: changed(umap=np.full((30, 2), np.nan)), ValuesError, r"^C24: .*NaN", {}),
    "wide integers": (lambda: small(wide=np.arange(30) + 2**31), SourceError, r"^C28: obs column 'wide' .*wide_integers", {}),
    "wide integers with holes": (
        lambda: small(wide=pd.array([2**25, None] * 15, dtype="Int64")), SourceError, r"^C28: obs column 'wide'", {}
    ),
    "huge reals": (lambda: small(x=np.full(30, 1e39)), SourceError, r"^C28: obs column 'x' .*row 0", {}),
    "a count beyond float32": (
        lambda: changed(X=np.full((30, 2), 2**24 + 1)), ValuesError, r"^C03: .*16777217 of cell 0", {}
    ),
    "no X": (lambda: ad.AnnData(obs=small().obs, obsm=dict(small().obsm)), SourceError, r"^C17: X is missing", {}),
    "no such layer": (small, SourceError, r"^C17: layers/no is missing", {"x": "layers/no"}),
    "no embedding": (
        lambda: ad.AnnData(np.ones((3, 2))), SourceError, r"^C22: .*compute_embedding='pca'", {}
    ),
    "none of the embeddings": (small, SourceError, r"^C22: .*X_umap", {"embeddings": ["X_tsne"]}),
    "no features": (lambda: changed(X=np.ones((30, 0))), SourceError, r"^C(17|71): ", {}),
    "no Unicode": (
        lambda: small(text=pd.Series(["\ud800"] * 30, dtype=object)), SourceError, r"^C28: obs column 'text' .*not Unicode", {}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_written_is_refused_by_rule(tmp_path: Path, case: str) -> None:
    """Each is refused by rule with the fix, and nothing is left."""
    make, error, match, options = BAD[case]
    with pytest.raises(error, match=match):
        write(make(), tmp_path / "a.cxg", **options)
    assert list(tmp_path.iterdir()) == []


def test_choices_are_checked_before_anything(tmp_path: Path) -> None:
    """Unknown options and values are told at once; a folder that is not there and a place that refuses, by C01."""
    for options, match in (
        ({"colour": 1}, "colour"), ({"profile": "0.1"}, "0.3.0, 0.2.0"), ({"layout": "csr"}, "auto"), ({"wide_integers": "x"}, "text"),
    ):  # fmt: skip
        with pytest.raises(SourceError, match=match):
            open_sink(tmp_path / "a.cxg", **options)
    with pytest.raises(StoreError, match=r"C01.*no folder"):
        open_sink(tmp_path / "none" / "a.cxg")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="C01"):
        open_sink(tmp_path / "file" / "a.cxg")
    if Path("/proc/self").is_dir():
        with pytest.raises(StoreError, match=r"C01.*cannot be written.*permissions"):
            open_sink("/proc/self/a.cxg")


def test_what_is_there_is_kept_unless_told(tmp_path: Path) -> None:
    """An existing CXG is refused, also when it appears meanwhile; with overwrite it is replaced at the end, whole."""
    path = write(small(), tmp_path / "a.cxg")
    with pytest.raises(DuplicateError):
        open_sink(path)
    sink = open_sink(tmp_path / "b.cxg")
    write(small(), tmp_path / "b.cxg")
    with pytest.raises(DuplicateError):
        copy(small(), sink)
    write(small(40), path, overwrite=True)
    assert open_source(path).describe().n_cells == 40
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.cxg", "b.cxg"]


def test_what_was_there_survives_a_failed_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the last move of a replacement fails, what was there is there again."""
    path = write(small(), tmp_path / "a.cxg")
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == "cxg":
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(StoreError):
        write(small(40), path, overwrite=True)
    assert open_source(path).describe().n_cells == 30
    assert [p.name for p in tmp_path.iterdir()] == ["a.cxg"]


def test_a_sink_holds_its_caller_to_order(tmp_path: Path) -> None:
    """Rows that are missing, elements that come late, matrices of text and sparse embeddings are refused."""
    umap = SinkMatrix.of("obsm/X_umap", "dense", "f4", (3, 2))
    x = SinkMatrix.of("X", "dense", "f4", (3, 2))
    frame = pd.DataFrame(index=["a", "b", "c"])
    block = DenseBlock({"values": np.ones((3, 2), np.float32)})

    def begun(*more: SinkMatrix) -> Any:
        sink = open_sink(tmp_path / "a.cxg")
        sink.begin((x, umap, *more))
        sink.element("obs", frame)
        sink.element("var", frame[:2])
        return sink

    sink = begun()
    sink.write("X", block)
    with pytest.raises(SchemaError, match="obsm/X_umap has 0 of 3 rows"):
        sink.commit()
    sink.abort()
    sink = begun()
    sink.write("X", block)
    with pytest.raises(SchemaError, match="uns/x follows"):
        sink.element("uns/x", 1)
    with pytest.raises(SchemaError, match="sparse block"):
        sink.write("obsm/X_umap", CsrBlock(np.zeros(4, np.int64), np.empty(0), {"values": np.empty(0)}, 2))
    sink.abort()
    sink = open_sink(tmp_path / "a.cxg")
    with pytest.raises(SchemaError, match="type <U1"):
        sink.begin((SinkMatrix.of("X", "dense", "<U1", (1, 1)),))
    sink.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("at", ["publish", pytest.param("CxgSink._compute", marks=pytest.mark.nightly)])
def test_a_kill_leaves_nothing_under_the_name(tmp_path: Path, at: str) -> None:
    """A process killed before the end leaves nothing that could be taken for a CXG, and the next try succeeds."""
    small().write_h5ad(tmp_path / "in.h5ad")
    script = (
        "import time, sys\n"
        "from raggedatlas.wings.cxg import sink\n"
        f"def halt(*_, **__):\n    print('here', flush=True)\n    time.sleep(60)\n"
        f"sink.{at} = halt\n"
        "from raggedatlas.formats.copying import copy\n"
        "copy('in.h5ad', 'out.cxg')\n"
    )
    with started([sys.executable, "-c", script], cwd=tmp_path, stderr=None) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
    assert not (tmp_path / "out.cxg").exists()
    left = [path.name for path in tmp_path.iterdir() if path.name != "in.h5ad"]
    assert [name.startswith(".out.cxg.") and name.endswith(".partial") for name in left] == [True]
    assert detect(write(tmp_path / "in.h5ad", tmp_path / "out.cxg")).layout == "split"


def test_relative_names_follow_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path means the folder that the process is in, also when it was in another one before."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        write(small(), Path("a.cxg"))
        assert read_element("a.cxg", "X").shape == (30, 12)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")) == ["one/a.cxg", "two/a.cxg"]
    # Spaces, accents, percent and number signs in a path are taken as they are.
    assert read_element(write(small(), tmp_path / "a b#c%20é.cxg"), "X").shape == (30, 12)

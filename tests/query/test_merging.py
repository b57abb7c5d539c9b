"""Laws of columns that are one feature: added up exactly on every road, refused or kept apart where asked, by the asked mapping."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from tests.command import ask

import raggedatlas as ra
from raggedatlas.catalog.features import read_registry
from raggedatlas.errors import ArgumentError, FeatureError, NotFoundError, QueryError
from raggedatlas.loader.loader import Loader
from raggedatlas.query.modalities import sum_dtype
from support.hypothesis_profile import examples

GENES = {"one": ["D", "T", "A", "B", "C"], "two": ["C", "A", "D", "U"], "three": ["D", "T"]}
SAME = {"A": "T", "B": "T", "C": "U"}
PROTEINS = ["p", "q", "r"]
ALL = ["D", "T", "U"]


def make_file(name: str, seed: int) -> ad.AnnData:
    """Make one dataset whose counts need a wider type once two are added."""
    rng = np.random.default_rng(seed)
    genes = GENES[name]
    counts = rng.choice([0, 0, 1, 3, 255], (11, len(genes))).astype(np.float32)
    counts[0], counts[1] = 255, 0
    file = ad.AnnData(sp.csr_matrix(counts), obs=pd.DataFrame(index=[f"{name}{i}" for i in range(11)]))
    file.var_names = genes
    file.obs["group"] = rng.choice(["x", "y"], 11)
    file.layers["half"] = file.X / 2
    file.layers["scaled"] = sp.csr_matrix(rng.normal(size=counts.shape).round(1).astype(np.float32))
    file.obsm["X_umap"] = rng.normal(size=(11, 2)).astype(np.float32)
    file.obsm["proteins"] = pd.DataFrame(rng.integers(0, 255, (11, 3)), index=file.obs_names, columns=PROTEINS)
    return file


@pytest.fixture(scope="module")
def files() -> dict[str, ad.AnnData]:
    """Three datasets that measured some genes under several names."""
    return {name: make_file(name, seed) for seed, name in enumerate(GENES)}


@pytest.fixture(scope="module")
def atlas(files: dict[str, ad.AnnData], tmp_path_factory: pytest.TempPathFactory) -> ra.RaggedAtlas:
    """An atlas of them with a snapshot before the links, `plain`, and one after, `linked`; one dataset has a column-sorted copy."""
    made = ra.RaggedAtlas.create(str(tmp_path_factory.mktemp("merging") / "a"))
    for name, file in files.items():
        made.add(file.copy(), name, organism="human", spaces={"obsm/proteins": "protein_abundance"}, progress=False)
    made.add_csc("one")
    made.snapshot("plain")
    for source, target in SAME.items():
        made.identity.link(source, target)
    made.identity.link("q", "p", space="protein_abundance")
    made.snapshot("linked")
    return made


def values(files: dict[str, ad.AnnData], layer: str, names: dict[str, str]) -> pd.DataFrame:
    """One layer of all files as pandas adds it up, cells by features, NaN where a dataset has no such feature."""
    parts = []
    for file in files.values():
        matrix = file.X if layer == "counts" else file.layers[layer]
        frame = pd.DataFrame(matrix.toarray().astype(np.float64), index=file.obs_names, columns=file.var_names)
        parts.append(frame.T.groupby(lambda gene: names.get(gene, gene)).sum().T)
    return pd.concat(parts)


def by_cell(made: ad.AnnData, layer: str | None = None) -> pd.DataFrame:
    matrix = made.X if layer is None else made.layers[layer]
    dense = matrix.toarray() if sp.issparse(matrix) else np.asarray(matrix)
    return pd.DataFrame(dense, index=made.obs["cell_name"].to_numpy(), columns=made.var_names)


def from_batches(query: Any, **_: Any) -> pd.DataFrame:
    names = query.to_anndata()
    parts = [batch.spaces["gene_expression"].block for batch in query.batches(4)]
    rows = [sp.csr_matrix((b.layers["counts"], b.indices, b.indptr), (b.n_rows, b.n_cols)).toarray() for b in parts]
    return pd.DataFrame(np.vstack(rows), index=names.obs["cell_name"].to_numpy(), columns=names.var_names)


def from_loader(query: Any, **_: Any) -> pd.DataFrame:
    names = query.to_anndata()
    uids, rows = [], []
    for batch in Loader(query, 5, shuffle="full", seed=3):
        uids += batch.uids.tolist()
        rows.append(batch.X.toarray())
    found = pd.DataFrame(np.vstack(rows), index=uids, columns=names.var_names).loc[names.obs_names]
    return found.set_axis(names.obs["cell_name"].to_numpy())


def from_file(query: Any, folder: Path, ending: str) -> pd.DataFrame:
    path = query.write(str(folder / f"q{ending}"), overwrite=True)
    made = ra.read(path)
    return by_cell(made["gene_expression"] if ending == ".h5mu" else made)


ROADS: dict[str, Callable[..., pd.DataFrame]] = {
    "to_anndata": lambda query, **_: by_cell(query.to_anndata()),
    "to_mudata": lambda query, **_: by_cell(query.to_mudata()["gene_expression"]),
    "batches": from_batches,
    "loader": from_loader,
    **{
        end: lambda query, folder, end=end: from_file(query, folder, end) for end in (".h5ad", ".zarr", ".cxg", ".h5mu")
    },
}


@pytest.mark.parametrize("features", [None, ["T"]])
@pytest.mark.parametrize(
    ("road", "missing"), [*((road, "zero") for road in ROADS), ("to_anndata", "nan"), ("batches", "nan")]
)
def test_sums_equal_pandas_on_every_road(
    atlas: ra.RaggedAtlas,
    files: dict[str, ad.AnnData],
    tmp_path: Path,
    road: str,
    features: list[str] | None,
    missing: Any,
) -> None:
    """Whole numbers of columns that are one feature are added exactly, rows and column-sorted copies alike."""
    query = atlas.checkout("linked").query().layers("counts").missing(missing)
    query = query if features is None else query.features(features)
    expected = values(files, "counts", SAME)[features or ALL]
    found = ROADS[road](query, folder=tmp_path)
    pd.testing.assert_frame_equal(
        found[expected.columns], expected.fillna(0) if missing == "zero" else expected,
        check_dtype=False, check_names=False, check_index_type=False, check_column_type=False,
    )  # fmt: skip


@pytest.mark.nightly
@given(
    names=st.dictionaries(
        st.sampled_from(["A", "B", "C", "D", "T", "U"]), st.sampled_from(["A", "D", "U"]), max_size=5
    ),
    features=st.none() | st.lists(st.sampled_from(["A", "D", "U"]), unique=True, min_size=1),
    missing=st.sampled_from(["zero", "nan"]),
    join=st.sampled_from(["union", "intersection"]),
)
@examples(40)
def test_any_mapping_adds_up_as_pandas_does(
    atlas: ra.RaggedAtlas, files: dict[str, ad.AnnData], names: dict[str, str], features: Any, missing: Any, join: str
) -> None:
    """Whatever counts as the same, sums over a dataset's columns equal those of pandas, and so does what was measured."""
    view = atlas.checkout("plain")
    catalog = view._catalog
    registry = read_registry(catalog, "gene_expression")
    uid = dict(zip(registry.table["feature_id"].to_pylist(), registry.uids.tolist(), strict=True))
    ends = {gene: into for gene, into in names.items() if into not in names and into != gene}
    pairs = pa.table({"feature_uid": [uid[g] for g in ends], "target_uid": [uid[g] for g in ends.values()]})
    pairs = pairs.cast(pa.schema([("feature_uid", pa.string()), ("target_uid", pa.string())]))
    catalog._memo["registry:gene_expression"] = replace(registry, identity=pairs)
    catalog._memo.pop("axis", None)
    query = view.query().layers("counts").missing(missing).join(join)
    # A feature that counts as another is asked for by any of its names, but each once.
    features = features and list({ends.get(gene, gene): gene for gene in features}.values())
    found = by_cell((query.features(features) if features else query).to_anndata())
    expected = values(files, "counts", ends)
    if join == "intersection":
        expected = expected.loc[:, expected.notna().all()]
    if features:
        expected = expected.reindex(
            columns=[g for g in (ends.get(f, f) for f in features) if join == "union" or g in expected]
        )
        expected = expected if join == "union" else expected.dropna(axis=1)
    pd.testing.assert_frame_equal(
        found[expected.columns], expected.fillna(0) if missing == "zero" else expected,
        check_dtype=False, check_names=False, check_index_type=False, check_column_type=False,
    )  # fmt: skip
    assert set(found.columns) == set(expected.columns)


def test_groups_are_added_up(atlas: ra.RaggedAtlas, files: dict[str, ad.AnnData]) -> None:
    """Sums of groups count every column of a feature; its cells were measured once."""
    made = atlas.checkout("linked").query().aggregate("group", layer="counts")
    groups = pd.concat([file.obs["group"] for file in files.values()])
    expected = values(files, "counts", SAME).fillna(0).groupby(groups).sum()
    found = pd.DataFrame(made.layers["sum"], index=made.obs["group"], columns=made.var_names)
    np.testing.assert_array_equal(found[expected.columns].loc[expected.index], expected)
    assert (made.layers["n_measured"].max(axis=0) <= made.obs["n_cells"].max()).all()


def test_dense_columns_are_added_up(atlas: ra.RaggedAtlas, files: dict[str, ad.AnnData]) -> None:
    """Columns of a dense space are added up as those of a sparse one."""
    made = atlas.checkout("linked").query().spaces("protein_abundance").to_anndata()
    every = pd.concat([file.obsm["proteins"] for file in files.values()])
    np.testing.assert_array_equal(made[:, ["p", "r"]].X, np.c_[every["p"] + every["q"], every["r"]])
    assert made.X.dtype == np.uint16


def test_the_type_holds_every_sum(atlas: ra.RaggedAtlas) -> None:
    """A layer is widened as its sums need; one that cannot be wide enough is refused; untouched datasets stay narrow."""
    view = atlas.checkout("linked")
    assert view.query().layers("counts").to_anndata().X.dtype == np.uint16
    assert view.query().where(dataset="three").layers("counts").to_anndata().X.dtype == np.uint8
    assert sum_dtype(np.dtype("int64"), 2) is None
    assert sum_dtype(np.dtype("int32"), 3) == np.int64
    assert sum_dtype(np.dtype("int8"), 256) == np.int16
    assert sum_dtype(np.dtype("int8"), 257) == np.int32
    assert sum_dtype(np.dtype("float32"), 3) == np.float32


def test_layers_that_are_no_counts_are_refused_unless_asked_for(
    atlas: ra.RaggedAtlas, files: dict[str, ad.AnnData], tmp_path: Path
) -> None:
    """Floats are added up with on_merge='sum' alone; the refusal names dataset, columns and ways out, and writes nothing."""
    view = atlas.checkout("linked")
    query = view.query().layers("half")
    with pytest.raises(
        QueryError,
        match=r"'one' has several columns for one feature of 'gene_expression' \(1 such feature, e.g. T: .*B.*'half'.*on_merge='sum'",
    ):
        query.features("T").write(str(tmp_path / "x.h5ad"))
    assert not list(tmp_path.iterdir())
    assert query.features("D").to_anndata().n_vars == 1
    assert query.where(dataset="three").to_anndata().n_vars == 2
    for layer in ("half", "scaled"):
        found = by_cell(view.query(on_merge="sum").layers(layer).to_anndata())
        expected = values(files, layer, SAME).fillna(0)
        np.testing.assert_allclose(found[expected.columns], expected, rtol=1e-6)
    with pytest.raises(QueryError, match=r"on_merge='refuse' does not add them up"):
        view.query(on_merge="refuse").to_anndata()
    assert view.query(on_merge="refuse").where(dataset="three").to_anndata().n_vars == 2
    with pytest.raises(ArgumentError, match="on_merge"):
        view.query(on_merge="max")  # type: ignore[arg-type]


def test_columns_are_kept_apart_where_asked(atlas: ra.RaggedAtlas, files: dict[str, ad.AnnData]) -> None:
    """Of several columns of one feature the target's own, or else the first, takes its place; the others stay what they are."""
    query = atlas.checkout("linked").query(on_merge="apart").layers("counts")
    made = query.to_anndata()
    assert made.varm["measured"].sum().sum() == sum(map(len, GENES.values()))
    apart = {"one": {"C": "U"}, "two": {"A": "T"}, "three": {}}
    for name, names in apart.items():
        found = by_cell(made[made.obs["dataset"] == name])
        expected = values({name: files[name]}, "counts", names)
        np.testing.assert_array_equal(found[expected.columns], expected)
    ids = dict(zip(made.var["uid"], made.var_names, strict=True))
    assert {ids[uid] for uid in made.uns["atlas"]["merged"]["gene_expression"]} == {"A", "B", "C"}
    assert "kept apart: 3 columns" in query.explain()


def test_results_say_which_mapping_applied(atlas: ra.RaggedAtlas) -> None:
    """`uns["atlas"]` and `explain` name the mapping, what was done with repeats, and the features that are sums."""
    view = atlas.checkout("linked")
    made = view.query().layers("counts").to_anndata()
    facts = made.uns["atlas"]
    assert (facts["identity"], facts["on_merge"]) == ("default", "counts")
    ids = dict(zip(made.var["uid"], made.var_names, strict=True))
    assert [ids[uid] for uid in facts["merged"]["gene_expression"]] == ["T", "U"]
    assert "added up: 5 columns of 2 feature lists in 2 features (T, U)" in view.query().layers("counts").explain()
    plain = view.query(identity="as-given").to_anndata().uns["atlas"]
    assert plain["identity"] == "as-given"
    assert len(plain["merged"]["gene_expression"]) == 0
    assert "identity as-given" in plain["summary"]


def test_a_query_takes_the_mapping_of_any_snapshot(atlas: ra.RaggedAtlas) -> None:
    """`identity` applies no mapping, or that of an earlier or later snapshot, whichever snapshot is queried."""
    plain, linked = atlas.checkout("plain"), atlas.checkout("linked")

    def genes(query: Any) -> set[str]:
        return set(query.layers("counts").to_anndata().var_names)

    every = {gene for names in GENES.values() for gene in names}
    assert genes(plain.query()) == genes(linked.query(identity="as-given")) == every
    assert genes(linked.query(identity="plain")) == genes(linked.query(identity=1)) == every
    assert (
        genes(plain.query(identity="linked")) == genes(linked.query()) == genes(plain.query(identity="2")) == set(ALL)
    )
    assert linked.query(identity="plain").features("A", "T").to_anndata().n_vars == 2
    with pytest.raises(NotFoundError, match="linked"):
        linked.query(identity="nope")


def test_the_command_takes_the_mapping(atlas: ra.RaggedAtlas) -> None:
    """`--identity` and `--on-merge` do what the arguments of the query do."""
    place = atlas.checkout("linked")._catalog.location.uri
    asked = ["query", place, "--explain", "--at", "linked", "--layers", "counts"]
    for words, columns in (([], 3), (["--identity", "plain"], 6), (["--on-merge", "apart"], 6)):
        result = ask(*asked, *words)
        assert f" {columns} columns (union)" in result.stdout, result.output


def test_a_query_applies_a_given_mapping(atlas: ra.RaggedAtlas, files: dict[str, ad.AnnData]) -> None:
    """The links of a mapping of names and no others are applied, recorded, and equal those that a snapshot has by hand."""
    view = atlas.checkout("plain")
    asked = view.query(identity=SAME)
    found = asked.to_anndata()
    linked = atlas.checkout("linked").query().to_anndata()
    assert by_cell(found).equals(by_cell(linked)[found.var_names])
    uid = dict(zip(view.features()["feature_id"], view.features().index, strict=True))
    assert found.uns["atlas"]["identity"] == ", ".join(sorted(f"{uid[a]} = {uid[b]}" for a, b in SAME.items()))
    assert asked.spec.describe_identity() in repr(asked)
    one = atlas.checkout("linked").query(identity={"A": "T"}).to_anndata()
    assert by_cell(one)["T"].equals(
        values(files, "counts", {"A": "T"})["T"].fillna(0).astype(by_cell(one)["T"].dtype).loc[by_cell(one).index]
    )
    assert one.n_vars == len({gene for genes in GENES.values() for gene in genes}) - 1
    assert view.query(identity={}).to_anndata().uns["atlas"]["identity"] == "as-given"
    proteins = atlas.checkout("linked").query(identity={"A": "T"}).spaces("protein_abundance").to_anndata()
    assert proteins.n_vars == len(PROTEINS) - 1


@pytest.mark.parametrize(
    ("given", "message"),
    [({"nope": "T"}, "unknown: .'nope'"), ({"A": "nope"}, "unknown: .'nope'"), ({"A": "B", "B": "T"}, "counts as another itself"), ({"A": "A"}, "counts as another itself")],
)  # fmt: skip
def test_a_wrong_mapping_is_refused(atlas: ra.RaggedAtlas, given: dict[str, str], message: str) -> None:
    """Unknown names, chains and links to itself are refused when the query is made."""
    with pytest.raises(FeatureError, match=message):
        atlas.checkout("plain").query(identity=given)

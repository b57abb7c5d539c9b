"""Laws of feature identity: ids, symbols, versions and duplicates are told apart and reported."""

from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.catalog.features import read_registry
from raggedatlas.catalog.identity import read_identity
from raggedatlas.errors import QueryError, SchemaError
from raggedatlas.ingest.columns import identify
from raggedatlas.model.ids import feature_uids
from raggedatlas.model.schemas import FeatureBaseSchema
from support.hypothesis_profile import examples


class Gene(FeatureBaseSchema):
    """A registry with a column of its own, filled from var."""

    biotype: str | None = None


class TypedGene(FeatureBaseSchema):
    """A registry with a column that many files call so."""

    feature_type: str | None = None


class StrictGene(FeatureBaseSchema):
    """A registry with a column that every feature must have."""

    biotype: str


def with_var(var: pd.DataFrame, seed: int = 0) -> ad.AnnData:
    x = np.random.default_rng(seed).poisson(1, (4, len(var))).astype(np.float32)
    return ad.AnnData(x, obs=pd.DataFrame(index=[f"c{i}" for i in range(4)]), var=var)


ENSEMBL = [f"ENSG{i:011d}" for i in range(3)]


def names_of(var: pa.Table) -> list[tuple[str, str]]:
    rows = identify(var, "gene_expression", "auto", "auto").rows
    return list(zip(rows["feature_id"].to_pylist(), rows["symbol"].to_pylist(), strict=True))


@pytest.mark.parametrize(
    "var",
    [
        {"_index": ["A", "B", "C"], "gene_ids": ENSEMBL},
        {"_index": ENSEMBL, "feature_name": ["A", "B", "C"]},
        {"_index": ["A", "B", "C"], "n": [1, 2, 3], "strange": [f"{e}.4" for e in ENSEMBL]},
        {"_index": ["x", "y", "z"], "ensembl_id": ENSEMBL, "gene_symbols": ["A", "B", "C"]},
    ],
)
def test_ids_and_symbols_are_found(var) -> None:  # noqa: ANN001
    """Ensembl ids in the index or a column are the ids; the usual symbol columns or the index are the symbols."""
    assert names_of(pa.table(var)) == list(zip(ENSEMBL, "ABC", strict=True))


@given(
    names=st.lists(
        st.sampled_from(["A", "B", "A-1", "A-2", "B.1", "ENSG00000000001.1", "ENSG00000000001.2"]),
        min_size=1,
        max_size=12,
    )
)
def test_features_of_one_file_are_all_different(names) -> None:  # noqa: ANN001
    """Whatever repeats, every column has a uid of its own and the id that the file says."""
    found = identify(pa.table({"_index": names}), "gene_expression", "index", "human")
    assert len(set(found.uids)) == len(names)
    assert found.rows["feature_id"].to_pylist() == [
        name.split(".")[0] if name.startswith("ENSG") else name for name in names
    ]
    again = identify(pa.table({"_index": names}), "gene_expression", "index", "human")
    assert again.uids == found.uids


@pytest.mark.filterwarnings("ignore:Variable names are not unique")
def test_repeated_names_are_one_feature(atlas) -> None:  # noqa: ANN001
    """Two columns of one name are one feature, no name is invented; the report says so, and the file's var comes back as it was."""
    given = with_var(pd.DataFrame(index=["A", "B", "A", "A-1"]))
    report = atlas.add(given, "d", progress=False)
    assert any("1 feature in 2 columns" in note and "A (A, A)" in note for note in report.notes)
    assert sorted(atlas.features()["feature_id"]) == ["A", "A", "A-1", "B"]
    assert atlas.dataset("d").to_anndata().var_names.tolist() == ["A", "B", "A", "A-1"]
    assert len(atlas.find_datasets_with_features(["A", "B"])) == 1  # before any snapshot
    view = atlas.checkout(atlas.snapshot())
    made = view.query().to_anndata()
    counts = pd.DataFrame(given.X, columns=given.var_names).T.groupby(level=0).sum().T
    assert sorted(made.var["feature_id"]) == ["A", "A-1", "B"]
    assert (made.X.toarray() == counts[made.var["feature_id"]].to_numpy()).all()
    assert view.query(on_merge="apart").to_anndata().n_vars == view.query(identity="as-given").to_anndata().n_vars == 4
    with pytest.raises(QueryError, match="several columns for one feature"):
        view.query(on_merge="refuse").to_anndata()
    [uid] = view.query().features("A").to_anndata().var["uid"]
    assert uid == feature_uids("gene_expression", ["A"])[0]


@pytest.mark.parametrize(
    "names", [[f"{ENSEMBL[0]}.3", f"{ENSEMBL[0]}.17", "B"], [f"{ENSEMBL[0]}.17", "B", f"{ENSEMBL[0]}.3"]]
)
@pytest.mark.parametrize("in_column", [True, False])
def test_two_versions_of_one_id_are_one_gene(atlas, names: list[str], in_column: bool) -> None:  # noqa: ANN001
    """Both columns are the gene of the id, in whatever order and place, and join that of other files."""
    var = pd.DataFrame({"gene_ids": names}, index=["x", "y", "z"]) if in_column else pd.DataFrame(index=names)
    given = with_var(var, 1)
    report = atlas.add(given, "d", progress=False)
    assert any("1 feature in 2 columns" in note and f"{ENSEMBL[0]}.3" in note for note in report.notes)
    assert any("2 version suffixes" in note for note in report.notes)
    atlas.add(with_var(pd.DataFrame(index=[ENSEMBL[0], "C"])), "e", progress=False)
    assert set(atlas.features()["feature_id"]) == {ENSEMBL[0], "B", "C"}
    view = atlas.checkout(atlas.snapshot())
    made = view.query().features(ENSEMBL[0]).to_anndata()
    assert made.varm["measured"].to_numpy().sum() == 2
    own = made.X.toarray()[(made.obs["dataset"] == "d").to_numpy(), 0]
    both = [name.startswith("ENSG") for name in names]
    assert (np.sort(own) == np.sort(given.X[:, both].sum(axis=1))).all()
    assert view.query().features(f"{ENSEMBL[0]}.17").to_anndata().var["uid"].tolist() == made.var["uid"].tolist()
    assert atlas.dataset("d").to_anndata().var_names.tolist() == var.index.tolist()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Variable names are not unique")
def test_a_repeated_name_joins_as_the_name_does(atlas) -> None:  # noqa: ANN001
    """Repeated symbols join the id of their gene, and a repeated name of an unknown organism that of a known one."""
    atlas.add(with_var(pd.DataFrame(index=["A", "A", "GFP", "GFP"])), "names", progress=False)
    atlas.add(with_var(pd.DataFrame({"gene_ids": ENSEMBL}, index=list("ABC")), 1), "ids", progress=False)
    atlas.add(with_var(pd.DataFrame(index=["GFP", "GFP"]), 2), "human", organism="human", progress=False)
    view = atlas.checkout(atlas.snapshot())
    assert view.query().to_anndata().var["feature_id"].tolist().count("GFP") == 1
    assert view.query().to_anndata().n_vars == len(ENSEMBL) + 1
    assert atlas.identity.status()["ambiguous"].tolist() == [0, 0, 0]


def test_versions_name_the_same_feature(atlas) -> None:  # noqa: ANN001
    """An id with a version suffix is the feature of the id without; the version becomes an alias."""
    atlas.add(with_var(pd.DataFrame(index=ENSEMBL)), "d", progress=False)
    report = atlas.add(with_var(pd.DataFrame(index=[f"{e}.7" for e in ENSEMBL]), 1), "e", progress=False)
    assert report.spaces[0].n_new_features == 0
    assert any("version suffixes" in note for note in report.notes)
    assert len(atlas.features()) == 3
    assert len(atlas.find_datasets_with_features([f"{ENSEMBL[0]}.7"])) == 2


GENES = {
    organism: pd.read_csv(
        f"tests/data/gene_tables/genes_{name}.csv.gz", header=None, names=["id", "symbol"], usecols=[0, 1]
    )
    for organism, name in (("human", "homo_sapiens"), ("mouse", "mus_musculus"))
}


def notes_of(atlas, var: pd.DataFrame) -> str:  # noqa: ANN001
    return "\n".join(atlas.add(with_var(var, len(var)), "d", progress=False).notes)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Variable names are not unique")
def test_a_file_of_human_and_mouse_says_so(atlas) -> None:  # noqa: ANN001
    """Real genes of both, by id with their symbols: each has its own organism, the report counts them, and no symbol joins the other."""
    human, mouse = GENES["human"], GENES["mouse"]
    both = pd.concat([human, mouse])
    assert "organisms human (119), mouse (104)" in notes_of(
        atlas, both.set_index("symbol").rename(columns={"id": "gene_ids"})
    )
    made = atlas.features().reset_index().set_index("feature_id")["organism"]
    assert set(made[human["id"]]) == {"human"}
    assert set(made[mouse["id"]]) == {"mouse"}
    atlas.add(with_var(pd.DataFrame(index=human["symbol"].drop_duplicates())), "h", organism="human", progress=False)
    atlas.add(with_var(pd.DataFrame(index=mouse["symbol"].drop_duplicates()), 1), "m", organism="mouse", progress=False)
    atlas.snapshot()
    rows = read_identity(atlas._catalog, "gene_expression")
    facts = atlas.features()
    ends = [facts.loc[rows[name].to_pylist()] for name in ("feature_uid", "target_uid")]
    assert (ends[0]["organism"].to_numpy() == ends[1]["organism"].to_numpy()).all()
    truth = {organism: dict(zip(one["symbol"], one["id"], strict=True)) for organism, one in GENES.items()}
    joined = {
        (row["organism"], row["feature_id"]): into
        for row, into in zip(ends[0].to_dict("records"), ends[1]["feature_id"], strict=True)
    }
    once = {
        (organism, symbol): into for organism, one in truth.items() for symbol, into in one.items()
        if (GENES[organism]["symbol"] == symbol).sum() == 1 and not symbol.startswith("ENS")
    }  # fmt: skip
    assert {key: joined.get(key) for key in once} == once


@pytest.mark.parametrize(
    ("var", "note"),
    [
        (pd.DataFrame(index=["CD79A", "Cd79a", "ENSG00000105369"]), "identifiers of several kinds: 1 ensembl, 2 name"),
        (pd.DataFrame({"organism": ["human", "mouse"]}, index=["CD79A", "Cd79a"]), "organisms human (1), mouse (1)"),
        (pd.DataFrame({"genome": ["GRCh38", "mm10"]}, index=["CD79A", "Cd79a"]), "organisms human (1), mouse (1)"),
        (pd.DataFrame(index=[f"{ENSEMBL[0]}.3", ENSEMBL[1]]), "1 version suffixes of 2 Ensembl ids split off and kept as aliases"),
        (pd.DataFrame(index=[f"{ENSEMBL[0]}.3", f"{ENSEMBL[1]}.1"]), "2 version suffixes split off and kept as aliases"),
        (pd.DataFrame(index=[f"{ENSEMBL[0]}.3", f"{ENSEMBL[0]}.4"]), f"1 feature in 2 columns by the index; columns of one feature are joined by queries as on_merge says: {ENSEMBL[0]} ({ENSEMBL[0]}.3, {ENSEMBL[0]}.4)"),
        (pd.DataFrame(index=["A", "B", "A", "B", "A"]), "2 features in 5 columns"),
        (pd.DataFrame(index=["ENSQQQG00000000001", "ENSQQQG00000000002.1", *ENSEMBL]), "2 Ensembl ids of species that are not known: ENSQQQG00000000001, ENSQQQG00000000002"),
        (pd.DataFrame({"feature_types": ["Gene Expression", "Antibody Capture", "Peaks"]}, index=["CD4", "CD3", "chr1:1-9"]), "features that are not genes: 1 Antibody Capture, 1 Peaks; their names join no gene"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Variable names are not unique")
def test_the_report_says_what_a_file_holds(atlas, var: pd.DataFrame, note: str) -> None:  # noqa: ANN001
    """Mixed organisms and identifiers, versions, repeated and unknown ids, peaks and antibodies: each in the report."""
    assert f" {note}" in notes_of(atlas, var)


def test_an_ordinary_file_has_one_note(atlas) -> None:  # noqa: ANN001
    """Where there is nothing to say, the report says only where ids and symbols come from."""
    var = pd.DataFrame({"gene_ids": ENSEMBL, "feature_types": ["Gene Expression"] * 3}, index=list("ABC"))
    assert notes_of(atlas, var).count("gene_expression: ") == 1


@pytest.mark.long
@pytest.mark.parametrize("categorical", [True, False])
def test_an_antibody_among_genes_is_not_the_gene(atlas, categorical: bool) -> None:  # noqa: ANN001
    """In a matrix with genes an antibody of a gene's name joins neither its id nor its symbol, and the name asks for the gene."""
    types = ["Gene Expression", "Antibody Capture", "Antibody Capture"]
    var = pd.DataFrame(
        {"feature_types": pd.Categorical(types) if categorical else types}, index=["CD79A", "CD4", "CD4-2"]
    )
    atlas.add(with_var(var, 1), "cite", progress=False)
    atlas.add(with_var(pd.DataFrame({"gene_ids": ENSEMBL[:2]}, index=["CD4", "CD79A"])), "ids", progress=False)
    atlas.add(with_var(pd.DataFrame(index=["CD4", "X"]), 2), "names", progress=False)
    view = atlas.checkout(atlas.snapshot())
    made = view.query().features("CD4", "Antibody Capture:CD4").to_anndata()
    assert made.var["feature_id"].tolist() == [ENSEMBL[0], "CD4"]
    assert made.varm["measured"].to_numpy().sum(axis=1).tolist() == [2, 1]
    assert view.query().to_anndata().n_vars == 5
    assert atlas.dataset("cite").to_anndata().var_names.tolist() == ["CD79A", "CD4", "CD4-2"]
    assert "write 'Antibody Capture:CD4'" in read_registry(view._catalog, "gene_expression").describe(
        made.var["uid"].iloc[1]
    )
    atlas.identity.load("tests/data/gene_tables/genes_homo_sapiens.csv.gz")  # lists CD79A
    with_table = atlas.checkout(atlas.snapshot())
    assert with_table.query().to_anndata().n_vars == 5
    assert with_table.query().features("Antibody Capture:CD4").to_anndata().varm["measured"].to_numpy().sum() == 1
    assert not atlas.validate("deep")


NAMES = st.lists(
    st.sampled_from(["A", "B", "A-1", f"{ENSEMBL[0]}.1", f"{ENSEMBL[0]}.2", ENSEMBL[0], ENSEMBL[1]]),
    min_size=1,
    max_size=6,
)


@pytest.mark.nightly
@examples(5)
@given(first=NAMES, second=NAMES, seed=st.integers(0, 9))
@pytest.mark.filterwarnings("ignore:Variable names are not unique")
def test_sums_over_repeated_columns_equal_those_of_pandas(tmp_path_factory, first, second, seed) -> None:  # noqa: ANN001
    """However ids, versions and names repeat in two files, a joined result is what pandas groups and adds up."""
    atlas = RaggedAtlas.create(str(tmp_path_factory.mktemp("sums") / "a"))
    expected = []
    for i, names in enumerate((first, second)):
        given = with_var(pd.DataFrame(index=names), 10 * seed + i)
        atlas.add(given, f"d{i}", organism="human", progress=False)
        frame = pd.DataFrame(given.X, index=[f"d{i}"] * 4, columns=names)
        expected.append(frame.T.groupby(lambda name: name.split(".")[0]).sum().T)
    made = atlas.checkout(atlas.snapshot()).query().to_anndata()
    found = pd.DataFrame(
        made.X.toarray(), columns=made.var["feature_id"].to_numpy(), index=made.obs["dataset"].astype(str).to_numpy()
    )
    whole = pd.concat(expected).fillna(0)
    assert sorted(found.columns) == sorted(whole.columns)
    assert (found[whole.columns].loc[["d0", "d1"]].to_numpy() == whole.to_numpy()).all()


def test_a_registry_of_ones_own_is_filled_from_var(tmp_path) -> None:  # noqa: ANN001
    """A column of the registry class is filled from the var column of the same name, and null where a file lacks it."""
    atlas = RaggedAtlas.create(str(tmp_path / "a"), registries={"gene_expression": Gene})
    var = pd.DataFrame({"biotype": pd.Categorical(["x", "y"])}, index=["A", "B"])
    atlas.add(with_var(var), "d", progress=False)
    atlas.add(with_var(pd.DataFrame(index=["B", "C"]), 1), "e", progress=False)
    assert atlas.features().set_index("feature_id")["biotype"].fillna("-").to_dict() == {"A": "x", "B": "y", "C": "-"}


@pytest.mark.long
def test_a_column_of_ones_own_does_not_say_what_is_a_gene(tmp_path: Path) -> None:
    """A registry's own column of types, as CELLxGENE files have one, is filled from var, and genes join as ever."""
    atlas = RaggedAtlas.create(str(tmp_path / "a"), registries={"gene_expression": TypedGene})
    var = pd.DataFrame({"feature_type": ["protein_coding", "lncRNA"], "gene_ids": ENSEMBL[:2]}, index=["A", "B"])
    atlas.add(with_var(var), "ids", progress=False)
    atlas.add(with_var(var.drop(columns="gene_ids"), 1), "names", progress=False)
    assert set(atlas.features()["feature_type"]) == {"protein_coding", "lncRNA"}
    assert atlas.checkout(atlas.snapshot()).query().to_anndata().n_vars == 2


def test_a_required_registry_column_is_asked_for(tmp_path, unchanged) -> None:  # noqa: ANN001
    """A file whose var lacks a required registry column is refused and leaves the atlas as it was."""
    atlas = RaggedAtlas.create(str(tmp_path / "a"), registries={"gene_expression": StrictGene})
    with unchanged(atlas), pytest.raises(SchemaError, match="biotype"):
        atlas.add(with_var(pd.DataFrame(index=["A", "B"])), "d", progress=False)
    atlas.add(with_var(pd.DataFrame({"biotype": ["x", "y"]}, index=["A", "B"])), "d", progress=False)
    assert atlas.features()["biotype"].tolist() == ["x", "y"]

"""Laws of orthologs: one to one they join datasets of two organisms on every road; others are listed; tables are pinned."""

import itertools
import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from tests.command import done, refused

import raggedatlas as ra
from raggedatlas.catalog.features import find_orthologs
from raggedatlas.catalog.genes import put_tables
from raggedatlas.errors import FeatureError, QueryError
from raggedatlas.model.accessions import ORTHOLOGS_SCHEMA, GeneTable, GeneTableInfo

REAL = Path("tests/data/gene_tables")
BIOMART, HCOP = REAL / "biomart_human_to_mouse.csv", REAL / "hcop_human_to_mouse.csv"
MOUSE = REAL / "genes_mus_musculus.csv.gz"
SETD4, TAB1, SEPTIN2 = "ENSG00000185917", "ENSG00000100324", "ENSG00000168385"
M_SETD4, M_TAB1, M_SEPTIN2 = "ENSMUSG00000022948", "ENSMUSG00000022414", ("ENSMUSG00000026276", "ENSMUSG00000116048")


def truth() -> dict[str, str]:
    """Mouse id -> human id for the pairs that are one to one in the BioMart file, by pandas."""
    pairs = pd.read_csv(BIOMART).dropna(subset=["Mouse gene stable ID"])
    pairs = pairs[pairs["Mouse homology type"] == "ortholog_one2one"]
    once = ~pairs["Gene stable ID"].duplicated(keep=False) & ~pairs["Mouse gene stable ID"].duplicated(keep=False)
    return dict(zip(pairs["Mouse gene stable ID"][once], pairs["Gene stable ID"][once], strict=True))


def cells(ids: list[str], seed: int, **columns: list[str]) -> ad.AnnData:
    x = np.random.default_rng(seed).integers(0, 9, (5, len(ids))).astype(np.float32)
    return ad.AnnData(x, pd.DataFrame(index=[f"c{seed}-{i}" for i in range(5)]), pd.DataFrame(columns, index=ids))


@pytest.fixture(scope="module")
def files() -> dict[str, ad.AnnData]:
    """Human genes by id, mouse genes by id with partners of several kinds, and mouse genes by name."""
    both = truth()
    human = [SEPTIN2, *both.values(), "ENSG00000166535"]
    return {
        "human": cells(human, 0), "mouse": cells([*M_SEPTIN2, *[*both][10:]], 1),
        "names": cells(["Setd4", "Tab1", "Zz1"], 2), "more": cells(human[:40], 3),
    }  # fmt: skip


@pytest.fixture(scope="module")
def atlas(files: dict[str, ad.AnnData], tmp_path_factory: pytest.TempPathFactory) -> ra.RaggedAtlas:
    """An atlas of them, with a snapshot `without` the table, and one `with` it."""
    made = ra.RaggedAtlas.create(str(tmp_path_factory.mktemp("orthologs") / "a"))
    for name, file in files.items():
        made.add(file, name, organism="mouse" if name == "names" else "auto", progress=False)
    made.snapshot("without")
    made.identity.load(BIOMART, release="114")
    made.snapshot("with")
    return made


@pytest.mark.long
def test_datasets_of_two_organisms_are_joined_one_to_one(atlas: ra.RaggedAtlas, files: dict[str, ad.AnnData]) -> None:
    """The union has each pair as one column whose values are those of both files, and the intersection only these."""
    view, both = atlas.checkout("with"), truth() | {"Setd4": SETD4, "Tab1": TAB1}
    made = view.query().join(orthologs="human").to_anndata()
    expected = pd.concat(
        [pd.DataFrame(f.X, f.obs_names, [both.get(n, n) for n in f.var_names]) for f in files.values()]
    ).fillna(0)
    found = pd.DataFrame(
        np.asarray(made.X.todense()), made.obs["cell_name"].to_numpy(), made.var["feature_id"].to_numpy()
    )
    assert set(found.columns) == set(expected.columns)
    assert (found[expected.columns].loc[expected.index].to_numpy() == expected.to_numpy()).all()
    assert made.uns["atlas"]["orthologs"] == "human"
    loaded = {
        uid: row
        for batch in ra.Loader(view.query().join(orthologs="human"), 7)
        for uid, row in zip(batch.uids, batch.X.toarray(), strict=True)
    }
    assert (np.stack([loaded[uid] for uid in made.obs_names]) == made.X.toarray()).all()
    shared = (
        view.query().where({"dataset": ["human", "mouse"]}).join("intersection", orthologs="Homo sapiens").to_anndata()
    )
    assert set(shared.var["feature_id"]) == {*[*truth().values()][10:]}
    other = view.query().where({"dataset": ["human", "mouse"]}).join("intersection", orthologs="mouse").to_anndata()
    assert set(other.var["feature_id"]) == {*[*truth()][10:]}
    assert view.query().join("intersection").to_anndata().n_vars == 0


@pytest.mark.parametrize("name", [TAB1, f"{TAB1}.9", "TAB1"])
def test_mouse_datasets_are_asked_by_human_genes(tmp_path: Path, name: str) -> None:
    """Also where no dataset is of human: the mouse gene answers to symbol and id of its ortholog, and keeps its own facts."""
    atlas = ra.RaggedAtlas.create(str(tmp_path / "a"))
    atlas.add(cells([M_SETD4, M_TAB1], 4), "m", progress=False)
    atlas.identity.load(BIOMART)
    view = atlas.checkout(atlas.snapshot())
    made = view.query().features(name, orthologs="human").to_anndata()
    assert made.var["feature_id"].tolist() == [M_TAB1]
    with pytest.raises(FeatureError, match="unknown"):
        view.query().features(name).to_anndata()


def test_orthologs_that_are_not_one_to_one_are_listed_and_left_out(atlas: ra.RaggedAtlas) -> None:
    """A human gene with two orthologs warns and joins none; the list names every pair with its relation; `explain` counts them."""
    view = atlas.checkout("with")
    query = view.query().features(SEPTIN2, TAB1, orthologs="human")
    with pytest.warns(UserWarning, match=r"not one to one.*ENSG00000168385: .*ENSMUSG00000026276 \(one2many\)"):
        made = query.to_anndata()
    assert made.varm["measured"].to_numpy().sum(axis=1).tolist() == [2, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        view.query().features(TAB1, orthologs="human").to_anndata()
    listed = view.identity.orthologs("human")
    used = listed[listed["used"]]
    assert set(zip(used["feature_id"], used["ortholog"], strict=True)) == {
        *[*truth().items()][10:],
        ("Setd4", SETD4),
        ("Tab1", TAB1),
    }
    assert set(used["evidence"]) == {"Ensembl ortholog, release 114"}
    others = listed[~listed["used"]]
    assert set(zip(others["feature_id"], others["ortholog"], others["relation"], strict=True)) == {
        (one, SEPTIN2, "one2many") for one in M_SEPTIN2
    }
    assert f"{len(used)} columns are genes of human" in view.query().join(orthologs="human").explain()
    assert "2 are genes with others" in view.query().join(orthologs="human").explain()
    with pytest.raises(FeatureError, match="no ortholog one to one here; its orthologs are"):
        view.query().where({"dataset": "mouse"}).features("SEPTIN2", orthologs="human").to_anndata()


def test_orthologs_are_pinned_by_snapshots(atlas: ra.RaggedAtlas) -> None:
    """A snapshot without tables refuses, also after they were loaded, and one with them answers after they are gone."""
    with pytest.raises(QueryError, match="no table of orthologs of 'human'"):
        atlas.checkout("without").query().join(orthologs="human")
    with pytest.raises(QueryError, match="in use are of human and mouse"):
        atlas.checkout("with").query().features("TAB1", orthologs="zebrafish")
    before = atlas.checkout("with").query().join(orthologs="human").to_anndata()
    atlas.identity.remove("Ensembl orthologs human mouse")
    with pytest.raises(QueryError, match="no table of orthologs"):
        atlas.checkout(atlas.snapshot()).query().join(orthologs="human")
    after = atlas.checkout("with").query().join(orthologs="human").to_anndata()
    assert before.var.equals(after.var)
    assert (before.X != after.X).nnz == 0
    atlas.restore("with")
    assert atlas.checkout(atlas.snapshot()).query().join(orthologs="human").to_anndata().var.equals(before.var)


@pytest.mark.long
def test_what_is_kept_apart_by_hand_stays_apart(tmp_path: Path) -> None:
    """A feature that a person keeps apart counts as no ortholog, and one linked by hand as what it was linked to."""
    atlas = ra.RaggedAtlas.create(str(tmp_path / "a"))
    atlas.add(cells([SETD4, TAB1], 0), "human", progress=False)
    atlas.add(cells(["Setd4", "Tab1"], 1, gene_ids=[M_SETD4, M_TAB1]), "mouse", progress=False)
    atlas.add(cells(["Setd4"], 2), "names", organism="mouse", progress=False)
    atlas.identity.load(BIOMART)
    atlas.snapshot("rules")
    assert atlas.checkout("rules").query().join(orthologs="human").to_anndata().n_vars == 2
    atlas.identity.unlink("symbol:Setd4")
    atlas.identity.link(M_TAB1, SETD4, across_organisms=True)
    made = atlas.checkout(atlas.snapshot()).query().join(orthologs="human").to_anndata()
    names = {uid: set(made.var.index[made.varm["measured"][uid]]) for uid in made.varm["measured"]}
    assert sorted(made.var["feature_id"]) == [TAB1, SETD4, "Setd4"]
    assert sorted(map(len, names.values())) == [1, 1, 2]
    as_given = atlas.checkout("rules").query(identity="as-given").join(orthologs="human").to_anndata()
    assert sorted(as_given.var["feature_id"]) == [TAB1, SETD4, "Setd4"]
    as_before = atlas.checkout("latest").query(identity="rules").join(orthologs="human").to_anndata()
    assert as_before.n_vars == 2


def table(name: str, source: str, pairs: list[tuple[str, str]], relation: str = "one2one") -> GeneTable:
    rows = [
        {"table": name, "accession": f"ENSG{a:0>11}", "organism": "human", "symbol": a, "other": f"ENSMUSG{b:0>11}",
         "other_organism": "mouse", "other_symbol": b, "relation": relation}
        for a, b in pairs
    ]  # fmt: skip
    info = GeneTableInfo(name, "orthologs", source, "", ("human", "mouse"), len(rows), name)
    return GeneTable(info, pa.Table.from_pylist(rows, schema=ORTHOLOGS_SCHEMA))


@pytest.mark.parametrize(
    ("tables", "joined"),
    [
        ([table("e", "Ensembl", [("1", "1")])], {("1", "1")}),
        (
            [table("e", "Ensembl", [("1", "1")]), table("h", "HCOP", [("1", "2"), ("3", "1"), ("4", "4")])],
            {("1", "1"), ("4", "4")},
        ),
        ([table("e", "Ensembl", [("1", "1")]), table("f", "Ensembl", [("1", "2")])], set()),
        ([table("e", "Ensembl", [("1", "1")], "many2many"), table("f", "Ensembl", [("1", "1")])], set()),
        ([table("h", "HCOP", [("1", "1"), ("2", "1"), ("3", "3")])], {("3", "3")}),
    ],
)
def test_ensembl_decides_before_hcop_and_equal_tables_must_agree(
    tmp_path: Path, tables: list[GeneTable], joined: set[tuple[str, str]]
) -> None:
    """Whatever the order of the tables, a pair is joined only if it is the only one of both genes."""
    for i, order in enumerate(itertools.permutations(tables)):
        atlas = ra.RaggedAtlas.create(str(tmp_path / f"a{i}"))
        for one in order:
            put_tables(atlas._catalog, [one])
        for organism in ("human", "mouse"):
            found = find_orthologs(atlas._catalog, organism)
            pairs = {(p.symbol, p.other_symbol) for p in found.one.values()}
            assert pairs == (joined if organism == "human" else {(b, a) for a, b in joined})


def test_the_command_asks_by_orthologs(atlas: ra.RaggedAtlas, tmp_path: Path) -> None:
    """`query` and `export` take --orthologs, and `genes orthologs` lists the pairs."""
    where = atlas._catalog.location.uri.removeprefix("file://")
    asked = ["--at", "with", "-f", "TAB1", "--orthologs", "human"]
    assert "1 columns are genes of human" in done("query", where, *asked, "--explain")
    path = tmp_path / "x.h5ad"
    done("export", where, path, *asked)
    assert ad.read_h5ad(path).varm["measured"].to_numpy().sum() == 3
    assert "one2many" in done("genes", "orthologs", where, "human", "--at", "with")
    assert "no table of orthologs of 'human'" in refused("query", where, "--at", "without", "--orthologs", "human")

"""Laws of gene tables in an atlas: what joins by them, that they can be taken back, and that their order does not matter."""

from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raggedatlas as ra
from raggedatlas.catalog.catalog import IDENTITY
from raggedatlas.catalog.genes import Genes, put_tables
from raggedatlas.catalog.identity import (
    IDENTITY_SCHEMA,
    Identity,
    change_links,
    derive_identity,
    read_facts,
    read_identity,
    read_links,
)
from raggedatlas.errors import AtlasError, DuplicateError, FeatureError, NotFoundError, SourceError
from raggedatlas.formats.gene_tables import read_gene_tables
from raggedatlas.model.accessions import GENES_SCHEMA, GeneTable, GeneTableInfo, parse_accession
from raggedatlas.model.ids import feature_uids
from support.hypothesis_profile import examples

SPACE = "gene_expression"
REAL = Path("tests/data/gene_tables")
HGNC, GENCODE = REAL / "hgnc_complete_set_extract.txt", REAL / "genes_homo_sapiens.csv.gz"
MOUSE = REAL / "genes_mus_musculus.csv.gz"
SELENOP, SEPTIN7, CD79A = "ENSG00000250722", "ENSG00000122545", "ENSG00000105369"


def genes(*tables: GeneTable) -> Genes:
    return Genes(tuple(table.info for table in tables), pa.concat_tables([table.rows for table in tables]))


def registry(*features: tuple[str, str | None] | str, organism: str = "unknown") -> pa.Table:
    """Make a registry of ids with symbols, and of names."""
    rows = [(f, None) if isinstance(f, str) else f for f in features]
    parsed = [parse_accession(name) for name, _ in rows]
    return pa.table(
        {
            "uid": feature_uids(SPACE, parsed, organism), "feature_id": [one.name for one in parsed],
            "symbol": pa.array([symbol for _, symbol in rows], pa.string()),
            "aliases": pa.array([[]] * len(rows), pa.list_(pa.string())),
            "organism": [one.organism if one.organism != "unknown" else organism for one in parsed],
            "symbol_source": pa.nulls(len(rows), pa.string()), "other_type": pa.nulls(len(rows), pa.string()),
        }
    )  # fmt: skip


def joined(table: pa.Table, found: Identity) -> dict[str, tuple[str, str]]:
    """Return for each feature that counts as another the id of that one, and the evidence."""
    names = table["feature_id"].to_pylist()
    return {
        names[row]: (names[into], found.evidence[row]) for row, into in enumerate(found.target.tolist()) if into != row
    }


def made(name: str, source: str, rows: list[tuple[str, str, list[str], list[str]]]) -> GeneTable:
    listed = [
        {"table": name, "accession": accession, "organism": "human", "symbol": symbol, "previous": previous, "aliases": aliases, "same": []}
        for accession, symbol, previous, aliases in rows
    ]  # fmt: skip
    info = GeneTableInfo(name, "genes", source, "", ("human",), len(listed), name)
    return GeneTable(info, pa.Table.from_pylist(listed, schema=GENES_SCHEMA))


def test_no_name_of_two_hundred_joins_a_wrong_gene() -> None:
    """Names that HGNC gives one gene join its id, at the best level that any gene has them; names of several join none."""
    frame = pd.read_csv(HGNC, sep="\t", dtype=str, keep_default_na=False)
    owners: dict[str, dict[int, set[str]]] = {}
    for row in frame.to_dict("records"):
        for level, names in enumerate(([row["symbol"]], row["prev_symbol"].split("|"), row["alias_symbol"].split("|"))):
            for name in filter(None, names):
                owners.setdefault(name, {}).setdefault(level, set()).add(row["ensembl_gene_id"])
    truth = {name: next(iter(best)) if len(best := levels[min(levels)]) == 1 else "" for name, levels in owners.items()}
    assert len(truth) >= 200
    assert {"DIFF6", "H5", "SEP2"} == {name for name, gene in truth.items() if not gene}
    table = registry(*[(gene, None) for gene in frame["ensembl_gene_id"]], *truth, "GFP", "LOC100505874")
    found = derive_identity(table, SPACE, {}, genes(*read_gene_tables(HGNC), *read_gene_tables(GENCODE)))
    assert {name: into for name, (into, _) in joined(table, found).items()} == {n: g for n, g in truth.items() if g}
    assert {table["feature_id"][row].as_py() for row in found.ambiguous} == {"DIFF6", "H5", "SEP2"}


@pytest.mark.parametrize(
    ("name", "into", "evidence"),
    [
        ("SELENOP", SELENOP, "HGNC symbol, release 9"),
        ("SEPP1", SELENOP, "HGNC previous symbol, release 9"),
        ("SEPP", SELENOP, "HGNC alias, release 9"),
        ("SELP", None, ""),  # an alias of SELENOP, and the symbol of another gene, which is not in the atlas
        ("SEPT2", None, ""),  # an alias of SEPTIN6, and a previous symbol of SEPTIN2
        ("HGNC:10751", SELENOP, "accession ENSG00000250722"),
        ("Selenop", None, ""),
    ],
)
def test_a_name_means_the_gene_at_the_best_level(name: str, into: str | None, evidence: str) -> None:
    """A symbol comes before a previous symbol, that before an alias, also where the gene is not in the atlas."""
    table = registry((SELENOP, None), ("ENSG00000125354", None), name)
    found = joined(table, derive_identity(table, SPACE, {}, genes(*read_gene_tables(HGNC, release="9"))))
    assert found == ({} if into is None else {name: (into, evidence)})


def test_names_of_one_gene_join_where_no_file_has_its_id() -> None:
    """Features known by names alone join the one whose name is the current symbol."""
    table = registry("CDC10", "SEPT7", "SEPTIN7", "CDC3")
    tables = genes(*read_gene_tables(HGNC))
    found = joined(table, derive_identity(table, SPACE, {}, tables))
    assert found == {
        "CDC10": ("SEPTIN7", "HGNC previous symbol"), "SEPT7": ("SEPTIN7", "HGNC previous symbol"), "CDC3": ("SEPTIN7", "HGNC alias"),
    }  # fmt: skip
    assert joined(table, derive_identity(table, "protein_abundance", {}, tables)) == {}


def test_a_table_comes_before_a_files_symbol() -> None:
    """A file's symbol of a gene that the tables know is one more name of it; of a gene that they do not know, its symbol."""
    old, tables = "ENSG00000000001", genes(*read_gene_tables(HGNC))
    table = registry((SELENOP, "SEPTIN7"), (SEPTIN7, None), "SEPTIN7")
    assert joined(table, derive_identity(table, SPACE, {}, tables))["SEPTIN7"] == (SEPTIN7, "HGNC symbol")
    table = registry((SELENOP, "selP-long"), "selP-long", (old, "SEPTIN7"), "SEPTIN7")
    found = joined(table, derive_identity(table, SPACE, {}, tables))
    assert found == {"selP-long": (SELENOP, "alias selP-long"), "SEPTIN7": (old, "symbol SEPTIN7")}


def test_the_authority_decides_between_ids_of_one_symbol() -> None:
    """An annotation gives two registered ids one symbol; where HGNC names one of them so, the name is that one, else none."""
    two = made("GENCODE human", "GENCODE", [(SELENOP, "X", [], []), (SEPTIN7, "X", [], [])])
    table = registry((SELENOP, None), (SEPTIN7, None), "X")
    found = derive_identity(table, SPACE, {}, genes(two))
    assert (joined(table, found), [*found.ambiguous]) == ({}, [2])
    authority = made("HGNC human", "HGNC", [(SEPTIN7, "X", [], [])])
    assert joined(table, derive_identity(table, SPACE, {}, genes(two, authority))) == {"X": (SEPTIN7, "HGNC symbol")}


def test_a_name_of_two_organisms_joins_that_of_its_own() -> None:
    """A symbol that human and mouse share joins the gene of its file's organism; of an unknown one, the only gene in the atlas."""
    tables = genes(*read_gene_tables(GENCODE), *read_gene_tables(MOUSE))
    human, mouse = "ENSG00000130600", "ENSMUSG00000000031"
    assert {human, mouse} == {row["accession"] for row in tables.rows.to_pylist() if row["symbol"] == "H19"}
    both = registry((human, None), (mouse, None), "H19")
    assert joined(both, derive_identity(both, SPACE, {}, tables)) == {}
    mice = registry((human, None), (mouse, None), "H19", organism="mouse")
    assert joined(mice, derive_identity(mice, SPACE, {}, tables)) == {"H19": (mouse, "GENCODE symbol")}
    one = registry((human, None), "H19")
    assert joined(one, derive_identity(one, SPACE, {}, tables)) == {"H19": (human, "GENCODE symbol")}


NAME = st.sampled_from(["A", "B", "C", "D"])
ROW = st.tuples(
    st.sampled_from([SELENOP, SEPTIN7, CD79A, "HGNC:1"]), NAME, st.lists(NAME, max_size=2), st.lists(NAME, max_size=2)
)
ROWS = st.lists(ROW, min_size=1, max_size=4, unique_by=lambda row: row[0])


@pytest.mark.nightly
@given(
    data=st.data(), first=ROWS, second=ROWS,
    features=st.lists(st.tuples(st.sampled_from([SELENOP, SEPTIN7, CD79A, "HGNC:1", "A", "B", "C", "D"]), st.none() | NAME), min_size=1, max_size=7, unique_by=lambda one: one[0]),
)  # fmt: skip
@examples(150)
def test_order_does_not_matter(data: st.DataObject, first: list, second: list, features: list) -> None:  # type: ignore[type-arg]
    """Neither the order of features, nor that of tables, nor that of their rows changes what joins, why, or what is known."""
    tables = [made("HGNC human", "HGNC", first), made("GENCODE human", "GENCODE", second)]
    table = registry(*features)
    used = genes(*tables)
    found = derive_identity(table, SPACE, {}, used)
    shuffled = table.take(data.draw(st.permutations(range(table.num_rows))))
    rows = used.rows.take(data.draw(st.permutations(range(used.rows.num_rows))))
    other = Genes(used.infos[::-1], rows)
    again = derive_identity(shuffled, SPACE, {}, other)
    assert joined(table, found) == joined(shuffled, again)
    assert all(into == found.target[into] for into in found.target.tolist())
    names, others = table["feature_id"].to_pylist(), shuffled["feature_id"].to_pylist()
    assert {names[row]: gene for row, gene in found.genes.items()} == {others[r]: g for r, g in again.genes.items()}
    assert used.facts(found.genes.values()) == other.facts(again.genes.values())
    assert {names[row] for row in found.ambiguous} == {others[row] for row in again.ambiguous}


def cells(names: list[str], seed: int, **columns: list[str]) -> ad.AnnData:
    x = np.random.default_rng(seed).poisson(2, (3, len(names))).astype(np.float32)
    return ad.AnnData(
        x, obs=pd.DataFrame(index=[f"c{seed}-{i}" for i in range(3)]), var=pd.DataFrame(columns, index=names)
    )


@pytest.fixture(scope="module")
def atlas(tmp_path_factory: pytest.TempPathFactory) -> ra.RaggedAtlas:
    """Three files: ids with old symbols, previous symbols alone, and current ones; no gene table is loaded."""
    made = ra.RaggedAtlas.create(str(tmp_path_factory.mktemp("genes") / "a"))
    made.add(
        cells(["SEPP1", "SEPT7", "DIFF6"], 0, gene_ids=[SELENOP, SEPTIN7, "ENSG00000180096"]), "ids", progress=False
    )
    made.add(cells(["SEPP1", "CDC10"], 1), "old", progress=False)
    made.add(cells(["SELENOP", "SEPTIN7", "GFP"], 2), "new", progress=False)
    made.snapshot("before")
    return made


def columns(atlas: ra.RaggedAtlas, label: str) -> dict[str, int]:
    """Return for each column of a joined result how many datasets measured it."""
    adata = atlas.checkout(label).query().to_anndata()
    return dict(zip(adata.var["symbol"], adata.varm["measured"].sum(axis=1), strict=True))


@pytest.mark.nightly
def test_a_loaded_table_joins_from_the_next_snapshot_and_can_be_taken_away(atlas: ra.RaggedAtlas) -> None:
    """Columns join, symbols are the table's, older snapshots answer as before, and removal and `restore` give the state before."""
    features, before = atlas.features(), columns(atlas, "before")
    assert before == {"SEPP1": 2, "SEPT7": 1, "DIFF6": 1, "CDC10": 1, "SELENOP": 1, "SEPTIN7": 1, "GFP": 1}
    listed = atlas.identity.load(HGNC, release="2026-09")
    assert atlas.identity.tables().equals(listed)
    atlas.snapshot("with")
    assert columns(atlas, "with") == {"SELENOP": 3, "SEPTIN7": 3, "SEPTIN1": 1, "GFP": 1}
    assert columns(atlas, "before") == before
    found = atlas.diff("before", "with")
    assert set(found.identity_added[SPACE]) >= {f"CDC10 = {SEPTIN7}", f"SELENOP = {SELENOP}"}
    status = atlas.identity.status()
    assert status.loc["old", ["previous symbol", "alone"]].tolist() == [2, 0]
    assert status.loc["new", ["symbol", "alone"]].tolist() == [2, 1]
    explained = atlas.identity.explain("SEPP1").set_index("feature_id")
    assert explained.loc["SEPP1", "evidence"] == "HGNC previous symbol, release 2026-09"
    assert "SEPP (HGNC alias, release 2026-09)" in explained.loc[SELENOP, "names"]
    assert explained.loc[SELENOP, "biotype"] == "gene with protein product"
    facts = atlas.features().set_index("feature_id").loc[SELENOP]
    assert (facts["symbol"], facts["symbol_source"]) == ("SELENOP", "HGNC symbol, release 2026-09")
    assert not atlas.validate("deep")
    atlas.identity.remove("HGNC human")
    atlas.snapshot("without")
    assert columns(atlas, "without") == before
    assert atlas.features().equals(features)
    atlas.restore("with")
    assert atlas.identity.tables().equals(listed)
    atlas.restore("before")
    assert atlas.identity.tables().empty
    with pytest.raises(NotFoundError, match="no table 'HGNC human'"):
        atlas.identity.remove("HGNC human")


@pytest.mark.long
def test_names_that_people_type_resolve_by_a_stated_precedence(atlas: ra.RaggedAtlas) -> None:
    """Uid, id with or without version, symbol, previous symbol, alias; what is refused names candidates and near names."""
    atlas.identity.load(HGNC)
    view = atlas.checkout(atlas.snapshot())
    [uid] = view.query().features("SELENOP").to_anndata().var_names
    for name in (uid, SELENOP, f"{SELENOP}.14", "SEPP1", "SEPP", "HGNC:10751", "human:SEPP1", f"ensembl:{SELENOP}"):
        assert view.query().features(name).to_anndata().var_names.tolist() == [uid], name
    with pytest.raises(FeatureError, match=r"near 'SELENOPP': \['SELENOP'"):
        view.query().features("SELENOPP").to_anndata()
    assert len(atlas.find_datasets_with_features(["SEPP1"])) == len(atlas.find_datasets_with_features([SELENOP])) == 3
    atlas.identity.remove("HGNC human")
    atlas.identity.load(HGNC, name="under another name")
    atlas.identity.remove("under another name")


def test_ids_that_no_table_lists_are_counted(tmp_path: Path) -> None:
    """Of organisms that tables are of: an id of another release is unlisted, one of another organism or a name is not; without tables none is."""
    atlas = ra.RaggedAtlas.create(str(tmp_path / "a"))
    ids = [SELENOP, f"{SEPTIN7}.9", "ENSG00000999999.1", "ENSMUSG00000999999", "GFP", "HGNC:10751"]
    atlas.add(cells(ids, 0), "releases", progress=False)
    assert atlas.identity.status()["unlisted"].tolist() == [0]
    atlas.identity.load(HGNC)
    assert atlas.identity.status()["unlisted"].tolist() == [1]
    atlas.identity.load(MOUSE)
    assert atlas.identity.status()["unlisted"].tolist() == [2]


def test_status_is_a_table_in_notebooks(tmp_path: Path) -> None:
    """A row per dataset, whose names are text and no markup, with a bar; kinds of evidence that nothing has are left out, as in `repr`."""
    atlas = ra.RaggedAtlas.create(str(tmp_path / "a"))
    assert atlas.identity._repr_html_() == "<p>No genes are registered.</p>"
    for i, name in enumerate(("lung <b>1", "blood & bone")):
        atlas.add(cells(["CD79A", f"X{i}"], i), name, progress=False)
    html = atlas.identity._repr_html_()
    assert html.count("<tr>") == 2 + html.count("<thead>")
    assert "lung &lt;b&gt;1" in html
    assert "blood &amp; bone" in html
    assert "<th>ambiguous</th>" in html
    assert "<th>by hand</th>" not in html
    assert "by hand" not in repr(atlas.identity)
    assert html.count("width:50.0px") == 2 * 2  # one gene of two in both, one alone
    atlas.identity.link("X0", "X1")
    assert "<th>by hand</th><th>alone</th>" in atlas.identity._repr_html_()
    assert repr(atlas.identity).split() == repr(atlas.identity).replace("...", "").split()


def test_genes_and_orthologs_have_names_of_their_own(tmp_path: Path) -> None:
    """A name that a table of the other kind has is refused, so that `remove` means one table; of the same kind it is replaced."""
    atlas = ra.RaggedAtlas.create(str(tmp_path / "a"))
    atlas.identity.load(HGNC, name="mine")
    with pytest.raises(DuplicateError, match="'mine' is the name of a table of genes"):
        atlas.identity.load(REAL / "biomart_human_to_mouse.csv", name="mine")
    atlas.identity.load(GENCODE, name="mine")
    assert atlas.identity.tables()[["kind", "source"]].to_numpy().tolist() == [["genes", "GENCODE"]]
    atlas.identity.remove("mine")
    assert atlas.identity.tables().empty


def test_swapped_symbols_are_followed_and_not_refused() -> None:
    """A was B before and B was A: each name is the gene that has it now, in both tables and names."""
    swapped = made("HGNC human", "HGNC", [(SELENOP, "A", ["B"], []), (SEPTIN7, "B", ["A"], [])])
    table = registry((SELENOP, None), (SEPTIN7, None), "A", "B")
    found = derive_identity(table, SPACE, {}, genes(swapped))
    assert joined(table, found) == {"A": (SELENOP, "HGNC symbol"), "B": (SEPTIN7, "HGNC symbol")}
    alone = registry("A", "B")
    assert joined(alone, derive_identity(alone, SPACE, {}, genes(swapped))) == {}


STATE = st.tuples(
    st.sampled_from(["link", "unlink", "load", "remove", "snapshot"]), st.sampled_from(["SEPT7", "CDC10", "GFP"]),
    st.sampled_from(["SEPTIN7", "SEPT7", "SELENOP"]),
)  # fmt: skip


def state(atlas: ra.RaggedAtlas, *, dated: bool = True) -> list[tuple[object, ...]]:
    """Return the mapping of an atlas, with or without when a link was made, and what is known of its features, in no order."""
    catalog = atlas._catalog
    rows = read_identity(catalog, SPACE)
    rows = rows if rows is None or dated else rows.drop_columns(["made_at"])
    facts = read_facts(catalog, SPACE)
    known = [] if facts is None else [repr(row) for row in facts.to_pylist()]
    return sorted([*map(repr, [] if rows is None else rows.to_pylist()), *known])  # type: ignore[type-var]


def edit(atlas: ra.RaggedAtlas, what: str, feature: str, target: str) -> bool:
    """Make an edit; return whether it was refused."""
    try:
        if what == "link":
            atlas.identity.link(f"symbol:{feature}", f"symbol:{target}")
        elif what == "unlink":
            atlas.identity.unlink(f"symbol:{feature}")
        elif what == "load":
            put_tables(atlas._catalog, read_gene_tables(HGNC, release="9"))
            atlas.identity.update()
        elif what == "remove":
            atlas.identity.remove("HGNC human")
        else:
            atlas.snapshot()
    except (FeatureError, NotFoundError):
        return True
    return False


FILES = {"old": ["SEPT7", "CDC10", "GFP"], "new": ["SEPTIN7", "SELENOP"], "more": ["SEPP1", "GFP", "GFP"]}


@pytest.mark.nightly
@given(
    edits=st.lists(STATE, max_size=5),
    order=st.permutations([*FILES]),
    cuts=st.lists(st.integers(0, 5), min_size=2, max_size=2),
)
@examples(4)
@pytest.mark.filterwarnings("ignore:Variable names are not unique")
def test_edits_snapshots_and_files_in_any_order_give_one_identity(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[str, str, str]], order: list[str], cuts: list[int]
) -> None:
    """Links, tables, snapshots and files may come interleaved: what holds at the end is a function of what is there, old snapshots answer as before, and `restore` undoes."""
    folder = tmp_path_factory.mktemp("edits")
    first, second = (ra.RaggedAtlas.create(str(folder / name)) for name in "ab")
    for name, names in FILES.items():
        first.add(cells(names, 1), name, organism="human", progress=False)
    first.snapshot("before")
    start, kept = state(first), []
    for i, (what, feature, target) in enumerate(edits):
        edit(first, what, feature, target)
        first.snapshot(f"s{i}")
        kept.append((f"s{i}", first.checkout(f"s{i}").query().to_anndata().var.to_csv()))
    # The other atlas gets its files in another order, two of them late, and only what held at the end of the first.
    links = read_links(first._catalog)
    for i, name in enumerate(order):
        second.add(cells(FILES[name], 1), name, organism="human", progress=False)
        if i in cuts:
            second.snapshot()
        if i == cuts[0] % 3 and not first.identity.tables().empty:
            edit(second, "load", "", "")
    change_links(
        second._catalog, SPACE, second._catalog.tables.read("gene_expression_registry"),
        dict(zip(links["feature_uid"].to_pylist(), links["target_uid"].to_pylist(), strict=True)),
    )  # fmt: skip
    second.snapshot()
    assert state(second, dated=False) == state(first, dated=False)
    for atlas in (first, second):
        of_before = state(atlas)
        assert atlas._catalog.tables.overwrite_if(
            IDENTITY, IDENTITY_SCHEMA.empty_table(), atlas._catalog.tables.version(IDENTITY)
        )
        atlas.identity.update()  # without the stamp: from scratch
        assert state(atlas) == of_before
    for label, var in kept:
        assert first.checkout(label).query().to_anndata().var.to_csv() == var
    first.restore("before")
    assert state(first) == start


@pytest.mark.nightly
@given(edits=st.lists(STATE.filter(lambda one: one[0] in ("link", "load")), min_size=1, max_size=3))
@examples(4)
@pytest.mark.filterwarnings("ignore:Variable names are not unique")
def test_an_edit_that_is_taken_back_leaves_the_state_before(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[str, str, str]]
) -> None:
    """After each edit its opposite gives the mapping and the facts of before."""
    atlas = ra.RaggedAtlas.create(str(tmp_path_factory.mktemp("undo") / "a"))
    for name, names in FILES.items():
        atlas.add(cells(names, 1), name, organism="human", progress=False)
    atlas.snapshot()
    for what, feature, target in edits:
        before = state(atlas)
        if not edit(atlas, what, feature, target):
            if what == "load":
                atlas.identity.remove("HGNC human")
            else:
                atlas.identity.unlink(read_links(atlas._catalog)["feature_uid"].to_pylist()[-1])
        assert state(atlas) == before


def test_an_ambiguous_name_lists_candidates_with_their_datasets(tmp_path: Path) -> None:
    """Each candidate comes with organism, symbol, id, the datasets that measured it, and a spelling that means it alone."""
    atlas = ra.RaggedAtlas.create(str(tmp_path / "a"))
    atlas.add(cells(["H19", "X"], 0, gene_ids=["ENSG00000130600", SELENOP]), "human lung", progress=False)
    atlas.add(cells(["H19", "X"], 1, gene_ids=["ENSMUSG00000000031", "ENSG00000130600"]), "mouse lung", progress=False)
    view = atlas.checkout(atlas.snapshot())
    with pytest.raises(FeatureError) as caught:
        view.query().features("H19").to_anndata()
    assert "human H19 (ENSG00000130600; write 'ENSG00000130600'; measured by human lung, mouse lung)" in str(
        caught.value
    )
    assert "mouse H19 (ENSMUSG00000000031; write 'ENSMUSG00000000031'; measured by mouse lung)" in str(caught.value)


def test_a_refused_table_changes_nothing(atlas: ra.RaggedAtlas, tmp_path: Path) -> None:
    """After a refusal the atlas has the tables, and every table the version, that it had."""
    tables = atlas._catalog.tables
    versions = {name: tables.version(name) for name in tables.names()}
    orthologs = REAL / "biomart_human_to_mouse.csv"
    text, rows, pairs = HGNC.read_text(), HGNC.read_text().splitlines(keepends=True), orthologs.read_text()
    for wrong, message in (
        (text[:-1], "cut off"),
        (text.replace("prev_symbol", "old"), "lacks the columns"),
        (text + rows[-1].replace("HGNC:", "HGNC:9"), "gives the symbol"),
        (pairs[:-1], "cut off"),
        (pairs[: pairs.rindex(",")] + "\n", "fields where the first has"),
        (pairs.replace("Mouse gene stable ID", "x"), r"lacks the columns \['Mouse gene stable ID'\]"),
    ):
        (path := tmp_path / "wrong.txt").write_text(wrong)
        with pytest.raises(SourceError, match=message) as caught:
            atlas.identity.load(path)
        assert "\n" not in str(caught.value)
    for table, organism in ((HGNC, "mouse"), (orthologs, "rat")):
        with pytest.raises(SourceError, match=f"not of {organism}"):
            atlas.identity.load(table, organism=organism)
    with pytest.raises(AtlasError, match="snapshot"):
        atlas.checkout("before").identity.load(HGNC)
    assert {name: tables.version(name) for name in tables.names()} == versions

"""Ontologies: `under` in every form of filter, trees and levels, against counts made by hand with the package's own tables."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raggedatlas as ra
from raggedatlas import col, under
from raggedatlas.errors import (
    AtlasError,
    ConflictError,
    MissingExtraError,
    QueryError,
    SourceError,
    UnknownValueWarning,
)
from raggedatlas.model.terms import Terms
from raggedatlas.query.query import Query
from raggedatlas.store.ontologies import read_packaged, read_term_table

guide = pytest.importorskip("cellxgene_ontology_guide.ontology_parser")

TERM_OF = {
    "CD4+/CD25 T Reg": "CL:0000792", "CD4+/CD45RA+/CD25- Naive T": "CL:0000895", "CD4+/CD45RO+ Memory": "CL:0000897",
    "CD8+ Cytotoxic T": "CL:0000794", "CD8+/CD45RA+ Naive Cytotoxic": "CL:0000900", "CD14+ Monocyte": "CL:0001054",
    "CD19+ B": "CL:0000236", "CD34+": "CL:0000037", "CD56+ NK": "CL:0000623", "Dendritic": "CL:0000451",
}  # fmt: skip
"""Terms of the labels of pbmc68k_reduced, chosen by hand."""

LABELLED = pd.DataFrame(
    {
        "cell_type": ["T cell", "t-lymphocyte", "macrophage", "CL:0000236", "no such cell", None, "B cell"],
        "cell_type_ontology_term_id": ["CL:0000084", None, None, None, None, None, "CL:0000451"],
        "tissue": ["lung", "alveolus of lung", "liver", "blood", "lung", "pulmo", None],
        "disease": ["COVID-19", "normal", "normal", "COVID-19 || asthma", "asthma", "normal", "normal"],
        "assay": ["10x 3' v3", "10x 3' v2", "Smart-seq2", "10x 3' v3", "10x 3' v3", "10x 3' v3", "10x 3' v3"],
        "development_stage": ["HsapDv:0000258", "MmusDv:0000110", "HsapDv:0000002", "x", "x", "x", "x"],
        "sample": ["a", "b", "c", "d", "e", "f", "g"],
        "n": range(7),
    },
    index=list("abcdefg"),
)
"""Cells with an id, with a label alone, with neither; a label that the id contradicts; values of two parts."""


@pytest.fixture(scope="module")
def parser() -> Any:
    return guide.OntologyParser()


@pytest.fixture(scope="module")
def atlas(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> ra.RaggedAtlas:
    """pbmc68k_reduced, with the ids of its labels written back, and a few cells as a person has them."""
    atlas = ra.RaggedAtlas.create(tmp_path_factory.mktemp("terms") / "a")
    atlas.add(data_dir / "pbmc68k_reduced.h5ad", "pbmc", organism="human", progress=False)
    counts = np.ones((len(LABELLED), 2), np.float32)
    atlas.add(
        ad.AnnData(counts, LABELLED, pd.DataFrame(index=["CD3E", "CD19"])), "own", organism="human", progress=False
    )
    frame = atlas.checkout(atlas.snapshot()).query().where(dataset="pbmc").to_pandas()
    atlas.annotate(frame["bulk_labels"].astype(str).map(TERM_OF).rename("bulk_labels_ontology_term_id"))
    atlas.snapshot("mapped")
    return atlas


@pytest.fixture(scope="module")
def query(atlas: ra.RaggedAtlas) -> Query:
    return atlas.checkout("mapped").query()


def samples(found: Query) -> str:
    """The cells of the small dataset that a query keeps, by their letters."""
    return "".join(found.where(dataset="own").to_pandas()["sample"])


@pytest.mark.parametrize(
    "term", ["T cell", "lymphocyte", "leukocyte", "myeloid cell", "CD8-positive, alpha-beta T cell", "cell"]
)
def test_counts_on_real_cells_are_those_made_by_hand(query: Query, parser: Any, term: str) -> None:
    """Cells under a term are those whose id is among the descendants that the package lists for it."""
    uid = parser.get_term_id_by_label(term, "CL")
    below = {*parser.get_term_descendants(uid, include_self=True)}
    by_hand = query.where(dataset="pbmc").to_pandas()["bulk_labels"].astype(str).map(TERM_OF).isin(below).sum()
    assert query.where(bulk_labels=under(term)).count() == by_hand
    assert query.where(bulk_labels=under(uid, part_of=True)).count() == by_hand
    assert query.where(bulk_labels_ontology_term_id=under(uid, ontology="cl")).count() == by_hand


def test_expansion_is_that_of_the_package(query: Query, parser: Any) -> None:
    """The number of terms that `explain` states is that of the package's descendants, and it lists what is matched."""
    said = query.where(bulk_labels=under("T cell")).layers("raw").explain()
    assert f"{len(parser.get_term_descendants('CL:0000084', include_self=True)):,} terms of CL v" in said
    assert "'CL:0000792'" in said
    assert "'CL:0000236'" not in said


FORMS = [
    lambda q: q.where(cell_type=under("T cell")),
    lambda q: q.where({"cell_type": under("T lymphocyte")}),
    lambda q: q.where({"cell_type": [under("CL:0000084")]}),
    lambda q: q.where(col("cell_type") == under("CL_0000084")),
    lambda q: q.where(col("cell_type").isin(under("http://purl.obolibrary.org/obo/CL_0000084"))),
    lambda q: q.where("under(cell_type, 'T cell')"),
    lambda q: q.where("under(cell_type, 'T cell', 'CL') AND n < 100"),
    lambda q: q.where("NOT (NOT under(cell_type, 't  CELL'))"),
    lambda q: q.where(~(col("cell_type") != under("T cell"))),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FORMS)))
def test_every_form_of_filter_takes_it(query: Query, number: int) -> None:
    """A term means the same in keywords, mappings, expressions and SQL, by name, synonym and id."""
    assert samples(FORMS[number](query)) == "ab"


def test_a_label_counts_for_cells_without_an_id(query: Query) -> None:
    """An id decides alone; a label that is a name, synonym or id stands in for a missing one; the opposite leaves out cells with neither."""
    assert samples(query.where(cell_type=under("leukocyte"))) == "abcdg"
    assert samples(query.where(cell_type=under("dendritic cell"))) == "g"
    assert samples(query.where(cell_type=under("B cell"))) == "d"
    assert samples(query.where(~(col("cell_type") == under("T cell")))) == "cdeg"
    assert samples(query.where(cell_type=[under("T cell"), "no such cell", None])) == "abef"


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ({"tissue": under("lung")}, "abef"),
        ({"tissue": under("respiratory system")}, "abef"),
        ({"disease": under("infectious disease")}, "ad"),
        ({"disease": under("asthma")}, "de"),
        ({"disease": under("normal")}, "bcfg"),
        ({"assay": under("10x 3' transcription profiling")}, "abdefg"),
        ({"assay": under("EFO:0009922")}, "adefg"),
        ({"development_stage": under("embryonic stage")}, "c"),
        ({"development_stage": under("postnatal stage", ontology="HsapDv")}, "a"),
    ],
)
def test_other_columns_have_their_ontologies(query: Query, condition: dict[str, Any], kept: str) -> None:
    """Tissue is asked by UBERON with its parts, disease by MONDO and "normal", assay by EFO, stages by those of each species."""
    assert samples(query.where(condition)) == kept


def test_a_deprecated_id_follows_its_replacement(query: Query) -> None:
    """The warning names both terms."""
    with pytest.warns(UserWarning, match=r"CL:0000003 is deprecated; 'cell' \(CL:0000000\) is used, which replaces it"):
        assert samples(query.where(cell_type=under("CL:0000003"))) == "abcdg"


def test_a_term_that_no_cell_has_is_warned_of(query: Query) -> None:
    """An empty answer names the term and the release, as it does for a misspelt value."""
    with pytest.warns(UnknownValueWarning, match=r"No cell has a cell_type under 'neuron' \(CL:0000540\) of CL v"):
        assert query.where(cell_type=under("neuron")).count() == 0


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ({"cell_type": under("T cel")}, r"There is no term 'T cel' in CL v\S+ Did you mean 'T cell' \(CL:0000084\)"),
        ({"cell_type": under("CL:9999999")}, r"There is no term 'CL:9999999' in CL"),
        ({"cell_type": under("UBERON:0002048")}, r"is a term of UBERON, and 'cell_type' is asked for terms of CL"),
        ({"cell_type": under("UBERON:0002048", ontology="CL")}, r"is a term of UBERON"),
        ({"cell_type": under("T cell", ontology="CLL")}, r"There is no ontology 'CLL'; .* Did you mean 'CL'"),
        ({"cell_type": under("CL:0000002")}, r"is deprecated, replaced by CLO:0000019, which CL lacks"),
        ({"cell_type": under("T cell", part_of=False)}, r"do not tell part_of from is_a"),
        ({"sample": under("T cell")}, r"Which ontology .* say ontology="),
        ({"cell_typ": under("T cell")}, r"no column 'cell_typ'. Did you mean 'cell_type'"),
        ({"dataset": under("T cell")}, r"'dataset' are no terms"),
        ({"n": under("T cell")}, r"'n' holds int64"),
        ("under(cell_type)", r"under takes a column, a term"),
        ("under('T cell', cell_type)", r"under takes a column, a term"),
    ],
)
def test_refusals_are_one_line(query: Query, condition: Any, message: str) -> None:
    """A wrong term, ontology, column or spelling is refused when it is asked, with the way out."""
    with pytest.raises(QueryError, match=message) as refused:
        query.where(condition)
    assert "\n" not in str(refused.value)


def test_provenance_names_the_release(query: Query) -> None:
    """`uns["atlas"]` has the ontologies with their releases where the query used one, and nothing of them else."""
    kept = query.where(cell_type=under("T cell"), tissue=under("lung")).to_anndata()
    versions = [read_packaged(name).version for name in ("CL", "UBERON")]
    assert kept.uns["atlas"]["ontologies"] == "; ".join(versions)
    assert "under('T cell')" in kept.uns["atlas"]["summary"]
    assert "ontologies" not in query.where(dataset="own").to_anndata().uns["atlas"]


def test_loader_copy_and_groups_take_it(query: Query, tmp_path: Path, data_dir: Path) -> None:
    """A loader, an aggregate and a copy of a file keep the same cells."""
    kept = query.where(bulk_labels=under("lymphocyte")).layers("raw")
    assert sum(len(batch) for batch in ra.Loader(kept, batch_size=64, obs=["bulk_labels"])) == kept.count()
    assert kept.aggregate("phase").obs["n_cells"].sum() == kept.count()
    file = ad.read_h5ad(data_dir / "pbmc68k_reduced.h5ad")
    file.obs["cell_type"] = file.obs["bulk_labels"].astype(str).map(TERM_OF)
    ra.copy(file, tmp_path / "few.h5ad", where={"cell_type": under("lymphocyte")})
    assert ad.read_h5ad(tmp_path / "few.h5ad", backed="r").n_obs == kept.count()


def ids_of_pbmc() -> st.SearchStrategy[str]:
    """Every term above a cell of pbmc68k_reduced."""
    terms = read_packaged("CL")
    rows = {row for uid in TERM_OF.values() for row in terms.ancestors(terms.row(uid) or 0)}
    return st.sampled_from(sorted(terms.ids[row].as_py() for row in rows))


@given(data=st.data())
def test_children_are_within_parents(query: Query, parser: Any, data: st.DataObject) -> None:
    """Cells under a term are among those under each of its ancestors, and the tree counts them alike."""
    child = data.draw(ids_of_pbmc())
    parent = data.draw(st.sampled_from(sorted(parser.get_term_ancestors(child, include_self=True))))
    within = query.where(bulk_labels=under(child))
    assert within.where(bulk_labels=under(parent)).count() == within.count()
    counted = query.where(dataset="pbmc").tree("bulk_labels").to_pandas()
    assert counted.loc[child, "n_cells"] == within.count()
    assert counted.loc[parent, "n_cells"] >= counted.loc[child, "n_cells"]


def test_tree_sums_agree(query: Query, parser: Any) -> None:
    """Each term has its own cells and those of the terms below it, each once; the text has every different set of cells."""
    tree = query.where(dataset="pbmc").tree("bulk_labels")
    frame = tree.to_pandas()
    for uid, row in frame.iterrows():
        below = {*parser.get_term_descendants(uid, include_self=True)} & {*frame.index}
        assert row["n_cells"] == frame.loc[sorted(below), "n_own"].sum()
    text = repr(tree)
    assert text.startswith(f"bulk_labels: {tree.n_cells:,} cells by CL v")
    assert {int(line.rpartition(": ")[2].replace(",", "")) for line in text.splitlines()[1:]} == {*frame["n_cells"]}
    assert text.count("(CL:") == frame["shown"].sum()


def test_tree_of_labels_names_what_has_no_term(query: Query) -> None:
    """Cells without a term are counted apart, in text and HTML; what a label says is escaped."""
    tree = query.where(dataset="own").tree("cell_type")
    assert "2 without a term" in repr(tree)
    assert "2 without a term" in tree._repr_html_()
    assert tree._repr_html_().count("<details") == tree._repr_html_().count("</details>") > 0
    assert "0 cells" in repr(query.limit(0).tree("cell_type"))


def test_levels_count_the_tree(query: Query) -> None:
    """A level has the terms so many steps below the root, a curated list its own; other cells come last, under no term."""
    own = query.where(dataset="own")
    frame = own.tree("cell_type").to_pandas()
    for level in (0, 2, 4):
        counted = own.count("cell_type", level=level)
        wanted = frame[frame["level"] == level].sort_values("label")["n_cells"]
        assert counted.index.names == ["cell_type_ontology_term_id", "cell_type"]
        assert counted.dropna().iloc[: len(wanted)].tolist() == wanted.tolist()
        assert len(counted) == len(wanted) + 1
    tissues = own.count("tissue", level="tissue_general")
    assert tissues["UBERON:0002048", "lung"] == 4
    assert tissues.iloc[-1] == 1
    for wrong, message in (
        ({"level": 1}, "one column"),
        ({"by": "tissue", "level": -1}, "level 0"),
        ({"by": "tissue", "level": "x"}, "curated"),
    ):
        with pytest.raises(QueryError, match=message):
            own.count(**wrong)


def test_near_matches_are_scored() -> None:
    """The same letters score 1, fewer common ones less, and nothing in common is no match."""
    terms = read_packaged("CL")
    near = {
        text: [(terms.label(row), score) for row, score in terms.near(text)]
        for text in ("CD14+ Monocyte", "monocites", "qqzzxx")
    }
    assert near["CD14+ Monocyte"][0] == ("CD14-positive monocyte", 1.0)
    assert near["monocites"][0][0] == "monocyte"
    assert 0.4 <= near["monocites"][0][1] < 1
    assert near["qqzzxx"] == []


OWN = {
    "id": ["MY:1", "MY:2", "MY:3", "MY:4", "MY:5"],
    "name": ["body", "arm", "hand", "tool", "old hand"],
    "synonym": ["", "limb|upper limb", "", "", ""],
    "is_a": ["", "MY:1 ! body", "", "MY:1", ""],
    "part_of": ["", "", "MY:2", "", ""],
    "is_obsolete": ["", "", "", "", "true"],
    "replaced_by": ["", "", "", "", "MY:3"],
}
"""A table of a person's own, in the words of OBO."""


@pytest.fixture
def own_atlas(tmp_path: Path) -> ra.RaggedAtlas:
    atlas = ra.RaggedAtlas.create(tmp_path / "own")
    obs = pd.DataFrame(
        {"place": ["arm", "hand", "MY:4", "MY:5", "elsewhere"], "sample": list("abcde")}, index=list("abcde")
    )
    atlas.add(ad.AnnData(np.ones((5, 1), np.float32), obs, pd.DataFrame(index=["CD3E"])), "own", progress=False)
    return atlas


@pytest.mark.parametrize("form", ["csv", "tsv", "frame", "mapping"])
def test_a_table_of_ones_own_is_kept(own_atlas: ra.RaggedAtlas, tmp_path: Path, form: str) -> None:
    """A table is read from files and frames, kept with its hash, pinned by snapshots, and tells parts from kinds."""
    source: Any = pd.DataFrame(OWN) if form != "mapping" else OWN
    if form in {"csv", "tsv"}:
        pd.DataFrame(OWN).to_csv(tmp_path / f"t.{form}", index=False, sep="," if form == "csv" else "\t")
        source = tmp_path / f"t.{form}"
    before = own_atlas.snapshot()
    loaded = own_atlas.load_terms(source, release="1")
    assert loaded.loc["MY", ["kind", "n_rows", "release"]].tolist() == ["terms", 5, "1"]
    assert len(loaded.loc["MY", "sha256"]) == 64
    query = own_atlas.checkout(own_atlas.snapshot()).query()
    assert samples(query.where(place=under("body", ontology="MY"))) == "abcd"
    assert samples(query.where(place=under("MY:1", part_of=False))) == "ac"
    assert samples(query.where(place=under("upper limb", ontology="my"))) == "abd"
    assert "ontologies" in query.where(place=under("MY:1")).to_anndata().uns["atlas"]
    with pytest.raises(QueryError, match="There is no ontology 'MY'"):
        own_atlas.checkout(before).query().where(place=under("body", ontology="MY"))
    own_atlas.identity.remove("MY")
    assert samples(query.where(place=under("MY:1"))) == "abcd"
    own_atlas.snapshot()
    assert [*own_atlas.validate("deep")] == []


def test_an_ontology_that_is_removed_meanwhile_is_named(own_atlas: ra.RaggedAtlas, tmp_path: Path) -> None:
    """Another process removes a kept ontology between its choice and its reading, which once was a KeyError."""
    from raggedatlas.catalog.terms import known_ontologies, read_terms

    path = tmp_path / "my.csv"
    path.write_text("id,label\nMY:1,body\n")
    own_atlas.load_terms(path)
    assert "MY" in known_ontologies(own_atlas._catalog)
    own_atlas.identity.remove("MY")
    with pytest.raises(ConflictError, match="has removed the ontology 'MY'"):
        read_terms(own_atlas._catalog, "MY")


def test_a_packaged_ontology_can_be_kept(own_atlas: ra.RaggedAtlas) -> None:
    """The kept rows are those of the package, and another release of it would not change the answer."""
    assert own_atlas.load_terms("HsapDv").loc["HsapDv", "source"].startswith("cellxgene-ontology-guide")
    from raggedatlas.catalog.terms import read_terms

    kept = read_terms(own_atlas.checkout(own_atlas.snapshot())._catalog, "HsapDv")
    assert kept.rows.equals(read_packaged("HsapDv").rows)
    assert kept.version == read_packaged("HsapDv").version


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_a": ["MY:4", "MY:1", "", "MY:2", ""]}, r"cycle: '?MY:1'? under '?MY:4'? under '?MY:2'? under '?MY:1'?"),
        ({"part_of": ["", "MY:2", "", "", ""]}, r"cycle: MY:2 under MY:2"),
        ({"is_a": ["", "MY:9", "", "", ""]}, r"Row 2 of \S+ puts 'MY:2' under 'MY:9', which is no term"),
        ({"id": ["MY:1", "MY:2", "MY:2", "MY:4", "MY:5"]}, r"Rows 2 and 3 .* same id 'MY:2'"),
        ({"id": ["MY:1", "", "MY:3", "MY:4", "MY:5"]}, r"do not name one ontology|has no id"),
        ({"id": ["MY:1", "HIS:2", "MY:3", "MY:4", "MY:5"]}, r"do not name one ontology"),
        ({"name": None}, r"has the columns 'id' and 'label'"),
    ],
)
def test_tables_that_contradict_themselves_are_refused(
    own_atlas: ra.RaggedAtlas, change: dict[str, Any], message: str
) -> None:
    """A cycle is named, and so are repeated ids and parents that are no terms; nothing is written."""
    table = {name: values for name, values in (OWN | change).items() if values is not None}
    with pytest.raises(SourceError, match=message) as refused:
        own_atlas.load_terms(table)
    assert "\n" not in str(refused.value)
    assert own_atlas.identity.tables().empty


def test_missing_files_and_names_are_refused(own_atlas: ra.RaggedAtlas, tmp_path: Path) -> None:
    """A path without a file, and a view, are refused by what they are."""
    with pytest.raises(AtlasError, match="no file"):
        own_atlas.load_terms(tmp_path / "nothing.csv")
    with pytest.raises(AtlasError, match="load_terms"):
        own_atlas.checkout(own_atlas.snapshot()).load_terms(OWN)


def tables() -> st.SearchStrategy[dict[str, list[Any]]]:
    """Tables whose terms lie under earlier ones, so without cycles."""

    def of(n: int) -> st.SearchStrategy[dict[str, list[Any]]]:
        above = [st.lists(st.integers(0, i - 1), max_size=3, unique=True) if i else st.just([]) for i in range(n)]
        return st.tuples(*above).map(
            lambda lists: {"id": [f"MY:{i}" for i in range(n)], "label": [f"t{i}" for i in range(n)], "parents": [[f"MY:{p}" for p in one] for one in lists]}
        )  # fmt: skip

    return st.integers(1, 9).flatmap(of)


@given(table=tables())
def test_ancestors_are_the_closure_of_parents(table: dict[str, list[Any]]) -> None:
    """Ancestors, counts of descendants and levels are what following the parents one by one gives."""
    terms: Terms = read_term_table(table)

    def above(i: int) -> set[int]:
        return {i}.union(*(above(int(p.split(":")[1])) for p in table["parents"][i]))

    every = [above(i) for i in range(len(table["id"]))]
    assert [set(terms.ancestors(i)) for i in range(len(every))] == every
    assert [terms.count_under([i]) for i in range(len(every))] == [
        sum(i in one for one in every) for i in range(len(every))
    ]
    shortest = [
        min((int(terms.levels[int(p.split(":")[1])]) for p in parents), default=-1) + 1 for parents in table["parents"]
    ]
    assert terms.levels.tolist() == shortest


@given(table=tables(), data=st.data())
def test_under_a_child_is_within_under_its_parent(table: dict[str, list[Any]], data: st.DataObject) -> None:
    """Of any table: what a child covers its ancestors cover, and every term covers itself."""
    terms: Terms = read_term_table(table)
    row = data.draw(st.integers(0, len(table["id"]) - 1))
    covered = terms.covered(table["label"][row], label=True)
    assert row in covered
    assert all(terms.covered(table["id"][above], label=False) <= covered for above in covered)


def test_without_the_package_the_extra_is_named(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install; a table that the atlas keeps needs no package."""
    monkeypatch.setitem(sys.modules, "cellxgene_ontology_guide.supported_versions", None)
    read_packaged.cache_clear()
    with pytest.raises(MissingExtraError, match=r"pip install 'raggedatlas\[ontology\]'"):
        query.where(cell_type=under("T cell"))


def test_kept_terms_need_no_package_and_are_restored(
    own_atlas: ra.RaggedAtlas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept table answers alone, and `restore` brings back that of a snapshot."""
    own_atlas.load_terms(OWN, release="1")
    first = own_atlas.snapshot()
    own_atlas.load_terms({"id": ["MY:1"], "label": ["other"]}, release="2")
    second = own_atlas.snapshot()
    monkeypatch.setitem(sys.modules, "cellxgene_ontology_guide.supported_versions", None)
    assert samples(own_atlas.checkout(first).query().where(place=under("body", ontology="MY"))) == "abcd"
    with pytest.raises(QueryError, match="no term 'body' in MY 2"):
        own_atlas.checkout(second).query().where(place=under("body", ontology="MY"))
    own_atlas.restore(first)
    assert own_atlas.identity.tables().loc["MY", "release"] == "1"
    assert samples(own_atlas.checkout(own_atlas.snapshot()).query().where(place=under("body", ontology="MY"))) == "abcd"


@pytest.mark.nightly
def test_organisms_are_asked_by_taxon(tmp_path: Path) -> None:
    """NCBITaxon, of more than a million terms, is read with one parent for each, and asked by name, synonym and id."""
    atlas = ra.RaggedAtlas.create(tmp_path / "a")
    obs = pd.DataFrame(
        {"organism": ["Homo sapiens", "Mus musculus", "NCBITaxon:10116", "human"], "sample": list("abcd")}, list("abcd")
    )
    atlas.add(ad.AnnData(np.ones((4, 1), np.float32), obs, pd.DataFrame(index=["CD3E"])), "own", progress=False)
    query = atlas.checkout(atlas.snapshot()).query()
    assert samples(query.where(organism=under("Murinae"))) == "bc"
    assert samples(query.where(organism=under("NCBITaxon:9443"))).startswith("a")
    assert {"a", "b", "c"} <= {*samples(query.where(organism=under("Mammalia")))}
    with pytest.raises(QueryError, match="Mus musculus"):
        query.where(organism=under("Mus muculus"))


def test_reading_in_parts_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ontology that is decoded a few bytes at a time has the same terms, and one that is cut off is refused."""
    from raggedatlas.store import ontologies

    whole = read_packaged("HsapDv")
    monkeypatch.setattr(ontologies, "_CHUNK", 37)
    assert read_packaged.__wrapped__("HsapDv").rows.equals(whole.rows)

    def parts() -> Iterator[bytes]:
        yield from (json.dumps({"A:1": {"label": "x"}})[:-3].encode(), b"")

    stream = parts()
    import hashlib

    class Cut:
        def read(self, n: int) -> bytes:
            return next(stream)

    with pytest.raises(SourceError, match="damaged"):
        list(ontologies._entries(Cut(), hashlib.sha256(), "x"))  # type: ignore[arg-type]

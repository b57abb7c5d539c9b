"""Laws of deriving the mapping of what is new alone: it equals the mapping derived from scratch."""

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raggedatlas as ra
from raggedatlas.catalog import identity
from raggedatlas.catalog.catalog import IDENTITY, Catalog
from raggedatlas.catalog.genes import Genes, find_connected_rows, put_tables
from raggedatlas.catalog.identity import IDENTITY_SCHEMA, derive_identity, read_facts, read_identity, update_identity
from raggedatlas.catalog.layouts import register_features
from raggedatlas.catalog.optimization import optimize
from raggedatlas.catalog.versions import registry_tables
from raggedatlas.model.accessions import GENES_SCHEMA, GeneTable, GeneTableInfo, parse_accession
from raggedatlas.model.ids import feature_uids
from support.hypothesis_profile import examples

SPACE = "gene_expression"
IDS = ["ENSG00000105369", "ENSG00000156738", "ENSG00000122545", "ENSMUSG00000003379", "HGNC:10751"]
NAMES = ["A", "B", "C", "D", "E", "F", "G"]

FEATURE = st.tuples(
    st.sampled_from([*IDS, *NAMES]), st.none() | st.sampled_from(NAMES), st.lists(st.sampled_from(NAMES), max_size=1),
    st.sampled_from(["unknown", "human", "mouse"]),
)  # fmt: skip
FEATURES = st.lists(FEATURE, min_size=1, max_size=8, unique_by=lambda row: (row[0], row[3]))
NAMED = st.lists(st.sampled_from(NAMES), max_size=1)
GENE = st.tuples(
    st.sampled_from(IDS), st.sampled_from(NAMES), NAMED, NAMED, st.lists(st.sampled_from(IDS[:3]), max_size=1)
)
TABLE = st.lists(GENE, max_size=4, unique_by=lambda row: row[0])
STEPS = st.lists(FEATURES, min_size=2, max_size=4)


def gene_table(rows: list[tuple[str, str, list[str], list[str], list[str]]]) -> GeneTable:
    listed = [
        {"table": "HGNC", "accession": gene, "organism": parse_accession(gene).organism, "symbol": symbol, "previous": previous, "aliases": aliases, "same": same}
        for gene, symbol, previous, aliases, same in rows
    ]  # fmt: skip
    info = GeneTableInfo("HGNC", "genes", "HGNC", "", ("human",), len(rows), repr(rows))
    return GeneTable(info, pa.Table.from_pylist(listed, schema=GENES_SCHEMA))


def given_rows(features: list[tuple[str, str | None, list[str], str]]) -> pa.Table:
    """Make rows to register; the same id and organism have the same uid."""
    parsed = [parse_accession(name) for name, *_ in features]
    uids = [f"{feature_uids(SPACE, [one.name])[0]}{row[3]}" for one, row in zip(parsed, features, strict=True)]
    columns = {
        "uid": uids, "feature_id": [one.name for one in parsed], "symbol": pa.array([row[1] for row in features], pa.string()),
        "aliases": pa.array([row[2] for row in features], pa.list_(pa.string())), "organism": [row[3] for row in features],
        "symbol_source": pa.nulls(len(features), pa.string()), "other_type": pa.nulls(len(features), pa.string()),
    }  # fmt: skip
    return pa.table(columns)


def mapping(registry: pa.Table, links: dict[str, str | None], tables: Genes | None) -> dict[str, tuple[object, ...]]:
    """Return for each feature all that derives from a registry."""
    found = derive_identity(registry, SPACE, links, tables)
    uids = registry["uid"].to_pylist()
    return {
        uid: (
            uids[into], found.evidence.get(row), found.sources.get(row), row in found.by_hand, found.genes.get(row),
            sorted(uids[one] for one in found.ambiguous.get(row, ())),
        )
        for row, (uid, into) in enumerate(zip(uids, found.target.tolist(), strict=True))
    }  # fmt: skip


@pytest.mark.nightly
@given(data=st.data(), features=FEATURES, rows=TABLE)
@examples(60)
def test_features_that_are_not_connected_bear_on_nothing(data: st.DataObject, features: list, rows: list) -> None:  # type: ignore[type-arg]
    """What is derived of the connected rows alone is what is derived of all, and all others are as they were without the touched ones."""
    registry = given_rows(features)
    tables = Genes((gene_table(rows).info,), gene_table(rows).rows) if rows else None
    uids = registry["uid"].to_pylist()
    pairs = data.draw(st.lists(st.tuples(st.sampled_from(uids), st.none() | st.sampled_from(uids)), max_size=2))
    links = {uid: into for uid, into in pairs if into is None or uids.index(uid) < uids.index(into)}
    touched = pa.array(sorted(data.draw(st.sets(st.sampled_from(uids), min_size=1))))
    part = registry.take(pa.array(find_connected_rows(registry, touched, links, tables)))
    every = mapping(registry, links, tables)
    connected = {*part["uid"].to_pylist()}
    assert {*touched.to_pylist()} <= connected
    assert mapping(part, links, tables) == {uid: one for uid, one in every.items() if uid in connected}
    before = registry.filter(pa.array([uid not in touched.to_pylist() for uid in uids]))
    kept = {uid: one for uid, one in mapping(before, links, tables).items() if uid not in connected}
    assert kept == {uid: one for uid, one in every.items() if uid not in connected}


def from_scratch(catalog: Catalog) -> tuple[pa.Table | None, pa.Table | None]:
    """Forget what the mapping was derived from, derive it, and read it with the facts."""
    catalog.tables.overwrite_if(IDENTITY, IDENTITY_SCHEMA.empty_table(), catalog.tables.version(IDENTITY))
    update_identity(catalog, registry_tables(catalog))
    return read_identity(catalog, SPACE), read_facts(catalog, SPACE)


@pytest.mark.long
@given(data=st.data(), steps=STEPS, rows=TABLE)
@examples(4)
def test_a_mapping_of_many_steps_is_that_of_one(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, steps: list, rows: list  # type: ignore[type-arg]
) -> None:  # fmt: skip
    """Features new and changed, tables, compaction and snapshots between: after each step the mapping is that from scratch, in any order of steps."""
    ends = []
    for name, order in (("a", steps), ("b", data.draw(st.permutations(steps)))):
        catalog = ra.RaggedAtlas.create(str(tmp_path_factory.mktemp("steps") / name))._catalog
        catalog.add_space(catalog.space(SPACE))
        for features in order:
            register_features(catalog, SPACE, given_rows(features))
            if rows and data.draw(st.booleans()):
                put_tables(catalog, [gene_table(rows)])
            optimize(catalog)
        put_tables(catalog, [gene_table(rows)] if rows else [])
        update_identity(catalog, registry_tables(catalog))
        found = read_identity(catalog, SPACE), read_facts(catalog, SPACE)
        assert found == from_scratch(catalog)
        ends.append(
            [
                None if one is None else one.drop_columns([c for c in one.column_names if c == "made_at"])
                for one in found
            ]
        )
    assert ends[0] == ends[1]


def test_only_what_is_connected_is_derived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New features, and those that changed, are derived with those that share a name; compaction derives nothing."""
    catalog = ra.RaggedAtlas.create(str(tmp_path / "a"))._catalog
    catalog.add_space(catalog.space(SPACE))
    register_features(catalog, SPACE, given_rows([(name, None, [], "human") for name in [*IDS, *NAMES]]))
    optimize(catalog)
    derived: list[list[str]] = []
    derive = identity.derive_identity

    def noted(registry: pa.Table, *more: object) -> identity.Identity:
        derived.append(sorted(registry["feature_id"].to_pylist()))
        return derive(registry, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(identity, "derive_identity", noted)
    register_features(catalog, SPACE, given_rows([("H", "A", [], "human"), ("I", None, [], "human")]))
    optimize(catalog)
    register_features(catalog, SPACE, given_rows([(IDS[0], None, ["B"], "human")]))
    optimize(catalog)
    registry = catalog.space(SPACE).registry
    catalog.tables.restore(registry, catalog.tables.version(registry))
    assert not update_identity(catalog, registry_tables(catalog))
    assert derived == [["A", "H", "I"], ["B", IDS[0]]]

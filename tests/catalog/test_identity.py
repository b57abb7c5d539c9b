"""Laws of the identity mapping: a pure function of registry and links, revocable, pinned by snapshots, one step long."""

import itertools
from datetime import datetime
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raggedatlas as ra
from raggedatlas.catalog.catalog import IDENTITY, LINKS, Catalog
from raggedatlas.catalog.features import Layout, read_registry
from raggedatlas.catalog.identity import (
    change_links,
    derive_identity,
    read_identity,
    read_links,
    update_identity,
)
from raggedatlas.catalog.layouts import register_features
from raggedatlas.catalog.versions import registry_tables
from raggedatlas.errors import CorruptError, FeatureError, LimitError, SchemaError
from raggedatlas.model.ids import feature_uids, new_uids
from raggedatlas.query.modalities import FeatureRows
from support.hypothesis_profile import examples

SPACE = "gene_expression"
CD79A, CD79A_MOUSE, MS4A1 = "ENSG00000105369", "ENSMUSG00000003379", "ENSG00000156738"


def cells(genes: list[str], seed: int = 0, **columns: list[str]) -> ad.AnnData:
    x = np.random.default_rng(seed).poisson(2, (3, len(genes))).astype(np.float32)
    return ad.AnnData(
        x, obs=pd.DataFrame(index=[f"c{seed}-{i}" for i in range(3)]), var=pd.DataFrame(columns, index=genes)
    )


def build(
    folder: Path, sources: dict[str, ad.AnnData], snapshots: set[int] = frozenset(), **options: object
) -> ra.RaggedAtlas:  # type: ignore[assignment]
    """Add sources in turn, with a snapshot after each of some positions, and one at the end."""
    atlas = ra.RaggedAtlas.create(str(folder))
    for i, (name, source) in enumerate(sources.items()):
        atlas.add(source, name, progress=False, **options)
        if i in snapshots:
            atlas.snapshot()
    atlas.snapshot()
    return atlas


def var_of(atlas: ra.RaggedAtlas, *names: str) -> pd.DataFrame:
    query = atlas.checkout(atlas.list_versions()[-1].version).query()
    return (query.features(list(names)) if names else query).to_anndata().varm["measured"].astype(int)


@pytest.mark.long
def test_ids_in_a_file_of_mostly_symbols_join(tmp_path: Path) -> None:
    """An Ensembl id is that gene also where most features of its file are symbols."""
    atlas = build(
        tmp_path / "a", {"ids": cells([CD79A, MS4A1]), "mixed": cells([CD79A, "GFP", "mCherry", "tdTomato"], 1)}
    )
    assert var_of(atlas, CD79A).to_numpy().tolist() == [[1, 1]]
    assert atlas.features().set_index("feature_id").loc["GFP", "organism"] == "unknown"


def test_the_organism_is_each_features_own(tmp_path: Path) -> None:
    """A file of two species names both in its report, and takes no symbol from the datasets of one."""
    both = cells(["CD79A", "Cd79a"], 1, gene_ids=[CD79A, CD79A_MOUSE])
    atlas = ra.RaggedAtlas.create(str(tmp_path / "a"))
    atlas.add(cells(["CD79A", "MS4A1"], gene_ids=[CD79A, MS4A1]), "human", progress=False)
    report = atlas.add(both, "barnyard", progress=False)
    atlas.snapshot()
    assert any("human (1), mouse (1)" in note for note in report.notes)
    assert var_of(atlas, "CD79A").to_numpy().tolist() == [[1, 1]]
    assert var_of(atlas, "Cd79a").to_numpy().sum() == 1


def test_an_assembly_before_names_says_the_organism(tmp_path: Path) -> None:
    """Names as Cell Ranger writes them for two genomes are the genes without the prefix, which stays an alias."""
    both = cells(["GRCh38_CD79A", "mm10___Cd79a"], 1, gene_ids=[f"GRCh38_{CD79A}", f"mm10___{CD79A_MOUSE}"])
    atlas = build(tmp_path / "a", {"plain": cells(["CD79A"], gene_ids=[CD79A]), "barnyard": both})
    assert var_of(atlas, "CD79A").to_numpy().tolist() == [[1, 1]]
    assert var_of(atlas, f"GRCh38_{CD79A}").to_numpy().tolist() == [[1, 1]]


@pytest.mark.parametrize("order", list(itertools.permutations(["named", "bare", "other"])))
def test_a_poorer_source_never_overwrites_a_better_one(tmp_path: Path, order: tuple[str, ...]) -> None:
    """Bare ids leave symbols alone; of two symbols one is chosen whatever the order, and both stay names of the gene."""
    sources = {
        "named": cells(["CD79A"], 0, gene_ids=[CD79A]), "bare": cells([CD79A], 1), "other": cells(["MB1"], 2, gene_ids=[CD79A]),
    }  # fmt: skip
    atlas = build(tmp_path / "a", {name: sources[name] for name in order})
    [row] = atlas.features().to_dict("records")
    assert (row["symbol"], list(row["aliases"])) == ("CD79A", ["MB1"])
    assert var_of(atlas, "MB1").to_numpy().tolist() == [[1]]


def test_a_symbol_given_by_hand_wins(tmp_path: Path) -> None:
    """A corrected symbol is not replaced by the next file."""
    atlas = build(tmp_path / "a", {"d": cells(["CD79A"], gene_ids=[CD79A])})
    [uid] = atlas.features().index
    atlas.register_features(pd.DataFrame({"symbol": ["MB-1"]}, index=pd.Index([uid], name="uid")))
    atlas.add(cells(["AAA"], 1, gene_ids=[CD79A]), "e", progress=False)
    [row] = atlas.features().to_dict("records")
    assert (row["symbol"], row["symbol_source"], list(row["aliases"])) == ("MB-1", "by hand", ["AAA", "CD79A"])


@pytest.mark.long
def test_a_symbol_of_two_ids_is_withdrawn_whenever_the_second_comes(tmp_path: Path) -> None:
    """A symbol joins the only gene of its name; when another gene gets the name it stands alone, and `diff` says so."""
    atlas = ra.RaggedAtlas.create(str(tmp_path / "a"))
    atlas.add(cells(["X1"]), "plain", progress=False)
    atlas.add(cells(["X1"], 1, gene_ids=[CD79A]), "first", progress=False)
    one = atlas.snapshot("one")
    assert var_of(atlas).shape[0] == 1
    atlas.add(cells(["X1"], 2, gene_ids=[MS4A1]), "second", progress=False)
    two = atlas.snapshot("two")
    found = atlas.diff("one", "two")
    assert found.identity_removed == {SPACE: (f"X1 = {CD79A}",)}
    assert found.identity_added == {}
    with pytest.raises(FeatureError, match=rf"human X1 \({CD79A}; write '{CD79A}'; measured by first\)"):
        atlas.checkout(two).query().features("X1").to_anndata()
    with pytest.raises(FeatureError, match="human:X1"):
        atlas.checkout(two).query().features("human:X1").to_anndata()
    assert atlas.checkout(two).query().features("symbol:X1").to_anndata().var["feature_id"].tolist() == ["X1"]
    explained = atlas.identity.explain("X1")
    assert {CD79A, MS4A1, "X1"} == set(explained["feature_id"])
    assert explained.set_index("feature_id").loc["X1", "candidates"] in (f"{CD79A}, {MS4A1}", f"{MS4A1}, {CD79A}")
    assert atlas.checkout(one).query().features(["X1"]).to_anndata().n_vars == 1
    status = atlas.identity.status()
    assert status.loc["plain", ["alone", "ambiguous"]].tolist() == [1, 1]


@pytest.mark.long
def test_a_snapshot_derives_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Datasets of known features, and snapshots after them, do not derive the mapping; a new feature and a link do."""
    from raggedatlas.catalog import identity

    atlas = build(tmp_path / "a", {"ids": cells(["CD79A"], 0, gene_ids=[CD79A]), "names": cells(["CD79A", "X"], 1)})
    derived: list[str] = []
    derive = identity.derive_identity

    def counted(registry: pa.Table, space: str, *more: object) -> identity.Identity:
        derived.append(space)
        return derive(registry, space, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(identity, "derive_identity", counted)
    atlas.add(cells(["X", "CD79A"], 2), "known", progress=False)
    atlas.snapshot()
    atlas.identity.update()
    atlas.snapshot()
    assert derived == []
    atlas.add(cells(["X", "Y"], 3), "more", progress=False)
    atlas.snapshot()
    assert derived == [SPACE]
    atlas.identity.link("Y", "X")
    assert derived == [SPACE] * 2


@pytest.mark.long
def test_an_alias_joins_the_columns(tmp_path: Path) -> None:
    """A previous symbol given as an alias joins datasets that have it as their name, not only the name that is asked for."""
    atlas = build(tmp_path / "a", {"new": cells(["SEPTIN7"]), "old": cells(["SEPT7"], 1)}, organism="human")
    assert len(var_of(atlas)) == 2
    [uid] = atlas.features().query("feature_id == 'SEPTIN7'").index
    atlas.register_features([ra.FeatureBaseSchema(uid=uid, aliases=["SEPT7"])])
    atlas.snapshot()
    assert len(var_of(atlas)) == 1
    assert var_of(atlas, "SEPT7").to_numpy().tolist() == [[1, 1]]
    assert atlas.identity.explain("SEPT7").query("feature_id == 'SEPT7'")["evidence"].tolist() == ["alias SEPT7"]


@pytest.mark.long
def test_a_link_is_repointed_revoked_and_restored(tmp_path: Path) -> None:
    """Pointing a feature elsewhere moves it alone; each change can be taken back; `restore` brings a snapshot's links back."""
    atlas = build(tmp_path / "a", {"a": cells(["A", "B", "C"]), "b": cells(["D"], 1)}, organism="human")
    before = atlas.features()["feature_id"]

    def mapping() -> dict[str, str]:
        rows = read_identity(atlas._catalog, SPACE)
        assert rows is not None
        return {
            before[a]: before[b]
            for a, b in zip(rows["feature_uid"].to_pylist(), rows["target_uid"].to_pylist(), strict=True)
        }

    atlas.identity.link("D", "A")
    linked = atlas.snapshot()
    assert mapping() == {"D": "A"}
    atlas.identity.link("D", "B")
    assert mapping() == {"D": "B"}
    atlas.identity.link("B", "C")
    assert mapping() == {"D": "C", "B": "C"}
    with pytest.raises(FeatureError, match="same feature"):
        atlas.identity.link("C", "D")
    atlas.identity.unlink("B")
    atlas.identity.unlink("D")
    assert mapping() == {}
    with pytest.raises(FeatureError, match="counts as no other"):
        atlas.identity.unlink("A")
    history = atlas.identity.history()
    assert history["revoked_at"].notna().tolist() == [True] * 3
    assert history[["feature", "target"]].to_numpy().tolist() == [["D", "A"], ["D", "B"], ["B", "C"]]
    atlas.restore(linked)
    assert mapping() == {"D": "A"}


@pytest.mark.long
def test_a_joined_feature_can_be_kept_apart(tmp_path: Path) -> None:
    """Taking back what a rule joined lasts over snapshots, until it is taken back itself."""
    atlas = build(tmp_path / "a", {"ids": cells(["CD79A"], gene_ids=[CD79A]), "names": cells(["CD79A"], 1)})
    assert len(var_of(atlas)) == 1
    atlas.identity.unlink("CD79A")
    history = atlas.identity.history()
    assert history["feature"].tolist() == ["CD79A"]
    assert history["target"].isna().tolist() == [True]
    atlas.snapshot()
    assert len(var_of(atlas)) == 2
    atlas.identity.unlink("symbol:CD79A")
    atlas.snapshot()
    assert len(var_of(atlas)) == 1


@pytest.mark.long
def test_links_are_changed_after_a_call_that_died_before_the_mapping(tmp_path: Path) -> None:
    """Where links changed and the mapping did not, `link` and `unlink` go by the links."""
    atlas = build(tmp_path / "a", {"d": cells(["A", "B"])})
    atlas.identity.link("A", "B")
    registry = read_registry(atlas._catalog, SPACE)
    change_links(atlas._catalog, SPACE, registry.table, {}, revoke=registry.require(["A"], follow=False))
    atlas.identity.link("A", "B")
    assert len(atlas.identity.history()) == 2
    change_links(atlas._catalog, SPACE, registry.table, {}, revoke=registry.require(["A"], follow=False))
    with pytest.raises(FeatureError, match="counts as no other feature"):
        atlas.identity.unlink("A")


def test_repair_brings_the_mapping_up_to_date(tmp_path: Path) -> None:
    """After a call that changed links and died, `repair` derives what follows, and says so once."""
    atlas = build(tmp_path / "a", {"d": cells(["A", "B"])})
    registry = read_registry(atlas._catalog, SPACE)
    [a, b] = registry.require(["A", "B"])
    change_links(atlas._catalog, SPACE, registry.table, {a: b})
    assert read_registry(atlas._catalog, SPACE).redirects == {}
    assert atlas.repair().notes == ("feature identities: recomputed",)
    assert read_registry(atlas._catalog, SPACE).redirects == {a: b}
    assert atlas.repair().notes == ()


@pytest.mark.long
def test_links_are_refused_with_nothing_changed(tmp_path: Path) -> None:
    """Unknown features, circles and links across organisms are refused."""
    both = cells(["CD79A", "Cd79a"], 1, gene_ids=[CD79A, CD79A_MOUSE])
    atlas = build(tmp_path / "a", {"both": both, "plain": cells(["X", "Y"], 2)})
    with pytest.raises(FeatureError, match="nope"):
        atlas.identity.link("nope", "CD79A")
    with pytest.raises(FeatureError, match="across_organisms"):
        atlas.identity.link("Cd79a", "CD79A")
    with pytest.raises(SchemaError, match=r"1 registered features .* 'Z' in place of 'X'"):
        atlas.register_features(atlas.features()[["feature_id"]].replace("X", "Z"))
    with pytest.raises(SchemaError, match=r"are texts, .* feature_id int64"):
        atlas.register_features(atlas.features()[["feature_id"]].assign(feature_id=1))
    assert len(atlas.identity.history()) == 0
    atlas.identity.link("Cd79a", "CD79A", across_organisms=True)
    assert atlas.identity.explain("CD79A")["evidence"].tolist() == ["", "by hand"]
    with pytest.raises(ra.AtlasError, match="snapshot"):
        atlas.checkout(1).identity.link("X", "Y")


NAMES = st.sampled_from(["X", "Y", "Z", CD79A, MS4A1, CD79A_MOUSE])
ROWS = st.lists(
    st.tuples(
        NAMES,
        st.sampled_from([None, "X", "Y", "Z", "W"]),
        st.lists(st.sampled_from(["X", "Y", "Z"]), max_size=2),
        st.sampled_from(["unknown", "human", "mouse"]),
    ),
    min_size=1,
    max_size=7,
    unique_by=lambda row: (row[0], row[3]),
)


def registry_of(rows: list[tuple[str, str | None, list[str], str]]) -> pa.Table:
    uids = [f"{feature_uids(SPACE, [name], organism)[0]}{organism}" for name, _, _, organism in rows]
    return pa.table(
        {
            "uid": uids, "feature_id": [row[0] for row in rows], "symbol": pa.array([row[1] for row in rows], pa.string()),
            "aliases": pa.array([row[2] for row in rows], pa.list_(pa.string())), "organism": [row[3] for row in rows],
            "symbol_source": pa.nulls(len(rows), pa.string()), "other_type": pa.nulls(len(rows), pa.string()),
        }
    )  # fmt: skip


def as_names(registry: pa.Table, target: np.ndarray) -> dict[str, str]:
    uids = registry["uid"].to_pylist()
    return {uid: uids[into] for uid, into in zip(uids, target.tolist(), strict=True)}


@pytest.mark.long
@given(data=st.data(), rows=ROWS)
@examples(150)
def test_identity_is_a_function_of_what_is_registered(data: st.DataObject, rows: list) -> None:  # type: ignore[type-arg]
    """The order of rows does not matter; every feature ends in one step; a link by hand is kept, the rest follows the rules."""
    registry = registry_of(rows)
    uids = registry["uid"].to_pylist()
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = registry.take(order)
    links = {}
    for source, into in data.draw(
        st.lists(st.tuples(st.sampled_from(uids), st.sampled_from([*uids, None])), max_size=3)
    ):
        trial, seen = links | {source: into}, [source]
        while (at := trial.get(seen[-1])) is not None and at not in seen:
            seen.append(at)
        if at is None:
            links = trial
    found = derive_identity(registry, SPACE, links)
    again = derive_identity(shuffled, SPACE, links)
    mapping = as_names(registry, found.target)
    assert mapping == as_names(shuffled, again.target)
    assert all(mapping[end] == end for end in mapping.values())
    for source, into in links.items():
        assert mapping[source] == (source if into is None else mapping[into])
    assert as_names(registry, derive_identity(registry, SPACE, {}).target) == as_names(
        shuffled, derive_identity(shuffled, SPACE, {}).target
    )


@pytest.mark.long
def test_a_row_says_its_source_and_when(tmp_path: Path) -> None:
    """A row by a gene table names it, with hash and time of loading; one by hand has the time of its link; one by files neither."""
    atlas = build(
        tmp_path / "a", {"ids": cells(["SEPTIN7"], 0, gene_ids=["ENSG00000122545"]), "old": cells(["CDC10", "SEPTIN7", "X", "Y"], 1)},
        organism="human",
    )  # fmt: skip

    def rows() -> dict[str, tuple[object, ...]]:
        found = read_identity(atlas._catalog, SPACE)
        assert found is not None
        ids, columns = atlas.features()["feature_id"], ("by_hand", "source", "source_sha256", "made_at")
        return {ids[row["feature_uid"]]: tuple(row[name] for name in columns) for row in found.to_pylist()}

    assert rows() == {"SEPTIN7": (False, None, None, None)}
    atlas.identity.load("tests/data/gene_tables/hgnc_complete_set_extract.txt")
    [table] = atlas.identity.tables().reset_index().to_dict("records")
    by_table = (False, "HGNC human", table["sha256"], datetime.fromisoformat(table["loaded_at"]))
    assert rows() == {"SEPTIN7": by_table, "CDC10": by_table}
    atlas.identity.link("X", "Y")
    made = atlas.identity.history()["created_at"][0].to_pydatetime()
    assert rows() == {"SEPTIN7": by_table, "CDC10": by_table, "X": (True, None, None, made)}
    atlas.identity.load("tests/data/gene_tables/hgnc_complete_set_extract.txt")
    assert atlas.identity.tables().reset_index().to_dict("records") == [table]
    atlas.add(cells(["HGNC:1717"], 2), "hgnc", progress=False)
    atlas.snapshot()
    assert rows()["CDC10"] == rows()["HGNC:1717"] == by_table


def test_a_feature_registered_twice_under_an_old_uid_is_one(two: tuple[Catalog, str, str]) -> None:
    """An accession that the atlas holds under the uid of an older scheme too is one feature."""
    catalog = two[0]
    [now] = feature_uids(SPACE, [CD79A])
    register_features(
        catalog,
        SPACE,
        pa.table({"uid": ["0123456789abcdef", now], "feature_id": [CD79A] * 2, "organism": ["unknown", "human"]}),
    )
    update_identity(catalog, registry_tables(catalog))
    assert read_registry(catalog, SPACE).require([CD79A]) == (now,)


def test_damage_of_the_mapping_is_found(two: tuple[Catalog, str, str]) -> None:
    """A mapping that names features which are not there, or takes two steps, is reported."""
    from raggedatlas.catalog.validation import validate

    catalog = two[0]
    update_identity(catalog, registry_tables(catalog))
    registry = read_registry(catalog, SPACE)
    a, b, c = registry.uids.tolist()[:3]
    rows = [
        {"space": SPACE, "feature_uid": x, "target_uid": y, "relation": "same", "evidence": "", "by_hand": False}
        for x, y in ((a, b), (b, c), (c, "gone"))
    ]
    catalog.tables.append(IDENTITY, pa.Table.from_pylist(rows, schema=catalog.tables.schema(IDENTITY)))
    assert [p.rule for p in validate(catalog) if p.rule == "feature-identity"] == ["feature-identity"] * 2


@pytest.mark.parametrize("uids", [("gone", "{a}"), ("{a}", "gone"), ("gone", "gone too")])
def test_a_row_that_names_unknown_features_joins_nothing(two: tuple[Catalog, str, str], uids: tuple[str, str]) -> None:
    """Readers pass over a row of the mapping whose feature or target is not registered, which `validate` reports."""
    catalog = two[0]
    update_identity(catalog, registry_tables(catalog))
    a = read_registry(catalog, SPACE).uids[0]
    row = dict(zip(("feature_uid", "target_uid"), (uid.format(a=a) for uid in uids), strict=True))
    row |= {"space": SPACE, "relation": "same", "evidence": "", "by_hand": False}
    catalog.tables.append(IDENTITY, pa.Table.from_pylist([row], schema=catalog.tables.schema(IDENTITY)))
    registry = read_registry(catalog, SPACE)
    layout = Layout("list", registry.uids, np.full(len(registry.uids), -1))
    assert FeatureRows(registry, {"list": layout}).rows("list").tolist() == list(range(len(registry.uids)))


def test_tables_with_other_columns_are_refused(two: tuple[Catalog, str, str]) -> None:
    """A column of the mapping or of the links that is missing, or of another type, is `CorruptError` with the table's name."""
    catalog = two[0]
    registry = read_registry(catalog, SPACE).table
    change_links(catalog, SPACE, registry, {registry["uid"][0].as_py(): None})
    update_identity(catalog, registry_tables(catalog))
    readers = {
        IDENTITY: [lambda: read_registry(catalog, SPACE)],
        LINKS: [lambda: read_links(catalog), lambda: change_links(catalog, SPACE, registry, {})],
    }
    for table, uses in readers.items():
        rows = catalog.tables.read(table)
        for other in (rows.drop_columns(["feature_uid"]), rows.set_column(0, "space", pa.array([1] * len(rows)))):
            assert catalog.tables.overwrite_if(table, other, catalog.tables.version(table))
            for use in uses:
                with pytest.raises(CorruptError, match=f"of the table '{table}' are missing"):
                    use()


def test_two_writers_of_links_lose_none(two: tuple[Catalog, str, str]) -> None:
    """Links made from two handles are both there, and a circle between them is refused."""
    first, second = two[0], two[0].tip()
    registry = read_registry(first, SPACE)
    uid = dict(zip(registry.table["feature_id"].to_pylist(), registry.uids.tolist(), strict=True))
    change_links(first, SPACE, registry.table, {uid["A"]: uid["B"]})
    change_links(second, SPACE, registry.table, {uid["B"]: uid["C"]})
    with pytest.raises(FeatureError, match="form a circle: A -> B -> C -> A"):
        change_links(first, SPACE, registry.table, {uid["C"]: uid["A"]})
    update_identity(first, registry_tables(first))
    assert read_registry(first, SPACE).redirects == {uid["A"]: uid["C"], uid["B"]: uid["C"]}


def test_more_uids_than_offsets_can_count_are_refused() -> None:
    """One call draws fewer uids than int32 offsets of their texts can count, and says so before it draws any."""
    with pytest.raises(LimitError, match="134,217,728 cells"):
        new_uids(2**27)

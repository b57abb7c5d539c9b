"""Registries, layouts and columns: stable identities, asked order, corrections that are never ignored."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.catalog import features, layouts, optimization
from raggedatlas.catalog.catalog import CELLS, LAYOUTS, Catalog, create_catalog
from raggedatlas.catalog.cells import (
    CellColumn,
    add_cell_columns,
    column_conflict,
    fit_values,
    join_facts,
)
from raggedatlas.catalog.features import read_layouts
from raggedatlas.catalog.layouts import ensure_layouts
from raggedatlas.errors import FeatureError, NotFoundError, SchemaError
from raggedatlas.model.frames import ColumnFacts, facts_of, find_column, metadata_columns
from raggedatlas.model.ids import feature_uids, layout_uid
from raggedatlas.store.location import Location
from support.atlases import SPACE, small_anndata, write_dataset

Two = tuple[Catalog, str, str]
VALUES = st.lists(st.sampled_from("abcdefg"), unique=True).map(tuple)


def uid_of(name: str) -> str:
    [uid] = feature_uids(SPACE, [name], "human")
    return uid


def test_names_resolve_in_the_asked_order(two: Two) -> None:
    """Uid, symbol and alias all find a feature; unknown and repeated names are refused by name."""
    catalog = two[0]
    layouts.register_features(
        catalog, SPACE, pa.table({"uid": [uid_of("A")], "symbol": ["Alpha"], "aliases": [["alef"]]})
    )
    registry = features.read_registry(catalog, SPACE)
    assert list(registry.require(["D", "alef", uid_of("C")])) == [uid_of(name) for name in "DAC"]
    found = registry.resolve([uid_of("B"), "C", "Alpha", "A", "alef", "nope"])
    assert found.uids == tuple(uid_of(name) for name in "BCAAA")
    assert found.matched_by == ("uid", "symbol", "symbol", "symbol", "alias")
    assert found.unknown == ("nope",)
    with pytest.raises(FeatureError, match="nope"):
        registry.require(["A", "nope"])
    with pytest.raises(FeatureError, match="more than once"):
        registry.require(["A", "Alpha"])
    assert registry.names_of([uid_of("A"), "unknown"]) == ["Alpha", "unknown"]


def test_corrections_are_made_and_old_names_still_work(two: Two) -> None:
    """Registering a feature again corrects it, keeps its index, and keeps its old symbol as an alias."""
    catalog = two[0]
    optimization.reindex(catalog)
    before = features.read_registry(catalog, SPACE)
    n = layouts.register_features(
        catalog, SPACE, pa.table({"uid": [uid_of("B"), uid_of("N")], "symbol": ["Beta", "N"]})
    )
    assert n == 1
    after = features.read_registry(catalog, SPACE)
    assert after.global_index[after.row_of[uid_of("B")]] == before.global_index[before.row_of[uid_of("B")]]
    assert after.resolve(["Beta", "B"]).uids == (uid_of("B"),) * 2
    version = catalog.tables.version(f"{SPACE}_registry")
    assert layouts.register_features(catalog, SPACE, pa.table({"uid": [uid_of("B")], "symbol": ["Beta"]})) == 0
    assert catalog.tables.version(f"{SPACE}_registry") == version
    with pytest.raises(SchemaError, match="colour"):
        layouts.register_features(catalog, SPACE, pa.table({"uid": ["x"], "colour": ["red"]}))


def test_what_the_atlas_assigns_is_not_set(two: Two) -> None:
    """Another index than the registry has is refused by name, and nothing changes; the same values may come back."""
    catalog = two[0]
    optimization.reindex(catalog)
    table = f"{SPACE}_registry"
    known, version = catalog.tables.read(table), catalog.tables.version(table)
    assert layouts.register_features(catalog, SPACE, known.select(["uid", "symbol", "global_index"])) == 0
    with pytest.raises(SchemaError, match=f"'{uid_of('A')}' of '{SPACE}' is given 99 in the column 'global_index'"):
        layouts.register_features(catalog, SPACE, pa.table({"uid": [uid_of("A")], "global_index": [99]}))
    for missing in (pa.nulls(1), pa.nulls(1, pa.string())):
        with pytest.raises(SchemaError, match="1 of them null"):
            layouts.register_features(catalog, SPACE, pa.table({"uid": missing, "symbol": ["new"]}))
    assert catalog.tables.version(table) == version


def test_datasets_are_found_by_what_they_measured(two: Two) -> None:
    """All or any of some names, by any kind of name, before and after optimize."""
    catalog, first, second = two
    for _ in range(2):
        assert features.find_datasets_with_features(catalog, SPACE, ["B"]) == {first: ("B",), second: ("B",)}
        assert features.find_datasets_with_features(catalog, SPACE, [uid_of("B"), "A"]) == {first: (uid_of("B"), "A")}
        assert features.find_datasets_with_features(catalog, SPACE, ["D", "A"], every=False) == {
            first: ("A",),
            second: ("D",),
        }
        assert features.find_datasets_with_features(catalog, SPACE, ["D", "A"]) == {}
        optimization.optimize(catalog)
    with pytest.raises(FeatureError):
        features.find_datasets_with_features(catalog, SPACE, ["nope"])
    with pytest.raises(NotFoundError, match="no features"):
        features.read_registry(catalog, "embedding")


def test_a_symbol_in_another_case_is_found_where_it_means_one_feature(tmp_path: Path) -> None:
    """With a warning; an exact name comes first, and of several that differ in case alone all are listed."""
    atlas = RaggedAtlas.create(str(tmp_path / "a"))
    atlas.add(small_anndata(0, 6, ["CD79A", "MS4A1"]), "human", organism="human", progress=False)
    query = atlas.checkout(atlas.snapshot()).query()
    with pytest.warns(UserWarning, match="in another case: 'cd79a' for 'CD79A'"):
        found = query.features("cd79a").to_anndata()
    assert found.var["symbol"].tolist() == ["CD79A"]
    atlas.add(small_anndata(1, 6, ["Cd79a"]), "mouse", organism="mouse", progress=False)
    query = atlas.checkout(atlas.snapshot()).query()
    assert query.features("Cd79a").to_anndata().var["organism"].tolist() == ["mouse"]
    with pytest.raises(FeatureError, match=r"'cd79a' is any of (human CD79A.*mouse Cd79a|mouse Cd79a.*human CD79A)"):
        query.features("cd79a").to_anndata()


def test_presence_is_what_results_call_measured(two: Two, tmp_path: Path) -> None:
    """The matrix of datasets and features is that of `varm["measured"]`; no dataset is left out."""
    catalog, first, second = two
    view = RaggedAtlas(catalog)
    assert view.presence(["D", "A"]).to_dict("split") == {
        "index": [first, second], "columns": ["D", "A"], "data": [[False, True], [True, False]],
    }  # fmt: skip
    assert view.presence(["B"]).to_numpy().all()
    with pytest.raises(FeatureError):
        view.presence(["nope"])
    every = view.presence()
    assert every.columns.tolist() == view.features().index.tolist()
    # Names may mean one feature, as the uids do of a list in which one counts as another.
    again = view.presence(["B", "B", "A"])
    assert (again.columns.tolist(), again.to_numpy()[:, 2].tolist()) == (["B", "B", "A"], [True, False])
    view.identity.link("A", "B")
    linked = view.presence(view.features().index)
    assert linked.shape[1] == len(view.features()) == every.shape[1]
    assert linked.T.drop_duplicates().shape[0] < len(linked.T)
    atlas = RaggedAtlas.create(str(tmp_path / "other"))
    for seed, genes in enumerate((["CD3E", "CD4"], ["CD4", "MS4A1", "NKG7"], ["CD3E"])):
        atlas.add(small_anndata(seed, 6, genes), str(seed), organism="human", progress=False)
    snapshot = atlas.checkout(atlas.snapshot())
    data, found = snapshot.query().to_anndata(), snapshot.presence()
    layouts_of = data.obs.drop_duplicates("dataset").set_index("dataset")["layout_uid"]
    for uid, name in snapshot.list_datasets()["name"].items():
        measured = pd.Series(np.asarray(data.varm["measured"][layouts_of[name]]), index=data.var["uid"])
        assert found.loc[uid].to_dict() == measured.to_dict()
    assert found.shape == (3, 4)


@pytest.mark.long
@given(rounds=st.lists(st.lists(st.sampled_from("abcdefghij"), min_size=1, unique=True), min_size=1, max_size=5))
def test_indices_are_dense_and_final(tmp_path_factory: pytest.TempPathFactory, rounds: list[list[str]]) -> None:
    """However features arrive, indices are 0..N-1 and never change."""
    catalog = create_catalog(Location(str(tmp_path_factory.mktemp("index") / "atlas")))
    catalog.add_space(catalog.space(SPACE))
    given_so_far: dict[str, int] = {}
    for names in rounds:
        layouts.register_features(catalog, SPACE, pa.table({"uid": names}))
        layouts.reindex_registry(catalog, SPACE)
        registry = features.read_registry(catalog, SPACE)
        now = dict(zip(registry.uids.tolist(), registry.global_index.tolist(), strict=True))
        assert sorted(now.values()) == list(range(len(now)))
        assert {uid: now[uid] for uid in given_so_far} == given_so_far
        given_so_far = now


TABLES = st.lists(
    st.dictionaries(
        st.sampled_from("abcdef"),
        st.tuples(st.sampled_from(["P", "Q", None]), st.sampled_from([None, "x", "y"])),
        min_size=1,
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.long
@given(tables=TABLES)
def test_tables_registered_together_or_in_turn_come_to_the_same(
    tmp_path_factory: pytest.TempPathFactory, tables: list[dict[str, tuple[str | None, str | None]]]
) -> None:
    """One commit of several tables leaves the features that a commit of each leaves, and counts as many new ones; indices are dense."""
    given_tables = [
        pa.table(
            {
                "uid": list(rows),
                "symbol": pa.array([symbol for symbol, _ in rows.values()], pa.string()),
                "aliases": pa.array(
                    [None if alias is None else [alias] for _, alias in rows.values()], pa.list_(pa.string())
                ),
            }
        )
        for rows in tables
    ]
    found = []
    for together in (True, False):
        catalog = create_catalog(Location(str(tmp_path_factory.mktemp("together") / "atlas")))
        catalog.add_space(catalog.space(SPACE))
        steps = [given_tables] if together else [[table] for table in given_tables]
        n_new = sum(layouts.register_features(catalog, SPACE, *step) for step in steps)
        layouts.reindex_registry(catalog, SPACE)
        rows = features.read_registry(catalog, SPACE).table.sort_by("uid").to_pylist()
        assert sorted(row["global_index"] for row in rows) == list(range(len(rows)))
        found.append((n_new, [row | {"aliases": sorted(row["aliases"] or []), "global_index": None} for row in rows]))
    assert found[0] == found[1]


def test_layouts_are_shared_and_read_in_column_order(two: Two) -> None:
    """Equal lists are stored once, any order of rows reads back in column order, repeated rows vanish at optimize."""
    catalog = two[0]
    uids = [uid_of(name) for name in "CAB"]
    none = np.full(3, -1)
    (uid,) = ensure_layouts(catalog, [(uids, none)])
    assert uid == layout_uid(uids)
    assert ensure_layouts(catalog, [(uids, none), (uids[:2], none[:2]), (uids, none)]) == [
        uid,
        layout_uid(uids[:2]),
        uid,
    ]
    assert catalog.tables.count(LAYOUTS, f"layout_uid = '{uid}'") == 3
    rows = catalog.tables.read(LAYOUTS, where=f"layout_uid = '{uid}'")
    catalog.tables.append(LAYOUTS, rows.take([2, 0, 1]))
    found = read_layouts(catalog, [uid, "", "missing"])
    assert list(found) == [uid]
    assert found[uid].features.tolist() == uids
    assert found[uid].global_index.tolist() == [-1, -1, -1]
    optimization.optimize(catalog)
    assert catalog.tables.count(LAYOUTS, f"layout_uid = '{uid}'") == 3
    assert (read_layouts(catalog, [uid])[uid].global_index >= 0).all()
    assert ensure_layouts(catalog, [([], np.array([], int))]) == [layout_uid([])]


@given(old=VALUES, new=VALUES, ordered=st.tuples(st.booleans(), st.booleans()))
def test_joined_categories_hold_both_and_invent_no_order(
    old: tuple[str, ...], new: tuple[str, ...], ordered: tuple[bool, bool]
) -> None:
    """Every category is there once, the older order stands, and "ordered" is claimed only where both agree."""
    a = ColumnFacts("c", "categorical", old, ordered=ordered[0])
    b = ColumnFacts("c", "categorical", new, ordered=ordered[1])
    joined = join_facts(a, b)
    assert joined.categories is not None
    assert sorted(joined.categories) == sorted({*old, *new})
    assert [v for v in joined.categories if v in old] == list(old)
    if joined.ordered:
        assert ordered == (True, True)
        assert [v for v in joined.categories if v in new] == list(new)
    assert join_facts(a, a).categories == old


def test_many_categories_are_joined_in_seconds() -> None:
    """A column may have a category for each clone or barcode; the time is not that of their number squared."""
    old, new = (tuple(f"{i:07d}" for i in range(0, 200_000, step)) for step in (2, 3))
    a, b = (ColumnFacts("c", "categorical", listed, ordered=True) for listed in (old, new))
    start = time.process_time()
    joined = join_facts(a, b)
    assert time.process_time() - start < 5
    assert joined.ordered
    assert len(joined.categories or ()) == len({*old, *new})


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("int32", "int64", "int64"),
        ("int32", "float32", "float64"),
        ("bool", "int8", "int8"),
        ("string", "string", "string"),
        ("categorical", "string", "string"),
        ("Int64", "int64", ""),
    ],
)
def test_joined_kinds_hold_both(old: str, new: str, kind: str) -> None:
    """Two kinds of number join to what holds both; text stays text; what has no join is left open."""
    assert join_facts(ColumnFacts("c", old), ColumnFacts("c", new)).kind == kind


@pytest.mark.parametrize(
    ("old", "new", "kind", "categories"),
    [
        (("int64", (1, 2)), ("float64", (1.0, 2.5)), "float64", (1.0, 2.0, 2.5)),
        (("int8", (1,)), ("int64", (300,)), "int64", (1, 300)),
        (("int64", (1, 2)), ("string", ("a",)), "string", None),
        (("string", ("a",)), ("int64", (1, 2)), "string", None),
    ],
)
def test_joined_categories_of_two_types_hold_both(
    old: tuple[str, tuple[Any, ...]], new: tuple[str, tuple[Any, ...]], kind: str, categories: tuple[Any, ...] | None
) -> None:
    """Numeric categories of two types join; with text on one side the column is text, which numeric categories would not match."""
    a, b = (ColumnFacts("c", "categorical", listed, category_kind=own) for own, listed in (old, new))
    joined = join_facts(a, b)
    assert joined.categories == categories
    assert (joined.category_kind if joined.kind == "categorical" else joined.kind) == kind


@pytest.mark.parametrize("first", ["categories", "numbers"])
def test_numeric_categories_and_numbers_stay_numbers(tmp_path: Path, first: str) -> None:
    """Clusters that are categories in one file and integers in another come back as integers."""
    values = {"categories": pd.Categorical([1, 2, 1]), "numbers": np.array([5, 6, 7])}
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    for seed, name in enumerate([first, *(set(values) - {first})]):
        data = small_anndata(seed, 3)
        data.obs = pd.DataFrame({"cluster": values[name]}, index=data.obs_names)
        atlas.add(data, name, progress=False)
    frame = atlas.checkout(atlas.snapshot()).query().to_pandas()
    assert frame.groupby("dataset", observed=True)["cluster"].apply(list).to_dict() == {
        "categories": [1, 2, 1],
        "numbers": [5, 6, 7],
    }
    assert frame["cluster"].dtype == np.int64


def test_text_and_numeric_categories_lose_no_value(tmp_path: Path) -> None:
    """With on_clash="text", numeric categories in the atlas become text like the values of the file."""
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    for seed, column in enumerate([pd.Categorical([1, 2, 1]), pd.Categorical(["a", "b", "a"])]):
        data = small_anndata(seed, 3)
        data.obs = pd.DataFrame({"cluster": column}, index=data.obs_names)
        atlas.add(data, str(seed), on_clash="text", progress=False)
    frame = atlas.checkout(atlas.snapshot()).query().to_pandas()
    assert frame["cluster"].tolist() == ["1", "2", "1", "a", "b", "a"]


def test_widening_adds_columns_once(two: Two) -> None:
    """New columns are null in older rows, keep their file's name as a fact, and join with what was there."""
    catalog = two[0]
    facts = ColumnFacts("percent.mt", "categorical", ("lo",))
    column = CellColumn("percent_mt", pa.string(), facts)
    add_cell_columns(catalog, [column], [])
    add_cell_columns(
        catalog, [CellColumn("percent_mt", pa.string(), ColumnFacts("percent.mt", "categorical", ("hi",)))], []
    )
    schema = catalog.tables.schema(CELLS)
    stored = facts_of(schema.field("percent_mt"))
    assert stored is not None
    assert stored.categories == ("lo", "hi")
    assert find_column(schema, "percent.mt") == find_column(schema, "percent_mt") == "percent_mt"
    assert find_column(schema, "nope") is None
    assert {"kind", "percent_mt"} == set(metadata_columns(schema))
    assert catalog.tables.count(CELLS, "percent_mt IS NULL") == 50
    version = catalog.tables.version(CELLS)
    add_cell_columns(catalog, [column], [])
    assert catalog.tables.version(CELLS) == version


def test_values_fit_exactly_or_not_at_all() -> None:
    """A cast that would change a value is refused with the fix; types of one family do not clash."""
    assert fit_values("n", pa.chunked_array([[1, 2]]), pa.float64()).to_pylist() == [1.0, 2.0]
    with pytest.raises(SchemaError, match="a column of its own with obs="):
        fit_values("n", pa.chunked_array([[1.5]]), pa.int64())
    number, text = CellColumn("n", pa.int64(), ColumnFacts("n", "")), CellColumn("n", pa.string(), ColumnFacts("n", ""))
    assert column_conflict(pa.field("n", pa.float64()), number) is None
    assert "string" in str(column_conflict(pa.field("n", pa.int64()), text))


def test_a_third_dataset_brings_its_columns(two: Two) -> None:
    """A later dataset's columns are null before it and its genes count on."""
    catalog = two[0]
    write_dataset(catalog, "c", ["A", "E"], np.ones((3, 2), "u1"), {"score": [0.5, None, 1.0]})
    rows = catalog.tables.read(CELLS, ["score"]).column(0).to_pylist()
    assert rows == [None] * 50 + [0.5, None, 1.0]

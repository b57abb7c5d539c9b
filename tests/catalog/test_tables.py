"""The seam to Lance: order, checked commits, tags, compaction, clean-up, errors that say the place."""

import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.catalog.cells import cell_rows
from raggedatlas.errors import (
    ConflictError,
    CorruptError,
    NameRefusedError,
    NotFoundError,
    QueryError,
    StoreError,
)
from raggedatlas.store.location import Location
from raggedatlas.store.tables import CHANGED_AT, Tables, index_serves, plain, walk
from raggedatlas.store.upkeep import RowRemoval, clean_up, compact, index

SCHEMA = pa.schema([pa.field("uid", pa.string(), nullable=False), ("n", pa.int64())])


def rows(*pairs: tuple[str, int | None]) -> pa.Table:
    return pa.table({"uid": [uid for uid, _ in pairs], "n": [n for _, n in pairs]}, schema=SCHEMA)


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    made = Tables(Location(str(tmp_path / "lance_db")))
    made.create("t", SCHEMA)
    return made


@pytest.mark.long
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_rows_keep_the_order_in_which_they_came(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int
) -> None:
    """Appends, deletes, updates, compaction and indexes leave the order of first arrival."""
    tables = Tables(Location(str(tmp_path_factory.mktemp("order") / "db")))
    tables.create("t", SCHEMA)
    rng = np.random.default_rng(seed)
    expected: list[tuple[str, int | None]] = []
    for i, size in enumerate(sizes):
        fresh: list[tuple[str, int | None]] = [(f"{i}-{k}", int(rng.integers(5))) for k in range(size)]
        tables.append("t", rows(*fresh))
        expected += fresh
        gone = {uid for uid, _ in expected if rng.random() < 0.2}
        for uid in gone:
            tables.delete("t", f"uid = '{uid}'")
        expected = [pair for pair in expected if pair[0] not in gone]
        if expected:
            at = int(rng.integers(len(expected)))
            expected[at] = (expected[at][0], 99)
            tables.merge("t", ["uid"], rows(expected[at]), update=True)
        if rng.random() < 0.5:
            index(tables, "t", "uid", "BTREE")
            compact(tables, "t")
    read = tables.read("t").to_pylist()
    assert [(row["uid"], row["n"]) for row in read] == expected
    walked = [uid for batch in tables.batches("t", ["uid"]) for uid in batch.column("uid").to_pylist()]
    assert sorted(walked) == sorted(uid for uid, _ in expected)


@pytest.mark.parametrize("gone", ["n % 3 = 0", "dataset_uid = 'b'"], ids=["rows", "dataset"])
def test_an_index_over_deleted_rows_is_passed_over(tmp_path: Path, gone: str) -> None:
    """Where a deletion left holes, filters by dataset are scans, since Lance takes seconds for many rows; those by unique id are not."""
    tables = Tables(Location(str(tmp_path / "lance_db")))
    owners = np.repeat(["a", "b", "c"], 1000)
    cells = pa.table({"uid": [f"{i:04}" for i in range(3000)], "dataset_uid": owners, "n": range(3000)})
    tables.create("t", cells.schema)
    for owner in "abc":
        tables.append("t", cells.filter(pc.equal(cells["dataset_uid"], owner)))
    compact(tables, "t")
    index(tables, "t", "dataset_uid", "BTREE")
    where = "dataset_uid IN ('a', 'c') AND n <> 5"
    assert index_serves(tables.open("t"), where)
    assert tables.delete("t", gone) == 1000
    assert tables.delete("t", gone) == 0
    compact(tables, "t")
    index(tables, "t", "dataset_uid", "BTREE")
    assert not index_serves(tables.open("t"), where)
    assert index_serves(tables.open("t"), "uid = '0007'")
    assert index_serves(tables.open("t"), None)
    left = [n for n in range(3000) if (n % 3 if gone[0] == "n" else owners[n] != "b") and owners[n] != "b" and n != 5]
    assert tables.read("t", ["n"], where).column(0).to_pylist() == left
    assert [n for batch in walk(tables, "t", ["n"], where) for n in batch.column("n").to_pylist()] == left
    assert tables.count("t", where) == len(left)
    assert tables.delete("t", where) == len(left)
    assert tables.count("t", where) == 0


def test_rows_of_a_column_that_another_process_removed(tables: Tables) -> None:
    """A column without values is left out; one with values is not lost without a word, whether seen before the append or by it."""
    more = rows(("a", 1)).append_column("m", pa.array([None], pa.int64()))
    tables.append("t", more)
    assert tables.read("t").to_pylist() == [{"uid": "a", "n": 1}]
    lost = rows(("b", 2)).append_column("m", pa.array([3], pa.int64()))
    with pytest.raises(ConflictError, match=r"columns \['m'\] of .* meanwhile; run it again"):
        tables.append("t", lost)
    assert tables.count("t") == 1
    with pytest.raises(ConflictError, match=r"columns \['m'\] of the cells meanwhile"):
        cell_rows(rows().schema, {"uid": ["b"], "n": [2], "m": [3]}, 1)


def test_a_checked_commit_is_made_once(tables: Tables) -> None:
    """Of two overwrites that read the same version, one wins; metadata and old versions stay."""
    tables.update_metadata("t", {"k": "v"})
    at = tables.version("t")
    assert tables.overwrite_if("t", rows(("a", 1)), at)
    assert not tables.overwrite_if("t", rows(("b", 2)), at)
    assert tables.read("t").to_pylist() == [{"uid": "a", "n": 1}]
    assert tables.metadata("t") == {"k": "v"}
    assert Tables(tables.location, {"t": at}).count("t") == 0
    assert tables.overwrite_if("t", rows(), tables.version("t"))
    assert tables.count("t") == 0


def test_rows_appended_alone_conflict_with_every_commit(tables: Tables) -> None:
    """Neither can rows be changed beside them, nor they be added beside any commit, whether or not its version is still there; a lost
    attempt leaves the table as it was."""
    tables.append("t", rows(("a", 1)))
    index(tables, "t", "uid", "BTREE")
    writes: dict[str, Callable[[Tables, int], object]] = {
        "append_alone": lambda at, version: at.append_alone("t", rows(("z", 0)), version),
        "merge of a new row": lambda at, version: at.merge(
            "t", ["uid"], rows(("y", 0)), update=True, retry=False, read_version=version
        ),
        "merge of a known row": lambda at, version: at.merge(
            "t", ["uid"], rows(("a", 2)), update=True, retry=False, read_version=version
        ),
        "overwrite": lambda at, version: at.overwrite("t", rows(), version),
        "delete": lambda at, version: at.delete_at("t", pa.array([0], pa.uint64()), version),
    }
    for write in writes.values():
        version = tables.version("t")
        tables.append_alone("t", rows((f"n{version}", version)), version)
        there = tables.read("t")
        with pytest.raises(ConflictError):
            write(tables, version)
        assert tables.read("t").equals(there)
    tables.append("t", rows(("b", 1)))
    version = tables.version("t")
    for change in (
        lambda: tables.append("t", rows(("c", 1))),
        lambda: tables.merge("t", ["uid"], rows(("d", 1)), update=False),
        lambda: tables.delete("t", "uid = 'c'"),
        lambda: compact(tables, "t", 0),
        lambda: tables.update_metadata("t", {"k": "v"}),
    ):
        change()
        there = tables.read("t")
        with pytest.raises(ConflictError):
            tables.append_alone("t", rows(("e", 1)), version)
        assert tables.read("t").equals(there)
        version = tables.version("t")
    held = tables.hold()
    version = held.version("t")
    tables.append("t", rows(("f", 1)))
    tables.update_metadata("t", {"k": "w"})
    clean_up(tables, "t", timedelta(0))
    there = tables.read("t")
    with pytest.raises(ConflictError):
        held.append_alone("t", rows(("e", 1)), version)
    assert tables.read("t").equals(there)
    assert not tables.settled("t")
    held.append_alone("t", rows(("e", 1)), held.version("t"))
    assert tables.metadata("t")["k"] == "w"
    # In the order of arrival, each with a row id of its own, also after compaction.
    for _ in range(2):
        found = tables.read("t", row_ids=True)
        assert found.column("uid").to_pylist() == [*there.column("uid").to_pylist(), "e"]
        assert len(set(found.column("_rowid").to_pylist())) == found.num_rows
        assert tables.read("t", where="uid = 'e'").num_rows == 1
        compact(tables, "t", 0)


class PanicException(BaseException):  # the name that pyo3 gives it
    """What a panic in Rust looks like from Python."""


@pytest.mark.parametrize("fault", [PanicException, OSError, pa.ArrowInvalid])
def test_what_does_not_read_after_compaction_is_undone(
    tables: Tables, monkeypatch: pytest.MonkeyPatch, fault: type[BaseException]
) -> None:
    """The version before is the newest again, also where Lance panics over the new one."""
    for i in range(3):
        tables.append("t", rows((str(i), i)))
    there = tables.read("t")

    def unreadable(*_: object, **__: object) -> None:
        raise fault("index out of bounds")

    before = tables.version("t")
    with monkeypatch.context() as patched:
        patched.setattr(lance.LanceDataset, "scanner", unreadable)
        with pytest.raises(CorruptError, match=f"version {before} has been restored"):
            compact(tables, "t")
    assert tables.read("t").equals(there)
    assert not tables.settled("t")


def test_tagged_versions_outlive_clean_up(tables: Tables) -> None:
    """Clean-up of everything leaves tagged versions and the newest; untagged ones are gone, and opening them says so."""
    versions = [tables.append("t", rows((str(i), i))) for i in range(4)]
    tables.tag("t", "keep", versions[1])
    tables.tag("t", "keep", versions[2])
    assert tables.tags("t") == {"keep": versions[2]}
    assert clean_up(tables, "t", timedelta(0)) > 0
    assert Tables(tables.location, {"t": versions[2]}).count("t") == 3
    assert tables.count("t") == 4
    with pytest.raises(NotFoundError, match=f"version {versions[0]}"):
        Tables(tables.location, {"t": versions[0]}).read("t")
    tables.untag("t", "keep")
    assert tables.tags("t") == {}
    with pytest.raises(NotFoundError):
        tables.tag("t", "x", 999)


def test_compaction_says_whether_there_was_need(tables: Tables) -> None:
    """A second compaction or index does nothing; single deletions are no need."""
    assert tables.settled("t")
    assert not index(tables, "t", "uid", "BTREE")
    for i in range(3):
        tables.append("t", rows(*((f"{i}-{k}", k) for k in range(50))))
    assert not tables.settled("t")
    assert index(tables, "t", "uid", "BTREE")
    assert not index(tables, "t", "uid", "BTREE")
    assert compact(tables, "t")
    assert not compact(tables, "t")
    assert tables.settled("t")
    tables.delete("t", "uid = '1-1'")
    assert not compact(tables, "t")


def test_pinned_tables_never_move(tables: Tables) -> None:
    """A pinned table reads its version whatever is written later, also after pickling; others are not there."""
    at = tables.append("t", rows(("a", 1)))
    pinned = Tables(tables.location, {"t": at})
    assert pinned.count("t") == 1
    tables.append("t", rows(("b", 2)))
    assert pinned.count("t") == 1
    assert pickle.loads(pickle.dumps(pinned)).read("t").num_rows == 1
    assert (pinned.names(), pinned.version("t")) == (["t"], at)
    with pytest.raises(NotFoundError, match="no table 'u'"):
        pinned.open("u")


def test_filters_are_closed_and_errors_name_columns(tables: Tables) -> None:
    """A filter that does not parse, ends early, or names an unknown column is refused with the columns there are."""
    tables.append("t", rows(("a", 1)))
    for where in ("n >", "nope = 1", "n = 1 or so", "n ! 1", "", "'n"):
        with pytest.raises(QueryError, match=r"uid.*n"):
            tables.read("t", where=where)
        with pytest.raises(QueryError):
            tables.count("t", where)
    for where in ("n = 1) or so", "n = 1) --", "n = 1 /* x", "n = 1; DROP TABLE t", "(n = 1", "n = 1) OR (n = 2"):
        with pytest.raises(QueryError, match="one expression"):
            tables.read("t", where=where)
    assert tables.count("t", "uid <> ') -- ;' AND (n = 1 OR uid = 'it''s)')") == 1
    assert tables.read("t", ["n"], "n = 1", row_ids=True).column_names == ["n", "_rowid"]


def test_creation_takes_over_only_what_is_empty_and_alike(tables: Tables) -> None:
    """Creating again is fine while the table is empty and has these columns, and refused after."""
    tables.create("t", SCHEMA)
    with pytest.raises(StoreError):
        tables.create("t", pa.schema([("other", pa.int64())]))
    tables.append("t", rows(("a", 1)))
    with pytest.raises(StoreError):
        tables.create("t", SCHEMA)
    with pytest.raises(NameRefusedError):
        tables.create("../t", SCHEMA)
    with pytest.raises(NotFoundError):
        tables.read("missing")


def test_nothing_given_writes_nothing(tables: Tables) -> None:
    """Empty appends, merges, deletes and column lists make no version."""
    at = tables.version("t")
    assert tables.append("t", rows()) == at
    assert tables.merge("t", ["uid"], rows(), update=True) == 0
    assert tables.delete("t", "n = 1") == 0
    assert tables.delete_rows("t", pa.array([], pa.uint64())) == 0
    tables.add_columns("t", [pa.field("n", pa.int64())])
    tables.update_field_metadata("t", lambda schema: {})
    assert tables.version("t") == at


def test_merges_insert_or_correct(tables: Tables) -> None:
    """A merge counts what it inserted, and overwrites only when asked to."""
    tables.append("t", rows(("a", 1)))
    assert tables.merge("t", ["uid"], rows(("a", 9), ("b", 2)), update=False) == 1
    assert tables.merge("t", ["uid"], rows(("a", 5), ("c", 3)), update=True) == 1
    assert tables.read("t").to_pydict() == {"uid": ["a", "b", "c"], "n": [5, 2, 3]}
    ids = tables.read("t", row_ids=True).column("_rowid").combine_chunks()
    assert tables.delete_rows("t", ids[:2]) == 2
    assert tables.read("t").to_pydict() == {"uid": ["c"], "n": [3]}


def test_retries_end(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """An action that always loses ends in an error that says so; other errors pass at once."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    tried = []

    def losing() -> None:
        tried.append(1)
        raise RuntimeError("Commit conflict for version 3")

    with pytest.raises(ConflictError, match="Run it again"):
        tables.retry("t", losing)
    assert len(tried) > 10

    def failing() -> None:
        raise OSError("No space left on device")

    with pytest.raises(StoreError, match="No space left"):
        tables.retry("t", failing)


def test_dictionaries_are_written_as_values(tables: Tables) -> None:
    """Narrow dictionary columns become plain ones, which compaction does not harm."""
    wide = pa.table({"uid": ["a", "b"], "n": pa.array([1, 2], pa.int64()).dictionary_encode()})
    assert plain(wide).schema.field("n").type == pa.int64()
    tables.append("t", wide)
    assert tables.read("t").to_pydict() == {"uid": ["a", "b"], "n": [1, 2]}


CHANGES: dict[str, Callable[[Tables, int], object]] = {
    "append": lambda tables, i: tables.append("t", rows(*((f"{i}-{k}", k % 3) for k in range(4)))),
    "delete": lambda tables, i: tables.delete("t", f"uid LIKE '%-{i % 4}'"),
    "update": lambda tables, _: tables.merge("t", ["uid"], tables.read("t", ["uid", "n"]).slice(1, 3), update=True),
    "column": lambda tables, i: tables.add_columns("t", [pa.field(f"c{i % 2}", pa.int64())]),
    "drop": lambda tables, i: tables.drop_columns("t", [f"c{i % 2}"]),
    "note": lambda tables, i: tables.update_metadata("t", {"k": str(i)}),
    "compact": lambda tables, _: compact(tables, "t"),
    "index": lambda tables, _: index(tables, "t", "uid", "BTREE"),
    "restore": lambda tables, i: tables.restore("t", max(1, tables.version("t") - i)),
}


@pytest.mark.long
@given(changes=st.lists(st.sampled_from([*CHANGES, "append"]), min_size=1, max_size=8), last=st.integers(1, 9))
def test_rows_are_removed_from_all_versions(
    tmp_path_factory: pytest.TempPathFactory, changes: list[str], last: int
) -> None:
    """Other rows keep ids and the versions of their changes, versions keep columns and notes; each fragment is written once."""
    tables = Tables(Location(str(tmp_path_factory.mktemp("removal") / "db")))
    tables.create("t", SCHEMA)
    for i, change in enumerate(["append", *changes]):
        CHANGES[change](tables, i)
    versions = [*range(1, tables.version("t") + 1)]
    versions.append(versions.pop(min(last, len(versions)) - 1))

    def content(version: int, where: str | None = None) -> tuple[object, ...]:
        table = tables.at({"t": version}).open("t")
        facts = ["_rowid", "_row_created_at_version", "_row_last_updated_at_version"]
        read = table.to_table([*table.schema.names, *facts], where, use_scalar_index=False).sort_by("_rowid")
        return read, table.schema, table.metadata

    before = {version: content(version, "n <> 1") for version in versions}
    fragments = {
        (*(file.path for file in f.metadata.files), f.metadata.deletion_file and f.metadata.deletion_file.id)
        for version in versions
        for f in tables.at({"t": version}).open("t").get_fragments()
    }
    data = Path(tables.location.uri, "t.lance", "data")
    n_files = len([*data.iterdir()]) if data.exists() else 0
    held = tables.hold()
    removal = RowRemoval(held, "t", "n = 1", versions)
    written = {version: removal.write(version) for version in versions if removal.find(version).rewritten}
    removal.read_back()
    for version in versions:
        assert removal.find(version).n_rows == tables.at({"t": version}).count("t", "n = 1")
        now = written.get(version, version)
        assert content(now) == before[version]
        if version in written:
            assert not tables.at({"t": now}).indices("t")
            assert not tables.at({"t": now}).has_deleted_rows("t")
    # A version from which nothing is removed can be made the newest too.
    assert content(removal.write(versions[-1])) == before[versions[-1]]
    assert tables.version("t") == held.version("t")
    assert (len([*data.iterdir()]) if data.exists() else 0) - n_files <= len(fragments)
    assert tables.append("t", rows(("new", 7))) == held.version("t") + 1
    ids = tables.read("t", row_ids=True)
    assert len(set(ids.column("_rowid").to_pylist())) == ids.num_rows


def test_a_removal_that_does_not_read_back_is_refused(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be read is reported before anything is deleted."""
    from lance.dataset import LanceScanner

    at = tables.append("t", rows(("a", 1), ("b", 2)))
    removal = RowRemoval(tables.hold(), "t", "n = 1", [at])
    removal.write(at)

    def broken(self: object) -> object:
        raise OSError("does not decode")

    monkeypatch.setattr(LanceScanner, "to_batches", broken)
    with pytest.raises(CorruptError, match="nothing was deleted"):
        removal.read_back()


def test_a_removal_sees_another_writer(tables: Tables) -> None:
    """Rows that another process appends meanwhile are not lost silently."""
    at = tables.append("t", rows(("a", 1), ("b", 2)))
    removal = RowRemoval(tables.hold(), "t", "n = 1", [at])
    tables.append("t", rows(("c", 3)))
    with pytest.raises(ConflictError):
        removal.write(at)


def test_rows_appended_alone_to_an_emptied_table_are_new_rows(tables: Tables) -> None:
    """What a session knows of the rows that were there before is not taken for them."""
    held = tables.resume()
    held.append("t", rows(("a", 1), ("b", 2)))
    before = held.read("t", ["uid", CHANGED_AT], row_ids=True)
    held.overwrite("t", rows(), held.version("t"))
    held.append_alone("t", rows(("c", 3)), held.version("t"))
    for seen in (held, tables.hold()):
        after = seen.read("t", ["uid", CHANGED_AT], row_ids=True)
        assert after.column("uid").to_pylist() == ["c"]
        assert not {*after.column("_rowid").to_pylist()} & {*before.column("_rowid").to_pylist()}
        assert after.column(CHANGED_AT).to_pylist() == [seen.version("t")]

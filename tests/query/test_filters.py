"""Laws of filters: whatever people type is quoted; what cannot be answered is refused by name."""

import datetime as dt
import pickle
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.errors import QueryError
from raggedatlas.query.query import Query
from raggedatlas.store.filters import Columns, col, to_sql, value_from_json
from raggedatlas.store.sql import Target, compare, is_member, quote_identifier, quote_literal
from raggedatlas.store.sql_parser import as_filter

pytestmark = pytest.mark.filterwarnings("ignore::raggedatlas.errors.UnknownValueWarning")

SCHEMA = pa.schema(
    [
        ("uid", pa.string()),
        ("dataset_uid", pa.string()),
        ("n", pa.int8()),
        ("when", pa.timestamp("us")),
        ("v", pa.list_(pa.float32())),
    ]
)
COLUMNS = Columns(SCHEMA, {"d1": "one", "d2": "two"})


@pytest.mark.long
@given(st.text())
def test_any_text_compares_with_itself_only(query: Query, text: str) -> None:
    """A text chooses the cells that hold exactly this text, whatever quotes, ends or wildcards stand in it."""
    donors = query.to_pandas()["donor"]
    for asked in (
        query.where({"donor": text}),
        query.where(col("donor").isin([text, "D1"])),
        query.where(col("donor").contains(text)),
    ):
        found = asked.to_pandas()["donor"]
        assert set(found.dropna()) <= {text, "D1"} | {d for d in donors.dropna() if text in d}
    assert query.where({"donor": text}).count() == sum(d == text for d in donors.dropna())
    assert query.where(~(col("donor") == text)).count() == sum(d != text for d in donors.dropna())
    assert query.where({"dataset": text}).count() == sum(d == text for d in query.to_pandas()["dataset"])


@given(st.text())
def test_any_name_is_a_column_or_refused(query: Query, name: str) -> None:
    """A name that is no column is refused with the columns there are; it never becomes SQL."""
    known = {
        *query.to_pandas().columns,
        "uid",
        "dataset_uid",
        "percent_mt",
        "gene_expression",
        "protein_abundance",
        "embedding",
    }
    if name not in known | {"gene_expression__scaled"}:
        with pytest.raises(QueryError, match="There is no column"):
            query.where({name: "x"})


@given(st.text(alphabet="abn=<>()'\"`;-/* 01,._\\\n", max_size=30))
def test_any_sql_answers_or_is_refused(query: Query, text: str) -> None:
    """SQL text either is a condition or raises QueryError; the atlas stays as it was."""
    try:
        n = query.where(text).where("donor = 'D1'").count()
    except QueryError:
        n = 0
    assert n <= query.where("donor = 'D1'").count()


@pytest.mark.parametrize(
    "text", ["n > 1) OR (1 = 1", "n = 1; DROP TABLE cells", "n = 1 --", "nope = 1", "n >", "'", "1", " "]
)
def test_sql_that_is_no_condition_is_refused(query: Query, text: str) -> None:
    """Text that does not parse, escapes its parentheses or names an unknown column is refused."""
    with pytest.raises(QueryError):
        query.where(text).count()


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        -np.inf,
        object(),
        b"x",
        "\ud800",
        np.datetime64("NaT", "ns"),
        pd.NaT,
        1j,
        dt.timedelta(1),
        np.timedelta64(1, "D"),
    ],
)
def test_values_without_a_literal_are_refused(value: Any) -> None:
    """What no column can be compared with never reaches the atlas."""
    with pytest.raises(QueryError, match="compare"):
        quote_literal(value)


def test_literals_of_every_kind() -> None:
    """Every kind of value has one spelling."""
    spelled = {
        "a'b": "'a''b'",
        True: "TRUE",
        np.bool_(False): "FALSE",
        np.int8(-3): "-3",
        -(2**63): "CAST('-9223372036854775808' AS BIGINT)",
        2.5: "2.5",
        1e-300: "1e-300",
        dt.date(2024, 2, 29): "date '2024-02-29'",
        dt.datetime(2024, 2, 29, 1, 2, 3, 4): "timestamp '2024-02-29 01:02:03.000004'",
        np.datetime64("2024-02-29T01", "ns"): "timestamp '2024-02-29 01:00:00.000000000'",
        dt.datetime(2024, 1, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=2))): "timestamp '2024-01-01 00:00:00'",
    }
    assert [quote_literal(value) for value in spelled] == list(spelled.values())
    assert quote_identifier("a`b") == "`a``b`"


def test_times_compare_to_the_nanosecond(tmp_path: Path) -> None:
    """Each operator, and membership, over a column of nanoseconds answers as NumPy does, whatever digits the value has."""
    times = np.array([f"2024-01-09T00:00:00.{n:09d}" for n in (0, 1, 999, 1000, 1001, 2000)], "datetime64[ns]")
    table = lance.write_dataset(pa.table({"t": times}), tmp_path / "times")
    ways = {
        "=": np.equal,
        "<>": np.not_equal,
        "<": np.less,
        "<=": np.less_equal,
        ">": np.greater,
        ">=": np.greater_equal,
    }
    target = Target("t", pa.timestamp("ns"))
    for value in times:
        for asked in (value, pd.Timestamp(value)):
            for operator, way in ways.items():
                assert table.count_rows(compare(target, operator, asked)) == way(times, value).sum(), (operator, asked)
        assert table.count_rows(is_member(target, [value, times[0]])) == np.isin(times, [value, times[0]]).sum()


@given(
    st.integers(-400, 400) | st.floats(-400, 400).map(lambda v: round(v * 2) / 2),
    st.sampled_from(["=", "<>", "<", "<=", ">", ">="]),
)
def test_numbers_beyond_a_column_compare_as_numbers(value: float, operator: str) -> None:
    """A comparison of an int8 column is never out of its range and never with a fraction."""
    sql = compare(Target("n", pa.int8()), operator, value)
    literal = sql.rsplit(" ", 1)[1]
    assert literal == "`n`" or -128 <= int(literal) <= 127


@pytest.mark.parametrize(
    "made",
    [dt.datetime, pd.Timestamp, lambda *parts: np.datetime64(dt.datetime(*parts), "ns")],
    ids=["datetime", "Timestamp", "datetime64"],
)
def test_a_date_compares_with_a_time_as_its_midnight(made: Any) -> None:
    """The time of day counts: a day is before its noon and never equal to it, but equal to its midnight."""
    noon, midnight, day = made(2024, 1, 1, 12), made(2024, 1, 1), "date '2024-01-01'"
    target = Target("d", pa.date32())
    said = {operator: compare(target, operator, noon) for operator in ("=", "<>", "<", "<=", ">", ">=")}
    assert said == {
        "=": "`d` <> `d`", "<>": "`d` = `d`",
        "<": f"`d` <= {day}", "<=": f"`d` <= {day}", ">": f"`d` > {day}", ">=": f"`d` > {day}",
    }  # fmt: skip
    assert compare(target, "<", midnight) == f"`d` < {day}"
    assert is_member(target, [noon, midnight]) == f"`d` IN ({day})"


def test_a_date_compares_to_the_nanosecond_and_with_any_year() -> None:
    target, late = Target("d", pa.date32()), "2024-01-01T00:00:00.000000001"
    for value in (pd.Timestamp(late), np.datetime64(late)):
        assert compare(target, "<", value) == "`d` <= date '2024-01-01'"
    assert compare(target, "=", dt.datetime(1, 1, 1)) == "`d` = date '0001-01-01'"
    assert compare(target, "=", np.datetime64("2024")) == "`d` = date '2024-01-01'"
    with pytest.raises(QueryError, match="cannot be compared"):
        compare(target, "=", np.datetime64("12024-01-01"))


@pytest.mark.parametrize("zone", ["", "+01:00"])
@pytest.mark.parametrize(
    ("digits", "kind"), [("", dt.datetime), (".000001", dt.datetime), (".000001002", pd.Timestamp)]
)
def test_times_of_json_are_those_of_python_as_far_as_they_go(zone: str, digits: str, kind: type) -> None:
    """Only nanoseconds take pandas; a time with a zone is in UTC."""
    value = value_from_json({"datetime": f"2024-02-29T01:00:00{digits}{zone}"})
    assert type(value) is kind
    assert value == pd.Timestamp(f"2024-02-29T{'00' if zone else '01'}:00:00{digits}")


@pytest.mark.parametrize(
    "make",
    [
        lambda: col("n") == "3",
        lambda: col("n") > True,
        lambda: col("when") < 3,
        lambda: col("v") == 1.0,
        lambda: col("uid") == 1,
        lambda: col("n").contains("x"),
        lambda: col("dataset") == 3,
        lambda: col("nn") == 3,
    ],
)
def test_values_that_do_not_fit_their_column_are_refused(make: Any) -> None:
    """A comparison between kinds is refused when it is written as SQL."""
    with pytest.raises(QueryError):
        make().to_sql(COLUMNS)


@pytest.mark.parametrize(
    "make",
    [
        lambda: bool(col("n") == 3),
        lambda: bool(col("n")),
        lambda: 1 < col("n") < 3,
        lambda: (col("n") == 3) & True,
        lambda: col("n").isin("abc"),
        lambda: col("uid").startswith(3),
        lambda: as_filter(""),
        lambda: as_filter({}),
        lambda: as_filter(3),  # type: ignore[arg-type]
        lambda: as_filter({"n": {"a": 1}}),
        lambda: col("n") < None,
    ],
)
def test_misuse_is_refused_at_once(make: Any) -> None:
    """What Python would quietly turn into something else is refused."""
    with pytest.raises(QueryError):
        make()


def test_nesting_has_an_end() -> None:
    """A filter nested beyond all use is refused instead of exhausting a stack; long flat ones pass."""
    deep = col("n") == 1
    for _ in range(100):
        deep = ~deep
    with pytest.raises(QueryError, match="levels deep"):
        deep.to_sql(COLUMNS)
    wide = col("n") == 0
    for i in range(1000):
        wide = wide | (col("n") == i % 100)
    assert wide.to_sql(COLUMNS).count("OR") == 1000


def test_dataset_names_become_uids() -> None:
    """The virtual column `dataset` is translated; unknown names choose nothing."""
    assert (col("dataset") == "two").to_sql(COLUMNS) == "`dataset_uid` IN ('d2')"
    assert col("dataset").startswith("o").to_sql(COLUMNS) == "`dataset_uid` IN ('d1')"
    assert col("dataset").isin(["three"]).to_sql(COLUMNS) == "FALSE"
    assert col("dataset").is_null().to_sql(COLUMNS) == "FALSE"


def test_conditions_join_with_and(query: Query) -> None:
    """Conditions accumulate; a mapping, an expression, SQL and keywords say the same."""
    asked = query.where({"cell_type": ["B", "T"]}).where(col("percent.mt") < 0.5).where("donor = 'D1'")
    said = query.where((col("cell_type").isin(["T", "B"])) & (col("percent.mt") < 0.5), donor="D1")
    assert asked.count() == said.count() > 0
    assert to_sql([], COLUMNS) is None
    with pytest.raises(QueryError):
        query.where()


def test_missing_values_are_asked_for_by_none(query: Query) -> None:
    """None in a mapping, a list or a comparison means missing, NaN included."""
    frame = query.to_pandas()
    assert query.where({"donor": None}).count() == frame["donor"].isna().sum()
    assert query.where(score=None).count() == frame["score"].isna().sum() > 0
    assert query.where({"donor": ["D1", None]}).count() == (frame["donor"].isna() | (frame["donor"] == "D1")).sum()
    assert query.where(col("donor") != None).count() == frame["donor"].notna().sum()  # noqa: E711
    assert query.where(col("protein_abundance").is_null()).count() == (frame["dataset"] == "second").sum()


def test_a_near_miss_is_named(query: Query) -> None:
    """An unknown column is refused with the columns and the nearest."""
    with pytest.raises(QueryError, match=r"Did you mean 'cell_type'.*percent\.mt"):
        query.where({"celltype": "B"})


def test_filters_travel() -> None:
    """Filters pickle, and say what they are."""
    said = (col("n") > 3) & ~(col("uid").startswith("a") | col("n").is_null()) & col("n").isin(range(20))
    again = pickle.loads(pickle.dumps(said))
    assert again.to_sql(COLUMNS) == said.to_sql(COLUMNS)
    assert repr(again) == repr(said)
    assert "20 in all" in repr(said)


def test_numbers_beyond_a_float_type_and_values_of_other_types(small: Any) -> None:
    """A number beyond float32 is above or below every value; ids are counted; what cannot be compared is refused in every form."""
    query = small.query
    n = int(small.obs["percent.mt"].notna().sum())
    for value in (1e39, 10**400):
        found = [query.where(one).count() for one in (col("percent.mt") < value, col("percent.mt") > -value)]
        assert found == [n, n]
        assert query.where(col("percent.mt") >= value).count() == query.where(col("percent.mt") == value).count() == 0
    assert query.count("uid").tolist() == [1] * len(small.obs)
    assert query.count(["dataset", "cell_name"]).sum() == len(small.obs)
    for wrong in ({"dataset": [1]}, {"dataset": 1}):
        with pytest.raises(QueryError, match="'dataset' are text, got 1"):
            query.where(wrong)
    with pytest.raises(QueryError, match="does not evaluate CASE"):
        query.where("CASE WHEN score > 0 AND donor = 'D1' THEN TRUE ELSE FALSE END")

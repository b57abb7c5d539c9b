"""Laws: NaN and null are one missing value; SQL, expressions and mappings mean the same, by every name that is shown."""

import datetime as dt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.catalog.catalog import create_catalog
from raggedatlas.catalog.snapshots import snapshot
from raggedatlas.errors import QueryError, UnknownValueWarning
from raggedatlas.formats.subset import filter_cells
from raggedatlas.ingest.add import add
from raggedatlas.model.frames import frame_to_arrow
from raggedatlas.query.query import Query
from raggedatlas.store.filters import col
from raggedatlas.store.location import Location
from support.hypothesis_profile import examples

FLOATS = [0.0, 0.25, -1.5, 3.0, np.inf, -np.inf, np.nan]
VALUES: dict[str, list[Any]] = {
    "float64": FLOATS,
    "float32": FLOATS,
    "Float64": [*FLOATS[:-1], None],
    "int32": [-2, 0, 1, 7],
    "Int64": [-2, 0, 1, 2**53 + 1, None],
    "uint8": [0, 1, 255],
    "boolean": [True, False, None],
    "object": ["a", "b", "it's", "", None],
    "category": ["a", "b", None],
}
DTYPES = {"category": pd.CategoricalDtype(["a", "b"])}


@st.composite
def frames(draw: st.DrawFn) -> pd.DataFrame:
    """Draw up to seven cells with one column of each dtype."""
    n = draw(st.integers(1, 7))
    columns = {
        f"my.{dtype}": pd.Series(
            draw(st.lists(st.sampled_from(values), min_size=n, max_size=n)), dtype=DTYPES.get(dtype, dtype)
        )
        for dtype, values in VALUES.items()
    }
    return pd.DataFrame(columns).set_axis([f"c{i}" for i in range(n)])


def known(values: pd.Series, holds: Any) -> list[bool | None]:
    """Decide a condition value by value; None where the value is missing."""
    return [None if pd.isna(v) else bool(holds(v)) for v in values.astype(object)]


def opposite(decided: list[bool | None]) -> list[bool | None]:
    return [None if one is None else not one for one in decided]


def conditions(name: str, values: pd.Series, value: Any) -> list[tuple[Any, str, list[bool | None]]]:
    """Return conditions on a column as (expression or mapping, SQL, what they mean)."""
    column, quoted = col(name), f'"{name}"'
    literal = "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value).upper()
    equal = known(values, lambda v: v == value)
    found = [
        (column == value, f"{quoted} = {literal}", equal),
        ({name: [value]}, f"{quoted} IN ({literal})", equal),
        (~(column == value), f"NOT {quoted} = {literal}", opposite(equal)),
        (column != value, f"`{name}` <> {literal}", opposite(equal)),
        ({name: None}, f"{quoted} IS NULL", [one is None for one in equal]),
        (~column.is_null(), f"{quoted} IS NOT NULL", [one is not None for one in equal]),
    ]
    if not isinstance(value, bool):
        less = known(values, lambda v: v < value)
        found += [
            (column < value, f"{literal} > {quoted}", less),
            (~(column < value), f"NOT ({quoted} < {literal})", opposite(less)),
            ((column >= value) & (column <= value), f"{quoted} BETWEEN {literal} AND {literal}", equal),
        ]
    return found


def atlas_of(folder: Path, obs: pd.DataFrame, name: str = "one") -> Query:
    """Make an atlas of one dataset with these cells and one gene."""
    catalog = create_catalog(Location(str(folder)))
    file = ad.AnnData(np.ones((len(obs), 1), np.float32), obs=obs, var=pd.DataFrame(index=["CD4"]))
    add(catalog, file, {"name": name}, False)
    return Query(catalog.at(snapshot(catalog)))


@pytest.mark.nightly
@examples(5)
@pytest.mark.filterwarnings("ignore::raggedatlas.errors.UnknownValueWarning")
@given(frames(), st.data())
def test_every_kind_of_filter_keeps_the_same_cells(frame: pd.DataFrame, data: st.DataObject) -> None:
    """SQL, expressions and mappings agree with three-valued logic, over files and over an atlas, whatever the dtype."""
    with TemporaryDirectory() as folder:
        query = atlas_of(Path(folder) / "atlas", frame)
        for dtype, values in VALUES.items():
            asked = [v for v in values if not pd.isna(v) and not (isinstance(v, float) and np.isinf(v))]
            kinds = conditions(f"my.{dtype}", frame[f"my.{dtype}"], data.draw(st.sampled_from(asked)))
            condition, sql, meaning = data.draw(st.sampled_from(kinds))
            expected = [name for name, one in zip(frame.index, meaning, strict=True) if one is True]
            assert query.where(sql).to_pandas()["cell_name"].tolist() == expected, sql
            assert query.where(condition).to_pandas()["cell_name"].tolist() == expected, condition
        rows = np.flatnonzero([one is True for one in meaning]).tolist()
        assert filter_cells(frame_to_arrow(frame), sql).tolist() == rows
        assert filter_cells(frame_to_arrow(frame), condition).tolist() == rows


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Query:
    """Cells with every kind of missing number, and names that SQL cannot have unquoted."""
    obs = pd.DataFrame(
        {
            "score": [0.75, np.nan, 0.25, np.inf, -np.inf],
            "nullable": pd.array([1.0, None, np.nan, 2.0, 0.5], dtype="Float64"),
            "percent.mt": [1.0, 2.0, np.nan, 4.0, 5.0],
            "percent_mt": [5.0, 4.0, 3.0, 2.0, 1.0],
            "ünï": ["a", "b", "c", "d", None],
            "two words": [1, 2, 3, 4, 5],
            "end": [1, 2, 3, 4, 5],
            "a`b'c\"d": [1, 2, 3, 4, 5],
            "Date": ["x", "y", "x", "y", "x"],
            "kind": pd.Categorical(["B cell", "T cell", "B cell", "NK", None]),
        },
        index=list("abcde"),
    )
    return atlas_of(tmp_path_factory.mktemp("missing") / "atlas", obs, "lung_C144")


def names(query: Query) -> str:
    return "".join(query.to_pandas()["cell_name"])


@pytest.mark.parametrize(
    ("sql", "cells"),
    [
        ("score > 0.5", "ad"),
        ("score IS NULL", "b"),
        ("NOT score > 0.5", "ce"),
        ("isnan(score)", "b"),
        ("nanvl(score, 9.0) > 5", "bd"),
        ("score + 0.0 > 0.5", "ad"),
        ("abs(score) BETWEEN 0 AND 1", "ac"),
        ("coalesce(score, 0.0) = 0", "b"),
        ("nullable IS NULL", "bc"),
        ("nullable >= 0", "ade"),
        ("percent.mt > 1", "bde"),
        ('"percent.mt" > 1', "bde"),
        ("`percent.mt` IS NULL OR `percent.mt` IN (1)", "ac"),
        ("percent_mt > 3", "ab"),
        ("percent_mt > percent.mt", "ab"),
        ("ünï = 'b'", "b"),
        ("\"ünï\" LIKE 'c%'", "c"),
        ('"two words" > 2.5', "cde"),
        ("`two words` % 2 = 0", "bd"),
        ("end = 3", "c"),
        ("date = 'y'", "bd"),
        ("Date IN ('y', 'x') AND upper(Date) = 'Y'", "bd"),
        ("cell_name = 'a'", "a"),
        ("dataset = 'lung_C144'", "abcde"),
        ("dataset LIKE 'lung%' AND score > 0.5", "ad"),
        ("starts_with(dataset, 'lung')", "abcde"),
        ("dataset <> 'lung_C144' OR dataset IS NULL", ""),
        ("DATASET IN ('lung_C144') AND KIND = 'NK'", "d"),
        ("kind IN ('B cell', NULL)", "ac"),
        ("CAST(percent.mt AS int) = 4", "d"),
        ("kind = 'it''s -- no comment; really' OR end = 1", "a"),
    ],
)
@pytest.mark.filterwarnings("ignore::raggedatlas.errors.UnknownValueWarning")
def test_sql_knows_the_names_that_are_shown(scored: Query, sql: str, cells: str) -> None:
    """Columns are named as results show them, quoted or not, and a NaN is missing in any expression."""
    assert names(scored.where(sql)) == cells
    assert scored.where(sql).count() == len(cells)


def test_every_column_of_a_result_is_a_column_of_filters(scored: Query) -> None:
    """What a result's obs shows can be used in SQL, expressions and mappings, by the name that it has there."""
    obs = scored.to_anndata().obs.reset_index()
    for name in [*obs.columns, "dataset_uid"]:
        quoted = name.replace('"', '""')
        here = scored.where(f'"{quoted}" IS NOT NULL').count()
        assert here == scored.where(~col(name).is_null()).count()
        assert scored.where({name: None}).count() == len(obs) - here
        if name != "dataset_uid":
            assert here == int(obs[name].notna().sum())
    for name in ("dataset", "layout_uid", "cell_name", "uid"):
        value = str(obs[name].iloc[0])
        found = [scored.where(one).count() for one in (f"{name} = '{value}'", {name: value}, col(name) == value)]
        assert found == [int((obs[name] == value).sum())] * 3


FILLED = ["uid", "cell_name", "dataset", "dataset_uid", "layout_uid", "_rowid_"]


@given(
    taken=st.lists(st.sampled_from([*FILLED, *(f"{name}_" for name in FILLED)]), min_size=1, max_size=5, unique=True)
)
@examples(4)
@pytest.mark.filterwarnings("ignore::raggedatlas.errors.UnknownValueWarning")
def test_every_output_shows_one_table_by_which_its_cells_are_found(taken: list[str]) -> None:
    """An export that is added again has columns that results fill: all outputs show the same table, and a filter by what is shown finds the cell."""
    obs = pd.DataFrame({name: [f"{name} of {i}" for i in range(3)] for name in taken}, index=["a", "b", "c"])
    file = ad.AnnData(np.ones((3, 2), np.float32), obs=obs, var=pd.DataFrame(index=["g", "h"]))
    file.raw = ad.AnnData(np.ones((3, 3), np.float32), obs=obs, var=pd.DataFrame(index=["g", "h", "i"]))
    with TemporaryDirectory() as folder:
        catalog = create_catalog(Location(f"{folder}/atlas"))
        add(catalog, file, {"name": "one"}, False)
        query = Query(catalog.at(snapshot(catalog)))
        shown = query.layers("counts").to_anndata().obs
        table = query.to_pandas()
        assert set(shown) - set(table) == {"layout_uid"}
        batch = next(query.layers("counts").batches(3)).obs.to_pandas().set_index("uid")
        written = ad.read_h5ad(query.layers("counts").write(f"{folder}/x.h5ad")).obs
        for other in (table, batch, query.to_arrow().to_pandas().set_index("uid"), written):
            for name in other:
                assert other[name].astype(str).tolist() == shown[name].astype(str).tolist(), name
        for layer in ("counts", "raw"):
            for name, values in query.layers(layer).to_anndata().obs.reset_index().astype(str).items():
                for i, value in enumerate(values):
                    found = query.where({name: value}).to_pandas()
                    assert shown.index[i] in found.index
                    assert len(found) == int((values == value).sum())
                    assert query.where(col(name) != value).count() == len(values) - len(found)


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("scor > 1", "Did you mean 'score'"),
        ('"scor" > 1', "Did you mean 'score'"),
        ('kind = "B cell"', "single quotes"),
        ("score > 1 -- all", "comment"),
        ("score > 1; DROP TABLE cells", "nothing is understood"),
        ("score > $1", "nothing is understood"),
        ("kind = N'x'", "directly before a quote"),
        ("(score > 1", "missing at the end"),
        ("score > 1)", "closes nothing"),
        ("score > 1 AND", "a condition is missing"),
        ("NOT " * 60 + "score > 1", "nests"),
        ("(" * 60 + "score > 1" + ")" * 60, "nests"),
    ],
)
def test_sql_that_cannot_be_understood_is_refused_by_where(scored: Query, sql: str, words: str) -> None:
    """A misspelt column, text in double quotes, comments and unfinished conditions are refused before anything is read."""
    with pytest.raises(QueryError, match=words):
        scored.where(sql)


def test_missing_numbers_sort_last_and_make_one_group(scored: Query) -> None:
    """NaN and null sort behind every number in table order, and are one group of count, aggregate and sample."""
    assert names(scored.order_by("score")) == "ecadb"
    assert names(scored.order_by("nullable", descending=True)) == "daebc"
    assert scored.count("nullable").tolist() == [1, 1, 1, 2]
    groups = scored.aggregate("nullable").obs
    assert groups["n_cells"].tolist() == [1, 1, 1, 2]
    assert groups.index[-1] == "(missing)"
    assert scored.sample(1, by="nullable").count() == 4


def test_nan_comes_back_as_nan(scored: Query) -> None:
    """A filter changes no value: NaN of the file is NaN in results."""
    assert np.isnan(scored.where("score IS NULL").to_pandas()["score"]).tolist() == [True]
    assert np.isposinf(scored.where("score > 1").to_pandas()["score"]).tolist() == [True]


@pytest.mark.parametrize(
    "condition", ["kind = 'b cell'", {"kind": "b cell"}, col("kind") == "b cell", "kind IN ('NK', 'b cell')"]
)
def test_a_misspelt_value_is_answered_with_near_ones(scored: Query, condition: Any) -> None:
    """A text that no cell has warns with the near matches, in every kind of filter; where it warns is the caller's line."""
    with pytest.warns(UnknownValueWarning, match=r"No cell has kind 'b cell'\. Did you mean 'B cell'") as caught:
        scored.where(condition).count()
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "condition", ["dataset = 'lung_C14'", {"dataset": ["lung_C14"]}, ~(col("dataset") == "lung_C14")]
)
def test_a_misspelt_dataset_is_answered_with_near_ones(scored: Query, condition: Any) -> None:
    """A dataset that is not there warns with the near names."""
    with pytest.warns(UnknownValueWarning, match="Did you mean 'lung_C144'"):
        scored.where(condition).to_pandas()


def test_a_misspelt_text_warns_where_nothing_is_found(scored: Query) -> None:
    """Columns of plain text are read for near matches only where a query finds no cell."""
    with pytest.warns(UnknownValueWarning, match="Values are 'a', 'b', 'c', 'd'"):
        scored.where({"ünï": "zz"}).count()
    assert scored.where(col("ünï").isin(["zz", "a"])).count() == 1
    assert scored.where({"uid": "0" * 16}).count() == 0


def test_times_are_compared(tmp_path: Path) -> None:
    """Columns of times, with and without a zone, and of spans are stored, filtered and given back as they were."""
    days = pd.to_datetime(["2024-01-01", None, "2024-01-03"])
    obs = pd.DataFrame(
        {
            "when": days,
            "zoned": days.tz_localize("Europe/Vienna"),
            "utc": days.tz_localize("UTC"),
            "span": pd.to_timedelta([1, None, 90], unit="min"),
        },
        index=list("abc"),
    )
    query = atlas_of(tmp_path / "atlas", obs)
    found = query.to_pandas().set_index("cell_name")
    for name in obs:
        pd.testing.assert_series_equal(found[name], obs[name], check_names=False, check_index=False)
        assert names(query.where({name: None})) == "b" == names(query.where(f"{name} IS NULL"))
        assert names(query.order_by(name, descending=True)) == "cab"
    day = dt.datetime(2024, 1, 2, tzinfo=dt.UTC)
    assert names(query.where(col("zoned") > day)) == names(query.where(col("utc") > day)) == "c"
    assert names(query.where("utc > timestamp '2024-01-02 00:00:00'")) == "c"
    assert names(query.where(col("span") <= dt.timedelta(minutes=1))) == "a"
    assert names(query.where({"span": [pd.Timedelta("90min"), np.timedelta64(5, "s")]})) == "c"


WIDE = {
    "small": (np.int64, 7),
    "unsigned": (np.uint64, 9),
    "wide": (np.uint64, 2**40 + 1),
    "widest": (np.uint64, 2**53 + 2),
}


def test_values_decide_whether_integers_join_with_nan(tmp_path: Path) -> None:
    """Integers of 64 bits join with NaN where every value that is stored fits a float64; a dataset that has others is named."""
    atlas = RaggedAtlas.create(tmp_path / "a.atlas")
    for i, (name, (dtype, value)) in enumerate(WIDE.items()):
        for key in ("X", "layers"):
            # Negative whole numbers keep the dtype of the file in a layer with a name.
            x = np.array([[value, 1], [0, -3 if name == "small" and key == "layers" else 3]], dtype)
            file = ad.AnnData(x if key == "X" else np.ones_like(x), var=pd.DataFrame(index=["g", f"h{i}"]))
            file.obs_names = ["a", "b"]
            if key == "layers":
                file.layers["d"] = x
            atlas.add(
                file,
                f"{name} {key}",
                layers={"X": "counts"} if key == "X" else {"X": "counts", "layers/d": "d"},
                progress=False,
            )
    view = atlas.checkout(atlas.snapshot())
    for key, layer in (("X", "counts"), ("layers", "d")):
        query = view.query().layers(layer)
        fit = [f"{name} {key}" for name in ("small", "unsigned", "wide")]
        for names in (fit[:2], fit):
            for missing in ("nan", "zero"):
                made = query.where(dataset=names).missing(missing).to_anndata()
                found = made.to_df().loc[:, "g"].tolist()
                assert [int(v) for v in found] == [v for name in names for v in (WIDE[name.split()[0]][1], 0)]
                assert made.X.dtype.kind in ("f" if missing == "nan" else "iu")
        everything = query.where(dataset=[*fit, f"widest {key}"])
        with pytest.raises(
            QueryError, match=rf"dataset 'widest {key}', whose values go up to 9,007,199,254,740,994.*missing\('zero'\)"
        ):
            everything.missing("nan").to_anndata()
        exact = everything.missing("zero").to_anndata()
        assert exact.X.dtype.kind in "iu"
        assert int(exact.to_df()["g"].max()) == 2**53 + 2

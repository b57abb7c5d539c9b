"""Laws of cell columns: every one stands in the report, none changes a value, every refusal names its fix."""

import datetime as dt
import re
from pathlib import Path
from typing import Literal

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.errors import ArgumentError, CorruptError, NameRefusedError, SchemaError
from raggedatlas.model.frames import arrow_to_frame, frame_to_arrow
from raggedatlas.model.ids import RESERVED
from raggedatlas.model.schemas import HoxBaseSchema
from raggedatlas.model.spaces import DenseZarrPointer, FeatureSpace, PointerKind, SparseZarrPointer
from raggedatlas.store.storage_errors import refused_columns


class Wanted(HoxBaseSchema):
    """A schema with one column that every file must bring, and one that it may."""

    cell_type: str
    age: int | None = None
    gene_expression: SparseZarrPointer | None = None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"age": int}, "declares no pointer field"),
        ({"lengths": SparseZarrPointer | None}, "'lengths', which is not registered"),
        (
            {"gene_expression": DenseZarrPointer | None},
            "is a dense pointer, but the feature space 'gene_expression' is sparse",
        ),
        ({"gene_expression": SparseZarrPointer | None, "image": object}, "image"),
    ],
)
def test_a_schema_is_checked_when_it_is_defined(fields: dict[str, object], message: str) -> None:
    """A class without a pointer, with one into an unknown space or of the wrong kind, or with a type that no column has is not made."""
    namespace = {"__annotations__": fields, "__module__": __name__, **dict.fromkeys(fields)}
    with pytest.raises(SchemaError, match=message):
        type("Refused", (HoxBaseSchema,), namespace)


def with_obs(seed: int = 0, **columns) -> ad.AnnData:
    n = len(next(iter(columns.values())))
    x = np.random.default_rng(seed).poisson(1, (n, 3)).astype(np.float32)
    obs = pd.DataFrame(columns, index=[f"c{i}" for i in range(n)])
    return ad.AnnData(x, obs=obs, var=pd.DataFrame(index=["a", "b", "c"]))


def cells(atlas: RaggedAtlas) -> pd.DataFrame:
    frame: pd.DataFrame = atlas._catalog.tables.read("cells").to_pandas()
    return frame


def test_every_column_stands_in_the_report(atlas) -> None:  # noqa: ANN001
    """Kept, renamed and left-out columns are listed one by one, with where they are now."""
    given = with_obs(**{"percent.mt": [1.0, 2.0], "uid": ["x", "y"], "n": [1, 2], "gene_expression": [1, 2]})
    report = atlas.add(given, "d", progress=False)
    assert {(c.name, c.fate, c.stored_as) for c in report.columns} == {
        ("percent.mt", "renamed", "percent_mt"),
        ("uid", "renamed", "obs_uid"),
        ("n", "kept", "n"),
        ("gene_expression", "renamed", "obs_gene_expression"),
    }
    report = atlas.add(with_obs(1, a=[1, 2], b=[1, 2]), "e", obs=["b"], progress=False)
    assert [(c.name, c.fate) for c in report.columns] == [("a", "left out"), ("b", "kept")]
    assert list(atlas.dataset("e").obs.columns) == ["a", "b"]
    report = atlas.add(with_obs(2, a=[1, 2], b=[1, 2]), "f", obs={"a": "z"}, progress=False)
    assert [(c.name, c.fate, c.stored_as) for c in report.columns] == [("a", "renamed", "z"), ("b", "kept", "b")]


def test_names_that_meet_in_one_file_stay_apart(atlas) -> None:  # noqa: ANN001
    """Two columns whose table names would be equal get different ones, and both keep their values."""
    report = atlas.add(with_obs(**{"a.b": [1, 2], "a_b": [3, 4], "a b": [5, 6]}), "d", progress=False)
    stored = [c.stored_as for c in report.columns]
    assert len(set(stored)) == 3
    assert cells(atlas)[stored].to_numpy().tolist() == [[1, 3, 5], [2, 4, 6]]


def test_a_later_column_is_null_for_earlier_cells(atlas) -> None:  # noqa: ANN001
    """A column that comes with a later file is null in the cells that were there, and the other way round."""
    atlas.add(with_obs(old=["x", "y"]), "d", progress=False)
    atlas.add(with_obs(1, new=pd.Categorical(["p", "q"])), "e", progress=False)
    frame = cells(atlas)
    assert frame["old"].isna().tolist() == [False, False, True, True]
    assert frame["new"].isna().tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([1, 2], ["a", None]),
        (["a", "b"], [1.5, np.nan]),
        ([1, 2], [0.5, 1.5]),
        ([True, False], [1, 0]),
        ([1, 2], pd.to_datetime(["2024-01-01", None])),
    ],
)
def test_a_type_conflict_is_refused_with_its_mends(atlas, unchanged, first, second) -> None:  # noqa: ANN001
    """A column of another type is refused; every way out that the message names works, and what is missing stays missing."""
    atlas.add(with_obs(c=first), "d", progress=False)
    with unchanged(atlas), pytest.raises(SchemaError) as error:
        atlas.add(with_obs(1, c=second), "e", progress=False)
    ways = re.findall(r"\w+=(?:\{.*?\}|'\w+')|'rename'", str(error.value))
    assert len(ways) >= 2
    for i, way in enumerate(ways):
        options = {"on_clash": "rename"} if way == "'rename'" else eval(f"dict({way})")
        report = atlas.add(with_obs(i + 2, c=second), f"e{i}", progress=False, **options)
        given = cells(atlas).set_index("dataset_uid").loc[report.dataset_uid, report.columns[0].stored_as]
        assert given.isna().tolist() == pd.Series(second).isna().tolist()


REFUSED = {
    "mixed": pd.Series(["1", 2, None], dtype=object),
    "lists": pd.Series([[1], [2, 3], None], dtype=object),
    "period": pd.Series(pd.PeriodIndex(["2020-01", None, "2020-02"], freq="M")),
    "dates": pd.Series(pd.Categorical(pd.to_datetime(["2020-01-02", None, "2021-01-01"]))),
    "interval": pd.Series(pd.cut([1, np.nan, 3], 2)),
    "complex": pd.Series([1 + 2j, np.nan, 0]),
    "sparse": pd.Series(pd.arrays.SparseArray([1.0, np.nan, 0])),
    "big": pd.Series([2**70, None, 1], dtype=object),
    "late": pd.Series([dt.date(9999, 1, 1), None, None], dtype=object),
}


@pytest.mark.parametrize("name", REFUSED)
def test_columns_that_no_atlas_holds_are_refused_with_a_cast_that_keeps_what_is_missing(name: str) -> None:
    """The statement in the message makes such a column one that fits."""
    obs = pd.DataFrame({name: REFUSED[name]}).set_axis(["a", "b", "c"])
    with pytest.raises(SchemaError) as error:
        frame_to_arrow(obs)
    missing = obs[name].isna().tolist()
    exec(re.search(r"obs\[.*\)", str(error.value))[0], {"obs": obs})  # type: ignore[index]
    assert frame_to_arrow(obs).column(name).is_null().to_pylist() == obs[name].isna().tolist() == missing


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([True, None, False], "boolean"),
        ([1, np.nan, 2**60 + 1], "Int64"),
        ([1, 2.5, pd.NA], "float64"),
        ([dt.date(2020, 1, 2), None, dt.date(2021, 1, 2)], "datetime64[ns]"),
        ([pd.Timestamp("2020-01-02", tz="UTC"), pd.NaT, pd.NA], "datetime64[ns, UTC]"),
        ([dt.timedelta(1), None, dt.timedelta(2)], "timedelta64[ns]"),
    ],
)
def test_objects_of_one_kind_are_a_column_of_it(values, dtype) -> None:  # noqa: ANN001
    """Objects with missing ones among them come back exactly, in the type that pandas has for them."""
    given = pd.Series(values, dtype=object, index=["a", "b", "c"])
    back = arrow_to_frame(frame_to_arrow(given.to_frame("c")))["c"]
    assert str(back.dtype) == dtype
    wanted = [pd.Timestamp(v) if type(v) is dt.date else v for v in given[given.notna()]]
    assert (back.isna().tolist(), back.dropna().tolist()) == (given.isna().tolist(), wanted)


def test_values_that_do_not_fit_are_refused_before_anything_is_written(atlas, unchanged) -> None:  # noqa: ANN001
    """An integer that a column of floats cannot hold is refused, and leaves the atlas as it was."""
    atlas.add(with_obs(c=[0.5, 1.5]), "d", progress=False)
    atlas.add(with_obs(1, c=[1, 2]), "e", progress=False)
    with unchanged(atlas), pytest.raises(SchemaError, match="without changing a value"):
        atlas.add(with_obs(2, c=[2**53 + 1, 0]), "f", progress=False)


@pytest.mark.parametrize(
    ("cast", "given", "expected"),
    [
        ("str", [1, 2], ["1", "2"]),
        ("int", [1.0, 2.0], [1, 2]),
        ("float", [1, 2], [1.0, 2.0]),
        ("str", [True, False], ["true", "false"]),
    ],
)
def test_a_cast_is_done_and_reported(atlas, cast, given, expected) -> None:  # noqa: ANN001
    """cast= changes the stored type alone; the file's own frame keeps its own."""
    report = atlas.add(with_obs(c=given), "d", cast={"c": cast}, progress=False)
    assert report.columns[0].fate == "cast"
    assert cells(atlas)["c"].tolist() == expected
    assert atlas.dataset("d").obs["c"].tolist() == given


def test_of_many_columns_some_are_chosen(atlas) -> None:  # noqa: ANN001
    """Of more than 200 columns those chosen are added; the others stay in the dataset's own frame."""
    given = with_obs(**{f"c{i}": [i, i] for i in range(201)})
    report = atlas.add(given, "d", obs=["c7"], progress=False)
    assert sum(c.fate == "kept" for c in report.columns) == 1
    assert len(report.columns) == 201
    pd.testing.assert_frame_equal(atlas.dataset("d").obs, given.obs)


def test_required_columns_are_asked_for(tmp_path, unchanged) -> None:  # noqa: ANN001
    """With a schema class, a file without a required column is refused, and mapping one of its own mends it."""
    atlas = RaggedAtlas.create(str(tmp_path / "typed"), Wanted)
    given = with_obs(kind=["T", "B"], age=[3, 4])
    with unchanged(atlas), pytest.raises(SchemaError, match="'cell_type'"):
        atlas.add(given, "d", progress=False)
    atlas.add(given, "d", obs={"kind": "cell_type"}, progress=False)
    again = RaggedAtlas.open(str(tmp_path / "typed"))
    again.add(with_obs(1, cell_type=["T", "T"], more=[1, 2]), "e", progress=False)
    frame = cells(again)
    assert frame["cell_type"].tolist() == ["T", "B", "T", "T"]
    assert frame["age"].isna().tolist() == [False, False, True, True]


def test_literals_have_values_of_one_type(tmp_path: Path) -> None:
    """A Literal is a column of the type of its values; one with values of several types is refused as no column."""

    class OneType(HoxBaseSchema):
        stage: Literal["early", "late"] | None = None
        gene_expression: SparseZarrPointer | None = None

    atlas = RaggedAtlas.create(str(tmp_path / "one"), OneType)
    atlas.add(with_obs(stage=["late", None]), "d", progress=False)
    assert cells(atlas)["stage"].isna().tolist() == [False, True]
    with pytest.raises(SchemaError, match=r"which no column can hold.*Literal of values of one of them"):

        class SeveralTypes(HoxBaseSchema):
            stage: Literal["early", 1]
            gene_expression: SparseZarrPointer | None = None


def test_missing_values_in_a_required_column_are_refused(tmp_path, unchanged) -> None:  # noqa: ANN001
    """A required column may not be null in any cell."""
    atlas = RaggedAtlas.create(str(tmp_path / "typed"), Wanted)
    with unchanged(atlas), pytest.raises(SchemaError, match="cell_type"):
        atlas.add(with_obs(cell_type=["T", None]), "d", progress=False)


def test_numbers_of_foreign_byte_order_are_kept(atlas) -> None:  # noqa: ANN001
    """Numbers in the byte order of another machine keep their values, in the order of this one."""
    atlas.add(with_obs(i=np.array([1, 2], ">i4"), f=np.array([0.5, np.nan], ">f8")), "d", progress=False)
    found = atlas.dataset("d").obs
    assert (found["i"].dtype, found["i"].tolist()) == (np.dtype("=i4"), [1, 2])
    np.testing.assert_array_equal(found["f"], [0.5, np.nan])


INTEGERS, TEXTS, REALS = [1, 2], ["old", None], [0.5, 2.0]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("order", [(INTEGERS, TEXTS, REALS), (TEXTS, INTEGERS, REALS), (REALS, TEXTS, INTEGERS)])
def test_clashing_columns_become_text(atlas, order, together) -> None:  # noqa: ANN001
    """With on_clash="text" a column of numbers here and text there is text for all cells, whichever comes first."""
    files = [with_obs(i, age=values, n=[1, 2]) for i, values in enumerate(order)]
    if together:
        reports = atlas.add(files, on_clash="text", progress=False)
    else:
        reports = [atlas.add(file, f"d{i}", on_clash="text", progress=False) for i, file in enumerate(files)]
    notes = [next(c.note for c in report.columns if c.name == "age") for report in reports]
    assert any("text as on_clash='text' asks" in note for note in notes)
    text = {str(INTEGERS): ["1", "2"], str(TEXTS): TEXTS, str(REALS): ["0.5", "2"]}
    frame = cells(atlas)
    frame = frame.astype({"age": object}).where(frame.notna(), None)
    for report, values in zip(reports, order, strict=True):
        assert frame["age"][frame["dataset_uid"] == report.dataset_uid].tolist() == text[str(values)]
        own = atlas.dataset(report.dataset_uid).obs["age"]
        assert own.astype(object).where(own.notna(), None).tolist() == values
    assert sorted(frame.columns) == sorted(["uid", "dataset_uid", "cell_name", "age", "n", "gene_expression"])
    assert [p for p in atlas.validate("deep") if p.rule != "unassigned-index"] == []


@pytest.mark.long
def test_clashing_columns_are_kept_apart(atlas) -> None:  # noqa: ANN001
    """With on_clash="rename" each type of a column has a cell column of its own, the same one for every later file."""
    orders = [INTEGERS, TEXTS, TEXTS, REALS, [True, False], TEXTS]
    reports = [
        atlas.add(with_obs(i, age=values), f"d{i}", on_clash="rename", progress=False)
        for i, values in enumerate(orders)
    ]
    stored = [report.columns[0].stored_as for report in reports]
    assert stored == ["age", "age_text", "age_text", "age_float", "age_bool", "age_text"]
    assert "kept apart as on_clash='rename' asks" in reports[1].columns[0].note
    assert cells(atlas)["age_text"].notna().sum() == 3


def test_a_clash_is_refused_by_default_and_where_text_cannot_help(atlas, unchanged) -> None:  # noqa: ANN001
    """The refusal names the policies; a column that the schema of the atlas declares keeps its type; other words are refused."""
    atlas.add(with_obs(0, age=INTEGERS), "d", progress=False)
    with unchanged(atlas), pytest.raises(SchemaError, match="on_clash='text' or 'rename'"):
        atlas.add(with_obs(1, age=TEXTS), "e", progress=False)
    with unchanged(atlas), pytest.raises(ArgumentError, match="takes on_clash as"):
        atlas.add(with_obs(1, age=TEXTS), "e", on_clash="nonsense", progress=False)


def test_a_declared_column_does_not_become_text(tmp_path) -> None:  # noqa: ANN001
    """A column of the atlas's own schema keeps its type under on_clash="text"; "rename" puts the file's values next to it."""
    atlas = RaggedAtlas.create(str(tmp_path / "a"), Wanted)
    given = with_obs(0, cell_type=["T", "B"], age=["old", "young"])
    with pytest.raises(SchemaError, match="as the schema of the atlas declares it"):
        atlas.add(given, "d", on_clash="text", progress=False)
    report = atlas.add(given, "d", on_clash="rename", progress=False)
    assert [c.stored_as for c in report.columns] == ["cell_type", "age_text"]


def test_names_that_lance_reserves_are_stored_under_others(atlas) -> None:  # noqa: ANN001
    """Results show them under their own names, filters find them, and the atlas can be written again."""
    names = [*RESERVED]
    assert refused_columns(pa.schema([pa.field(name, pa.int64()) for name in names])).keys() == {*names}
    for n, table in enumerate((with_obs(0, **{name: [1, 2] for name in names}), with_obs(1, k=["x", "y"]))):
        report = atlas.add(table, f"d{n}", progress=False)
        atlas.snapshot()
        if not n:
            assert [(c.name, c.stored_as) for c in report.columns] == [(name, f"obs_{name}") for name in names]
    view = atlas.checkout(2)
    assert {*names} <= {*view.query().to_anndata().obs} & {*view.query().to_pandas()}
    assert [view.query().where(**{name: 2}).count() for name in names] == [1] * len(names)
    assert atlas.validate("deep") == []


@pytest.mark.parametrize("name", ["_rowid", "_rowoffset"])
def test_a_column_that_lance_reserves_is_refused_and_repaired(atlas, name: str) -> None:  # noqa: ANN001
    """No road adds one to a table; one that something else has added keeps snapshots from being taken until `repair` drops it."""
    atlas.add(with_obs(a=[1, 2]), "d", progress=False)
    field, catalog = pa.field(name, pa.int64()), atlas._catalog
    with pytest.raises(SchemaError, match=name):
        catalog.tables.add_columns("cells", [field])
    with pytest.raises(SchemaError, match=name):
        catalog.tables.fill_columns("cells", lambda _: pa.table({name: [1, 2]}).to_reader())
    with pytest.raises(NameRefusedError, match=name):
        FeatureSpace(name=name, kind=PointerKind.DENSE, has_features=False)
    catalog.tables.open("cells").add_columns(pa.schema([field]))
    with pytest.raises(CorruptError, match="repair"):
        atlas.snapshot()
    assert not atlas.list_versions()
    assert name in str(atlas.repair().notes)
    atlas.snapshot()
    assert atlas.validate("deep") == []

"""Laws: a query equals an independent computation with pandas on the same files."""

import operator
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.query.cells import cell_columns
from raggedatlas.store.filters import Filter, col

pytestmark = pytest.mark.filterwarnings("ignore::raggedatlas.errors.UnknownValueWarning")

Predicate = tuple[Filter, Any, str]
"""The filter as an expression, what it means in three-valued logic, and the filter as SQL."""

OPERATORS = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
WHOLE = [-(2**63), -(2**70), -1, 0, 1, 3, 2.5, -0.5, 3.0, 2**63 - 1, 2**64]
TEXTS = ["B", "T", "NK", "", "zzz", "it's", "D1", "50%_`x`", "_", "%", "first", "second"]


def kleene(values: pd.Series, holds: Any) -> Any:
    """Compare value by value; missing ones are unknown."""
    return pd.array([pd.NA if pd.isna(v) else bool(holds(v)) for v in values.astype(object)], dtype="boolean")


def literal(value: Any) -> str:
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)


def compare(name: str, symbol: str, value: Any) -> Predicate:
    function = OPERATORS[symbol]
    text = f"{name} {symbol} {literal(value)}"
    return function(col(name), value), lambda obs: kleene(obs[name], lambda v: function(exact(v), value)), text


def exact(value: Any) -> Any:
    return int(value) if isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_)) else value


def among(name: str, values: list[Any]) -> Predicate:
    text = f"{name} IN ({', '.join(map(literal, values))})" if values else f"{name} <> {name}"
    return col(name).isin(values), lambda obs: kleene(obs[name], lambda v: exact(v) in values), text


def null(name: str) -> Predicate:
    text = f'"{name}" IS NULL'
    return col(name).is_null(), lambda obs: pd.array(obs[name].isna().to_numpy(), dtype="boolean"), text


def text(name: str, how: str, value: str) -> Predicate:
    holds = {"startswith": lambda v: v.startswith(value), "contains": lambda v: value in v}[how]
    function = {"startswith": "starts_with", "contains": "contains"}[how]
    return getattr(col(name), how)(value), lambda obs: kleene(obs[name], holds), f"{function}({name}, {literal(value)})"


names = st.sampled_from(["cell_type", "donor", "dataset", "stage"])
symbols = st.sampled_from(sorted(OPERATORS))
leaves = st.one_of(
    st.builds(compare, names.filter(lambda n: n != "stage"), symbols, st.sampled_from(TEXTS)),
    st.builds(compare, st.just("n"), symbols, st.sampled_from(WHOLE)),
    st.builds(compare, st.just("score"), symbols, st.one_of(st.sampled_from([0.0, 1, -1]), st.floats(-3, 3))),
    st.builds(compare, st.just("flag"), st.sampled_from(["==", "!="]), st.booleans()),
    st.builds(among, names, st.lists(st.sampled_from(TEXTS), max_size=4)),
    st.builds(among, st.just("n"), st.lists(st.sampled_from(WHOLE), max_size=4)),
    st.builds(null, st.sampled_from(["cell_type", "donor", "score", "flag", "n", "stage", "percent.mt"])),
    st.builds(text, names, st.sampled_from(["startswith", "contains"]), st.sampled_from(TEXTS)),
)
predicates = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda a, b: (a[0] & b[0], lambda o: a[1](o) & b[1](o), f"({a[2]}) AND ({b[2]})"), inner, inner),
        st.builds(lambda a, b: (a[0] | b[0], lambda o: a[1](o) | b[1](o), f"({a[2]} OR {b[2]})"), inner, inner),
        st.builds(lambda a: (~a[0], lambda o: ~a[1](o), f"NOT ({a[2]})"), inner),
    ),
    max_leaves=6,
)
GENES = ["CD3D", "MS4A1", "NKG7", "LYZ", "CD79A", "GNLY", "FCGR3A", "PPBP", "CD8A"]
feature_lists = st.none() | st.lists(st.sampled_from(GENES), min_size=1, unique=True)
joins = st.sampled_from([("union", 1), ("intersection", 3), (2, 2)])
layer_lists = st.lists(st.sampled_from(["counts", "lognorm", "scaled"]), unique=True, max_size=3)


def chosen(small: Any, predicate: Predicate) -> pd.DataFrame:
    obs = small.obs
    return obs[np.asarray(predicate[1](obs).fillna(False), bool)]


def expected_genes(small: Any, datasets: list[str], join: Any, asked: list[str] | None) -> set[str] | list[str]:
    held = [set(small.files[name].var_names) for name in datasets or small.files]
    least = len(held) if join == "intersection" else 1 if join == "union" else join
    kept = {g for g in set().union(*held) if sum(g in genes for genes in held) >= least}
    if asked is None:
        return kept
    return asked if join == "union" else [g for g in asked if g in kept]


def expected_values(small: Any, cells: pd.DataFrame, layer: str, genes: list[str], fill: float) -> np.ndarray[Any, Any]:
    rows = [
        small.values(name, layer)
        .loc[group.index.get_level_values(1)]
        .reindex(columns=genes, fill_value=fill)
        .to_numpy(float)
        for name, group in cells.groupby(level=0, sort=False)
    ]
    return np.concatenate(rows) if rows else np.empty((0, len(genes)))


@pytest.mark.parametrize("name", ["donor", "n", "score", "flag"])
def test_the_opposite_of_what_cannot_be_leaves_missing_values_out(small: Any, name: str) -> None:
    """Conditions on one column that exclude each other are neither true nor false of a missing value; nor are their opposites."""
    first, second = small.obs[name].dropna().unique()[:2].tolist()
    both = col(name).isin([first]) & col(name).isin([second])
    either = ~col(name).isin([first]) | ~col(name).isin([second])
    there = int(small.obs[name].notna().sum())
    assert there < len(small.obs)
    for condition in (~both, either, ~~either, ~(col(name).isin([first]) & ~col(name).isin([first]))):
        assert small.query.where(condition).count() == there
    assert small.query.where(both).count() == small.query.where(~(~both)).count() == 0


@pytest.mark.long
@given(predicates)
def test_predicates_choose_the_cells_that_pandas_chooses(small: Any, predicate: Predicate) -> None:
    """A filter keeps exactly the cells of an independent three-valued evaluation, in table order."""
    found = small.query.where(predicate[0]).to_pandas()
    expected = chosen(small, predicate)
    assert list(zip(found["dataset"], found["cell_name"], strict=True)) == list(expected.index)
    assert small.query.where(predicate[0]).count() == len(expected)
    sql = small.query.where(predicate[2]).to_pandas()
    assert list(zip(sql["dataset"], sql["cell_name"], strict=True)) == list(expected.index)


@given(predicates, joins, feature_lists, layer_lists, st.sampled_from(["zero", "nan", "drop"]))
def test_values_equal_those_of_the_files(
    small: Any, predicate: Predicate, join: Any, asked: list[str] | None, layers: list[str], missing: Any
) -> None:
    """Values, columns and the measured mask equal those computed from the files, whatever is asked."""
    query = small.query.where(predicate[0]).missing(missing)
    query = query.join(min_datasets=join[0]) if isinstance(join[0], int) else query.join(join[0])
    query = query if asked is None else query.features(asked)
    query = query.layers(layers) if layers else query
    cells = chosen(small, predicate)
    datasets = list(dict.fromkeys(cells.index.get_level_values(0)))
    result = query.to_anndata()
    genes = expected_genes(small, datasets, "intersection" if missing == "drop" else join[0], asked)
    assert set(result.var_names) == set(genes)
    if asked is None:
        assert result.var["global_index"].is_monotonic_increasing
    else:
        assert list(result.var_names) == genes
    assert list(result.obs["cell_name"]) == list(cells.index.get_level_values(1))
    fill = np.nan if missing == "nan" else 0.0
    for layer, matrix in zip(
        layers or ["counts"], [result.X, *(result.layers[name] for name in layers[1:])], strict=True
    ):
        values = expected_values(small, cells, layer, list(result.var_names), fill)
        np.testing.assert_array_equal(matrix.toarray(), values.astype(matrix.dtype))
        assert matrix.has_canonical_format
    for name, group in result.obs.groupby("dataset", observed=True):
        (layout,) = group["layout_uid"].unique()
        expected = np.isin(result.var_names, small.files[name].var_names)
        assert (result.varm["measured"][layout].to_numpy() == expected).all()


@given(
    st.lists(
        st.tuples(st.sampled_from(["cell_type", "score", "dataset", "stage", "percent.mt"]), st.booleans()),
        min_size=1,
        max_size=3,
    ),
    st.none() | st.integers(0, 70),
)
def test_order_equals_a_stable_sort(small: Any, keys: list[tuple[str, bool]], limit: int | None) -> None:
    """Cells are sorted stably, missing values last, ordered categories in their order; the limit cuts afterwards."""
    query = small.query.order_by([name for name, _ in keys], descending=[down for _, down in keys])
    found = (query if limit is None else query.limit(limit)).to_pandas()
    expected = small.obs
    expected["stage"] = pd.Categorical(expected["stage"], categories=["early", "late"], ordered=True)
    for name, down in reversed(keys):
        expected = expected.sort_values(name, ascending=not down, kind="stable", na_position="last")
    assert list(zip(found["dataset"], found["cell_name"], strict=True)) == list(expected.index[:limit])


@pytest.mark.long
@given(
    predicates,
    st.sampled_from(["counts", "lognorm"]),
    st.lists(st.sampled_from(["cell_type", "dataset", "flag", "donor"]), min_size=1, max_size=2, unique=True),
)
def test_aggregates_equal_those_of_pandas(small: Any, predicate: Predicate, layer: str, by: list[str]) -> None:
    """Sums, means over measured cells, non-zero and measured counts per group equal a computation cell by cell."""
    cells = chosen(small, predicate)
    result = small.query.where(predicate[0]).aggregate(by, layer=layer)
    genes = list(result.var_names)
    values = pd.DataFrame(expected_values(small, cells, layer, genes, np.nan), columns=genes)
    keys = [cells[name].astype(object).where(cells[name].notna(), "(missing)").astype(str).to_numpy() for name in by]
    label = pd.Series(["_".join(parts) for parts in zip(*keys, strict=True)], dtype=object)
    assert set(result.obs_names) == set(label)
    assert result.obs["n_cells"].sum() == len(cells)
    for row, name in enumerate(result.obs_names):
        group = values[(label == name).to_numpy()]
        np.testing.assert_allclose(result.layers["sum"][row], group.sum().to_numpy(), rtol=1e-12)
        np.testing.assert_array_equal(result.layers["n_measured"][row], group.notna().sum().to_numpy())
        np.testing.assert_array_equal(result.layers["count_nonzero"][row], (group.fillna(0) != 0).sum().to_numpy())
        np.testing.assert_allclose(result.layers["mean"][row], group.mean().to_numpy(), rtol=1e-6)


def test_counts_per_group_add_up(small: Any) -> None:
    """Counts per group equal pandas' own; missing values are a group."""
    expected = small.obs.groupby(["dataset", "donor"], dropna=False).size()
    found = small.query.count(["dataset", "donor"])
    assert found.to_dict() == expected.to_dict() or sorted(found) == sorted(expected)
    assert found.sum() == small.query.count() == len(small.obs)
    assert small.query.count("flag").sum() == len(small.obs)


def test_groups_are_named_by_any_name_of_a_column(small: Any) -> None:
    """The name in the file and the name in the table of cells give the same counts and sums."""
    columns = cell_columns(small.catalog)
    renamed = {shown: stored for stored, shown in columns.shown.items() if stored != shown}
    assert renamed
    for shown, stored in renamed.items():
        expected, found = small.query.count(shown), small.query.count(stored)
        assert found.index.name == stored
        pd.testing.assert_series_equal(found, expected, check_names=False)
        sums = [small.query.aggregate(name).to_df("sum") for name in (shown, stored)]
        pd.testing.assert_frame_equal(*sums)


def test_metadata_comes_back_as_it_was(small: Any) -> None:
    """Dtypes of the files come back with the categories that occur and the original column names."""
    found = small.query.where({"dataset": "first"}).to_pandas().set_index("cell_name")
    source = small.files["first"].obs
    source = source.assign(cell_type=source["cell_type"].cat.remove_unused_categories())
    for name in source.columns:
        pd.testing.assert_series_equal(
            found[name],
            source[name],
            check_names=False,
            check_index_type=False,
            check_dtype=name != "n",
            check_index=False,
        )
    assert list(small.query.to_pandas()["cell_type"].cat.categories) == ["T", "B", "NK"]

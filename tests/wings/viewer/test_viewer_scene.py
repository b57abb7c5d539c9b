"""Scenes: joined by id whatever the order, kinds of columns, refusals, and what becomes of points without a place."""

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.errors import FeatureError, NotFoundError, QueryError
from raggedatlas.wings.viewer.arrow_streams import column_part, ids_part, numbers_part, points_part
from raggedatlas.wings.viewer.columns import MOST_CATEGORIES, read_column
from raggedatlas.wings.viewer.palette import CATEGORICAL
from raggedatlas.wings.viewer.scene import Look, Scene, make_scene, project

pytestmark = pytest.mark.fast

names = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=40, unique=True)


def read_part(data: bytes) -> pa.Table:
    """Read a part as the page does."""
    return pa.ipc.open_stream(data).read_all()


def by_id(scene: Scene, name: str) -> dict[str, Any]:
    """Give a column's values by id."""
    return dict(zip(scene.ids.to_pylist(), scene.column(name).values.to_pylist(), strict=True))


@given(ids=names, seed=st.integers(0, 2**16), frame=st.booleans())
def test_metadata_and_genes_follow_their_ids(ids: list[str], seed: int, frame: bool) -> None:
    """In whatever order metadata come, and whatever order points are drawn in, each id keeps its own place, value and gene."""
    rng = np.random.default_rng(seed)
    places = {one: (float(i), float(-i)) for i, one in enumerate(ids)}
    shuffled = [ids[i] for i in rng.permutation(len(ids))]
    weights = {one: i / 3 for i, one in enumerate(ids)}
    obs: Any = pa.table({"weight": [weights[one] for one in shuffled], "uid": shuffled})
    if frame:
        obs = pd.DataFrame({"weight": [weights[one] for one in shuffled]}, index=shuffled)
    genes = {"G": np.array([weights[one] for one in ids])}
    scene = make_scene(ids, [places[one] for one in ids], obs, genes=genes, look=Look(seed=seed))
    assert sorted(scene.ids.to_pylist()) == sorted(ids)
    for one, place, gene in zip(scene.ids.to_pylist(), scene.coordinates.tolist(), scene.gene("G"), strict=True):
        assert tuple(place) == places[one]
        assert gene == np.float32(weights[one])
    assert by_id(scene, "weight") == {one: float(np.float32(weight)) for one, weight in weights.items()}


def test_cells_without_metadata_are_shown_and_counted() -> None:
    """An id that has no metadata keeps its point with missing values, and the notes count it; strangers are left out."""
    scene = make_scene(["a", "b"], [[0, 0], [1, 1]], pa.table({"uid": ["b", "x"], "donor": ["d1", "d2"]}))
    assert by_id(scene, "donor") == {"a": None, "b": "d1"}
    assert scene.notes == ("1 of 2 cells have no metadata.",)


def test_points_without_a_place_are_left_out_and_counted() -> None:
    """NaN and infinite coordinates are no points; the notes say how many there were."""
    scene = make_scene(["a", "b", "c"], [[0, np.nan], [1, 1], [np.inf, 0]])
    assert scene.ids.to_pylist() == ["b"]
    assert scene.notes == ("2 cells have no place in the map and are left out.",)


def test_many_points_are_sampled_and_it_is_said() -> None:
    """Beyond `max_points` a sample is shown, the same for a seed, and the scene knows of how many."""
    ids = [str(i) for i in range(100)]
    places = np.arange(200.0).reshape(100, 2)
    first, again, other = (make_scene(ids, places, look=Look(max_points=10, seed=seed)) for seed in (1, 1, 2))
    assert (first.n, first.n_total) == (10, 100)
    assert first.ids.equals(again.ids)
    assert not first.ids.equals(other.ids)


def test_space_is_projected_onto_its_plane_of_most_variance() -> None:
    """Distances of points that lie in a plane of space are kept, whichever way the plane is turned."""
    rng = np.random.default_rng(0)
    flat = rng.normal(size=(50, 2)) * [5, 2]
    turn, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    found = project(np.column_stack([flat, np.zeros(50)]) @ turn)
    apart = np.linalg.norm(flat[:, None] - flat[None], axis=2)
    assert np.allclose(np.linalg.norm(found[:, None] - found[None], axis=2), apart, atol=1e-4)


REFUSED = [
    ("occurs 2 times", {"ids": ["a", "a"], "coordinates": [[0, 0], [1, 1]]}, QueryError),
    ("ids of the points are missing", {"ids": ["a", None], "coordinates": [[0, 0], [1, 1]]}, QueryError),
    ("1 ids and 2 points", {"ids": ["a"], "coordinates": [[0, 0], [1, 1]]}, QueryError),
    ("shape \\(2,\\)", {"ids": ["a", "b"], "coordinates": [0, 1]}, QueryError),
    ("umap or pca", {"ids": ["a"], "coordinates": [[0] * 8]}, QueryError),
    ("not two of the 2 columns", {"ids": ["a"], "coordinates": [[0, 1]], "look": Look(axes=(0, 2))}, QueryError),
    ("no column 'uid'", {"ids": ["a"], "coordinates": [[0, 1]], "obs": pa.table({"x": [1]})}, NotFoundError),
    (
        "among the metadata",
        {"ids": ["a"], "coordinates": [[0, 1]], "obs": pa.table({"uid": ["a", "a"], "x": [1, 2]})},
        QueryError,
    ),
    ("color='nothing'", {"ids": ["a"], "coordinates": [[0, 1]], "look": Look(color="nothing")}, NotFoundError),
    (
        "no columns \\['nothing'\\]",
        {"ids": ["a"], "coordinates": [[0, 1]], "obs": pa.table({"uid": ["a"]}), "look": Look(columns=["nothing"])},
        NotFoundError,
    ),
    (
        "is 'red'",
        {"ids": ["a"], "coordinates": [[0, 1]], "obs": pa.table({"uid": ["a"]}), "look": Look(colors={"c": {"B": "red"}})},
        QueryError,
    ),
    ("no values of 'G2'", {"ids": ["a"], "coordinates": [[0, 1]], "genes": {"G": np.ones(1)}, "look": Look(color="G2")}, FeatureError),
]  # fmt: skip


@pytest.mark.parametrize(("message", "given_", "kind"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_cannot_be_shown_is_refused(message: str, given_: dict[str, Any], kind: type[Exception]) -> None:
    """Each refusal says what is wrong and where."""
    with pytest.raises(kind, match=message):
        make_scene(**given_)


KINDS = [
    ("whole numbers of few values are categories in their order", pa.array([10, 2] * 10), "category", ["2", "10"]),
    ("whole numbers of many values are a measure", pa.array(range(100)), "number", None),
    ("truth is two categories", pa.array([True, False, None]), "category", ["false", "true"]),
    ("texts that repeat are categories", pa.array(["T10", "T9"] * 9), "category", ["T9", "T10"]),
    ("texts that do not repeat are texts", pa.array([f"AAAC-{i}" for i in range(50)]), "text", None),
    (
        "categories keep their order, without those that no cell has",
        pa.DictionaryArray.from_arrays(pa.array([2, 0, None], pa.int32()), pa.array(["low", "mid", "high"])),
        "category",
        ["low", "high"],
    ),
    (
        "too many categories are texts",
        pa.array([f"c{i}" for i in range(MOST_CATEGORIES + 1)]).dictionary_encode(),
        "text",
        None,
    ),
    ("dates that repeat are categories", pa.array([0, 0, 0, 1], pa.int32()).cast(pa.date32()), "category", None),
]


@pytest.mark.parametrize(("law", "values", "kind", "labels"), KINDS, ids=[row[0] for row in KINDS])
def test_kinds_of_columns(law: str, values: pa.Array, kind: str, labels: list[str] | None) -> None:
    """What a column can be coloured by follows from its type and how many values it has."""
    column = read_column("c", values)
    assert column is not None, law
    assert column.kind == kind
    if labels is not None:
        assert column.values.dictionary.to_pylist() == labels


def test_lists_and_bytes_are_not_shown_and_it_is_said() -> None:
    """Columns that are neither numbers nor texts are named in the notes."""
    obs = pa.table({"uid": ["a"], "vector": [[1.0, 2.0]], "blob": [b"x"]})
    scene = make_scene(["a"], [[0, 0]], obs)
    assert scene.columns == ()
    assert scene.notes == ("Not shown, being neither numbers nor texts: vector, blob.",)


@given(st.lists(st.tuples(*[st.floats(-1e6, 1e6, width=32)] * 2), min_size=1, max_size=30, unique=True))
def test_places_are_kept_to_a_step(places: list[tuple[float, float]]) -> None:
    """A place comes back from its part to within a step of the map's width and height."""
    scene = make_scene([str(i) for i in range(len(places))], places)
    table = read_part(points_part(scene))
    for axis, name in enumerate("xy"):
        exact = scene.coordinates[:, axis].astype(np.float64)
        step = (exact.max() - exact.min()) / 65_535
        back = exact.min() + table.column(name).to_numpy() * step
        assert np.abs(back - exact).max() <= step * 0.501


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=30, unique=True))
def test_ids_of_cells_take_eight_bytes(numbers: list[int]) -> None:
    """Ids of 16 hexadecimal digits are stored as bytes, and mean the same."""
    scene = make_scene([f"{n:016x}" for n in numbers], [[float(i), 0.0] for i in range(len(numbers))])
    column = read_part(ids_part(scene)).column("v")
    assert column.type == pa.binary(8)
    assert [value.hex() for value in column.to_pylist()] == scene.ids.to_pylist()


def test_missing_categories_are_the_last_code() -> None:
    """Cells without a category have a code of their own, behind the others."""
    column = read_column("c", pa.array(["b", None, "a", "a", "b"]))
    assert column is not None
    part = read_part(column_part(column)).column("v").chunk(0)
    assert part.dictionary.to_pylist() == ["a", "b", ""]
    assert part.indices.to_pylist() == [1, 2, 0, 0, 1]
    assert part.indices.type == pa.uint8()


@pytest.mark.parametrize(
    ("values", "kind"),
    [([0, 3, 255], pa.uint8()), ([0, 256], pa.uint16()), ([0.5, 1], pa.float32()), ([1, np.nan], pa.float32())],
)
def test_genes_take_the_smallest_numbers_that_hold_them(values: list[float], kind: pa.DataType) -> None:
    """Counts travel as whole numbers, and nothing is rounded."""
    given_ = np.array(values, np.float32)
    column = read_part(numbers_part(given_)).column("v")
    assert column.type == kind
    assert np.array_equal(column.to_numpy().astype(np.float32), given_, equal_nan=True)


def distances(colors: list[str], see: Any) -> np.ndarray[Any, Any]:
    """Measure how far apart colours look (OKLab), through a matrix of linear light."""
    srgb = np.array([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in colors])
    light = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    light = np.clip(light @ np.array(see).T, 0, 1)
    cones = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566], [0.0883024619, 0.2817188376, 0.6299787005]]  # fmt: skip
    lab = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099], [0.0259040371, 0.7827717662, -0.8086757660]]  # fmt: skip
    seen = np.cbrt(light @ np.array(cones).T) @ np.array(lab).T
    apart = np.linalg.norm(seen[:, None] - seen[None], axis=2)
    return apart[np.triu_indices(len(colors), 1)]


SIGHTS = {
    "usual": np.eye(3),
    "green-blind": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "red-blind": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
}


@pytest.mark.parametrize("sight", SIGHTS)
def test_the_first_colours_are_told_apart_by_all_eyes(sight: str) -> None:
    """The first eight colours are far apart for usual, green-blind and red-blind eyes; all 48 differ."""
    assert distances(list(CATEGORICAL[:8]), SIGHTS[sight]).min() > 0.07
    assert len(set(CATEGORICAL)) == len(CATEGORICAL) == 48

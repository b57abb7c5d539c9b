"""An open store is shared: by threads, which may all read at once, and by processes, which open its place again."""

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from raggedatlas.errors import NotFoundError, SourceError
from raggedatlas.wings.vectors.builder import ChunkingOptions, CoarseLevel, make_geometry
from raggedatlas.wings.vectors.reader import VectorStore, open_vectors
from raggedatlas.wings.vectors.shapes import Shapes
from raggedatlas.wings.vectors.writer import write
from support.spatial import ALL, EDGE

LAYOUTS = ("0.7", "0.9")
Ask = Callable[[VectorStore], Shapes]
ASKED: tuple[Ask, ...] = (
    lambda store: store.read(),
    lambda store: store.read(level=1),
    lambda store: store.read(budget=25, attributes=["a"]),
    lambda store: store.box([-3] * 3, [2] * 3),
    lambda store: store.box([-9] * 3, [0] * 3, whole=False),
    lambda store: store.objects([3, 0]),
    lambda store: store.objects([2], level=1),
    lambda store: store.group(1),
)


def paths() -> Shapes:
    """Streamlines with attributes and groups."""
    return replace(ALL["streamline"](), offsets=np.array([0, 5, 8, 20, 40]))


def stored(folder: Path, layout: str) -> Path:
    """Write a store of two levels."""
    fine = paths()
    coarse = Shapes("streamline", fine.positions[::2], np.array([0, 3, 4, 10, 20]), groups=fine.groups)
    made = make_geometry(fine, ChunkingOptions(chunk_shape=EDGE), coarser=[CoarseLevel(coarse, (2, 2, 2))])
    write(made, folder / layout, layout=layout)
    return folder / layout


def print_of(shapes: Shapes) -> tuple[bytes, ...]:
    """All that lies in shapes, as bytes."""
    families = (shapes.vertex_attributes, shapes.object_attributes, shapes.fragment_attributes)
    values = [attribute.values for family in families for _, attribute in sorted(family.items())]
    return tuple(np.ascontiguousarray(array).tobytes() for array in (shapes.positions, shapes.offsets, *values))


def answer(store: VectorStore, number: int) -> tuple[bytes, ...]:
    """Ask one question, in whatever process this is."""
    return print_of(ASKED[number](store))


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_threads_read_at_once(layout: str, tmp_path: Path) -> None:
    """Eight threads that begin on a store nobody has read from, each in its own order, get what one thread gets."""
    place = stored(tmp_path, layout)
    known = [answer(open_vectors(place), number) for number in range(len(ASKED))]
    for turn in range(6):
        store = open_vectors(place)
        orders = [np.random.default_rng(8 * turn + i).permutation(len(ASKED)).tolist() for i in range(8)]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda order, of=store: [answer(of, number) for number in order], orders))
        assert found == [[known[number] for number in order] for order in orders]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pickled_store_is_opened_again(layout: str, tmp_path: Path) -> None:
    """Fresh or read from, a store is pickled in a few bytes; what is gone, or of a layout that was not asked for, is told on the way back."""
    place = stored(tmp_path, layout)
    for read in (False, True):
        store = open_vectors(place, layout=layout)
        if read:
            store.read()
        packed = pickle.dumps(store)
        assert len(packed) < 1000
        other = pickle.loads(packed)
        assert (other.location, other.layout, other.n_levels) == (store.location, layout, 2)
        assert [answer(other, number) for number in range(3)] == [answer(store, number) for number in range(3)]
    write(make_geometry(paths()), place, layout={"0.7": "0.9", "0.9": "0.7"}[layout], overwrite=True)
    with pytest.raises(SourceError, match="was requested"):
        pickle.loads(packed)
    place.rename(tmp_path / "elsewhere")
    with pytest.raises(NotFoundError):
        pickle.loads(packed)

"""Bad input is refused by name before anything is written, and stores that cannot be read are never read as empty."""

import re
import shutil
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raggedatlas.errors import (
    AtlasError,
    CorruptError,
    DuplicateError,
    LimitError,
    MissingExtraError,
    NameRefusedError,
    NotFoundError,
    RowTypeError,
    SourceError,
    StoreError,
)
from raggedatlas.store.location import Location
from raggedatlas.wings.vectors import validate
from raggedatlas.wings.vectors import writer as placing
from raggedatlas.wings.vectors.builder import ChunkingOptions, CoarseLevel, make_geometry
from raggedatlas.wings.vectors.geometry import CrossLinks, Fragments, Level
from raggedatlas.wings.vectors.inspection import inspect
from raggedatlas.wings.vectors.reader import open_vectors
from raggedatlas.wings.vectors.shapes import Attribute, Groups, Shapes
from raggedatlas.wings.vectors.storage import codecs as draco
from raggedatlas.wings.vectors.storage import layouts as families
from raggedatlas.wings.vectors.storage.codecs import encode_fragments, encode_manifests
from raggedatlas.wings.vectors.storage.layouts import File
from raggedatlas.wings.vectors.writer import publish_files, write
from support.geometry_stores import (
    CUT,
    LAYOUTS,
    attributes,
    data_files,
    edit,
    edit_block,
    edit_root,
    stored,
    with_level,
)
from support.spatial import ALL, EDGE, cloud, corners_of, graph, mesh, paths, rows_of, spots, tree, walk

pytestmark = pytest.mark.fast

NAN = walk(4).copy()
NAN[2, 1] = np.nan
GEOMETRY = make_geometry(mesh(), CUT)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Shapes("blob", walk(3)), "Unknown geometry type"),
        (lambda: Shapes("point_cloud", np.array([[1, 2], [3]], object)), "Rows of different lengths"),
        (lambda: Shapes("point_cloud", np.zeros(3)), "rows of coordinates"),
        (lambda: Shapes("point_cloud", np.zeros((3, 2), complex)), "complex"),
        (lambda: Shapes("point_cloud", walk(3), vertex_attributes={"a": np.zeros(4)}), "has 4 rows; expected 3"),
        (lambda: Shapes("point_cloud", walk(3), vertex_attributes={"a": np.zeros((3, 2, 2))}), "shape"),
        (lambda: Attribute(np.zeros((3, 2)), ("one",)), "channel names"),
        (lambda: Shapes("polyline", walk(3), offsets=np.array([0, 4])), "offsets go"),
        (lambda: Shapes("polyline", walk(3), offsets=np.array([0, 2, 1, 3])), "never decreasing"),
        (lambda: Shapes("polyline", walk(3), offsets=np.array([0.0, 3.0])), "integers"),
        (lambda: Shapes("polyline", walk(3), ids=np.array([-1])), "2\\*\\*63"),
        (lambda: Shapes("polyline", walk(3), offsets=np.array([0, 1, 3]), ids=np.array([1, 1])), "twice"),
        (lambda: Shapes("polyline", walk(3), ids=np.array([1, 2])), "expected 1 integers"),
        (lambda: Shapes("graph", walk(3), links=np.zeros(3)), "expected \\(links, ends\\)"),
        (
            lambda: Shapes("graph", walk(3), links=np.zeros((2, 2), int), link_offsets=np.array([0, 1])),
            "links of the objects",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(make: Any, says: str) -> None:
    """Ragged rows, lengths that do not match, offsets and ids that cannot be: refused where shapes are made."""
    with pytest.raises(SourceError, match=says):
        make()


@pytest.mark.parametrize(
    ("shapes", "cutting", "says"),
    [
        (lambda: Shapes("point_cloud", NAN), CUT, "Vertex 2 is at"),
        (lambda: Shapes("point_cloud", walk(3) * np.inf), CUT, "finite"),
        (lambda: Shapes("mesh", walk(3), links=np.array([[0, 1, 3]])), CUT, "there are 3"),
        (lambda: Shapes("mesh", walk(3), links=np.array([[0, 1, -1]])), CUT, "refers to vertices"),
        (lambda: Shapes("mesh", walk(3), links=np.array([[0, 1]])), CUT, "3 or more"),
        (lambda: Shapes("mesh", walk(3)), CUT, "needs links"),
        (lambda: Shapes("polyline", walk(3), links=np.array([[0, 1]])), CUT, "no links of its own"),
        (lambda: Shapes("skeleton", walk(3), links=np.array([[1, 0], [1, 2]])), CUT, "two parents"),
        (lambda: Shapes("point_cloud", walk(3)[:, :1]), CUT, "2 or more"),
        (cloud, ChunkingOptions(chunk_shape=(3.0, 3.0)), "3 positive numbers"),
        (cloud, ChunkingOptions(chunk_shape=(3.0, 3.0, -1.0)), "positive"),
        (cloud, ChunkingOptions(chunk_shape=EDGE, bin_shape=(2.0, 2.0, 2.0)), "do not divide"),
        (cloud, ChunkingOptions(chunk_shape=EDGE, bounds=((0,) * 3, (1,) * 3)), "outside the bounds"),
        (cloud, ChunkingOptions(chunk_shape=EDGE, bounds=((1,) * 3, (0,) * 3)), "bounds are"),
        (cloud, ChunkingOptions(chunk_shape=EDGE, boundary="none"), "boundary is"),
        (cloud, ChunkingOptions(chunk_shape=EDGE, encoding="draco"), "Draco encodes meshes"),
        (cloud, ChunkingOptions(chunk_shape=(1e-18,) * 3), "use larger chunks"),
        (paths, ChunkingOptions(chunk_shape=EDGE, index_convention="identity"), "exactly one chunk"),
        (spots, ChunkingOptions(chunk_shape=EDGE, index_convention="identity"), "ids are 0 to B - 1"),
        (lambda: replace(paths(), groups=Groups(np.array([0, 1]), np.array([9]))), CUT, "refers to object 9"),
    ],
)
def test_geometry_that_cannot_be_is_refused(shapes: Any, cutting: ChunkingOptions, says: str) -> None:
    """Items 14, 18, 47, 51, 70, 96: NaN and infinite positions, faces out of range, bins that do not divide, and the like."""
    with pytest.raises(SourceError, match=says):
        make_geometry(shapes(), cutting)


def test_levels_that_do_not_nest_are_refused() -> None:
    """Items 96, 97: ratios of coarser levels are whole, bins divide chunks, parents are rows of the coarser level."""
    fine = paths()
    for step, says in (
        (CoarseLevel(fine, (2, 2)), "bin_ratio"),
        (CoarseLevel(fine, (2, 2, 2), chunk_ratio=(1, 1, 0)), "chunk_ratio"),
        (CoarseLevel(fine, (2, 2, 2), chunk_ratio=(1, 1, 1)), "do not divide"),
        (CoarseLevel(fine, (2, 2, 2), sparsity=0), "sparsity"),
        (CoarseLevel(fine, (2, 2, 2), method="x"), "method"),
        (CoarseLevel(fine, (2, 2, 2), parents=np.zeros(3, int)), "parents"),
    ):
        with pytest.raises(SourceError, match=says):
            make_geometry(fine, replace(CUT, cross_level_storage="implicit"), coarser=[step])


def with_across(level: Level, **changes: Any) -> dict[str, Any]:
    return {"cross_links": (replace(level.cross_links[0], **changes),)}


def test_a_mask_is_no_row_numbers() -> None:
    """Rows of an attribute are numbers: a mask, which NumPy would take for the rows 0 and 1, is refused by name."""
    attribute = Attribute(np.arange(3), present=np.array([True, False, True]))
    assert attribute.take(np.array([2, 2])).values.tolist() == [2, 2]
    assert attribute.take(slice(1, 3)).present.tolist() == [False, True]
    for rows in (np.array([True, False, True]), np.array([0.0, 1.0])):
        with pytest.raises(RowTypeError, match="row numbers of a mask"):
            attribute.take(rows)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda of: {"positions": of.positions * np.nan}, "not finite"),
        (lambda of: {"bounds": of.bounds[:-1]}, "do not divide"),
        (lambda of: {"chunks": of.chunks[::-1]}, "are not ascending"),
        (lambda of: {"vertex_attributes": {"a": Attribute(np.zeros(3))}}, "has 3 rows"),
        (lambda of: {"vertex_attributes": {"a": Attribute(np.array(["x"] * 40))}}, "Store codes"),
        (lambda of: {"object_attributes": {"a": Attribute(np.zeros(3))}}, "has 3 rows"),
        (lambda of: {"links": replace(of.links, rows=of.links.rows + np.uint8(99))}, "does not have"),
        (lambda of: {"fragments": replace(of.fragments, counts=of.fragments.counts + 9)}, "exceeds the rows"),
        (lambda of: {"fragments": replace(of.fragments, counts=-of.fragments.counts)}, "negative"),
        (lambda of: with_across(of, rows=of.cross_links[0].rows + 99), "missing chunk or row"),
        (lambda of: with_across(of, delta=1), "level 1, which does not exist"),
        (
            lambda of: with_across(of, attributes={"c": Attribute(np.zeros(3))}),
            "has 3 rows; expected 27, one per cross",
        ),
        (lambda of: with_across(of, attributes={"c": Attribute(np.zeros((19, 2)))}), "has 19 rows; expected 27"),
        (lambda of: with_across(of, chunks=of.cross_links[0].chunks[:-1]), "chunks of shape \\(26, 3, 3\\)"),
        (lambda of: {"cross_links": of.cross_links * 2}, "two sets of links for one"),
    ],
)
def test_nothing_is_written_of_what_does_not_fit(tmp_path: Path, layout: str, change: Any, says: str) -> None:
    """Items 18, 34, 51, 80, 88: arrays that do not fit together are refused, and no trace is left."""
    with pytest.raises(SourceError, match=says):
        write(with_level(GEOMETRY, **change(GEOMETRY.levels[0])), tmp_path / "s", layout=layout)
    assert list(tmp_path.iterdir()) == []


def test_links_across_levels_need_leave(tmp_path: Path) -> None:
    """Item 50: links across levels are refused where `cross_level_storage` is none."""
    fine = paths()
    step = CoarseLevel(replace(fine, groups=None), (2, 2, 2), parents=np.arange(40))
    geometry = make_geometry(fine, replace(CUT, cross_level_storage="implicit"), coarser=[step])
    with pytest.raises(SourceError, match="cross_level_storage"):
        write(replace(geometry, cross_level_storage="none"), tmp_path / "s")
    assert make_geometry(fine, CUT, coarser=[step]).levels[0].cross_links[0].delta == 0


def test_places_and_words(tmp_path: Path) -> None:
    """A store that is there stays unless it may be replaced; unknown words and names that could leave the store are refused."""
    geometry = make_geometry(cloud(), CUT)
    write(geometry, tmp_path / "s")
    with pytest.raises(DuplicateError, match="overwrite"):
        write(geometry, tmp_path / "s")
    for options in ({"layout": "0.8"}, {"compression": "lzma"}, {"compat": "0.1"}):
        with pytest.raises(SourceError, match="expected one of"):
            write(geometry, tmp_path / "t", **options)
    for name in ("../x", "a/b", ".hidden", "a:b", ""):
        bad = make_geometry(replace(cloud(), vertex_attributes={name: np.zeros(40)}), CUT)
        with pytest.raises(NameRefusedError):
            write(bad, tmp_path / "t")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_store_that_appears_while_another_is_written_stays(tmp_path: Path) -> None:
    """What another process puts at the target after the look for it is refused like what was there before, and is not replaced."""

    def files() -> Iterator[File]:
        yield "zarr.json", [b"{}"]
        write(make_geometry(cloud(), CUT), tmp_path / "s")

    with pytest.raises(DuplicateError, match="overwrite"):
        publish_files(Location.of(tmp_path / "s"), files(), overwrite=False)
    assert open_vectors(tmp_path / "s").read().n_vertices == 40
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up in the midst leaves the old store, and no trace of the new one."""
    write(make_geometry(cloud(), CUT), tmp_path / "s")
    original = placing.write_pieces

    def fails(descriptor: int, pieces: Any) -> None:
        monkeypatch.setattr(placing, "write_pieces", full)
        original(descriptor, pieces)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(placing, "write_pieces", fails)
    with pytest.raises(StoreError, match="No space"):
        write(make_geometry(mesh(), CUT), tmp_path / "s", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert open_vectors(tmp_path / "s").read().n_vertices == 40
    monkeypatch.undo()
    write(make_geometry(mesh(), CUT), tmp_path / "s", overwrite=True)
    assert open_vectors(tmp_path / "s").kind == "mesh"
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stores_of_other_generations_are_refused(tmp_path: Path, layout: str) -> None:
    """Items 7, 99, 107: another version, arrays of the other generation, an unknown required capability: refused, never read as empty."""
    other = {"0.7": "0.9", "0.9": "0.7"}[layout]
    store = tmp_path / "s"
    write(make_geometry(cloud(), CUT), store, layout=layout)
    with pytest.raises(SourceError, match=f"has layout {layout}"):
        open_vectors(store, layout=other)
    assert open_vectors(store, layout=layout).layout == layout
    edit_root(store, unknown=1, format_capabilities=["partitioned_cross_chunk_links"])
    assert open_vectors(store).read().n_vertices == 40
    assert open_vectors(store).geometry.metadata["unknown"] == 1
    edit_root(store, required_capabilities=["additive_levels"])
    with pytest.raises(SourceError, match="additive_levels"):
        open_vectors(store)
    edit_root(store, required_capabilities=["shared_fragments"], zv_version="0.8.1")
    with pytest.raises(SourceError, match=r"0\.8\.1"):
        open_vectors(store)
    edit_root(store, zv_version=f"{other}.0")
    with pytest.raises(SourceError, match="mixes two versions"):
        open_vectors(store)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"chunk_shape": None}, "no 'chunk_shape'"),
        ({"bounds": None}, "no 'bounds'"),
        ({"geometry_types": None}, "no 'geometry_types'"),
        ({"chunk_shape": [3, 3]}, "same number of axes"),
        ({"chunk_shape": [3, 3, 0]}, "positive"),
        ({"chunk_shape": "abc"}, "list of numbers"),
        ({"bounds": [1]}, "bounds"),
        ({"base_bin_shape": [2, 2, 2]}, "do not divide"),
        ({"links_convention": "x"}, "links_convention"),
        ({"object_index_convention": "x"}, "object_index_convention"),
        ({"cross_chunk_strategy": "x"}, "cross_chunk_strategy"),
        ({"cross_level_storage": "x"}, "cross_level_storage"),
        ({"cross_level_depth": "x"}, "cross_level_depth is 'x'"),
        ({"cross_level_depth": float("inf")}, "cross_level_depth is inf"),
        ({"geometry_types": 7}, "geometry_types is 7"),
        ({"geometry_types": "mesh"}, "geometry_types is 'mesh'"),
        ({"format_capabilities": True}, "format_capabilities is True"),
        ({"required_capabilities": 1}, "required_capabilities is 1"),
        ({"chunk_shape": 3}, "list of numbers"),
        ({"chunk_shape": "123"}, "list of numbers"),
        ({"chunk_shape": [3, 3, 10**400]}, "list of numbers"),
        ({"base_bin_shape": [3, 0, 3]}, "positive"),
    ],
)
def test_roots_that_do_not_hold_are_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    """Item 96: required keys, enumerations, axes and divisibility of the root."""
    stored(tmp_path / "s", "cloud")
    edit_root(tmp_path / "s", **changes)
    for look in (open_vectors, inspect):
        with pytest.raises(CorruptError, match=says):
            look(tmp_path / "s")


@pytest.mark.parametrize(
    ("path", "names", "changes"),
    [
        ("0", ("zarr_vectors_level",), {"chunk_shape": "abc"}),
        ("0", ("zarr_vectors_level",), {"chunk_shape": [3, 3]}),
        ("0", ("zarr_vectors_level",), {"vertex_count": float("inf")}),
        ("0/links/0", (), {"link_width": "x"}),
        ("0/links/0", (), {"link_width": float("inf")}),
        ("0/cross_chunk_links/0", (), {"link_width": 0}),
        ("0/cross_chunk_links/0", (), {"num_links": [1]}),
        ("0/groups", (), {"num_groups": "x"}),
        ("0/vertex_attributes/b", (), {"channel_names": -1}),
        ("0/vertex_attributes/b", (), {"shape": [10**30]}),
    ],
)
def test_damaged_metadata_are_refused_by_every_reading(
    tmp_path: Path, path: str, names: tuple[str, ...], changes: dict[str, Any]
) -> None:
    """Numbers and lists that are none of a level or an array are told as damage of this store, in a tree without an exception."""
    values = {"b": np.arange(40)}
    shapes = replace(mesh(), groups=Groups(np.array([0, 2]), mesh().ids[:2]), vertex_attributes=values)
    stored(tmp_path / "s", shapes, layout="0.7")
    edit_block(tmp_path / "s", path, *names, **changes)
    with pytest.raises(CorruptError, match=re.escape(str(tmp_path))):
        open_vectors(tmp_path / "s").read(budget=10**6)
    edit(tmp_path / "s", path, lambda node: node.update(attributes="x"))
    with pytest.raises(CorruptError, match="attributes"):
        open_vectors(tmp_path / "s").read()
    assert "UNREADABLE" in str(inspect(tmp_path / "s"))


def test_folders_that_are_no_levels(tmp_path: Path) -> None:
    """A folder named by a superscript digit, which Python counts as a digit but not as a number, is passed over."""
    stored(tmp_path / "s", "cloud")
    (tmp_path / "s" / "²").mkdir()
    assert open_vectors(tmp_path / "s").n_levels == 1
    assert [child.name for child in inspect(tmp_path / "s").root.children] == ["0"]


def test_what_is_gone_is_told(tmp_path: Path) -> None:
    """Item 7: no store, no vertices, no level, arrays that list nothing: told, where vertices are declared."""
    with pytest.raises(NotFoundError, match=r"no zarr\.json"):
        open_vectors(tmp_path)
    for layout in LAYOUTS:
        store = tmp_path / layout
        write(make_geometry(cloud(), CUT), store, layout=layout)
        if layout == "0.9":
            for names, says in (([], "lists no chunk"), (["99.0.0"], "outside its grid")):
                edit_block(store, "0/vertices", nonempty_chunks=names)
                with pytest.raises(CorruptError, match=says):
                    open_vectors(store)
        shutil.rmtree(store / "0/vertices")
        with pytest.raises(CorruptError, match="no vertex array"):
            open_vectors(store)
        shutil.rmtree(store / "0")
        with pytest.raises(CorruptError, match="levels"):
            open_vectors(store)
    (tmp_path / "0.9/zarr.json").write_text("{")
    with pytest.raises(CorruptError, match="not valid JSON"):
        open_vectors(tmp_path / "0.9")


def test_an_index_that_lies_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Item 67: a manifest that names a chunk or a fragment that is not there, on writing, which writes nothing, and on reading."""
    geometry = make_geometry(paths(), CUT)
    objects = geometry.levels[0].objects
    lists = {"modes": np.full(len(objects.modes), 2, np.uint8), "starts": np.zeros(len(objects.starts), np.int64)}
    ones = np.ones(len(objects.starts), np.int64)
    for i, (index, says) in enumerate(
        (
            (replace(objects, starts=objects.starts + 99), "fragment"),
            (replace(objects, chunks=objects.chunks + 99), "chunk"),
            (replace(objects, modes=objects.modes + 1, counts=ones * 2**62), "fragment"),
            (replace(objects, counts=ones, fragments=np.array([-1]), **lists), "fragment"),
        )
    ):
        bad = with_level(geometry, objects=index)
        for layout in LAYOUTS:
            with pytest.raises(
                SourceError, match=f"refers to a missing fragment of {says if says == 'chunk' else 'chunk'}"
            ):
                write(bad, tmp_path / f"w{i}", layout=layout)
        assert not (tmp_path / f"w{i}").exists()
        with monkeypatch.context() as patched:
            patched.setattr("raggedatlas.wings.vectors.writer.check_geometry", lambda _: None)
            write(bad, tmp_path / f"r{i}")
        for ask in (lambda store: store.read(), lambda store: store.objects([3])):
            with pytest.raises(
                CorruptError, match="no vertices" if says == "chunk" else "that its chunk does not have|negative"
            ):
                ask(open_vectors(tmp_path / f"r{i}"))


def test_the_convention_of_the_index(tmp_path: Path) -> None:
    """Item 71: an object index is what is written without asking, and stores of several chunks need one, on writing and on reading."""
    geometry = make_geometry(paths(), CUT)
    assert geometry.index_convention == "standard"
    assert len(geometry.levels[0].chunks) > 1
    with pytest.raises(SourceError, match="exactly one chunk"):
        write(replace(geometry, index_convention="identity"), tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    for layout in LAYOUTS:
        write(geometry, tmp_path / layout, layout=layout)
        facts = attributes(tmp_path / layout, "")["zarr_vectors"]
        assert facts.get("object_index_convention", "standard") == "standard"
        assert (tmp_path / layout / "0/object_index").is_dir()
        shutil.rmtree(tmp_path / layout / "0/object_index")
        edit_root(tmp_path / layout, object_index_convention="identity")
        with pytest.raises(CorruptError, match="identity convention needs one"):
            open_vectors(tmp_path / layout).read()
        assert "V070" in {problem.rule for problem in validate(tmp_path / layout)}


@pytest.mark.parametrize("name", ["graph", "mesh", "pyramid"])
def test_links_across_chunks_keep_their_records(tmp_path: Path, name: str) -> None:
    """Item 106: records of links across chunks and levels, and their attributes, are byte for byte the same after 0.7, 0.9 and 0.7."""
    makers = {"graph": graph, "mesh": mesh}
    if name == "pyramid":
        step = CoarseLevel(cloud(), (2, 2, 2), (2, 2, 2), parents=np.arange(40)[::-1])
        geometry = make_geometry(
            cloud(), ChunkingOptions(chunk_shape=EDGE, cross_level_storage="explicit"), coarser=[step]
        )
    else:
        geometry = make_geometry(makers[name](), CUT)
    rng = np.random.default_rng(0)
    levels = []
    for level in geometry.levels:
        mixed = []
        for links in level.cross_links:
            order = rng.permutation(links.n_links)
            attributes = {key: value.take(order) for key, value in links.attributes.items()}
            mixed.append(replace(links, chunks=links.chunks[order], rows=links.rows[order], attributes=attributes))
        levels.append(replace(level, cross_links=tuple(mixed)))
    write(replace(geometry, levels=tuple(levels)), tmp_path / "first", layout="0.7")
    write(open_vectors(tmp_path / "first").load(), tmp_path / "between", layout="0.9")
    write(open_vectors(tmp_path / "between").load(), tmp_path / "last", layout="0.7")
    every = data_files(tmp_path / "first")
    files = [file for file in every if any(part in str(file) for part in ("cross_chunk_link", "/links/+", "/links/-"))]
    assert any("cross_chunk_links" in str(file) for file in files)
    for file in files:
        again = tmp_path / "last" / file.relative_to(tmp_path / "first")
        assert file.read_bytes() == again.read_bytes(), file


@pytest.mark.parametrize("kind", ["streamline", "mesh"])
@pytest.mark.parametrize("count", [6 * 10**7, 10**9, 2**60])
def test_counts_of_blocks_are_checked_before_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, count: int
) -> None:
    """Items 66, 67: a run of more fragments than its chunk has is refused by every way of reading, with no memory for the run."""
    geometry = make_geometry(paths() if kind == "streamline" else mesh(), CUT)
    objects = geometry.levels[0].objects
    modes = np.where(np.arange(len(objects.modes)) == 0, 1, objects.modes).astype(np.uint8)
    counts = np.where(np.arange(len(objects.modes)) == 0, count, objects.counts)
    bad = replace(objects, modes=modes, counts=counts)
    monkeypatch.setattr("raggedatlas.wings.vectors.writer.check_geometry", lambda _: None)
    write(with_level(geometry, objects=bad, fragment_attributes={}), tmp_path / "s")
    store = open_vectors(tmp_path / "s")
    first = int(objects.ids[0])
    store.objects([int(objects.ids[-1])])
    tracemalloc.start()
    try:
        for ask in (store.read, lambda: store.objects([first]), lambda: store.box([-99] * 3, [99] * 3)):
            with pytest.raises(CorruptError, match="fragment that its chunk does not have"):
                ask()
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("0/object_index/manifests", lambda node: node.update(shape=[10**12])),
        ("0/object_index", lambda node: node["attributes"].update(num_objects=10**12)),
        ("0/object_index", lambda node: node["attributes"].update(sid_ndim=-1)),
        ("0/groups", lambda node: node["attributes"].update(group_ranges={"0": [0, 10**12]})),
        ("0/groups", lambda node: node.update(shape=[10**15])),
    ],
    ids=["manifests", "num_objects", "sid_ndim", "group_ranges", "groups"],
)
def test_declared_numbers_are_checked_before_memory_is_taken(tmp_path: Path, path: str, change: Any) -> None:
    """Items 46, 68: numbers of objects, members and axes that the arrays do not bear out are refused, with no memory for them."""
    shapes = replace(paths(), groups=Groups(np.array([0, 2]), paths().ids[:2]))
    stored(tmp_path / "s", shapes)
    edit(tmp_path / "s", path, change)
    tracemalloc.start()
    try:
        with pytest.raises((CorruptError, LimitError)):
            open_vectors(tmp_path / "s").read()
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("start", "count"), [(0, 99), (99, 1), (2**63 - 1, 1), (1, 2**63 - 1)])
@pytest.mark.parametrize("listed", [False, True])
def test_fragments_that_name_no_row_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, count: int, listed: bool
) -> None:
    """Items 33, 36: runs and lists beyond the rows of their chunk, read whole or by object; numbers that overflow are no way around."""

    def lying(fragments: Fragments) -> Any:
        n = len(fragments.starts)
        if listed:
            every = replace(fragments, is_range=np.zeros(n, bool), starts=np.arange(n), counts=np.ones(n, np.int64))
            return encode_fragments(replace(every, rows=np.full(n, max(start, 99))))
        return encode_fragments(replace(fragments, starts=np.full(n, start), counts=np.full(n, count)))

    monkeypatch.setattr(families, "encode_fragments", lying)
    write(make_geometry(paths(), CUT), tmp_path / "s")
    store = open_vectors(tmp_path / "s")
    for ask in (store.read, lambda: store.objects([3])):
        with pytest.raises(CorruptError, match="row that its chunk does not have"):
            ask()


def test_draco_takes_triangles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faces of four corners are a fault of what is given, not of a store, and nothing is written of them."""
    monkeypatch.setattr(draco, "_draco_library", lambda: None)
    squares = Shapes("mesh", walk(4), links=np.array([[0, 1, 2, 3]]))
    with pytest.raises(SourceError, match="Draco encodes triangles"):
        write(make_geometry(squares, replace(CUT, encoding="draco")), tmp_path / "s")
    assert not [*tmp_path.iterdir()]


def test_draco(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Item 14: meshes in Draco come back within their quantisation, faces and attributes in order, by both layouts; without the library it is said."""
    pytest.importorskip("DracoPy", reason="the extra draco is not installed")
    shapes = mesh()
    for layout in LAYOUTS:
        write(make_geometry(shapes, replace(CUT, encoding="draco")), tmp_path / layout, layout=layout)
        store = open_vectors(tmp_path / layout)
        found, plain = store.read(), stored(tmp_path / f"{layout}-plain", shapes, layout=layout).read()
        assert store.load().levels[0].encoding == "draco"
        assert found.n_links == shapes.n_links
        assert np.allclose(np.sort(found.positions, axis=0), np.sort(shapes.positions, axis=0), atol=3 / 2**10)
        assert np.allclose(found.positions, plain.positions, atol=3 / 2**10)
        assert np.array_equal(found.links, plain.links)
        assert found.link_attributes["c"].values.shape == (36, 2)

    def missing() -> Any:
        raise MissingExtraError("pip install 'raggedatlas[draco]'")

    monkeypatch.setattr(draco, "_draco_library", missing)
    with pytest.raises(MissingExtraError, match="draco"):
        open_vectors(tmp_path / "0.9").read()


@pytest.mark.parametrize("name", ALL)
def test_conversion_loses_nothing(tmp_path: Path, name: str) -> None:
    """Item 106: from 0.7 to 0.9 and back all arrays are the same; fragment indexes and manifests byte by byte."""
    geometry = make_geometry(ALL[name](), CUT)
    write(geometry, tmp_path / "a", layout="0.7")
    one = open_vectors(tmp_path / "a").load()
    write(one, tmp_path / "b", layout="0.9")
    two = open_vectors(tmp_path / "b").load()
    write(two, tmp_path / "c", layout="0.7")
    three = open_vectors(tmp_path / "c").load()
    for other in (two, three, geometry):
        mine, theirs = one.levels[0], other.levels[0]
        assert np.array_equal(mine.positions, theirs.positions)
        assert np.array_equal(mine.chunks, theirs.chunks)
        assert encode_fragments(mine.fragments).data.tobytes() == encode_fragments(theirs.fragments).data.tobytes()
        assert (mine.objects is None) is (theirs.objects is None)
        if mine.objects is not None and theirs.objects is not None:
            assert encode_manifests(mine.objects).data.tobytes() == encode_manifests(theirs.objects).data.tobytes()
            assert np.array_equal(mine.objects.ids, theirs.objects.ids)
        if mine.links is not None and theirs.links is not None:
            assert np.array_equal(mine.links.rows, theirs.links.rows)
            assert mine.links.rows.dtype == theirs.links.rows.dtype
        assert sum(links.n_links for links in mine.cross_links) == sum(links.n_links for links in theirs.cross_links)
        for family in ("vertex_attributes", "fragment_attributes", "object_attributes"):
            for title, attribute in getattr(mine, family).items():
                found = getattr(theirs, family)[title]
                assert np.array_equal(found.values.astype(attribute.values.dtype), attribute.values)
                assert found.channels == attribute.channels
    raw = [path.read_bytes() for path in sorted((tmp_path / "a/0/vertex_fragments").rglob("c/0"))]
    assert raw == [path.read_bytes() for path in sorted((tmp_path / "c/0/vertex_fragments").rglob("c/0"))]


def test_links_within_a_chunk_that_are_filed_as_across(tmp_path: Path) -> None:
    """Item 81: layout 0.9 keeps records whose ends share a chunk with the links of that chunk, with their attributes."""
    geometry = make_geometry(graph(), CUT)
    level = geometry.levels[0]
    place = np.repeat(np.arange(len(level.chunks)), np.diff(level.links.bounds))
    ends = CrossLinks(
        0,
        level.chunks[np.stack([place, place], axis=1)],
        level.links.rows.astype(np.int64),
        attributes=level.links.attributes,
    )
    moved = with_level(geometry, links=None, cross_links=(ends,))
    write(moved, tmp_path / "s")
    found = open_vectors(tmp_path / "s").load().levels[0]
    assert found.cross_links == ()
    assert np.array_equal(np.sort(found.links.rows, axis=None), np.sort(level.links.rows, axis=None))
    write(moved, tmp_path / "t", layout="0.7")
    assert corners_of(open_vectors(tmp_path / "t").read()) == corners_of(open_vectors(tmp_path / "s").read())


def test_every_error_is_one_of_ours(tmp_path: Path) -> None:
    """Files cut at any place are refused by an error of ours, and never crash or come back as something else."""
    write(make_geometry(tree(), CUT), tmp_path / "s")
    expected = rows_of(open_vectors(tmp_path / "s").read().positions)
    rng = np.random.default_rng(0)
    for file in data_files(tmp_path / "s"):
        raw = file.read_bytes()
        file.write_bytes(raw[: int(rng.integers(0, len(raw)))])
        try:
            found = open_vectors(tmp_path / "s").read()
        except AtlasError:
            pass
        else:
            assert rows_of(found.positions) == expected
        file.write_bytes(raw)

"""Layout 0.9: one array for each family; every spelling that the living package writes or reads."""

import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from raggedatlas.errors import CorruptError, SourceError
from raggedatlas.wings.vectors import validate
from raggedatlas.wings.vectors.builder import ChunkingOptions, make_geometry
from raggedatlas.wings.vectors.converters.content import decode_categories
from raggedatlas.wings.vectors.geometry import CrossLinks, Fragments
from raggedatlas.wings.vectors.reader import open_vectors
from raggedatlas.wings.vectors.shapes import Attribute, Groups, Shapes, concat_attributes, counts_to_offsets
from raggedatlas.wings.vectors.storage.codecs import (
    Blobs,
    concat_blobs,
    encode_manifests,
    encode_vlen,
    to_bytes,
)
from raggedatlas.wings.vectors.storage.cross_links import (
    OffsetSegment,
    decode_cross_links,
    encode_cross_links,
    parse_segment,
    segment_name,
)
from raggedatlas.wings.vectors.storage.layouts import plain_array, shard_shape, vlen_array
from raggedatlas.wings.vectors.writer import write
from support.geometry_stores import CUT, LAYOUTS, FragmentIndex, attributes, edit, edit_block, put, with_level
from support.spatial import ALL, cloud, corners_of, graph, mesh, paths, rows_of, spots, walk

pytestmark = pytest.mark.fast


def item(array: Any, at: Any) -> bytes:
    """One byte string of a zarr array."""
    return bytes(array[tuple(slice(i, i + 1) for i in at)].reshape(-1)[0])


@pytest.mark.parametrize("shards", [True, False])
@pytest.mark.parametrize("compression", [None, "zstd", "blosc", "lz4"])
def test_zarr_reads_the_cells(tmp_path: Path, shards: bool, compression: str | None) -> None:
    """Items 1, 2, 4, 9, 10: each cell of a plain zarr array has the bytes of its chunk, sharded or not, compressed or not."""
    write(make_geometry(cloud(), CUT), tmp_path / "s", shards=shards, compression=compression)
    array = zarr.open_array(tmp_path / "s/0/vertices", mode="r")
    facts = dict(array.attrs)
    assert facts["zv_array"] == "vertices"
    origin = np.array(facts["chunk_grid_origin"])
    found = []
    for name in facts["nonempty_chunks"]:
        key = np.array([int(part) for part in name.split(".")])
        rows = np.frombuffer(item(array, key - origin), np.float32).reshape(-1, 3)
        assert (np.floor(rows / 3) == key).all()
        found.append(rows)
    assert rows_of(np.concatenate(found)) == rows_of(walk(40))
    n_files = len(list((tmp_path / "s/0/vertices/c").rglob("*")))
    assert (n_files > 5) is (not shards) or n_files <= 5
    assert rows_of(open_vectors(tmp_path / "s").read().positions) == rows_of(walk(40))


def test_attributes_read_by_whole_chunks_are_compressed(tmp_path: Path) -> None:
    """Item 15: by default layout 0.9 compresses the attributes of vertices without objects, and nothing else; the codec says the size of
    a value, and zarr reads the values."""
    values = np.arange(40, dtype=np.uint16)
    for name, offsets in (("cloud", None), ("objects", np.array([0, 10, 40]))):
        own = Shapes("point_cloud", walk(40), offsets=offsets, vertex_attributes={"gene": Attribute(values)})
        write(make_geometry(own, CUT), tmp_path / name)
    inner = {}
    for path in (
        "cloud/0/vertices",
        "cloud/0/vertex_fragments",
        "cloud/0/vertex_attributes/gene",
        "objects/0/vertex_attributes/gene",
    ):
        codecs = json.loads((tmp_path / path / "zarr.json").read_text())["codecs"][0]["configuration"]["codecs"]
        inner[path] = [codec.get("configuration", {}) for codec in codecs]
    packed = inner.pop("cloud/0/vertex_attributes/gene")
    assert all(codecs == [{}] for codecs in inner.values())
    assert (packed[1]["cname"], packed[1]["typesize"], packed[1]["shuffle"]) == ("lz4", 2, "shuffle")
    array = zarr.open_array(tmp_path / "cloud/0/vertex_attributes/gene", mode="r")
    at = [np.array([int(part) for part in name.split(".")]) for name in array.attrs["nonempty_chunks"]]
    read = [np.frombuffer(item(array, key - np.array(array.attrs["chunk_grid_origin"])), np.uint16) for key in at]
    assert sorted(np.concatenate(read)) == list(range(40))
    assert sorted(open_vectors(tmp_path / "cloud").read().vertex_attributes["gene"].values) == list(range(40))


def test_stores_written_by_zarr_are_read(tmp_path: Path) -> None:
    """Item 6: cells through pipelines of zarr-python that are not read here, an index at the start and gzip, are read all the same."""
    write(make_geometry(cloud(), CUT), tmp_path / "s")
    root = zarr.open_group(tmp_path / "s", mode="a")
    node = json.loads((tmp_path / "s/0/vertices/zarr.json").read_text())
    old = root["0/vertices"]
    values = {tuple(i): item(old, i) for i in np.ndindex(*old.shape)}
    inner = [{"name": "vlen-bytes", "configuration": {}}, {"name": "gzip", "configuration": {"level": 1}}]
    settings = node["codecs"][0]["configuration"]
    settings |= {"codecs": inner, "index_location": "start"}
    shutil.rmtree(tmp_path / "s/0/vertices/c")
    (tmp_path / "s/0/vertices/zarr.json").write_text(json.dumps(node))
    made = zarr.open_array(tmp_path / "s/0/vertices", mode="a")
    whole = np.empty(old.shape, object)
    for at, value in values.items():
        whole[at] = value
    made[...] = whole
    assert rows_of(open_vectors(tmp_path / "s").read().positions) == rows_of(walk(40))


def test_names_of_segments() -> None:
    """Item 78: offsets are spelled with signs; the name of one end is `self`; a name that says other ends is refused."""
    assert segment_name(np.array([[0, 0], [1, -2]])) == "0.0_+1.-2"
    assert segment_name(np.zeros((0, 2), np.int64)) == "self"
    assert parse_segment("0.0_+1.-2", 3, 2).tolist() == [[0, 0], [1, -2]]
    assert parse_segment("self", 1, 2).shape == (0, 2)
    for name in ("0.0", "a.b_0.0", "0.0_0"):
        with pytest.raises(CorruptError, match="offsets"):
            parse_segment(name, 3, 2)


@pytest.mark.parametrize("store", ["canonical", "duplicate"])
@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_links_are_filed_and_found(store: str, directed: bool, width: int) -> None:
    """Items 56, 78: the order of ends comes back from every policy; a link stands once, or once for each chunk it touches."""
    rng = np.random.default_rng(width)
    chunks, rows = rng.integers(-1, 2, (50, width, 2)), rng.integers(0, 4, (50, width))
    ones = np.ones(2, np.int64)
    segments = encode_cross_links(chunks, rows, 0, (ones, ones), directed=directed, store=store)
    counts = np.bincount(np.concatenate([segment.record for segment in segments]), minlength=50)
    touched = np.array([len(set(map(tuple, chunk.tolist()))) for chunk in chunks])
    assert np.array_equal(counts, touched if store == "duplicate" else np.ones(50, int))
    for segment in segments:
        found = decode_cross_links(segment, (ones, ones), "x")
        assert np.array_equal(found[0], chunks[segment.record])
        assert np.array_equal(found[1], rows[segment.record])


def test_an_order_that_cannot_be_is_refused() -> None:
    """Two ends have two orders; another number is refused."""
    ones = np.ones(2, np.int64)
    bad = OffsetSegment(
        np.array([[1, 0]]),
        np.zeros((1, 2), np.int64),
        np.array([0, 1]),
        np.array([[2, 0, 0]]),
        np.zeros(1, np.int64),
        True,
    )
    with pytest.raises(CorruptError, match="permutation"):
        decode_cross_links(bad, (ones, ones), "x")


def test_policies_of_links_come_back(tmp_path: Path) -> None:
    """Directed links, and links filed under each chunk that they touch, come back once with their attributes."""
    geometry = make_geometry(graph(), CUT)
    level = geometry.levels[0]
    for directed, kept in ((True, "canonical"), (False, "duplicate")):
        links = tuple(replace(part, directed=directed, store=kept) for part in level.cross_links)
        name = f"{directed}-{kept}"
        write(with_level(geometry, cross_links=links), tmp_path / name)
        store = open_vectors(tmp_path / name)
        found = store.cross_links(0)
        assert isinstance(found, CrossLinks)
        assert (found.directed, found.store) == (directed, kept)
        assert corners_of(store.read()) == corners_of(graph())
        facts = attributes(tmp_path / name, "0/links/0")
        assert facts["num_links"] == 60
        assert (facts["num_physical_records"] > 60) is (kept == "duplicate")


def test_blocks(tmp_path: Path) -> None:
    """What arrays say of themselves: rows, channels, offsets of links, claims of the level, the discriminator of groups."""
    write(make_geometry(mesh(), CUT), tmp_path / "s")
    write(make_geometry(spots(), CUT), tmp_path / "t")
    facts = attributes(tmp_path / "s", "0/links/0/0.0.0_0.0.0")
    assert (facts["dtype"], facts["has_perm"], facts["offsets"]) == ("uint8", False, [[0, 0, 0], [0, 0, 0]])
    arrays = [attributes(path, "") for path in (tmp_path / "s/0/link_attributes/c/0").iterdir() if path.is_dir()]
    assert len(arrays) > 2
    assert all(facts["row_shape"] == [2] and "shape" not in facts for facts in arrays)
    assert attributes(tmp_path / "s", "0")["zarr_vectors_level"]["fragments_tile"] is True
    assert attributes(tmp_path / "t", "0/object_index")["layout"] == "vlen_manifests_v2"
    assert attributes(tmp_path / "t", "0/object_attributes/v")["fill_sentinel_meaning"] == "absent"
    assert attributes(tmp_path / "t", "0/groups")["num_groups"] == 3
    root = zarr.open_group(tmp_path / "t", mode="r")
    assert root["0/object_attributes/name"][...].tolist() == ["yy", "z", "x"]
    assert np.frombuffer(item(root["0/groups"], [0]), np.int64).tolist() == [3, 4]
    index = FragmentIndex(
        np.frombuffer(item(root["0/vertex_fragments"], [0, 0, 0]) or b"GFVZ\1\0\0\0" + bytes(8), np.uint8)
    )
    assert index.n_fragments >= 0


def test_both_versions_of_the_index(tmp_path: Path) -> None:
    """Item 73: version 1 (row numbers), version 2 (ids), ids in any order, and manifests in chunks of their own are read; others refused."""
    geometry = make_geometry(spots(), CUT)
    objects = geometry.levels[0].objects
    write(geometry, tmp_path / "s")
    store, blobs = tmp_path / "s", encode_manifests(objects)
    turned = [2, 0, 1]
    put(
        store,
        "0/object_index/manifests",
        vlen_array("0/object_index/manifests", concat_blobs([blobs[i] for i in turned]), {}),
    )
    put(store, "0/object_index/object_ids", plain_array("0/object_index/object_ids", objects.ids[turned], {}, "zstd"))
    found = open_vectors(store)
    assert found.object_ids().tolist() == [3, 4, 2**40]
    assert rows_of(found.objects([2**40]).positions) == rows_of(walk(40)[:5])
    assert found.read().ids.tolist() == [3, 4, 2**40]
    shutil.rmtree(store / "0/object_index/object_ids")
    put(store, "0/object_index/manifests", vlen_array("0/object_index/manifests", blobs, {}))
    edit_block(store, "0/object_index", layout="vlen_manifests_v1")
    assert rows_of(open_vectors(store).objects([2]).positions) == rows_of(walk(40)[:5])
    edit_block(store, "0/object_index", layout="vlen_manifests_v3")
    with pytest.raises(SourceError, match="vlen_manifests_v3"):
        open_vectors(store)


def test_groups_of_consecutive_ids(tmp_path: Path) -> None:
    """Item 46: `group_ranges` stands for a row of consecutive ids; a range that cannot be is refused."""
    shapes = replace(paths(), groups=Groups(np.array([0, 0, 2]), np.array([3, 1])))
    write(make_geometry(shapes, CUT), tmp_path / "s")
    edit_block(tmp_path / "s", "0/groups", group_ranges={"0": [1, 4]})
    assert open_vectors(tmp_path / "s").group(0).ids.tolist() == [1, 2, 3]
    edit_block(tmp_path / "s", "0/groups", group_ranges={"7": [1, 4]})
    with pytest.raises(CorruptError, match="range"):
        open_vectors(tmp_path / "s").groups()


def test_long_runs_of_ids_are_written_as_ranges(tmp_path: Path) -> None:
    """Items 42, 45, 46: a group of 16 or more consecutive ids is its two ends; shorter, broken, falling and repeated ones are listed."""
    ids = np.random.default_rng(0).permutation(np.arange(60) + 2**40)
    sets = [range(16), range(15), range(20, 60), [], [*range(16), 40], [*range(40, 20, -1)], [0] * 20, [59, 0]]
    members = np.concatenate([np.array(one, np.int64) for one in sets]) + 2**40
    groups = Groups(np.cumsum([0, *map(len, sets)]), members)
    shapes = Shapes("point_cloud", walk(60), offsets=np.arange(61), ids=ids, groups=groups)
    write(make_geometry(shapes, CUT), tmp_path / "s")
    ends = {"0": [2**40, 2**40 + 16], "2": [2**40 + 20, 2**40 + 60]}
    assert attributes(tmp_path / "s", "0/groups")["group_ranges"] == ends
    store = open_vectors(tmp_path / "s")
    for found in (store.groups(), store.read().groups, store.load().levels[0].groups):
        assert np.array_equal(found.offsets, groups.offsets)
        assert np.array_equal(found.ids, members)
    assert np.array_equal(store.group(2).ids, np.arange(20, 60) + 2**40)
    assert validate(tmp_path / "s") == []


def test_many_manifests_are_read_in_pieces(tmp_path: Path) -> None:
    """Items 65, 69: an index of several inner chunks gives one object and all."""
    n = 300
    points = np.random.default_rng(0).uniform(-9, 9, (n, 2))
    shapes = Shapes("point_cloud", points, offsets=np.arange(n + 1), object_attributes={"v": np.arange(n)})
    write(make_geometry(shapes, ChunkingOptions(chunk_shape=(3, 3))), tmp_path / "s")
    store = open_vectors(tmp_path / "s")
    assert np.array_equal(store.read().positions, points)
    asked = store.objects([299, 0, 128])
    assert np.array_equal(asked.positions, points[[299, 0, 128]])
    assert asked.object_attributes["v"].values.tolist() == [299, 0, 128]


def test_shards_stay_small() -> None:
    """A shard spans 4,096 cells at most, halves of the longest axis."""
    assert shard_shape(np.array([10, 10, 10])).tolist() == [10, 10, 10]
    assert np.prod(shard_shape(np.array([1000, 7, 1]))) <= 4096
    assert np.prod(shard_shape(np.array([2**40, 2**40, 3]))) <= 4096


def test_wide_grids_are_sharded(tmp_path: Path) -> None:
    """Points far apart in small chunks make many cells and few, and come back."""
    points = np.random.default_rng(0).uniform(-5000, 5000, (60, 3))
    write(make_geometry(Shapes("point_cloud", points), ChunkingOptions(chunk_shape=(2, 2, 2))), tmp_path / "s")
    store = open_vectors(tmp_path / "s")
    assert rows_of(store.read().positions) == rows_of(points)
    assert rows_of(store.box([-2000] * 3, [3000] * 3).positions) == rows_of(
        points[((points >= -2000) & (points <= 3000)).all(1)]
    )


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "short cell"])
def test_damaged_shards_are_refused(tmp_path: Path, damage: str) -> None:
    """A shard that is cut short, has an index of another checksum, is gone, or a cell of another length: refused by name, not read as empty."""
    write(make_geometry(cloud(), CUT), tmp_path / "s")
    file = tmp_path / "s/0/vertices/c/0/0/0"
    raw = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(raw[: len(raw) // 2])
    elif damage == "flip":
        raw[-20] ^= 1
        file.write_bytes(raw)
    elif damage == "gone":
        file.unlink()
    else:
        at = raw.index(struct.pack("<I", 1))
        raw[at + 4] ^= 4
        file.write_bytes(raw)
    with pytest.raises(CorruptError):
        open_vectors(tmp_path / "s").read()


def test_all_kinds_are_stored_by_both_ways(tmp_path: Path) -> None:
    """Files for each chunk and shards hold the same of every kind."""
    for name, make in ALL.items():
        geometry = make_geometry(make(), CUT)
        write(geometry, tmp_path / f"{name}-files", shards=False)
        write(geometry, tmp_path / f"{name}-shards")
        one, two = (open_vectors(tmp_path / f"{name}-{way}").read() for way in ("files", "shards"))
        assert np.array_equal(one.positions, two.positions)
        assert one.links is None or np.array_equal(one.links, two.links)


def test_codes_of_links_with_other_categories_are_translated(tmp_path: Path) -> None:
    """Arrays of one link attribute may list other categories; each link keeps its text."""
    kinds = {"encoding": "dictionary", "categories": ["a", "b", "c"], "ordered": True, "_FillValue": -1}
    codes = np.arange(60, dtype=np.int8) % 4 - 1
    shapes = replace(graph(), link_attributes={"kind": Attribute(codes, metadata=kinds), "row": np.arange(60)})
    write(make_geometry(shapes, CUT), tmp_path / "s")
    folder = tmp_path / "s/0/link_attributes/kind/0"
    turned = {path.parent for path in sorted(folder.glob("*/zarr.json"))[::2]}
    for path in turned:
        edit_block(path, "", categories=["c", "d", "a"])
    found = open_vectors(tmp_path / "s").read().link_attributes
    texts, rows = decode_categories(found["kind"]), found["row"].values
    allowed = [{"c", "a"}, {"d", "b"}, {"a", "c"}]
    for row, text in zip(rows.tolist(), texts.tolist(), strict=True):
        assert text is None if codes[row] < 0 else text in allowed[codes[row]]
    assert {"b", "d"} <= set(texts.tolist())
    assert found["kind"].metadata["ordered"] is False


def test_categories_in_some_parts_only_are_refused() -> None:
    """Codes and plain numbers of one name cannot be told apart once they are joined."""
    coded = Attribute(np.array([0, 1]), metadata={"categories": ["x", "y"]})
    more = Attribute(np.array([0, -1]), metadata={"categories": ["y", "z"]}, present=np.array([True, False]))
    joined = concat_attributes([{"a": coded}, {}, {"a": more}], [2, 1, 2])["a"]
    assert decode_categories(joined).tolist() == ["x", "y", None, "y", None]
    assert joined.present.tolist() == [True, True, False, True, False]
    wide = {"categories": [str(i) for i in range(300)]}
    parts = [{"a": Attribute(np.array([-128, 127], np.int8), metadata=wide)}, {"a": coded}]
    assert decode_categories(concat_attributes(parts, [2, 2])["a"]).tolist() == [None, "127", "x", "y"]
    for metadata in ({}, {"categories": 5}, {"categories": [["x"]]}):
        with pytest.raises(SourceError, match="'a' has categories in some parts"):
            concat_attributes([{"a": coded}, {"a": replace(coded, metadata=metadata)}], [2, 2])


def test_stores_are_written_without_writev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has no `os.writev`."""
    monkeypatch.delattr("os.writev")
    write(make_geometry(mesh(), CUT), tmp_path / "s")
    assert corners_of(open_vectors(tmp_path / "s").read()) == corners_of(mesh())


def test_attributes_of_links_within_chunks_alone_are_declared(tmp_path: Path) -> None:
    """An attribute that only links within chunks have gets its group next to those that links across chunks have."""
    geometry = make_geometry(graph(), CUT)
    level = geometry.levels[0]
    (crossing,) = level.cross_links
    others = replace(crossing, attributes={"v": Attribute(np.arange(crossing.n_links))})
    write(with_level(geometry, cross_links=(others,)), tmp_path / "s")
    for name in ("v", "w"):
        assert attributes(tmp_path / "s", f"0/link_attributes/{name}/0")["num_links"] == 60
    found = open_vectors(tmp_path / "s").read().link_attributes["w"]
    assert np.count_nonzero(found.present) == len(level.links.rows)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_without_a_value_stay_without(tmp_path: Path, layout: str) -> None:
    """Absent values of groups come back as absent, those of texts and numbers."""
    present = np.array([True, False, True])
    own = {"n": Attribute(np.array([1.0, 2, 3]), present=present), "t": Attribute(np.array(["A", "B", "C"]))}
    own["p"] = replace(own["t"], present=present)
    groups = spots().groups
    write(make_geometry(replace(spots(), groups=replace(groups, attributes=own)), CUT), tmp_path / "s", layout=layout)
    found = open_vectors(tmp_path / "s").groups()
    for name in ("n", "p"):
        assert found.attributes[name].present.tolist() == present.tolist()
    assert found.attributes["t"].present is None


def test_groups_that_are_no_whole_ids_are_refused(tmp_path: Path) -> None:
    """Groups of 4 and 12 bytes hold 16 bytes together, yet no group holds whole ids."""
    write(make_geometry(spots(), CUT), tmp_path / "s")
    blobs = Blobs(to_bytes(np.array([3, 4])), np.array([0, 4, 16, 16]))
    put(tmp_path / "s", "0/groups", vlen_array("0/groups", blobs, attributes(tmp_path / "s", "0/groups")))
    with pytest.raises(CorruptError, match="4 bytes"):
        open_vectors(tmp_path / "s").groups()


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (2, 1), (2, 3)])
def test_chunks_of_other_lengths_are_refused(tmp_path: Path, sizes: Any) -> None:
    """A chunk with more items than declared would shift those of later chunks; with fewer, some would be missing."""
    write(make_geometry(spots(), CUT), tmp_path / "s")
    folder = tmp_path / "s/0/groups"
    grid = {"name": "regular", "configuration": {"chunk_shape": [2]}}
    codecs = [{"name": "vlen-bytes", "configuration": {}}]
    edit(folder, "", lambda node: node.update(chunk_grid=grid, codecs=codecs, shape=[4]))
    shutil.rmtree(folder / "c")
    (folder / "c").mkdir()
    for i, size in enumerate(sizes):
        (folder / f"c/{i}").write_bytes(encode_vlen(concat_blobs([to_bytes(np.array([3]))] * size)))
    if sizes == (2, 2):
        assert open_vectors(tmp_path / "s").groups().ids.tolist() == [3, 3, 3, 3]
        return
    with pytest.raises(CorruptError, match="items; expected 2"):
        open_vectors(tmp_path / "s").groups()


def test_links_of_a_chunk_without_fragments_are_in_none(tmp_path: Path) -> None:
    """Links that are moved to a chunk without fragments are not those of the next chunk, or of none after the last."""
    geometry = make_geometry(graph(), CUT)
    level = geometry.levels[0]
    place = np.repeat(np.arange(len(level.chunks)), np.diff(level.links.bounds))
    bare = np.isin(np.arange(len(level.chunks)), [place[0], place[-1]])
    kept = np.flatnonzero(~bare)
    sizes = np.diff(level.bounds)
    fragments = Fragments(
        counts_to_offsets(~bare), np.ones(len(kept), bool), 0 * kept, sizes[kept], np.zeros(0, np.int64)
    )
    ends = CrossLinks(0, level.chunks[np.stack([place, place], 1)], level.links.rows.astype(np.int64))
    bare = {"links": None, "objects": None, "fragment_attributes": {}}
    write(with_level(geometry, cross_links=(ends,), fragments=fragments, **bare), tmp_path / "s")
    links = open_vectors(tmp_path / "s").load().levels[0].links
    assert links.fragments.counts.tolist() == np.diff(links.bounds)[kept].tolist()
    assert not links.fragments.starts.any()

"""Layout 0.7 as zarr-vectors describes it: paths, attributes, payloads, and both spellings on reading."""

import gzip
import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from raggedatlas.errors import CorruptError, LimitError, SourceError
from raggedatlas.wings.vectors import validate
from raggedatlas.wings.vectors.builder import ChunkingOptions, CoarseLevel, make_geometry
from raggedatlas.wings.vectors.geometry import CrossLinks, Geometry
from raggedatlas.wings.vectors.reader import open_vectors
from raggedatlas.wings.vectors.shapes import Attribute, Shapes
from raggedatlas.wings.vectors.storage.codecs import encode_ragged, to_bytes
from raggedatlas.wings.vectors.storage.layouts import group_json, plain_array
from raggedatlas.wings.vectors.storage.zarr_reader import decompress
from raggedatlas.wings.vectors.writer import write
from support.geometry_stores import CUT, FragmentIndex, attributes, edit, edit_block, put, stored, with_level
from support.spatial import EDGE, cloud, corners_of, graph, mesh, paths, rows_of, spots, tree, walk


def written(path: Path, name: str, **options: Any) -> Path:
    """Write one of the small stores in layout 0.7."""
    stored(path / name, name, replace(CUT, **options), layout="0.7")
    return path / name


def keys(store: Path, path: str) -> list[str]:
    """Chunks of a family."""
    return sorted(child.name for child in (store / path).iterdir() if child.is_dir())


def put_array(store: Path, path: str, values: Any) -> None:
    """Replace a node by an array of one chunk."""
    put(store, path, plain_array(path, values, {}, None))


def test_every_family_is_zarr_v3(tmp_path: Path) -> None:
    """Items 1, 2: all nodes open by zarr-python, no ``.zattrs`` is written, and every family says what it is in ``zv_array``."""
    for name in ("spots", "skeleton", "graph", "mesh"):
        store = written(tmp_path, name)
        assert not list(store.rglob(".z*"))
        for meta in store.rglob("zarr.json"):
            assert json.loads(meta.read_text())["zarr_format"] == 3
        root = zarr.open_group(store, mode="r")
        families = ["vertices", "vertex_fragments", "object_index"] + (["groups"] if name == "spots" else ["links/0"])
        for family in families:
            assert root[f"0/{family}"].attrs["zv_array"] == family.split("/")[0]


def test_numbers_are_arrays_of_numbers(tmp_path: Path) -> None:
    """Items 3, 10, 19, 20: a plain zarr open gives positions and attributes as numbers, row by row; framing is uint8 (item 4)."""
    store = written(tmp_path, "cloud")
    root, shapes = zarr.open_group(store, mode="r"), cloud()
    found, numbers = [], []
    for key in keys(store, "0/vertices"):
        array = root[f"0/vertices/{key}"]
        assert array.dtype == np.float32
        found.append(array[...])
        pairs = root[f"0/vertex_attributes/b/{key}"]
        assert (pairs.dtype, pairs.shape) == (np.int16, (array.shape[0], 2))
        numbers.append(pairs[:, 0] / 2)
        assert root[f"0/vertex_fragments/{key}"].dtype == np.uint8
    assert rows_of(np.concatenate(found)) == rows_of(shapes.positions)
    assert np.array_equal(shapes.positions[np.concatenate(numbers).astype(int)], np.concatenate(found))


def test_vertices_stand_in_their_chunks(tmp_path: Path) -> None:
    """Items 9, 16, 17: one key for each occupied chunk, negative ones too; floor of position by edge; a seam belongs above."""
    points = np.array([[0, 0, 0], [3, 0, 0], [-0.1, 0, 0], [-3, 0, 0], [-3.1, 2.9, 6]], np.float64)
    write(make_geometry(Shapes("point_cloud", points), CUT), tmp_path / "s", layout="0.7")
    assert keys(tmp_path / "s", "0/vertices") == ["-1.0.0", "-2.0.2", "0.0.0", "1.0.0"]
    assert zarr.open_array(tmp_path / "s/0/vertices/-1.0.0", mode="r")[...].tolist() == [[-0.1, 0, 0], [-3, 0, 0]]


def test_attributes_say_no_more_than_they_must(tmp_path: Path) -> None:
    """Items 5, 12, 14, 21, 36: the blocks of vertices, fragments and attributes, exactly."""
    store = written(tmp_path, "cloud")
    assert attributes(store, "0/vertices") == {"zv_array": "vertices", "dtype": "float32", "encoding": "raw"}
    assert attributes(store, "0/vertex_fragments") == {"zv_array": "vertex_fragments"}
    assert attributes(store, "0/vertex_attributes/a") == {
        "zv_array": "attribute",
        "name": "a",
        "dtype": "float32",
        "shape": [],
    }
    assert attributes(store, "0/vertex_attributes/b") == {
        "zv_array": "attribute", "name": "b", "dtype": "int16", "shape": [2], "channel_names": ["u", "v"],
    }  # fmt: skip


def test_payloads_are_compressed_and_framing_is_not(tmp_path: Path) -> None:
    """Items 15, 39: Blosc with zstd and byte shuffle for numbers, nothing for indexes; no compression if that is asked."""
    store = written(tmp_path, "cloud")
    key = keys(store, "0/vertices")[0]
    codecs = json.loads((store / f"0/vertices/{key}/zarr.json").read_text())["codecs"]
    assert [codec["name"] for codec in codecs] == ["bytes", "blosc"]
    assert (codecs[1]["configuration"]["cname"], codecs[1]["configuration"]["shuffle"]) == ("zstd", "shuffle")
    index = json.loads((store / f"0/vertex_fragments/{key}/zarr.json").read_text())["codecs"]
    assert [codec["name"] for codec in index] == ["bytes"]


def test_fragments_of_level_0_are_runs(tmp_path: Path) -> None:
    """Items 38, 92, 93: the finest level has runs only; owners of fragments stand beside them, as many as the index says."""
    store = written(tmp_path, "streamline")
    root = zarr.open_group(store, mode="r")
    for key in keys(store, "0/vertex_fragments"):
        index = FragmentIndex(np.asarray(root[f"0/vertex_fragments/{key}"][...]))
        assert all(index.is_range(f) for f in range(index.n_fragments))
        assert root[f"0/fragment_attributes/object_id/{key}"].shape == (index.n_fragments,)
    assert attributes(store, "0/fragment_attributes/object_id") == {
        "zv_array": "fragment_attribute", "name": "object_id", "dtype": "int64", "shape": [],
    }  # fmt: skip


def test_objects_and_groups(tmp_path: Path) -> None:
    """Items 42, 43, 44, 46, 65, 68, 69, 73, 89, 90: blocks, payloads and sidecars of what is kept by object and group."""
    store = written(tmp_path, "streamline")
    root = zarr.open_group(store, mode="r")
    assert attributes(store, "0/object_index") == {"zv_array": "object_index", "num_objects": 4, "sid_ndim": 3}
    data, offsets = root["0/object_index/data"][...], root["0/object_index/offsets"][...]
    assert (data.dtype, offsets.dtype) == (np.uint8, np.int64)
    assert data[offsets[1] : offsets[2]].tobytes() == bytes(4)  # the object without vertices
    assert int(data[offsets[2] :][:4].view("<u4")[0]) == 1
    assert attributes(store, "0/groups") == {"zv_array": "groups", "num_groups": 2}
    assert root["0/groups/data"][...].tobytes() == struct.pack("<8q", 2, 0, 16, 3, 1, 0, 1, 2)
    assert root["0/groups/offsets"][...].tolist() == [24, 40]
    assert root["0/object_attributes/v/data"][...].tolist() == [0, 1, 2, 3]
    assert attributes(store, "0/object_attributes/v") == {
        "zv_array": "object_attribute", "name": "v", "dtype": "float32", "shape": [4],
    }  # fmt: skip
    named = written(tmp_path, "spots")
    assert attributes(named, "0/group_attributes/name")["zv_array"] == "groupings_attribute"
    assert attributes(named, "0/group_attributes/name")["shape"] == [3]
    assert zarr.open_array(named / "0/object_index/object_ids", mode="r")[...].tolist() == [3, 4, 2**40]


def test_links(tmp_path: Path) -> None:
    """Items 48, 49, 51, 52, 54, 55, 75, 76, 82, 83, 86, 87: links in chunks by narrow local rows, across them as records, with attributes."""
    store = written(tmp_path, "mesh")
    root = zarr.open_group(store, mode="r")
    facts, across = attributes(store, "0/links/0"), attributes(store, "0/cross_chunk_links/0")
    names = keys(store, "0/links/0")
    rows = {key: root[f"0/links/0/{key}"][...] for key in names}
    assert facts == {
        "zv_array": "links", "level_delta": 0, "link_width": 3, "num_links": sum(map(len, rows.values())), "dtype": "uint8",
    }  # fmt: skip
    for key, links in rows.items():
        assert links.max() < root[f"0/vertices/{key}"].shape[0]
        own = FragmentIndex(np.asarray(root[f"0/link_fragments/{key}"][...]))
        vertices = FragmentIndex(np.asarray(root[f"0/vertex_fragments/{key}"][...]))
        assert own.n_fragments == vertices.n_fragments
        every = np.concatenate([own.indices(f) for f in range(own.n_fragments)])
        assert np.array_equal(np.sort(every), np.arange(len(links)))
        assert root[f"0/link_attributes/c/0/{key}"].shape == (len(links), 2)
    n_across = 36 - facts["num_links"]
    assert across == {
        "zv_array": "cross_chunk_links", "level_delta": 0, "link_width": 3, "num_links": n_across, "sid_ndim": 3,
    }  # fmt: skip
    data = root["0/cross_chunk_links/0/data"]
    assert (data.shape, data.dtype) == ((n_across, 3, 4), np.int64)
    for record in data[...]:  # item 80
        for end in record:
            assert end[3] < root["0/vertices/" + ".".join(map(str, end[:3]))].shape[0]
    assert root["0/cross_chunk_link_attributes/c/0/data"].shape == (n_across, 2)
    own_block = attributes(store, "0/cross_chunk_link_attributes/c/0")
    assert (own_block["zv_array"], own_block["shape"]) == ("cross_chunk_link_attribute", [n_across, 2])
    assert attributes(store, "0/link_attributes/c/0")["zv_array"] == "link_attribute"


def test_what_is_not_asked_is_not_there(tmp_path: Path) -> None:
    """Items 60, 84, 94: lines have no links within chunks, and no attributes of links; points no attributes of fragments; steps across chunks are there (63)."""
    store = written(tmp_path, "streamline")
    assert not (store / "0/links").exists()
    assert not (store / "0/link_attributes").exists()
    assert attributes(store, "0/cross_chunk_links/0")["num_links"] > 0
    assert not (written(tmp_path, "cloud") / "0/fragment_attributes").exists()


def test_branches_only(tmp_path: Path) -> None:
    """Items 61, 62, 85: skeletons store the links that do not follow from the order, and all come back; with attributes all are stored."""
    store = written(tmp_path, "skeleton")
    assert attributes(store, "")["zarr_vectors"]["links_convention"] == "implicit_sequential_with_branches"
    n = attributes(store, "0/links/0")["num_links"] + attributes(store, "0/cross_chunk_links/0")["num_links"]
    assert n < tree().n_links
    assert corners_of(open_vectors(store).read()) == corners_of(tree())
    weighed = replace(tree(), link_attributes={"w": np.arange(38.0)})
    write(make_geometry(weighed, CUT), tmp_path / "all", layout="0.7")
    assert open_vectors(tmp_path / "all").geometry.links_convention == "explicit"
    assert corners_of(open_vectors(tmp_path / "all").read()) == corners_of(weighed)


def test_bytes_are_read_in_both_spellings(tmp_path: Path) -> None:
    """Items 6, 8, 46, 73: bytes instead of numbers, `zvf_array`, no sidecars, extra keys: the same store."""
    for name in ("spots", "mesh"):
        store = written(tmp_path, name)
        expected = open_vectors(store).read()
        root = zarr.open_group(store, mode="r")
        for family in ("vertices", "vertex_attributes/a", "links/0", "link_attributes/c/0"):
            if (store / "0" / family).exists():
                for key in keys(store, f"0/{family}"):
                    put_array(store, f"0/{family}/{key}", to_bytes(root[f"0/{family}/{key}"][...]))
                own = attributes(store, f"0/{family}")["zv_array"]
                edit_block(store, f"0/{family}", zvf_array=own, zv_array=None, unknown=1)
        for sidecar in ("object_index/offsets", "groups/offsets"):
            shutil.rmtree(store / "0" / sidecar, ignore_errors=True)
        for key in keys(store, "0/vertex_fragments"):
            put_array(store, f"0/vertex_fragments/{key}", root[f"0/vertex_fragments/{key}"][...])
        found = open_vectors(store).read()
        assert np.array_equal(found.positions, expected.positions)
        assert np.array_equal(found.offsets, expected.offsets)
        assert found.groups is None or np.array_equal(found.groups.ids, expected.groups.ids)
        assert found.links is None or corners_of(found) == corners_of(expected)


@pytest.mark.parametrize("codec", [zarr.codecs.GzipCodec(), zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()])
def test_any_codec_is_read(tmp_path: Path, codec: Any) -> None:
    """Items 6, 15, 39: positions and indexes are read with any codec that zarr decodes."""
    store = written(tmp_path, "cloud")
    expected = open_vectors(store).read().positions
    root = zarr.open_group(store, mode="a")
    for family in ("vertices", "vertex_fragments"):
        for key in keys(store, f"0/{family}"):
            values = root[f"0/{family}/{key}"][...]
            extra = {"filters": None} if not isinstance(codec, zarr.codecs.Crc32cCodec) else {}
            del root[f"0/{family}/{key}"]
            made = root.create_array(
                f"0/{family}/{key}", shape=values.shape, dtype=values.dtype, chunks=tuple(max(1, n // 2) for n in values.shape),
                compressors=[codec], **extra,
            )  # fmt: skip
            made[...] = values
    assert np.array_equal(open_vectors(store).read().positions, expected)


def pyramid(storage: str = "explicit", ratio: tuple[int, ...] | None = (2, 2, 2)) -> Geometry:
    """Two levels: each point of the coarser one stands for two, and chunks grow or do not."""
    fine = paths("streamline")
    counts = (fine.vertex_counts + 1) // 2
    offsets = np.concatenate([[0], np.cumsum(counts)])
    owner = np.repeat(np.arange(4), fine.vertex_counts)
    local = np.arange(40) - fine.offsets[owner]
    parents = offsets[owner] + local // 2
    first = np.unique(parents, return_index=True)[1]
    coarse = Shapes("streamline", fine.positions[first], offsets=offsets, ids=np.arange(4))
    step = CoarseLevel(coarse, bin_ratio=(2, 2, 2), chunk_ratio=ratio, parents=parents)
    cutting = ChunkingOptions(chunk_shape=EDGE, bin_shape=(1.5,) * 3, cross_level_storage=storage)
    return make_geometry(fine, cutting, coarser=[step])


@pytest.mark.parametrize("ratio", [(1, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("layout", ["0.7", "0.9"])
def test_links_across_levels(tmp_path: Path, layout: str, ratio: tuple[int, ...]) -> None:
    """Items 48, 50, 57, 58, 63, 77, 79, 97, 98: ends on two levels, in grids that differ; both ways; metadata of levels; no link fragments."""
    geometry = pyramid(ratio=ratio)
    write(geometry, tmp_path / "s", layout=layout)
    store = open_vectors(tmp_path / "s")
    assert "multiscale_links" in store.geometry.capabilities
    fine, coarse = (geometry.levels[k] for k in (0, 1))
    for level, delta in ((0, 1), (1, -1)):
        links = store.cross_links(delta, level=level)
        wanted = geometry.levels[level].cross_links[-1]
        assert rows_of(np.concatenate([links.chunks.reshape(40, -1), links.rows], axis=1)) == rows_of(
            np.concatenate([wanted.chunks.reshape(40, -1), wanted.rows], axis=1)
        )
        for end, target in enumerate((level, level + delta)):
            grid = np.array(geometry.chunk_shape) * (ratio if target else (1, 1, 1))
            positions = [fine, coarse][target].positions
            assert set(map(tuple, links.chunks[:, end].tolist())) <= set(
                map(tuple, np.floor(positions / grid).astype(int).tolist())
            )
    assert not (tmp_path / "s/0/link_fragments").exists()
    first, second = (attributes(tmp_path / "s", str(k))["zarr_vectors_level"] for k in (0, 1))
    assert (first.get("bin_shape"), first["parent_level"], first["vertex_count"]) == (None, None, 40)
    assert (second["bin_shape"], second["parent_level"], second["vertex_count"]) == ([3.0] * 3, 0, coarse.n_vertices)
    assert np.array_equal(store.read(level=1).positions, open_vectors(tmp_path / "s").read(budget=30).positions)


def test_levels_keep_their_objects(tmp_path: Path) -> None:
    """Items 69, 91, 101: objects that a coarse level dropped stay in its index, empty; their attributes are marked absent; ids and counts."""
    fine = replace(paths(), object_attributes={})
    keep = Shapes("streamline", fine.positions[6:16], offsets=np.array([0, 10]), ids=np.array([3]), object_attributes={"v": [7.0], "n": np.array([5], np.uint8)})  # fmt: skip
    geometry = make_geometry(fine, CUT, coarser=[CoarseLevel(keep, (2, 2, 2), sparsity=0.25)])
    for layout in ("0.7", "0.9"):
        write(geometry, tmp_path / layout, layout=layout)
        store = open_vectors(tmp_path / layout)
        assert store.object_ids(1).tolist() == [0, 1, 2, 3]
        coarse = store.read(level=1)
        assert coarse.vertex_counts.tolist() == [0, 0, 0, 10]
        value, small = coarse.object_attributes["v"], coarse.object_attributes["n"]
        assert value.present.tolist() == small.present.tolist() == [False, False, False, True]
        assert np.isnan(value.values[:3]).all()
        assert small.values.tolist() == [255, 255, 255, 5]
        facts = attributes(tmp_path / layout, "1")["zarr_vectors_level"]
        assert (facts["preserves_object_ids"], facts["inherited_num_objects"], facts["object_sparsity"]) == (
            True,
            4,
            0.25,
        )
        assert store.objects([1], level=1).n_vertices == 0
    with pytest.raises(SourceError, match="not in the finest"):
        make_geometry(fine, CUT, coarser=[CoarseLevel(replace(keep, ids=np.array([9])), (2, 2, 2))])


def test_both_encodings_of_links_across_levels(tmp_path: Path) -> None:
    """Items 59, 64: inline rows and inline ends are read, told apart by `record_encoding` or, without it, by what parses."""
    write(pyramid(ratio=(1, 1, 1)), tmp_path / "s", layout="0.7")
    store = tmp_path / "s"
    expected = open_vectors(store).cross_links(1)
    assert attributes(store, "0/links/+1")["record_encoding"] == "ragged_rows"
    edit_block(store, "0/links/+1", record_encoding=None)
    again = open_vectors(store).cross_links(1)
    assert np.array_equal(again.rows, expected.rows)
    ends = np.array([[[0, 0, 0, 1], [0, 0, 0, 0]], [[0, 0, 0, 0], [-1, 2, 0, 5]]])
    for key in keys(store, "0/links/+1"):
        put_array(store, f"0/links/+1/{key}", to_bytes(ends))
    for marks in ({}, {"record_encoding": "endpoints_v1"}):
        edit_block(store, "0/links/+1", **marks)
        found = open_vectors(store).cross_links(1)
        assert found.chunks[1, 1].tolist() == [-1, 2, 0]
        assert {problem.rule for problem in validate(store)}.isdisjoint({"V000"})
    shutil.rmtree(store / "0/cross_chunk_links")
    edit_block(store, "0/links/+1", link_width=1, record_encoding="ragged_rows")
    for key in keys(store, "0/links/+1"):
        put_array(store, f"0/links/+1/{key}", np.frombuffer(encode_ragged(to_bytes(np.array([[4], [2]]))), np.uint8))
    single = open_vectors(store).cross_links(1)
    assert set(single.rows[:, 0].tolist()) >= {4, 2}


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("layout", ["0.7", "0.9"])
def test_links_of_any_type(tmp_path: Path, layout: str, kind: str) -> None:
    """Items 53, 56: links of every integer type, signed or not, are written in it and read."""
    geometry = make_geometry(graph(), CUT)
    links = geometry.levels[0].links
    write(with_level(geometry, links=replace(links, rows=links.rows.astype(kind))), tmp_path / "s", layout=layout)
    assert corners_of(open_vectors(tmp_path / "s").read()) == corners_of(graph())
    found = open_vectors(tmp_path / "s").load().levels[0].links
    assert found.rows.dtype == np.dtype(kind)


@pytest.mark.parametrize("layout", ["0.7", "0.9"])
@pytest.mark.parametrize("width", [1, 4, 5, 6, 7, 13])
def test_links_of_any_width(tmp_path: Path, layout: str, width: int) -> None:
    """Items 56, 78: links of one end, and of more than three, within chunks and across; layout 0.9 numbers the orders of ends, 13! at most here."""
    rng = np.random.default_rng(width)
    links = np.array([rng.choice(40, width, replace=False) for _ in range(200)])
    if width > 1:
        shapes = Shapes("mesh", walk(40), links=links)
        write(make_geometry(shapes, CUT), tmp_path / "s", layout=layout)
        assert corners_of(open_vectors(tmp_path / "s").read()) == corners_of(shapes)
        return
    geometry = make_geometry(graph(), CUT)
    level = geometry.levels[0]
    across = CrossLinks(0, level.chunks[:2, None], np.zeros((2, 1), np.int64))
    single = replace(level.links, rows=level.links.rows[:, :1])
    write(with_level(geometry, links=single, cross_links=(across,)), tmp_path / "s", layout=layout)
    found = open_vectors(tmp_path / "s").load().levels[0]
    n_across = sum(links.n_links for links in found.cross_links)
    assert n_across == (2 if layout == "0.7" else 0)  # layout 0.9 keeps links of one end with those of their chunk
    wanted = level.links.rows[:, 0].tolist() + [0] * (2 - n_across)
    assert sorted(found.links.rows[:, 0].tolist()) == sorted(wanted)


def test_dictionaries_and_channels_come_back(tmp_path: Path) -> None:
    """Items 22, 25: channel names and types, categories and their order are kept by both layouts and from one to the other."""
    codes = Attribute(np.arange(40, dtype=np.uint8) % 3, metadata={"encoding": "dictionary", "categories": ["a", "b", "c"], "ordered": True, "_FillValue": 255})  # fmt: skip
    pair = Attribute(np.ones((40, 2), np.float32), ("g1", "g2"), metadata={"channel_dtype": "string"})
    geometry = make_geometry(Shapes("point_cloud", walk(40), vertex_attributes={"k": codes, "p": pair}), CUT)
    write(geometry, tmp_path / "a", layout="0.7")
    write(open_vectors(tmp_path / "a").load(), tmp_path / "b")
    write(open_vectors(tmp_path / "b").load(), tmp_path / "c", layout="0.7")
    for name in "abc":
        found = open_vectors(tmp_path / name).read().vertex_attributes
        assert found["k"].metadata == codes.metadata
        assert (found["p"].channels, dict(found["p"].metadata)) == (pair.channels, {"channel_dtype": "string"})


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("0/vertices", "not a multiple of"),
        ("0/vertex_attributes/a", "rows in a chunk"),
        ("0/link_attributes/c/0", "rows in a chunk"),
        ("0/links/0", "not a multiple of"),
        ("0/fragment_attributes/object_id", "rows in a chunk"),
    ],
)
def test_chunks_of_another_length_are_refused(tmp_path: Path, path: str, says: str) -> None:
    """Items 10, 19, 82, 92: a chunk that does not have its rows is refused by name."""
    shapes = replace(mesh(), vertex_attributes={"a": np.arange(40, dtype=np.float32)})
    write(make_geometry(shapes, CUT), tmp_path / "s", layout="0.7")
    key = keys(tmp_path / "s", path)[0]
    raw = zarr.open_array(tmp_path / "s" / path / key, mode="r")[...]
    put_array(
        tmp_path / "s", f"{path}/{key}", to_bytes(raw)[:-1] if path.endswith(("vertices", "links/0")) else raw[1:]
    )
    with pytest.raises(CorruptError, match=says):
        open_vectors(tmp_path / "s").read()


def test_declared_numbers_are_the_stored_ones(tmp_path: Path) -> None:
    """Items 68, 76, 88: other numbers of objects or links across chunks than declared are refused, also of their attributes."""
    store = written(tmp_path, "mesh")
    for path, key, says in (
        ("0/cross_chunk_links/0", "num_links", "are stored"),
        ("0/object_index", "num_objects", "manifests"),
    ):
        declared = attributes(store, path)[key]
        edit_block(store, path, **{key: declared + 1})
        with pytest.raises(CorruptError, match=says):
            open_vectors(store).read()
        edit_block(store, path, **{key: declared})
    values = zarr.open_array(store / "0/cross_chunk_link_attributes/c/0/data", mode="r")[...]
    put_array(store, "0/cross_chunk_link_attributes/c/0/data", values[:-1])
    with pytest.raises(CorruptError, match="rows in a chunk"):
        open_vectors(store).read()


def test_manifests_of_the_package_are_read(tmp_path: Path) -> None:
    """Item 73: `object_index/manifests`, one byte string for each object, instead of `data`."""
    write(make_geometry(spots(), CUT), tmp_path / "new")
    store = written(tmp_path, "spots")
    for name in ("data", "offsets"):
        shutil.rmtree(store / "0/object_index" / name)
    shutil.copytree(tmp_path / "new/0/object_index/manifests", store / "0/object_index/manifests")
    assert rows_of(open_vectors(store).objects([2**40]).positions) == rows_of(walk(40)[:5])


def test_older_stores_are_refused(tmp_path: Path) -> None:
    """Item 40: a store with `vertex_group_offsets` is refused with a message."""
    store = written(tmp_path, "cloud")
    put(store, "0/vertex_group_offsets", [group_json("0/vertex_group_offsets", {})])
    with pytest.raises(SourceError, match="vertex_group_offsets"):
        open_vectors(store)


@pytest.mark.parametrize("separator", [None, ".", "/"])
def test_arrays_with_keys_of_zarr_2_are_read(tmp_path: Path, separator: str | None) -> None:
    """The key encoding "v2" has no "c" before the numbers, and dots unless it names another separator."""
    store = written(tmp_path, "graph")
    (key,) = keys(store, "0/vertices")[:1]
    folder = store / "0/vertices" / key
    said = {} if separator is None else {"configuration": {"separator": separator}}
    edit(folder, "", lambda node: node.update(chunk_key_encoding={"name": "v2", **said}))
    (chunk,) = [path for path in (folder / "c").rglob("*") if path.is_file()]
    target = folder / (separator or ".").join(chunk.relative_to(folder / "c").parts)
    target.parent.mkdir(exist_ok=True)
    chunk.rename(target)
    assert corners_of(open_vectors(store).read()) == corners_of(graph())
    target.unlink()
    with pytest.raises(CorruptError, match="its chunk is missing"):
        open_vectors(store).read()


def test_gzip_of_any_size_is_refused_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small gzip stream of many bytes, also in its second member, takes no more memory than a chunk may; a damaged one is refused."""
    monkeypatch.setattr("raggedatlas.model.arrays.MAX_CHUNK_BYTES", 2**21)
    small, large = gzip.compress(bytes(2**20)), gzip.compress(bytes(2**25))
    two = decompress(np.frombuffer(small + small, np.uint8), ["gzip"], "x")
    assert two.size == 2**21
    assert not two.any()
    for raw in (large, small + large):
        with pytest.raises(LimitError, match="x declares chunks"):
            decompress(np.frombuffer(raw, np.uint8), ["gzip"], "x")
    for raw in (small[:-9], b"no gzip", small[:10] + b"\xff" * 20):
        with pytest.raises(CorruptError, match="does not decode"):
            decompress(np.frombuffer(raw, np.uint8), ["gzip"], "x")

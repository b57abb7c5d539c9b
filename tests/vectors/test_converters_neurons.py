"""SWC, graphs and Neuroglancer skeletons: what comes in and goes out is the same tree."""

import json
import shutil
from pathlib import Path

import networkx as nx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as papq
import pytest

from raggedatlas.errors import DuplicateError, NotFoundError, SourceError
from raggedatlas.vectors.converters.content import decode_categories, encode_categories
from raggedatlas.vectors.converters.convert import detect, plan_losses, read_file, write_file
from raggedatlas.vectors.shapes import Attribute, Shapes

TREE = "# a neuron\n1 1 0 0 0 5.5 -1\n2 3 1 0 0 0.5 1\n5 3 2 0.1 0 0.25 2\n3 4 2 1 0 0.5 2\n"


def test_swc_is_read_as_it_stands(tmp_path: Path) -> None:
    """Types, radii, numbers, parents, the name and the comments of a file are all there."""
    (tmp_path / "17.swc").write_text(TREE)
    shapes = read_file(tmp_path / "17.swc").shapes
    assert (shapes.kind, np.asarray(shapes.ids).tolist()) == ("skeleton", [17])
    assert np.asarray(shapes.links).tolist() == [[1, 0], [2, 1], [3, 1]]
    assert shapes.vertex_attributes["swc_type"].values.tolist() == [1, 3, 3, 4]
    assert shapes.vertex_attributes["radius"].values.tolist() == [5.5, 0.5, 0.25, 0.5]
    assert shapes.object_attributes["header"].values.tolist() == ["a neuron"]


def test_swc_comes_back(tmp_path: Path) -> None:
    """What is written has the same samples, also when vertices stand in another order, and every parent before its children."""
    (tmp_path / "a.swc").write_text(TREE)
    content = read_file(tmp_path / "a.swc")
    order = np.array([3, 1, 0, 2])
    old = content.shapes
    turned = Shapes(
        "skeleton", old.positions[order], links=np.argsort(order)[old.links],
        vertex_attributes={n: a.take(order) for n, a in old.vertex_attributes.items()},
    )  # fmt: skip
    assert write_file(turned, tmp_path / "b.swc", strict=True) == []
    samples = [line.split() for line in (tmp_path / "b.swc").read_text().splitlines()]
    assert [row[0] for row in samples] == ["1", "2", "3", "5"]
    assert samples[3] == ["5", "3", "2.0", "0.1", "0.0", "0.25", "2"]


def test_a_folder_of_swc_is_many_objects(tmp_path: Path) -> None:
    """Names that are numbers become ids; other names stand with the objects; a folder comes back as a folder."""
    folder = tmp_path / "cells"
    folder.mkdir()
    for name in ("8", "30"):
        (folder / f"{name}.swc").write_text(TREE)
    content = read_file(folder)
    assert np.asarray(content.shapes.ids).tolist() == [30, 8]
    assert content.shapes.vertex_counts.tolist() == [4, 4]
    assert write_file(content, tmp_path / "out", format="swc-folder", strict=True) == []
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["30.swc", "8.swc"]
    assert "objects: 2 are joined into one" in plan_losses(content, "swc")
    again = read_file(tmp_path / "out").shapes
    assert np.array_equal(again.positions, content.shapes.positions)
    (folder / "8.swc").rename(folder / "axon.swc")
    named = read_file(folder).shapes
    assert named.object_attributes["name"].values.tolist() == ["30", "axon"]
    assert np.asarray(named.ids).tolist() == [0, 1]


def test_what_swc_does_not_hold_is_told(tmp_path: Path) -> None:
    """Attributes beyond type and radius are lost by name; strict refuses and writes nothing; what is there stays."""
    (tmp_path / "a.swc").write_text(TREE)
    old = read_file(tmp_path / "a.swc").shapes
    extra = Shapes("skeleton", old.positions, links=old.links, vertex_attributes={"depth": np.arange(4)})
    assert plan_losses(extra, "swc") == ["vertex attribute 'depth' is left out"]
    with pytest.raises(SourceError, match="depth"):
        write_file(extra, tmp_path / "b.swc", strict=True)
    assert not (tmp_path / "b.swc").exists()
    with pytest.raises(DuplicateError):
        write_file(old, tmp_path / "a.swc")
    two = Shapes("skeleton", old.positions, links=np.array([[1, 0], [1, 2]]))
    with pytest.raises(SourceError, match="Vertex 1 has 2 parents"):
        write_file(two, tmp_path / "b.swc")
    round_ = Shapes("skeleton", old.positions, links=np.array([[0, 1], [1, 2], [2, 1]]))
    with pytest.raises(SourceError, match="Vertex 1 is its own ancestor"):
        write_file(round_, tmp_path / "b.swc")
    with pytest.raises(SourceError, match="no mesh"):
        write_file(Shapes("mesh", old.positions, links=np.array([[0, 1, 2]])), tmp_path / "b.swc")
    assert {path.name for path in tmp_path.iterdir()} == {"a.swc"}


def drawn() -> "nx.Graph[str]":
    graph = nx.Graph()
    for name, place in {"soma": (0, 0, 1.5), "tip": (1, 0, 2), "end": (1, 2.25, 3)}.items():
        graph.add_node(
            name, x=float(place[0]), y=float(place[1]), z=float(place[2]), label=name.upper(), order=len(name)
        )
    graph.add_edge("soma", "tip", weight=0.5)
    graph.add_edge("tip", "end", weight=2.0)
    return graph


def test_graphml_of_networkx_comes_back(tmp_path: Path) -> None:
    """A graph that networkx wrote is read, written, and read by networkx as the same graph."""
    nx.write_graphml(drawn(), tmp_path / "a.graphml")
    content = read_file(tmp_path / "a.graphml")
    assert content.shapes.link_attributes["weight"].values.tolist() == [0.5, 2.0]
    assert write_file(content, tmp_path / "b.graphml", strict=True) == []
    again = nx.read_graphml(tmp_path / "b.graphml")
    assert dict(again.nodes(data=True)) == dict(drawn().nodes(data=True))
    assert sorted(again.edges(data="weight")) == sorted(drawn().edges(data="weight"))


def test_edge_lists_of_networkx_come_back(tmp_path: Path) -> None:
    """Edges and their values as networkx writes them, positions from the table beside them, and both are written."""
    nx.write_edgelist(drawn(), tmp_path / "a.edgelist")
    (tmp_path / "a.nodes.csv").write_text("node,x,y,z\nsoma,0,0,1.5\ntip,1,0,2\nend,1,2.25,3\n")
    content = read_file(tmp_path / "a.edgelist")
    assert write_file(content, tmp_path / "b.edgelist", strict=True) == []
    again = nx.read_edgelist(tmp_path / "b.edgelist")
    assert sorted(again.edges(data="weight")) == sorted(drawn().edges(data="weight"))
    assert np.array_equal(read_file(tmp_path / "b.edgelist").shapes.positions, content.shapes.positions)
    (tmp_path / "b.edgelist").unlink()
    with pytest.raises(DuplicateError):
        write_file(content, tmp_path / "b.edgelist")
    assert not (tmp_path / "b.edgelist").exists()


def test_a_node_without_a_name_is_no_other_node(tmp_path: Path) -> None:
    """A table of nodes may leave a name out; lines then name none of that row, not the last category."""
    dictionary = pa.DictionaryArray.from_arrays(pa.array([0, None, 1]), ["a", "b", "c"])
    papq.write_table(pa.table({"node": dictionary, "x": [0.0, 1, 2], "y": [0.0, 1, 2]}), tmp_path / "n.parquet")
    (tmp_path / "a.edgelist").write_text("a b\n")
    content = read_file(tmp_path / "a.edgelist", nodes=str(tmp_path / "n.parquet"))
    assert np.asarray(content.shapes.links).tolist() == [[0, 2]]
    (tmp_path / "a.edgelist").write_text("a c\n")
    with pytest.raises(SourceError, match="no such node"):
        read_file(tmp_path / "a.edgelist", nodes=str(tmp_path / "n.parquet"))


def test_names_of_several_words_come_back_from_an_edge_list(tmp_path: Path) -> None:
    """Spaces are _ in the lines and stay in the table; names that are no words are told and become numbers."""
    names = encode_categories(np.array(["left side", "right side"], object))
    made = Shapes("graph", np.eye(2), links=np.array([[1, 0]]), vertex_attributes={"node": names})
    assert write_file(made, tmp_path / "a.edgelist", strict=True) == []
    again = read_file(tmp_path / "a.edgelist").shapes
    assert np.asarray(again.links).tolist() == [[1, 0]]
    assert decode_categories(again.vertex_attributes["node"]).tolist() == ["left side", "right side"]
    for pair in (["#1", "a"], [None, "a"], ["a b", "a_b"], ["007", "8"], [str(2**63), "8"]):
        names = encode_categories(np.array(pair, object))
        made = Shapes("graph", np.eye(2), links=np.array([[0, 1]]), vertex_attributes={"node": names})
        assert "'node' is left out" in plan_losses(made, "edgelist")[0]
        write_file(made, tmp_path / "b.edgelist", overwrite=True)
        assert np.asarray(read_file(tmp_path / "b.edgelist").shapes.links).tolist() == [[0, 1]]


def test_names_of_nodes_are_numbers_only_as_numbers_are_written(tmp_path: Path) -> None:
    """Zeros before a number stay, and a number beyond 64 bits is a name."""
    for names in (["007", "8"], [str(2**63), "8"]):
        graph = nx.Graph()
        for k, name in enumerate(names):
            graph.add_node(name, x=float(k), y=0.0)
        nx.write_graphml(graph, tmp_path / "a.graphml")
        node = read_file(tmp_path / "a.graphml").shapes.vertex_attributes["node"]
        assert decode_categories(node).tolist() == names


def test_links_without_a_value_have_none_in_graphml(tmp_path: Path) -> None:
    """A value that a link does not have is left out of it, as of nodes."""
    kinds = encode_categories(np.array(["a", None], object))
    made = Shapes("graph", np.eye(3), links=np.array([[0, 1], [1, 2]]), link_attributes={"kind": kinds})
    assert write_file(made, tmp_path / "a.graphml", strict=True) == []
    again = read_file(tmp_path / "a.graphml").shapes.link_attributes["kind"]
    assert decode_categories(again).tolist() == ["a", None]


def skeletons() -> Shapes:
    return Shapes(
        "skeleton",
        np.array([[0, 0, 0], [1, 2, 3], [4, 5, 6], [7, 7, 7], [8, 8, 8.5]], np.float32),
        np.array([0, 3, 5]),
        np.array([12, 2**40]),
        np.array([[1, 0], [2, 1], [4, 3]]),
        vertex_attributes={"radius": np.arange(5, dtype=np.float32), "kind": Attribute(np.eye(5, 2, dtype=np.uint8))},
    )


def test_precomputed_skeletons_have_the_bytes_of_the_format(tmp_path: Path) -> None:
    """The file of a segment is its counts, positions, edges and attributes, back to back, little-endian."""
    assert write_file(skeletons(), f"precomputed://{tmp_path}/s", strict=True) == []
    info = json.loads((tmp_path / "s" / "info").read_text())
    assert info["@type"] == "neuroglancer_skeletons"
    assert info["vertex_attributes"][1] == {"id": "kind", "data_type": "uint8", "num_components": 2}
    expected = np.array([2, 1], "<u4").tobytes() + np.array([[7, 7, 7], [8, 8, 8.5]], "<f4").tobytes()
    expected += np.array([[1, 0]], "<u4").tobytes() + np.array([3, 4], "<f4").tobytes() + bytes([0, 0, 0, 0])
    assert (tmp_path / "s" / str(2**40)).read_bytes() == expected
    assert detect(tmp_path / "s") == "precomputed-skeletons"
    again = read_file(tmp_path / "s").shapes
    assert np.array_equal(again.links, skeletons().links)
    assert np.asarray(again.ids).tolist() == [12, 2**40]
    assert np.array_equal(again.vertex_attributes["kind"].values, np.eye(5, 2, dtype=np.uint8))


def test_skeletons_in_any_direction_become_trees(tmp_path: Path) -> None:
    """Edges that point anywhere become (child, parent); a loop makes a graph; a transform is applied."""
    made = Shapes("graph", np.zeros((4, 3), np.float32), links=np.array([[0, 1], [2, 1], [0, 3]]))
    write_file(made, tmp_path / "a", format="precomputed-skeletons")
    info = json.loads((tmp_path / "a" / "info").read_text())
    info["transform"] = [2, 0, 0, 5, 0, 2, 0, 0, 0, 0, 2, 0]
    (tmp_path / "a" / "info").write_text(json.dumps(info))
    shapes = read_file(tmp_path / "a").shapes
    assert shapes.kind == "skeleton"
    assert np.asarray(shapes.links).tolist() == [[1, 0], [2, 1], [3, 0]]
    assert shapes.positions.tolist() == [[5, 0, 0]] * 4
    loop = Shapes("graph", np.zeros((3, 3), np.float32), links=np.array([[0, 1], [1, 2], [2, 0]]))
    write_file(loop, tmp_path / "b", format="precomputed-skeletons")
    assert read_file(tmp_path / "b").shapes.kind == "graph"


def test_broken_skeletons_are_refused(tmp_path: Path) -> None:
    """A file cut off, too long, or with an edge to nowhere is refused by its id; a folder without skeletons too."""
    write_file(skeletons(), tmp_path / "s", format="precomputed-skeletons")
    data = (tmp_path / "s" / "12").read_bytes()
    for broken, said in (
        (data[:-1], "cut off"),
        (data + b"0", "expected"),
        (data[:44] + b"\xff" + data[45:], "edge to"),
    ):
        (tmp_path / "s" / "12").write_bytes(broken)
        with pytest.raises(SourceError, match=f"skeleton 12.*{said}"):
            read_file(tmp_path / "s")
    with pytest.raises(NotFoundError):
        read_file(tmp_path / "nothing")


def test_skeletons_and_meshes_of_cloud_volume_are_read(peers: Path) -> None:
    """A skeleton with radii and types, the same in compressed shards of a hashed layout, and a mesh."""
    alone = read_file(peers / "volume" / "skeletons").shapes
    assert (alone.kind, np.asarray(alone.ids).tolist()) == ("skeleton", [77])
    assert np.asarray(alone.links).tolist() == [[1, 0], [2, 1], [3, 1]]
    assert alone.vertex_attributes["radius"].values.tolist() == [1, 2, 3, 4.5]
    assert alone.vertex_attributes["vertex_types"].values.tolist() == [1, 2, 3, 4]
    many = read_file(peers / "sharded").shapes
    assert np.asarray(many.ids).tolist() == [5, 9, 10, 77, 123456789]
    assert np.array_equal(many.positions, np.tile(alone.positions, (5, 1)))
    mesh = read_file(peers / "meshes").shapes
    assert np.asarray(mesh.links).tolist() == [[0, 1, 2], [0, 3, 1], [0, 2, 3], [1, 3, 2]]
    with pytest.raises(SourceError, match=r"volume of images; its shapes lie in .*skeletons"):
        read_file(peers / "volume")


def copy_shards(peers: Path, folder: Path) -> bytes:
    """Copy a sharded folder; return the bytes of its first shard."""
    shutil.copytree(peers / "sharded", folder, dirs_exist_ok=True)
    return (folder / "0.shard").read_bytes()


def test_a_shard_that_is_cut_off_is_refused(peers: Path, tmp_path: Path) -> None:
    """Every beginning of a shard that holds an entry is refused by its name."""
    data = copy_shards(peers, tmp_path)
    for end in (3, 20, len(data) // 2, len(data) - 1):
        (tmp_path / "0.shard").write_bytes(data[:end])
        with pytest.raises(SourceError, match=r"0\.shard is no shard"):
            read_file(tmp_path)


def test_a_shard_whose_bytes_do_not_unpack_is_refused(peers: Path, tmp_path: Path) -> None:
    """A compressed skeleton behind the header of gzip that is no deflated stream is refused by the name of its shard."""
    data = copy_shards(peers, tmp_path)
    at = data.index(b"\x1f\x8b") + 10
    (tmp_path / "0.shard").write_bytes(data[:at] + b"\xff" * 4 + data[at + 4 :])
    with pytest.raises(SourceError, match=r"0\.shard is no shard"):
        read_file(tmp_path)


@pytest.mark.parametrize("kind", ["neuroglancer_multilod_draco", "neuroglancer_annotations_v1"])
def test_other_precomputed_formats_are_refused(kind: str, tmp_path: Path) -> None:
    """A folder of another format is refused by its type, and neither format holds points."""
    (tmp_path / "info").write_text(json.dumps({"@type": kind}))
    with pytest.raises(SourceError, match=rf"info has the @type {kind!r}; .* neuroglancer_skeletons"):
        read_file(tmp_path)
    (tmp_path / "info").write_text("{")
    with pytest.raises(SourceError, match="no file 'info' in JSON"):
        read_file(tmp_path)
    with pytest.raises(SourceError, match="hold no point_cloud"):
        write_file(Shapes("point_cloud", np.zeros((2, 3))), f"precomputed://{tmp_path}/p")

"""Skeletons and meshes in Neuroglancer's precomputed formats, as cloud-volume writes them."""

import json
from pathlib import Path

import numpy as np
import pytest

from raggedatlas.errors import SourceError
from raggedatlas.vectors.converters.convert import read_file, write_file
from raggedatlas.vectors.shapes import Shapes


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


def test_a_shard_that_is_cut_off_is_refused(peers: Path, tmp_path: Path) -> None:
    """Every beginning of a shard that holds an entry is refused by its name."""
    for name in ("info", "0.shard", "1.shard"):
        (tmp_path / name).write_bytes((peers / "sharded" / name).read_bytes())
    data = (tmp_path / "0.shard").read_bytes()
    for end in (3, 20, len(data) // 2, len(data) - 1):
        (tmp_path / "0.shard").write_bytes(data[:end])
        with pytest.raises(SourceError, match=r"0\.shard is no shard"):
            read_file(tmp_path)


def test_a_shard_whose_bytes_do_not_unpack_is_refused(peers: Path, tmp_path: Path) -> None:
    """A compressed skeleton behind the header of gzip that is no deflated stream is refused by the name of its shard."""
    for name in ("info", "0.shard", "1.shard"):
        (tmp_path / name).write_bytes((peers / "sharded" / name).read_bytes())
    data = (tmp_path / "0.shard").read_bytes()
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

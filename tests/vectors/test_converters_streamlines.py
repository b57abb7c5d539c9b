"""TRX, TRK and TCK, against trx-python and nibabel."""

import json
import zipfile
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from nibabel.streamlines import ArraySequence, Tractogram

from raggedatlas.errors import SourceError
from raggedatlas.vectors.converters.content import Content
from raggedatlas.vectors.converters.convert import plan_losses, read_file, write_file
from raggedatlas.vectors.shapes import Attribute, Groups, Shapes

AFFINE = np.array([[2, 0, 0, -10], [0, 2, 0, 5], [0, 0, 3, 1], [0, 0, 0, 1]], np.float32)


def tracts() -> Shapes:
    rng = np.random.default_rng(0)
    return Shapes(
        "streamline",
        rng.normal(size=(9, 3)).astype(np.float32),
        np.array([0, 4, 6, 9]),
        np.array([5, 1, 8]),
        vertex_attributes={"fa": rng.random(9).astype(np.float32), "rgb": np.arange(27, dtype=np.uint8).reshape(9, 3)},
        object_attributes={"length": np.array([1.5, 2.5, 3.5], np.float32)},
        groups=Groups(
            np.array([0, 2, 2, 3]),
            np.array([8, 5, 1]),
            {
                "name": Attribute(np.array(["left", "none", "all"])),
                "weight": Attribute(np.array([1.0, 2.0, 3.0], np.float32)),
            },
        ),
    )


def content() -> Content:
    return Content(tracts(), {"tractogram": {"voxel_to_rasmm": AFFINE.tolist(), "dimensions": [4, 5, 6]}})


def test_trx_is_read_by_its_library(tmp_path: Path) -> None:
    """What we write, trx-python reads: lines, values of vertices, lines and groups, affine and dimensions."""
    trx = pytest.importorskip("trx.trx_file_memmap")
    assert write_file(content(), tmp_path / "a.trx", strict=True) == []
    seen = trx.load(str(tmp_path / "a.trx"))
    assert np.array_equal(seen.streamlines.get_data(), tracts().positions)
    assert seen.streamlines._lengths.tolist() == [4, 2, 3]
    assert np.array_equal(seen.data_per_vertex["rgb"].get_data(), tracts().vertex_attributes["rgb"].values)
    assert seen.data_per_streamline["length"].ravel().tolist() == [1.5, 2.5, 3.5]
    assert seen.data_per_streamline["object_id"].ravel().tolist() == [5, 1, 8]
    assert {name: rows.tolist() for name, rows in seen.groups.items()} == {"left": [2, 0], "none": [], "all": [1]}
    assert seen.data_per_group["all"]["weight"].ravel().tolist() == [3.0]
    assert np.array_equal(seen.header["VOXEL_TO_RASMM"], AFFINE)
    seen.close()


@pytest.mark.parametrize("kind", ["trx", "folder"])
def test_trx_of_its_library_is_read(tmp_path: Path, kind: str) -> None:
    """What trx-python writes, zip or folder, we read with the same values."""
    trx = pytest.importorskip("trx.trx_file_memmap")
    made = trx.TrxFile(nb_vertices=9, nb_streamlines=3)
    made.header["VOXEL_TO_RASMM"], made.header["DIMENSIONS"] = AFFINE, np.array([4, 5, 6], np.uint16)
    lines = made.streamlines
    lines._data[:], lines._offsets[:], lines._lengths[:] = tracts().positions, [0, 4, 6], [4, 2, 3]
    values = ArraySequence()
    values._data, values._offsets, values._lengths = (
        np.arange(9, dtype=np.float32)[:, None],
        lines._offsets,
        lines._lengths,
    )
    made.data_per_vertex["fa"] = values
    made.data_per_streamline["mean"] = np.array([[1], [2], [3]], np.float32)
    made.groups["g"] = np.array([2, 0], np.uint32)
    path = tmp_path / ("a.trx" if kind == "trx" else "a")
    trx.save(made, str(path))
    made.close()
    found = read_file(path)
    shapes = found.shapes
    assert np.array_equal(shapes.positions.astype(np.float16), tracts().positions.astype(np.float16))
    assert shapes.offsets.tolist() == [0, 4, 6, 9]
    assert shapes.vertex_attributes["fa"].values.tolist() == list(range(9))
    assert shapes.object_attributes["mean"].values.tolist() == [1, 2, 3]
    assert shapes.groups.members(0).tolist() == [2, 0]
    assert found.metadata["tractogram"] == {"voxel_to_rasmm": AFFINE.tolist(), "dimensions": [4, 5, 6]}


def test_trx_comes_back(tmp_path: Path) -> None:
    """Ids, groups and their values, types and the affine are the same after a round trip."""
    write_file(content(), tmp_path / "a.trx")
    again = read_file(tmp_path / "a.trx")
    assert again.metadata == content().metadata
    assert np.asarray(again.shapes.ids).tolist() == [5, 1, 8]
    groups = again.shapes.groups
    assert [groups.members(k).tolist() for k in range(3)] == [[8, 5], [], [1]]
    assert groups.attributes["name"].values.tolist() == ["left", "none", "all"]
    assert groups.attributes["weight"].values.tolist() == [1, 2, 3]
    assert again.shapes.vertex_attributes["rgb"].values.dtype == np.uint8
    empty = Shapes("streamline", np.zeros((0, 3), np.float32), np.zeros(1, np.int64))
    write_file(empty, tmp_path / "b.trx")
    assert read_file(tmp_path / "b.trx").shapes.n_objects == 0


def test_trk_is_read_by_nibabel(tmp_path: Path) -> None:
    """What we write as TRK or TCK, nibabel reads: lines in the same place, values, affine."""
    losses = write_file(content(), tmp_path / "a.trk")
    assert losses == ["groups: 3 are left out", "rounded: positions, which pass through voxels as floats of 32 bits"]
    seen = nib.streamlines.load(tmp_path / "a.trk")
    assert np.allclose(seen.streamlines.get_data(), tracts().positions, atol=1e-5)
    assert np.array_equal(seen.header["voxel_to_rasmm"], AFFINE)
    assert seen.header["dimensions"].tolist() == [4, 5, 6]
    assert np.allclose(seen.tractogram.data_per_point["rgb"].get_data(), tracts().vertex_attributes["rgb"].values)
    assert seen.tractogram.data_per_streamline["object_id"].ravel().tolist() == [5, 1, 8]
    write_file(tracts(), tmp_path / "a.tck")
    assert np.array_equal(nib.streamlines.load(tmp_path / "a.tck").streamlines.get_data(), tracts().positions)
    again = read_file(tmp_path / "a.trk")
    assert np.asarray(again.shapes.ids).tolist() == [5, 1, 8]
    assert again.metadata == content().metadata
    assert again.shapes.object_attributes["length"].values.tolist() == [1.5, 2.5, 3.5]


@pytest.mark.parametrize("ending", [".trk", ".tck"])
def test_files_of_nibabel_are_read(tmp_path: Path, ending: str) -> None:
    """Lines that nibabel wrote with an affine come in the same place."""
    lines = [tracts().positions[:4], tracts().positions[4:6]]
    per_point = (
        {"fa": [np.arange(4, dtype=np.float32)[:, None], np.ones((2, 1), np.float32)]} if ending == ".trk" else None
    )
    tractogram = Tractogram(lines, data_per_point=per_point, affine_to_rasmm=AFFINE)
    header = {"voxel_to_rasmm": AFFINE, "dimensions": (4, 5, 6)} if ending == ".trk" else None
    nib.streamlines.save(tractogram, tmp_path / f"a{ending}", header=header)
    shapes = read_file(tmp_path / f"a{ending}").shapes
    expected = np.concatenate(lines) @ AFFINE[:3, :3].T + AFFINE[:3, 3]
    assert np.allclose(shapes.positions, expected, atol=1e-5)
    assert shapes.offsets.tolist() == [0, 4, 6]
    if ending == ".trk":
        assert shapes.vertex_attributes["fa"].values.tolist() == [0, 1, 2, 3, 1, 1]


def test_what_trackvis_does_not_hold_is_told(tmp_path: Path) -> None:
    """Long names, wide numbers and wide ids are lost by name; TCK holds lines only; strict refuses."""
    wide = Shapes(
        "streamline", np.zeros((2, 3)), np.array([0, 2]), np.array([2**30 + 1]),
        vertex_attributes={"a_name_of_twenty_byte": np.zeros(2), "wide": np.array([2**30 + 1, 0])},
        object_attributes={"name": np.array(["x"])},
    )  # fmt: skip
    assert plan_losses(wide, "trk") == [
        "object attribute 'name' is left out: it is text",
        "rounded: positions, which pass through voxels as floats of 32 bits",
        "vertex attribute 'a_name_of_twenty_byte' is left out: TRK holds nine, with names of 18 bytes",
        "rounded: vertex attribute 'wide', to 32-bit floats",
        "objects: their ids are left out, as they need more than 32-bit floats",
    ]
    assert "objects: their ids are left out; they are numbered from 0" in plan_losses(wide, "tck")
    with pytest.raises(SourceError, match="would not hold all"):
        write_file(tracts(), tmp_path / "a.tck", strict=True)
    dotted = Shapes("streamline", np.zeros((2, 3)), np.array([0, 2]), vertex_attributes={"mean.fa": np.zeros(2)})
    assert plan_losses(dotted, "trx") == ["vertex attribute 'mean.fa' is called 'mean_fa'"]


def rewritten(path: Path, name: str, data: bytes | None) -> None:
    """Replace or leave out a part of a TRX."""
    with zipfile.ZipFile(path) as file:
        parts = {item: file.read(item) for item in file.namelist()}
    if data is None:
        del parts[name]
    else:
        parts[name] = data
    with zipfile.ZipFile(path, "w") as file:
        for item, content_ in parts.items():
            file.writestr(item, content_)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("header.json", None, "no header.json"),
        ("header.json", b"{}", "no header.json"),
        ("positions.3.float32", None, "no positions"),
        ("positions.3.float32", b"\0" * 96, "positions of the shape \\(8, 3\\)"),
        ("positions.3.float32", b"\0" * 97, "has 97 bytes"),
        ("offsets.uint64", b"\0" * 8, "1 offsets"),
        ("offsets.uint64", np.array([0, 6, 4, 9], "<u8").tobytes(), "never decreasing"),
        ("dpv/fa.float32", b"\0" * 8, "2 rows; expected 9"),
        ("dps/x.what", b"\0", "expected a name like"),
        ("groups/left.uint32", np.array([9], "<u4").tobytes(), "names streamline 9"),
    ],
)
def test_a_broken_trx_is_refused(tmp_path: Path, name: str, data: bytes | None, said: str) -> None:
    """A part that is missing, too short or of another length is refused by its name."""
    write_file(content(), tmp_path / "a.trx")
    rewritten(tmp_path / "a.trx", name, data)
    with pytest.raises(SourceError, match=said):
        read_file(tmp_path / "a.trx")


@pytest.mark.parametrize("ending", [".trx", ".trk", ".tck"])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, ending: str) -> None:
    """The first bytes of a file are no file."""
    write_file(content(), tmp_path / f"a{ending}")
    data = (tmp_path / f"a{ending}").read_bytes()
    for end in (10, len(data) * 3 // 4, len(data) - 30):
        (tmp_path / f"a{ending}").write_bytes(data[:end])
        with pytest.raises(SourceError, match=f"a\\{ending}"):
            read_file(tmp_path / f"a{ending}")


@pytest.mark.parametrize("ending", [".trx", ".trk", ".tck"])
def test_no_streamlines_are_written_and_read(tmp_path: Path, ending: str) -> None:
    """A tractogram without lines, but with values and groups, is written and read as one."""
    groups = Groups(np.array([0, 1]), np.array([5]), {"name": Attribute(np.array(["left"]))})
    empty = Shapes(
        "streamline",
        np.zeros((0, 3), np.float32),
        np.zeros(1, np.int64),
        vertex_attributes={"fa": np.zeros(0, np.float32)},
        object_attributes={"length": np.zeros(0, np.float32)},
        groups=groups,
    )
    write_file(empty, tmp_path / f"a{ending}")
    again = read_file(tmp_path / f"a{ending}").shapes
    assert (again.n_objects, again.n_vertices) == (0, 0)


def test_a_zip_that_cannot_be_unpacked_is_refused(tmp_path: Path) -> None:
    """Bytes that do not decompress, and an encrypted part, are refused by the name of the file."""
    file = tmp_path / "a.trx"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", "{}" * 99)
    data = file.read_bytes()
    at = 30 + len("header.json")
    file.write_bytes(data[:at] + b"\xff" * 4 + data[at + 4 :])
    with pytest.raises(SourceError, match="no zip file that can be read"):
        read_file(file)
    place = data.index(b"PK\1\2")
    file.write_bytes(data[:6] + b"\1" + data[7 : place + 8] + b"\1" + data[place + 9 :])
    with pytest.raises(SourceError, match="encrypted"):
        read_file(file)


def test_old_offsets_are_read(tmp_path: Path) -> None:
    """Offsets without the last one, as older files have them, mean the same."""
    write_file(tracts(), tmp_path / "a.trx")
    rewritten(tmp_path / "a.trx", "offsets.uint64", np.array([0, 4, 6], "<u8").tobytes())
    assert read_file(tmp_path / "a.trx").shapes.offsets.tolist() == [0, 4, 6, 9]
    with zipfile.ZipFile(tmp_path / "a.trx") as file:
        assert json.loads(file.read("header.json"))["NB_STREAMLINES"] == 3

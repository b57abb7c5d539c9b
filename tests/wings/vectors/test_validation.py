"""The validator of geometry stores: nothing is wrong with what is written, and every rule is found broken where it is."""

import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raggedatlas.errors import NotFoundError, SourceError
from raggedatlas.model.validation import Rule
from raggedatlas.wings.vectors import validate
from raggedatlas.wings.vectors import writer as writing
from raggedatlas.wings.vectors.builder import ChunkingOptions, CoarseLevel, make_geometry
from raggedatlas.wings.vectors.geometry import Geometry
from raggedatlas.wings.vectors.shapes import Shapes
from raggedatlas.wings.vectors.validation.rules import DEPTH_OF, LEVELS, RULES, PlacedProblem
from raggedatlas.wings.vectors.writer import write
from support.geometry_stores import LAYOUTS, data_files, edit, edit_block, edit_root, with_level
from support.hypothesis_profile import examples
from support.rules_page import rules_table, table_of
from support.spatial import ALL, EDGE, mesh, walk

SEVERITIES = ("must", "should", "practice")
Json = dict[str, Any]


def pyramid() -> Geometry:
    """Two levels with objects, and links between them."""
    fine = replace(ALL["spots"](), offsets=np.array([0, 5, 5, 40]), groups=None)
    kept = np.arange(0, 40, 2)
    coarse = Shapes("point_cloud", fine.positions[kept], offsets=np.array([0, 3, 3, 20]), ids=fine.ids)
    step = CoarseLevel(coarse, (2, 2, 2), (2, 2, 2), parents=np.arange(40) // 2)
    made = make_geometry(fine, ChunkingOptions(chunk_shape=EDGE, cross_level_storage="explicit"), coarser=[step])
    level = replace(made.levels[1], metadata={**made.levels[1].metadata, **PRESERVED})
    return replace(made, levels=(made.levels[0], level))


PRESERVED = {"preserves_object_ids": True, "inherited_num_objects": 3}


def identity() -> Geometry:
    """Lines whose ids are the numbers of their fragments."""
    shapes = Shapes("polyline", np.arange(12.0).reshape(6, 2), offsets=np.array([0, 2, 6]))
    return make_geometry(shapes, ChunkingOptions(chunk_shape=(99, 99), index_convention="identity"))


STORES: dict[str, Callable[[], Geometry]] = {
    **{name: lambda made=made: make_geometry(made(), ChunkingOptions(chunk_shape=EDGE)) for name, made in ALL.items()},
    **{
        f"{name}-both": lambda name=name: make_geometry(ALL[name](), ChunkingOptions(chunk_shape=EDGE, boundary="both"))
        for name in ("streamline", "mesh")
    },
    "pyramid": pyramid,
    "identity": identity,
    "bins": lambda: make_geometry(ALL["cloud"](), ChunkingOptions(chunk_shape=EDGE, bin_shape=(1.0, 1.5, 3.0))),
}


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_wrong_with_what_is_written(layout: str, tmp_path: Path) -> None:
    """Every rule passes on what we write: all kinds, boundary policies, pyramids with links between levels, identity."""
    for name, make in STORES.items():
        write(make(), tmp_path / name, layout=layout)
        assert [str(problem) for problem in validate(tmp_path / name)] == [], name


class Damage:
    """A written store with files for each chunk, and ways to break it."""

    def __init__(self, folder: Path, layout: str) -> None:
        self.folder, self.layout = folder, layout

    def attributes(self, path: str, **changes: Any) -> None:
        """Set attributes of a node; None removes one."""
        edit_block(self.folder, path, **changes)

    def node(self, path: str, change: Callable[[Json], Any]) -> None:
        """Change the ``zarr.json`` of a node."""
        edit(self.folder, path, change)

    def root(self, **changes: Any) -> None:
        """Set keys of the root."""
        edit_root(self.folder, **changes)

    def level(self, number: int = 0, **changes: Any) -> None:
        """Set keys of a level."""
        edit_block(self.folder, str(number), "zarr_vectors_level", **changes)

    @property
    def links(self) -> str:
        """Where links within chunks of two ends lie."""
        return "0/links/0" if self.layout == "0.7" else "0/links/0/0.0.0"

    @property
    def faces(self) -> str:
        """Where links within chunks of three ends lie."""
        return "0/links/0" if self.layout == "0.7" else "0/links/0/0.0.0_0.0.0"

    def bytes(self, path: str, change: Callable[[bytes], bytes], which: int = 0) -> None:
        """Change the bytes of one chunk, or of an array without chunks."""
        file = data_files(self.folder / path)[which]
        if self.layout == "0.9" and file.parents[len(file.relative_to(self.folder / path).parts) - 1].name != "data":
            new = change(file.read_bytes()[8:])
            file.write_bytes(struct.pack("<II", 1, len(new)) + new)
            return
        new = change(file.read_bytes())
        at = next(parent for parent in file.parents if (parent / "zarr.json").exists())
        shutil.rmtree(at / "c")
        (at / "c").mkdir()
        (at / "c" / "0").write_bytes(new)
        spelled = {"shape": [len(new)], "data_type": "uint8", "codecs": [{"name": "bytes"}]}
        grid = {"name": "regular", "configuration": {"chunk_shape": [max(1, len(new))]}}
        self.node(str(at.relative_to(self.folder)), lambda node: node.update(spelled, chunk_grid=grid))

    def drop(self, path: str) -> None:
        """Remove a folder."""
        shutil.rmtree(self.folder / path)


def int64s(*values: int) -> Callable[[bytes], bytes]:
    """Put int64 at the end of a blob in place of what is there."""
    return lambda old: old[: -8 * len(values)] + struct.pack(f"<{len(values)}q", *values)


def head(at: int, *values: int) -> Callable[[bytes], bytes]:
    """Put bytes somewhere in a blob."""
    return lambda old: old[:at] + bytes(values) + old[at + len(values) :]


def explicit(geometry: Geometry) -> Geometry:
    """Make the last fragment of each chunk an explicit list."""
    fragments = geometry.levels[0].fragments
    last = fragments.bounds[1:] - 1
    is_range, starts = fragments.is_range.copy(), fragments.starts.copy()
    is_range[last] = False
    rows = np.concatenate([np.arange(fragments.starts[f], fragments.starts[f] + fragments.counts[f]) for f in last])
    starts[last] = np.cumsum(fragments.counts[last]) - fragments.counts[last]
    return with_level(geometry, fragments=replace(fragments, is_range=is_range, starts=starts, rows=rows))


# rule, store, what is done to the files, layouts, severity where it is milder than the rule's
Broken = tuple[str, str, Callable[[Damage], None], tuple[str, ...], str]
FRAGMENTS, INDEX, CROSS = "0/vertex_fragments", "0/object_index", "0/cross_chunk_links/0"
OLD, NEW = ("0.7",), ("0.9",)


def broken(
    rule: str, store: str, change: Callable[[Damage], Any], layouts: tuple[str, ...] = LAYOUTS, severity: str = ""
) -> Broken:
    return rule, store, change, layouts, severity or RULES[rule].level


def manifests(change: Callable[[bytes], bytes], which: int = 3) -> Callable[[Damage], None]:
    """Change one manifest of `paths`, and write the index again."""

    def damage(store: Damage) -> None:
        from raggedatlas.wings.vectors.shapes import counts_to_offsets
        from raggedatlas.wings.vectors.storage.codecs import concat_blobs, encode_manifests
        from raggedatlas.wings.vectors.storage.layouts import vlen_array

        objects = STORES["streamline"]().levels[0].objects
        blobs = encode_manifests(objects)
        parts = [blobs[i].tobytes() for i in range(len(blobs))]
        parts[which] = change(parts[which])
        if store.layout == "0.9":
            for key, pieces in vlen_array(f"{INDEX}/manifests", concat_blobs(parts), {}):
                (store.folder / key).write_bytes(b"".join(pieces))
        else:
            store.bytes(f"{INDEX}/data", lambda _: b"".join(parts))
            sizes = np.array([len(part) for part in parts])
            store.bytes(f"{INDEX}/offsets", lambda _: counts_to_offsets(sizes)[:-1].tobytes())

    return damage


def second_level(store: Damage) -> None:
    shutil.copytree(store.folder / "0", store.folder / "1")
    store.level(1, level=1, parent_level=0, bin_shape=[3.0, 3.0, 3.0])


BROKEN = [
    broken("V000", "cloud", lambda s: _first_file(s, "0/vertices").write_bytes(b"\1"), OLD),
    broken("V000", "cloud", lambda s: s.bytes("0/vertices", lambda _: b"") or _short_cell(s), NEW),
    broken("V000", "cloud", lambda s: s.drop("0/vertices")),
    broken("V001", "cloud", lambda s: (s.folder / "0" / ".zattrs").write_text("{}")),
    broken("V001", "cloud", lambda s: (s.folder / "0/vertices/zarr.json").write_text("{")),
    broken("V002", "cloud", lambda s: s.attributes(FRAGMENTS, zv_array="vertices")),
    broken("V002", "cloud", lambda s: s.attributes(FRAGMENTS, zv_array=None, zvf_array="vertex_fragments"), severity="practice"),
    broken("V003", "cloud", lambda s: s.attributes("0/vertex_attributes/a", dtype="complex64")),
    broken("V004", "streamline", lambda s: s.node(f"{INDEX}/data", lambda n: n.update(data_type="int8")), OLD),
    broken("V004", "cloud", lambda s: s.node(FRAGMENTS, lambda n: n.update(data_type="string")), NEW),
    broken("V005", "cloud", lambda s: s.attributes(FRAGMENTS, num_fragments=3)),
    broken("V007", "cloud", lambda s: s.root(zv_version="0.8.0")),
    broken("V007", "cloud", lambda s: s.root(zv_version="0.9.2" if s.layout == "0.7" else "0.7.0")),
    broken("V009", "cloud", lambda s: (s.folder / "0/vertices/0.x.0").mkdir(), OLD),
    broken("V009", "cloud", lambda s: s.attributes("0/vertices", nonempty_chunks=["99.0.0"]), NEW),
    broken("V009", "cloud", lambda s: s.bytes("0/vertices", lambda _: b""), severity="practice"),
    broken("V010", "cloud", lambda s: s.bytes("0/vertices", lambda old: old[:-3])),
    broken("V011", "cloud", lambda s: s.attributes("0/vertices", dtype="bool")),
    broken("V012", "cloud", lambda s: s.attributes("0/vertices", encoding="zip")),
    broken("V012", "cloud", lambda s: s.attributes("0/vertices", count=3), severity="practice"),
    broken("V014", "cloud", lambda s: s.attributes("0/vertices", encoding="draco")),
    broken("V016", "cloud", lambda s: s.bytes("0/vertices", lambda old: np.float32([0.5, 900, 0]).tobytes() + old[12:])),
    broken("V018", "cloud", lambda s: s.bytes("0/vertices", lambda old: np.float32([np.nan]).tobytes() + old[4:])),
    broken("V019", "cloud", lambda s: s.bytes("0/vertex_attributes/a", lambda old: old[:-4])),
    broken("V021", "cloud", lambda s: s.attributes("0/vertex_attributes/a", name="b")),
    broken("V021", "cloud", lambda s: s.attributes("0/vertex_attributes/b", shape="2", row_shape="2")),
    broken("V022", "cloud", lambda s: s.attributes("0/vertex_attributes/b", channel_names=["u"])),
    broken("V026", "cloud", lambda s: s.bytes(FRAGMENTS, head(0, 0))),
    broken("V026", "cloud", lambda s: s.bytes(FRAGMENTS, lambda old: old[:9])),
    broken("V026", "cloud", lambda s: s.bytes(FRAGMENTS, head(4, 2))),
    broken("V026", "cloud", lambda s: s.bytes(FRAGMENTS, head(6, 1))),
    broken("V026", "cloud", lambda s: s.bytes(FRAGMENTS, head(16, 0))),
    broken("V026", "cloud", lambda s: s.bytes(FRAGMENTS, head(12, 9))),
    broken("V026", "cloud", lambda s: s.bytes(FRAGMENTS, head(17, 1))),
    broken("V026", "cloud", lambda s: s.bytes(FRAGMENTS, lambda old: old[:-4] + b"\1\0\0\0")),
    broken("V026", "cloud", lambda s: s.bytes(FRAGMENTS, lambda old: old[:8] + bytes(8) + bytes(4))),
    broken("V034", "cloud", lambda s: s.bytes(FRAGMENTS, head(24, 200))),
    broken("V034", "explicit", lambda s: s.bytes(FRAGMENTS, int64s(2**40))),
    broken("V036", "cloud", lambda s: s.attributes(FRAGMENTS, colour="red")),
    broken("V040", "cloud", lambda s: shutil.copytree(s.folder / FRAGMENTS, s.folder / "0/vertex_group_offsets")),
    broken("V026", "cloud", lambda s: s.bytes(FRAGMENTS, lambda old: old + bytes(8))),
    broken("V026", "cloud", lambda s: s.bytes(FRAGMENTS, lambda old: old[:20])),
    broken("V042", "streamline", lambda s: s.bytes("0/groups/data", lambda old: old[:-3]), OLD),
    broken("V042", "streamline", lambda s: s.attributes("0/groups", group_ranges={"7": [0, 1]}), NEW),
    broken("V043", "streamline", lambda s: s.attributes("0/groups", num_groups=5)),
    broken("V044", "spots", lambda s: s.attributes("0/group_attributes/name", zv_array="group_attribute")),
    broken("V047", "streamline", lambda s: s.bytes("0/groups/data", int64s(77)), OLD),
    broken("V047", "streamline", lambda s: s.attributes("0/groups", group_ranges={"0": [0, 99]}), NEW),
    broken("V048", "mesh", lambda s: (s.folder / "0/links/one").mkdir()),
    broken("V048", "mesh", lambda s: shutil.copytree(s.folder / s.faces, s.folder / "0/links/0/up"), NEW),
    broken("V049", "mesh", lambda s: [s.drop(f"0/{name}") for name in ("links", "cross_chunk_links", "link_attributes", "link_fragments", "cross_chunk_link_attributes") if (s.folder / "0" / name).exists()]),
    broken("V050", "pyramid", lambda s: s.root(cross_level_storage="none")),
    broken("V051", "mesh", lambda s: s.bytes(s.faces, lambda old: b"\xfe" + old[1:])),
    broken("V051", "mesh", lambda s: s.bytes(s.faces, lambda old: old[:-1])),
    broken("V052", "graph-wide", lambda s: None),
    broken("V054", "mesh", lambda s: s.bytes("0/link_fragments", head(24, 1), which=1)),
    broken("V054", "mesh", lambda s: s.bytes("0/link_fragments", lambda old: old[:8] + bytes(8))),
    broken("V055", "mesh", lambda s: s.attributes("0/links/0", num_links=7)),
    broken("V055", "mesh", lambda s: s.attributes(s.faces, dtype="float32")),
    broken("V056", "mesh", lambda s: s.attributes("0/links/0", link_width=2)),
    broken("V057", "cloud", lambda s: shutil.copytree(s.folder / FRAGMENTS, s.folder / "0/link_fragments")),
    broken("V058", "pyramid", lambda s: s.drop("1")),
    broken("V060", "graph", lambda s: s.root(links_convention="implicit_sequential")),
    broken("V062", "mesh", lambda s: s.root(links_convention="implicit_sequential")),
    broken("V000", "pyramid", lambda s: s.bytes(next(iter(_level_links(s))), lambda old: b"\xff" * 12)),
    broken("V065", "streamline", lambda s: s.bytes(f"{INDEX}/offsets", int64s(1)), OLD),
    broken("V065", "streamline", lambda s: s.drop(f"{INDEX}/data"), OLD),
    broken("V066", "streamline", manifests(lambda old: old + b"\0")),
    broken("V066", "streamline", manifests(head(28, 9))),
    broken("V066", "streamline", manifests(lambda old: old[:-2])),
    broken("V067", "streamline", manifests(head(4, 99))),
    broken("V067", "streamline", manifests(head(29, 99))),
    broken("V068", "streamline", lambda s: s.attributes(INDEX, num_objects=9), NEW),
    broken("V068", "streamline", lambda s: s.attributes(INDEX, sid_ndim=2)),
    broken("V068", "streamline", lambda s: s.attributes(INDEX, layout="vlen_manifests_v7")),
    broken("V068", "streamline", lambda s: s.attributes(INDEX, num_present=1), NEW, "practice"),
    broken("V070", "identity", lambda s: shutil.copytree(s.folder / FRAGMENTS, s.folder / INDEX)),
    broken("V071", "streamline", lambda s: s.drop(INDEX)),
    broken("V076", "mesh", lambda s: s.attributes(CROSS, num_links=7), OLD),
    broken("V076", "mesh", lambda s: s.attributes(CROSS, sid_ndim=None), OLD),
    broken("V079", "pyramid", lambda s: s.root(format_capabilities=[])),
    broken("V080", "mesh", lambda s: s.bytes(f"{CROSS}/data", int64s(2**40)), OLD),
    broken("V080", "mesh", lambda s: s.bytes(_first_segment(s), lambda old: old[:-1] + b"\xfe"), NEW),
    broken("V081", "mesh", lambda s: s.bytes(f"{CROSS}/data", lambda old: old[:96].replace(old[:96], _one_chunk(old[:96])) + old[96:]), OLD),
    broken("V082", "mesh", lambda s: s.bytes(f"0/link_attributes/c/{s.faces.split('/', 2)[2]}", lambda old: old[:-2])),
    broken("V088", "mesh", lambda s: s.bytes("0/cross_chunk_link_attributes/c/0/data", lambda old: old[:-2]), OLD),
    broken("V090", "streamline", lambda s: s.bytes("0/object_attributes/v/data", lambda old: old[:-4]), OLD),
    broken("V090", "streamline", lambda s: s.node("0/object_attributes/v", lambda n: n.update(shape=[3])), NEW),
    broken("V092", "streamline", lambda s: s.bytes("0/fragment_attributes/object_id", lambda old: old + bytes(8))),
    broken("V096", "cloud", lambda s: s.root(bounds=None)),
    broken("V096", "cloud", lambda s: s.root(chunk_shape=[1.0, -1.0, 1.0])),
    broken("V096", "cloud", lambda s: s.root(base_bin_shape=[2.0, 3.0, 3.0])),
    broken("V096", "cloud", lambda s: s.root(cross_chunk_strategy="never")),
    broken("V096", "cloud", lambda s: s.root(geometry_types=["surface"]), severity="should"),
    broken("V096", "cloud", lambda s: s.attributes("", zarr_vectors=None)),
    broken("V097", "pyramid", lambda s: s.level(1, parent_level=None)),
    broken("V097", "cloud", lambda s: s.level(bin_shape=[1.0, 1.0, 1.0])),
    broken("V097", "cloud", lambda s: s.level(arrays_present=["vertices", "links"]), severity="should"),
    broken("V098", "cloud", lambda s: s.level(vertex_count=41)),
    broken("V099", "cloud", lambda s: s.root(format_capabilities=["teleport"])),
    broken("V099", "cloud", lambda s: s.root(required_capabilities=["teleport"])),
    broken("V100", "pyramid", lambda s: s.level(1, chunk_shape=[7.0, 6.0, 6.0])),
    broken("V100", "pyramid", lambda s: s.level(1, bin_ratio=[3, 2, 2])),
    broken("V101", "pyramid", lambda s: s.level(1, inherited_num_objects=2)),
    broken("V101", "pyramid", lambda s: s.level(1, parent_level=4)),
    broken("V110", "cloud", lambda s: (s.level(fragments_tile=True), s.bytes(FRAGMENTS, head(24, 1), which=2), s.bytes(FRAGMENTS, head(32, 0), which=2))),
]  # fmt: skip


def _short_cell(store: Damage) -> None:
    _first_file(store, "0/vertices").write_bytes(b"\1\0\0")


def _first_file(store: Damage, path: str) -> Path:
    return data_files(store.folder / path)[0]


def _level_links(store: Damage) -> list[str]:
    """Arrays of links from level 0 to level 1 with something in them."""
    folder = store.folder / "0/links/+1"
    found = sorted({path.relative_to(store.folder).as_posix() for path in folder.iterdir() if (path / "c").exists()})
    return found or [folder.relative_to(store.folder).as_posix()]


def _first_segment(store: Damage) -> str:
    """An array of faces across chunks."""
    folder = store.folder / "0/links/0"
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name != "0.0.0_0.0.0")
    return f"0/links/0/{names[0]}"


def _one_chunk(record: bytes) -> bytes:
    """A record of three ends, all moved to the chunk of the first."""
    ends = np.frombuffer(record, np.int64).reshape(3, 4).copy()
    ends[1:] = ends[0]
    return ends.tobytes()


def wide() -> Geometry:
    """A graph with links of int64."""
    links = STORES["graph"]().levels[0].links
    return with_level(STORES["graph"](), links=replace(links, rows=links.rows.astype(np.int64)))


MADE = {**STORES, "graph-wide": wide, "explicit": lambda: explicit(STORES["cloud"]())}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Each store, written once."""
    folder = tmp_path_factory.mktemp("written")

    def get(name: str, layout: str) -> Path:
        path = folder / f"{name}-{layout}"
        if not path.exists():
            write(MADE[name](), path, layout=layout, shards=False, compression=None)
        return path

    return get


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rule_is_found_broken(layout: str, written: Callable[[str, str], Path], tmp_path: Path) -> None:
    """Items with V: each store that breaks a rule is told by that rule, at its severity, with a place, and no store makes it fail."""
    missed = []
    for i, (rule, name, change, layouts, severity) in enumerate(BROKEN):
        if layout not in layouts:
            continue
        path = tmp_path / str(i)
        shutil.copytree(written(name, layout), path)
        change(Damage(path, layout))
        found = validate(path)
        if not any(problem.rule == rule and problem.level == severity for problem in found):
            missed.append((i, rule, name, [str(problem) for problem in found]))
    assert missed == []


def test_every_rule_has_a_store_that_breaks_it() -> None:
    """No rule without a damage, none worse than its rule, and the worst as bad as the rule says."""
    assert {entry[0] for entry in BROKEN} == set(RULES)
    for rule, _, _, _, severity in BROKEN:
        assert SEVERITIES.index(severity) >= SEVERITIES.index(RULES[rule].level)
    assert {rule for rule, _, _, _, severity in BROKEN if severity == RULES[rule].level} == set(RULES)


def test_the_page_is_that_of_the_rules() -> None:
    """The table of docs/reference/geometry-rules.md is what `rules_table` makes of the rules; write it again after a change."""

    def level(rule: Rule) -> str:
        return f"{DEPTH_OF[rule.id]} {LEVELS[DEPTH_OF[rule.id] - 1]}"

    assert table_of("geometry-rules.md") == rules_table(RULES.values(), {"checked at": level})


def test_levels_hold_those_before(written: Callable[[str, str], Path], tmp_path: Path) -> None:
    """A fault of each level is found from its level on, and not before; levels have numbers and names."""
    shutil.copytree(written("pyramid", "0.9"), tmp_path / "a")
    store = Damage(tmp_path / "a", "0.9")
    (store.folder / "0/.zattrs").write_text("{}")
    store.level(1, bin_ratio=[9, 2, 2])
    store.level(0, vertex_count=1)
    store.root(format_capabilities=["x", "multiscale_links"])
    for depth, name in enumerate(LEVELS, 1):
        found = validate(store.folder, depth)
        assert found == validate(store.folder, name)
        assert {problem.rule for problem in found} == {
            r for r in ("V001", "V099", "V098", "V100") if DEPTH_OF[r] <= depth
        }
    with pytest.raises(SourceError, match="1 to 5"):
        validate(store.folder, 6)
    with pytest.raises(NotFoundError):
        validate(tmp_path / "nothing")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("rule", "change"), [("V050", {"cross_level_storage": "none"}), ("V079", {"format_capabilities": []})]
)
def test_links_across_levels_are_told_without_their_values(
    rule: str, change: Json, layout: str, written: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """What the root says of links across levels is metadata: it is checked at level 2, as the page of the rules says."""
    shutil.copytree(written("pyramid", layout), tmp_path / "a")
    Damage(tmp_path / "a", layout).root(**change)
    assert DEPTH_OF[rule] == 2
    assert rule in {problem.rule for problem in validate(tmp_path / "a", 2)}


@pytest.mark.parametrize(
    ("rule", "name", "change", "layouts", "severity"), [e for e in BROKEN if e[0] in ("V043", "V057", "V076")]
)
def test_rules_that_need_values_are_told_at_their_level(
    rule: str,
    name: str,
    change: Callable[[Damage], None],
    layouts: tuple[str, ...],
    severity: str,
    written: Callable[[str, str], Path],
    tmp_path: Path,
) -> None:
    """Counts are compared with the values that are read from level 3 on, which is the level of their rules."""
    shutil.copytree(written(name, layouts[0]), tmp_path / "a")
    change(Damage(tmp_path / "a", layouts[0]))
    assert DEPTH_OF[rule] == 3
    assert (rule, severity) in {(problem.rule, problem.level) for problem in validate(tmp_path / "a", 3)}


def test_problems_have_their_place(written: Callable[[str, str], Path], tmp_path: Path) -> None:
    """All problems are listed, each with level, family, chunk and object, in words and by themselves."""
    shutil.copytree(written("streamline", "0.9"), tmp_path / "a")
    store = Damage(tmp_path / "a", "0.9")
    for which in range(3):
        store.bytes("0/vertices", lambda old: old[:-3], which)
    manifests(head(4, 99, 0, 0, 0, 0, 0, 0, 0))(store)
    found = validate(store.folder)
    torn = [problem for problem in found if problem.rule == "V010"]
    assert len(torn) == 3
    assert all(isinstance(p, PlacedProblem) and p.resolution == 0 and p.family == "vertices" and p.chunk for p in torn)
    lost = next(problem for problem in found if problem.rule == "V067")
    assert isinstance(lost, PlacedProblem)
    assert lost.object_id == 3
    assert "V067 must: 0/object_index, object 3: it refers to chunk 99." in str(lost)


@pytest.mark.nightly
@settings(examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["spots", "mesh", "streamline", "pyramid"]),
    layout=st.sampled_from(LAYOUTS),
    at=st.floats(0, 1),
    bit=st.integers(0, 7),
    which=st.integers(0, 10**6),
    cut=st.booleans(),
)
def test_no_damage_makes_it_fail(
    written: Callable[[str, str], Path],
    tmp_path: Path,
    name: str,
    layout: str,
    at: float,
    bit: int,
    which: int,
    cut: bool,
) -> None:
    """Whatever bit is flipped and wherever a file is cut, the validator comes to its end with a list."""
    path = tmp_path / "flipped"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(written(name, layout), path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    file = files[which % len(files)]
    data = bytearray(file.read_bytes())
    if data:
        place = int(at * (len(data) - 1))
        data[place] ^= 1 << bit
        file.write_bytes(bytes(data[:place] if cut else data))
    assert isinstance(validate(path), list)


def test_a_lying_manifest_costs_no_memory(written: Callable[[str, str], Path], tmp_path: Path) -> None:
    """A manifest that declares 2**60 fragments is told, and nothing is written out."""
    shutil.copytree(written("streamline", "0.9"), tmp_path / "a")
    one = struct.pack("<I3qB2q", 1, 0, 0, 0, 1, 0, 2**60)
    manifests(lambda _: one)(Damage(tmp_path / "a", "0.9"))
    assert "V067" in {problem.rule for problem in validate(tmp_path / "a")}


def test_writing_is_checked_beside() -> None:
    """What is validated is also refused on writing: the two know the same layouts."""
    assert set(writing.LAYOUTS) == set(LAYOUTS)


@pytest.fixture(params=LAYOUTS)
def draco(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A mesh in Draco, a file for each chunk."""
    pytest.importorskip("DracoPy", reason="the extra draco is not installed")
    made = make_geometry(mesh(), ChunkingOptions(chunk_shape=EDGE, encoding="draco"))
    write(made, tmp_path / "store", layout=request.param, shards=False)
    return tmp_path / "store"


def cells(store: Path) -> list[Path]:
    """Give the file of each chunk of the vertices, the smallest first."""
    return sorted(data_files(store / "0/vertices"), key=lambda file: (file.stat().st_size, str(file)))


def put(of: Path, at: Path) -> None:
    """Put what one chunk holds in the place of another."""
    if (at.parents[1] / "zarr.json").exists() and at.parent.name == "c":
        shutil.rmtree(at.parents[1])
        shutil.copytree(of.parents[1], at.parents[1])
    else:
        shutil.copyfile(of, at)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_meshes_in_draco_are_sound(layout: str, tmp_path: Path) -> None:
    """Items 14, 16: a rounded vertex may lie beyond its chunk and the bounds by one step of the rounding; that is no fault."""
    pytest.importorskip("DracoPy", reason="the extra draco is not installed")
    for seed in range(4):
        shapes = replace(mesh(), positions=walk(40, seed=seed))
        write(
            make_geometry(shapes, ChunkingOptions(chunk_shape=EDGE, encoding="draco")),
            tmp_path / f"{seed}",
            layout=layout,
        )
        assert [str(problem) for problem in validate(tmp_path / f"{seed}")] == []


def test_a_cell_that_does_not_decode_is_told(draco: Path) -> None:
    """Item 14: a bit stream that is none is told by its chunk, and its faces and vertices are not counted."""
    last = cells(draco)[-1]
    whole = last.read_bytes()
    at = whole.index(b"DRACO")
    last.write_bytes(whole[: at + 5] + bytes(len(whole) - at - 5))
    found = validate(draco)
    assert [problem.rule for problem in found if problem.path.startswith("0/vertices, chunk")] == ["V000"]


def test_another_mesh_in_a_cell_is_told(draco: Path) -> None:
    """Items 14, 16, 34, 54, 82, 98: a cell with vertices and faces of another chunk breaks every rule that counts them."""
    put(cells(draco)[0], cells(draco)[-1])
    found = {problem.rule: problem for problem in validate(draco)}
    assert {"V016", "V034", "V054", "V082", "V098"} <= set(found)
    assert found["V016"].level == "should"

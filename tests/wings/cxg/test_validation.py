"""The validator and the inspection of CXG: every numbered rule is told where it is broken, and only there."""

import json
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from raggedatlas.errors import ArgumentError, NotFoundError, SourceError
from raggedatlas.model.reports import Element
from raggedatlas.wings.cxg import RULES, CxgInspection, inspect, validate
from raggedatlas.wings.cxg import validation as values_module
from raggedatlas.wings.cxg.tiledb_arrays import open_array
from support import cxg_files
from support.cxg_faults import DAMAGES, CxgDamage
from support.cxg_files import FORMS, VERSIONS, Form, set_meta, write_cxg
from support.rules_page import rules_table, table_of

COMMAND = Path(sys.executable).parent / "raggedatlas"

LEVELS = ("must", "should", "practice")

NUMBERS = [*range(8), *range(10, 33), *range(40, 46), *range(50, 54), 60, 61, 70, 71]

MILD = {"unnamed": {"C26"}}
"""What is told of a small CXG without fault."""


@pytest.mark.parametrize("form", FORMS)
def test_a_good_cxg_breaks_no_rule(form: Form, tmp_path: Path) -> None:
    """Every version and layout passes every rule at both levels; that one is of the unnamed version is said."""
    path = write_cxg(tmp_path / "x.cxg", form)
    for level in ("metadata", "full"):
        problems = validate(path, level)
        assert {p.rule for p in problems} == MILD.get(form, set()), [str(p) for p in problems]
        assert all(p.level == "practice" for p in problems)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: f"{d.rule}-{d.form}: {d.label}")
def test_each_damage_is_told(damage: CxgDamage, tmp_path: Path) -> None:
    """A damaged CXG is told by the rule that it breaks, at the level that was meant, and by no other rule.

    What values must be read for is told at the level full alone; the folder stays as it was.
    """
    path = write_cxg(tmp_path / "x.cxg", damage.form)
    damage.change(path)
    before = content(path)
    problems = validate(path, "full")
    assert content(path) == before
    expected = {damage.rule} | damage.also | MILD.get(damage.form, set())
    assert {p.rule for p in problems} == expected, [str(p) for p in problems]
    mine = [p for p in problems if p.rule == damage.rule]
    assert {p.level for p in mine} == {damage.level}, [str(p) for p in mine]
    assert all(p.message.endswith(".") and p.fix.endswith(".") for p in problems), [str(p) for p in problems]
    if RULES[damage.rule].depth == "full":
        assert damage.rule not in {p.rule for p in validate(path)}


def content(path: Path) -> dict[str, bytes]:
    return {str(at.relative_to(path)): at.read_bytes() for at in sorted(path.rglob("*")) if at.is_file()}


def test_one_that_is_no_cxg_is_told(tmp_path: Path) -> None:
    """A folder of other things breaks C01 and nothing else is said of it; what is not there, and a level that is not, are refused."""
    assert [p.rule for p in validate("tests/data")] == ["C01"]
    with pytest.raises(NotFoundError, match="check the path"):
        validate(tmp_path / "absent.cxg")
    with pytest.raises(ArgumentError, match="'metadata' or 'full', not 'deep'"):
        validate(tmp_path, "deep")  # type: ignore[arg-type]


def test_first_places_are_named(tmp_path: Path) -> None:
    """A value that differs between Xr and Xc is told by the cell and the feature, a place that comes twice by its place."""
    path = write_cxg(tmp_path / "x.cxg")
    rows, columns = np.nonzero(cxg_files.VALUES)
    values = cxg_files.VALUES[rows, columns]
    changed = values.copy()
    changed[3] += 1
    cxg_files.write_half(
        path / "Xr",
        "obs",
        cxg_files.N_OBS,
        (np.append(rows, 4), np.append(columns, 4), np.append(changed, changed[-2])),
    )
    told = {p.rule: p.message for p in validate(path, "full")}
    assert f"the first cell {rows[3]}" in told["C19"]
    assert "the first at cell 4, feature 4" in told["C20"]


@pytest.mark.parametrize("block", [64, 1 << 20])
def test_blocks_do_not_matter(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that comes twice, on both sides of the end of a block too, is counted once each time, whatever blocks are read."""
    rng = np.random.default_rng(0)
    path = write_cxg(tmp_path / "x.cxg")
    rows, columns = rng.integers(0, cxg_files.N_OBS, 300), rng.integers(0, cxg_files.N_VAR, 300)
    values = np.ones(300, np.float32)
    for name, axis, n, places in (
        ("Xr", "obs", cxg_files.N_OBS, (rows, columns)),
        ("Xc", "var", cxg_files.N_VAR, (columns, rows)),
    ):
        cxg_files.write_half(path / name, axis, n, (*places, values))
    twice = 300 - len(set(zip(rows.tolist(), columns.tolist(), strict=True)))
    whole = values_module.iter_entries

    def in_blocks(*given: object) -> object:
        for cells, features, found in whole(*given):  # type: ignore[arg-type]
            for at in range(0, len(found), block):
                yield cells[at : at + block], features[at : at + block], found[at : at + block]

    monkeypatch.setattr(values_module, "iter_entries", in_blocks)
    told = [p.message for p in validate(path, "full") if p.rule == "C20"]
    assert [message.split()[0] for message in told] == [str(twice), str(twice)]


@pytest.mark.nightly
def test_memory_does_not_grow_with_values(tmp_path: Path) -> None:
    """Three times the values take the same memory: blocks are bounded by buffers, and what is kept by the axes."""
    peaks = []
    for times in (1, 3):
        path = write_cxg(tmp_path / f"{times}.cxg")
        n, k = 1_000, 300 * times
        rows = np.repeat(np.arange(n), k)
        columns = np.tile(np.arange(k), n)
        values = np.ones(n * k, np.float32)
        obs = {"name_0": np.array([str(i) for i in range(n)], dtype=object)}
        var = {"name_0": np.array([str(i) for i in range(4_000)], dtype=object)}
        for table, frame in (("obs", obs), ("var", var)):
            cxg_files.write_frame(path / table, frame, {"index": "name_0", "name_0": {"type": "string"}})
        for name in cxg_files.EMBEDDINGS:
            cxg_files.write_dense(path / "emb" / name, np.ones((n, 2), np.float32))
        cxg_files.write_half(path / "Xr", "obs", n, (rows, columns, values))
        cxg_files.write_half(path / "Xc", "var", 4_000, (columns, rows, values))
        validate(path, "full")
        tracemalloc.start()
        assert {p.level for p in validate(path, "full")} == {"practice"}
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0] + 1e6


@pytest.mark.nightly
def test_the_command_tells_and_exits(tmp_path: Path) -> None:
    """The command takes a CXG as it takes files: exit code 1 for a broken must, JSON on request, and no mended copy."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([COMMAND, *words], capture_output=True, text=True, check=False)

    good = run("validate", str(write_cxg(tmp_path / "good.cxg")), "--level", "full")
    assert (good.returncode, good.stdout) == (0, "Nothing is wrong (full).\n")
    path = write_cxg(tmp_path / "x.cxg", "dense")
    shutil.rmtree(path / "X")
    bad = run("validate", str(path), "--json")
    assert bad.returncode == 1
    assert [problem["rule"] for problem in json.loads(bad.stdout)] == ["C17"]
    assert set(json.loads(bad.stdout)[0]) == {"rule", "level", "path", "message", "fix"}
    refused = run("fix", str(path), str(tmp_path / "y.cxg"))
    assert refused.returncode == 2
    assert "a CXG cannot be repaired" in refused.stderr


@pytest.mark.nightly
def test_a_row_larger_than_the_buffers_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A feature with more values than a block holds is read to its end, in several fragments too; a read that stands still is given up."""
    n = 300_000
    path = write_cxg(tmp_path / "x.cxg")
    cxg_files.write_frame(path / "obs", {"name_0": np.array(["c"] * n, dtype=object)}, {"index": "name_0"})
    for name in cxg_files.EMBEDDINGS:
        cxg_files.write_dense(path / "emb" / name, np.ones((n, 2), np.float32))
    rows, values = np.arange(n), np.ones(n, np.float32)
    cxg_files.write_half(path / "Xr", "obs", n, (rows, np.zeros(n, np.uint32), values))
    cxg_files.write_half(path / "Xc", "var", cxg_files.N_VAR, (np.zeros(n, np.uint32), rows, values))
    assert {p.rule for p in validate(path, "full")} == {"C30", "C32", "C53"}
    with open_array(path / "Xc", "w") as array:
        array[np.zeros(2, np.uint32)] = {"": np.ones(2, np.float32), "obs": np.array([5, n - 1], np.uint32)}
    told = [p.message for p in validate(path, "full") if p.rule == "C20"]
    assert told == ["2 values occur again, the first at cell 5, feature 0."]
    monkeypatch.setattr(values_module, "MAX_EMPTY_READS", -1)
    assert [p.path for p in validate(path, "full") if p.rule == "C00"] == ["Xr", "Xc"]


@pytest.mark.fast
def test_every_rule_has_a_damage() -> None:
    """Rules are C00 to C71; there is a way to break each rule and no other, and none is worse than its rule."""
    assert list(RULES) == [f"C{number:02d}" for number in NUMBERS]
    assert {damage.rule for damage in DAMAGES} == set(RULES)
    assert {damage.rule for damage in DAMAGES if not damage.also} == set(RULES)
    for damage in DAMAGES:
        assert LEVELS.index(damage.level) >= LEVELS.index(RULES[damage.rule].level), damage
    worst = {rule: min(LEVELS.index(d.level) for d in DAMAGES if d.rule == rule) for rule in RULES}
    assert {rule: LEVELS[at] for rule, at in worst.items()} == {rule.id: rule.level for rule in RULES.values()}


@pytest.mark.fast
def test_the_page_is_that_of_the_rules() -> None:
    """The table of docs/reference/cxg-rules.md is what `rules_table` makes of the rules, which are sentences; write it again after a change."""
    assert table_of("cxg-rules.md") == rules_table(RULES.values(), {"needs": lambda rule: rule.depth})
    assert all(rule.sentence.endswith(".") and rule.fix.endswith(".") for rule in RULES.values())


LAYOUTS: dict[Form, str] = {"split": "split", "dense": "dense", "sparse": "sparse", "old": "dense", "unnamed": "dense"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> CxgInspection:
    """A CXG of version 0.3.0, looked at."""
    return inspect(write_cxg(tmp_path_factory.mktemp("inspect") / "x.cxg"))


def all_of(element: Element) -> dict[str, Element]:
    inner = {path: one for child in element.children for path, one in all_of(child).items()}
    return {element.path: element, **inner}


@pytest.mark.parametrize("form", FORMS)
def test_version_and_layout_are_told_with_their_reason(form: Form, tmp_path: Path) -> None:
    """Version and layout of every form are told, and from what."""
    path = write_cxg(tmp_path / "x.cxg", form)
    seen = inspect(path)
    assert (seen.version, seen.layout) == (VERSIONS[form] or "unnamed", LAYOUTS[form])
    assert "cxg_group_metadata" in seen.reason
    assert f"layout {LAYOUTS[form]}" in seen.reason
    assert seen.n_bytes == sum(at.stat().st_size for at in path.rglob("*") if at.is_file())


def test_the_tree_says_what_stands_there(found: CxgInspection) -> None:
    """Shapes, types, categories, filters and metadata are those of the CXG; the document has all of it."""
    seen = all_of(found.root)
    assert found.root.shape == (6, 5)
    assert seen["obs"].shape == (6,)
    assert seen["obs"].encoding == "dense array, 7 columns"
    assert (seen["obs/kind"].encoding, seen["obs/kind"].dtype) == ("categorical of 3", "int8")
    assert (seen["obs/name_0"].encoding, seen["obs/name_0"].dtype) == ("string, the index", "text")
    assert (seen["Xr/var"].shape, seen["Xr/var"].dtype) == ((8,), "uint32")
    assert (seen["emb/umap"].shape, seen["emb/umap"].dtype, seen["emb/umap"].n_bytes) == ((6, 2), "float32", 48)
    assert seen["cxg_group_metadata@cxg_version"].facts() == "metadata 0.3.0"
    assert json.loads(json.dumps(found.to_dict()))["reason"] == found.reason
    text = str(found)
    assert text.startswith("x.cxg: CXG 0.3.0, ")
    assert "└── kind" not in text
    assert "├── kind: categorical of 3, 6, int8" in text
    assert text.count("\n") == len(list(found.lines()))


def test_notebooks_see_a_tree(found: CxgInspection) -> None:
    """The HTML has a line for each element, and what folds is balanced."""
    page = found._repr_html_()
    assert page.count("<details") == page.count("</details>") > 4
    assert page.count("<div") == page.count("</div>")
    assert "percent.mt" in page


def test_hostile_metadata_is_text(cxg: Path) -> None:
    """Markup in metadata is escaped, long values are cut, and their size is said."""
    set_meta(cxg / "uns", spatial="<script>alert(1)</script>" + "x" * 5_000)
    seen = inspect(cxg)
    assert "<script>" not in seen._repr_html_()
    assert "5.03 kB" in all_of(seen.root)["uns@spatial"].facts()


def test_what_cannot_be_opened_is_in_the_tree(tmp_path: Path) -> None:
    """An array whose schema is damaged is shown with the reason; what is no CXG is refused by its rule."""
    path = write_cxg(tmp_path / "x.cxg", "dense")
    schema = next(at for at in (path / "emb" / "pca" / "__schema").iterdir() if at.is_file())
    schema.write_bytes(b"\xff" * schema.stat().st_size)
    broken = all_of(inspect(path).root)["emb/pca"]
    assert "UNREADABLE" in broken.facts()
    with pytest.raises(SourceError, match="C01"):
        inspect("tests/data")
    with pytest.raises(NotFoundError):
        inspect(tmp_path / "absent.cxg")


@pytest.mark.nightly
def test_the_command_draws_it(tmp_path: Path) -> None:
    """`raggedatlas inspect` draws the tree, to a depth, or prints the document."""
    path = write_cxg(tmp_path / "x.cxg")
    words = [COMMAND, "inspect", str(path)]
    drawn = subprocess.run([*words, "--depth", "1"], capture_output=True, text=True, check=True).stdout
    assert "CXG 0.3.0" in drawn
    assert "layout split: there are Xr and Xc" in drawn
    assert len(drawn.splitlines()) == 1 + 7
    document = json.loads(subprocess.run([*words, "--json"], capture_output=True, text=True, check=True).stdout)
    assert (document["version"], document["layout"]) == ("0.3.0", "split")

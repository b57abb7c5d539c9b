"""The validator: every numbered rule is told where it is broken, and only there."""

import shutil
import warnings
from pathlib import Path

import anndata as ad
import pytest

from raggedatlas import RaggedAtlas
from raggedatlas.errors import AtlasError
from raggedatlas.formats.anndata import RULES, Problem, repair, validate
from raggedatlas.formats.anndata.fixes import FIXES
from raggedatlas.testing.anndata_faults import DAMAGES, FORMS, Damage, Form, damage, write_good

Goods = dict[tuple[Form, bool], Path]


@pytest.fixture(scope="session")
def goods(tmp_path_factory: pytest.TempPathFactory) -> Goods:
    """One good file of each kind, without and with an awkward array."""
    folder = tmp_path_factory.mktemp("goods")
    return {
        (form, awkward): write_good(folder / f"{form}{awkward}", form, awkward=awkward)
        for form in FORMS
        for awkward in (False, True)
    }


def copied(good: Path, to: Path) -> Path:
    shutil.copytree(good, to) if good.is_dir() else shutil.copyfile(good, to)
    return to


def rules_of(problems: list[Problem]) -> set[str]:
    return {problem.rule for problem in problems}


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_a_good_file_breaks_no_rule(goods: Goods, form: Form) -> None:
    """A file with every kind of element passes every rule at both levels; that awkward arrays are experimental is said."""
    assert validate(goods[form, False], "metadata") == validate(goods[form, False], "full") == []
    assert rules_of(validate(goods[form, True], "full")) == {"A152"}


def test_every_rule_has_a_damage() -> None:
    """There is a way to break each rule, none for a rule that does not exist, and mends only for rules that say so."""
    assert {found.rule for found in DAMAGES} == set(RULES)
    assert set(FIXES) == {rule.id for rule in RULES.values() if rule.fixed}


@pytest.fixture(scope="session")
def atlas(tmp_path_factory: pytest.TempPathFactory) -> RaggedAtlas:
    """An atlas without anything in it."""
    return RaggedAtlas.create(tmp_path_factory.mktemp("atlas") / "a.atlas")


@pytest.mark.parametrize("found", [d for d in DAMAGES if "hdf5" in d.forms], ids=lambda d: f"{d.rule}: {d.label}")
def test_each_damage_is_told(goods: Goods, found: Damage, atlas: RaggedAtlas, tmp_path: Path) -> None:
    """A damaged file is told by the rule that it breaks and by no other, and adding it is refused by that rule or works.

    It works where the rule says so; nothing of a refused file is left in the atlas.
    """
    path = copied(goods["hdf5", found.awkward], tmp_path / "x.h5ad")
    damage(path, found.change)
    experimental = {"A152"} if found.awkward else set()
    problems = validate(path, "full")
    assert rules_of(problems) == {found.rule} | found.also | experimental, [str(p) for p in problems]
    assert all(
        p.message.endswith(".") and p.fix.endswith(".") and p.level in ("must", "should", "practice") for p in problems
    )
    assert told(found, problems)
    broken = {problem.rule for problem in problems if problem.level == "must"}
    stops = {rule for rule in broken if RULES[rule].refused}
    before = content(Path(atlas.uri))
    refused = ""
    try:
        report = atlas.add(path, dry_run=not stops, progress=False)
    except AtlasError as error:
        refused = str(error)
    assert content(Path(atlas.uri)) == before
    if refused:
        assert str(path) in refused
        assert any(rule in refused for rule in broken) or "A00" in broken, (refused, broken)
    else:
        assert not stops
        assert {rule for rule in broken if any(f"breaks {rule} " in note for note in report.notes)} == broken


ALONE = {"A11", "A12", "A13", "A70", "A74"}
"""Rules without which the others cannot be looked at."""

UNMENDED = {
    "text in obsm", "a mapping in varm", "raw without var", "raw/X is too wide", "indices are fractions",
    "_index names nothing", "the version of anndata 0.7", "a group as string", "a number as text", "numbers as text",
    "invalid UTF-8", "a short mask", "raw is an array", "categories of numbers as text",
}  # fmt: skip
"""Damages that nothing can fix though their rule can be mended elsewhere."""

BY_VALUES = {"offsets go beyond the data", "invalid UTF-8", "a frame of other names"}
"""Damages that only values tell, of rules that can also be broken by metadata."""


def apart(one: str, other: str) -> bool:
    return not (f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/"))


def batches(form: Form) -> list[list[Damage]]:
    """Gather damages that do not touch each other into few files; of Zarr only the first of each rule."""
    found: list[list[Damage]] = []
    firsts = {d.rule: d for d in reversed(DAMAGES) if form in d.forms}
    for new in (d for d in DAMAGES if form in d.forms and (form == "hdf5" or firsts[d.rule] is d)):
        alone = new.rule in ALONE or not new.place
        fitting = (b for b in found if all(d.rule not in ALONE and d.place and apart(d.place, new.place) for d in b))
        batch = None if alone else next(fitting, None)
        if batch is None:
            found.append([new])
        else:
            batch.append(new)
    return found


BATCHES = [("hdf5", batch) for batch in batches("hdf5")]
BATCHES += [("zarr2" if i % 2 else "zarr3", batch) for i, batch in enumerate(batches("zarr3"))]


def told(found: Damage, problems: list[Problem]) -> bool:
    """Tell whether a damage is among the problems of a file that has several."""
    inside = (p for p in problems if p.rule == found.rule)
    return any(not p.path or not apart(p.path, found.place) for p in inside)


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "batch"), BATCHES, ids=[f"{form}: {' '.join(d.rule for d in batch)}" for form, batch in BATCHES]
)
def test_damages_are_told_and_mended_in_every_kind_of_file(
    goods: Goods, form: Form, batch: list[Damage], tmp_path: Path
) -> None:
    """Many faults of one file are all told, by metadata where that is enough; the copy has the mendable ones mended.

    What is mended is said, what is not is told again, the file stays as it was, and anndata opens a copy without fault.
    """
    awkward = any(found.awkward for found in batch)
    path = copied(goods[form, awkward], tmp_path / "bad")
    for found in batch:
        damage(path, found.change)
    before = content(path)
    lists = {level: validate(path, level) for level in ("metadata", "full")}
    for found in batch:
        assert told(found, lists["full"]), found
        by_metadata = RULES[found.rule].depth == "metadata" and found.label not in BY_VALUES
        assert told(found, lists["metadata"]) == by_metadata or RULES[found.rule].depth == "full", found
    done = repair(path, tmp_path / "mended")
    assert content(path) == before
    assert list(done.left) == validate(tmp_path / "mended", "full")
    for found in batch:
        mended = RULES[found.rule].fixed and found.label not in UNMENDED
        assert told(found, list(done.left)) != mended, (found, done)
        assert any(line.startswith(f"{found.rule} ") for line in done.mended) or not mended, (found, done)
    if not any(problem.level == "must" for problem in done.left):
        read = ad.read_h5ad if form == "hdf5" else ad.read_zarr
        with warnings.catch_warnings(action="ignore"):
            read(tmp_path / "mended")


def content(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(at for at in path.rglob("*") if at.is_file())
    return {str(at.relative_to(path)): at.read_bytes() for at in files}

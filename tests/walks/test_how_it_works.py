"""The page how-it-works tells six calls as they are: which functions in which order, and every file that they enter.

A step names functions as `` `file.py` `function` ``. They begin in the order of the page, those after the word *meanwhile*, which other threads run,
after the first one of their step. What else a call enters is in the line ``Also entered``, or above the first list.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.walks import Entered, files_entered, trace_walks

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "how-it-works.md"
TITLES = {
    "add": "`atlas.add(path)`",
    "query": "`view.query().where(...).to_anndata()`",
    "batch": "A batch of a `Loader`",
    "copy": "`ra.copy(source, target)`",
    "snapshot": "`atlas.snapshot()`",
    "delete_cells": "`atlas.delete_cells(condition)`",
}
FUNCTION = re.compile(r"`([\w/]+\.py)`\s+`([\w.]+)`")
FILE = re.compile(r"`([\w/]+\.py)`")


@dataclass(frozen=True)
class Told:
    """A walk as the page tells it: its steps, and the files that it enters beside those of its functions."""

    steps: tuple[str, ...]
    beside: frozenset[str]

    def differences(self, walk: list[Entered], everywhere: frozenset[str]) -> list[str]:
        """Compare with a walk that was traced; `everywhere` are the files that the page names for all walks."""
        found: list[str] = []
        place = {entered: number for number, entered in enumerate(walk)}
        last = -1
        named: set[str] = set()
        for step in self.steps:
            here, _, meanwhile = step.partition("meanwhile")
            first: int | None = None
            for text, in_order in ((here, True), (meanwhile, False)):
                for function in (Entered(*names) for names in FUNCTION.findall(text)):
                    named.add(function.file)
                    at = place.get(function)
                    if at is None:
                        found.append(f"{function.file} {function.name} is not entered")
                        continue
                    first = at if first is None else first
                    if at < (last if in_order else first):
                        found.append(f"{function.file} {function.name} is entered earlier")
                    last = max(last, at) if in_order else last
        files = files_entered(walk)
        found += [f"{file} is entered and not named" for file in sorted(files - named - self.beside - everywhere)]
        found += [f"{file} is named and not entered" for file in sorted(self.beside - files)]
        return found + [f"{file} is named twice" for file in sorted(self.beside & (named | everywhere))]


def read_page(text: str) -> tuple[frozenset[str], dict[str, Told]]:
    """Return the files that the page names for all walks, and the walks by their titles."""
    chapter = text.partition("## Six calls, step by step\n")[2].partition("\n## ")[0]
    above, *sections = chapter.split("\n### ")
    told = {}
    for section in sections:
        title, _, body = section.partition("\n")
        steps, _, beside = body.partition("Also entered:")
        told[title] = Told(tuple(re.split(r"^\d+\. ", steps, flags=re.MULTILINE)[1:]), frozenset(FILE.findall(beside)))
    return frozenset(FILE.findall(above)), told


@pytest.fixture(scope="module")
def walks(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Entered]]:
    return trace_walks(data_dir, tmp_path_factory.mktemp("walks"))


@pytest.mark.parametrize("name", TITLES)
def test_the_page_tells_the_call(name: str, walks: Mapping[str, list[Entered]]) -> None:
    """The functions of the page are entered in its order, and no file that is entered is left out."""
    everywhere, told = read_page(PAGE.read_text("utf-8"))
    assert told.keys() == {*TITLES.values()}
    assert 6 <= len(told[TITLES[name]].steps) <= 12
    assert told[TITLES[name]].differences(walks[name], everywhere) == []


@pytest.mark.long
def test_what_most_calls_enter_is(walks: Mapping[str, list[Entered]]) -> None:
    """Each file that the page names for all calls is entered by most of them."""
    everywhere, _ = read_page(PAGE.read_text("utf-8"))
    assert everywhere
    assert [file for file in everywhere if sum(file in files_entered(walk) for walk in walks.values()) < 4] == []


def test_differences_are_found() -> None:
    """A function of another name or at another place, another order and a file that is not named are told."""
    walk = [
        Entered("a.py", "begin"),
        Entered("b.py", "Reader.read"),
        Entered("c.py", "end"),
        Entered("model/d.py", "e"),
    ]
    everywhere, told = read_page(
        "## Six calls, step by step\n\nAll: `x.py`.\n\n### one\n\n1. `a.py` `begin`: starts,\n   and `b.py` `Reader.read`.\n"
        "2. `c.py` `end`: ends.\n\nAlso entered: `y.py`.\n\n### two\n\n1. `c.py` `end`; meanwhile `b.py` `begin`, `a.py`\n`begin`.\n\n## Next\n`z.py`"
    )
    assert everywhere == {"x.py"}
    assert told["one"].differences(walk, everywhere) == ["y.py is named and not entered"]
    assert told["two"].differences(walk, everywhere) == [
        "b.py begin is not entered", "a.py begin is entered earlier",
    ]  # fmt: skip
    assert Told(told["one"].steps[::-1], frozenset({"y.py"})).differences(walk[:3], frozenset({"y.py"})) == [
        "a.py begin is entered earlier", "b.py Reader.read is entered earlier",
        "y.py is named and not entered", "y.py is named twice",
    ]  # fmt: skip
    assert Told(told["one"].steps[:1], frozenset()).differences(walk, everywhere) == ["c.py is entered and not named"]

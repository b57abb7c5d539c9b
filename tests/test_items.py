"""`tests/ITEMS.md` names a test for every numbered item; `scripts/test_map` writes it."""

import ast
import re
from pathlib import Path

import pytest

from raggedatlas.formats.anndata.rules import RULES as ANNDATA
from raggedatlas.formats.cxg.rules import RULES as CXG
from raggedatlas.vectors.validation.rules import RULES as GEOMETRY

# The page is the same on every Python.
pytestmark = pytest.mark.long

TESTS = Path(__file__).parent


def numbers(letter: str, *ranges: tuple[int, int]) -> set[str]:
    """Return the items of a list, e.g. C01 to C05."""
    width = 2 if letter == "C" else 1
    return {f"{letter}{number:0{width}d}" for first, last in ranges for number in range(first, last + 1)}


RESULTS = numbers("C", (1, 5), (10, 27), (30, 46), (50, 59), (60, 66), (70, 71), (80, 97)) | numbers("R", (1, 9))


def sections() -> list[str]:
    return re.split(r"^## ", (TESTS / "ITEMS.md").read_text("utf-8"), flags=re.MULTILINE)[1:]


def test_every_item_has_a_test() -> None:
    """Rules of the three validators and the checklist of results are on the page."""
    for items, section in zip((set(ANNDATA), set(CXG), set(GEOMETRY), RESULTS), sections(), strict=False):
        assert sorted(items - set(re.findall(r"^\| (\w+) \|", section, re.MULTILINE))) == []


def test_every_test_on_the_page_exists() -> None:
    """After a test was renamed or removed, `scripts/test_map` writes the page again."""
    functions: dict[str, set[str]] = {}
    for name in set(re.findall(r"`([\w/]+\.py::\w+)`", (TESTS / "ITEMS.md").read_text("utf-8"))):
        path, _, function = name.partition("::")
        if path not in functions:
            tree = ast.parse((TESTS / path).read_text("utf-8"))
            functions[path] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert function in functions[path], f"{name} is gone; run scripts/test_map"

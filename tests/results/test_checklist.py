"""Every point of the checklist of results stands in the docstring of a test, and the pages and benchmarks say what they must."""

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent
NAME = re.compile(r"\b[CRX]\d{1,2}\b")


def spread(letter: str, *ranges: tuple[int, int]) -> set[str]:
    width = 2 if letter == "C" else 1
    return {f"{letter}{number:0{width}d}" for first, last in ranges for number in range(first, last + 1)}


OF_VERBS = spread("C", (53, 57)) | {"C94", "C96", "R5"}
"""Points about what is done over an atlas: infer, test, engine, umap, save_to_database, lookup, visualize."""

POINTS = (
    spread("C", (1, 5), (10, 27), (30, 46), (50, 59), (60, 66), (70, 71), (80, 97)) | spread("R", (1, 9))
) - OF_VERBS


def named_in(folder: Path) -> set[str]:
    """Collect the points that docstrings of tests name."""
    return {name for text in docstrings(folder) for name in NAME.findall(text)}


def docstrings(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield ast.get_docstring(node) or ""


def test_every_point_has_a_test() -> None:
    """All points but those of the verbs are named by tests of results."""
    assert sorted(POINTS - named_in(Path(__file__).parent)) == []


def test_every_point_of_the_verbs_has_a_test() -> None:
    """The points of the verbs are named by tests of the verbs."""
    if not list((TESTS / "verbs").glob("test_*.py")):
        pytest.skip("the verbs have no tests yet")
    assert sorted(OF_VERBS - named_in(TESTS)) == []


def test_the_pages_name_the_way_out() -> None:
    """C71: the pages tell of ResultDataset first, that InferenceDataSet is deprecated, and how old results are converted."""
    how_to = (ROOT / "docs" / "how-to" / "results.md").read_text(encoding="utf-8")
    assert how_to.index("ResultDataset") < how_to.index("InferenceDataSet")
    for words in ("deprecated", "convert_results --results-dir", "In this release it still reads; a later one may not"):
        assert words in how_to


@pytest.fixture
def benchmark_page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = ROOT / "benchmarks" / "results.py"
    monkeypatch.syspath_prepend(str(path.parent))
    before = set(sys.modules)
    spec = importlib.util.spec_from_file_location("results_page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in set(sys.modules) - before:
        if str(path.parent) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    return module


def test_the_benchmark_judges(benchmark_page: ModuleType) -> None:
    """C97, R3, R8: writing, random rows, walks, memory and disk stand beside the .npy classes, and a missed target is said."""
    read = dict.fromkeys(("row", "rows512", "walk", "walk_by_number", "ids"), 1.0)
    write = {"cpu": 1.0, "wall": 1.0, "peak_mb": 10.0, "bytes": 27_200_000, "versions": 1}
    figures = {("raggedatlas", operation, "float32x64"): made for operation, made in (("read", read), ("write", write))}
    figures |= {("raggedatlas", "write", name): write for name in ("1x", "4x", "1000")}
    for peer, times in (("hyrax", 60.0), ("hyrax-npy", 0.5)):
        for operation, made in (("read", read), ("write", write)):
            figures[peer, operation, "float32x64"] = {key: times * value for key, value in made.items()}
    page = benchmark_page.page(figures, 100_000)
    assert "| one random row, µs | 1 | 60 | 0.5 |" in page
    assert "| write in batches of 512, CPU s | 1 | 60 | 0.5 |" in page
    assert "| the same, extra memory MB | 10 | 600 | 5 |" in page
    assert "one random row, times hyrax: 60.0x, at least 50x: reached\n" in page
    assert "a loop over rows, times hyrax: 60.0x, at least 100x: NOT REACHED" in page
    assert "writing, times hyrax: 60.0x, at least 2x: reached" in page
    assert "writing, times the .npy classes: 0.5x, at least 1x: NOT REACHED" in page
    assert "disk over values and ids: raggedatlas +0.0 %" in page
    assert "convert and compare, times the public way: not measured" in page

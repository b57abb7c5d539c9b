"""What calls return is shown as text that a person can read, as the command prints it, and as a table in notebooks."""

from html.parser import HTMLParser
from typing import Any

import pytest

import raggedatlas as ra
from command import done
from support.atlases import small_anndata


class Text(HTMLParser):
    """The texts of a page, and whether its tags are closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.opened: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.opened.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the calls of an atlas return."""
    folder = tmp_path_factory.mktemp("shown")
    atlas = ra.RaggedAtlas.create(folder / "a.atlas")
    added = atlas.add([small_anndata(1, 1200), small_anndata(2, 5)], organism="human", progress=False)
    atlas.snapshot("<one>")
    one = atlas.add(small_anndata(3, 5), "third", organism="human", progress=False)
    view = atlas.checkout(atlas.snapshot())
    return {
        "atlas": atlas, "view": view, "reports": added, "report": one, "versions": atlas.list_versions(), "diff": atlas.diff(1, 2), "gc": atlas.gc(),
        "sync": atlas.sync(folder / "b.atlas"), "delete_cells": atlas.delete_cells("n_genes > 5", dry_run=True),
        "validate": atlas.validate(), "explain": view.query().explain(), "query": view.query(), "dataset": atlas.dataset("third"),
        "loader": ra.Loader(view.query(), 64), "verify": atlas.verify(),
    }  # fmt: skip


def test_each_is_shown_as_text_and_as_a_table(results: dict[str, Any]) -> None:
    """Lines without the names of classes of ours or quoted line ends, and the same words in the table."""
    for name, result in results.items():
        text = repr(result)
        assert "\\n" not in text, name
        assert "Record(" not in text, name
        assert "Report(" not in text, name
        page = Text(result._repr_html_())
        assert page.opened == [], name
        words = " ".join(page.texts).split()
        missing = [
            word
            for word in text.replace(":", " ").split()
            if word not in words and word.rstrip(":") not in " ".join(words)
        ]
        assert missing == [], name


def test_snapshots_and_counts_are_in_it(results: dict[str, Any]) -> None:
    """With thousands separators; names are escaped."""
    assert "3 datasets, 1,210 cells, 2 snapshots" in repr(results["atlas"])
    assert repr(results["versions"]).splitlines()[0].startswith("Snapshot 1 (<one>): 1,205 cells of 2 datasets, ")
    assert "<one>" not in results["versions"]._repr_html_()
    assert repr(results["validate"]) == "Nothing is wrong."
    assert repr(results["explain"]) == results["explain"]
    assert isinstance(results["reports"], list)
    assert results["versions"][0].label == "<one>"


def test_the_command_prints_the_same(results: dict[str, Any]) -> None:
    """Of a difference, and of a query's plan."""
    place = results["atlas"].uri
    assert done("diff", place, 1, 2).strip() == repr(results["diff"]).strip()
    assert done("query", place, "--explain").strip() == repr(results["explain"]).strip()

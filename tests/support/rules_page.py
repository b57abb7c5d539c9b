"""The tables of the pages in docs/reference that list the rules of a format, made of its rules."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from raggedatlas.model.validation import Rule

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def table_of(page: str) -> str:
    """Return the table of rules in a page; the text above it is nobody's copy."""
    _, mark, rest = (REFERENCE / page).read_text("utf-8").partition("| rule |")
    return mark + rest


def rules_table(rules: Iterable[Rule], columns: Mapping[str, Callable[[Rule], str]]) -> str:
    """Return the table of rules as Markdown.

    `columns` maps the titles of the columns between the level of a rule and its sentence to functions that return their
    text.
    """
    rows = [("rule", "level", *columns, "requirement, and fix"), ("---",) * (len(columns) + 3)]
    for rule in rules:
        level = rule.level if rule.stated else f"{rule.level} \\*"
        text = f"{rule.sentence} {rule.fix}".replace("|", "\\|")
        rows.append((rule.id, level, *(column(rule) for column in columns.values()), text))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)

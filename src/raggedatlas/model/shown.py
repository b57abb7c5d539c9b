"""How results are shown: text by `repr`, which the command prints too, and the same text as a table in notebooks."""

from html import escape
from typing import TypeVar

T = TypeVar("T")

_LONGEST_NAME = 40


class Shown:
    """Base of what is shown as lines of text; notebooks show a table of the lines."""

    # A base class without slots would give subclasses that have slots a `__dict__`.
    __slots__ = ()

    def _repr_html_(self) -> str:
        return as_table(repr(self))


class ShownText(Shown, str):
    """Text of several lines, which `repr` does not quote."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return the text."""
        return str(self)


class ShownList(Shown, list[T]):
    """A list that is shown as its members, one below the other."""

    def __repr__(self) -> str:
        """Return the texts of the members."""
        return "\n".join(map(str, self)) or "none"

    def _repr_html_(self) -> str:
        texts = [str(one) for one in self]
        return (
            "".join(map(as_table, texts)) if any("\n" in text for text in texts) else as_table("\n".join(["", *texts]))
        )


def as_table(text: str) -> str:
    r"""Return lines of text as an HTML table: the first is its head, and a line ``name: value`` has two columns."""
    head, *lines = text.split("\n")
    left = 'style="text-align:left"'
    rows = []
    for line in lines:
        name, colon, value = line.strip().partition(": ")
        indent = len(line) - len(line.lstrip())
        # Notebooks align to the right, and indent nothing.
        style = left if indent <= 2 else f'style="text-align:left;padding-left:{indent / 2:g}em"'
        if colon and len(name) <= _LONGEST_NAME:
            rows.append(f"<tr><td {style}>{escape(name)}</td><td {left}>{escape(value)}</td></tr>")
        else:
            rows.append(f'<tr><td colspan="2" {style}>{escape(line.strip())}</td></tr>')
    title = f'<thead><tr><th colspan="2" {left}>{escape(head.removesuffix(":"))}</th></tr></thead>' if head else ""
    return f"<table>{title}<tbody>{''.join(rows)}</tbody></table>"

"""Output of the command: tables, key-value pairs, JSON, errors, progress."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console

_UNBOUND = 100_000
_WHOLE = 1e15
_GAP = 2
_NARROWEST = 12


def print_error(message: str) -> None:
    """Print an error on stderr, in one line."""
    print_status(f"raggedatlas: {' '.join(message.splitlines())}")


def print_status(line: str) -> None:
    """Print a status line on stderr."""
    print(printable(line), file=sys.stderr, flush=True)


def print_text(text: str) -> None:
    """Print text on stdout, with control characters replaced."""
    print("\n".join(printable(line) for line in text.split("\n")))


def print_json(document: Any) -> None:  # noqa: ANN401  (any document)
    """Print one JSON document on stdout; values that JSON does not support become null or text."""
    # `plain` leaves no NaN or infinity, which `allow_nan=False` would raise for.
    print(json.dumps(plain(document), indent=2, ensure_ascii=False, allow_nan=False))


def printable(value: object) -> str:
    """Format a value on one line without control characters, which names in a file may contain."""
    return "".join(c if c.isprintable() else "?" for c in format_value(value))


def format_value(value: object) -> str:
    """Format a value for a table."""
    value = plain(value)
    if value is None:
        return ""
    # Before `int`, of which `bool` is a subclass.
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) < _WHOLE else f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(format_value(item) for item in value)
    return str(value)


def plain(value: Any) -> Any:  # noqa: ANN401  (any value)
    """Convert a value to JSON types; missing values and infinities become None."""
    if value is None or isinstance(value, str | bool | int):
        return value
    # Scalars of NumPy; its arrays have `item` too, but also a length.
    if hasattr(value, "item") and not hasattr(value, "__len__"):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    # Compared as text, so that pandas need not be imported.
    return None if str(value) in {"NaT", "<NA>"} else str(value)


def console() -> "Console":
    """Return a console for stdout, as wide as the terminal, or of unlimited width without one."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else _UNBOUND)


def minute(timestamp: object) -> str:
    """Return an ISO timestamp up to the minute."""
    return str(timestamp)[:16].replace("T", " ")


def print_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, empty: str, as_json: bool = False
) -> None:
    """Print rows as an aligned table, truncated to the width of the terminal, never wrapped.

    `columns` are in order; numbers are right-aligned. `empty` is printed if there are no rows. `as_json` prints JSON
    instead, with all columns of the rows.
    """
    if as_json:
        print_json(rows)
        return
    from rich.table import Table
    from rich.text import Text

    if not rows:
        if empty:
            print_text(empty)
        return
    out = console()
    texts = {column: [printable(row[column]) for row in rows] for column in columns}
    widths = fit_widths([max(map(len, [printable(column), *texts[column]])) for column in columns], out.width)
    kept = list(columns)[: len(widths)]
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for column, width in zip(kept, widths, strict=True):
        numbers = all(isinstance(plain(row[column]), int | float | None) for row in rows)
        justify: Literal["left", "right"] = "right" if numbers else "left"
        # As `Text`, because rich reads brackets in a plain `str` as markup.
        table.add_column(Text(printable(column)), justify=justify, width=width, no_wrap=True, overflow="ellipsis")
    for row in zip(*[texts[column] for column in kept], strict=True):
        table.add_row(*map(Text, row))
    # Captured to remove the spaces with which rich fills every line.
    with out.capture() as captured:
        out.print(table)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
    if len(kept) < len(columns):
        left = f"... and {len(columns) - len(kept):,} more columns: {', '.join(map(printable, columns[len(kept) :]))}"
        print_text(left if len(left) <= out.width else f"{left[: out.width - 1]}…")


def fit_widths(wanted: Sequence[int], total: int) -> list[int]:
    """Return the widths of columns: the widest shrink first; trailing columns without room are dropped."""
    widths = list(wanted)
    while widths and sum(min(width, _NARROWEST) + _GAP for width in widths) - _GAP > total:
        widths.pop()
    while widths and sum(width + _GAP for width in widths) - _GAP > total:
        widths[widths.index(max(widths))] -= 1
    return widths


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print key-value pairs, one per line, aligned."""
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        print(f"{name:<{width}}  {printable(value)}")


@contextmanager
def progress(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a callback ``(step, done, total)`` that draws a progress bar on a terminal, or prints lines elsewhere; all on stderr."""
    if not sys.stderr.isatty():
        last: list[object] = [None]

        # A line at every tenth of a step.
        def write(step: str, done: int, total: int) -> None:
            tenth = (step, 10 * done // max(total, 1))
            if total > 1 and tenth != last[0]:
                last[0] = tenth
                print_status(f"{title}: {step} {done:,} of {total:,}")

        yield write
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    meter = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    with meter:
        task = meter.add_task(title, total=None)

        def draw(step: str, done: int, total: int) -> None:
            meter.update(task, description=f"{title}: {step}", completed=done, total=total)

        yield draw

"""Options of typer in the forms that verbs share: one value, or many."""

import warnings
from typing import Annotated, Any

import typer

from raggedatlas.errors import UnknownValueWarning

Words = list[str]
"""The values of an option that is given many times."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
"""How a verb is told to print for scripts."""


def one(metavar: str | None, text: str, *names: str, default: str | bool = False) -> Any:  # noqa: ANN401 - an option of typer
    """Return an option that takes one value; `default` says in the help what stands for none.

    Examples
    --------
    >>> one("NAME", "Of a file", "--name", "-n").metavar
    'NAME'
    """
    return typer.Option(*names, metavar=metavar, help=f"{text}.", show_default=default)


def subject(metavar: str, text: str) -> Any:  # noqa: ANN401 - an argument of typer
    """Return the argument that says what a verb works on.

    Examples
    --------
    >>> subject("FILE", "A file").help
    'A file.'
    """
    return typer.Argument(metavar=metavar, help=f"{text}.", show_default=False)


def many(metavar: str, text: str, *names: str) -> Any:  # noqa: ANN401 - an option of typer
    """Return an option that may be given many times, whose values are `Words`.

    Examples
    --------
    >>> many("NAME", "Keep a column").help
    'Keep a column; repeatable.'
    """
    return one(metavar, f"{text}; repeatable", *names)


def _refuse_unknown(asked: bool) -> bool:
    if asked:
        warnings.simplefilter("error", UnknownValueWarning)
    return asked


Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        callback=_refuse_unknown,
        help="Refuse values in conditions that no cell has, and a .cxg that would lose or change anything.",
    ),
]

"""Filters in SQL: what is handed on must be one whole expression."""

import re

from raggedatlas.errors import QueryError

_QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`""")
_COMMENT = re.compile(r"--|/\*|;")


def closed(where: str | None) -> str | None:
    """Put a filter in parentheses, after checking that nothing in it could end them early.

    Lance's parser ignores whatever follows a complete expression, so ``"n = 1) or so"`` would pass as ``"n = 1"``.

    Raises
    ------
    QueryError
        If a parenthesis outside quotes has no partner, or a comment or semicolon stands there.

    Examples
    --------
    >>> closed("tissue = 'a)' AND (n > 1)")
    "(tissue = 'a)' AND (n > 1))"
    """
    if where is None:
        return None
    bare, depth = _QUOTED.sub("''", where), 0
    for letter in bare:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            break
    if depth or _COMMENT.search(bare):
        raise QueryError(
            f"The filter {where!r} has a parenthesis without a partner, a comment or a semicolon outside quotes; write one expression, "
            "e.g. \"cell_type = 'T cell' AND n_genes > 200\"."
        )
    return f"({where})"

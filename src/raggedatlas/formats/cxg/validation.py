"""The validator of CXG folders: `validate` walks one once and lists every rule that it breaks."""

from pathlib import Path

from raggedatlas.errors import NotFoundError
from raggedatlas.formats.cxg.checking import start
from raggedatlas.formats.cxg.checks_arrays import check_arrays, check_members, check_shift, check_sizes
from raggedatlas.formats.cxg.checks_frames import check_columns
from raggedatlas.formats.cxg.checks_metadata import check_metadata, version_of
from raggedatlas.formats.cxg.checks_values import check_values
from raggedatlas.formats.cxg.detecting import is_cxg, kind_of
from raggedatlas.formats.cxg.rules import RULES
from raggedatlas.model.arguments import checked
from raggedatlas.model.problems import Depth, Problem


@checked
def validate(path: str | Path, level: Depth = "metadata") -> list[Problem]:
    """List the rules that a CXG breaks (seed 004; rules are named in the reference).

    Parameters
    ----------
    path : str or Path
        Its folder.
    level : {"metadata", "full"}
        ``metadata`` reads schemas and metadata. ``full`` reads every value as well, a block at a time: memory is bounded by the
        blocks and 16 bytes per cell and per feature.

    Returns
    -------
    list of Problem
        Sorted by rule; empty for a CXG without fault.

    Raises
    ------
    NotFoundError
        If there is no such folder.
    SourceError
        If there is no such level.
    MissingExtraError
        If tiledb is not installed.

    Examples
    --------
    >>> from raggedatlas.testing.cxgs import write_cxg
    >>> import tempfile
    >>> validate(write_cxg(tempfile.mkdtemp() + "/x.cxg"), "full")
    []
    >>> print(validate("tests/data")[0])
    C01 must: it is no TileDB group, ...
    """
    path = Path(path)
    if not path.exists():
        raise NotFoundError(f"There is no file or folder {path}; check the path.")
    marked = kind_of(path) == "group"
    if not marked and not is_cxg(path):
        return [_no_cxg("it is no TileDB group, and has no arrays obs and var.")]
    checking = start(path, full=level == "full")
    checking.version = version_of(checking)
    if not marked:
        checking.problems.append(_no_cxg("it is no TileDB group, though it has the arrays of a CXG."))
    check_members(checking)
    check_arrays(checking)
    check_shift(checking)
    check_sizes(checking)
    check_columns(checking)
    check_metadata(checking)
    if checking.full:
        check_values(checking)
    order = {rule: i for i, rule in enumerate(RULES)}
    return sorted(checking.problems, key=lambda problem: order[problem.rule])


def _no_cxg(message: str) -> Problem:
    return Problem("C01", "must", "", message, RULES["C01"].mend)

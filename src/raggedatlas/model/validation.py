"""Rule engine of the validators: numbered rules, the problems that a check finds, and their text, JSON and exit status.

A validator of one format has a table of `Rule` and check functions, which report to a `Checker`.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

from raggedatlas.errors import AtlasError
from raggedatlas.model.shown import ShownList, as_table

Level = Literal["must", "should", "practice"]
Depth = Literal["metadata", "full"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A numbered rule of a format.

    Parameters
    ----------
    id : str
        Stable, e.g. ``A01``.
    level : {"must", "should", "practice"}
        ``must``: a reader fails or returns other values than intended. ``should``: the format recommends it.
        ``practice``: readers tolerate it, some with a warning.
    sentence : str
        What the rule requires.
    fix : str
        How to fix a file that breaks it.
    depth : {"metadata", "full"}
        Whether values must be read to check it.
    fixed : bool
        Whether a repaired copy fixes it.
    stated : bool
        Whether the description of the format states it; else it follows from what readers and writers do.
    refused : bool
        Whether a file that breaks it cannot be added to an atlas.
    """

    id: str
    level: Level
    sentence: str
    fix: str
    depth: Depth = "metadata"
    fixed: bool = False
    stated: bool = True
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """A rule that is broken in one place.

    Parameters
    ----------
    rule : str
        Id of the rule, e.g. ``A12`` of a file or ``pointer-bounds`` of an atlas.
    level : {"must", "should", "practice"}
        Severity; never more severe than that of the rule.
    path : str
        The element in the file, ``""`` for its root; the table, dataset or group of an atlas.
    message : str
        What is wrong, and what was expected.
    fix : str
        How to fix it.

    Examples
    --------
    >>> print(Problem("A12", "must", "", "there is no var.", "Write a table of features."))
    A12 must: there is no var. Write a table of features.
    """

    rule: str
    level: Level
    path: str
    message: str
    fix: str

    def __str__(self) -> str:
        """Return the problem as one line of text."""
        place = f" {self.path}:" if self.path else ""
        stop = "" if self.message.endswith(".") else "."
        return f"{self.rule} {self.level}:{place} {self.message}{stop} {self.fix}"


class Problems(ShownList[Problem]):
    """The problems of a validated file or atlas, empty if it is valid."""

    @property
    def breaks_must(self) -> bool:
        """Whether a rule of level ``must`` is broken, for which the command exits with code 1."""
        return any(problem.level == "must" for problem in self)

    def summary(self) -> str:
        """Return the number of problems of each level as text.

        Examples
        --------
        >>> Problems().summary()
        'Nothing is wrong'
        """
        levels = [problem.level for problem in self]
        counts = {level: levels.count(level) for level in ("must", "should", "practice")}
        return ", ".join(f"{n:,} {level}" for level, n in counts.items() if n) or "Nothing is wrong"

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the problems as dictionaries of plain values, as ``--json`` prints them."""
        return [asdict(problem) for problem in self]

    def __str__(self) -> str:
        """Return a line for each problem, and the summary."""
        return "\n".join([*map(str, self), f"{self.summary()}."])

    def __repr__(self) -> str:
        """Return the same."""
        return str(self)

    def _repr_html_(self) -> str:
        # The summary is the head.
        *lines, summary = str(self).split("\n")
        return as_table("\n".join([summary, *lines]))


class Validation(Problems):
    """The problems of an atlas, and what was read of its files to find them.

    Attributes
    ----------
    snapshots : dict of int to str
        Snapshot -> root hash, of levels that read files.
    n_files, n_bytes : int
        Files that were read, and their size.
    n_skipped : int
        Files that were not read, because an earlier call found them sound and they have not changed since.
    skipped_since : str
        When the earliest of these was read, in UTC; empty if none was skipped.
    """

    def __init__(self, problems: Iterable[Problem] = ()) -> None:
        super().__init__(problems)
        self.snapshots: dict[int, str] = {}
        self.n_files = self.n_bytes = self.n_skipped = 0
        self.skipped_since = ""

    @property
    def sound(self) -> bool:
        """Whether everything is what was written; problems of level ``practice`` are of sound data."""
        return not self.breaks_must

    def __str__(self) -> str:
        """Return root hashes and a line for each problem, and the summary with what was read."""
        roots = [f"Snapshot {number}: root hash {root or 'not recorded'}" for number, root in self.snapshots.items()]
        since = self.skipped_since[:16].replace("T", " ")
        skipped = f", {self.n_skipped:,} skipped, read since {since}" if self.n_skipped else ""
        read = f": {self.n_files:,} files of {self.n_bytes:,} bytes read{skipped}" if self.n_files or skipped else ""
        return "\n".join([*roots, *map(str, self), f"{self.summary()}{read}."])


DAMAGE = (
    AtlasError, OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, IndexError, OverflowError,
    NotImplementedError, AssertionError, MemoryError, ArithmeticError,
)  # fmt: skip
"""Exceptions that readers and libraries raise for damaged metadata and values."""

P = TypeVar("P")


# without slots: a dataclass with slots is a new class, in which super() of its subclasses' methods fails
@dataclass
class Checker(Generic[P]):
    """Collector of the problems of one file or store; the base class of each validator's state.

    A place is anything whose ``str`` is its path in the file.
    """

    rules: ClassVar[Mapping[str, Rule]] = {}
    damage: ClassVar[str] = ""

    problems: Problems = field(default_factory=Problems, kw_only=True)

    def report(self, rule: str, place: P, message: str, level: Level | None = None, fix: str = "") -> None:
        """Report a broken rule; `level` and `fix` replace those of the rule, `level` by a milder one only."""
        known = self.rules[rule]
        self.problems.append(Problem(rule, level or known.level, str(place), message, fix or known.fix))

    @contextmanager
    def guarded(self, place: P, rule: str = "") -> Iterator[None]:
        """Report what cannot be opened or decoded as a broken rule, by default the format's rule about damage."""
        try:
            yield
        except DAMAGE as error:
            self.report_error(place, error, rule or self.damage)

    def report_error(self, place: P, error: BaseException, rule: str) -> None:
        """Report an exception of a reader or library."""
        first_line = next(iter(str(error).splitlines()), "")
        foreign = f"it cannot be read ({type(error).__name__}: {first_line})."
        self.report(rule, place, self.reason(error) if isinstance(error, AtlasError) else foreign)

    def reason(self, error: AtlasError) -> str:
        """Return the message of an error without what a problem says elsewhere: the file and the fix."""
        return str(error)

    def by_rule(self) -> Problems:
        """Return the different problems, sorted by rule."""
        order = {rule: i for i, rule in enumerate(self.rules)}
        # Several checks may report one problem; the stable sort keeps the order within a rule.
        return Problems(sorted(dict.fromkeys(self.problems), key=lambda problem: order[problem.rule]))

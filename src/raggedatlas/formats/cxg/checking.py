"""What every check of a CXG shares: its arrays, looked at once, and the list of problems."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raggedatlas.errors import AtlasError
from raggedatlas.formats.cxg.arrays import StoredArray, look_at
from raggedatlas.formats.cxg.detecting import Kind, list_members
from raggedatlas.formats.cxg.rules import RULES
from raggedatlas.formats.cxg.schema import EMB, GROUP_METADATA, OBS, UNNAMED, VAR
from raggedatlas.formats.cxg.unstructured import parse_json
from raggedatlas.model.problems import Level, Problem


@dataclass(slots=True)
class Checking:
    """One walk over one CXG.

    Parameters
    ----------
    path : Path
        Its folder.
    full : bool
        Whether values are read.
    members : mapping of str to str
        Name at its root -> ``"array"`` or ``"group"``.
    arrays : dict of str to StoredArray
        Those that could be opened, embeddings as ``"emb/NAME"``.
    version : str
        What it says, `UNNAMED` where it says nothing.
    problems : list of Problem
        What was found.
    """

    path: Path
    full: bool
    members: Mapping[str, Kind]
    arrays: dict[str, StoredArray] = field(default_factory=dict)
    version: str = UNNAMED
    problems: list[Problem] = field(default_factory=list)

    def report(self, rule: str, where: str, message: str, level: Level | None = None, mend: str = "") -> None:
        """Note that a rule is broken; `level` is given where it is milder than the rule's own, `mend` where it is another."""
        known = RULES[rule]
        self.problems.append(Problem(rule, level or known.level, where, message, mend or known.mend))

    @contextmanager
    def guarded(self, where: str) -> Iterator[None]:
        """Turn what cannot be opened or decoded into a problem of its own."""
        try:
            yield
        except AtlasError as error:
            said = str(error).removeprefix("C00: ").partition("; ")[0]
            self.report("C00", where, f"{said}.")

    def open_all(self, names: Iterator[str] | tuple[str, ...]) -> None:
        """Look at arrays; those that cannot be opened are told and left out of `arrays`."""
        for name in names:
            with self.guarded(name):
                self.arrays[name] = look_at(self.path / name)

    def json_of(self, where: str, key: str, rule: str) -> Any:  # noqa: ANN401  (any JSON)
        """Read a JSON object from the metadata of an array.

        Returns
        -------
        dict or None
            None where there is none, or where it is none, which is told by `rule`.
        """
        stored = self.arrays[where].metadata.get(key)
        if stored is None:
            return None
        try:
            found = parse_json(stored)
        except (TypeError, ValueError) as error:
            self.report(rule, where, f"{key} is no JSON: {error}.")
            return None
        if not isinstance(found, dict):
            self.report(rule, where, f"{key} is {type(found).__name__} {found!r:.40}, where a JSON object belongs.")
            return None
        return found

    @property
    def is_old(self) -> bool:
        """Whether it is of a version before 0.3.0, and known to be."""
        return self.version in ("0.1", "0.2.0") or (self.version == UNNAMED and GROUP_METADATA not in self.members)

    @property
    def embeddings(self) -> tuple[str, ...]:
        """Names of the arrays in ``emb`` that could be opened, as ``"emb/NAME"``."""
        return tuple(name for name in self.arrays if name.startswith(f"{EMB}/"))

    @property
    def n_obs(self) -> int | None:
        """Number of cells by ``obs``; None where that cannot be told."""
        return self._size(OBS)

    @property
    def n_var(self) -> int | None:
        """Number of features by ``var``; None where that cannot be told."""
        return self._size(VAR)

    def _size(self, name: str) -> int | None:
        found = self.arrays.get(name)
        return found.shape[0] if found is not None and len(found.axes) == 1 and found.shape[0] else None


def start(path: Path, *, full: bool) -> Checking:
    """Look at everything at the root of a CXG and in its ``emb``, each array once; extras are left alone."""
    checking = Checking(path, full, list_members(path))
    known = tuple(name for name, kind in checking.members.items() if kind == "array" and name in _KNOWN)
    checking.open_all(known)
    inner = list_members(path / EMB) if checking.members.get(EMB) == "group" else {}
    checking.open_all(tuple(f"{EMB}/{name}" for name, kind in inner.items() if kind == "array"))
    return checking


_KNOWN = frozenset({"obs", "var", "X", "Xr", "Xc", "X_col_shift", "cxg_group_metadata", "uns"})

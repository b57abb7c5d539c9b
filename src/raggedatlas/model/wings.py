"""Wings: systems that are built on the core, and the doors through which the core asks them.

The core imports no wing. What a wing adds stands in one frozen `Wing` in the ``__init__.py`` of its folder; those of this package are
listed in `BUILT_IN`, those of other packages are found by the entry point ``raggedatlas.wings``.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

from raggedatlas.errors import MissingExtraError

GROUP = "raggedatlas.wings"
"""Group of the entry points of other packages: name of a wing -> its `Wing`."""

BUILT_IN = ("vectors", "results", "cxg", "viewer", "trainers")
"""Wings of this package, each a folder of `raggedatlas.wings`."""


@dataclass(frozen=True, kw_only=True)
class FileKind:
    """One kind of file or folder, besides those of AnnData, that ``validate`` and ``inspect`` take.

    Parameters
    ----------
    noun : str
        What messages call it.
    accepts : str
        Where a function is that says whether a path is of this kind: ``(path) -> bool``.
    validate : str
        Where a function is that checks one: ``(path, level) -> Problems``.
    levels : tuple of str
        Levels of the check; `default` is one of them.
    inspect : str
        Where a function is that describes one: ``(path) -> Inspection``; empty for none.
    refusals : mapping of str to str
        Option of ``validate`` -> why it is refused.
    """

    noun: str
    accepts: str
    validate: str
    levels: tuple[str, ...]
    default: str
    inspect: str = ""
    refusals: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Wing:
    """What one wing adds to the core. Every text says where something is, as an entry point does: ``"package.module:name"``.

    Parameters
    ----------
    name : str
        Its name.
    readers : mapping of str to str
        Suffix of a file, or name of a format that `detectors` recognise -> what opens a `pathlib.Path` of it as a `Source`. Of another package it
        is given local paths alone: what is in an object store or on a web server is copied first.
    detectors : mapping of str to str
        Name of a format of folders -> function of a path that recognises one.
    writers : mapping of str to str
        Suffix -> what creates a `Sink` for a local `pathlib.Path`; what it writes is uploaded if the target is elsewhere.
    spaces : mapping of str to str
        Name -> `FeatureSpace`.
    assets : mapping of str to str
        Name of a kind of what is attached to cells -> where its `raggedatlas.catalog.assets.AssetKind` is; its table is called ``_<name>``.
    answers : mapping of str to str
        Name of a function that the core calls but does not have -> where it is (built-in wings only).
    commands : mapping of str to str
        Name of a command -> function with typer's annotations.
    files : tuple of FileKind
        What it validates and inspects.
    conversion : str
        Where the options are with which ``convert`` asks it first (built-in wings only).

    Examples
    --------
    >>> Wing(name="guides", readers={".guides": "my_guides.files:GuideSource"}).writers
    {}
    """

    name: str
    readers: Mapping[str, str] = field(default_factory=dict)
    detectors: Mapping[str, str] = field(default_factory=dict)
    writers: Mapping[str, str] = field(default_factory=dict)
    spaces: Mapping[str, str] = field(default_factory=dict)
    assets: Mapping[str, str] = field(default_factory=dict)
    answers: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)
    files: tuple[FileKind, ...] = ()
    conversion: str = ""


@cache
def built_in_wings() -> tuple[Wing, ...]:
    """Return the wings of this package that are installed; importing a door imports nothing else of its wing."""
    modules = [f"{GROUP}.{name}" for name in BUILT_IN if find_spec(GROUP) and find_spec(f"{GROUP}.{name}")]
    return tuple(import_module(module).WING for module in modules)


@cache
def installed_wings() -> tuple[Wing, ...]:
    """Return the wings of other packages.

    The search through all installed packages takes some 20 ms, once in a process; callers look at built-in wings first.
    """
    from importlib.metadata import entry_points

    found = []
    for entry in entry_points(group=GROUP):
        try:
            wing = entry.load()
        except Exception as error:  # noqa: BLE001  (another package's import: it must not end the calls of this one)
            warnings.warn(f"The wing {entry.name!r} of another package cannot be loaded: {error!r}", stacklevel=2)
            continue
        found.append(wing)
    return tuple(found)


def every_wing() -> Iterator[Wing]:
    """Iterate over all wings, those of this package first."""
    yield from built_in_wings()
    yield from installed_wings()


@cache
def asset_tables() -> tuple[str, ...]:
    """Return the names of the tables with records of what wings attach to cells, which have data of datasets."""
    return tuple(f"_{name}" for wing in every_wing() for name in wing.assets)


def answer(name: str) -> Callable[..., Any]:
    """Return the function of a wing that the core calls by this name; only wings of this package are asked."""
    for wing in built_in_wings():
        if name in wing.answers:
            found: Callable[..., Any] = resolve_name(wing.answers[name])
            return found
    raise MissingExtraError(f"No installed wing has {name!r}; install raggedatlas with all of its wings.")


def lazy_attributes(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's ``__getattr__`` that imports its public names when they are first used.

    Importing the module thus stays light. `homes` maps a public name to the module that has it.
    """

    def get(name: str) -> Any:  # noqa: ANN401  (a module attribute is any object)
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(import_module(module), name, value)
        return value

    return get

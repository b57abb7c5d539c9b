"""Lets a command start quickly: it imports its own verb, no pandas that nothing asks for, and collects no garbage meanwhile."""

import gc
import os
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

FREQUENT = {
    "add": "add", "create": "add", "export": "query", "find": "browse", "info": "browse", "ls": "browse",
    "query": "query", "snapshot": "maintenance", "versions": "maintenance",
}  # fmt: skip
"""Verbs that are called often and by scripts -> the module of each, which is all that is imported for them."""

_OBJECTS_BETWEEN_COLLECTIONS = 100_000


def quicken() -> None:
    """Set up this process for a command: Python collects garbage rarely, and pydantic looks for no plugins.

    Imports make some 200,000 objects that stay. To look through all of them again and again takes a sixth of the time
    of a short command. In a process that is not ours these settings are not ours to choose.
    """
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, 20, 100)
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


def import_verb(name: str = "") -> "typer.Typer":
    """Return the command with a verb, and with all others unless the verb is one of the frequent ones.

    Parameters
    ----------
    name : str
        The first word of a command line; a verb, an option, a mistake or nothing.
    """
    import_module(f"raggedatlas.cli.{FREQUENT.get(name, 'commands')}")
    app: typer.Typer = import_module("raggedatlas.cli.app").app
    return app


class _Hidden(MetaPathFinder):
    """Says that there is no pandas."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> None:  # noqa: ANN401
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is put off", name=fullname)


class _Announced(MetaPathFinder):
    """Finds pandas as ever, and lets pyarrow know when it has been imported."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ANN401
        spec = PathFinder.find_spec(fullname, path, target) if fullname == "pandas" else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_tell(module: ModuleType) -> None:
                run(module)
                import pyarrow as pa

                # What makes pyarrow look for pandas again; from here on it knows frames and series.
                pa.table({}).to_pandas()

            spec.loader.exec_module = run_and_tell  # type: ignore[method-assign]
        return spec


def put_off_pandas() -> None:
    """Let pyarrow take notice of pandas when something imports it, not when the first Arrow array is made.

    To learn whether an object is one of pandas', pyarrow imports pandas, and asks once. It is asked here, while there seems to be none. This
    is for the process of a command: in others pandas is mostly there already.
    """
    import pyarrow as pa

    if "pandas" in sys.modules:
        return
    hidden = _Hidden()
    sys.meta_path.insert(0, hidden)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(hidden)
    sys.meta_path.insert(0, _Announced())

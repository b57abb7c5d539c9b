"""The command ``raggedatlas``: each verb parses its options, calls one library function and prints the result.

This module starts it fast: it imports only the verb that is called, pandas on first use, and collects garbage rarely.
"""

import gc
import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

FREQUENT = {
    "add": "add", "create": "add", "export": "query", "find": "browse", "info": "browse", "ls": "browse",
    "query": "query", "snapshot": "maintenance", "versions": "maintenance",
}  # fmt: skip
"""Verbs called often and by scripts -> their module, the only one imported for them."""

_OBJECTS_BETWEEN_COLLECTIONS = 200_000


def configure_process() -> None:
    """Configure this process for a command: rare garbage collection, no search for pydantic plugins.

    Imports create about 130,000 long-lived objects. Scanning them repeatedly takes a sixth of the time
    of a short command. Only the process of the command is configured, never that of a library user.
    """
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, 20, 100)
    # Not overwritten, so that a user can set it otherwise.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


def import_command(name: str = "") -> "typer.Typer":
    """Return the application with a verb; with all verbs unless it is one of the frequent ones.

    `name` is the first word of the command line: a verb, an option, a typing error or nothing.
    """
    import_module(f"raggedatlas.cli.{FREQUENT.get(name, 'commands')}")
    app: typer.Typer = import_module("raggedatlas.cli.app").app
    return app


class _AfterImport:
    """Import hook that runs a function once a module has been imported."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self.name, self.function = name, function

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ANN401
        spec = PathFinder.find_spec(fullname, path, target) if fullname == self.name else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_and_call(module: ModuleType) -> None:
                run(module)
                self.function()

            spec.loader.exec_module = exec_and_call  # type: ignore[method-assign]
        return spec


def defer_pandas_import() -> None:
    """Make pyarrow detect pandas when something imports it, not when the first Arrow array is created.

    pyarrow imports pandas once, to recognize its objects. Here it does so as soon as it has been imported, while pandas
    is hidden. This is for the process of a command: in others pandas is usually imported already.
    """

    def hide(fullname: str, *_: Any) -> None:  # noqa: ANN401
        if fullname == "pandas":
            # Returning None instead would pass the search on to the finder that has pandas.
            raise ModuleNotFoundError("pandas is put off", name=fullname)

    def look_without_pandas() -> None:
        import pyarrow as pa

        # It may be importing pyarrow.
        if "pandas" in sys.modules:
            return
        hidden: Any = SimpleNamespace(find_spec=hide)
        sys.meta_path.insert(0, hidden)
        try:
            # The first array makes pyarrow look for pandas, once; it remembers that there is none.
            pa.array([0])
        finally:
            sys.meta_path.remove(hidden)

    def look_again() -> None:
        import pyarrow as pa

        # Makes pyarrow look for pandas again; from here on it recognizes frames and series.
        pa.table({}).to_pandas()

    if "pandas" in sys.modules:
        return
    sys.meta_path.insert(0, _AfterImport("pandas", look_again))
    if "pyarrow" in sys.modules:
        look_without_pandas()
    else:
        sys.meta_path.insert(0, _AfterImport("pyarrow", look_without_pandas))


def main() -> None:
    """Run the command line; exit codes are 0 (success), 1 (refused, or problems found) and 2 (usage error)."""
    # Both before the command is imported: that creates most of the objects, and may import pandas.
    configure_process()
    defer_pandas_import()
    app = import_command(*sys.argv[1:2])
    try:
        app(prog_name="raggedatlas")
    finally:
        # The interpreter collects garbage when it ends, of a process whose memory is released anyway.
        gc.freeze()

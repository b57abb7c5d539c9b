"""Keeps pandas out of commands that need none: importing it takes longer than all that ``raggedatlas ls`` does."""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


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

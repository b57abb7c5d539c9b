"""Builds the compiled library into the wheel; see native/compile.py."""

import importlib.util
import os
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def compiling(root: str) -> ModuleType:
    """Load native/compile.py."""
    spec = importlib.util.spec_from_file_location("raggedatlas_compile", Path(root, "native", "compile.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class NativeBuildHook(BuildHookInterface[Any]):
    """Compiles the library and puts it where the package looks for it; its wheel serves every Python of one platform.

    The platform is this machine's, or that of `PLATFORMS` in native/compile.py which RAGGEDATLAS_PLATFORM names.
    """

    def dependencies(self) -> list[str]:
        """Return what building needs besides hatchling: a compiler from the package index where the machine has none."""
        found = compiling(self.root).machine_compiler() and not os.environ.get("RAGGEDATLAS_PLATFORM")
        return [] if found else ["ziglang>=0.13"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile. An editable install loads the library from where it is compiled, so that a changed source takes effect."""
        native = compiling(self.root)
        wanted = os.environ.get("RAGGEDATLAS_PLATFORM", "")
        path = native.compile_library(native.library_path(platform_tag=wanted), platform_tag=wanted)
        if version == "editable":
            return
        platform = wanted or sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["pure_python"] = False
        build_data["force_include"][str(path)] = f"raggedatlas/store/libraggedatlas{native.suffix(wanted)}"

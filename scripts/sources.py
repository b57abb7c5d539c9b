"""The package's sources and which module imports which, for `scripts/count` and `scripts/import_graph`."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "raggedatlas"


@cache
def modules() -> dict[str, Path]:
    """Return the modules of the package: dotted name -> file."""
    return {module_name(path): path for path in sorted(SRC.rglob("*.py"))}


def module_name(path: Path) -> str:
    """Return the dotted name of a source file."""
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    """Parse a source file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def import_graph() -> dict[str, set[str]]:
    """Return the modules of the package that each module imports anywhere, imports for types included."""
    names = modules()
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        imported: set[str] = set()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & names.keys()
                imported |= inner or {node.module}
        graph[name] = imported & names.keys() - {name}
    return graph


def reachable(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return all nodes that can be reached from each node of a graph."""
    reach: dict[str, set[str]] = {}
    for start, targets in graph.items():
        seen: set[str] = set()
        todo = [*targets]
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += graph[node]
        reach[start] = seen
    return reach


def layers() -> list[list[str]]:
    """Return import-linter's order of the packages, from the top."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = next(c for c in settings["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    return [layer.strip("()").split(" | ") for layer in contract["layers"]]

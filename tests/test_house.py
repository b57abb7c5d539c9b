"""The house rules that no linter checks: sizes, names, documentation, circles, imports and tracked files."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import raggedatlas

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "raggedatlas"
FILES = sorted(SRC.rglob("*.py"))
LONGEST_FILE = 500
LONGEST_FUNCTION = 60
MOST_ARGUMENTS = 7
MOST_METHODS = 20
MOST_MODULES = 400
BANNED_NAMES = {"utils", "helpers", "common", "core", "base", "misc", "functional"}
HEAVY = {
    "anndata", "dask", "h5py", "lance", "lancedb", "matplotlib", "mudata", "numba", "onnxruntime",
    "pandas", "scipy", "tiledb", "torch", "umap", "zarr",
}  # fmt: skip
PUBLIC_NAMES = [
    "AtlasError",
    "AtlasVersionRecord",
    "AtlasView",
    "CellDataset",
    "DataProvider",
    "DatasetRecord",
    "DenseZarrPointer",
    "FeatureBaseSchema",
    "FeatureLayout",
    "FeatureSpace",
    "GeometryPointer",
    "HoxBaseSchema",
    "InferenceDataSet",
    "Loader",
    "PointerField",
    "PointerKind",
    "Query",
    "RaggedAtlas",
    "ResultDataset",
    "ResultDatasetWriter",
    "ResultPart",
    "SparseZarrPointer",
    "col",
    "convert_results",
    "copy",
    "create_results_writer",
    "load_results_dataset",
    "make_transcripts",
    "open_sink",
    "open_source",
    "register_space",
    "transcripts_to_counts",
]

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions_of(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, Function))


def classes_of(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef))


def decorators_of(function: Function) -> set[str]:
    return {ast.unparse(decorator).split("(")[0] for decorator in function.decorator_list}


def each_file(*excused: str) -> pytest.MarkDecorator:
    """Run a test once for each source file outside the excused rooms."""
    files = [path for path in FILES if path.relative_to(SRC).parts[0] not in excused]
    return pytest.mark.parametrize("path", files, ids=lambda path: str(path.relative_to(SRC)))


@each_file()
def test_files_and_functions_stay_small(path: Path) -> None:
    """No file is over 500 lines and no function over 60 without its docstring."""
    assert path.read_text(encoding="utf-8").count("\n") <= LONGEST_FILE
    for function in functions_of(path):
        body = function.body[1:] if ast.get_docstring(function) else function.body
        lines = (function.end_lineno or 0) - body[0].lineno + 1 if body else 0
        assert lines <= LONGEST_FUNCTION, f"{function.name} has {lines} lines"


@each_file()
def test_functions_take_few_arguments(path: Path) -> None:
    """No function takes more than seven arguments; `self` and `cls` are not counted."""
    for function in functions_of(path):
        given = function.args
        names = [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        counted = [name for name in names if name not in {"self", "cls"}]
        assert len(counted) <= MOST_ARGUMENTS, f"{function.name} takes {len(counted)} arguments"


@each_file()
def test_classes_have_few_public_methods(path: Path) -> None:
    """No class has more than twenty public methods; classmethods and properties are not counted."""
    uncounted = {"property", "cached_property", "functools.cached_property", "classmethod"}
    for owner in classes_of(path):
        methods = [
            node.name
            for node in owner.body
            if isinstance(node, Function)
            and not node.name.startswith("_")
            and not decorators_of(node) & (uncounted | {"overload"})
        ]
        assert len(methods) <= MOST_METHODS, f"{owner.name} has {len(methods)} public methods"


@each_file()
def test_file_names_say_something(path: Path) -> None:
    """No file or folder has a name that could hold anything."""
    parts = path.relative_to(SRC).with_suffix("").parts
    assert not {part.lstrip("_") for part in parts} & BANNED_NAMES


@each_file("cli")
def test_only_the_command_prints(path: Path) -> None:
    """Nothing outside the command line calls `print`."""
    calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
    assert "print" not in {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def undocumented(owner: ast.Module | ast.ClassDef, inside: str = "") -> Iterator[str]:
    """Name every public class and function without a docstring, methods included."""
    for node in owner.body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        accessor = isinstance(node, Function) and any(
            name == "overload" or name.endswith(".setter") for name in decorators_of(node)
        )
        if not accessor and ast.get_docstring(node) is None:
            yield f"{inside}{node.name}"
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node, f"{inside}{node.name}.")


@each_file()
def test_public_names_are_documented(path: Path) -> None:
    """Every module with code, and every public class, function and method, has a docstring."""
    tree = tree_of(path)
    assert not tree.body or ast.get_docstring(tree) is not None
    assert list(undocumented(tree)) == []


def module_name(path: Path) -> str:
    """Spell the dotted name of a source file."""
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def for_types_only(node: ast.AST) -> bool:
    """Tell whether a statement is an `if TYPE_CHECKING` block."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports_of(node: ast.AST) -> Iterator[str]:
    """Name what a tree imports, also inside functions, but not what it imports for types only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        if for_types_only(child):
            assert isinstance(child, ast.If)
            for statement in child.orelse:
                yield from imports_of(statement)
        else:
            yield from imports_of(child)


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Find nodes that only lead to each other: what is left when leaves are taken away again and again."""
    left = {node: set(targets) for node, targets in graph.items()}
    while leaves := {node for node, targets in left.items() if not targets & left.keys()}:
        for leaf in leaves:
            del left[leaf]
    return sorted(left)


def import_graph() -> dict[str, set[str]]:
    """Draw which source file imports which."""
    names = {module_name(path) for path in FILES}
    graph: dict[str, set[str]] = {}
    for path in FILES:
        owner = module_name(path)
        found = {target if target in names else target.rpartition(".")[0] for target in imports_of(tree_of(path))}
        graph[owner] = (found & names) - {owner}
    return graph


def test_no_import_circles() -> None:
    """Files form no import circle, also counting the imports inside functions."""
    assert circle_in(import_graph()) == []


def test_a_circle_would_be_seen() -> None:
    """The search for circles finds one, and what leads into it, and nothing without one."""
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
    assert circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_public_names_are_these() -> None:
    """The package offers exactly these names, sorted, and each can be had."""
    assert raggedatlas.__all__ == PUBLIC_NAMES
    assert sorted(PUBLIC_NAMES) == PUBLIC_NAMES
    assert all(getattr(raggedatlas, name) is not None for name in PUBLIC_NAMES)


def loaded_after(statement: str) -> set[str]:
    """List the modules that a fresh interpreter has loaded after a statement."""
    script = f"import json, sys\n{statement}\nprint('\\n' + json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_import_is_light() -> None:
    """Importing the package loads no heavy library and few modules."""
    before, after = loaded_after("pass"), loaded_after("import raggedatlas")
    assert not after & HEAVY
    assert len(after - before) < MOST_MODULES


def test_help_is_light() -> None:
    """Asking the command for help loads no heavy library."""
    if not (SRC / "cli" / "__init__.py").exists():
        pytest.skip("the command is not there yet")
    ask = (
        "import runpy\nsys.argv = ['raggedatlas', '--help']\n"
        "try:\n    runpy.run_module('raggedatlas.cli', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code"
    )
    assert not loaded_after(ask) & HEAVY


def tracked_files() -> list[Path]:
    """List the text files that git tracks or would track; nothing where there is no git."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    named = [ROOT / line for line in listing.stdout.splitlines()]
    data = ROOT / "tests" / "data"
    return [path for path in named if path.is_file() and (path.parent != data or path.suffix == ".md")]


def test_tracked_files_name_no_machine() -> None:
    """No tracked file names a home folder, a work folder or the host of a package registry."""
    homes = ["/" + folder + "/" for folder in ("home", "root", "Users", "work")]
    hosts = ["index" + "-url", "files.python" + "hosted.org", "registry." + "npmjs"]
    pattern = re.compile(rf"(?<![\w.~$}}:/-])(?:{'|'.join(map(re.escape, homes))})|{'|'.join(map(re.escape, hosts))}")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked_files()
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"])
def test_the_papers_are_there(name: str) -> None:
    """The papers that every project has are there."""
    assert (ROOT / name).is_file()

"""The house rules that no linter checks: sizes, names, documentation, circles, imports and tracked files."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import raggedatlas

# What the sources say is the same on every Python.
pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "raggedatlas"
FILES = sorted(SRC.rglob("*.py"))
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
    "SetLoader",
    "SparseZarrPointer",
    "Split",
    "Workers",
    "clone",
    "col",
    "convert_results",
    "copy",
    "create_results_writer",
    "load_results_dataset",
    "make_transcripts",
    "open",
    "open_sink",
    "open_source",
    "read",
    "read_points",
    "register_space",
    "transcripts_to_counts",
    "under",
]

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def functions_of(path: Path) -> Iterator[Function]:
    return (node for node in nodes_of(path) if isinstance(node, Function))


def classes_of(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in nodes_of(path) if isinstance(node, ast.ClassDef))


def name_of(path: Path) -> str:
    return str(path.relative_to(SRC))


def unlike_members(annotation: ast.expr | None) -> bool:
    """Return whether an annotation is ``tuple[...]`` with members of several types."""
    if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) != "tuple":
        return False
    members = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    return len({ast.unparse(member) for member in members} - {"..."}) > 1


def test_no_parameter_is_an_anonymous_tuple() -> None:
    """Things of several types are passed one by one or as a class, whose fields have names."""
    found = [
        f"{name_of(path)}: {function.name}({argument.arg})"
        for path in FILES
        for function in functions_of(path)
        for argument in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        if unlike_members(argument.annotation)
    ]
    assert found == []


def test_file_names_say_something() -> None:
    """No file or folder has a name that could hold anything."""
    parts = {path: path.relative_to(SRC).with_suffix("").parts for path in FILES}
    assert [name_of(path) for path in FILES if {part.lstrip("_") for part in parts[path]} & BANNED_NAMES] == []


def test_classes_have_names_of_their_own() -> None:
    """A name means one class of the package; those of the command line have the names of the options that they fill."""
    owners: dict[str, list[str]] = {}
    for path in FILES:
        if path.relative_to(SRC).parts[0] != "cli" and path.name != "commands.py":
            for node in tree_of(path).body:
                if isinstance(node, ast.ClassDef):
                    owners.setdefault(node.name, []).append(name_of(path))
    assert {name: files for name, files in owners.items() if len(files) > 1} == {}


def test_asserts_have_no_effect() -> None:
    """Outside the tests that are published, an `assert` calls nothing but `isinstance`: with ``python -O`` it does not run."""
    found = [
        f"{name_of(path)}: {ast.unparse(node)}"
        for path in FILES
        if path.relative_to(SRC).parts[0] != "testing"
        for node in nodes_of(path)
        if isinstance(node, ast.Assert)
        for call in ast.walk(node.test)
        if isinstance(call, ast.Call) and ast.unparse(call.func) != "isinstance"
    ]
    assert found == []


GROWING = re.compile(r"(\w+\.)*(LRUCache|OrderedDict|defaultdict|deque|dict|list|set|Weak\w+)(\[.*\])?\(.*|\{\}|\[\]")
"""Values that a module makes to be filled later."""


def test_one_module_holds_what_a_process_shares() -> None:
    """No module but `store/runtime.py` has a variable that is filled while the process runs, or declares a global one."""
    found = set()
    for path in FILES:
        made = [
            node.value for node in tree_of(path).body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value
        ]
        empty = any(GROWING.fullmatch(ast.unparse(value)) for value in made if not getattr(value, "args", ()))
        if empty or any(isinstance(node, ast.Global) for node in nodes_of(path)):
            found.add(name_of(path))
    assert found == {"store/runtime.py"}


def text_of(string: ast.JoinedStr) -> str:
    """Spell an f-string with a NUL for each value that it fills in."""
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in string.values)


SQL = re.compile(
    r"^'\0'$|(=|<>|!=|<|>) ['`]\0|\b(IN \(|I?LIKE )'?\0|\0['`]?(\.\w+)? (IS (NOT )?NULL|(NOT )?IN \(|(NOT )?I?LIKE )|\bNOT \(\0"
)
"""SQL with a value or a name filled in."""


QUOTES_DOUBLED = re.compile(r"""replace\(["']'["'], ["']''["']\)|replace\(["']`["'], ["']``["']\)""")


def test_one_module_writes_sql() -> None:
    """No f-string outside `store/sql.py` fills values into SQL, and nothing else doubles quotes."""
    found = []
    for path in FILES:
        texts = [text_of(node) for node in nodes_of(path) if isinstance(node, ast.JoinedStr)]
        if any(SQL.search(text) for text in texts) or QUOTES_DOUBLED.search(path.read_text(encoding="utf-8")):
            found.append(name_of(path))
    assert set(found) <= {"store/sql.py"}


def test_one_module_opens_tables() -> None:
    """Only `store/tables.py` opens a Lance table, so that a call that has a session opens each once."""
    opening = re.compile(r"lance\.dataset\(|lancedb\.connect\(")
    found = {name_of(path) for path in FILES if opening.search(path.read_text(encoding="utf-8"))}
    # `RaggedAtlas.db` is a connection for users; the package does not use it.
    assert found == {"store/tables.py", "query/browse.py"}


def test_calls_that_write_use_the_tables_of_their_session() -> None:
    """Nothing below a call that writes makes tables of its own, which would be opened once more."""
    making = re.compile(r"\bTables\(")
    found = {name_of(path) for path in FILES if making.search(path.read_text(encoding="utf-8"))}
    # Tables of another atlas or folder, and those that are read as they are, to look for damage.
    others = {
        "catalog/mirror.py",
        "catalog/publishing.py",
        "catalog/published.py",
        "formats/subset.py",
        "wings/results/folder.py",
    }
    assert found == others | {
        "catalog/catalog.py",
        "catalog/file_checks.py",
        "catalog/validation.py",
    }


def module_name(path: Path) -> str:
    """Spell the dotted name of a source file."""
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[str]:
    """Name what a source file imports, also inside functions and for types only."""
    for child in nodes_of(path):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            yield from (f"{child.module}.{alias.name}" for alias in child.names)


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
        found = {target if target in names else target.rpartition(".")[0] for target in imports_of(path)}
        graph[owner] = (found & names) - {owner}
    return graph


def test_no_import_circles() -> None:
    """Files form no import circle, counting the imports inside functions and those for types only."""
    assert circle_in(import_graph()) == []


def test_contributing_names_the_order_of_rooms() -> None:
    """The page for contributors states the order that import-linter keeps."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    order = " < ".join(layer.strip("()").replace(" | ", ", ") for layer in reversed(layers))
    assert f"`{order}`" in (ROOT / "CONTRIBUTING.md").read_text("utf-8")


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/explanation/how-it-works.md"])
def test_pages_name_existing_code(page: str) -> None:
    """The files and functions that pages for contributors name exist."""
    named = re.findall(r"`([\w/]+\.py)`(?:\s`([\w.]+)`)?", " ".join((ROOT / page).read_text("utf-8").split()))
    inside = [(SRC / file, name) for file, name in named if (SRC / file.split("/")[0]).exists()]
    assert len(inside) > 5
    missing = [
        f"{path.relative_to(SRC)} {name}"
        for path, name in inside
        if not path.exists()
        or (name and not {owner.name for owner in [*functions_of(path), *classes_of(path)]} >= set(name.split(".")))
    ]
    assert missing == []


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
        "try:\n    runpy.run_module('raggedatlas', run_name='__main__')\n"
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


def test_versions_and_dependencies_agree() -> None:
    """The conda recipe and the citation name the version of `pyproject.toml`, and the recipe its dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    recipe = (ROOT / "conda.recipe/recipe.yaml").read_text("utf-8")
    assert f"  version: {project['version']}\n" in recipe
    assert f"version: {project['version']}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    run = recipe.partition("  run:\n")[2].partition("\n\n")[0]
    oldest = project["requires-python"].removeprefix(">=")
    # At conda-forge, a compiled package asks for `python` without bounds.
    assert f'  skip: match(python, "<{oldest}")\n' in recipe
    wanted = ["python", *project["dependencies"]]
    assert sorted(re.findall(r"- (.*)", run)) == sorted(
        re.sub(r"(?<=\w)(?=[<>=!])", " ", one, count=1) for one in wanted
    )

"""Every block of code in the README and the docs runs, in order, page by page.

A page's Python blocks share one namespace and its ``$ raggedatlas`` lines one folder, where ``tests/data/``
holds the real files. A block that cannot run says why in a comment before it: ``<!-- not run: reason -->``. One that
needs more than the tests' own packages names the modules, ``<!-- needs: torch -->``, and runs where they are installed.
"""

import inspect
import io
import pydoc
import re
import shlex
import shutil
import tomllib
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.command import ask

import raggedatlas as ra
from raggedatlas import errors
from raggedatlas.catalog.identity import FACTS_SCHEMA, IDENTITY_SCHEMA, LINKS_SCHEMA
from raggedatlas.formats.anndata import RULES as ANNDATA_RULES
from raggedatlas.model.accessions import GENES_SCHEMA, ORTHOLOGS_SCHEMA
from raggedatlas.model.assets import GEOMETRY_SCHEMA, RESULTS_SCHEMA
from raggedatlas.model.options import AddChoices
from raggedatlas.model.records import LAYOUTS_SCHEMA
from raggedatlas.model.terms import TERMS_SCHEMA
from raggedatlas.store.location import OPTION_NAMES
from raggedatlas.wings.cxg import RULES as CXG_RULES
from raggedatlas.wings.vectors import RULES as VECTOR_RULES

ROOT = Path(__file__).parent.parent
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if page.is_file() and not {"_build", "generated"} & set(page.parts)  # what scripts/docs makes
]
BLOCK = re.compile(
    r"(?P<excuse><!-- not run: (?P<reason>[^>]*?) ?-->\s*)?(?:<!-- needs: (?P<needs>[\w, ]*?) ?-->\s*)?^```(?P<language>\w+|\{code-cell\} ipython3)[^\n]*\n(?P<code>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
CELL_OPTIONS = re.compile(r"\A(---\n.*?^---\n|(:[\w-]+:[^\n]*\n)+)", re.MULTILINE | re.DOTALL)
"""Options of a notebook's cell, in either of MyST's two forms."""
SHELLS = {"console", "bash", "shell", "sh"}


@dataclass(frozen=True)
class Block:
    """A block of code of a page that is to be run."""

    language: str
    code: str
    line: int
    needs: tuple[str, ...] = ()

    @property
    def runnable(self) -> bool:
        """Whether the modules that the block needs are installed."""
        return all(find_spec(name) for name in self.needs)


def blocks_of(text: str) -> list[Block]:
    """Find the blocks of a page that are not excused."""
    return [
        Block(
            "python" if "code-cell" in found["language"] else found["language"],
            CELL_OPTIONS.sub(lambda options: "\n" * options[0].count("\n"), found["code"], count=1),
            text.count("\n", 0, found.start("code")) + 1,
            tuple((found["needs"] or "").replace(",", " ").split()),
        )
        for found in BLOCK.finditer(text)
        if found["excuse"] is None
    ]


def commands_of(block: Block) -> list[str]:
    """Find the calls of our command in a block, with lines that end in a backslash joined."""
    joined = block.code.replace("\\\n", " ")
    lines = [line.strip() for line in joined.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ raggedatlas")]


def run_python(block: Block, page: str, namespace: dict[str, Any]) -> None:
    """Run a block as part of its page; line numbers of errors are those of the page."""
    code = compile("\n" * (block.line - 1) + block.code, page, "exec")
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        if block.needs:  # packages beyond our locks warn of what we cannot fix
            warnings.simplefilter("ignore")
        exec(code, namespace)


def run_command(command: str) -> None:
    """Run one line of a shell block in this process, with the patterns of file names filled in as a shell does."""
    words = [path for word in shlex.split(command, comments=True)[1:] for path in (sorted(glob(word)) or [word])]  # noqa: PTH207
    done = ask(*words)
    assert done.exit_code == 0, f"{command}\n{done.output}\n{done.exception!r}"


@pytest.mark.long
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.nightly) if page.parent.name == "tutorial" else page for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_pages_run(page: Path, tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page does what it says, from its first block to its last; `scripts/docs` runs the tutorials too."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__page__"}
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    if blocks:
        shutil.copytree(data_dir, tmp_path / "tests" / "data")
    for block in filter(lambda block: block.runnable, blocks):
        if block.language == "python":
            run_python(block, str(page), namespace)
        elif block.language in SHELLS:
            for command in commands_of(block):
                run_command(command)


def test_blocks_are_found() -> None:
    """Blocks are found with their line; those with a reason before them, or a module that is not there, are left out."""
    text = (
        "# Page\n```python\na = 1\n```\n"
        "<!-- not run: needs a GPU -->\n```python\nfail()\n```\n"
        "\n```console\n$ raggedatlas ls \\\n    atlas\n$ cd elsewhere\noutput\n```\n"
        "<!-- needs: json, no_such_module -->\n```python\nfail()\n```\n<!-- needs: json -->\n```python\n```\n"
    )
    first, second, third, fourth = blocks_of(text)
    assert (first.language, first.code, first.line) == ("python", "a = 1\n", 3)
    assert commands_of(second) == ["raggedatlas ls      atlas"]
    assert (third.needs, third.runnable) == (("json", "no_such_module"), False)
    assert (fourth.needs, fourth.runnable) == (("json",), True)


def test_the_page_of_calls_names_all_of_them() -> None:
    """docs/reference/api.md lists what the package exports; the docstring of `AddChoices` has all keyword arguments of `add`."""
    page = (ROOT / "docs/reference/api.md").read_text("utf-8")
    assert [name for name in ra.__all__ if not re.search(rf"\b{name}\b", page)] == []
    add = inspect.getdoc(AddChoices) or ""
    assert [
        name
        for name in AddChoices.__annotations__
        if not re.search(rf"^[\w, ]*\b{name}\b[\w, ]* : ", add, re.MULTILINE)
    ] == []


def entries_of_calls() -> dict[str, Any]:
    """Find the entries of the summaries in docs/reference/api.md, by their full names."""
    page = (ROOT / "docs/reference/api.md").read_text("utf-8")
    return {
        f"{summary[1]}.{name}": pydoc.locate(f"{summary[1]}.{name}")
        for summary in re.finditer(r"^\.\. currentmodule:: ([\w.]+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        for name in re.findall(r"^   ~?(\w[\w.]*)$", summary[2], re.MULTILINE)
    }


def test_the_names_on_the_page_of_calls_exist() -> None:
    """Every entry of the summaries in docs/reference/api.md can be imported, as the site's build asks."""
    entries = entries_of_calls()
    assert len(entries) > 50
    assert [name for name, entry in entries.items() if entry is None] == []


def names_used(code: str) -> set[str]:
    """Find the names of the package that a block of code uses, by their full names; methods are those of their class."""
    imported = {
        f"{found[1]}.{name.split(' as ')[0].strip()}"
        for found in re.finditer(r"^\s*from (raggedatlas[\w.]*) import (?:\(([^)]*)\)|(.+))", code, re.MULTILINE)
        for name in (found[2] or found[3]).split(",")
        if name.strip()
    }
    return imported | {f"raggedatlas.{name}" for name in re.findall(r"\bra\.(\w+)", code)}


def test_names_of_a_block_are_found() -> None:
    """Those that are imported, also in parentheses and under another name, and those that are looked up in the package."""
    code = "import raggedatlas as ra\nfrom raggedatlas.a import (\n    B,\n    c as d,\n)\n  from raggedatlas import e, f\nra.G.h()\n"
    assert names_used(code) == {"raggedatlas." + name for name in ("a.B", "a.c", "e", "f", "G")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_page_of_calls_has_what_other_pages_use(page: Path) -> None:
    """Each name of the package in the code of a page is an entry in docs/reference/api.md, an error, or a module; rules are named in a sentence."""
    listed = [*entries_of_calls().values(), *vars(errors).values()]
    used = {
        name: pydoc.locate(name)
        for found in BLOCK.finditer(page.read_text(encoding="utf-8"))
        if "python" in found["language"]
        for name in names_used(found["code"])
    }
    missing = {name for name, one in used.items() if not any(one is entry for entry in listed)}
    assert {name for name in missing if not name.endswith(".RULES") and not inspect.ismodule(used[name])} == set()


def test_the_page_of_the_disk_names_every_column() -> None:
    """docs/reference/on-disk.md names all columns of the tables that it describes, and object-stores.md all storage options."""
    page = (ROOT / "docs/reference/on-disk.md").read_text("utf-8")
    schemas = (RESULTS_SCHEMA, GEOMETRY_SCHEMA, GENES_SCHEMA, ORTHOLOGS_SCHEMA, TERMS_SCHEMA, LAYOUTS_SCHEMA)
    schemas += (FACTS_SCHEMA, IDENTITY_SCHEMA, LINKS_SCHEMA)
    assert [name for schema in schemas for name in schema.names if f"`{name}`" not in page] == []
    stores = (ROOT / "docs/how-to/object-stores.md").read_text("utf-8")
    assert [name for name in OPTION_NAMES if f"`{name}`" not in stores] == []


def test_the_page_of_errors_explains_each() -> None:
    """With three causes at least, the error of limits first."""
    text = (ROOT / "docs" / "reference" / "troubleshooting.md").read_text(encoding="utf-8")
    parts = {part.split("\n", 1)[0]: part for part in text.split("\n## ")[1:]}
    raised = {
        name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, errors.AtlasError)
    }
    assert {*parts} == raised - {"AtlasError"} | {"UnknownValueWarning"}
    assert next(iter(parts)) == "LimitError"
    assert {
        name for name in raised - {"AtlasError"} if len(re.findall(r"^- \*\*", parts[name], re.MULTILINE)) < 3
    } == set()
    builtins_of = {
        name: {base.__name__ for base in vars(errors)[name].__mro__ if base.__module__ == "builtins"} for name in parts
    }
    assert {
        name for name in raised - {"AtlasError"} if not any(f"`{base}`" in parts[name] for base in builtins_of[name])
    } == set()


QUESTIONS = [
    ("What do I install to train with PyTorch?", "install.md", "Extras", "`ml`"),
    ("Why is the installed core so large?", "install.md", "Size", "pylance"),
    ("How do I add a folder of h5ad files?", "how-to/add-files.md", "Add many", "atlas.add("),
    ("Was this gene measured in that dataset, or is it zero?", "how-to/query.md", "Choose features", "measured"),
    ("How do I find T cells of all kinds?", "how-to/ontologies.md", "Ask by ontology", 'under("'),
    ("How do I use several GPUs?", "how-to/train.md", "Train in several processes", "Loader("),
    ("How do I delete a donor who withdrew?", "how-to/versions.md", "Purge", "purge("),
    ("How do I give an atlas to a colleague?", "how-to/recipes.md", "Give an atlas to a colleague", "sync("),
    ("How do I get cells into Seurat?", "how-to/r.md", "The R package", "Seurat"),
    ("What does LimitError want from me?", "reference/troubleshooting.md", "LimitError", "memory"),
    ("What is a layout?", "reference/glossary.md", "Glossary", "layout"),
    ("How fast is it, compared with others?", "explanation/performance.md", "How fast it is, and why", "annbatch"),
]


@pytest.mark.parametrize(("question", "page", "heading", "answer"), QUESTIONS, ids=[one[0] for one in QUESTIONS])
def test_a_newcomer_finds_the_answer_in_two_clicks(question: str, page: str, heading: str, answer: str) -> None:
    """From the first page of the site, links of its text lead to the page; its heading has the answer below."""
    index = ROOT / "docs" / "index.md"
    first = linked_pages(index)
    assert ROOT / "docs" / page in first | {target for each in first for target in linked_pages(each)}, question
    parts = re.split(r"^#+ ", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    (section,) = [part for part in parts if part.startswith(f"{heading}\n")]
    assert answer in section, question


def linked_pages(page: Path) -> set[Path]:
    """List the pages that a page links to."""
    targets = re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    return {(page.parent / target).resolve() for target in targets}


def test_the_install_page_lists_every_extra() -> None:
    """Its table has the extras of pyproject.toml, the packages of each, and which of them are in `all`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {
        name: {re.split("[<>=!\\[]", package)[0] for package in packages}
        for name, packages in project["optional-dependencies"].items()
    }
    included = set(re.findall(r"[\w-]+", project["optional-dependencies"]["all"][0])) - {"raggedatlas"}
    rows = re.findall(
        r"^\| `([\w-]+)` \| ([^|]+) \| [^|]+ \| ([^|]+) \|$",
        (ROOT / "docs" / "install.md").read_text("utf-8"),
        re.MULTILINE,
    )
    assert {name: set(packages.split(", ")) for name, packages, _ in rows} == {
        name: extras[name] for name in extras if name != "all"
    }
    assert {name for name, _, answer in rows if answer == "yes"} == included


def test_specifications_name_modules_and_tests_that_exist() -> None:
    """Every file in docs/reference/specifications.md exists, and has the test that is named; every rule is in a row."""
    page = (ROOT / "docs" / "reference" / "specifications.md").read_text(encoding="utf-8")
    named = [
        (ROOT / folders["tests" if Path(path).name.startswith("test_") else "modules"] / path, test)
        for section in page.split("\n## ")[1:]
        for folders in [re.search(r"Modules are below `(?P<modules>.*?)`, tests below `(?P<tests>.*?)`", section) or {}]
        for path, test in re.findall(r"`([^`]*?\.py)(?:::(\w+))?`", section)
    ]
    assert len(named) > 100
    assert [path for path, _ in named if not path.is_file()] == []
    assert [
        f"{path}::{test}" for path, test in named if test and f"def {test}(" not in path.read_text(encoding="utf-8")
    ] == []
    rows = [re.findall(r"\b([ACV])(\d+)(?: to \1(\d+))?", row) for row in re.findall(r"^\| .*$", page, re.MULTILINE)]
    ranges = [(kind, int(first), int(last or first)) for row in rows for kind, first, last in row]
    rules = {*ANNDATA_RULES, *CXG_RULES, *VECTOR_RULES}
    assert {
        rule
        for rule in rules
        if not any(kind == rule[0] and first <= int(rule[1:]) <= last for kind, first, last in ranges)
    } == {"A00", "C00", "V000"}  # damage, of any element


def test_every_page_is_in_an_index() -> None:
    """Each page of a folder is in the table of contents of its index."""
    for index in [ROOT / "docs" / "index.md", *sorted((ROOT / "docs").glob("*/index.md"))]:
        listed = set(re.findall(r"^([\w-]+)$", index.read_text(encoding="utf-8"), re.MULTILINE))
        there = {page.stem for page in index.parent.glob("*.md")} - {"index"}
        assert there <= listed, index

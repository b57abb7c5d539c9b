"""Wrong values of options: every option of every command refuses in one line, and advice is spelled as options."""

import ast
import enum
import inspect
import re
import shlex
import shutil
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import h5py
import numpy as np
import pytest
import typer
from typer.models import ArgumentInfo
from typer.testing import CliRunner

import raggedatlas as ra
import raggedatlas.wings.results
from raggedatlas.atlas import AtlasView
from raggedatlas.cli.app import to_command_line
from raggedatlas.cli.commands import app
from raggedatlas.model.options import AddChoices
from raggedatlas.query.query import Query
from raggedatlas.wings.vectors.builder import make_geometry
from raggedatlas.wings.vectors.writer import write
from support.atlases import small_anndata, write_results
from support.spatial import spots

PYTHON = re.compile(
    r"\b[a-z_]+=(?:True|False|None|['\"\[{(.]|\d)|(?<![\w/])(?:atlas)?\.[a-z_]+\((?:[^()]|\([^()]*\))*\)(?! in Python)"
)
"""Advice that a program can follow and a shell cannot."""


@dataclass(frozen=True)
class Option:
    """An option of a command: how it is spelled, the type of one value, and its bounds."""

    command: tuple[str, ...]
    name: str
    kind: Any
    least: float | None
    most: float | None

    def wrong(self) -> list[str]:
        """Texts that cannot be values; none where any text may be one."""
        if get_origin(self.kind) is Literal or (inspect.isclass(self.kind) and issubclass(self.kind, enum.Enum)):
            return ["nonsense", ""]
        if self.kind not in (int, float):
            return []
        beyond = [
            str(self.kind(end))
            for end in (self.least is not None and self.least - 1, self.most and self.most + 1)
            if end
        ]
        return ["nonsense", "", *beyond, *(["1.5"] if self.kind is int else [])]


def commands(group: Any = app, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Callable[..., object]]]:
    """Walk over all commands, those of groups included."""
    for info in group.registered_commands:
        yield (*path, info.name or info.callback.__name__.replace("_", "-")), info.callback
    for inner in group.registered_groups:
        yield from commands(inner.typer_instance, (*path, inner.name or inner.typer_instance.info.name))


def spellings(info: Any) -> list[str]:
    """Give the names that an option declares; typer keeps the first as its default until the command is made."""
    words = [word for word in (info.default, *(info.param_decls or ())) if isinstance(word, str)]
    return [one for word in words for one in word.split("/") if one.startswith("-")]


def options() -> Iterator[Option]:
    """Walk over the options of all commands that take a value."""
    for path, verb in commands():
        for name, parameter in inspect.signature(verb).parameters.items():
            if get_origin(parameter.annotation) is not Annotated:
                continue
            kind, info = get_args(parameter.annotation)
            if get_origin(kind) in (Union, types.UnionType):
                kind = next(one for one in get_args(kind) if one is not type(None))
            if get_origin(kind) is list:
                (kind,) = get_args(kind)
            if kind is not bool and not isinstance(info, ArgumentInfo):
                spelled = [word for word in spellings(info) if word.startswith("--")]
                yield Option(path, [*spelled, f"--{name.strip('_').replace('_', '-')}"][0], kind, info.min, info.max)


def refusal(*words: object, codes: tuple[int, ...] = (1, 2)) -> str:
    """Run a command that must be refused, and return the one line that says so."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code in codes, (words, result.exit_code, result.output, result.exception)
    lines = [line for line in result.stderr.splitlines() if line.startswith("raggedatlas: ")]
    assert len(lines) == 1, (words, result.stderr)
    assert "Traceback" not in result.output, words
    assert not PYTHON.search(lines[0]), (words, lines[0])
    assert not re.search(r"PosixPath\(|Value error", lines[0]), (words, lines[0])
    return lines[0]


def test_l2_is_said_to_be_squared() -> None:
    """Wherever distances can be chosen, in Python or as an option, the help says that those of l2 are squared."""
    helps = [
        str(get_args(parameter.annotation)[1].help)
        for _, verb in commands()
        for parameter in inspect.signature(verb).parameters.values()
        if get_origin(parameter.annotation) is Annotated and "l2" in get_args(get_args(parameter.annotation)[0])
    ]
    assert len(helps) == 4
    calls = (AddChoices, Query.search, ra.wings.results.neighbors, ra.wings.results.save_to_database)
    for said in (*helps, *map(inspect.getdoc, calls)):
        assert "squared" in str(said).lower()


@pytest.mark.nightly
def test_every_option_with_choices_or_numbers_refuses_other_values() -> None:
    """A value that is none of the choices, no number, or beyond the bounds is exit code 2, and the line names the option."""
    tried: set[tuple[object, ...]] = set()
    for option in options():
        known = (option.name, option.kind, option.least, option.most)
        for value in option.wrong()[: 1 if known in tried else None]:
            assert option.name in refusal(*option.command, *["x"] * 3, option.name, value, codes=(2,)), option
        tried.add(known)
    assert len(tried) > 50


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an atlas of two datasets, a result and shapes, the files that they are of, and a model."""
    folder = tmp_path_factory.mktemp("place")
    atlas = ra.RaggedAtlas.create(folder / "atlas")
    for seed, name in enumerate(("one", "two", "three")):
        small_anndata(seed, 9).write_h5ad(folder / f"{name}.h5ad")
    atlas.add([folder / "one.h5ad", folder / "two.h5ad"], organism="human", progress=False)
    uids = atlas.checkout(atlas.snapshot("first")).query().to_pandas().index.tolist()
    write_results(folder / "z", uids, np.arange(3 * len(uids), dtype=np.float32).reshape(-1, 3))
    atlas.add(folder / "z", name="z", progress=False)
    (folder / "clusters.csv").write_text("\n".join(["uid,leiden", *(f"{uid},1" for uid in uids)]))
    write(make_geometry(spots()), folder / "g.zv")
    atlas.add(folder / "g.zv", "shapes", dataset="d", progress=False)
    atlas.snapshot("all")
    texts = small_anndata(4, 9)
    texts.obs["n_genes"] = texts.obs["n_genes"].astype(str)
    texts.write_h5ad(folder / "texts.h5ad")
    with h5py.File(folder / "two.h5", "w") as file:
        for genome in ("hg19", "mm10"):
            group = file.create_group(genome)
            for name, values in {"data": [1], "indices": [0], "indptr": [0, 1], "shape": [1, 1]}.items():
                group[name] = np.array(values, np.int32)
            for name in ("barcodes", "genes", "gene_names"):
                group[name] = np.array([f"{genome}_{name}"], "S")
    (folder / "full.h5ad").write_bytes((folder / "one.h5ad").read_bytes())
    return folder


LONG = "n" * 300
HGNC = Path(__file__).parents[1] / "data/gene_tables/hgnc_complete_set_extract.txt"
TEXTS = [
    ("ls A --at nowhere", "no snapshot 'nowhere'"),
    ("ls A --storage-option nonsense", "--storage-option"),
    ("checkout A nowhere", "no snapshot 'nowhere'"),
    ("add A none.h5ad", "none.h5ad"),
    ("add A three.h5ad --layer X=counts --layer raw/X", "--layer"),
    ("add A three.h5ad --feature-id a --feature-id b", "--feature-id"),
    ("add A three.h5ad --cast donor", "--cast"),
    ("add A three.h5ad --organism human --obs nocolumn", "nocolumn"),
    ("add A three.h5ad --organism human --cast n_genes=colour", "--cast n_genes=colour"),
    ("add A texts.h5ad --organism human", "--cast n_genes=int"),
    ("add A texts.h5ad --organism human", "--on-clash text or rename"),
    ("add A two.h5", "--genome"),
    ("add A two.h5 --genome rn6", "no 'rn6'"),
    ("add A three.h5ad --genome mm10", "--genome means nothing"),
    ("add A three.h5ad --link-by cell_name", "--link-by: has no effect for files of cells"),
    ("add A three.h5ad --as vector --unknown skip", "--unknown: has no effect for files of cells"),
    ("add A one.h5ad three.h5ad --counts", "--counts: has no effect for files of cells"),
    ("add A z --name other --layer X", "--layer: has no effect for the kind 'result'"),
    ("add A z --name other --lacking allow", "--lacking: has no effect for the kind 'result'"),
    ("add A g.zv --name other --link --obs a", "--obs, --link: have no effect for the kind 'geometry'"),
    ("convert one.h5ad out.h5ad --option a=b --levels 2", "--option, --levels: have no effect for files of cells"),
    ("convert g.zv out.csv --levels 2", "--levels has no effect where the target is a file"),
    ("convert g.zv out.csv --chunk-shape 1,1,1", "--chunk-shape has no effect where the target is a file"),
    ("convert g.zv out.csv --layout 0.7", "--layout has no effect where the target is a file"),
    ("convert g.zv out.zv --sparsity 0.5", "--sparsity: has no effect without --levels"),
    ("convert one.h5ad out.zv --level 1", "--level has no effect where the source is a file"),
    ("convert two.h5 out.h5ad", "--genome"),
    ("add A three.h5ad --organism human --layer nolayer", "nolayer"),
    ("add A three.h5ad --organism human --space nowhere", "--space"),
    ("add A three.h5ad --organism human --space obsm/x=protein_abundance", "obsm/x"),
    ("add A three.h5ad --organism human --embedding nothing", "obsm/nothing"),
    ("add A three.h5ad --organism human --feature-id nocolumn", "nocolumn"),
    ("add A three.h5ad --organism human --max-columns 1", "--obs"),
    (f"add A three.h5ad --organism human --name {LONG}", "300"),
    (f"add A z --name {LONG}", "300"),
    ("add A z --name other --space nowhere", "nowhere"),
    ("add A z --name cell_type", "column 'cell_type'"),
    ("add A z --name n --space obsm/z=embedding", "--space"),
    ("annotate A clusters.csv --on name", "--on"),
    ("annotate A nowhere.csv", "nowhere.csv"),
    ("annotate A clusters.csv --column nope", "nope"),
    ("annotate A clusters.csv --cast leiden", "--cast"),
    ("annotate A clusters.csv --obsm X_umap", "obsm"),
    ("drop-annotation A nope", "no annotation 'nope'"),
    ("add A z", "--on-duplicate"),
    ("add A z --name other --output noresult", "noresult"),
    ("add A one.h5ad --organism human", "--on-duplicate skip"),
    ("add A g.zv --name other --link-by nocolumn", "nocolumn"),
    ("query A --layers nolayer -f GENE1", "nolayer"),
    ("query A --layers nolayer --count", "nolayer"),
    ("query A --features NOSUCH", "NOSUCH"),
    ("query A --features NOSUCH --by dataset", "NOSUCH"),
    ("query A --where 'nonsense = 1'", "nonsense"),
    ("query A --space nowhere", "nowhere"),
    ("query A --at nowhere", "first"),
    ("query A --identity nowhere", "nowhere"),
    ("query A --orthologs unicorn", "raggedatlas genes load"),
    ("query A --obs nocolumn", "nocolumn"),
    ("query A --with-results noresult", "raggedatlas add"),
    ("query A --order-by nocolumn", "nocolumn"),
    ("query A --sample 2 --sample-by nocolumn", "nocolumn"),
    ("query A --sample-by cell_type", "--sample"),
    ("query A --within 1,2,x", "--within"),
    ("query A --within-by exact", "--within-by: has no effect without --within"),
    ("query A --seed 1", "--seed: has no effect without --sample"),
    ("query A --descending", "--descending: has no effect without --order-by"),
    ("query A --overwrite", "--overwrite: has no effect without --output"),
    ("query A --level 2", "--level: has no effect without --by"),
    ("query A --join sideways", "--join 2"),
    ("query A --layers nolayer -f GENE1", "--layers counts reads the most cells; .spaces([]) in Python"),
    ("aggregate A --by dataset --overwrite", "--overwrite: has no effect without --output"),
    ("verify A --root-hash 0", "--snapshot"),
    ("validate A --root-hash 0", "--at"),
    ("inspect A", "raggedatlas info"),
    ("validate nothing.h5ad", "no file nothing.h5ad"),
    ("validate two.h5", "is a 10x file"),
    ("view nothing", "nothing is no folder of results"),
    ("features A GENEX", "near 'GENEX'"),
    ("query A --centroids noshape", "raggedatlas add"),
    ("query A --by nocolumn", "nocolumn"),
    ("query A --output none/x.h5ad", "none"),
    ("export A out.rds", ".h5ad, .h5mu"),
    ("export A out.cxg", "--embedding"),
    ("export A full.h5ad", "--overwrite"),
    ("convert one.h5ad out.h5ad --compression nonsense", "nonsense"),
    ("convert one.h5ad full.h5ad", "--overwrite"),
    ("convert one.h5ad out.zarr --modality nothing", "nothing"),
    ("lookup z nobody --column nothing", "nothing"),
    ("neighbors z --vectors nothing.npy", "nothing.npy"),
    ("search A nobody --column z", "nobody"),
    ("search A nobody --column nothing", "nothing"),
    ("infer A nomodule:model -o out", "nomodule"),
    ("infer A nomodule:model -o out --option nonsense", "--option"),
    ("engine A nothing.onnx -o out", "nothing.onnx"),
    ("pca A -o out --n-components 500", "500"),
    ("pca A -o out --model nothing", "nothing"),
    ("features A NOSUCH", "NOSUCH"),
    ("features A --space nowhere", "nowhere"),
    ("find A NOSUCH", "NOSUCH"),
    ("add-csc A one --layer nolayer", "nolayer"),
    ("drop-geometry A shapes --dataset nothing", "nothing"),
    ("drop-result A noresult", "noresult"),
    ("drop A nothing", "nothing"),
    ("purge A nothing --yes", "nothing"),
    ("view A nothing", "nothing"),
    ("view A z --color nothing", "nothing"),
    ("visualize A z -o out.html --color nothing", "nothing"),
    ("visualize A z -o out.rds", ".html"),
    ("genes explain A GENE1 --space nowhere", "nowhere"),
    ("genes load A nothing.csv", "nothing.csv"),
    (f"genes load A {HGNC} --organism mouse", "is of human, not of mouse"),
    ("genes explain A SEPT", "unknown: ['SEPT']"),
    ("genes orthologs A mouse", "no table of orthologs of 'mouse'"),
    ("genes status A --space nope", "nope"),
    ("genes link A GENE1 NOSUCH", "NOSUCH"),
    ("genes link A GENE1 GENE1", "are the same feature"),
    ("genes unlink A GENE1", "counts as no other"),
    ("genes remove A nothing", "nothing"),
    ("snapshot A --label first", "labelled 'first'"),
    ("convert-results --results-dir nothing", "nothing"),
    ("fix A x.h5ad", "repair"),
    ("create A", "already"),
    ("ls none", "raggedatlas create "),
]
"""What is asked, and what the refusal must name."""


@pytest.mark.parametrize(("words", "named"), TEXTS, ids=[words[:60] for words, _ in TEXTS])
def test_a_wrong_text_is_refused_in_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, words: str, named: str
) -> None:
    """Exit code 1 or 2, one line that names what is wrong or the way out as an option or a command, and nothing written."""
    monkeypatch.chdir(place)
    before = sorted(path for path in place.rglob("*") if "_transactions" not in path.parts)
    assert named in refusal(*("atlas" if word == "A" else word for word in shlex.split(words)))
    assert sorted(path for path in place.rglob("*") if "_transactions" not in path.parts) == before


@pytest.mark.parametrize(
    "words",
    ["aggregate A --by dataset", "compare A one two --by dataset", "sql A 'FROM cells'"],
)
def test_a_table_is_not_computed_for_a_target_that_cannot_be_written(
    place: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """An ending that no writer has, a file that is there and a folder that is not are refused before values are read."""

    def compute(*_: object, **__: object) -> None:
        raise AssertionError("computed")

    monkeypatch.chdir(place)
    monkeypatch.setattr(Query, "aggregate", compute)
    monkeypatch.setattr(Query, "compare", compute)
    monkeypatch.setattr(AtlasView, "sql", compute)
    for target, named in (("t.txt", ".csv"), ("clusters.csv", "--overwrite"), ("none/t.csv", "none")):
        assert named in refusal(*("atlas" if word == "A" else word for word in shlex.split(words)), "-o", target)


PRINTED = {
    "catalog/": ["add", "query"], "catalog/validation": ["validate"], "catalog/genes": ["genes load"], "formats/": ["add", "convert"],
    "formats/gene_tables": ["genes load"], "ingest/": ["add"],
    "ingest/annotations": ["annotate"], "ingest/term_mapping": ["map-terms"], "model/frames": ["add"], "query/": ["query", "export"],
    "query/cell_load": [], "query/compare": [], "query/neighbors": ["neighbors"], "query/identity": ["genes link", "query"], "query/lazy": [], "query/outputs": [],
    "query/score": [], "query/search": ["search"], "query/split": [], "store/ontologies": ["load-terms"],
    "wings/cxg/": ["convert", "export"], "wings/cxg/curation": [], "wings/cxg/explorer": ["serve"],
    "wings/results/attachment": ["add", "annotate"], "wings/results/npy_results": ["convert-results"], "wings/results/verbs/evaluation": ["test"],
    "wings/results/verbs/inference": ["infer"], "wings/results/verbs/lookup": ["neighbors", "save-to-database"],
    "wings/results/verbs/models": ["infer", "engine"], "wings/results/verbs/reduction": ["pca", "umap"],
    "wings/vectors/attachment": ["add"], "wings/vectors/attachment_plan": ["add"], "wings/vectors/cell_geometry": [],
    "wings/vectors/converters/": ["convert"], "wings/viewer/": ["view", "visualize"],
}  # fmt: skip
"""Modules -> the commands that print their refusals; the longest name counts."""

OF_A_PAGE = ("on_conflict='x'; it is 'error', 'replace' or 'keep'.", "k='x' neighbours; ask for 1 to VALUE.")
"""What the server answers a page, and no command prints."""


def messages(file: Path) -> Iterator[str]:
    """Yield the texts of what a module raises, with VALUE for each value in them."""
    for raised in (node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Raise)):
        within = {id(part) for node in ast.walk(raised) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(raised):
            if id(node) in within:
                continue
            if isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(part.value)
                    if isinstance(part, ast.Constant)
                    else "'x'"
                    if getattr(part, "conversion", 0) == 114
                    else "VALUE"
                    for part in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_every_refusal_that_mentions_an_argument_has_the_words_of_its_command() -> None:
    """No message of the modules that commands call keeps an argument of Python, but those that are said to be of Python."""
    root = Path(ra.__file__).parent
    group = typer.main.get_command(app)
    of = dict(group.commands)
    of |= {f"genes {name}": command for name, command in of["genes"].commands.items()}
    found = [
        (file.relative_to(root).as_posix(), text)
        for file in sorted(root.rglob("*.py"))
        for text in messages(file)
        if re.search(r"(?<![\w.'-])[a-z_]+=(?!=)", text) and text not in OF_A_PAGE
    ]
    kept = []
    for name, text in found:
        commands = PRINTED.get(max((each for each in ["", *PRINTED] if name.startswith(each)), key=len), [])
        said = [
            to_command_line(text, {word for one in of[command].params for word in one.opts}) for command in commands
        ]
        if said and all(PYTHON.search(re.sub(r"[a-z_]+=[^=]*? in Python", "", one)) for one in said):
            kept.append((name, said[0]))
    assert len(found) > 100
    assert kept == []


def test_validation_and_repair_give_advice_as_commands(place: Path, tmp_path: Path) -> None:
    """What validate and repair print speaks of commands too."""
    own = shutil.copytree(place / "atlas", tmp_path / "atlas")
    shutil.rmtree(next(path for path in (own / "zarr_store").glob("*/gene_expression")))
    for words in (["validate", own, "--level", "rows"], ["repair", own]):
        said = CliRunner().invoke(app, [str(word) for word in words]).stdout
        assert "raggedatlas " in said or words[0] == "validate", said
        assert not PYTHON.search(said), said
        assert "drop_dataset(" not in said, said


def test_the_page_of_commands_is_that_of_the_command() -> None:
    """docs/reference/command.md names every command, and no option that none of them has."""
    page = Path("docs/reference/command.md").read_text("utf-8")
    assert [path for path, _ in commands() if f"`{' '.join(path)}`" not in page] == []
    known = {"--help", "--install-completion"}
    for _, verb in commands():
        for name, parameter in inspect.signature(verb).parameters.items():
            infos = get_args(parameter.annotation)[1:] if get_origin(parameter.annotation) is Annotated else ()
            known |= {f"--{name.strip('_').replace('_', '-')}", *(word for info in infos for word in spellings(info))}
            known |= {"--json"} if name == "as_json" else set()
    assert {*re.findall(r"(?<![\w-])--[a-z][a-z-]*", page)} <= known

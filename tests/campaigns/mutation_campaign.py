"""Mutated atlases: one byte or one value is changed, and every reader must give what was written, refuse it, or have it found."""

import contextlib
import hashlib
import json
import random
import resource
import select
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from support.processes import started

CRASHED, HUNG, FOREIGN, SILENT, MISSED = "crashed", "hung", "foreign", "silent", "missed"
"""What must not happen: the process ended, or did not end; an error of no class of ours; other values without a word from deep
validation; a flipped bit that deep validation does not find."""

_SECONDS = 1800
"""After which a child counts as hung: long, since on a busy machine a child that others starve is no failure."""

_MEMORY = 24 * 2**30
_ODD: tuple[Any, ...] = (
    None,
    -1,
    0,
    1,
    2**40,
    -(2**63),
    2**70,
    1.5,
    1e308,
    "",
    "x",
    "../..",
    "\u0000",
    [],
    {},
    [1],
    {"a": 1},
    True,
)
_GENE_TABLES = {
    "genes.csv": "Gene stable ID,Gene name,Gene Synonym\n"
    "ENSG00000000001,GENE1,\nENSG00000000011,GENE11,OLD11\nENSG00000000012,GENE12,\n",
    "orthologs.csv": "Gene stable ID,Gene name,Mouse gene stable ID,Mouse gene name,Mouse homology type\n"
    "ENSG00000000011,GENE11,ENSMUSG00000000011,Gene11,ortholog_one2one\n",
}
"""Exports of Ensembl BioMart, made up."""

_TERMS = {
    "id": ["MY:1", "MY:2", "MY:3", "MY:4"],
    "label": ["lymphocyte", "B", "T", "NK"],
    "is_a": ["", "MY:1", "MY:1", "MY:1"],
}
"""An ontology of cell types, made up."""


def make_atlas(folder: Path) -> Path:
    """Make an atlas with every kind of file.

    It has sparse and dense groups, a column-sorted copy, extras, results of both kinds, a geometry store, a link made by hand,
    gene tables of both kinds, an ontology, an annotation, and deleted cells.

    Parameters
    ----------
    folder : Path
        Where the atlas and the files that it is made of are written.

    Returns
    -------
    Path
        The atlas.
    """
    import scipy.sparse as sp

    from raggedatlas.atlas import RaggedAtlas
    from raggedatlas.wings.results.dataset import ResultDataset
    from support.atlases import GENES, small_anndata, write_results
    from support.spatial import spots

    path = folder / "atlas"
    atlas = RaggedAtlas.create(str(path))
    for seed, n, genes in ((1, 40, GENES), (2, 25, GENES[10:])):
        made = small_anndata(seed, n, genes, extra="age")
        made.obsp["near"] = sp.random(n, n, 0.2, "csr", np.float32, random_state=seed)
        made.obsm["pca"] = np.arange(n * 2, dtype=np.float32).reshape(-1, 2)
        made.uns["note"] = {"text": "kept", "numbers": np.arange(5)}
        made.uns["cell_type_colors"] = ["#111111", "#222222", "#333333"]
        made.write_h5ad(folder / f"{seed}.h5ad")
        atlas.add(folder / f"{seed}.h5ad", name=f"d{seed}", organism="human", progress=False)
    atlas.add_csc("d1")
    atlas.identity.link(GENES[28], GENES[29])
    for name, text in _GENE_TABLES.items():
        (folder / name).write_text(text)
        atlas.identity.load(folder / name)
    uids = atlas.checkout(atlas.snapshot("before")).query().to_pandas().index.to_numpy(dtype=object)
    values = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    write_results(folder / "z", uids[:50], values, model="encoder", model_hash="ab" * 32, verb="infer", parent="")
    atlas.add(ResultDataset({}, folder / "z"), name="latent", as_="space", progress=False)
    atlas.add(ResultDataset({}, folder / "z"), name="vectors", as_="vector", progress=False)
    atlas.add(spots(), name="shapes", dataset="d3", progress=False)
    atlas.load_terms(_TERMS)
    atlas.map_terms("cell_type", "MY")
    atlas.delete_cells(uids=list(uids[3:7]))
    atlas.snapshot("all")
    return path


def live_files(path: Path) -> dict[str, list[str]]:
    """List the files that the snapshots of an atlas reach, by kind."""
    from raggedatlas.catalog.catalog import open_catalog
    from raggedatlas.catalog.versions import list_versions
    from raggedatlas.store.location import Location
    from raggedatlas.store.manifests import FOLDER, read_manifest

    catalog = open_catalog(Location(str(path)))
    named = {
        key for record in list_versions(catalog) for key in read_manifest(catalog.tables.location, record.manifest)
    }
    head = json.loads((path / "lance_db" / FOLDER / "head.json").read_bytes().split(b"\n", 1)[1])
    keys = sorted({f"lance_db/{key}" for key in named | set(head["files"])})
    keys += sorted(str(f.relative_to(path)) for f in (path / "lance_db" / FOLDER).iterdir())
    keys += sorted(str(f.relative_to(path)) for f in (path / "zarr_store").rglob("*") if f.is_file())
    kinds: dict[str, list[str]] = {}
    for key in keys:
        parts = key.split("/")
        if parts[0] == "lance_db":
            kind = (
                f"{parts[1].split('.')[0].split('_registry')[0]} {parts[2]}"
                if len(parts) > 2 and parts[1] != FOLDER
                else FOLDER
            )
        else:
            kind = (
                parts[-1]
                if parts[-1] == "zarr.json"
                else "frames"
                if "frames" in parts
                else "/".join(parts[2:-2]) or parts[-1]
            )
        kinds.setdefault(kind, []).append(key)
    return kinds


def flip_bit(path: Path, chance: random.Random) -> str:
    """Flip one bit of one live file of an atlas, and say which; every kind of file is as likely."""
    kinds = live_files(path)
    key = chance.choice(kinds[chance.choice(sorted(kinds))])
    data = bytearray((path / key).read_bytes())
    bit = chance.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    (path / key).write_bytes(data)
    return f"bit {bit} of {key}"


def _other_json(text: str, chance: random.Random) -> str:
    """Change something in a JSON text: a value, a key, or the text itself."""
    if chance.random() < 0.15:
        at = chance.randrange(len(text) + 1)
        return chance.choice(
            [text[:at], text[:at] + chance.choice('{}[]",:x\u0000') + text[at:], "", "null", "[]", "1", '"x"']
        )
    tree = json.loads(text)
    node: Any = tree
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
        if not keys:
            return json.dumps(chance.choice(_ODD))
        key = chance.choice(keys)
        if not isinstance(node[key], (dict, list)) or not node[key] or chance.random() < 0.2:
            break
        node = node[key]
    if chance.random() < 0.2:
        del node[key]
    else:
        node[key] = chance.choice(_ODD)
    return json.dumps(tree)


def change_value(path: Path, chance: random.Random) -> str:
    """Change one value of an atlas, with all checksums made right and named by the newest snapshot; say which."""
    name = chance.choice(sorted(_CHANGES))
    return f"{name}: {_CHANGES[name](path, chance)}"


def _catalog(path: Path) -> Any:
    from raggedatlas.catalog.catalog import open_catalog
    from raggedatlas.store.location import Location

    return open_catalog(Location(str(path)))


def _rename_versions(catalog: Any, table: str) -> None:
    """Have the newest snapshot name the newest version of a table."""
    from raggedatlas.catalog.integrity import last_manifest, write_manifest
    from raggedatlas.catalog.versions import change_versions, list_versions

    records = list_versions(catalog)
    last = records[-1]
    versions = {**last.table_versions, table: catalog.tables.version(table)}
    changed = last.model_copy(
        update={
            "table_versions": versions,
            "manifest": write_manifest(catalog, versions, *last_manifest(catalog, records)),
        }
    ).sealed()
    change_versions(catalog, lambda old: [*old[:-1], changed])


def _change_rows(catalog: Any, table: str, change: Callable[[list[dict[str, Any]]], str]) -> str:
    """Rewrite the rows of a table; a value that its column cannot hold is none."""
    import pyarrow as pa

    there = catalog.tables.read(table)
    rows = there.to_pylist()
    said = change(rows)
    columns = []
    for column in there.schema:
        values = [row.get(column.name) for row in rows]
        try:
            columns.append(pa.array(values, column.type))
        except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
            columns.append(there.column(column.name).combine_chunks().slice(0, len(rows)))
    made = pa.Table.from_arrays(columns, schema=there.schema)
    catalog.tables.overwrite_if(table, made, catalog.tables.version(table))
    if table != "atlas_versions":
        _rename_versions(catalog, table)
    return said


def _change_cell(table: str, path: Path, chance: random.Random) -> str:
    def change(rows: list[dict[str, Any]]) -> str:
        at = chance.randrange(len(rows))
        key = chance.choice(sorted(rows[at]))
        value = rows[at][key]
        if isinstance(value, str) and value[:1] in {"{", "["} and chance.random() < 0.9:
            rows[at][key] = _other_json(value, chance)
        elif isinstance(value, dict):
            inner = chance.choice(sorted(value))
            rows[at][key] = {**value, inner: chance.choice((*_ODD, 7, 1000))}
        elif isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.5:
            rows[at][key] = value + chance.choice([-1, 1, 1000, 2**33])
        elif chance.random() < 0.2:
            rows[at][key] = rows[chance.randrange(len(rows))][key]
        else:
            rows[at][key] = chance.choice(_ODD)
        return f"row {at}, {key} = {rows[at][key]!r}"

    return _change_rows(_catalog(path), table, change)


def _change_array(path: Path, chance: random.Random) -> str:
    from raggedatlas.catalog.assets import array_readers, read_records
    from raggedatlas.store.arrays import ArrayWriter, describe_group, read_group
    from raggedatlas.store.read import read_all

    catalog = _catalog(path)
    record = chance.choice([record for record in read_records(catalog) if record.array_specs])
    readers = array_readers(catalog, record)
    name = chance.choice(sorted(readers))
    spec, values = readers[name].spec, read_all(readers[name])
    flat = values.reshape(-1)
    for _ in range(chance.choice([1, 1, 2, 5])):
        at = chance.randrange(flat.size)
        if flat.dtype.kind in "iu" and chance.random() < 0.7:
            kind = np.iinfo(flat.dtype)
            flat[at] = chance.choice(
                [0, 1, kind.max, kind.min, kind.max // 2, chance.randrange(kind.max), int(flat[at]) ^ 1]
            )
        else:
            flat[at] = flat[chance.randrange(flat.size)]
    shutil.rmtree(path / "zarr_store" / spec.path, ignore_errors=True)
    writer = ArrayWriter(catalog.arrays, spec.path, values.dtype, spec.row_shape, profile=catalog.codec())
    writer.append(values)
    written = writer.close(listed=True)
    described, checksums = json.loads(written.to_json()), writer.checksums(name)
    specs = {key: reader.spec for key, reader in readers.items()} | {name: written}
    describe_group(catalog.arrays, record.zarr_group, read_group(catalog.arrays, record.zarr_group).attributes, specs)

    def note(rows: list[dict[str, Any]]) -> str:
        for row in rows:
            if row["zarr_group"] == record.zarr_group:
                row["arrays"] = json.dumps(json.loads(row["arrays"]) | {name: described})
                row["checksums"] = json.dumps(json.loads(row["checksums"]) | checksums)
        return f"{name} of {record.name}"

    return _change_rows(catalog, "datasets", note)


def _change_frame(path: Path, chance: random.Random) -> str:
    from raggedatlas.catalog.assets import read_records

    catalog = _catalog(path)
    record, bundle = chance.choice([(r, r.file_facts.bundle) for r in read_records(catalog) if r.file_facts.bundle])
    name, span = chance.choice(sorted(bundle.frames.items()))
    file = path / "zarr_store" / span.file
    data = bytearray(file.read_bytes())
    for _ in range(chance.choice([1, 2, 8])):
        data[span.offset + chance.randrange(span.n_bytes)] = chance.randrange(256)
    file.write_bytes(data)

    def note(rows: list[dict[str, Any]]) -> str:
        for row in rows:
            if row["zarr_group"] == record.zarr_group:
                facts = json.loads(row["facts"])
                facts["frames"][name] = hashlib.sha256(data[span.offset : span.offset + span.n_bytes]).hexdigest()
                facts["bundle"]["sha256"] = hashlib.sha256(data).hexdigest()
                row["facts"] = json.dumps(facts)
        return name

    return _change_rows(catalog, "datasets", note)


def _change_table_metadata(path: Path, chance: random.Random) -> str:
    catalog = _catalog(path)
    table = chance.choice(["datasets", "atlas_versions"])
    known = catalog.tables.metadata(table) or {"raggedatlas.purging": '{"uid": "a", "stage": "begun"}'}
    key = chance.choice(sorted(known))
    text = _other_json(known[key], chance) if known[key][:1] in {"{", "["} else str(chance.choice(_ODD))
    catalog.tables.update_metadata(table, {key: text})
    return f"{table} {key} = {text[:80]!r}"


def _change_field_metadata(path: Path, chance: random.Random) -> str:
    catalog = _catalog(path)
    marked = {f.name: f.metadata for f in catalog.tables.schema("cells") if f.metadata}
    column = chance.choice(sorted(marked))
    key = chance.choice(sorted(marked[column]))
    old = marked[column][key].decode()
    text = _other_json(old, chance) if old[:1] in {"{", "["} else str(chance.choice(_ODD))
    catalog.tables.update_field_metadata("cells", lambda _: {column: {**marked[column], key: text.encode()}})
    _rename_versions(catalog, "cells")
    return f"{column} {key.decode()} = {text[:80]!r}"


_CHANGES: dict[str, Callable[[Path, random.Random], str]] = {
    "array": _change_array,
    "array again": _change_array,
    "frame": _change_frame,
    "table metadata": _change_table_metadata,
    "field metadata": _change_field_metadata,
    **{
        table: lambda path, chance, table=table: _change_cell(table, path, chance)  # type: ignore[misc]
        for table in (
            "datasets",
            "cells",
            "_feature_layouts",
            "gene_expression_registry",
            "atlas_versions",
            "_results",
            "_geometry",
            "_feature_identity",
            "_feature_links",
            "_feature_facts",
            "_genes",
            "_orthologs",
            "_terms",
        )
    },
}


def uses(path: Path) -> dict[str, Callable[[], object]]:
    """Give what readers do with an atlas of `make_atlas`: name -> a call, the result of which is hashed."""
    import anndata as ad

    from raggedatlas.atlas import RaggedAtlas
    from raggedatlas.loader.loader import Loader
    from raggedatlas.store.filters import under
    from support.atlases import GENES

    def atlas() -> RaggedAtlas:
        return RaggedAtlas.open(str(path))

    def query() -> Any:
        return atlas().checkout("all").query()

    def loaded() -> list[Any]:
        return [
            (batch.uids, batch.X.toarray() if hasattr(batch.X, "toarray") else batch.X)
            for batch in Loader(query(), batch_size=16, shuffle=None)
        ]

    def written() -> ad.AnnData:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            atlas().dataset("d2").write(Path(folder, "out.h5ad"))
            return ad.read_h5ad(Path(folder, "out.h5ad"))

    return {
        "list": lambda: (repr(atlas()).replace(str(path), ""), [r.version for r in _versions(path)]),
        "dataset d1": lambda: atlas().dataset("d1").to_anndata(),
        "dataset d2": lambda: atlas().dataset("d2").to_anndata(),
        "write": written,
        "left out": lambda: [dict(atlas().dataset(n).left_out) for n in ("d1", "d2")],
        "query": lambda: query().to_anndata(),
        "before": lambda: atlas().checkout("before").query().to_anndata(),
        "features": lambda: query().features([*GENES[11:13]]).to_anndata(),
        "where": lambda: query().where("cell_type = 'B'").to_pandas(),
        "under": lambda: query().where(cell_type_ontology_term_id=under("MY:1")).count(),
        "aggregate": lambda: query().features([*GENES[:3]]).aggregate(["cell_type"]),
        "embedding": lambda: query().spaces("latent").to_anndata(),
        "linked": lambda: query().features([GENES[28]]).to_anndata(),
        "geometry": lambda: asdict(query().geometry()),
        "loader": loaded,
    }


def changes(path: Path) -> dict[str, Callable[[], object]]:
    """Give what writers do with an atlas: they may refuse, and must not crash."""
    from raggedatlas.atlas import RaggedAtlas
    from support.atlases import small_anndata

    def atlas() -> RaggedAtlas:
        return RaggedAtlas.open(str(path))

    return {
        "copy": lambda: atlas().add_csc("d2"),
        "add": lambda: atlas().add(small_anndata(9, 5), name="new", organism="human", progress=False),
        "repair": lambda: atlas().repair(),
        "snapshot": lambda: atlas().snapshot("more"),
        "gc": lambda: atlas().gc(dry_run=False),
    }


def _versions(path: Path) -> Any:
    from raggedatlas.catalog.versions import list_versions

    return list_versions(_catalog(path))


def digest(value: Any) -> str:
    """Hash a result: values, names and types of everything in it."""
    import anndata as ad
    import pandas as pd

    content = hashlib.sha256()

    def take(item: Any) -> None:
        if isinstance(item, ad.AnnData):
            parts = {k: dict(getattr(item, k)) for k in ("layers", "obsm", "obsp", "varm", "varp")}
            kept = {k: v for k, v in item.uns.items() if k != "atlas"}
            take([item.X, item.obs, item.var, parts, kept])
        elif isinstance(item, pd.DataFrame):
            content.update(f"{dict(item.dtypes)}{item.columns.name}".encode())
            content.update(item.to_csv().encode())
        elif isinstance(item, dict):
            for key in sorted(item, key=str):
                content.update(f"{key}:".encode())
                take(item[key])
        elif isinstance(item, list | tuple):
            for inner in item:
                take(inner)
        elif hasattr(item, "toarray"):
            content.update(f"{type(item).__name__}{item.dtype}".encode())
            take(item.toarray())
        elif isinstance(item, np.ndarray):
            content.update(f"{item.dtype}{item.shape}".encode())
            content.update(repr(item.tolist()).encode() if item.dtype.hasobject else item.tobytes())
        else:
            content.update(repr(item).encode())

    take(value)
    return content.hexdigest()


@dataclass
class Tally:
    """Counts of a campaign.

    Parameters
    ----------
    n_bits, n_values : int
        Atlases with one flipped bit, and with one other value.
    outcomes : Counter
        How often a use gave what was written, refused, or did what it must not.
    failures : list of str
        Seed, mutation and use of everything that must not happen.
    """

    n_bits: int = 0
    n_values: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Say it in lines."""
        counts = ", ".join(f"{n:,} {what}" for what, n in sorted(self.outcomes.items()))
        return "\n".join([f"{self.n_bits:,} flipped bits, {self.n_values:,} other values: {counts}", *self.failures])


def run_campaign(numbers: Iterable[int], *, progress: Callable[[str], None] = lambda _: None) -> Tally:
    """Mutate an atlas many times, use each in a child process with limits, and count what happened.

    Parameters
    ----------
    numbers : iterable of int
        Mutations, each made of its number alone: odd ones flip a bit, even ones change a value.
    progress : function
        Gets a line for each failure, and the counts after every 50.
    """
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        make_atlas(Path(folder))
        waiting = iter(numbers)
        number = next(waiting, None)
        while number is not None:
            number = _run_child(Path(folder), number, waiting, tally, progress)
    return tally


def _run_child(
    folder: Path, number: int | None, waiting: Iterator[int], tally: Tally, progress: Callable[[str], None]
) -> int | None:
    """Hand mutations to one child until it dies or there are no more; return the next."""
    words = [sys.executable, __file__, str(folder)]
    with started(words, stdin=-1, stderr=-3) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        while number is not None:
            child.stdin.write(f"{number}\n")
            child.stdin.flush()
            ready, _, _ = select.select([child.stdout], [], [], _SECONDS)
            line = child.stdout.readline() if ready else ""
            told: dict[str, Any] = (
                json.loads(line) if line else {"what": "?", "failures": [[HUNG if not ready else CRASHED, "?", ""]]}
            )
            if number % 2:
                tally.n_bits += 1
            else:
                tally.n_values += 1
            tally.outcomes.update(told.get("good", {}))
            for outcome, use, text in told["failures"]:
                tally.outcomes[outcome] += 1
                tally.failures.append(f"{number} {told['what']}: {use} {outcome} {text}")
                progress(tally.failures[-1])
            if (tally.n_bits + tally.n_values) % 50 == 0:
                progress(str(tally).splitlines()[0])
            number = next(waiting, None)
            if not line:
                return number
    return None


def _work(folder: Path) -> None:
    """Run in the child: for every number that is read, mutate a copy, use it, and print what happened."""
    import pyarrow as pa

    from raggedatlas.errors import AtlasError

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    expected = {name: digest(use()) for name, use in uses(folder / "atlas").items()}
    for line in sys.stdin:
        place = Path(tempfile.mkdtemp(dir=folder))
        path, chance, what = place / "atlas", random.Random(int(line)), ""
        bits = bool(int(line) % 2)
        while not what:
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(folder / "atlas", path)
            # Lance and Arrow refuse to write some values at all, such as a null where none may be.
            with contextlib.suppress(AtlasError, pa.ArrowException, ValueError):
                what = (flip_bit if bits else change_value)(path, chance)
        sys.stderr.write(f"{line.strip()} {what}\n")
        sys.stdout.write(json.dumps({"what": what, **_judge(path, expected, int(line))}) + "\n")
        sys.stdout.flush()
        shutil.rmtree(place, ignore_errors=True)


def _judge(path: Path, expected: dict[str, str], number: int) -> dict[str, Any]:
    """Use a mutated atlas in every way, and compare with what the sound one gives; writers take part every few mutations."""
    from raggedatlas.catalog.validation import validate
    from raggedatlas.errors import AtlasError

    bits = bool(number % 2)
    good: Counter[str] = Counter()
    failures: list[tuple[str, str, str]] = []
    other: list[str] = []

    def attempt(name: str, use: Callable[[], object]) -> object:
        try:
            return use()
        except AtlasError:
            good["refused"] += 1
        except BaseException as error:  # noqa: BLE001 - a panic of Lance is one
            failures.append((FOREIGN, name, repr(error)[:300]))
        return None

    for name, use in uses(path).items():
        found = attempt(name, lambda use=use: digest(use()))  # type: ignore[misc]
        if found is not None and found == expected[name]:
            good["equal"] += 1
        elif found is not None:
            other.append(name)
    problems: Any = attempt("validate", lambda: validate(_catalog(path), "deep"))
    told = problems is None or any(problem.level == "must" for problem in problems)
    if bits and not told:
        failures.append((MISSED, "validate", ""))
    if bits and other and not told:
        failures += [(SILENT, name, "") for name in other]
    good["found" if told else "not found"] += bits
    good["other, as changed" if not bits else "other, found"] += len(other)
    for name, use in changes(path).items() if number % 5 == 0 else ():
        attempt(name, use)
    return {"good": good, "failures": failures}


if __name__ == "__main__":
    _work(Path(sys.argv[1]))

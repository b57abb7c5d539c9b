"""Tables of terms: the ontologies that cellxgene-ontology-guide ships, and tables that people have as CSV files or frames."""

import codecs
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from importlib.metadata import version
from itertools import islice
from typing import IO, Any

import pyarrow as pa

from raggedatlas.errors import MissingExtraError, MissingFileError, QueryError, SourceError, StoreError
from raggedatlas.model.accessions import GeneTableInfo
from raggedatlas.model.terms import PACKAGE, TERMS, TERMS_SCHEMA, Terms, id_prefix
from raggedatlas.store.copies import local_copy
from raggedatlas.store.location import AnyPath, as_path

_KEY = re.compile(r'[{,\s]*("(?:[^"\\]|\\.)*")\s*:\s*')
_FARTHER = re.compile(r'("ancestors":\{"[^"]+":1),[^}]*\}')
"""The ancestors of a term, of which the first is its parent."""
_CHUNK = 2**22
"""Bytes of an ontology's JSON that are decoded at once: that of NCBITaxon has 844 MB, as one document several GB in memory."""
_TREES = {"NCBITaxon"}
"""Ontologies whose terms all have one parent, at distance 1, which are read without all of them in memory."""
_ROWS = 2**16
"""Terms of one batch."""

_NAMES = {
    "id": ("id", "term", "term_id", "ontology_term_id"),
    "label": ("label", "name"),
    "synonyms": ("synonyms", "synonym"),
    "parents": ("parents", "parent", "is_a"),
    "part_of": ("part_of",),
    "replaced_by": ("replaced_by",),
    "deprecated": ("deprecated", "is_obsolete", "obsolete"),
}
"""Columns of a table of terms, and what they may be called; OBO's names among them."""

_SEPARATORS = re.compile(r"\s*[|;]\s*")
_YES = {"true", "1", "yes"}


def _schema() -> Any:  # noqa: ANN401  (a class of the optional library)
    """Return what the package says about the newest schema of CELLxGENE."""
    try:
        from cellxgene_ontology_guide.supported_versions import CXGSchema
    except ImportError as error:
        raise MissingExtraError(
            f"The terms of ontologies come from {PACKAGE}; install it with: pip install 'raggedatlas[ontology]', or load a table of terms "
            "with atlas.load_terms(...)."
        ) from error
    return CXGSchema()


def packaged_ontologies() -> dict[str, str]:
    """Return the packaged ontologies: every prefix of ids -> the ontology that has it."""
    schema = _schema()
    return {name: name for name in schema.supported_ontologies} | dict(schema.imported_ontologies)


@lru_cache(maxsize=16)
def read_packaged(name: str) -> Terms:
    """Read a packaged ontology, once in a process; `name` is a value of `packaged_ontologies`."""
    release = str(_schema().supported_ontologies[name]["version"])
    digest = hashlib.sha256()
    # The package itself would parse the file as one document. pyarrow unpacks it.
    file = resources.files("cellxgene_ontology_guide") / "data" / f"{name}-ontology-{release}.json.zst"
    with resources.as_file(file) as path, pa.input_stream(str(path), compression="zstd") as stream:
        batches = list(_batches(name, _entries(stream, digest, path.name, trees=name in _TREES)))
    rows = pa.Table.from_batches(batches, TERMS_SCHEMA).combine_chunks()
    source = f"{PACKAGE} {version(PACKAGE)}"
    return Terms((GeneTableInfo(name, TERMS, source, release, (), rows.num_rows, digest.hexdigest()),), rows)


def read_curated(name: str) -> list[str]:
    """Return the ids of a curated list of the package, such as ``tissue_general`` or ``cell_class``."""
    _schema()
    from cellxgene_ontology_guide.curated_ontology_term_lists import get_curated_ontology_term_list
    from cellxgene_ontology_guide.entities import CuratedOntologyTermList

    lists = {one.value: one for one in CuratedOntologyTermList}
    if name not in lists:
        raise QueryError(f"There is no curated list {name!r} of terms; there are {', '.join(lists)}.")
    return [*map(str, get_curated_ontology_term_list(lists[name]))]


def _entries(
    stream: IO[bytes],
    digest: Any,  # noqa: ANN401  (a hash)
    name: str,
    *,
    trees: bool = False,
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the members of one large JSON object, a part of the text in memory at a time; of `trees` only the nearest ancestor."""
    decode, parse = codecs.getincrementaldecoder("utf-8")().decode, json.JSONDecoder().raw_decode
    text, position = "", 0
    while chunk := stream.read(_CHUNK):
        digest.update(chunk)
        text, position = text[position:] + decode(chunk), 0
        # Nine tenths of NCBITaxon are ancestors of ancestors, which take as much of the time to parse.
        text = _FARTHER.sub(r"\1}", text) if trees else text
        while (key := _KEY.match(text, position)) is not None:
            try:
                entry, position = parse(text, key.end())
            except ValueError:  # the rest of this member comes with the next chunk
                break
            # The parser is needed for keys with escapes only.
            yield json.loads(key[1]) if "\\" in key[1] else key[1][1:-1], entry
    if text[position:].strip() != "}":
        raise SourceError(f"The ontology {name} of {PACKAGE} is damaged; install the package again.")


def _batches(name: str, entries: Iterator[tuple[str, Mapping[str, Any]]]) -> Iterator[pa.RecordBatch]:
    """Yield the terms of a packaged ontology as rows."""
    terms = _with_parents(name, entries)
    while block := list(islice(terms, _ROWS)):
        found = [entry for _, entry, _ in block]
        columns = (
            [name] * len(block), [uid for uid, _, _ in block], [entry["label"] or "" for entry in found],
            [entry.get("synonyms", ()) for entry in found], [parents for _, _, parents in block], [()] * len(block),
            [entry.get("replaced_by") for entry in found], [bool(entry.get("deprecated")) for entry in found],
        )  # fmt: skip
        yield pa.RecordBatch.from_arrays(
            [pa.array(column, of.type) for column, of in zip(columns, TERMS_SCHEMA, strict=True)], schema=TERMS_SCHEMA
        )


def _with_parents(
    name: str, entries: Iterator[tuple[str, Mapping[str, Any]]]
) -> Iterator[tuple[str, Mapping[str, Any], list[str]]]:
    """Yield each term with those directly above it, which the package gives among all above it, with their distances."""
    if name in _TREES:
        for uid, entry in entries:
            yield uid, entry, [one for one, distance in entry["ancestors"].items() if distance == 1]
        return
    every = dict(entries)
    above = {uid: frozenset(entry["ancestors"]) for uid, entry in every.items()}
    for uid, entry in every.items():
        distances, parents, covered = entry["ancestors"], [], set[str]()
        # Not those at distance 1 alone: terms of other ontologies are left out, and those above them would be lost.
        for one in sorted(distances, key=distances.__getitem__):
            if one not in covered:
                parents.append(one)
                covered |= above.get(one, frozenset())
        yield uid, entry, parents


def read_term_table(source: Any, ontology: str | None = None, release: str = "") -> Terms:  # noqa: ANN401  (a path or any table)
    """Read a table of terms from a CSV or TSV file, a frame or an Arrow table, or a packaged ontology by its name.

    The table has the columns ``id`` and ``label``, and any of ``synonyms``, ``parents``, ``part_of``, ``replaced_by``
    and ``deprecated``, or the names that OBO gives them (``name``, ``synonym``, ``is_a``, ``is_obsolete``). Several
    values of a text are separated by ``|`` or ``;``. `ontology` is the name of the ontology; None takes the prefix of
    the ids. `release` is its release.

    Raises `SourceError` if columns are missing, ids are repeated, a parent is no term of the table, or terms form a
    cycle.
    """
    if isinstance(source, str) and source in (known := packaged_ontologies() if "." not in source else {}):
        return read_packaged(known[source])
    table, shown = _read_table(source)
    columns = {name: next((n for n in names if n in table.column_names), None) for name, names in _NAMES.items()}
    if columns["id"] is None or columns["label"] is None:
        raise SourceError(
            f"A table of terms has the columns 'id' and 'label' (or 'name'), and {shown} has {table.column_names}; rename them."
        )
    ids = [str(uid or "").strip() for uid in table.column(columns["id"]).to_pylist()]
    prefixes = sorted({id_prefix(uid) for uid in ids})
    if not ontology and (len(prefixes) != 1 or not prefixes[0]):
        raise SourceError(
            f"The ids of {shown} do not name one ontology (they begin with {prefixes[:5]}); say ontology='NAME', e.g. of {ids[:1]}."
        )
    name = ontology or prefixes[0]
    rows = {"table": [name] * len(ids), "id": ids}
    rows |= {one: _values(table, columns[one], one) for one in _NAMES if one != "id"}
    _check_terms(rows, shown)
    stored = pa.Table.from_pydict(rows, TERMS_SCHEMA)
    digest = hashlib.sha256(json.dumps(rows, ensure_ascii=False).encode()).hexdigest()
    return Terms((GeneTableInfo(name, TERMS, shown, release, (), len(ids), digest),), stored)


def _read_table(source: Any) -> tuple[pa.Table, str]:  # noqa: ANN401
    """Read a source into a table of columns as they are, and say what it is."""
    if not isinstance(source, str | os.PathLike):
        try:
            if hasattr(source, "__arrow_c_stream__"):
                return pa.table(source), type(source).__name__
            return pa.table({str(k): pa.array(v, from_pandas=True) for k, v in dict(source).items()}), type(
                source
            ).__name__
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise SourceError(f"The {type(source).__name__} is no table of terms: {error}.") from error
    path = as_path(source)
    return read_text_table(path), path.name


def read_text_table(path: AnyPath) -> pa.Table:
    """Read a CSV or TSV file (``.tsv``, ``.tab``, ``.txt``) whose values are all text, empty ones missing."""
    from pyarrow import csv

    delimiter = "\t" if path.suffix.lower() in {".tsv", ".tab", ".txt"} else ","
    try:
        with local_copy(path) as local:
            with local.open("rb") as file:
                head = next(iter(file.readline().decode("utf-8-sig").splitlines()), "")
            names = [name.strip('"') for name in head.split(delimiter)]
            found: pa.Table = csv.read_csv(
                local,
                parse_options=csv.ParseOptions(delimiter=delimiter),
                convert_options=csv.ConvertOptions(
                    column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True, null_values=[""]
                ),
            )
    except StoreError:
        raise
    except FileNotFoundError as error:
        raise MissingFileError(f"There is no file {path}.") from error
    except (pa.ArrowException, ValueError, OSError) as error:
        raise SourceError(f"{path} cannot be read as a table of text: {error}.") from error
    return found


def _values(table: pa.Table, column: str | None, name: str) -> list[Any]:
    """Return the values of a column in the type that terms have; missing ones are empty."""
    if column is None:
        given: list[Any] = [None] * table.num_rows
    else:
        given = table.column(column).to_pylist()
    if name == "deprecated":
        return [str(value).strip().casefold() in _YES for value in given]
    if name == "label":
        return ["" if value is None else str(value) for value in given]
    if name == "replaced_by":
        return [None if value in (None, "") else str(value).strip() for value in given]
    lists = [_SEPARATORS.split(value) if isinstance(value, str) else value for value in given]
    # "CL:0000542 ! lymphocyte", as OBO writes it: what follows the sign is a comment.
    drop = " ! " if name in {"parents", "part_of"} else "\0"
    return [[text for one in value or () if (text := str(one).partition(drop)[0].strip())] for value in lists]


def _check_terms(rows: Mapping[str, list[Any]], shown: str) -> None:
    """Refuse tables that contradict themselves."""
    if not rows["id"]:
        raise SourceError(f"{shown} has no terms.")
    place: dict[str, int] = {}
    for number, uid in enumerate(rows["id"], 1):
        if not uid:
            raise SourceError(f"Row {number:,} of {shown} has no id.")
        if uid in place:
            raise SourceError(
                f"Rows {place[uid]:,} and {number:,} of {shown} have the same id {uid!r}; a term has one row."
            )
        place[uid] = number
    above = {
        uid: [*is_a, *parts] for uid, is_a, parts in zip(rows["id"], rows["parents"], rows["part_of"], strict=True)
    }
    for uid, parents in above.items():
        absent = [parent for parent in parents if parent not in above]
        if absent:
            raise SourceError(
                f"Row {place[uid]:,} of {shown} puts {uid!r} under {absent[0]!r}, which is no term of the table; add it, or correct the id."
            )
    cycle = _find_cycle(above)
    if cycle:
        raise SourceError(f"Terms of {shown} form a cycle: {' under '.join(cycle)}; take one of these parents out.")


def _find_cycle(above: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the terms of a cycle, the first one again at the end; empty if there is none."""
    done: set[str] = set()
    for start in above:
        # A path downward from `start`, with what is left to look at of each of its terms. Not recursive: tables may be deep.
        path, left = [start], [iter(above[start])]
        on_path = {start}
        while path and start not in done:
            following = next(left[-1], None)
            if following is None:
                done.add(path[-1])
                on_path.discard(path.pop())
                left.pop()
            elif following in on_path:
                return [*path[path.index(following) :], following]
            elif following not in done:
                path.append(following)
                on_path.add(following)
                left.append(iter(above[following]))
    return []

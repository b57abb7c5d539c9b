"""Identity of the columns of a matrix: ids, symbols, versions and organism of each, and the registry rows that follow."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from raggedatlas.errors import FeatureError, NotFoundError
from raggedatlas.model.accessions import UNKNOWN, Accession, is_organism, organism_name, parse_accession, parse_symbols
from raggedatlas.model.frames import INDEX
from raggedatlas.model.ids import feature_uids, repeated_uids

ID_COLUMNS = (
    "gene_ids", "gene_id", "ensembl_id", "ensembl_ids", "ensembl", "ensembl_gene_id", "feature_id", "feature_ids", "ENSEMBL", "ids",
)  # fmt: skip
"""Where files usually keep Ensembl ids, in the order of trust."""

SYMBOL_COLUMNS = (
    "gene_symbols", "gene_symbol", "symbol", "symbols", "gene_name", "gene_names", "feature_name", "gene_short_name", "hgnc_symbol",
    "Symbol", "SYMBOL", "name",
)  # fmt: skip
"""Where files usually keep symbols, in the order of trust."""

ORGANISM_COLUMNS = ("feature_reference", "organism", "species", "organism_ontology_term_id", "genome")
"""Where files name the organism of each feature, in the order of trust."""


NO_GENES = (
    "Antibody Capture", "Antigen Capture", "CRISPR Guide Capture", "Custom", "Multiplexing Capture", "Peaks",
)  # fmt: skip
"""10x feature types of what is no gene; a file may have them in one matrix with genes."""


@dataclass(frozen=True)
class Features:
    """The columns of one group as the registry will know them.

    Parameters
    ----------
    uids : tuple of str
        In column order, all different.
    rows : pyarrow.Table
        `uid`, `feature_id`, `symbol`, `aliases`, `organism`, and columns of the file that the registry has too.
    notes : tuple of str
        What was decided, for the report.
    frame : pyarrow.Table
        The features as the source has them, index first.
    """

    uids: tuple[str, ...]
    rows: pa.Table
    notes: tuple[str, ...]
    frame: pa.Table


def identify(var: pa.Table, space: str, feature_id: str, organism: str, extra: Sequence[str] = ()) -> Features:
    """Return the identity of every column of a matrix, each decided by its own identifier.

    Parameters
    ----------
    var : pyarrow.Table
        The source's features, index first.
    space : str
        Feature space; the namespace of the uids.
    feature_id : str
        ``"auto"``, ``"index"``, or a column of `var`.
    organism : str
        Organism of the features whose identifier and row in `var` do not name one; ``"auto"`` leaves it ``"unknown"``.
    extra : sequence of str
        Further registry columns to fill from columns of `var` of the same name.

    Raises
    ------
    NotFoundError
        If `feature_id` names no column.
    FeatureError
        If a feature has no id.

    Examples
    --------
    >>> features = identify(
    ...     pa.table({"_index": ["CD79A", "GFP"], "gene_ids": ["ENSG00000105369.12", "GFP"]}),
    ...     "gene_expression",
    ...     "auto",
    ...     "auto",
    ... )
    >>> features.rows.select(["feature_id", "symbol", "organism"]).to_pylist()[0]
    {'feature_id': 'ENSG00000105369', 'symbol': 'CD79A', 'organism': 'human'}
    >>> features.rows["organism"].to_pylist()
    ['human', 'unknown']
    """
    source, given, parsed = _identifiers(var, feature_id)
    empty = [i for i, text in enumerate(given) if not text]
    if empty:
        raise FeatureError(
            f"{len(empty)} of {len(given)} features of {space!r} have no id in {_said(source)} (the first is column {empty[0]}, counted from 0); "
            "name another column with feature_id=..."
        )
    ids = [one.name for one in parsed]
    organisms = _organisms(var, parsed, UNKNOWN if organism == "auto" else organism_name(organism))
    symbol_source = _symbol_column(var, source)
    symbols, spellings = _symbols(_texts(var, symbol_source) if symbol_source else [""] * len(ids), parsed, ids)
    kinds = _kinds(var, parsed, space)
    # An accession identifies one species by itself, so only names need their organism here.
    accessions = [
        replace(one, namespace=kind.lower() if kind else one.namespace, organism=organism)
        if kind or one.namespace == "symbol"
        else one
        for one, organism, kind in zip(parsed, organisms, kinds, strict=True)
    ]
    named = feature_uids(space, accessions)
    # A layout has each uid once, so all but the first column of a feature get uids of their own.
    uids = tuple(repeated_uids(named))
    others = [
        sorted({text for text in texts if text and text not in names})
        # Evaluated before the expression above, which uses both names.
        if (texts := (text, spelling)) != (names := (identifier, symbol))
        else []
        for text, spelling, identifier, symbol in zip(given, spellings, ids, symbols, strict=True)
    ]
    columns: dict[str, Any] = {
        "uid": pa.array(uids, pa.string()),
        "feature_id": pa.array(ids, pa.string()),
        "symbol": pa.array(symbols, pa.string()),
        "aliases": pa.array(others, pa.list_(pa.string())),
        "organism": pa.array(organisms, pa.string()),
    }
    if any(kinds):
        columns["other_type"] = pa.array([kind or None for kind in kinds], pa.string())
    columns |= {name: var.column(name) for name in extra if name in var.column_names and name not in columns}
    versions = sum(bool(one.version) for one in parsed)
    n_ensembl = sum(one.namespace == "ensembl" for one in parsed)
    part = f" of {n_ensembl:,} Ensembl ids" if versions < n_ensembl else ""
    notes = [
        f"{space}: ids from {_said(source)}, symbols from {_said(symbol_source) if symbol_source else 'the ids'}, {_counted(organisms)}",
        *_mixed(parsed),
        *_typed(kinds),
        *_unknown_species(parsed),
        *([f"{versions:,} version suffixes{part} split off and kept as aliases"] if versions else []),
        *_repeated(named, ids, given, _said(source)),
    ]
    return Features(
        uids, pa.table(columns), tuple(n if n.startswith(f"{space}: ") else f"{space}: {n}" for n in notes), var
    )


def _identifiers(var: pa.Table, feature_id: str) -> tuple[str, list[str], list[Accession]]:
    """Choose the identifier of each feature: the column that serves most, and its text or parsed accession for each.

    A feature whose text in that column is no accession takes the one in the index, or in the first of the usual columns,
    if that is an accession: files often hold ids for some features and names for the others.
    """
    if feature_id not in {"auto", "index"} and feature_id not in var.column_names:
        raise NotFoundError(
            f"The source's var has no column {feature_id!r} for feature_id; it has {var.column_names[1:]}, or use 'index'."
        )
    if feature_id != "auto":
        source = INDEX if feature_id == "index" else feature_id
        texts = _texts(var, source)
        return source, texts, [parse_accession(text) for text in texts]
    index = _texts(var, INDEX)
    parsed = [parse_accession(text) for text in index]
    if index and all(one.namespace != "symbol" for one in parsed):
        return INDEX, index, parsed
    column = _accession_column(var)
    if column is None:
        return INDEX, index, parsed
    other = _texts(var, column)
    parsed_other = [parse_accession(text) for text in other]
    first = sum(one.namespace != "symbol" for one in parsed) * 2 > len(parsed)
    main, spare = ((index, parsed), (other, parsed_other)) if first else ((other, parsed_other), (index, parsed))
    given, chosen = [], []
    for text, one, spare_text, spare_one in zip(*main, *spare, strict=True):
        take_spare = not text or (one.namespace == "symbol" and spare_one.namespace != "symbol")
        given.append(spare_text if take_spare else text)
        chosen.append(spare_one if take_spare else one)
    return INDEX if first else column, given, chosen


def _accession_column(var: pa.Table) -> str | None:
    """Return the column of `var` that holds accessions: a usual one that has any, else one in which most texts are."""
    texts: list[str] = [f.name for f in var.schema if pa.types.is_string(f.type) and f.name != INDEX]
    for name in ID_COLUMNS:
        if name in texts and any(parse_accession(text).namespace != "symbol" for text in _texts(var, name)):
            return name
    for name in texts:
        # Ids of another species' genes are not the identity of these.
        if name in ID_COLUMNS or "olog" in name.lower():
            continue
        sample = _texts(var, name)[:: max(1, var.num_rows // 200)]
        if 2 * sum(parse_accession(text).namespace == "ensembl" for text in sample) > len(sample):
            return name
    return None


def _organisms(var: pa.Table, parsed: Sequence[Accession], otherwise: str) -> list[str]:
    """Return each feature's organism: by its identifier, else by its row of `var`, else `otherwise`."""
    said: list[str] = [""] * len(parsed)
    # In reverse, so that the most trusted column comes last and overwrites the others.
    for name in reversed(ORGANISM_COLUMNS):
        if name in var.column_names and pa.types.is_string(var.schema.field(name).type):
            known = {text: organism_name(text) for text in set(_texts(var, name)) if is_organism(text)}
            said = [known.get(text, was) for text, was in zip(_texts(var, name), said, strict=True)]
    return [
        one.organism if one.organism != UNKNOWN else row or otherwise for one, row in zip(parsed, said, strict=True)
    ]


def _symbols(
    texts: Sequence[str], parsed: Sequence[Accession], ids: Sequence[str]
) -> tuple[list[str | None], list[str]]:
    """Return each feature's symbol, None where the file only repeats an accession, and the spelling that the file has."""
    names = parse_symbols(texts)
    symbols = [
        name or (identifier if one.namespace == "symbol" else None)
        for name, one, identifier in zip(names, parsed, ids, strict=True)
    ]
    return symbols, list(texts)


def _symbol_column(var: pa.Table, source: str) -> str | None:
    texts = [f.name for f in var.schema if pa.types.is_string(f.type)]
    named = next((name for name in SYMBOL_COLUMNS if name in texts and name != source), None)
    if named is not None:
        return named
    return INDEX if source != INDEX else None


def _counted(organisms: Sequence[str]) -> str:
    """Format how many features each organism has, the most first."""
    counts = Counter(organisms)
    if len(counts) == 1:
        return f"organism {organisms[0]}"
    return "organisms " + ", ".join(
        f"{name} ({n:,})" for name, n in sorted(counts.items(), key=lambda c: (-c[1], c[0]))
    )


def _mixed(parsed: Sequence[Accession]) -> list[str]:
    """Format how many identifiers are of which kind, where there is more than one kind."""
    counts = Counter("name" if one.namespace == "symbol" else one.namespace for one in parsed)
    if len(counts) < 2:
        return []
    return ["identifiers of several kinds: " + ", ".join(f"{n:,} {kind}" for kind, n in sorted(counts.items()))]


def _kinds(var: pa.Table, parsed: Sequence[Accession], space: str) -> list[str]:
    """Return what each feature is that is listed with the genes but is not a gene; empty for all others."""
    name = next((name for name in ("feature_types", "feature_type") if name in var.column_names), None)
    if name is None or space != "gene_expression":
        return [""] * len(parsed)
    return [
        text if text in NO_GENES and one.namespace == "symbol" else ""
        for text, one in zip(_texts(var, name), parsed, strict=True)
    ]


def _typed(kinds: Sequence[str]) -> list[str]:
    """Format how many features are no genes."""
    counts = Counter(kind for kind in kinds if kind)
    if not counts:
        return []
    shown = ", ".join(f"{n:,} {kind}" for kind, n in sorted(counts.items()))
    return [f"features that are not genes: {shown}; their names join no gene"]


def _unknown_species(parsed: Sequence[Accession]) -> list[str]:
    """Format the Ensembl ids whose species is in no table."""
    unknown = [one.name for one in parsed if one.namespace == "ensembl" and one.organism == UNKNOWN]
    shown = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
    return [f"{len(unknown):,} Ensembl ids of species that are not known: {shown}"] if unknown else []


def _said(column: str) -> str:
    return "the index" if column == INDEX else f"var[{column!r}]"


def _texts(var: pa.Table, name: str) -> list[str]:
    return [text or "" for text in var.column(name).cast(pa.string()).to_pylist()]


def _repeated(uids: Sequence[str], ids: Sequence[str], given: Sequence[str], said: str) -> list[str]:
    """Format which features stand in several columns."""
    if len(set(uids)) == len(uids):
        return []
    columns: dict[str, list[int]] = {}
    for i, uid in enumerate(uids):
        columns.setdefault(uid, []).append(i)
    several = [at for at in columns.values() if len(at) > 1]
    shown = [
        f"{ids[at[0]]} ({', '.join(given[i] for i in at[:5])}{', ...' if len(at) > 5 else ''})" for at in several[:5]
    ]
    return [
        f"{len(several):,} feature{'s' if len(several) > 1 else ''} in {sum(map(len, several)):,} columns by {said}; columns of one "
        f"feature are joined by queries as on_merge says: {', '.join(shown)}{', ...' if len(several) > 5 else ''}"
    ]

"""The tables of a source: which obs columns become cell columns, and which features the rows of var are."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.cells import CellColumn, column_conflict, fit_values, stored_type, takes_over
from raggedatlas.catalog.features import read_registry
from raggedatlas.catalog.layouts import BY_HAND, register_features
from raggedatlas.catalog.optimization import refresh_identity
from raggedatlas.errors import FeatureError, NotFoundError, SchemaError
from raggedatlas.model.accessions import UNKNOWN, Accession, is_organism, organism_name, parse_accession, parse_symbols
from raggedatlas.model.assets import annotation_columns, result_columns
from raggedatlas.model.frames import INDEX, ColumnFacts, facts_of, nan_to_null
from raggedatlas.model.ids import RESERVED, column_name, feature_uids, free_name, repeated_uids
from raggedatlas.model.options import IngestOptions, OnClash
from raggedatlas.model.protocols import Source
from raggedatlas.model.reports import ColumnReport, Fate
from raggedatlas.model.schemas import FeatureBaseSchema
from raggedatlas.model.spaces import pointer_columns
from raggedatlas.store.storage_errors import check_schema

FILLED = ("uid", "dataset_uid", "cell_name", "dataset", "layout_uid")
"""Names that the atlas or a query's result fills; a file's column of that name, or of one in `RESERVED`, gets the prefix ``obs_``."""


_CASTS: dict[str, tuple[pa.DataType, str]] = {
    "str": (pa.string(), "string"),
    "int": (pa.int64(), "int64"),
    "float": (pa.float64(), "float64"),
    "bool": (pa.bool_(), "bool"),
}


def plan_columns(
    cells: pa.Table, table: pa.Schema, options: IngestOptions, spaces: Sequence[str]
) -> tuple[tuple[CellColumn, ...], tuple[ColumnReport, ...]]:
    """Decide what becomes of every obs column: return the plans, and a report line for every column of the file.

    A type that clashes with the stored column, a needed column that is missing, and more columns than are taken unasked
    are refused, the columns in one error together.
    """
    offered = [f for f in cells.schema if f.name != INDEX]
    absent = sorted(set(options.cast) - {f.name for f in offered})
    if absent:
        raise NotFoundError(
            f"cast={{...}} names {absent}, which are no obs columns of the source; it has {[f.name for f in offered]}."
        )
    names = [field.name for field in offered]
    if isinstance(options.obs, str):
        if len(names) > options.max_columns:
            raise SchemaError(
                f"The source has {len(names)} obs columns, more than max_columns={options.max_columns}; choose some with obs=[...], none "
                "with obs=[], or raise the limit. Those not chosen stay in the dataset's own frame."
            )
        chosen = dict(zip(names, names, strict=True))
    else:
        chosen = dict(options.obs) if isinstance(options.obs, Mapping) else {name: name for name in options.obs}
        absent = sorted(set(chosen) - set(names))
        if absent:
            raise NotFoundError(f"The source has no obs columns {absent}; it has {names}.")
        if isinstance(options.obs, Mapping):
            # A mapping renames some; all are taken.
            chosen = {name: chosen.get(name, name) for name in names}
    results = result_columns(table)
    # Columns that files brought are not among them: datasets share the column of a name if the types agree.
    taken = {*FILLED, *RESERVED, *spaces, *pointer_columns(table), *results, *(name for _, name in results.values())}
    taken |= {*annotation_columns(table)}
    plans, reports = [], []
    problems: list[str] = []
    for field in offered:
        if field.name not in chosen:
            reports.append(
                ColumnReport(field.name, "left out", "", "not among obs=...; it stays in the dataset's own frame")
            )
            continue
        stored = column_name(chosen[field.name])
        if stored in taken and chosen[field.name] != field.name:
            raise SchemaError(
                f"The cell column {stored!r} is taken by the atlas or by another column of the file; choose another name."
            )
        stored = free_name(f"obs_{stored}" if stored in taken else stored, taken)
        taken.add(stored)
        values, there = cells.column(field.name), table.field(stored) if stored in table.names else None
        column, note = cell_column(field, stored, chosen[field.name], options.cast.get(field.name))
        # Without a value, a column takes the type of the cell column.
        if nan_to_null(values).null_count == len(values):
            facts = replace(column.facts, empty=True)
            column = replace(column, type=column.type if there is None else there.type, facts=facts)
        reason = None if there is None else column_conflict(there, column)
        if reason is not None and options.on_clash != "error":
            column, note, reason = _settled(column, table, taken, reason, options.on_clash)
            stored = column.stored
            taken.add(stored)
            there = table.field(stored) if stored in table.names else None
        if reason is not None and there is not None:
            declared = facts_of(there) is None and not pa.types.is_string(there.type)
            text = "'text' or " if _becomes_text(column.type) and _becomes_text(there.type) and not declared else ""
            problems.append(
                f"{field.name!r} cannot go into the cell column {stored!r}: {reason}. Rename it with obs={{{field.name!r}: "
                f"{free_name(stored, {*taken, *table.names})!r}}}, {cast_advice(field.name, values, there.type)}or choose for all "
                f"such columns with on_clash={text}'rename'"
            )
            continue
        # Here the types differ and fit, such as integers into a double column; `column_values` refuses a value that
        # would change.
        if there is not None and there.type != column.type and not takes_over(there.type, facts_of(there), column):
            note = note or f"stored as {there.type} like the column that is there"
            column = replace(column, type=there.type)
        plans.append(column)
        fate: Fate = "cast" if note else ("renamed" if stored != field.name else "kept")
        reports.append(ColumnReport(field.name, fate, stored, note))
    given = {"uid", "dataset_uid", *(column.stored for column in plans)}
    problems += [
        f"the schema needs {name!r}, which the source lacks; name the column that holds it with obs={{'its_name': {name!r}}}"
        for name in (field.name for field in table if not field.nullable)
        if name not in given
    ]
    if problems:
        raise SchemaError(f"{len(problems)} column(s) cannot be added: {'; '.join(problems)}.")
    fresh = [pa.field(column.stored, column.type) for column in plans if column.stored not in table.names]
    if fresh:
        check_schema(pa.schema(fresh), "The cell table")
    return tuple(plans), tuple(reports)


def _settled(
    column: CellColumn, table: pa.Schema, taken: set[str], reason: str, policy: OnClash
) -> tuple[CellColumn, str, str | None]:
    """Return a clashing column as the policy has it, a note for the report, and why it is refused all the same."""
    there = table.field(column.stored)
    if policy == "rename":
        families = {"text": pa.types.is_string, "int": pa.types.is_integer, "float": pa.types.is_floating}
        families |= {"bool": pa.types.is_boolean, "time": pa.types.is_temporal}
        family = next((word for word, fits in families.items() if fits(column.type)), "other")
        base = stored = f"{column.stored}_{family}"
        n = 2
        # A column made for an earlier clash is used again if this one fits it.
        while stored in taken or (
            stored in table.names and column_conflict(table.field(stored), replace(column, stored=stored)) is not None
        ):
            stored, n = f"{base}_{n}", n + 1
        return replace(column, stored=stored), f"{reason}; kept apart as on_clash='rename' asks", None
    if not _becomes_text(column.type) or not _becomes_text(there.type):
        return column, "", f"{reason}, of which one does not become text"
    # A column without facts was declared by the schema class of the atlas, not brought by a file.
    if not pa.types.is_string(there.type) and facts_of(there) is None:
        return column, "", f"{reason}, as the schema of the atlas declares it"
    facts = column.facts if pa.types.is_string(column.type) else ColumnFacts(column.facts.name, "string")
    done = (
        "stored as text" if pa.types.is_string(there.type) else f"the cell column, of type {there.type}, becomes text"
    )
    return replace(column, type=pa.string(), facts=facts), f"{reason}; {done} as on_clash='text' asks", None


def _becomes_text(arrow: pa.DataType) -> bool:
    is_text_or_number = pa.types.is_string(arrow) or pa.types.is_integer(arrow) or pa.types.is_floating(arrow)
    return bool(is_text_or_number or pa.types.is_boolean(arrow) or pa.types.is_temporal(arrow))


def column_values(column: CellColumn, cells: pa.Table, target: pa.DataType) -> pa.ChunkedArray:
    """Return a planned column of the source's cells in the type of the cell column; raises `SchemaError` if a value would change."""
    return fit_values(column.source, cells.column(column.source), target)


def cell_column(field: pa.Field, stored: str, name: str, cast: str | None) -> tuple[CellColumn, str]:
    """Return the cell column that a column of a file becomes, and a note for the report.

    `stored` is its name in the cell table, `name` the one under which results show it. `cast` is the type it is cast
    to, a key of `_CASTS`, or None.
    """
    facts = replace(facts_of(field) or ColumnFacts(name, ""), name=name)
    if cast is None:
        return CellColumn(stored, stored_type(field.type), facts, field.name), ""
    if cast not in _CASTS:
        raise SchemaError(f"cast={{{field.name!r}: {cast!r}}} is not understood; use one of {sorted(_CASTS)}.")
    arrow, kind = _CASTS[cast]
    return CellColumn(stored, arrow, ColumnFacts(name, kind), field.name), f"cast to {cast} as asked"


def cast_advice(name: str, values: pa.ChunkedArray, stored: pa.DataType) -> str:
    """Format the cast with which a column fits a cell column, with a comma behind; empty where none does."""
    word = next((word for word, (arrow, _) in _CASTS.items() if arrow == stored), None)
    try:
        fit_values(name, values, stored)
    except SchemaError:
        return ""
    return f"cast it with cast={{{name!r}: {word!r}}}, " if word is not None else ""


def merge_colors(source: Source, cells: pa.Table, elements: Sequence[str]) -> dict[str, dict[str, str]]:
    """Read the colours of categories: column -> category -> colour.

    Colours that are not one text for each category are left out; they stay among the elements.
    """
    found = {}
    for key in elements:
        head, _, name = key.rpartition("uns/")
        if not key.startswith((f"{head}uns/", "uns/")) or "/" in name or not name.endswith("_colors"):
            continue
        own = name.removesuffix("_colors")
        column = f"{head.split('/')[1]}:{own}" if head else own
        facts = facts_of(cells.schema.field(column)) if column in cells.column_names else None
        categories = [] if facts is None else [str(name) for name in facts.categories or ()]
        colors = np.atleast_1d(np.asarray(source.element(key), dtype=object)).tolist()
        if len(categories) == len(colors) and all(isinstance(color, str) for color in colors) and categories:
            found[column] = dict(zip(categories, map(str, colors), strict=True))
    return found


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
    """The columns of one group as the registry will know them."""

    uids: tuple[str, ...]  # in column order, all different
    # `uid`, `feature_id`, `symbol`, `aliases`, `organism`, and columns of the file that the registry has too.
    rows: pa.Table
    notes: tuple[str, ...]  # what was decided, for the report
    frame: pa.Table  # the features as the source has them, index first


def identify(var: pa.Table, space: str, feature_id: str, organism: str, extra: Sequence[str] = ()) -> Features:
    """Return the identity of every column of a matrix, each decided by its own identifier.

    `var` has the source's features, index first; `space` is the namespace of the uids. `feature_id` is ``"auto"``,
    ``"index"``, or a column of `var`. `organism` is that of the features whose identifier and row in `var` do not name
    one; ``"auto"`` leaves it ``"unknown"``. `extra` names further registry columns to fill from columns of `var` of the
    same name.

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
    listed = {field.name for field in var.schema if pa.types.is_string(field.type)} - {source}
    symbol_source = next((name for name in SYMBOL_COLUMNS if name in listed), None if source == INDEX else INDEX)
    spellings = _texts(var, symbol_source) if symbol_source else [""] * len(ids)
    # None where the file only repeats an accession.
    symbols = [
        name or (identifier if one.namespace == "symbol" else None)
        for name, one, identifier in zip(parse_symbols(spellings), parsed, ids, strict=True)
    ]
    # What a feature is that is listed with the genes but is no gene; empty for all others.
    kinds = [""] * len(ids)
    typed = next((name for name in ("feature_types", "feature_type") if name in var.column_names), None)
    if typed is not None and space == "gene_expression":
        kinds = [
            text if text in NO_GENES and one.namespace == "symbol" else ""
            for text, one in zip(_texts(var, typed), parsed, strict=True)
        ]
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
    namespaces = Counter("name" if one.namespace == "symbol" else one.namespace for one in parsed)
    others_of = Counter(kind for kind in kinds if kind)
    n_ensembl = namespaces["ensembl"]
    part = f" of {n_ensembl:,} Ensembl ids" if versions < n_ensembl else ""
    named_organisms = sorted(Counter(organisms).items(), key=lambda count: (-count[1], count[0]))
    said = "organisms " + ", ".join(f"{name} ({n:,})" for name, n in named_organisms)
    if len(named_organisms) == 1:
        said = f"organism {organisms[0]}"
    unknown = [one.name for one in parsed if one.namespace == "ensembl" and one.organism == UNKNOWN]
    shown = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
    notes = [
        f"{space}: ids from {_said(source)}, symbols from {_said(symbol_source) if symbol_source else 'the ids'}, {said}",
        *([f"identifiers of several kinds: {_listed(namespaces)}"] if len(namespaces) > 1 else []),
        *([f"features that are not genes: {_listed(others_of)}; their names join no gene"] if others_of else []),
        *([f"{len(unknown):,} Ensembl ids of species that are not known: {shown}"] if unknown else []),
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


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n:,} {kind}" for kind, n in sorted(counts.items()))


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


def register(catalog: Catalog, features: Any, space: str) -> int:  # noqa: ANN401  (several forms)
    """Add or correct features and return how many were new.

    `features` is a pandas frame or an Arrow table with a column ``uid`` (or a frame with uids as its index), or a
    sequence of `FeatureBaseSchema`. Rows that give a registered feature another id, or any feature another
    `global_index`, are refused.
    """
    catalog = catalog.session("register_features()")
    catalog.add_space(catalog.space(space))
    if isinstance(features, pa.Table):
        rows = features
    elif isinstance(features, list | tuple) and all(isinstance(f, FeatureBaseSchema) for f in features):
        if not features:
            raise SchemaError("register_features() got no features; pass at least one.")
        schema = pa.schema([f for f in type(features[0]).arrow_schema() if f.name != "global_index"])
        rows = pa.Table.from_pylist([f.model_dump(exclude={"global_index"}) for f in features], schema=schema)
    elif hasattr(features, "columns") and hasattr(features, "index"):
        frame = features if "uid" in features.columns else features.rename_axis("uid").reset_index()
        rows = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
    else:
        raise SchemaError(
            f"register_features() takes a pandas frame, an Arrow table, or a list of FeatureBaseSchema objects; got {type(features).__name__}."
        )
    if "symbol" in rows.column_names:
        # `register_features` ranks a symbol by this source: no symbol of a file replaces one given by hand.
        by_hand = pc.if_else(rows.column("symbol").is_valid(), BY_HAND, pa.scalar(None, pa.string()))
        kept = rows.drop_columns([name for name in ("symbol_source",) if name in rows.column_names])
        rows = kept.append_column("symbol_source", by_hand)
    if {"uid", "feature_id"} <= {*rows.column_names}:
        kinds = [rows.schema.field(name).type for name in ("uid", "feature_id")]
        if any(not (pa.types.is_string(t) or pa.types.is_large_string(t) or pa.types.is_null(t)) for t in kinds):
            raise SchemaError(
                f"Uids and ids of features are texts, as atlas.features() shows them; got uid {kinds[0]} and feature_id {kinds[1]}."
            )
        known = read_registry(catalog, space).table
        at = pc.index_in(rows.column("uid").cast(pa.string()), value_set=known.column("uid").combine_chunks())
        own, given = known.column("feature_id").take(at), rows.column("feature_id")
        # The id is what its file said, and others may be joined with it by that. For a uid that is not registered `at` is null, and so is the
        # comparison: new features pass.
        differs = np.flatnonzero(pc.fill_null(pc.not_equal(own, given), fill_value=False).to_numpy())
        if len(differs):
            first = int(differs[0])
            raise SchemaError(
                f"{len(differs):,} registered features of {space!r} are given another feature_id, for instance {given[first].as_py()!r} in place of "
                f"{own[first].as_py()!r}; a feature keeps its id. Give the name as symbol or aliases, or use atlas.identity.link(feature, target)."
            )
    n_new = register_features(catalog, space, rows)
    refresh_identity(catalog)
    return n_new

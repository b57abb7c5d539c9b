"""Who a matrix's columns are: ids, symbols, versions, organism, and the registry rows that follow."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from raggedatlas.errors import FeatureError, NotFoundError
from raggedatlas.model.frames import INDEX
from raggedatlas.model.ids import feature_uids, looks_like_ensembl, split_version

ID_COLUMNS = (
    "gene_ids", "gene_id", "ensembl_id", "ensembl_ids", "ensembl", "ensembl_gene_id", "feature_id", "feature_ids", "ENSEMBL", "ids",
)  # fmt: skip
"""Where files usually keep Ensembl ids, in the order of trust."""

SYMBOL_COLUMNS = (
    "gene_symbols", "gene_symbol", "symbol", "symbols", "gene_name", "gene_names", "feature_name", "gene_short_name", "hgnc_symbol",
    "Symbol", "SYMBOL", "name",
)  # fmt: skip
"""Where files usually keep symbols, in the order of trust."""

ORGANISMS = {
    "ENSG": "human",
    "ENSMUSG": "mouse",
    "ENSRNOG": "rat",
    "ENSDARG": "zebrafish",
    "ENSSSCG": "pig",
    "ENSMMUG": "macaque",
}
"""Ensembl gene prefix -> organism."""


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
    """Find the identity of every column of a matrix.

    Parameters
    ----------
    var : pyarrow.Table
        The source's features, index first.
    space : str
        Feature space; the namespace of the uids.
    feature_id : str
        ``"auto"``, ``"index"``, or a column of `var`.
    organism : str
        ``"auto"`` reads it off Ensembl ids; unknown organisms are ``"unknown"``.
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
    ...     pa.table({"_index": ["CD79A"], "gene_ids": ["ENSG00000105369.12"]}), "gene_expression", "auto", "auto"
    ... )
    >>> (
    ...     features.rows.to_pylist()[0]["feature_id"],
    ...     features.rows.to_pylist()[0]["symbol"],
    ...     features.rows.to_pylist()[0]["organism"],
    ... )
    ('ENSG00000105369', 'CD79A', 'human')
    """
    source = _id_column(var, feature_id)
    given = _texts(var, source)
    empty = [i for i, text in enumerate(given) if not text]
    if empty:
        raise FeatureError(
            f"{len(empty)} of {len(given)} features of {space!r} have no id in {_said(source)} (the first is column {empty[0]}, counted from 0); "
            "name another column with feature_id=..."
        )
    bases, versions = [], 0
    # No list of pairs: so many tuples at once would have the interpreter look through all it holds for garbage.
    for text in given:
        base, version = split_version(text) if "." in text else (text, None)
        bases.append(base)
        versions += version is not None
    ids, notes = _apart(bases, _said(source))
    symbol_source = _symbol_column(var, source)
    symbols = _texts(var, symbol_source) if symbol_source else list(ids)
    known = _organism(ids) if organism == "auto" else organism
    notes = [
        f"{space}: ids from {_said(source)}, symbols from {_said(symbol_source) if symbol_source else 'the ids'}, organism {known}",
        *([f"{space}: {versions:,} version suffixes split off and kept as aliases"] if versions else []),
        *(f"{space}: {note}" for note in notes),
    ]
    uids = tuple(feature_uids(known, space, ids))
    named = [text != identifier for text, identifier in zip(given, ids, strict=True)]
    bounds = pa.array(np.cumsum([0, *named]), pa.int32())
    aliases = pa.ListArray.from_arrays(bounds, pa.array(list(itertools.compress(given, named)), pa.string()))
    columns: dict[str, Any] = {
        "uid": pa.array(uids, pa.string()),
        "feature_id": pa.array(ids, pa.string()),
        "symbol": pa.array([s or i for s, i in zip(symbols, ids, strict=True)], pa.string()),
        "aliases": aliases,
        "organism": pa.array([known] * len(ids), pa.string()),
    }
    columns |= {name: var.column(name) for name in extra if name in var.column_names and name not in columns}
    return Features(uids, pa.table(columns), tuple(notes), var)


def _id_column(var: pa.Table, feature_id: str) -> str:
    if feature_id == "index":
        return INDEX
    if feature_id != "auto":
        if feature_id not in var.column_names:
            raise NotFoundError(
                f"The source's var has no column {feature_id!r} for feature_id; it has {var.column_names[1:]}, or use 'index'."
            )
        return feature_id
    if looks_like_ensembl(_texts(var, INDEX)):
        return INDEX
    texts = [f.name for f in var.schema if pa.types.is_string(f.type) and f.name != INDEX]
    ordered = [*(n for n in ID_COLUMNS if n in texts), *(n for n in texts if n not in ID_COLUMNS)]
    return next((name for name in ordered if looks_like_ensembl(_texts(var, name))), INDEX)


def _symbol_column(var: pa.Table, source: str) -> str | None:
    texts = [f.name for f in var.schema if pa.types.is_string(f.type)]
    named = next((name for name in SYMBOL_COLUMNS if name in texts and name != source), None)
    if named is not None:
        return named
    return INDEX if source != INDEX else None


def _said(column: str) -> str:
    return "the index" if column == INDEX else f"var[{column!r}]"


def _texts(var: pa.Table, name: str) -> list[str]:
    return [text or "" for text in var.column(name).cast(pa.string()).to_pylist()]


def _organism(ids: Sequence[str]) -> str:
    if not looks_like_ensembl(ids):
        return "unknown"
    votes: dict[str, int] = {}
    for identifier in ids[:: max(1, len(ids) // 200)]:
        prefix = identifier.rstrip("0123456789")
        votes[prefix] = votes.get(prefix, 0) + 1
    best: Mapping[str, int] = votes
    return ORGANISMS.get(max(best, key=lambda p: best[p]), "unknown")


def _apart(ids: Sequence[str], said: str) -> tuple[list[str], list[str]]:
    taken = set(ids)
    if len(taken) == len(ids):
        return list(ids), []
    seen: dict[str, int] = {}
    apart, renamed = [], []
    for identifier in ids:
        n = seen.get(identifier, 0)
        seen[identifier] = n + 1
        name = identifier
        while n and name in taken:
            name = f"{identifier}-{n}"
            n += 1
        if name != identifier:
            taken.add(name)
            renamed.append(f"{identifier} -> {name}")
        apart.append(name)
    if not renamed:
        return apart, []
    shown = ", ".join(renamed[:5]) + (", ..." if len(renamed) > 5 else "")
    return apart, [f"{len(renamed)} repeated ids in {said} kept apart: {shown}"]

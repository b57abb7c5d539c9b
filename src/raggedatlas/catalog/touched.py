"""Which features new ones can bear on: those that share a name with them, directly or over others. All others stay as they are."""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.genes import Genes, text_owners


def connected_rows(
    registry: pa.Table, touched: pa.Array, links: Mapping[str, str | None], tables: Genes | None
) -> NDArray[np.int64]:
    """Return the rows of a registry that are connected with some features, theirs included.

    Features are connected by a common id, symbol or alias, by a gene whose names or accessions they have, and by a link made by hand.
    What a feature counts as depends on features that it is connected with, and on no others.

    Parameters
    ----------
    registry : pyarrow.Table
        Rows of a feature registry.
    touched : pyarrow.Array of str
        Feature uids.
    links : mapping of str to str or None
        Links made by hand, feature uid -> target uid.
    tables : Genes or None
        The gene tables in use.

    Returns
    -------
    (n_rows,) int64
        Ascending.
    """
    owners, texts = _nodes(registry, links, tables)
    inside = np.zeros(max(registry.num_rows, int(owners.max(initial=-1)) + 1), bool)
    inside[: registry.num_rows] = pc.is_in(registry.column("uid"), value_set=touched).to_numpy()
    fresh = inside.copy()
    while fresh.any():
        shared = texts.filter(pa.array(fresh[owners])).unique()
        fresh = np.zeros(len(inside), bool)
        fresh[owners[pc.is_in(texts, value_set=shared).to_numpy()]] = True
        fresh &= ~inside
        inside |= fresh
    return np.flatnonzero(inside[: registry.num_rows])


def _nodes(
    registry: pa.Table, links: Mapping[str, str | None], tables: Genes | None
) -> tuple[NDArray[np.int64], pa.ChunkedArray]:
    """Return every text that connects, and the number of its owner: rows of the registry first, then genes, then links."""
    pairs = [(uid, into) for uid, into in links.items() if into is not None]
    ends = pa.array([uid for pair in pairs for uid in pair], pa.string())
    linked = np.flatnonzero(pc.is_in(registry.column("uid"), value_set=ends).to_numpy())
    names = pc.fill_null(registry.column("feature_id"), registry.column("uid"))
    found = [text_owners(column) for column in (names, registry.column("symbol"), registry.column("aliases"))]
    found.append((linked, registry.column("uid").take(pa.array(linked)).combine_chunks()))
    n = registry.num_rows
    if tables is not None:
        columns = ("accession", "symbol", "previous", "aliases", "same")
        found += [(own + n, texts) for own, texts in (text_owners(tables.rows.column(name)) for name in columns)]
        n += tables.rows.num_rows
    found.append((n + np.arange(len(ends)) // 2, ends))
    texts = pa.chunked_array([texts for _, texts in found], pa.string())
    named = pc.fill_null(pc.not_equal(texts, ""), fill_value=False)
    return np.concatenate([own for own, _ in found])[named.to_numpy()], texts.filter(named)

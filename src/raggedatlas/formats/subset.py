"""Select cells and features of a source (SQL conditions, names, symbols) and subset elements and blocks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.errors import FeatureError, QueryError
from raggedatlas.formats.composite_source import MatrixPart, SourceParts
from raggedatlas.formats.containers import axes_of
from raggedatlas.formats.matrix_readers import MatrixSubset, refuse_beyond
from raggedatlas.model.batch import Block, CsrBlock, DenseBlock
from raggedatlas.model.frames import (
    INDEX,
    ColumnFacts,
    ColumnTable,
    arrow_to_frame,
    facts_of,
    remove_unused_categories,
)
from raggedatlas.model.ids import column_name
from raggedatlas.model.terms import TermSource
from raggedatlas.store.filters import Columns, Filter, to_sql, warn_of_unknown
from raggedatlas.store.location import Location
from raggedatlas.store.ontologies import packaged_ontologies, read_packaged
from raggedatlas.store.sql_parser import as_filter
from raggedatlas.store.tables import Tables

CELL_NAME = "cell_name"
"""Name of the index of cells in conditions, as in an atlas."""

ROW = "_row"

NAMES = (
    "gene_ids", "gene_id", "feature_id", "ensembl_id", "gene_symbols", "gene_symbol", "symbol", "gene_name", "gene_names",
    "feature_name", "gene_short_name", "hgnc_symbol",
)  # fmt: skip
"""Columns that may name a feature, after the index."""


Where = str | Mapping[str, Any] | Filter
"""A condition on cells: SQL text, a mapping of column to value, or an expression of `col`."""


def filter_cells(cells: pa.Table, where: Where) -> NDArray[np.int64]:
    """Return the ascending rows of the cells that match a condition; `cells` is what `Source.cells` returns.

    `where` is as for `Query.where`, over the columns of the file; the index is ``cell_name``. Warns with
    `UnknownValueWarning` about a comparison with a text that no cell has.
    """
    arrays, fields = [pa.array(np.arange(cells.num_rows, dtype=np.int64))], [pa.field(ROW, pa.int64())]
    taken = {ROW, *(CELL_NAME for name in cells.column_names if name == INDEX)}
    for i, field in enumerate(cells.schema):
        stored = name = CELL_NAME if field.name == INDEX else column_name(field.name)
        n = 1
        # Names of a file may differ only in characters that tables do not allow (`n.genes`, `n_genes`).
        while field.name != INDEX and stored in taken:
            stored, n = f"{name}_{n + 1}", n + 1
        taken.add(stored)
        # Conditions name a column as the file does; `Columns` finds that name in the facts.
        facts = replace(facts_of(field) or ColumnFacts(field.name, ""), name=field.name)
        arrays.append(cells.column(i))
        fields.append(pa.field(stored, field.type, metadata=facts.to_metadata()))
    table = pa.Table.from_arrays(arrays, schema=pa.schema(fields))
    terms = TermSource(lambda name: _texts(table.column(name)) or [], packaged_ontologies, read_packaged)
    columns, asked = Columns(pa.schema(fields[1:]), terms=lambda: terms), as_filter(where)
    condition = to_sql([asked], columns)
    warn_of_unknown([asked], columns, lambda name: _texts(table.column(columns.stored(name))))
    with TemporaryDirectory(prefix="raggedatlas-") as folder:
        tables = Tables(Location(folder))
        tables.create("cells", table.schema)
        tables.append("cells", table)
        rows: NDArray[np.int64] = tables.read("cells", [ROW], condition).column(ROW).to_numpy()
    return rows


def _texts(column: pa.ChunkedArray) -> list[str] | None:
    values = pc.unique(column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column)
    return values.drop_null().to_pylist() if pa.types.is_string(values.type) else None


def select_rows(chosen: "Where | Sequence[int] | NDArray[Any]", cells: pa.Table) -> NDArray[np.int64]:
    """Return the ascending rows selected by a condition, a mask or row numbers; a `QueryError` refuses repeated rows."""
    if isinstance(chosen, str | Mapping | Filter):
        return filter_cells(cells, chosen)
    asked = np.asarray(chosen)
    if asked.dtype.kind == "b" and asked.shape == (cells.num_rows,):
        return np.flatnonzero(asked).astype(np.int64)
    # -1 fails the check below: for masks of another length, fractions and text.
    # An empty list is an array of float64.
    is_numbers = asked.dtype.kind in "iu" or (asked.dtype.kind == "f" and not asked.size)
    rows = np.unique(asked).astype(np.int64) if is_numbers else np.array([-1])
    if rows.size and (rows[0] < 0 or rows[-1] >= cells.num_rows):
        raise QueryError(
            f"where= takes a condition, one truth value for each of the {cells.num_rows:,} cells, or numbers of rows from 0; "
            f"got {asked.dtype} values of shape {asked.shape}."
        )
    if rows.size < asked.size:
        numbers, counts = np.unique(asked, return_counts=True)
        raise QueryError(
            f"where= has the row {int(numbers[counts > 1][0]):,} more than once, and a file has each cell once; pass numpy.unique(rows), or "
            "index an AnnData of raggedatlas.read to repeat cells."
        )
    return rows


def find_features(features: pa.Table, names: Sequence[str]) -> NDArray[np.int64]:
    """Return the rows of features, found by index, else by ID or symbol in one of the usual columns.

    `features` is what `Source.features` returns; the result, (n,), is in the order of `names`. Raises `FeatureError`
    for a name that is unknown or ambiguous, and for two names of one feature.
    """
    columns = [INDEX, *(name for name in NAMES if name in features.column_names)]
    places: list[dict[str, list[int]]] = []
    for column in columns:
        at: dict[str, list[int]] = {}
        for row, value in enumerate(features.column(column).to_pylist()):
            at.setdefault(str(value), []).append(row)
        places.append(at)
    found, unknown, unclear = [], [], []
    for name in names:
        hits = next((at[name] for at in places if name in at), [])
        found += hits[:1]
        unknown += [] if hits else [name]
        unclear += [name] if len(hits) > 1 else []
    if unknown or unclear:
        said = [f"unknown: {unknown[:5]}"] if unknown else []
        said += [f"named by several features: {unclear[:5]}"] if unclear else []
        raise FeatureError(
            f"Of {len(names):,} features asked for, some are {'; '.join(said)}. Names are looked up in {columns} of var; correct them."
        )
    rows = np.array(found, np.int64)
    if len(np.unique(rows)) != len(rows):
        twice = [name for name, row in zip(names, found, strict=True) if found.count(row) > 1]
        raise FeatureError(f"{twice[:5]} are the same features, and each may appear once; drop the duplicates.")
    return rows


def take(value: Any, chosen: NDArray[np.int64], axis: int = 0) -> Any:  # noqa: ANN401
    """Return rows (or columns) of a frame, a table, an array, a SciPy matrix or an awkward array."""
    if isinstance(value, ColumnTable):
        return value.take(chosen)
    if isinstance(value, pa.Table):
        return value.take(pa.array(chosen))
    if hasattr(value, "iloc"):
        return value.iloc[chosen]
    return value[chosen] if axis == 0 else value[:, chosen]


def remove_unused(value: Any) -> Any:  # noqa: ANN401  (a frame or a table)
    """Return the `obs` or `var` of a subset: categories that no row has are dropped, as anndata does."""
    if isinstance(value, ColumnTable):
        # `arrow` would return all categories.
        columns = (
            replace(c, read=partial(lambda read: remove_unused_categories(read()), c.read), arrow=None)
            for c in value.columns
        )
        return replace(value, columns=tuple(columns))
    frame = arrow_to_frame(value) if isinstance(value, pa.Table) else value.copy(deep=False)
    for place, name in enumerate(frame.columns):
        column = frame.iloc[:, place]
        if hasattr(column, "cat"):
            frame[name] = remove_unused_categories(column)
    return frame


def subset_colors(
    colors: Any,  # noqa: ANN401  (an array, or one color)
    table: Any,  # noqa: ANN401  (a frame or a table)
    name: str,
    rows: NDArray[np.int64] | None,
) -> Any:  # noqa: ANN401
    """Return the colors of the categories that a subset has; None where there is not one color for each category.

    `colors` are ``uns["<name>_colors"]`` and `table` the `obs` or `var` of the whole; colors of a column that is not
    categorical are returned as they are. `rows`, (n,), is the subset; None is all.
    """
    if isinstance(table, ColumnTable):
        column: Any = next((c.read() for c in table.columns if c.name == name), None)
    else:
        column = table[name] if name in table.columns else None
    if not hasattr(column, "cat"):
        return colors
    all_colors, categories = np.atleast_1d(np.asarray(colors)), column.cat.categories
    if len(all_colors) != len(categories):
        return None
    chosen = column if rows is None else take(column, rows)
    return all_colors[categories.isin(remove_unused_categories(chosen).cat.categories)]


def select_cells(parts: SourceParts, rows: NDArray[np.int64]) -> SourceParts:
    """Return a source with some of its cells: matrices, tables, and all other elements along the cells.

    `rows`, (n,), ascend. Of modalities, `parts.present` has the cells under the key of their ``obs``.
    """
    present: dict[str, NDArray[np.int64]] = {}

    def cells_of(key: str) -> NDArray[np.int64] | None:
        # Else those of the modality that has it.
        owner = "/".join([*key.split("/")[:2], "obs"]) if key.startswith("mod/") else "obs"
        return parts.present.get(key, parts.present.get(owner))

    def chosen(key: str) -> NDArray[np.int64]:
        cells = cells_of(key)
        return rows if cells is None else np.flatnonzero(np.isin(cells, rows)).astype(np.int64)

    def noted(key: str) -> NDArray[np.int64]:
        """Return the selected rows of an element, and note which of the selected cells they are."""
        own, cells = chosen(key), cells_of(key)
        if cells is not None:
            # All of these are among the selected cells, which ascend, so the search finds their positions.
            present[key] = np.searchsorted(rows, cells[own]).astype(np.int64)
        return own

    def select(part: MatrixPart) -> MatrixPart:
        axes = _cell_axes(part.info.key)
        if not axes:
            return part
        own = noted(part.info.key)
        made = MatrixSubset(part.rows, own, own if axes > 1 else None)
        # As many entries as before at most: rows without their number of entries need not be read for it.
        return MatrixPart(replace(part.info, shape=made.shape, exact=False), made)

    def element(key: str) -> Any:  # noqa: ANN401  (any element that AnnData knows)
        value, own = parts.elements[key](), chosen(key)
        for axis in range(_cell_axes(key)):
            refuse_beyond(own, value.shape[axis] if hasattr(value, "shape") else len(value), key)
            value = take(value, own, axis)
        return value

    def open_table(opener: Callable[[], ColumnTable | None], own: NDArray[np.int64]) -> ColumnTable | None:
        table = opener()
        return None if table is None else table.take(own)

    matrices = tuple(select(part) for part in parts.matrices)
    others = tuple(select(part) for part in parts.others)
    for key in parts.present:
        noted(key)
    tables = {key: partial(open_table, opener, noted(key)) for key, opener in parts.tables.items()}
    elements = {key: partial(element, key) if _cell_axes(key) else read for key, read in parts.elements.items()}
    return replace(
        parts, n_cells=len(rows), cells=lambda: take(parts.cells(), rows), matrices=matrices, others=others, present=present,
        elements=elements, tables=tables,
    )  # fmt: skip


def _cell_axes(key: str) -> int:
    """Return along how many axes an element goes by cells."""
    own = key.split("/", 2)[2] if key.startswith("mod/") else key
    # A matrix of a 10x file is called `X:` and its feature type.
    return axes_of("X" if own.startswith("X:") else own).count("obs")


def hstack_blocks(blocks: Sequence[Block]) -> Block:
    """Concatenate the columns of several blocks of the same rows."""
    if isinstance(blocks[0], DenseBlock):
        return DenseBlock({"values": np.concatenate([block.layers["values"] for block in blocks], axis=1)})
    from scipy.sparse import csr_array, hstack

    parts = [
        csr_array((b.layers["values"], b.indices, b.indptr), (b.n_rows, b.n_cols))
        for b in blocks
        if isinstance(b, CsrBlock)
    ]
    joined = hstack(parts, format="csr")
    return CsrBlock(joined.indptr.astype(np.int64), joined.indices, {"values": joined.data}, int(joined.shape[1]))

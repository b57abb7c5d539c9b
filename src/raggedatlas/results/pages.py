"""Lance's data files mapped into memory, where a column's rows lie in them as they are.

A column of fixed-size lists without missing values and without compression is written as pages of plain rows. Nothing of that
is taken for granted: the file's own description of each page must be the expected one to the letter, sizes must agree,
and the first and last row of every page must be those that Lance gives. Anything else is read through Lance.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raggedatlas.results.folder import result_errors
from raggedatlas.results.rows import PagedRows, flat_rows
from raggedatlas.results.schema import ResultColumn

if TYPE_CHECKING:
    import lance

_SPACE = re.compile(r"\s+")
_PLAIN_PAGE = (
    "PageLayout{{layout:Some(FullZipLayout(FullZipLayout{{bits_rep:0,bits_def:0,num_items:{n_rows},num_visible_items:{n_rows},"
    "value_compression:Some(CompressiveEncoding{{compression:Some(FixedSizeList(FixedSizeList{{items_per_value:{n_values},"
    "has_validity:false,values:Some(CompressiveEncoding{{compression:Some(Flat(Flat{{bits_per_value:{bits},data:None,}},),),}},"
    "),}},),),}},),layers:[RepdefAllValidItem,],details:Some(BitsPerValue({row_bits},),),}},),),}}"
)
_ENVIRONMENT = "RAGGEDATLAS_MAP_RESULTS"


@dataclass(frozen=True)
class _Page:
    file: int
    position: int
    n_rows: int


def mapping_allowed() -> bool:
    """Tell whether the environment leaves mapping on; ``RAGGEDATLAS_MAP_RESULTS=0`` switches it off."""
    return os.environ.get(_ENVIRONMENT, "1").lower() not in {"0", "false", "no", "off"}


def map_rows(table: "lance.LanceDataset", column: ResultColumn, folder: Path) -> PagedRows | None:
    """Map a column's pages.

    Parameters
    ----------
    table : lance.LanceDataset
        At its version.
    column : ResultColumn
        Which column.
    folder : pathlib.Path
        The table's folder on this machine.

    Returns
    -------
    PagedRows or None
        None where the rows do not lie in the files as they are, or anything about them is not as expected.
    """
    found = _find_pages(table, column, folder)
    if not found:
        return None
    paths, pages = found
    values = []
    for path in paths:
        items = path.stat().st_size // column.dtype.itemsize
        values.append(np.asarray(np.memmap(path, column.dtype, "r", shape=(items,))))
    starts = np.concatenate([[0], np.cumsum([page.n_rows for page in pages])])
    offsets = [page.position // column.dtype.itemsize for page in pages]
    rows = PagedRows(values, starts[:-1].tolist(), [page.file for page in pages], offsets, column.n_values)
    edges = np.unique(np.concatenate([starts[:-1], starts[1:] - 1]))
    return rows if _agrees(table, column, rows, edges) else None


def _find_pages(
    table: "lance.LanceDataset", column: ResultColumn, folder: Path
) -> tuple[list[Path], list[_Page]] | None:
    """List the files and their pages in row order; None where a page is not plain rows."""
    paths: list[Path] = []
    pages: list[_Page] = []
    field = _field_id(table, column.name)
    with result_errors(table):
        for fragment in table.get_fragments():
            files = [file for file in fragment.data_files() if field in file.fields]
            if fragment.num_deletions or len(files) != 1:
                return None
            path = folder / "data" / files[0].path
            at = files[0].column_indices[files[0].fields.index(field)] if files[0].column_indices else -1
            found = _plain_pages(path, at, column, len(paths))
            if found is None or sum(page.n_rows for page in found) != fragment.count_rows():
                return None
            paths.append(path)
            pages += found
    return (paths, pages) if pages else None


def _field_id(table: "lance.LanceDataset", name: str) -> int:
    return next(int(field.id()) for field in table.lance_schema.fields() if field.name() == name)


def _plain_pages(path: Path, index: int, column: ResultColumn, file: int) -> list[_Page] | None:
    """Read where the pages of one column are in one file; None where one of them is not plain rows."""
    from lance.file import LanceFileReader

    metadata = LanceFileReader(str(path)).metadata()
    if not 0 <= index < len(metadata.columns):
        return None
    size, bits = path.stat().st_size, 8 * column.dtype.itemsize
    found = []
    for page in metadata.columns[index].pages:
        if len(page.buffers) != 1:
            return None
        position, length = int(page.buffers[0].position), int(page.buffers[0].size)
        n_rows = length // column.n_bytes
        expected = _PLAIN_PAGE.format(
            n_rows=n_rows, n_values=column.n_values, bits=bits, row_bits=bits * column.n_values
        )
        plain = _SPACE.sub("", str(page.encoding)) == expected
        if (
            not plain
            or length != n_rows * column.n_bytes
            or position % column.dtype.itemsize
            or position + length > size
        ):
            return None
        found.append(_Page(file, position, n_rows))
    return found


def _agrees(table: "lance.LanceDataset", column: ResultColumn, rows: PagedRows, sample: NDArray[np.int64]) -> bool:
    """Compare some rows, bit by bit, with those that Lance gives."""
    with result_errors(table):
        taken = table.take(sample, columns=[column.name])
    expected: bytes = flat_rows(taken.column(column.name).combine_chunks(), column).tobytes()
    return expected == rows.read(sample).tobytes()

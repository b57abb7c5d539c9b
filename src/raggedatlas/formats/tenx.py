"""Read 10x Genomics count files: HDF5 of Cell Ranger 2 and later, and Market-matrix folders, also those of other programs."""

import contextlib
import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import LimitError, NotFoundError, SourceError
from raggedatlas.formats.composite_source import SPACES, CompositeSource, MatrixPart, SourceParts, open_composite
from raggedatlas.formats.containers import Container, check_whole, decode_texts, is_array, open_hdf5
from raggedatlas.formats.external_sort import ExternalRowSort
from raggedatlas.formats.matrix_readers import (
    CsrRows,
    MatrixLocation,
    MatrixSubset,
    RowReader,
    SortedRows,
)
from raggedatlas.model.frames import INDEX, ColumnFacts, checked_names
from raggedatlas.model.protocols import MatrixForm
from raggedatlas.store.location import AnyPath
from raggedatlas.store.runtime import warnings_as

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class MarketFiles:
    """How the files of one sample in the Market-matrix format are called."""

    matrix: str  # ending of the name of the matrix
    barcodes: str  # ending of the name of the table of cells
    features: tuple[str, ...]  # possible endings of the name of the table of features
    by_cells: bool = False  # whether the rows of the matrix are cells; else they are features

    @property
    def has_headers(self) -> bool:
        """Whether the tables are CSV with a header."""
        return self.barcodes.endswith(".csv")


MARKET_FILES = (
    *(
        MarketFiles(name, "cell_metadata.csv", ("all_genes.csv",), by_cells=True)
        for name in ("count_matrix.mtx", "DGE.mtx")
    ),
    MarketFiles("cells_x_genes.mtx", "cells_x_genes.barcodes.txt", ("cells_x_genes.genes.txt",), by_cells=True),
    MarketFiles("matrix.mtx", "barcodes.tsv", ("features.tsv", "genes.tsv")),
)
"""Files of Parse Biosciences, of kallisto|bustools, and of Cell Ranger and STARsolo; the last is what other names end in."""

FIELDS = {"name": "symbol", "feature_type": "feature_types", "genome": "genome"}
"""Cell Ranger's name of a feature column -> ours, which are scanpy's."""


def tenx_h5_source(path: AnyPath, genome: str | None = None) -> CompositeSource:
    """Open a 10x `.h5` file; each feature type becomes a matrix.

    `genome` names the genome, for Cell Ranger 2 files with several.
    """
    return open_composite(open_hdf5(path), partial(_h5_parts, genome=genome), path, "10x-h5")


def tenx_mtx_source(path: Path) -> CompositeSource:
    """Open a folder with the Market-matrix files of one sample, named as in `MARKET_FILES`, each plain or ``.gz``.

    The names may share a prefix, as in downloads from GEO. Of several samples in a folder the path of a matrix chooses
    one. Other matrices in the folder, such as STARsolo's of reads that map to several genes, are listed as left out.

    The text is read once and sorted by cell, large files through temporary files.
    """
    folder, prefix, files = _sample(path)
    barcodes = find_part(folder, f"{prefix}{files.barcodes}")
    features = find_part(folder, *(f"{prefix}{name}" for name in files.features))
    if files.has_headers:
        cells = _read_csv(barcodes)
        # Of genes every column is text: there are genes called `NA`, `nan` and `1-Mar`.
        names, columns = cells.index.tolist(), _read_csv(features, dtype=str, keep_default_na=False)
        table = {"id": columns.index.tolist()}
        table |= {FIELDS.get(str(key).removeprefix("gene_"), str(key)): columns[key].tolist() for key in columns}
    else:
        cells, names = None, read_table(barcodes, ("barcode",))["barcode"]
        table = read_table(features, ("id", "symbol", "feature_types"))
        if files.by_cells:
            with contextlib.suppress(NotFoundError):
                table |= read_table(find_part(folder, f"{prefix}cells_x_genes.genes.names.txt"), ("symbol",))
    matrix = find_part(folder, f"{prefix}{files.matrix}")
    place = MatrixLocation(str(folder), files.matrix, lambda row: names[row])
    rows = MarketRows(matrix, (len(names), len(table["id"])), place, by_cells=files.by_cells)
    others = {path.name for ending in ("*.mtx", "*.mtx.gz") for path in folder.glob(ending)}
    left_out = dict.fromkeys(
        sorted(others - {one.name for one in market_matrices(folder)}), "another matrix of the folder"
    )
    # One reader for all feature types, so that the text is read and sorted only once.
    parts = _split(lambda: rows, table, lambda: np.array(names, dtype=object), left_out)
    if cells is not None:
        parts = replace(parts, cells=lambda: cells)
    name = prefix.rstrip("_-. ") or folder.name
    return CompositeSource(parts, name=name, uri=str(path), format="10x-mtx")


def _read_csv(path: Path, **options: Any) -> "pd.DataFrame":  # noqa: ANN401  (those of pandas)
    """Read a table with a header, whose first column has the names, which are taken as they are."""
    import pandas as pd

    try:
        # As `index_col` the names would have missing values for `NA` and its like, and be numbers where they look like these.
        names = pd.read_csv(path, usecols=[0], dtype=str, keep_default_na=False).iloc[:, 0]
        frame: pd.DataFrame = pd.read_csv(path, **options).iloc[:, 1:].set_axis(pd.Index(names.array))
    except (OSError, EOFError, zlib.error, ValueError) as error:  # pandas' errors of parsing are ValueErrors
        raise SourceError(f"{path} cannot be read as a CSV table ({error}); fetch it again.") from error
    return frame


def _market_files(path: AnyPath) -> MarketFiles | None:
    """Return how the files beside a matrix are called, or None for a file that is no matrix of a sample."""
    name = path.name.removesuffix(".gz")
    return next((files for files in MARKET_FILES if name.endswith(files.matrix)), None)


def market_matrices(folder: AnyPath) -> list[AnyPath]:
    """Return the matrices of the samples in a folder, ``<prefix>matrix.mtx`` or another name of `MARKET_FILES`, plain or ``.gz``."""
    found = (path for ending in ("*.mtx", "*.mtx.gz") for path in folder.glob(ending) if path.is_file())
    return sorted((path for path in found if _market_files(path) is not None), key=str)


def is_market(path: AnyPath) -> bool:
    """Return whether a path is the matrix of a sample, or a folder with some; names decide."""
    return bool(market_matrices(path)) if path.is_dir() else path.is_file() and _market_files(path) is not None


def sample_prefix(matrix: AnyPath) -> str:
    """Return what the name of a matrix begins with, which the tables of its sample share; none if it is alone in its folder, or no matrix."""
    files = _market_files(matrix)
    return "" if files is None else matrix.name.removesuffix(".gz").removesuffix(files.matrix)


def companions(matrix: AnyPath) -> list[str]:
    """Return the names that the files beside a matrix may have; none for what is no matrix."""
    files = _market_files(matrix)
    if files is None:
        return []
    prefix = sample_prefix(matrix)
    return [f"{prefix}{name}{packed}" for name in (files.barcodes, *files.features) for packed in ("", ".gz")]


def _sample(path: Path) -> tuple[Path, str, MarketFiles]:
    """Return the folder of the sample at a path (a folder with one, or its matrix), the prefix of its files, and their names."""
    if path.is_dir():
        found = market_matrices(path)
        whole = [one for one in found if not sample_prefix(one)]
        found = whole or found
        if len(found) > 1 and not whole:
            raise SourceError(
                f"{path} has several matrices: {[one.name for one in found]}; give the path of one of them."
            )
        path = Path(found[0]) if found else path / "matrix.mtx"
    files = _market_files(path) or MARKET_FILES[-1]
    return path.parent, sample_prefix(path), files


def is_tenx(container: Container) -> bool:
    """Return whether an HDF5 file has the groups that Cell Ranger writes."""
    return container.get("matrix/barcodes") is not None or bool(_genomes(container))


def _genomes(container: Container) -> list[str]:
    return [
        name
        for name in container.names("")
        if not is_array(container.get(name)) and {"barcodes", "genes", "indptr"} <= set(container.names(name))
    ]


def _group(container: Container, genome: str | None) -> str:
    """Return the group of the matrix: one for all, or that of a genome."""
    if container.get("matrix") is not None:
        if genome is not None:
            raise SourceError(
                f"{container.uri} has one matrix for all genomes; leave genome={genome!r} out, and choose features by the column 'genome'."
            )
        return "matrix"
    genomes = _genomes(container)
    if genome is not None and genome in genomes:
        return genome
    if genome is None and len(genomes) == 1:
        return genomes[0]
    if not genomes:
        raise SourceError(f"{container.uri}: there is neither a group 'matrix' nor a genome; it is no 10x count file.")
    lacks = "" if genome is None else f", and no {genome!r}"
    raise SourceError(f"{container.uri} holds the genomes {genomes}{lacks}; choose one with genome=...")


def _h5_parts(container: Container, genome: str | None) -> SourceParts:
    group = _group(container, genome)
    shape = container.whole(f"{group}/shape", 2)
    n_features, n_cells = int(shape[0]), int(shape[1])
    arrays = {name: container.get(f"{group}/{name}") for name in ("indptr", "indices", "data")}
    if not all(is_array(array) for array in arrays.values()):
        raise SourceError(f"{container.uri}: {group} lacks one of indptr, indices, data; the file is not complete.")
    barcodes = partial(_texts, container, f"{group}/barcodes", n_cells)
    place = MatrixLocation(container.uri, group, lambda row: str(barcodes()[row]))

    # Features by cells in CSC are cells by features in CSR. Each feature type gets a reader of its own,
    # because a reader decodes each chunk only once if its rows are requested in ascending order.
    def rows() -> CsrRows:
        return CsrRows(arrays, (n_cells, n_features), place)

    table, left_out = _feature_table(container, group, n_features)
    left_out |= {f"attrs/{name}": str(value) for name, value in container.root.attrs.items()}
    named = container.get(f"{group}/barcodes")
    if not is_array(named):
        raise SourceError(f"{container.uri}: {group} has no barcodes; the file is not complete.")
    check_whole(container.uri, f"{group}/barcodes", named, n_cells)
    return _split(rows, table, barcodes, left_out)


def _feature_table(container: Container, group: str, n: int) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    if container.get(f"{group}/features") is None:
        genes = {"id": f"{group}/genes", "symbol": f"{group}/gene_names"}
        table = {name: _texts(container, at, n) for name, at in genes.items()}
        return table | {"genome": np.full(n, group, dtype=object)}, {}
    table, left_out = {"id": _texts(container, f"{group}/features/id", n)}, {}
    names = [name for name in FIELDS if name in container.names(f"{group}/features")]
    for name in [*names, *(n for n in container.names(f"{group}/features") if n not in {*FIELDS, "id"})]:
        node = container.get(f"{group}/features/{name}")
        # A column of the source must not replace Cell Ranger's of the same meaning.
        if FIELDS.get(name, name) not in table and is_array(node) and node.shape == (n,) and node.dtype.kind in "SO":
            table[FIELDS.get(name, name)] = _texts(container, f"{group}/features/{name}", n)
        else:
            left_out[f"features/{name}"] = f"array {node.shape}" if is_array(node) else "group"
    return table, left_out


def _texts(container: Container, path: str, n: int) -> NDArray[Any]:
    values = container.whole(path, n)
    try:  # Arrow decodes tens of thousands of names in a few milliseconds.
        decoded = pa.array(values.tolist(), pa.binary()).cast(pa.string())
    except (pa.ArrowException, UnicodeError):
        decoded = None
    if decoded is None or decoded.null_count:
        return np.array(decode_texts(values, f"{container.uri}: {path}"), dtype=object)
    return np.asarray(decoded.to_numpy(zero_copy_only=False), dtype=object)


def _split(
    reader: Callable[[], RowReader],
    table: Mapping[str, Any],
    barcodes: Callable[[], NDArray[Any]],
    left_out: dict[str, str],
) -> SourceParts:
    whole = reader()
    n_features = whole.shape[1]
    kinds = np.asarray(table.get("feature_types", np.full(n_features, "Gene Expression", dtype=object)), dtype=object)
    types = list(dict.fromkeys(kinds.tolist()))
    if len(types) <= 1:
        parts = [MatrixPart.of("X", whole, "var", SPACES.get(types[0], "") if types else "")]
        features = {"var": partial(_feature_table_of, table, np.arange(n_features))}
        return SourceParts(whole.shape[0], lambda: texts_to_arrow(barcodes(), {}), tuple(parts), features, left_out)
    parts, features = [], {}
    for kind in types:
        columns = np.flatnonzero(kinds == kind)
        rows = MatrixSubset(reader(), None, columns)
        parts.append(MatrixPart.of(f"X:{kind}", rows, f"var:{kind}", SPACES.get(kind, "")))
        features[f"var:{kind}"] = partial(_feature_table_of, table, columns)
    return SourceParts(whole.shape[0], lambda: texts_to_arrow(barcodes(), {}), tuple(parts), features, left_out)


def _feature_table_of(table: Mapping[str, Any], columns: NDArray[np.int64]) -> pa.Table:
    chosen = {name: np.asarray(values, dtype=object)[columns] for name, values in table.items()}
    return texts_to_arrow(chosen.pop("id"), chosen)


TEXT = 8 << 20
"""Number of bytes of text parsed at once."""

MAX_TABLE = 1 << 30
"""Maximum size in bytes of a table of barcodes or features."""

DTYPES = {"integer": np.dtype(np.int64), "real": np.dtype(np.float64), "pattern": np.dtype(np.bool_)}
"""Field of the header -> dtype of the values."""


class MarketRows(SortedRows):
    """Reads a coordinate file by rows of cells; holds about ten times `external_sort.BAND_BYTES` in memory.

    The file, plain or ``.gz``, is of features by cells, or of cells by features if `by_cells`. `shape`, cells and
    features, is from the tables next to it. A header of another shape or kind raises `SourceError` at once, an invalid
    line when rows are read.
    """

    form: MatrixForm = "csr"

    def __init__(self, path: Path, shape: tuple[int, int], place: MatrixLocation, *, by_cells: bool = False) -> None:
        self._path, self._place, self._by_cells = path, place, by_cells
        with _opened(path) as file:
            self._field, self._stated, n_entries = _read_header(file, path)
        if self._stated != (shape if by_cells else shape[::-1]):
            raise SourceError(
                f"{path} has shape {self._stated}, but the tables next to it have {shape[1]:,} features and {shape[0]:,} "
                f"barcodes; a file of {'barcodes by features' if by_cells else 'features by barcodes'} is expected. Put the files of one run together."
            )
        # Each entry takes a digit and a space or line break for each of its numbers; deflate packs up to 1,032 bytes in one.
        self._width = 2 if self._field == "pattern" else 3
        room = (path.stat().st_size + 1) * (1032 if path.suffix == ".gz" else 1)
        if n_entries * 2 * self._width > room:
            raise SourceError(
                f"{path} announces {n_entries:,} entries, more than a file of its size can have; it was cut short or "
                "changed. Fetch it again."
            )
        self.shape = shape
        self.dtype = DTYPES[self._field]
        self.entry_bytes = 16
        self.n_entries = n_entries

    def fill(self, sort: ExternalRowSort) -> None:
        """Add all entries to a sort."""
        n_read, n_entries = 0, self.n_entries or 0
        with _opened(self._path) as file:
            _read_header(file, self._path)
            for numbers in _numbers(file, self._field, self._width, self._path):
                first, second = numbers[:, 0].astype(np.int64) - 1, numbers[:, 1].astype(np.int64) - 1
                cells, features = (first, second) if self._by_cells else (second, first)
                n_read += len(numbers)
                outside = (features < 0) | (features >= self.shape[1]) | (cells < 0) | (cells >= self.shape[0])
                # Refused at once, because the bands of the sort were sized for the announced number.
                if n_read > n_entries or outside.any():
                    at = int(outside.argmax())
                    what = (
                        f"an entry of feature {int(features[at]) + 1:,} and cell {int(cells[at]) + 1:,} outside its shape {self._stated}"
                        if outside.any()
                        else f"more than the {n_entries:,} entries that it announces"
                    )
                    raise SourceError(f"{self._path} has {what}; it is damaged. Fetch it again.")
                values = np.ones(len(numbers), np.bool_) if self._width == 2 else numbers[:, 2]
                sort.add(cells, features, values)
        if n_read != n_entries:
            raise SourceError(
                f"{self._path} announces {n_entries:,} entries and has {n_read:,}; it was cut short or changed. "
                "Fetch it again."
            )


def find_part(folder: Path, *names: str) -> Path:
    """Return the first file in a folder with one of these names, plain or with ``.gz``."""
    for name in names:
        for candidate in (folder / name, folder / f"{name}.gz"):
            if candidate.is_file():
                return candidate
    raise NotFoundError(
        f"{folder} has no {' or '.join(names)} (plain or .gz); a 10x folder needs it next to matrix.mtx."
    )


def read_table(path: Path, columns: tuple[str, ...]) -> dict[str, list[str]]:
    """Read a tab-separated table without a header, plain or ``.gz``: column -> texts.

    `columns` names its first columns; those that the file lacks are left out, its others ignored.
    """
    with _unpacked(path), _opened(path) as file:
        # The extra byte distinguishes a table that is too large from one that just fits.
        text = file.read(MAX_TABLE + 1)
    if len(text) > MAX_TABLE:
        raise LimitError(f"{path} unpacks to more than {MAX_TABLE:,} bytes; a table of names is never so large.")
    # `str.splitlines` also splits at characters that names may have.
    plain = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    try:
        rows = plain.decode().split("\n")
    except UnicodeDecodeError as error:
        line = plain.count(b"\n", 0, error.start) + 1
        raise SourceError(
            f"{path} is not UTF-8 in line {line:,}; convert it, for example with 'iconv -f latin1 -t utf-8'."
        ) from None
    lines = [row.split("\t") for row in rows if row]
    widths = {len(line) for line in lines}
    if len(widths) > 1:
        raise SourceError(f"{path} has lines of {sorted(widths)} columns; each line must have as many. Fetch it again.")
    n_columns = min(len(columns), widths.pop() if widths else 1)
    table = {columns[i]: [line[i] for line in lines] for i in range(n_columns)}
    for name, texts in table.items():
        # R's ``write.table`` puts quotes around every text of a column.
        if texts and all(len(text) > 1 and text[0] == text[-1] == '"' for text in texts):
            table[name] = [text[1:-1].replace('\\"', '"') for text in texts]
    return table


@contextlib.contextmanager
def _unpacked(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise SourceError(f"{path} cannot be read ({error}); it is damaged or cut short. Fetch it again.") from error


def _opened(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _read_header(file: IO[bytes], path: Path) -> tuple[str, tuple[int, int], int]:
    """Read the field ("integer", "real" or "pattern"), the shape and the number of entries that a file states."""
    with _unpacked(path):
        words = file.readline(4096).decode(errors="replace").lower().split()
        line = file.readline(1 << 20)
        while line.startswith(b"%") or (line and not line.strip()):
            line = file.readline(1 << 20)
    known = len(words) == 5 and words[:3] == ["%%matrixmarket", "matrix", "coordinate"] and words[4] == "general"
    if not known or words[3] not in DTYPES:
        raise SourceError(
            f"{path} starts with {' '.join(words)[:80]!r}; a header '%%MatrixMarket matrix coordinate "
            "integer|real|pattern general' was expected."
        )
    sizes = line.split()
    # Of bytes, `isdigit` takes decimal digits alone.
    if len(sizes) != 3 or not all(size.isdigit() for size in sizes):
        raise SourceError(f"{path} has the size line {line[:80]!r}, where three numbers belong; it is damaged.")
    return words[3], (int(sizes[0]), int(sizes[1])), int(sizes[2])


def _numbers(file: IO[bytes], field: str, width: int, path: Path) -> Iterator[NDArray[Any]]:
    dtype = np.float64 if field == "real" else np.int64
    rest = b""
    while True:
        try:
            text = file.read(TEXT)
        except (OSError, EOFError, zlib.error) as error:
            raise SourceError(f"{path} cannot be read to its end ({error}); it is damaged or cut short.") from error
        # Without a line break the text waits for the next read; the last read takes what is left.
        rest += text
        end = rest.rfind(b"\n") + 1 if text else len(rest)
        whole, rest = rest[:end], rest[end:]
        if len(rest) > TEXT:
            raise SourceError(f"{path} has a line longer than {TEXT:,} bytes; it is damaged. Fetch it again.")
        with warnings_as("error", DeprecationWarning):
            try:
                # NumPy parses blank text as [-1.], so it is not given any.
                numbers = np.fromstring(whole, dtype, sep=" ") if whole.strip() else np.empty(0, dtype)
                lines = numbers.reshape(-1, width)
                if not _fit(lines, whole):
                    raise ValueError("its lines and numbers differ")
            except (DeprecationWarning, ValueError) as error:
                raise SourceError(
                    f"{path} has a line that is not {width} numbers of field {field!r}; it is damaged. Fetch it again."
                ) from error
        yield lines
        if not text:
            return


def _fit(lines: NDArray[Any], text: bytes) -> bool:
    """Return whether each line of a text, empty ones aside, has the numbers of one row, without loss."""
    n_lines, width = lines.shape
    is_space = np.frombuffer(text, np.uint8) <= ord(" ")
    words = np.flatnonzero(~is_space & np.append(True, is_space)[:-1])
    ends = np.searchsorted(words, np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n")))
    in_line = np.diff(ends, prepend=0, append=len(words))
    if len(words) != n_lines * width or not ((in_line == 0) | (in_line == width)).all():
        return False
    if lines.dtype.kind == "f":
        return not (lines[:, :2] % 1).any()
    limits = np.iinfo(lines.dtype)  # larger numbers are read as these
    return not lines.size or bool(lines.min() > limits.min and lines.max() < limits.max)


def texts_to_arrow(index: NDArray[np.object_], columns: Mapping[str, NDArray[np.object_]]) -> pa.Table:
    """Turn columns of text, none missing, into the table that `frame_to_arrow` makes of their frame, without pandas."""
    checked_names(columns)
    arrays = [pa.array(texts, pa.string()) for texts in (index, *columns.values())]
    facts = [ColumnFacts("", "string"), *(ColumnFacts(name, "string") for name in columns)]
    fields = [
        pa.field(name, pa.string(), metadata=one.to_metadata())
        for name, one in zip([INDEX, *columns], facts, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))

"""10x Genomics count files: HDF5 of Cell Ranger 2 and 3 on, and Market-matrix folders."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.formats.composite_source import SPACES, CompositeSource, MatrixPart, SourceParts
from raggedatlas.formats.containers import Container, check_whole, is_array, open_hdf5, readable
from raggedatlas.formats.marketmatrix import MarketRows, find_part, read_table
from raggedatlas.formats.matrix_readers import ColumnSubset, CsrRows, MatrixLocation, RowReader, SparseArrays

if TYPE_CHECKING:
    import pandas as pd

FIELDS = {"name": "symbol", "feature_type": "feature_types", "genome": "genome"}
"""Cell Ranger's name of a feature column -> ours, which are scanpy's."""


def tenx_h5_source(path: str | Path, genome: str | None = None) -> CompositeSource:
    """Open a 10x `.h5` file; each feature type becomes a matrix.

    Parameters
    ----------
    path : str or Path
        The file.
    genome : str, optional
        Which one, for Cell Ranger 2 files that hold several.

    Raises
    ------
    NotFoundError
        If there is no such file.
    SourceError
        If it is no such file, damaged, or `genome` has to be given.
    """
    path = Path(path)
    container = open_hdf5(path)
    try:
        with readable(container.uri, "its structure"):
            group = "matrix" if container.get("matrix") is not None else _genome_group(container, genome)
            parts = _h5_parts(container, group)
        return CompositeSource(parts, name=path.stem, uri=str(path), format="10x-h5", close=container.close)
    except BaseException:
        container.close()
        raise


def tenx_mtx_source(path: str | Path) -> CompositeSource:
    """Open a folder with ``matrix.mtx``, ``barcodes.tsv`` and ``features.tsv`` or ``genes.tsv``, each plain or ``.gz``.

    The text is read once, through temporary files where it is large; a matrix of cells by features is turned.

    Raises
    ------
    NotFoundError
        If one of the files is absent.
    SourceError
        If they do not fit together or a line cannot be read.
    """
    folder = Path(path)
    barcodes = read_table(find_part(folder, "barcodes.tsv"), ("barcode",))
    table = read_table(find_part(folder, "features.tsv", "genes.tsv"), ("id", "symbol", "feature_types"))
    names = barcodes["barcode"]
    place = MatrixLocation(str(folder), "matrix.mtx", lambda row: names[row])
    rows = MarketRows(find_part(folder, "matrix.mtx"), (len(names), len(table["id"])), place)
    parts = _split(lambda: rows, table, lambda: np.array(names, dtype=object), {})
    return CompositeSource(parts, name=folder.name, uri=str(folder), format="10x-mtx")


def is_tenx(container: Container) -> bool:
    """Say whether an HDF5 file has the groups that Cell Ranger writes."""
    return container.get("matrix/barcodes") is not None or bool(_genomes(container))


def _genomes(container: Container) -> list[str]:
    return [
        name
        for name in container.names("")
        if not is_array(container.get(name)) and {"barcodes", "genes", "indptr"} <= set(container.names(name))
    ]


def _genome_group(container: Container, genome: str | None) -> str:
    genomes = _genomes(container)
    if genome is not None and genome in genomes:
        return genome
    if genome is None and len(genomes) == 1:
        return genomes[0]
    if not genomes:
        raise SourceError(f"{container.uri}: there is neither a group 'matrix' nor a genome; it is no 10x count file.")
    raise SourceError(
        f"{container.uri} holds the genomes {genomes}, and {genome!r} was asked for; choose one with genome=."
    )


def _h5_parts(container: Container, group: str) -> SourceParts:
    shape = container.whole(f"{group}/shape", 2)
    n_features, n_cells = int(shape[0]), int(shape[1])
    arrays = [container.get(f"{group}/{name}") for name in ("indptr", "indices", "data")]
    if not all(is_array(array) for array in arrays):
        raise SourceError(f"{container.uri}: {group} lacks one of indptr, indices, data; the file is not complete.")
    barcodes = partial(_texts, container, f"{group}/barcodes", n_cells)
    place = MatrixLocation(container.uri, group, lambda row: str(barcodes()[row]))

    def rows() -> CsrRows:
        return CsrRows(SparseArrays(arrays[0], arrays[1], arrays[2], (n_cells, n_features)), place)

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
        if is_array(node) and node.shape == (n,) and node.dtype.kind in "SO":
            table[FIELDS.get(name, name)] = _texts(container, f"{group}/features/{name}", n)
        else:
            left_out[f"features/{name}"] = f"array {node.shape}" if is_array(node) else "group"
    return table, left_out


def _texts(container: Container, path: str, n: int) -> NDArray[Any]:
    values = container.whole(path, n)
    return np.array([v.decode(errors="replace") if isinstance(v, bytes) else str(v) for v in values], dtype=object)


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
        features = {"var": partial(_feature_frame, table, np.arange(n_features))}
        return SourceParts(whole.shape[0], lambda: _cell_frame(barcodes()), tuple(parts), features, left_out)
    parts, features = [], {}
    for kind in types:
        columns = np.flatnonzero(kinds == kind)
        parts.append(MatrixPart.of(f"X:{kind}", ColumnSubset(reader(), columns), f"var:{kind}", SPACES.get(kind, "")))
        features[f"var:{kind}"] = partial(_feature_frame, table, columns)
    return SourceParts(whole.shape[0], lambda: _cell_frame(barcodes()), tuple(parts), features, left_out)


def _cell_frame(names: NDArray[Any]) -> "pd.DataFrame":
    import pandas as pd

    return pd.DataFrame(index=pd.Index(names, dtype=object))


def _feature_frame(table: Mapping[str, Any], columns: NDArray[np.int64]) -> "pd.DataFrame":
    import pandas as pd

    chosen = {name: np.asarray(values, dtype=object)[columns] for name, values in table.items()}
    index = pd.Index(chosen.pop("id"), dtype=object)
    return pd.DataFrame(chosen, index=index)

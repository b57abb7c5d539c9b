"""Loom files (specifications 2 and 3) as a source: features by cells in HDF5, read as cells by features."""

import html
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.formats.anndata.source import describe_node
from raggedatlas.formats.composite_source import CompositeSource, MatrixPart, SourceParts, open_composite
from raggedatlas.formats.containers import Container, check_whole, decode_texts, is_array, open_hdf5
from raggedatlas.formats.matrix_readers import NUMBER_KINDS, DenseRows, MatrixLocation
from raggedatlas.model.batch import CsrBlock, sparse_dtype
from raggedatlas.model.protocols import MatrixForm
from raggedatlas.store.location import AnyPath

if TYPE_CHECKING:
    import pandas as pd
    from scipy.sparse import csr_matrix

CELL_NAMES = ("CellID", "obs_names", "cell_names", "barcode")
FEATURE_NAMES = ("Gene", "var_names", "gene_names", "Accession")
"""Attributes that name cells and features; of several in a file the first counts, and the others become columns."""

REFERENCE = re.compile(r"&#?\w+;")
"""A character as XML writes it, which is how text of fixed length holds what is not ASCII."""


def loom_source(path: AnyPath) -> CompositeSource:
    """Open a loom file; its matrices are read in blocks of cells.

    The main matrix becomes X and layers keep their names, both as sparse matrices of cells by features in their own
    dtype. Attributes become columns of `obs` and `var`, those of several axes members of `obsm` and `varm`, graphs
    members of `obsp` and `varp`, and attributes of the file members of `uns`.
    """
    return open_composite(open_hdf5(path), _read_parts, path, "loom")


def _read_parts(container: Container) -> SourceParts:
    """Describe a loom file, group by group."""
    lacking = sorted({"matrix", "row_attrs", "col_attrs"} - set(container.names("")))
    if lacking:
        raise SourceError(f"{container.uri} is no loom file: it has no {', '.join(lacking)}.")
    left_out: dict[str, str] = {}
    elements: dict[str, Callable[[], Any]] = {}

    def place(path: str) -> MatrixLocation:
        return MatrixLocation(container.uri, path, lambda row: f"number {row + 1}")

    def stored_shape(path: str) -> tuple[int, int]:
        node = container.get(path)
        if not is_array(node) or len(node.shape or ()) != 2:
            raise SourceError(
                f"{container.uri}: {path} is {describe_node(node)}, where a matrix of features by cells belongs."
            )
        return int(node.shape[0]), int(node.shape[1])

    def sort_axis(axis: str, n: int, known: tuple[str, ...]) -> tuple[Callable[[], "pd.DataFrame"], list[MatrixPart]]:
        """Sort the attributes and graphs of one axis into columns, matrices and elements."""
        members, pairs = ("obsm", "obsp") if axis == "col" else ("varm", "varp")
        columns, matrices = [], []
        for name in container.names(f"{axis}_attrs"):
            path = f"{axis}_attrs/{name}"
            node = container.get(path)
            if not is_array(node) or node.dtype.kind not in f"{NUMBER_KINDS}SO":
                left_out[path] = describe_node(node)
                continue
            if not node.shape or (n and not node.size):
                left_out[path] = "attribute without a value"
                continue
            check_whole(container.uri, path, node, n)
            if len(node.shape) == 1:
                columns.append(name)
            elif node.dtype.kind in NUMBER_KINDS:
                matrices.append(MatrixPart.of(f"{members}/{name}", DenseRows(node, place(path))))
            else:
                elements[f"{members}/{name}"] = partial(_values, container, path)
        for name in container.names(f"{axis}_graphs"):
            elements[f"{pairs}/{name}"] = partial(_graph, container, f"{axis}_graphs/{name}", n)
            left_out[f"{pairs}/{name}"] = "graph"
        index = next((name for name in known if name in columns), "")
        return partial(_frame, container, f"{axis}_attrs", columns, index, n), matrices

    n_features, n_cells = stored_shape("matrix")
    cells, embeddings = sort_axis("col", n_cells, CELL_NAMES)
    features, loadings = sort_axis("row", n_features, FEATURE_NAMES)
    paths = {"X": "matrix", **{f"layers/{name}": f"layers/{name}" for name in container.names("layers")}}
    matrices = []
    for key, path in paths.items():
        if stored_shape(path) != (n_features, n_cells):
            raise SourceError(
                f"{container.uri}: {path} has shape {stored_shape(path)}, but the main matrix has {(n_features, n_cells)}; write "
                "the file again."
            )
        rows = TransposedRows(container.get(path), place(path))
        matrices.append(MatrixPart.of(key, rows, "var", "gene_expression"))
    # Specification 3 has them as arrays in `attrs`, earlier ones as attributes of the root.
    for name in container.names("attrs"):
        node = container.get(f"attrs/{name}")
        if is_array(node) and node.shape is not None:
            elements[f"uns/{name}"] = partial(_values, container, f"attrs/{name}")
        else:
            left_out[f"attrs/{name}"] = "attribute without a value" if is_array(node) else "group"
    for name, value in container.root.attrs.items():
        if getattr(value, "shape", ()) is None:
            left_out[f"attrs/{name}"] = "attribute without a value"
            continue
        elements.setdefault(f"uns/{name}", partial(_plain, value, f"{container.uri}: attrs/{name}"))
    whole = (*matrices, *embeddings)
    return SourceParts(n_cells, cells, whole, {"var": features}, left_out, others=tuple(loadings), elements=elements)


def _frame(container: Container, group: str, columns: list[str], index: str, n: int) -> "pd.DataFrame":
    import pandas as pd

    values = {name: _values(container, f"{group}/{name}") for name in columns}
    names = [str(name) for name in (values.pop(index) if index else range(n))]
    return pd.DataFrame(values, index=pd.Index(names, dtype=str))


def _values(container: Container, path: str) -> Any:  # noqa: ANN401  (an array, or a single value)
    return _plain(container.whole(path), f"{container.uri}: {path}")


def _plain(value: Any, what: str) -> Any:  # noqa: ANN401  (an array, or a single value)
    """Return values with bytes decoded; text of fixed length has what is not ASCII as XML references."""
    array = np.asarray(value)
    if array.dtype.kind in NUMBER_KINDS:
        return value
    texts = decode_texts(array.ravel(), what)
    # h5py gives text of variable length, which is UTF-8, as `bytes` and that of fixed length as `numpy.bytes_`.
    if array.dtype.kind == "S" and type(value) is not bytes:
        texts = [REFERENCE.sub(lambda match: html.unescape(match[0]), text) for text in texts]
    return np.array(texts, dtype=object).reshape(array.shape) if array.shape else texts[0]


def _graph(container: Container, path: str, n: int) -> "csr_matrix":
    """Read a graph, whose edges are stored as the numbers of both ends and a weight."""
    from scipy.sparse import csr_matrix

    heads, tails, weights = (container.whole(f"{path}/{name}") for name in ("a", "b", "w"))
    ends = np.array([heads, tails]) if heads.shape == tails.shape == weights.shape else np.empty((0, 0))
    if ends.ndim != 2 or len(ends) != 2 or ends.dtype.kind not in "iu" or ((ends < 0) | (ends >= n)).any():
        raise SourceError(
            f"{container.uri}: {path} is no graph of {n:,} nodes: a, b and w must be as long as another, and a and b numbers of "
            "nodes from 0. Write it again."
        )
    weights = weights.astype(sparse_dtype(weights.dtype), copy=False)
    return csr_matrix((weights, (heads.astype(np.int64), tails.astype(np.int64))), shape=(n, n))


class _Transposed:
    """An HDF5 matrix with its axes exchanged, as far as `SequentialArray` needs it."""

    def __init__(self, dataset: Any) -> None:  # noqa: ANN401  (an h5py.Dataset)
        self._dataset = dataset
        self.shape, self.dtype = dataset.shape[::-1], dataset.dtype
        self.chunks = dataset.chunks and dataset.chunks[::-1]

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        found: NDArray[Any] = self._dataset[:, rows].T
        return found


class TransposedRows:
    """Reads a dense matrix of features by cells as a sparse one of cells by features; holds some columns of chunks in memory."""

    form: MatrixForm = "csr"
    n_entries: int | None = None

    def __init__(self, dataset: Any, place: MatrixLocation) -> None:  # noqa: ANN401
        self._dense = DenseRows(_Transposed(dataset), place)
        self.shape: tuple[int, ...] = self._dense.shape
        self.dtype = sparse_dtype(self._dense.dtype)

    def stop(self, start: int, stop: int) -> int:
        """Return the end of the next block."""
        return self._dense.stop(start, stop)

    def read(self, start: int, stop: int) -> CsrBlock:
        """Read rows ``[start, stop)``, zeros left out."""
        from scipy.sparse import csr_array, vstack

        parts = [csr_array((0, self.shape[1]), dtype=self.dtype)]
        while start < stop:
            # All rows may be requested at once, and the matrix must never be dense in memory.
            end = self._dense.stop(start, stop)
            part = self._dense.read(start, end).layers["values"]
            parts.append(csr_array(part.astype(self.dtype, copy=False)))
            start = end
        rows = vstack(parts, format="csr")
        return CsrBlock(rows.indptr.astype(np.int64), rows.indices, {"values": rows.data}, self.shape[1])

    def close(self) -> None:
        """Release the cached chunk."""
        self._dense.close()

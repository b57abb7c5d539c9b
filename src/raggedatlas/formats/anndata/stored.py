"""One AnnData in an HDF5 file or Zarr folder: its matrices as row readers, its frames, and what else it holds."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from raggedatlas.errors import SourceError
from raggedatlas.formats.anndata.elements import columns_listed, read_element
from raggedatlas.formats.anndata.frames import frame_length, index_name, open_table, read_frame, unlisted_columns
from raggedatlas.formats.composite_source import SPACES, MatrixPart, SourceParts
from raggedatlas.formats.containers import Container, attribute, is_array
from raggedatlas.formats.matrix_readers import (
    NUMBER_KINDS,
    CscRows,
    CsrRows,
    DenseRows,
    MatrixLocation,
    RowReader,
    SparseArrays,
)

if TYPE_CHECKING:
    import pandas as pd

KNOWN = {"X", "layers", "obs", "obsm", "obsp", "raw", "raw.X", "raw.var", "raw.varm", "uns", "var", "varm", "varp"}


def read_stored_parts(container: Container, prefix: str = "") -> SourceParts:
    """Describe an AnnData that stands under `prefix` (empty, or such as ``"mod/rna/"``).

    Raises
    ------
    SourceError
        If it has no `obs`, or a matrix does not fit `obs` and `var`.
    """
    return _Stored(container, prefix).parts()


def columns_of(names: "list[str]") -> "pd.DataFrame":
    """Make a frame of features that have names and nothing else."""
    import pandas as pd

    return pd.DataFrame(index=pd.Index(names, dtype=object))


def space_of_types(types: "set[str]") -> str:
    """Return the space of a matrix of one 10x feature type; gene expression if mixed or unknown."""
    return SPACES.get(next(iter(types)), "gene_expression") if len(types) == 1 else "gene_expression"


class _Stored:
    def __init__(self, container: Container, prefix: str) -> None:
        self.container, self.prefix = container, prefix
        self.root = container.get(prefix.rstrip("/")) if prefix else container.root
        n_cells = frame_length(container, f"{prefix}obs")
        if n_cells is None:
            raise SourceError(
                f"{container.uri}: {prefix or 'the root '}holds no table of cells (obs) but "
                f"{list(container.names(prefix.rstrip('/')))}; it is no AnnData."
            )
        self.n_cells = n_cells
        self.n_features = frame_length(container, f"{prefix}var")
        self.matrices: list[MatrixPart] = []
        self.features: dict[str, Callable[[], pd.DataFrame]] = {}
        self.left_out: dict[str, str] = {}
        self.matrices_beside: list[MatrixPart] = []
        self.elements: dict[str, Callable[[], Any]] = {}
        self._names: list[str] | None = None

    def parts(self) -> SourceParts:
        if self.n_features is not None:
            self.features["var"] = self._frame("var")
        self._main_matrices()
        self._raw()
        self._embeddings()
        self._others()
        return SourceParts(
            self.n_cells,
            self._frame("obs"),
            tuple(self.matrices),
            self.features,
            self.left_out,
            others=tuple(self.matrices_beside),
            elements=self.elements,
            tables={"obs": partial(open_table, self.container, f"{self.prefix}obs")},
        )

    def _get(self, path: str) -> Any:  # noqa: ANN401
        return self.container.get(self.prefix + path)

    def _members(self, path: str) -> tuple[str, ...]:
        return self.container.names(self.prefix + path)

    def _frame(self, path: str) -> "Callable[[], pd.DataFrame]":
        return partial(read_frame, self.container, self.prefix + path, f"{self.prefix}uns")

    def _place(self, path: str) -> MatrixLocation:
        return MatrixLocation(self.container.uri, self.prefix + path, self._cell_name)

    def _cell_name(self, row: int) -> str:
        if self._names is None:
            self._names = [str(name) for name in self._frame("obs")().index]
        return self._names[row]

    def _main_matrices(self) -> None:
        space = self._space()
        for path in ("X", *(f"layers/{name}" for name in self._members("layers"))):
            rows = self._rows(path)
            if rows is None:
                continue
            self._check_shape(path, rows, self.n_features)
            self._add(path, rows, "var" if self.n_features is not None else "", space)

    def _raw(self) -> None:
        dotted = self._get("raw.X") is not None
        x, var, varm = ("raw.X", "raw.var", "raw.varm") if dotted else ("raw/X", "raw/var", "raw/varm")
        rows = self._rows(x)
        if rows is not None:
            n_features = frame_length(self.container, self.prefix + var)
            self._check_shape(x, rows, n_features)
            if n_features is not None:
                self.features["raw/var"] = self._frame(var)
            self._add("raw/X", rows, "raw/var" if n_features is not None else "", "gene_expression")
        self._beside("raw/varm", varm, (None, None))

    def _embeddings(self) -> None:
        node = self._get("obsm")
        if node is not None and is_array(node):
            for name in node.dtype.names or ():
                self._embedding(f"obsm/{name}", DenseRows(_Field(node, name), self._place(f"obsm/{name}")))
            return
        for name in self._members("obsm"):
            key = f"obsm/{name}"
            member = self._get(key)
            if attribute(member, "encoding-type") == "dataframe":
                self.elements[key] = partial(read_element, self.container, self.prefix + key)
                self._embedding(key, _frame_rows(self, key, member))
            elif is_array(member) and (len(member.shape or ()) < 2 or member.dtype.kind not in NUMBER_KINDS):
                self._whole(key, key)
            else:
                self._embedding(key, self._rows(key))

    def _embedding(self, key: str, rows: RowReader | None) -> None:
        if rows is None:
            self._whole(key, key)
            return
        self._check_shape(key, rows, None)
        self._add(key, rows, self._embedding_names(key, rows), "")

    def _embedding_names(self, key: str, rows: RowReader) -> str:
        if key in self.features:
            return key
        name = key.removeprefix("obsm/")
        for candidate in (f"{name}_names", f"{name.rpartition('_')[0]}_names"):
            stored = self._get(f"uns/{candidate}")
            if stored is not None and is_array(stored) and stored.shape == (rows.shape[1],):
                self.features[key] = partial(self._named, f"uns/{candidate}", rows.shape[1])
                self.left_out[f"uns/{candidate}"] = f"names of the columns of {key}"
                return key
        return ""

    def _named(self, path: str, length: int) -> "pd.DataFrame":
        values = self.container.whole(self.prefix + path, length)
        return columns_of([v.decode() if isinstance(v, bytes) else str(v) for v in values])

    def _others(self) -> None:
        n_var = self.n_features
        for group, shape in (("obsp", (self.n_cells, self.n_cells)), ("varm", (n_var, None)), ("varp", (n_var, n_var))):
            self._beside(group, group, shape)
        self._unstructured()
        for name in self.container.names(self.prefix.rstrip("/")):
            if name not in KNOWN:
                self.left_out[name] = describe_node(self._get(name))
        for frame in ("obs", "var"):
            for path, why in unlisted_columns(self.container, self.prefix + frame).items():
                self.left_out[path.removeprefix(self.prefix)] = why

    def _beside(self, key: str, path: str, shape: tuple[int | None, int | None]) -> None:
        """Take the members of obsp, varm or varp: matrices in blocks, all else whole."""
        node = self._get(path)
        if node is not None and is_array(node):
            for name in node.dtype.names or ():
                at = f"{key}/{name}"
                self._put_beside(at, DenseRows(_Field(node, name), self._place(at)), shape)
            return
        for name in self._members(path):
            self._member_beside(f"{key}/{name}", f"{path}/{name}", shape)

    def _member_beside(self, key: str, path: str, shape: tuple[int | None, int | None]) -> None:
        node = self._get(path)
        form = attribute(node, "encoding-type")
        numbers = is_array(node) and len(node.shape or ()) > 1 and node.dtype.kind in NUMBER_KINDS
        if numbers or form in ("csr_matrix", "csc_matrix") or "h5sparse_format" in node.attrs:
            rows = self._rows(path, shape[0])
            assert rows is not None
            self.left_out.setdefault(key, describe_node(node))
            self._put_beside(key, rows, shape)
        else:
            self._whole(key, path)

    def _put_beside(self, key: str, rows: RowReader, shape: tuple[int | None, int | None]) -> None:
        if any(wanted not in (None, n) for wanted, n in zip(shape, rows.shape, strict=False)):
            raise SourceError(
                f"{self.container.uri}: {self.prefix}{key} has shape {rows.shape}, where {shape} was expected from the tables "
                "of cells and features (None is any); the file does not fit together. Write it again."
            )
        self.left_out.setdefault(key, f"{rows.form} {rows.shape} {rows.dtype}")
        self.matrices_beside.append(MatrixPart.of(key, rows))

    def _whole(self, key: str, path: str) -> None:
        self.left_out.setdefault(key, describe_node(self._get(path)))
        self.elements[key] = partial(read_element, self.container, self.prefix + path)

    def _unstructured(self) -> None:
        """Take `uns`, but for what it held before there were places of its own: graphs, and categories of columns."""
        old = [node for node in (self._get("obs"), self._get("var")) if node is not None and is_array(node)]
        spent = {f"{name}_categories" for node in old for name in node.dtype.names or ()}
        for name in self._members("uns"):
            if name in spent:
                self.left_out.setdefault(f"uns/{name}", "categories of a column")
            elif name == "neighbors" and (graphs := self._graphs()):
                for graph in graphs:
                    self._member_beside(f"obsp/{graph}", f"uns/neighbors/{graph}", (self.n_cells, self.n_cells))
                self.left_out.setdefault("uns/neighbors", describe_node(self._get("uns/neighbors")))
                self.elements["uns/neighbors"] = partial(self._without, "uns/neighbors", graphs)
            else:
                self._whole(f"uns/{name}", f"uns/{name}")

    def _graphs(self) -> list[str]:
        found = [(name, self._get(f"uns/neighbors/{name}")) for name in ("connectivities", "distances")]
        return [
            name
            for name, node in found
            if node is not None
            and (
                len(node.shape or ()) == 2
                if is_array(node)
                else {"data", "indices", "indptr"} <= set(self._members(f"uns/neighbors/{name}"))
            )
        ]

    def _without(self, path: str, names: list[str]) -> dict[str, Any]:
        kept = [name for name in self._members(path) if name not in names]
        return {name: read_element(self.container, f"{self.prefix}{path}/{name}") for name in kept}

    def _add(self, key: str, rows: RowReader, features: str, space: str) -> None:
        if 0 in rows.shape[1:]:
            self.left_out[key] = "matrix without columns"
            self.matrices_beside.append(MatrixPart.of(key, rows, features))
        else:
            self.matrices.append(MatrixPart.of(key, rows, features, space))

    def _rows(self, path: str, n_rows: int | None = None) -> RowReader | None:
        node = self._get(path)
        if node is None or attribute(node, "encoding-type") == "null" or (is_array(node) and node.shape is None):
            return None
        place = self._place(path)
        if is_array(node):
            return DenseRows(node, place)
        form = attribute(node, "encoding-type") or f"{attribute(node, 'h5sparse_format')}_matrix"
        if form not in ("csr_matrix", "csc_matrix"):
            if path.startswith("obsm/"):
                return None
            raise SourceError(
                f"{place.uri}: {place.element} is stored as {describe_node(node)!r}; a dense array, csr_matrix or csc_matrix "
                "can be read. Convert it, e.g. with scipy's tocsr, or remove it."
            )
        arrays = [self._get(f"{path}/{name}") for name in ("indptr", "indices", "data")]
        stated = node.attrs.get("shape", node.attrs.get("h5sparse_shape"))
        if stated is None or len(stated) != 2 or not all(is_array(a) and a.shape is not None for a in arrays):
            raise SourceError(
                f"{place.uri}: {place.element} lacks one of indptr, indices, data or its shape; write the file again."
            )
        shape = (int(stated[0]), int(stated[1]))
        if n_rows is None and not path.startswith(("raw/varm", "raw.varm")):
            self._check_extent(path, shape)
        maker = CsrRows if form == "csr_matrix" else CscRows
        return maker(SparseArrays(arrays[0], arrays[1], arrays[2], shape), place)

    def _check_extent(self, path: str, shape: tuple[int, int]) -> None:
        if shape[0] != self.n_cells or shape[1] < 0:
            raise SourceError(
                f"{self.container.uri}: {self.prefix}{path} has shape {shape}, but obs has {self.n_cells:,} cells; "
                "the file does not fit together. Write it again."
            )

    def _check_shape(self, path: str, rows: RowReader, n_features: int | None) -> None:
        embedding = path.startswith("obsm/")
        expected = (self.n_cells, n_features) if n_features is not None else (self.n_cells, "any")
        fits = len(rows.shape) == 2 or (embedding and len(rows.shape) > 2)
        if not fits or rows.shape[0] != self.n_cells or (n_features is not None and rows.shape[1] != n_features):
            raise SourceError(
                f"{self.container.uri}: {self.prefix}{path} has shape {rows.shape}, where {expected} was expected from its "
                "tables of cells and features; the file does not fit together. Write it again."
            )

    def _space(self) -> str:
        for name in ("feature_types", "feature_type"):
            node = self._get(f"var/{name}")
            if node is not None:
                values = read_element(self.container, f"{self.prefix}var/{name}")
                return space_of_types({str(value) for value in set(np.asarray(values, dtype=object).tolist())})
        return "gene_expression"


class _Field:
    """One field of a structured array, sliced like an array of its own."""

    def __init__(self, dataset: Any, name: str) -> None:  # noqa: ANN401
        self._dataset, self._name = dataset, name
        inner = dataset.dtype[name]
        self.shape = (*dataset.shape, *inner.shape)
        self.dtype = inner.base

    def __getitem__(self, rows: slice) -> Any:  # noqa: ANN401
        return self._dataset[rows][self._name]


class _Columns:
    """Number columns of a stored frame, side by side."""

    def __init__(self, columns: list[Any], n_rows: int) -> None:
        self._columns = columns
        self.shape = (n_rows, len(columns))
        self.dtype = np.result_type(*(column.dtype for column in columns)) if columns else np.dtype(float)

    def __getitem__(self, rows: slice) -> Any:  # noqa: ANN401
        return np.stack([column[rows] for column in self._columns], axis=1)


def _frame_rows(stored: _Stored, key: str, group: Any) -> RowReader | None:  # noqa: ANN401
    order = columns_listed(group)
    columns = [stored._get(f"{key}/{name}") for name in order if name != index_name(group)]
    numeric = all(column is not None and is_array(column) and column.dtype.kind in "biuf" for column in columns)
    n_rows = frame_length(stored.container, stored.prefix + key)
    if not numeric or n_rows is None or any(column.shape != (n_rows,) for column in columns):
        return None
    stored.features[key] = partial(columns_of, order)
    return DenseRows(_Columns(columns, n_rows), stored._place(key))


def describe_node(node: Any) -> str:  # noqa: ANN401
    """Say in a few words what a stored element is.

    Examples
    --------
    >>> describe_node(None)
    'nothing'
    """
    if node is None:
        return "nothing"
    encoding = attribute(node, "encoding-type")
    if is_array(node):
        shape = "" if not node.shape else f" {tuple(node.shape)}"
        return (
            f"{encoding or 'array'}{shape} {node.dtype}"
            if encoding not in ("string", "string-array")
            else encoding + shape
        )
    # Only of a sparse matrix does this attribute say a shape; elsewhere it is whatever the writer of the group means by it.
    sparse = encoding in ("csr_matrix", "csc_matrix")
    stated = node.attrs.get("shape") if sparse else None
    shape = "" if stated is None else f" {tuple(int(n) for n in stated)}"
    return f"{encoding or 'group'}{shape}"

"""Sources for AnnData: `.h5ad` files, Zarr folders and objects."""

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raggedatlas.errors import SourceError
from raggedatlas.formats.anndata.elements import (
    columns_listed,
    entries_fit,
    frame_length,
    index_name,
    open_table,
    read_element,
    read_frame,
    sparse_form,
    stated_shape,
    unlisted_columns,
)
from raggedatlas.formats.composite_source import CompositeSource, MatrixPart, SourceParts, open_composite, space_of
from raggedatlas.formats.containers import (
    MAX_ELEMENT_BYTES,
    MEMBERS,
    Container,
    attribute,
    check_elements,
    decode_texts,
    is_array,
    open_hdf5,
    open_object,
    open_zarr,
)
from raggedatlas.formats.matrix_readers import (
    NUMBER_KINDS,
    CscRows,
    CsrRows,
    DenseRows,
    LazyRows,
    MatrixLocation,
    RowReader,
)
from raggedatlas.store.location import AnyPath

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData


def h5ad_source(path: AnyPath, *, max_element_bytes: int = MAX_ELEMENT_BYTES) -> CompositeSource:
    """Open an `.h5ad` file of any age; its matrices are streamed."""
    return open_composite(open_hdf5(path), partial(read_stored_parts, limit=max_element_bytes), path, "h5ad")


def zarr_source(path: AnyPath, *, max_element_bytes: int = MAX_ELEMENT_BYTES) -> CompositeSource:
    """Open an AnnData in a Zarr folder, format 2 or 3, sharded or not, or in a zip file of such a folder."""
    return open_composite(open_zarr(path), partial(read_stored_parts, limit=max_element_bytes), path, "zarr")


def group_source(group: Any) -> CompositeSource:  # noqa: ANN401  (an h5py.Group or zarr.Group)
    """Return a source for an open HDF5 file or Zarr group with an AnnData; it stays open."""
    container = open_object(group)
    # `open_object` names a group within a file `file:group`.
    name = Path(container.uri.rpartition(":")[2]).stem or "group"
    form = "h5ad" if hasattr(group, "id") else "zarr"
    return open_composite(container, read_stored_parts, Path(container.uri), form, name)


def object_source(adata: "AnnData") -> CompositeSource:
    """Return a source for an AnnData in memory, a view, or a backed one."""
    if type(adata.obs).__name__ == "Dataset2D":
        raise SourceError(
            "The AnnData is one of read_lazy, whose tables are not in memory; give the path of its file, which is read in blocks "
            "too, or adata.to_memory()."
        )
    uri = str(Path(str(adata.filename)).absolute()) if adata.isbacked else ""
    name = Path(uri).stem if uri else "anndata"
    return CompositeSource(read_object_parts(adata), name=name, uri=uri, format="anndata")


def read_stored_parts(container: Container, prefix: str = "", limit: int = MAX_ELEMENT_BYTES) -> SourceParts:
    """Describe an AnnData below `prefix` (empty, or such as ``"mod/rna/"``).

    Raises `SourceError` if it has no `obs`, or a matrix does not fit `obs` and `var`; `LimitError` if elements outside
    of matrices declare more than `limit` bytes.
    """
    stored = _Stored(container, prefix)
    parts = stored.parts()
    check_elements(container, stored.read_whole, limit)
    return parts


def columns_of(names: "list[str]") -> "pd.DataFrame":
    """Make a frame of features that have names and nothing else."""
    import pandas as pd

    return pd.DataFrame(index=pd.Index(names, dtype=str))


class _Contents:
    """Contents of an AnnData, collected element by element: base of the readers of files and of objects."""

    def __init__(self) -> None:
        self.matrices: list[MatrixPart] = []
        self.others: list[MatrixPart] = []
        self.features: dict[str, Callable[[], pd.DataFrame]] = {}
        self.left_out: dict[str, str] = {}
        self.elements: dict[str, Callable[[], Any]] = {}

    def add(self, key: str, rows: RowReader, features: str, space: str) -> None:
        """Add a matrix; one without columns only as an element."""
        if 0 in rows.shape[1:]:
            self.left_out[key] = "matrix without columns"
            self.others.append(MatrixPart.of(key, rows, features))
        else:
            self.matrices.append(MatrixPart.of(key, rows, features, space))

    def source_parts(self, n_cells: int, cells: "Callable[[], pd.DataFrame]", **tables: Any) -> SourceParts:  # noqa: ANN401
        """Return all of it."""
        return SourceParts(
            n_cells,
            cells,
            tuple(self.matrices),
            self.features,
            self.left_out,
            others=tuple(self.others),
            elements=self.elements,
            tables=tables,
        )


def _name_keys(name: str) -> tuple[str, str]:
    """Return the keys of ``uns`` under which older files have the names of the columns of an array of ``obsm``."""
    return f"{name}_names", f"{name.rpartition('_')[0]}_names"


class _Stored(_Contents):
    def __init__(self, container: Container, prefix: str) -> None:
        super().__init__()
        self.container, self.prefix = container, prefix
        n_cells = frame_length(container, f"{prefix}obs")
        if n_cells is None:
            raise SourceError(
                f"{container.uri}: {prefix or 'the root '}holds no table of cells (obs) but "
                f"{list(container.names(prefix.rstrip('/')))}; it is no AnnData."
            )
        self.n_cells = n_cells
        self.n_features = frame_length(container, f"{prefix}var")
        self.read_whole: list[str] = []

    def parts(self) -> SourceParts:
        if self.n_features is not None:
            self.features["var"] = self._frame("var")
        types = next((name for name in ("feature_types", "feature_type") if self._get(f"var/{name}") is not None), "")
        space = "gene_expression"
        if types:
            values = read_element(self.container, f"{self.prefix}var/{types}")
            space = space_of(np.asarray(values, dtype=object).tolist())
        for path in ("X", *(f"layers/{name}" for name in self._members("layers"))):
            rows = self._rows(path)
            if rows is None:
                continue
            self._check_matrix(path, rows, self.n_features)
            self.add(path, rows, "var" if self.n_features is not None else "", space)
        self._raw()
        self._embeddings()
        n_var = self.n_features
        for group, shape in (("obsp", (self.n_cells, self.n_cells)), ("varm", (n_var, None)), ("varp", (n_var, n_var))):
            self._group(group, group, shape)
        self._unstructured()
        for name in self.container.names(self.prefix.rstrip("/")):
            if name not in (*MEMBERS, "raw.X", "raw.var", "raw.varm"):
                self.left_out[name] = describe_node(self._get(name))
        for frame in ("obs", "var"):
            for path, why in unlisted_columns(self.container, self.prefix + frame).items():
                self.left_out[path.removeprefix(self.prefix)] = why
        table = partial(open_table, self.container, f"{self.prefix}obs")
        return self.source_parts(self.n_cells, self._frame("obs"), obs=table)

    def _get(self, path: str) -> Any:  # noqa: ANN401
        return self.container.get(self.prefix + path)

    def _members(self, path: str) -> tuple[str, ...]:
        return self.container.names(self.prefix + path)

    def _frame(self, path: str) -> "Callable[[], pd.DataFrame]":
        return partial(read_frame, self.container, self.prefix + path, f"{self.prefix}uns")

    def _place(self, path: str) -> MatrixLocation:
        return MatrixLocation(self.container.uri, self.prefix + path, lambda row: self._names[row])

    @cached_property
    def _names(self) -> list[str]:
        # Only messages contain names, so they are read when the first one does.
        return [str(name) for name in self._frame("obs")().index]

    def _raw(self) -> None:
        dotted = self._get("raw.X") is not None
        x, var, varm = ("raw.X", "raw.var", "raw.varm") if dotted else ("raw/X", "raw/var", "raw/varm")
        rows = self._rows(x)
        if rows is not None:
            n_features = frame_length(self.container, self.prefix + var)
            self._check_matrix(x, rows, n_features)
            if n_features is not None:
                self.features["raw/var"] = self._frame(var)
            self.add("raw/X", rows, "raw/var" if n_features is not None else "", "gene_expression")
        elif self._get(var) is not None:
            raise SourceError(
                f"{self.container.uri}: {self.prefix}{var} has no {x} beside it; write raw again, or remove it."
            )
        self._group("raw/varm", varm, (None, None))

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
                # Registered twice: the element keeps names and dtypes, the matrix can be read in blocks.
                self.elements[key] = partial(read_element, self.container, self.prefix + key)
                names = [column for column in columns_listed(member) if column != index_name(member)]
                columns = [self._get(f"{key}/{column}") for column in names]
                n_rows = frame_length(self.container, self.prefix + key)
                # Categorical and nullable columns are groups; a frame that has one is an element only.
                numeric = all(is_array(column) and column.dtype.kind in "biuf" for column in columns)
                if numeric and n_rows is not None and all(column.shape == (n_rows,) for column in columns):
                    self.features[key] = partial(columns_of, names)
                    self._embedding(key, DenseRows(_Columns(columns, n_rows), self._place(key)))
                else:
                    self._embedding(key, None)
            elif is_array(member) and (len(member.shape or ()) < 2 or member.dtype.kind not in NUMBER_KINDS):
                self._whole(key, key)
            else:
                self._embedding(key, self._rows(key))

    def _embedding(self, key: str, rows: RowReader | None) -> None:
        if rows is None:
            self._whole(key, key)
            return
        self._check_matrix(key, rows, None)

        def named(path: str) -> "pd.DataFrame":
            values = self.container.whole(self.prefix + path, rows.shape[1])
            return columns_of(decode_texts(values, f"{self.container.uri}: {self.prefix}{path}"))

        for candidate in () if key in self.features else _name_keys(key.removeprefix("obsm/")):
            stored = self._get(f"uns/{candidate}")
            if stored is not None and is_array(stored) and stored.shape == (rows.shape[1],):
                self.features[key] = partial(named, f"uns/{candidate}")
                self.left_out[f"uns/{candidate}"] = f"names of the columns of {key}"
                break
        self.add(key, rows, key if key in self.features else "", "")

    def _group(self, key: str, path: str, shape: tuple[int | None, int | None]) -> None:
        """Add the members of obsp, varm or varp: matrices in blocks, all else as complete elements."""
        node = self._get(path)
        if node is not None and is_array(node):
            for name in node.dtype.names or ():
                at = f"{key}/{name}"
                self._add_other(at, DenseRows(_Field(node, name), self._place(at)), shape)
            return
        for name in self._members(path):
            self._member(f"{key}/{name}", f"{path}/{name}", shape)

    def _member(self, key: str, path: str, shape: tuple[int | None, int | None]) -> None:
        node = self._get(path)
        form = attribute(node, "encoding-type")
        numbers = is_array(node) and len(node.shape or ()) > 1 and node.dtype.kind in NUMBER_KINDS
        if numbers or form in ("csr_matrix", "csc_matrix") or "h5sparse_format" in node.attrs:
            rows = self._rows(path, shape[0])
            assert rows is not None
            self.left_out.setdefault(key, describe_node(node))
            self._add_other(key, rows, shape)
        else:
            self._whole(key, path)

    def _add_other(self, key: str, rows: RowReader, shape: tuple[int | None, int | None]) -> None:
        self._check_shape(key, rows.shape, shape)
        self.left_out.setdefault(key, f"{rows.form} {rows.shape} {rows.dtype}")
        self.others.append(MatrixPart.of(key, rows))

    def _whole(self, key: str, path: str) -> None:
        self.left_out.setdefault(key, describe_node(self._get(path)))
        self.read_whole.append(self.prefix + path)
        self.elements[key] = partial(read_element, self.container, self.prefix + path)

    def _unstructured(self) -> None:
        """Add `uns`, except what old versions of anndata kept there: graphs, and categories of columns."""
        old = [node for node in (self._get("obs"), self._get("var")) if node is not None and is_array(node)]
        spent = {f"{name}_categories" for node in old for name in node.dtype.names or ()}
        members, sparse = self._members("uns"), {"data", "indices", "indptr"}
        # Asking a remote store for graphs that are not there costs requests.
        names = ("connectivities", "distances") if "neighbors" in members else ()
        nodes = [(name, self._get(f"uns/neighbors/{name}")) for name in names]
        graphs = [
            name
            for name, node in nodes
            if (is_array(node) and len(node.shape or ()) == 2) or sparse <= set(self._members(f"uns/neighbors/{name}"))
        ]
        for name in members:
            if name in spent:
                self.left_out.setdefault(f"uns/{name}", "categories of a column")
            elif name != "neighbors" or not graphs:
                self._whole(f"uns/{name}", f"uns/{name}")
        if graphs:
            for graph in graphs:
                self._member(f"obsp/{graph}", f"uns/neighbors/{graph}", (self.n_cells, self.n_cells))
            self.left_out.setdefault("uns/neighbors", describe_node(self._get("uns/neighbors")))
            kept = {name: f"{self.prefix}uns/neighbors/{name}" for name in self._members("uns/neighbors")}
            kept = {name: path for name, path in kept.items() if name not in graphs}
            self.read_whole += kept.values()
            self.elements["uns/neighbors"] = lambda: {
                name: read_element(self.container, path) for name, path in kept.items()
            }

    def _rows(self, path: str, n_rows: int | None = None) -> RowReader | None:
        node = self._get(path)
        if node is None or attribute(node, "encoding-type") == "null" or (is_array(node) and node.shape is None):
            return None
        place = self._place(path)
        if is_array(node):
            return DenseRows(node, place)
        form = sparse_form(node)
        if form not in ("csr_matrix", "csc_matrix"):
            # None makes `_embedding` keep the element as a whole, for instance an awkward array.
            if path.startswith("obsm/"):
                return None
            raise SourceError(
                f"{place.uri}: {place.element} is stored as {describe_node(node)!r}; a dense array, csr_matrix or csc_matrix "
                "can be read. Convert it, e.g. with scipy's tocsr, or remove it."
            )
        arrays = {name: self._get(f"{path}/{name}") for name in ("indptr", "indices", "data")}
        sizes = stated_shape(node)
        if sizes is None or len(sizes) != 2 or not all(is_array(a) and a.shape is not None for a in arrays.values()):
            raise SourceError(
                f"{place.uri}: {place.element} lacks one of indptr, indices, data or its shape; write the file again."
            )
        shape = (int(sizes[0]), int(sizes[1]))
        # Members of obsp, varm and varp are checked by `_add_other` instead.
        if n_rows is None and not path.startswith(("raw/varm", "raw.varm")):
            self._check_shape(path, shape, (self.n_cells, None), fits=shape[1] >= 0)
        reader = CsrRows if form == "csr_matrix" else CscRows
        return reader(arrays, shape, place)

    def _check_matrix(self, path: str, rows: RowReader, n_features: int | None) -> None:
        n_axes = len(rows.shape)
        fits = n_axes == 2 or (path.startswith("obsm/") and n_axes > 2)
        self._check_shape(path, rows.shape, (self.n_cells, n_features), fits=fits)

    def _check_shape(
        self, key: str, shape: tuple[int, ...], expected: tuple[int | None, int | None], *, fits: bool = True
    ) -> None:
        if not fits or any(size not in (None, n) for size, n in zip(expected, shape, strict=False)):
            raise SourceError(
                f"{self.container.uri}: {self.prefix}{key} has shape {shape}, where {expected} was expected from the tables of "
                "cells and features (None is any); the file does not fit together. Write it again."
            )


class _Field:
    """One field of a structured array, sliced like an array of its own."""

    def __init__(self, dataset: Any, name: str) -> None:  # noqa: ANN401
        self._dataset, self._name = dataset, name
        inner = dataset.dtype[name]
        self.shape = (*dataset.shape, *inner.shape)
        self.dtype = inner.base

    def __getitem__(self, rows: slice) -> Any:  # noqa: ANN401
        # Records are stored one after the other, so reading one field takes the bytes of all.
        return self._dataset[rows][self._name]


class _Columns:
    """Number columns of a stored frame, side by side."""

    def __init__(self, columns: list[Any], n_rows: int) -> None:
        self._columns = columns
        self.shape = (n_rows, len(columns))
        self.dtype = np.result_type(*(column.dtype for column in columns)) if columns else np.dtype(float)

    def __getitem__(self, rows: slice) -> Any:  # noqa: ANN401
        return np.stack([column[rows] for column in self._columns], axis=1)


def describe_node(node: Any) -> str:  # noqa: ANN401
    """Describe a stored element in a few words."""
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
    sizes = node.attrs.get("shape") if sparse else None
    shape = "" if sizes is None else f" {tuple(int(n) for n in sizes)}"
    return f"{encoding or 'group'}{shape}"


def read_object_parts(adata: "AnnData") -> SourceParts:
    """Describe an AnnData object; nothing of it is copied, views and backed matrices are read in slices."""
    import pandas as pd

    found = _Contents()
    uri = str(adata.filename) if adata.isbacked else "the AnnData in memory"

    def place(key: str) -> MatrixLocation:
        return MatrixLocation(uri, key, lambda row: str(adata.obs_names[row]))

    def rows_of(key: str, get: Callable[[Any], Any]) -> RowReader:
        if not adata.is_view:
            return matrix_reader(get(adata), place(key))
        width = get(_slice(adata, 0, 1)).shape[1:]
        return LazyRows(lambda start, stop: get(_slice(adata, start, stop)), (adata.n_obs, *width), place(key))

    def add_whole(key: str, value: Any) -> None:  # noqa: ANN401
        found.left_out.setdefault(key, describe_value(value))
        found.elements[key] = partial(sound, key, value)

    # A view's frame is of a subclass.
    found.features["var"] = lambda: pd.DataFrame(adata.var)
    types = next((adata.var[name] for name in ("feature_types", "feature_type") if name in adata.var), None)
    space = "gene_expression" if types is None else space_of(types.unique())
    # `X` of a view copies what the view selects, so one row of it is looked at.
    if (_slice(adata, 0, 1) if adata.is_view else adata).X is not None:
        found.add("X", rows_of("X", lambda a: a.X), "var", space)
    # Since anndata 0.13 the layers contain X under None.
    for name in [key for key in adata.layers if key is not None]:
        found.add(f"layers/{name}", rows_of(f"layers/{name}", partial(_item, "layers", name)), "var", space)
    raw = adata.raw
    if raw is not None:
        found.features["raw/var"] = lambda: pd.DataFrame(raw.var)
        rows = matrix_reader(raw.X, place("raw/X"))
        if rows.shape != (adata.n_obs, raw.n_vars):
            raise SourceError(
                f"raw/X has shape {rows.shape}, where {(adata.n_obs, raw.n_vars)} was expected; set adata.raw anew."
            )
        found.add("raw/X", rows, "raw/var", "gene_expression")
        for name, value in raw.varm.items():
            add_whole(f"raw/varm/{name}", value)
    for name, value in adata.obsm.items():
        key = f"obsm/{name}"
        if isinstance(value, pd.DataFrame):
            found.elements[key] = partial(pd.DataFrame, value)
            plain = all(isinstance(d, np.dtype) and d.kind in "biuf" for d in value.dtypes)
            # Booleans among numbers, and no columns at all, make a matrix of objects.
            matrix = value.to_numpy() if plain else np.empty(0, object)
            if matrix.dtype.kind not in NUMBER_KINDS:
                found.left_out[key] = describe_value(value)
                continue
            found.features[key] = partial(columns_of, [str(column) for column in value.columns])
            found.add(key, DenseRows(matrix, place(key)), key, "")
            continue
        if len(getattr(value, "shape", ())) < 2 or getattr(value, "dtype", np.dtype(object)).kind not in NUMBER_KINDS:
            add_whole(key, value)
            continue
        rows = rows_of(key, partial(_item, "obsm", name))
        for candidate in _name_keys(name):
            names = np.asarray(adata.uns.get(candidate, ()))
            if names.shape == (rows.shape[1],):
                found.features[key] = partial(columns_of, [str(n) for n in names])
                found.left_out[f"uns/{candidate}"] = f"names of the columns of {key}"
                break
        found.add(key, rows, key if key in found.features else "", "")
    for group in ("obsp", "varm", "varp", "uns"):
        for name, value in getattr(adata, group).items():
            add_whole(f"{group}/{name}", value)
    return found.source_parts(adata.n_obs, lambda: pd.DataFrame(adata.obs))


def matrix_reader(matrix: Any, place: MatrixLocation) -> RowReader:  # noqa: ANN401  (any matrix that AnnData holds)
    """Return the reader of a matrix in memory, in a backing file, or computed when sliced."""
    from scipy.sparse import issparse

    if bool(issparse(matrix)):
        matrix = matrix if matrix.format in ("csr", "csc") else matrix.tocsr()
        arrays = {"indptr": matrix.indptr, "indices": matrix.indices, "data": matrix.data}
        return (CsrRows if matrix.format == "csr" else CscRows)(arrays, matrix.shape, place)
    group = getattr(matrix, "group", None)
    if group is not None and getattr(matrix, "format", "") in ("csr", "csc"):
        shape = (int(matrix.shape[0]), int(matrix.shape[1]))
        arrays = {name: group[name] for name in ("indptr", "indices", "data")}
        return (CsrRows if matrix.format == "csr" else CscRows)(arrays, shape, place)
    if isinstance(matrix, np.ndarray) or type(matrix).__module__.partition(".")[0] in ("h5py", "zarr"):
        return DenseRows(matrix, place)
    if hasattr(matrix, "compute"):
        return LazyRows(lambda start, stop: matrix[start:stop].compute(), tuple(matrix.shape), place)
    raise SourceError(
        f"{place.uri}: {place.element} is a {type(matrix).__module__}.{type(matrix).__qualname__}; NumPy arrays, SciPy CSR "
        "and CSC matrices, backed matrices and dask arrays can be read. Convert it first."
    )


def sound(key: str, value: Any) -> Any:  # noqa: ANN401  (any element that AnnData knows)
    """Return an element with dask arrays computed and sparse matrices checked, also within mappings.

    SciPy looks only when it must at whether the parts of a matrix fit together.
    """
    from scipy.sparse import issparse

    if isinstance(value, Mapping):
        return {name: sound(f"{key}/{name}", inner) for name, inner in value.items()}
    if type(value).__module__.partition(".")[0] == "dask":
        value = value.compute()
    if bool(issparse(value)) and value.format in ("csr", "csc"):
        # `entries_fit` takes the axis of the pointers first.
        shape = value.shape if value.format == "csr" else value.shape[::-1]
        if len(value.data) != len(value.indices) or not entries_fit(value.indptr, value.indices, shape):
            raise SourceError(
                f"{key} is a sparse matrix whose pointers, indices, values and shape {value.shape} do not fit together; "
                "make it anew from its rows, columns and values."
            )
    return value


def describe_value(value: Any) -> str:  # noqa: ANN401
    """Describe an element in memory in a few words."""
    shape = "" if not isinstance(getattr(value, "shape", None), tuple) else f" {value.shape}"
    dtype = f" {value.dtype}" if isinstance(getattr(value, "dtype", None), np.dtype) else ""
    return f"{type(value).__name__}{shape}{dtype}"


def _item(group: str, name: str, adata: Any) -> Any:  # noqa: ANN401
    return getattr(adata, group)[name]


def _slice(view: Any, start: int, stop: int) -> Any:  # noqa: ANN401
    """Return rows of a view; anndata 0.12 cannot slice a view of a backed object, so the object itself is sliced."""
    if not view.isbacked:
        return view[start:stop]
    # `_oidx` may be a slice, a mask or numbers; indexing `arange` turns each into row numbers.
    whole = view._adata_ref
    return whole[np.arange(whole.n_obs)[view._oidx][start:stop], view._vidx]

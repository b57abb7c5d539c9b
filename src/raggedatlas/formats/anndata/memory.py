"""One AnnData in memory, backed by a file or a view of another: its matrices as row readers, its frames, its rest."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from raggedatlas.errors import SourceError
from raggedatlas.formats.anndata.elements import entries_fit
from raggedatlas.formats.anndata.stored import columns_of, space_of_types
from raggedatlas.formats.composite_source import MatrixPart, SourceParts
from raggedatlas.formats.matrix_readers import (
    NUMBER_KINDS,
    CscRows,
    CsrRows,
    DenseRows,
    LazyRows,
    MatrixLocation,
    RowReader,
    SparseArrays,
)

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData


def read_object_parts(adata: "AnnData") -> SourceParts:
    """Describe an AnnData object; nothing of it is copied, views and backed matrices are read in slices.

    Raises
    ------
    SourceError
        If a matrix is of a type that cannot be read by rows.
    """
    return _Object(adata).parts()


class _Object:
    def __init__(self, adata: "AnnData") -> None:
        self.adata = adata
        self.matrices: list[MatrixPart] = []
        self.features: dict[str, Callable[[], pd.DataFrame]] = {"var": lambda: _plain(adata.var)}
        self.left_out: dict[str, str] = {}
        self.elements: dict[str, Callable[[], Any]] = {}
        self.beside: list[MatrixPart] = []

    def parts(self) -> SourceParts:
        adata = self.adata
        space = self._space()
        if adata.X is not None if not adata.is_view else _has_x(adata):
            self._add("X", self._rows("X", lambda a: a.X), "var", space)
        for name in [key for key in adata.layers if key is not None]:
            rows = self._rows(f"layers/{name}", partial(_item, "layers", name))
            self._add(f"layers/{name}", rows, "var", space)
        self._raw()
        for name in list(adata.obsm):
            self._embedding(name)
        for group in ("obsp", "varm", "varp", "uns"):
            for name, value in getattr(adata, group).items():
                self._whole(f"{group}/{name}", value)
        return SourceParts(
            adata.n_obs,
            lambda: _plain(adata.obs),
            tuple(self.matrices),
            self.features,
            self.left_out,
            others=tuple(self.beside),
            elements=self.elements,
        )

    def _whole(self, key: str, value: Any) -> None:  # noqa: ANN401
        self.left_out.setdefault(key, describe_value(value))
        self.elements[key] = partial(sound, key, value)

    def _raw(self) -> None:
        raw = self.adata.raw
        if raw is None:
            return
        self.features["raw/var"] = lambda: _plain(raw.var)
        place = self._place("raw/X")
        rows = matrix_reader(raw.X, place)
        if rows.shape != (self.adata.n_obs, raw.n_vars):
            raise SourceError(
                f"raw/X has shape {rows.shape}, where {(self.adata.n_obs, raw.n_vars)} was expected; set adata.raw anew."
            )
        self._add("raw/X", rows, "raw/var", "gene_expression")
        for name, value in raw.varm.items():
            self._whole(f"raw/varm/{name}", value)

    def _embedding(self, name: str) -> None:
        import pandas as pd

        key = f"obsm/{name}"
        value = self.adata.obsm[name]
        if isinstance(value, pd.DataFrame):
            self.elements[key] = lambda: _plain(value)
            plain = all(isinstance(d, np.dtype) and d.kind in "biuf" for d in value.dtypes)
            # Truths beside numbers, and no columns at all, make a matrix of objects.
            matrix = value.to_numpy() if plain else np.empty(0, object)
            if matrix.dtype.kind not in NUMBER_KINDS:
                self.left_out[key] = describe_value(value)
                return
            self.features[key] = partial(columns_of, [str(column) for column in value.columns])
            self._add(key, DenseRows(matrix, self._place(key)), key, "")
            return
        if len(getattr(value, "shape", ())) < 2 or getattr(value, "dtype", np.dtype(object)).kind not in NUMBER_KINDS:
            self._whole(key, value)
            return
        rows = self._rows(key, partial(_item, "obsm", name))
        for candidate in (f"{name}_names", f"{name.rpartition('_')[0]}_names"):
            names = np.asarray(self.adata.uns.get(candidate, ()))
            if names.shape == (rows.shape[1],):
                self.features[key] = partial(columns_of, [str(n) for n in names])
                self.left_out[f"uns/{candidate}"] = f"names of the columns of {key}"
                break
        self._add(key, rows, key if key in self.features else "", "")

    def _rows(self, key: str, get: Callable[[Any], Any]) -> RowReader:
        adata, place = self.adata, self._place(key)
        if not adata.is_view:
            return matrix_reader(get(adata), place)
        width = get(_slice(adata, 0, 1)).shape[1:]
        return LazyRows(lambda start, stop: get(_slice(adata, start, stop)), (adata.n_obs, *width), place)

    def _place(self, key: str) -> MatrixLocation:
        uri = str(self.adata.filename) if self.adata.isbacked else "the AnnData in memory"
        return MatrixLocation(uri, key, lambda row: str(self.adata.obs_names[row]))

    def _add(self, key: str, rows: RowReader, features: str, space: str) -> None:
        if 0 in rows.shape[1:]:
            self.left_out[key] = "matrix without columns"
            self.beside.append(MatrixPart.of(key, rows, features))
        else:
            self.matrices.append(MatrixPart.of(key, rows, features, space))

    def _space(self) -> str:
        for name in ("feature_types", "feature_type"):
            if name in self.adata.var:
                return space_of_types({str(value) for value in self.adata.var[name].unique()})
        return "gene_expression"


def matrix_reader(matrix: Any, place: MatrixLocation) -> RowReader:  # noqa: ANN401  (any matrix that AnnData holds)
    """Choose the reader for a matrix in memory, in a backing file, or computed when sliced.

    Raises
    ------
    SourceError
        If it is none of these.
    """
    from scipy.sparse import issparse

    if bool(issparse(matrix)):
        matrix = matrix if matrix.format in ("csr", "csc") else matrix.tocsr()
        maker = CsrRows if matrix.format == "csr" else CscRows
        return maker(SparseArrays(matrix.indptr, matrix.indices, matrix.data, matrix.shape), place)
    group = getattr(matrix, "group", None)
    if group is not None and getattr(matrix, "format", "") in ("csr", "csc"):
        maker = CsrRows if matrix.format == "csr" else CscRows
        shape = (int(matrix.shape[0]), int(matrix.shape[1]))
        return maker(SparseArrays(group["indptr"], group["indices"], group["data"], shape), place)
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

    Raises
    ------
    SourceError
        Naming the one that does not.

    Examples
    --------
    >>> sound("uns/n", 3)
    3
    """
    from scipy.sparse import issparse

    if isinstance(value, Mapping):
        return {name: sound(f"{key}/{name}", inner) for name, inner in value.items()}
    if type(value).__module__.partition(".")[0] == "dask":
        value = value.compute()
    if bool(issparse(value)) and value.format in ("csr", "csc"):
        shape = value.shape if value.format == "csr" else value.shape[::-1]
        if len(value.data) != len(value.indices) or not entries_fit(value.indptr, value.indices, shape):
            raise SourceError(
                f"{key} is a sparse matrix whose pointers, indices, values and shape {value.shape} do not fit together; "
                "make it anew from its rows, columns and values."
            )
    return value


def describe_value(value: Any) -> str:  # noqa: ANN401
    """Say in a few words what an element in memory is.

    Examples
    --------
    >>> describe_value(np.zeros((2, 3)))
    'ndarray (2, 3) float64'
    """
    shape = "" if not isinstance(getattr(value, "shape", None), tuple) else f" {value.shape}"
    dtype = f" {value.dtype}" if isinstance(getattr(value, "dtype", None), np.dtype) else ""
    return f"{type(value).__name__}{shape}{dtype}"


def _item(group: str, name: str, adata: Any) -> Any:  # noqa: ANN401
    return getattr(adata, group)[name]


def _has_x(adata: "AnnData") -> bool:
    return _slice(adata, 0, 1).X is not None


def _slice(view: Any, start: int, stop: int) -> Any:  # noqa: ANN401
    """Take rows of a view; a view of a backed object cannot be sliced by anndata 0.12, so what it views is."""
    if not view.isbacked:
        return view[start:stop]
    whole = view._adata_ref
    return whole[np.arange(whole.n_obs)[view._oidx][start:stop], view._vidx]


def _plain(frame: Any) -> "pd.DataFrame":  # noqa: ANN401  (a view's frame is of a subclass)
    import pandas as pd

    return pd.DataFrame(frame)

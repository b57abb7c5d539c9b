"""A CXG as a source: the matrix by rows, embeddings as ``obsm``, tables, and all other content as ``uns``."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.formats.composite_source import CompositeSource, MatrixPart, SourceParts, space_of
from raggedatlas.formats.matrix_readers import DenseRows, MatrixLocation, RowReader
from raggedatlas.formats.soma import tiledb_kind
from raggedatlas.store.location import AnyPath
from raggedatlas.wings.cxg.array_reader import (
    DenseArray,
    LazyArray,
    ShiftedRowReader,
    SparseRowReader,
    columns_per_block,
    open_column_table,
    parse_object,
    read_column,
    read_columns,
    read_dataframe,
    read_table_info,
)
from raggedatlas.wings.cxg.inspection import Detection, detect, list_members, require_readable
from raggedatlas.wings.cxg.options import (
    ANONYMOUS,
    COLORS,
    CORPORA,
    COVERAGE,
    EMB,
    FEATURE_NAME,
    GENESETS,
    GROUP_METADATA,
    MEMBERS,
    OBS,
    OBSM_PREFIX,
    PROPERTIES,
    SHIFT,
    SIDE,
    SPATIAL,
    TITLED_BY_PROPERTIES,
    UNS,
    VAR,
    VERSION,
    XC,
    XR,
    X,
)
from raggedatlas.wings.cxg.table_encoder import label_of
from raggedatlas.wings.cxg.tiledb_arrays import (
    absolute_uri,
    check_file_sizes,
    check_text_offsets,
    context,
    import_tiledb,
    open_array,
    tiledb_errors,
    values_of,
)
from raggedatlas.wings.cxg.unstructured import from_json, restore_arrays


def cxg_source(
    path: AnyPath, version: str | None = None, *, allow_unknown: bool = False, uns: bool = True
) -> "CxgSource":
    """Open a CXG of any version and layout.

    `version` overrides the stored one; with `allow_unknown` an unknown version is read as the newest known one. `uns`
    is whether to read unstructured metadata; if so, bytes in ``uns`` raise C27. A CXG that is incomplete, damaged or
    inconsistent raises `SourceError` with the rule id.

    Examples
    --------
    >>> source = cxg_source(Path("pbmc3k.cxg"))  # doctest: +SKIP
    >>> source.columns(["MS4A1", "CD8A"]).shape  # doctest: +SKIP
    (2638, 2)
    """
    detection = detect(path)
    return CxgSource(detection, require_readable(detection, version, allow_unknown=allow_unknown), uns=uns)


class CxgSource(CompositeSource):
    """A `Source` that can also read columns, of a readable CXG.

    `version` is the one to read it as; `uns` is whether to read unstructured metadata.
    """

    def __init__(self, detection: Detection, version: str, *, uns: bool) -> None:
        self.detection, self.path, self.version = detection, detection.path, version
        self.obs, self.var = read_table_info(self.path / OBS), read_table_info(self.path / VAR)
        self.shape = (self.obs.n_rows, self.var.n_rows)
        self.left_out: dict[str, str] = {}
        self.shift = self._read_shift()
        self._names: list[str] | None = None
        space = "gene_expression"
        types = next((name for name in ("feature_types", "feature_type") if name in self.var.columns), None)
        if types is not None:
            space = space_of(np.asarray(read_column(self.var, types), dtype=object).tolist())
        matrices = [MatrixPart.of("X", self._open_rows(), VAR, space), *self._open_embeddings()]
        elements = {f"uns/{key}": read for key, read in self._unstructured(uns=uns).items()}
        parts = SourceParts(
            self.shape[0],
            partial(read_dataframe, self.obs),
            tuple(matrices),
            {VAR: partial(read_dataframe, self.var)},
            self.left_out,
            elements=elements,
            tables={OBS: partial(open_column_table, self.obs)},
        )
        super().__init__(parts, name=self.path.stem, uri=str(self.path), format="cxg")

    def columns(self, features: Sequence[int] | Sequence[str]) -> Any:  # noqa: ANN401
        """Read some features of all cells, from ``Xc`` if it exists, in the requested order.

        Features are column numbers, or names from the index of ``var`` or from the column that viewers show. Returns
        (n_cells, n): a `scipy.sparse.csc_matrix`, or an array if the matrix is dense or its columns are shifted. Raises
        `FeatureError` if a name is unknown or ambiguous.
        """
        numbers = [w for w in features if not isinstance(w, str)]
        if len(numbers) < len(features):
            numbers = self._find_features([str(w) for w in features])
        n = self.shape[1]
        if any(not 0 <= number < n for number in numbers):
            raise SourceError(f"{self.path} has columns 0 to {n - 1:,}; got {numbers[:5]}.")
        return read_columns(self.path, numbers, self.shift)

    def column_blocks(self, step: int | None = None) -> Iterator[tuple[int, Any]]:
        """Iterate over all features in blocks, from ``Xc`` if it exists.

        Yields the number of the first feature of a block, and its values, (n_cells, n), as returned by `columns`. A
        `step` of None is as many features as take about 16 MiB, at least one.

        Examples
        --------
        >>> import raggedatlas as ra
        >>> import tempfile
        >>> from pathlib import Path
        >>> source = cxg_source(Path(ra.copy("tests/data/pbmc68k_reduced.h5ad", tempfile.mkdtemp() + "/x.cxg")))
        >>> [(first, values.shape) for first, values in source.column_blocks(400)]
        [(0, (300, 400)), (400, (300, 365))]
        >>> source.close()
        """
        n_cells, n = self.shape
        if step is None:
            step = columns_per_block(self.path, n_cells, n, shifted=self.shift is not None)
        if step < 1:
            raise SourceError(f"step={step}; expected at least 1.")
        for first in range(0, n, step):
            yield first, read_columns(self.path, range(first, min(first + step, n)), self.shift)

    def _find_features(self, names: list[str]) -> list[int]:
        import pyarrow as pa

        from raggedatlas.formats.subset import find_features
        from raggedatlas.model.frames import INDEX

        columns = [name for name in dict.fromkeys((self.var.index, self.var.shown)) if name is not None]
        texts = {name: [str(v) for v in read_column(self.var, name)] for name in columns}
        # The shown column gets a name that find_features searches.
        table = {INDEX if i == 0 else "feature_name": pa.array(texts[name]) for i, name in enumerate(columns)}
        return [int(n) for n in find_features(pa.table(table), names)]

    def _place(self, element: str) -> MatrixLocation:
        return MatrixLocation(str(self.path), element, self._cell_name)

    def _cell_name(self, row: int) -> str:
        if self._names is None:
            at = self.obs.index
            self._names = [] if at is None else [str(v) for v in read_column(self.obs, at)]
        return self._names[row] if row < len(self._names) else str(row)

    def _open_rows(self) -> RowReader:
        if self.detection.layout == "split":
            by_row = LazyArray(self.path / XR)
            with closing(LazyArray(self.path / XC)) as by_column:
                for opened, n, name in ((by_row, self.shape[0], XR), (by_column, self.shape[1], XC)):
                    if opened.shape() != (n,):
                        raise SourceError(_shape_error(self.path, name, opened.shape(), (n,)))
                # Rows need `Xr` alone; `Xc` is checked all the same, so that `columns` does not fail later.
                by_column.attribute(ANONYMOUS, "C16")
                for opened, name, rule in ((by_row, VAR, "C15"), (by_column, OBS, "C16")):
                    dtype = opened.attribute(name, rule)
                    if dtype.kind not in "iu":
                        raise SourceError(
                            f"{rule}: {opened.path} holds positions ({name!r}) of {dtype}; expected integers. Write the CXG again."
                        )
            return SparseRowReader(by_row, self.shape, "C15")
        opened = LazyArray(self.path / X)
        extents = opened.shape()
        if extents != self.shape:
            raise SourceError(_shape_error(self.path, X, extents, self.shape))
        if self.detection.layout == "dense":
            return DenseRows(DenseArray(opened, "C14"), self._place(X))
        rows = SparseRowReader(opened, self.shape, "C40")
        return rows if self.shift is None else ShiftedRowReader(rows, self.shift)

    def _read_shift(self) -> NDArray[Any] | None:
        """Read the column shifts; return None if there are none."""
        if self.detection.members.get(SHIFT) != "array" or self.detection.layout != "sparse":
            return None
        with closing(LazyArray(self.path / SHIFT)) as opened:
            opened.attribute(ANONYMOUS, "C43")
            opened.require_fully_written()
            with tiledb_errors(opened.path):
                shift = values_of(opened.array[:])
        if shift.shape != (self.shape[1],):
            raise SourceError(_shape_error(self.path, SHIFT, shift.shape, (self.shape[1],), "C43"))
        # Without a shift rows stay sparse; a shift of zeros would make them dense for nothing (C45).
        return shift if shift.any() else None

    def _open_embeddings(self) -> list[MatrixPart]:
        parts = []
        for name in self.detection.embeddings:
            opened = LazyArray(self.path / EMB / name)
            extents = opened.shape()
            if len(extents) != 2 or extents[1] < 2 or opened.array.schema.sparse:
                raise SourceError(
                    f"C23: {opened.path} has shape {extents}; expected a dense array of cells by two or more coordinates. Write the CXG again."
                )
            if extents[0] != self.shape[0]:
                raise SourceError(_shape_error(self.path, f"{EMB}/{name}", extents, (self.shape[0], "any")))
            rows = DenseRows(DenseArray(opened, "C23"), self._place(f"{EMB}/{name}"))
            parts.append(MatrixPart.of(f"obsm/{obsm_name(name, self.detection.embeddings)}", rows))
        return parts

    def _unstructured(self, *, uns: bool) -> dict[str, Callable[[], Any]]:
        """Return readers of all other content by its key in ``uns``."""
        group: dict[str, Any] = {}
        if self.detection.members.get(GROUP_METADATA) == "array":
            with open_array(self.path / GROUP_METADATA) as array:
                group = dict(array.meta.items())
        side: dict[str, Any] = {}
        values = self._read_group_metadata(group, side)
        for frame, key in ((self.obs, "obs_metadata"), (self.var, "var_metadata")):
            more = {k: _decode_bytes(v) for k, v in frame.metadata.items() if k != GENESETS}
            if GENESETS in frame.metadata:
                if frame is self.obs:
                    values[GENESETS] = json.dumps(parse_object(frame.path, GENESETS, frame.metadata[GENESETS], "C30"))
                else:
                    more[GENESETS] = _decode_bytes(frame.metadata[GENESETS])
            side |= {key: more} if more else {}
        # By default a writer would show feature_name.
        if self.var.shown is not None and (self.var.shown != self.var.index or FEATURE_NAME in self.var.columns):
            side["var_index"] = self.var.shown
        if UNS in self.detection.members and uns:
            # Last: a key of `uns` replaces the same key of `corpora`.
            values |= read_unstructured(self.path / UNS)
        elif UNS in self.detection.members:
            self.left_out["uns"] = "left out as requested"
        for name in self.detection.members:
            # `coverage` is a member of the format, and AnnData has no place for it either.
            if name == COVERAGE or name not in MEMBERS:
                self.left_out[name] = "an array that AnnData has no place for"
        readers: dict[str, Callable[[], Any]] = {key: partial(values.__getitem__, key) for key in values}
        if side:
            readers[SIDE] = partial(dict, side)
        self.left_out |= {f"uns/{key}": "metadata" for key in readers}
        return readers

    def _read_group_metadata(self, group: Mapping[str, Any], side: dict[str, Any]) -> dict[str, Any]:
        at = self.path / GROUP_METADATA
        properties, colors, corpora = (
            parse_object(at, key, group.get(key, "{}"), rule)
            for key, rule in ((PROPERTIES, "C51"), (COLORS, "C53"), (CORPORA, "C60"))
        )
        values = {key: restore_arrays(value) for key, value in corpora.items() if value is not None}
        # Since 0.2.0 the title of the properties may be the name of the uploaded file.
        if values.get("title") is None or (
            self.version in TITLED_BY_PROPERTIES and properties.get("title") is not None
        ):
            values |= {"title": properties["title"]} if properties.get("title") is not None else {}
        elif properties.get("title") not in (None, values["title"]):
            side["properties"] = {"title": properties["title"]}
        about = {
            key: restore_arrays(value) for key, value in properties.items() if key != "title" and value is not None
        }
        known = (VERSION, PROPERTIES, COLORS, CORPORA)
        more = {key: _decode_bytes(value) for key, value in group.items() if key not in known}
        side |= {"properties": {**side.get("properties", {}), **about}} if about else {}
        side |= {"metadata": more} if more else {}
        left = {}
        for name, table in colors.items():
            column = name if name in self.obs.columns else name.removesuffix("_colors")
            listed = self._listed_colors(column, table)
            if listed is not None:
                values[f"{column}_colors"] = listed
            elif table:
                # Colours that do not cover the categories are kept as JSON, and `collect_metadata` writes them back.
                left[column] = table
        side |= {"colors": json.dumps(left)} if left else {}
        return values

    def _listed_colors(self, column: str, table: Any) -> NDArray[Any] | None:  # noqa: ANN401
        """Return colors in the order of the categories, or None if one is missing."""
        if not isinstance(table, dict):
            raise SourceError(f"C53: the colors of {column!r} in {self.path} are not a JSON object; correct {COLORS}.")
        hint = self.obs.hints.get(column)
        listed = hint.get("categories") if isinstance(hint, dict) else None
        if listed is None and column in self.obs.columns:
            values = read_column(self.obs, column)
            listed = [label_of(v) for v in getattr(values, "categories", np.empty(0)).tolist()]
        labels = [str(name) for name in listed or []]
        if not labels or any(label not in table for label in labels):
            return None
        return np.array([str(table[label]) for label in labels], dtype=object)


def obsm_name(name: str, all_names: Sequence[str]) -> str:
    """Return the key of an embedding in ``obsm``: ``umap`` becomes ``X_umap``, ``spatial`` is kept.

    Examples
    --------
    >>> obsm_name("umap", ["umap"]), obsm_name("X_pca", ["X_pca"]), obsm_name("spatial", ["spatial"])
    ('X_umap', 'X_pca', 'spatial')
    """
    if name == SPATIAL:
        return name
    # `X_pca` keeps its name unless `pca` exists too, whose key in `obsm` would be the same.
    taken = name.startswith(OBSM_PREFIX) and name.removeprefix(OBSM_PREFIX) not in all_names
    return name if taken else f"{OBSM_PREFIX}{name}"


def _shape_error(path: AnyPath, name: str, extents: Sequence[Any], expected: Sequence[Any], rule: str = "C71") -> str:
    return (
        f"{rule}: {path}: {name} has shape {tuple(extents)}, but the tables of cells and features require {tuple(expected)}; "
        "the CXG is inconsistent. Write it again."
    )


def _decode_bytes(value: Any) -> Any:  # noqa: ANN401
    """Return metadata as AnnData can hold it: text for bytes, arrays for the tuples in which TileDB stores several numbers."""
    if isinstance(value, tuple):
        return np.array(value)
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value


def read_unstructured(path: AnyPath) -> dict[str, Any]:
    """Read ``uns``, stored as metadata of an array, as in all known files, or of a group.

    JSON is parsed, and arrays of a group are read. Raises C27 for bytes, which may be a pickle and could run code if
    loaded.
    """
    if tiledb_kind(path) == "array":
        with open_array(path) as array:
            stored = dict(array.meta.items())
    else:
        tiledb = import_tiledb()
        with tiledb_errors(path):
            # `open_array` does this for arrays; groups are opened here only.
            check_file_sizes(path)
        with tiledb_errors(path), tiledb.Group(absolute_uri(path), "r", ctx=context(path)) as group:
            stored = dict(group.meta.items())
    values: dict[str, Any] = {}
    for key, value in stored.items():
        if isinstance(value, bytes):
            raise SourceError(
                f"C27: {path}: the value of {key!r} is bytes, which some old writers pickled; unpickling could run foreign code. "
                "Have it written as JSON, or leave uns out with uns=False."
            )
        values[key] = from_json(value) if isinstance(value, str) else value
    for name, kind in list_members(path).items():
        if kind == "array":
            with open_array(path / name) as array:
                check_text_offsets(path / name, array.schema)
                values[name] = np.asarray(array[:]) if not array.schema.sparse else dict(array[:])
    return values

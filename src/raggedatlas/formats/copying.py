"""From any source into any sink, without an atlas: in blocks of rows, whole or only some cells, features and layers."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import NotFoundError, SchemaError, SourceError
from raggedatlas.formats.containers import axes_of
from raggedatlas.formats.matrix_readers import subset_block
from raggedatlas.formats.modalities import (
    MOD,
    ElementReader,
    MemoryOutput,
    Modality,
    ModalityMatrix,
    is_multimodal,
    refuse_other_names,
    select_modalities,
    split_modalities,
)
from raggedatlas.formats.registry import open_sink, open_source
from raggedatlas.formats.subset import (
    find_features,
    hstack_blocks,
    remove_unused,
    select_rows,
    subset_colors,
    take,
)
from raggedatlas.model.arguments import Progress, checked, no_progress
from raggedatlas.model.protocols import Sink, SinkMatrix, Source
from raggedatlas.store.location import Address, as_path
from raggedatlas.store.runtime import release_unused_memory

if TYPE_CHECKING:
    from anndata import AnnData
    from mudata import MuData

Rows = NDArray[np.int64] | None

STEP_BYTES = 16 << 20
"""Approximate size in bytes of one step of rows, computed from the mean row of the matrix."""


@dataclass(frozen=True, slots=True)
class _ModalityCopy:
    """One modality to copy: its prefix in the target and the selected rows and columns."""

    mod: Modality
    prefix: str
    rows: Rows
    columns: Rows

    def chosen(self, key: str) -> list[Rows]:
        """Return the selection along each axis of an element."""
        return [{"obs": self.rows, "var": self.columns}.get(axis) for axis in axes_of(key)]

    def is_in_blocks(self, key: str) -> bool:
        """Return whether a matrix is copied in blocks: if its first axis is cells or is not subset."""
        head = key.split("/", maxsplit=1)[0]
        return self.columns is None or head not in ("varm", "varp") or key.startswith("raw/")

    def describe(self, matrix: ModalityMatrix) -> SinkMatrix:
        """Return what a sink is told of a matrix before its rows come."""
        chosen = self.chosen(matrix.key)
        shape = list(matrix.shape)
        for axis, taken in enumerate(chosen):
            shape[axis] = shape[axis] if taken is None else len(taken)
        entries = [info.n_entries for info in matrix.infos]
        n_entries = None if None in entries else sum(n for n in entries if n is not None)
        dtype = np.result_type(*(info.dtype for info in matrix.infos))
        exact = n_entries is not None and all(info.exact for info in matrix.infos)
        exact = exact and all(taken is None for taken in chosen)
        first = matrix.infos[0]
        return SinkMatrix(self.prefix + matrix.key, first.form, dtype, tuple(shape), n_entries, first.wide, exact)


@checked
def copy(
    source: Any,  # noqa: ANN401  (a path, an object or a Source)
    sink: Sink | Address,
    *,
    where: Any = None,  # noqa: ANN401  (a condition, a mask or rows)
    features: Sequence[str] | None = None,
    layers: Sequence[str] | None = None,
    modality: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> str:
    """Copy a file or object to another format in bounded memory.

    Parameters
    ----------
    source : path, AnnData, MuData or Source
        Anything that `open_source` takes.
    sink : path or Sink
        The suffix of a path determines the format; use `open_sink` for options. ``s3://``, ``gs://`` and ``az://`` are paths too.
    where : str, mapping, Filter, mask or row numbers, optional
        Cells. A condition is what `Query.where` takes, over the columns of `obs`; the index is ``cell_name``. Cells keep
        their order, and repeated row numbers are refused. Categories that none of them has are dropped, as anndata does.
    features : sequence of str, optional
        Features to copy, in this order: names in the index, else ids or symbols in the usual columns of `var`. `raw` keeps all.
    layers : sequence of str, optional
        Any of ``"X"``, ``"raw"`` and the names of layers; others are omitted.
    modality : str, optional
        Modality of a MuData or feature type of a 10x file. Only feature types of 10x files, which share their cells, can be combined in one
        AnnData, and are without this argument; `read` gives a MuData of them.
    storage_options : mapping of str to str, optional
        Credentials and endpoint of an object store that is read or written, as of `RaggedAtlas.open`.
    progress : callable, optional
        Called with the key of the matrix being written, the number of rows written, and the total.

    Returns
    -------
    str
        Result of the sink's `commit`.

    Raises
    ------
    NotFoundError
        If the file, a layer or the modality does not exist.
    QueryError, FeatureError
        If the selection of cells or features is invalid.
    SourceError
        If the source is damaged, or has several modalities and the sink can hold only one.
    DuplicateError, StoreError
        If the target exists or cannot be written.

    Notes
    -----
    Matrices are read and written in steps of about 16 MiB, `obs` column by column; `var`, `uns` and other tables are read
    completely. A copy that fails or is killed leaves nothing under the name of the target. A CSC matrix remains CSC; large ones use
    temporary files.

    Examples
    --------
    >>> import tempfile, anndata, scipy.sparse
    >>> made = copy(
    ...     anndata.AnnData(scipy.sparse.eye_array(3, format="csr")), tempfile.mkdtemp() + "/eye.h5ad", where=[0, 2]
    ... )
    >>> anndata.read_h5ad(made).shape
    (2, 3)
    """
    try:
        with _naming_rules(source, storage_options):
            opened = open_source(source, storage_options=storage_options)
    except BaseException:
        if isinstance(sink, Sink):
            sink.abort()
        raise
    try:
        if isinstance(sink, Sink):
            target = sink
        else:
            # Other suffixes say what they hold.
            several = modality is None and as_path(sink).suffix == ".zarr" and is_multimodal(opened)
            target = open_sink(sink, storage_options=storage_options, **({"multimodal": True} if several else {}))
        try:
            with _naming_rules(source, storage_options):
                _copy(opened, target, where, features, layers, modality, progress or no_progress)
                return target.commit()
        except BaseException:
            target.abort()
            raise
    finally:
        if opened is not source:
            opened.close()


@checked
def read(
    source: Any,  # noqa: ANN401  (a path, an object or a Source)
    *,
    modality: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    **options: Any,  # noqa: ANN401  (each format has its own)
) -> "AnnData | MuData":
    """Read a file into memory without an atlas.

    Parameters
    ----------
    source : path, AnnData, MuData, h5py.File, zarr.Group or Source
        Anything that `open_source` takes: ``.h5ad``, ``.h5mu``, ``.zarr``, ``.zarr.zip``, ``.cxg``, 10x files and folders, here, in an
        object store or on a web server.
    modality : str, optional
        Modality of a MuData or feature type of a 10x file, by the name of the modality (``"rna"``, ``"prot"``, ``"atac"``) or the feature
        type (``"Gene Expression"``), returned as an AnnData.
    storage_options : mapping of str to str, optional
        Credentials and endpoint of the object store, as of `RaggedAtlas.open`.
    **options
        Passed to `open_source`.

    Returns
    -------
    anndata.AnnData or mudata.MuData
        Contents of the source, as `copy` writes them to a ``.h5ad`` or ``.h5mu``; a MuData if it has several modalities. So it is of a 10x
        file with several feature types, whose columns `copy` concatenates in a ``.h5ad``.

    Raises
    ------
    NotFoundError
        If there is no such file or modality.
    SourceError, LimitError
        If its kind is unknown, it is damaged, or it declares more than may be read.
    MissingExtraError
        If a required package is not installed.

    Examples
    --------
    >>> read("tests/data/pbmc68k_reduced.h5ad").shape
    (300, 765)
    """
    with _naming_rules(source, storage_options):
        opened = open_source(source, storage_options=storage_options, **options)
    try:
        several = is_multimodal(opened) or len(split_modalities(opened).modalities) > 1
        with _naming_rules(source, storage_options):
            return read_source(opened, modality, multimodal=modality is None and several)
    finally:
        if opened is not source:
            opened.close()


@contextmanager
def _naming_rules(source: Any, storage_options: Mapping[str, str] | None) -> Iterator[None]:  # noqa: ANN401
    """Add the rule of the validator to an error about an element of a file."""
    try:
        yield
    except (SourceError, SchemaError) as error:
        if not isinstance(source, str | os.PathLike):
            raise
        from raggedatlas.formats.anndata import with_rule_id

        path = as_path(source, storage_options)
        # What a sink refuses may be a fault of the file, whose path it does not know.
        found = SourceError(f"{path}: {error}") if isinstance(error, SchemaError) else error
        named = with_rule_id(path, found)
        if named is found:
            raise
        raise named from error


def read_source(source: Source, modality: str | None = None, *, multimodal: bool = False) -> Any:  # noqa: ANN401
    """Copy an open source into an AnnData, or a MuData if it is to be multimodal; errors as of `copy`."""
    from raggedatlas.formats.anndata.sink import TreeSink

    target = MemoryOutput(source.describe().uri)
    copy(source, TreeSink(target, multimodal=multimodal), modality=modality)
    return target.made


def _copy(
    source: Source,
    sink: Sink,
    where: Any,  # noqa: ANN401  (a condition, a mask or rows)
    features: Sequence[str] | None,
    layers: Sequence[str] | None,
    modality: str | None,
    progress: Progress,
) -> None:
    multimodal = bool(getattr(sink, "multimodal", False))
    split = split_modalities(source)
    modalities = select_modalities(source, split, modality, multimodal=multimodal)
    if layers is not None:
        known = dict.fromkeys(name for mod in modalities for matrix in mod.matrices if (name := _layer(matrix.key)))
        if missing := [name for name in layers if name not in known]:
            raise NotFoundError(f"There are no layers {missing}; there are {list(known)}.")
        wanted = {"", *layers}
        modalities = [
            replace(
                mod,
                matrices=tuple(matrix for matrix in mod.matrices if _layer(matrix.key) in wanted),
                elements={k: v for k, v in mod.elements.items() if "raw" in wanted or not k.startswith("raw/")},
            )
            for mod in modalities
        ]
    rows = None if where is None else select_rows(where, source.cells())
    n_cells = source.describe().n_cells
    tasks = []
    for mod in modalities:
        own = rows
        if rows is not None and mod.cells is not None:
            # Row numbers of the modality, ascending: `_copy_matrix` finds those of a step by bisection.
            own = np.flatnonzero(np.isin(mod.cells, rows)).astype(np.int64)
        columns = None if features is None else find_features(mod.features(), list(features))
        tasks.append(_ModalityCopy(mod, f"{MOD}{mod.name}/" if multimodal else "", own, columns))
    over_all = []
    if multimodal:
        elements = dict(split.elements) or {"obs": ElementReader(source, "obs")}
        if features is not None or modality is not None:
            elements = {k: v for k, v in elements.items() if k.split("/")[0] not in ("var", "varm", "varp", "varmap")}
        over_all = [_ModalityCopy(Modality("", split.matrices, elements, lambda: pa.table({})), "", rows, None)]
    matrices = [
        (task, matrix) for task in (*tasks, *over_all) for matrix in task.mod.matrices if task.is_in_blocks(matrix.key)
    ]
    # A CXG judges embeddings in `begin`, so `wants` is asked after it, and accepts elements only before rows.
    sink.begin(tuple(task.describe(matrix) for task, matrix in matrices))
    matrices = [(task, matrix) for task, matrix in matrices if _accepts(sink, task.prefix + matrix.key)]
    for task in (*tasks, *over_all):
        _write_elements(source, sink, task)
    if multimodal:
        for task in tasks:
            # Row of each cell in the modality, counted from 1; 0 if it is missing there.
            cells = np.arange(n_cells) if task.mod.cells is None else task.mod.cells
            cells = cells if task.rows is None else cells[task.rows]
            row_of_cell = np.zeros(n_cells if rows is None else len(rows), np.uint32)
            # All of `cells` are in `rows`, which ascends, so the search gives their positions.
            row_of_cell[cells if rows is None else np.searchsorted(rows, cells)] = np.arange(1, len(cells) + 1)
            sink.element(f"obsmap/{task.mod.name}", row_of_cell)
    for task, matrix in matrices:
        _copy_matrix(source, sink, task, matrix, progress)


def _layer(key: str) -> str:
    """Return ``"X"``, ``"raw"`` or the name of a layer; empty for other keys."""
    head, _, rest = key.partition("/")
    return rest if head == "layers" else head if head in ("X", "raw") else ""


def _write_elements(source: Source, sink: Sink, task: _ModalityCopy) -> None:
    def read(reader: Callable[[], Any]) -> Any:  # noqa: ANN401  (any element that AnnData knows)
        # A table if source and sink work column by column, else the complete element.
        table = reader.table() if getattr(sink, "by_column", False) and isinstance(reader, ElementReader) else None
        return reader() if table is None else table

    whole = {m.key: m.infos[0].key for m in task.mod.matrices if not task.is_in_blocks(m.key)}
    readers: dict[str, Callable[[], Any]] = {
        **task.mod.elements,
        **{key: partial(source.element, at) for key, at in whole.items()},
    }
    for key, reader in readers.items():
        if not _accepts(sink, task.prefix + key):
            continue
        value = read(reader)
        refuse_other_names(source, readers, key, value)
        for axis, taken in enumerate(task.chosen(key)):
            value = value if taken is None else take(value, taken, axis)
        # Categories that no cell or feature of a subset has go, and their colors, as in anndata.
        if task.rows is not None or task.columns is not None:
            if key in {"obs", "var"}:
                value = remove_unused(value)
            name = key.removeprefix("uns/").removesuffix("_colors")
            if key == f"uns/{name}_colors":
                for table, chosen in (("obs", task.rows), ("var", task.columns)):
                    if value is not None and table in task.mod.elements:
                        value = subset_colors(value, read(task.mod.elements[table]), name, chosen)
        if value is not None or not key.endswith("_colors"):
            sink.element(task.prefix + key, value)


def _accepts(sink: Sink, key: str) -> bool:
    """Return whether a sink accepts an element, so that nothing is read in vain."""
    wants = getattr(sink, "wants", None)
    return wants is None or bool(wants(key))


def _copy_matrix(source: Source, sink: Sink, task: _ModalityCopy, matrix: ModalityMatrix, progress: Progress) -> None:
    n_bytes = 0
    for info in matrix.infos:
        if info.n_entries is not None:
            n_bytes += info.n_entries * (info.dtype.itemsize + 4) // max(info.shape[0], 1)
        else:
            n_bytes += int(np.prod(info.shape[1:], dtype=object)) * info.dtype.itemsize
    step = max(1, getattr(sink, "step_bytes", STEP_BYTES) // max(n_bytes, 1))
    height = matrix.shape[0]
    rows, columns = (*task.chosen(matrix.key), None, None)[:2]
    key, keys = task.prefix + matrix.key, tuple(info.key for info in matrix.infos)
    for start in range(0, height, step):
        stop = min(start + step, height)
        first, last = (start, stop) if rows is None else np.searchsorted(rows, [start, stop]).tolist()
        if rows is None or last > first:
            row = start
            # A source may return fewer rows than asked for, so `row` follows what has arrived.
            for blocks in source.blocks(keys, step, (start, stop)):
                block = blocks[0] if len(blocks) == 1 else hstack_blocks(blocks)
                selected = None if rows is None else rows[(rows >= row) & (rows < row + block.n_rows)] - row
                row += block.n_rows
                if selected is not None or columns is not None:
                    block = subset_block(block, selected, columns)
                if block.n_rows:
                    sink.write(key, block)
        release_unused_memory()
        progress(key, stop, height)

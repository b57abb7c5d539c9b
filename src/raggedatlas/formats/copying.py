"""From any source into any sink, without an atlas: in blocks of rows, whole or only some cells, features and layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import NotFoundError, SourceError
from raggedatlas.formats.modalities import (
    MOD,
    ElementReader,
    Modalities,
    Modality,
    ModalityMatrix,
    select_modalities,
    split_modalities,
)
from raggedatlas.formats.registry import open_sink, open_source
from raggedatlas.formats.subset import find_features, hstack_blocks, select_rows, subset_block, take
from raggedatlas.model.arguments import checked
from raggedatlas.model.frames import ColumnTable
from raggedatlas.model.protocols import MatrixInfo, Sink, SinkMatrix, Source
from raggedatlas.store.runtime import release_unused_memory

Rows = NDArray[np.int64] | None

STEP_BYTES = 16 << 20
"""A step down the rows takes about this much, by the mean of the matrix."""

CELLS, FEATURES = "cells", "features"
AXES: dict[str, tuple[str, ...]] = {
    "X": (CELLS, FEATURES),
    "layers": (CELLS, FEATURES),
    "raw": (CELLS, ""),
    "obs": (CELLS,),
    "var": (FEATURES,),
    "obsm": (CELLS,),
    "varm": (FEATURES,),
    "obsp": (CELLS, CELLS),
    "varp": (FEATURES, FEATURES),
}
"""First part of a key -> what its axes are; others have none that a choice of cells or features touches."""


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """What is to be copied; None is all.

    Parameters
    ----------
    where : str, mapping, Filter, mask or rows, optional
        Which cells.
    features : sequence of str, optional
        Which features, in this order.
    layers : sequence of str, optional
        Which of ``"X"``, ``"raw"`` and the layers.
    modality : str, optional
        Which one, of several.
    """

    where: Any = None
    features: Sequence[str] | None = None
    layers: Sequence[str] | None = None
    modality: str | None = None


@dataclass(frozen=True, slots=True)
class _Task:
    """One unit on its way: where it goes, and what of it."""

    unit: Modality
    prefix: str
    n_rows: int
    rows: Rows
    columns: Rows

    def chosen(self, key: str) -> list[Rows]:
        """Return what is taken of each axis of an element."""
        axes = (
            AXES.get(key.split("/", maxsplit=1)[0], ()) if key != "raw/var" and not key.startswith("raw/varm") else ()
        )
        return [{CELLS: self.rows, FEATURES: self.columns}.get(axis) for axis in axes]


@checked
def copy(
    source: Any,  # noqa: ANN401  (a path, an object or a Source)
    sink: Sink | str | Path,
    *,
    where: Any = None,  # noqa: ANN401  (a condition, a mask or rows)
    features: Sequence[str] | None = None,
    layers: Sequence[str] | None = None,
    modality: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> str:
    """Copy a file or object into another format, in bounded memory.

    Parameters
    ----------
    source : path, AnnData, MuData or Source
        Anything that `open_source` takes.
    sink : path or Sink
        A path's ending decides the format; `open_sink` takes options.
    where : str, mapping, Filter, mask or row numbers, optional
        Which cells. A condition is what `Query.where` takes, over the columns of `obs`; the index is ``cell_name``. Cells keep
        their order.
    features : sequence of str, optional
        Which features, in this order: names of the index, else ids or symbols of the usual columns of `var`. `raw` keeps its own.
    layers : sequence of str, optional
        Which of ``"X"``, ``"raw"`` and the layers; the others are left out.
    modality : str, optional
        Which modality of a MuData or feature type of a 10x file. Several go into one AnnData only for 10x files, side by side.
    progress : callable, optional
        Called with what is written, how many rows of it are, and how many there are.

    Returns
    -------
    str
        What the sink says was made.

    Raises
    ------
    NotFoundError
        If there is no such file, layer or modality.
    QueryError, FeatureError
        If the choice of cells or features cannot be understood.
    SourceError
        If the source is damaged, or has several modalities where the sink has room for one.
    DuplicateError, StoreError
        If the target exists or refuses.

    Notes
    -----
    Matrices are read and written in steps of about 16 MiB, `obs` column by column; `var`, `uns` and other tables are held whole. A copy that fails or is
    killed leaves nothing under the name of the target. A CSC matrix stays one, through temporary files where it is large.

    Examples
    --------
    >>> import tempfile, anndata, scipy.sparse
    >>> made = copy(
    ...     anndata.AnnData(scipy.sparse.eye_array(3, format="csr")), tempfile.mkdtemp() + "/eye.h5ad", where=[0, 2]
    ... )
    >>> anndata.read_h5ad(made).shape
    (2, 3)
    """
    choice = CopyOptions(where, features, layers, modality)
    opened = open_source(source)
    try:
        target = open_sink(sink, **_multimodal(opened, sink, choice)) if isinstance(sink, str | Path) else sink
        try:
            _copy(opened, target, choice, progress or _silent)
            return target.commit()
        except BaseException:
            target.abort()
            raise
    finally:
        if opened is not source:
            opened.close()


def _silent(step: str, done: int, total: int) -> None:
    del step, done, total


def is_multimodal(source: Source) -> bool:
    """Say whether a source holds several modalities, as MuData does."""
    schema = source.describe()
    return any(info.key.startswith(MOD) for info in schema.matrices)


def _multimodal(source: Source, path: "str | Path", choice: CopyOptions) -> dict[str, Any]:
    several = choice.modality is None and is_multimodal(source)
    return {"multimodal": True} if several and Path(path).suffix == ".zarr" else {}


def _copy(source: Source, sink: Sink, choice: CopyOptions, progress: Callable[[str, int, int], None]) -> None:
    whole = split_modalities(source)
    multimodal = bool(getattr(sink, "multimodal", False))
    units = select_modalities(source, choice.modality, multimodal=multimodal)
    _check_layers(units, choice)
    units = [_with_layers(unit, choice) for unit in units]
    rows = None if choice.where is None else select_rows(choice.where, source.cells())
    n_cells = source.describe().n_cells
    tasks = [_task(unit, choice, (rows, n_cells), f"{MOD}{unit.name}/" if multimodal else "") for unit in units]
    if multimodal:
        over_all = _over_all(source, whole, choice)
        tasks.append(_Task(over_all, "", n_cells if rows is None else len(rows), rows, None))
    pieces = [(task, piece) for task in tasks for piece in _streams(task)]
    sink.begin(tuple(_announced(task, piece) for task, piece in pieces))
    pieces = [(task, piece) for task, piece in pieces if _wanted(sink, task.prefix + piece.key)]
    for task in tasks:
        _write_elements(source, sink, task)
    if multimodal:
        for task in tasks[:-1]:
            sink.element(f"obsmap/{task.unit.name}", _map(task, rows, n_cells))
    for task, piece in pieces:
        _pour(source, sink, (task, piece), progress)


def _check_layers(units: list[Modality], choice: CopyOptions) -> None:
    known = dict.fromkeys(name for unit in units for piece in unit.pieces if (name := _layer(piece.key)))
    missing = [name for name in choice.layers or () if name not in known]
    if missing:
        raise NotFoundError(f"There are no layers {missing}; there are {list(known)}.")


def _layer(key: str) -> str:
    """Name a matrix as people do: X, raw, or the layer; empty for others."""
    head, _, rest = key.partition("/")
    return rest if head == "layers" else head if head in ("X", "raw") else ""


def _with_layers(unit: Modality, choice: CopyOptions) -> Modality:
    if choice.layers is None:
        return unit
    wanted = {"", *choice.layers}
    pieces = tuple(piece for piece in unit.pieces if _layer(piece.key) in wanted)
    dropped = set() if "raw" in wanted else {key for key in unit.elements if key.startswith("raw/")}
    return replace(unit, pieces=pieces, elements={k: v for k, v in unit.elements.items() if k not in dropped})


def _task(unit: Modality, choice: CopyOptions, cells: tuple[Rows, int], prefix: str) -> _Task:
    wanted, n_cells = cells
    own = np.arange(n_cells) if unit.cells is None else unit.cells
    rows = None
    if wanted is not None:
        rows = wanted if unit.cells is None else np.flatnonzero(np.isin(own, wanted)).astype(np.int64)
    columns = None if choice.features is None else find_features(unit.features(), list(choice.features))
    return _Task(unit, prefix, len(own) if rows is None else len(rows), rows, columns)


def _over_all(source: Source, whole: Modalities, choice: CopyOptions) -> Modality:
    """Return what stands beside the modalities; the table of all features only when none was left out."""
    elements = dict(whole.elements) or {"obs": ElementReader(source, "obs")}
    if choice.features is not None or choice.modality is not None:
        elements = {k: v for k, v in elements.items() if k.split("/")[0] not in ("var", "varm", "varp", "varmap")}
    return Modality("", whole.pieces, elements, lambda: pa.table({}))


def _map(task: _Task, wanted: Rows, n_cells: int) -> NDArray[np.uint32]:
    """Say for each cell which row of a modality it is, counted from 1."""
    own = np.arange(n_cells) if task.unit.cells is None else task.unit.cells
    own = own if task.rows is None else own[task.rows]
    n = n_cells if wanted is None else len(wanted)
    out = np.zeros(n, np.uint32)
    out[own if wanted is None else np.searchsorted(wanted, own)] = np.arange(1, len(own) + 1)
    return out


def _streams(task: _Task) -> list[ModalityMatrix]:
    """Return the matrices that are copied in blocks: those whose first axis is cells, or is kept whole."""
    return [piece for piece in task.unit.pieces if _in_blocks(task, piece.key)]


def _in_blocks(task: _Task, key: str) -> bool:
    head = key.split("/", maxsplit=1)[0]
    return task.columns is None or head not in ("varm", "varp") or key.startswith("raw/")


def _announced(task: _Task, piece: ModalityMatrix) -> SinkMatrix:
    shape = list(piece.shape)
    for axis, taken in enumerate(task.chosen(piece.key)):
        shape[axis] = shape[axis] if taken is None else len(taken)
    entries = [info.n_entries for info in piece.infos]
    n_entries = None if None in entries else sum(n for n in entries if n is not None)
    form = piece.infos[0].form
    dtype = np.result_type(*(info.dtype for info in piece.infos))
    whole = n_entries is not None and all(info.exact for info in piece.infos)
    whole = whole and all(taken is None for taken in task.chosen(piece.key))
    return SinkMatrix(task.prefix + piece.key, form, dtype, tuple(shape), n_entries, piece.infos[0].wide, whole)


def _write_elements(source: Source, sink: Sink, task: _Task) -> None:
    whole = {p.key: p.infos[0].key for p in task.unit.pieces if not _in_blocks(task, p.key)}
    readers = {**task.unit.elements, **{key: _whole(source, at) for key, at in whole.items()}}
    for key, read in readers.items():
        if not _wanted(sink, task.prefix + key):
            continue
        value = _read(sink, read)
        _refuse_other_names(source, readers, key, value)
        for axis, taken in enumerate(task.chosen(key)):
            value = take(value, taken, axis)
        sink.element(task.prefix + key, value)


def _refuse_other_names(
    source: Source,
    readers: Mapping[str, Callable[[], Any]],
    key: str,
    value: Any,  # noqa: ANN401  (any element that AnnData knows)
) -> None:
    """Refuse a frame along an axis whose rows have other names than the axis: AnnData cannot hold one."""
    axis = {"obsm": "obs", "varm": "var"}.get(key.partition("/")[0])
    own = getattr(value, "index", None)
    if axis is None or axis not in readers or own is None or not hasattr(value, "columns"):
        return
    read = readers[axis]
    table = read.table() if isinstance(read, ElementReader) else None
    # Of a table that is read column by column only the names are needed.
    names = read().index if table is None else ColumnTable(len(table), table.index, ()).frame().index
    if len(own) == len(names) and not (own == names).all():
        row = int((own != names).argmax())
        raise SourceError(
            f"{source.describe().uri}: {key} has the name {own[row]!r} in row {row:,}, where {axis} has {names[row]!r}; frames of {axis}m "
            f"have the names of {axis}. Write it again with those, or leave it out."
        )


def _read(sink: Sink, read: Callable[[], Any]) -> Any:  # noqa: ANN401  (any element that AnnData knows)
    """Open a table where both sides go column by column, else read the element whole."""
    table = read.table() if getattr(sink, "by_column", False) and isinstance(read, ElementReader) else None
    return read() if table is None else table


def _wanted(sink: Sink, key: str) -> bool:
    """Ask a sink that has no place for everything, so that nothing is read to be thrown away."""
    wants = getattr(sink, "wants", None)
    return wants is None or bool(wants(key))


def _whole(source: Source, key: str) -> Callable[[], Any]:
    return lambda: source.element(key)


def _pour(
    source: Source, sink: Sink, what: tuple[_Task, ModalityMatrix], progress: Callable[[str, int, int], None]
) -> None:
    task, piece = what
    height = piece.shape[0]
    rows, columns = (*task.chosen(piece.key), None, None)[:2]
    key, keys = task.prefix + piece.key, tuple(info.key for info in piece.infos)
    step = _step(piece.infos)
    for start in range(0, height, step):
        stop = min(start + step, height)
        first, last = (start, stop) if rows is None else np.searchsorted(rows, [start, stop]).tolist()
        if rows is None or last > first:
            at = start
            for blocks in source.blocks(keys, step, (start, stop)):
                block = hstack_blocks(blocks)
                mine = None if rows is None else rows[(rows >= at) & (rows < at + block.n_rows)] - at
                at += block.n_rows
                if mine is None or len(mine):
                    sink.write(key, subset_block(block, mine, columns))
        release_unused_memory()
        progress(key, stop, height)


def _step(infos: tuple[MatrixInfo, ...]) -> int:
    """Return how many rows take about `STEP_BYTES`."""
    n_bytes = 0
    for info in infos:
        if info.n_entries is not None:
            n_bytes += info.n_entries * (info.dtype.itemsize + 4) // max(info.shape[0], 1)
        else:
            n_bytes += int(np.prod(info.shape[1:], dtype=object)) * info.dtype.itemsize
    return max(1, STEP_BYTES // max(n_bytes, 1))

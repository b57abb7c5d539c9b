"""CXG as a sink; anything that a CXG cannot represent is reported before writing starts."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import (
    CorruptError,
    LimitError,
    NotFoundError,
    SchemaError,
    SourceError,
    StoreError,
    ValuesError,
)
from raggedatlas.formats.output_files import publish, refuse_existing
from raggedatlas.model.batch import Block, CsrBlock
from raggedatlas.model.frames import ColumnTable
from raggedatlas.model.protocols import SinkMatrix
from raggedatlas.wings.cxg.array_writer import (
    DenseBandWriter,
    MatrixWriter,
    create_group,
    grid_spec,
    write_metadata_array,
    write_table,
)
from raggedatlas.wings.cxg.options import (
    ANONYMOUS,
    EMB,
    FEATURE_NAME,
    GROUP_METADATA,
    OBS,
    OBSM,
    STRICT_KINDS,
    UNS,
    VAR,
    ConversionLoss,
    CxgOptions,
    embedding_name,
    is_embedding,
    is_path_name,
    sort_losses,
)
from raggedatlas.wings.cxg.source import cxg_source, obsm_name
from raggedatlas.wings.cxg.table_encoder import (
    SPILL_ROWS,
    Table,
    encode_table,
    make_names_unique,
)
from raggedatlas.wings.cxg.tiledb_arrays import tiledb_errors
from raggedatlas.wings.cxg.unstructured import CxgMetadata, collect_metadata, stored_var_index
from raggedatlas.wings.cxg.validation import validate

LOCK = "cxg.lock"
"""Lock file in a work folder, locked by the writing process."""

REPLACED = "replaced"
"""Name in a work folder for the CXG that is being overwritten."""

_NO_EMBEDDING = "embeddings are dense arrays of two or more numeric columns"
_ONE_MATRIX = "a CXG has a single matrix; x= selects another one"


def cxg_sink(path: Path, **choices: Any) -> "CxgSink":  # noqa: ANN401  (the fields of CxgOptions)
    """Return a sink that writes a CXG; `choices` are the fields of `CxgOptions`.

    Examples
    --------
    >>> sink = cxg_sink(Path("pbmc.cxg"), profile="0.2.0", title="PBMC", compute_embedding="pca")  # doctest: +SKIP
    """
    return CxgSink(path, CxgOptions.of(choices))


class CxgSink:
    """A `Sink` that writes a CXG to a temporary folder, and renames it to `path` at the end."""

    multimodal = False
    by_column = True
    """Whether tables may be passed as `ColumnTable`."""

    def __init__(self, path: Path, options: CxgOptions) -> None:
        self.path, self.options = path, options
        self.losses: tuple[ConversionLoss, ...] = ()
        self._losses: list[ConversionLoss] = []
        self._matrices: dict[str, SinkMatrix] = {}
        self._seen_embeddings: set[str] = set()
        self._frames: dict[str, Any] = {}
        self._uns: dict[str, Any] = {}
        self._tables: tuple[Table, Table] | None = None
        self._contents: CxgMetadata | None = None
        self._main: MatrixWriter | None = None
        self._embeddings: dict[str, _EmbeddingWriter] = {}
        if not options.overwrite:
            refuse_existing(path)
        if not path.parent.is_dir():
            raise StoreError(f"C01: {path} cannot be written: there is no folder {path.parent}; make it first.")
        # Next to the target, since `commit` renames and a rename cannot cross file systems; `_remove_abandoned`
        # parses this name.
        self._work = path.with_name(f".{path.name}.{uuid4().hex[:8]}.partial")
        self._folder = self._work / "cxg"
        with tiledb_errors(path, writes=True):
            _remove_abandoned(path.parent)
            self._work.mkdir()
            self._lock: int | None = _lock_folder(self._work)
        create_group(self._folder)
        create_group(self._folder / EMB)

    def begin(self, matrices: tuple[SinkMatrix, ...]) -> None:
        """Announce the matrices to write."""
        for matrix in matrices:
            if matrix.dtype.kind not in "biuf":
                raise SchemaError(
                    f"{matrix.key} has values of type {matrix.dtype}; only numbers and booleans can be written."
                )
            if matrix.key.startswith(OBSM):
                self._accept_embedding(matrix)
            elif self.wants(matrix.key):
                self._matrices[matrix.key] = matrix

    def wants(self, key: str) -> bool:
        """Return whether a CXG can hold an element, and record a loss if not."""
        head, _, rest = key.partition("/")
        if key in (OBS, VAR, self.options.x) or head == UNS:
            return True
        if head == "obsm" and rest:
            # `begin` has judged arrays that are matrices; tables in `obsm` come here first.
            if key not in self._seen_embeddings:
                self._losses.append(ConversionLoss(key, "lost", _NO_EMBEDDING))
            return key in self._matrices
        what = _ONE_MATRIX if head in ("X", "layers", "raw") else "a CXG has no place for it"
        self._losses.append(ConversionLoss("raw" if head == "raw" else key, "lost", what))
        return False

    def write(self, key: str, block: Block) -> None:
        """Append rows to a matrix; rows of matrices that a CXG cannot hold are ignored.

        The first rows start the writing: `SourceError`, by rule id, if something cannot be written or is rejected by
        ``strict``. Raises `ValuesError` for a value that float32 cannot represent (C03) or an infinite coordinate
        (C24).
        """
        self._start()
        if key == self.options.x:
            assert self._main is not None
            self._main.append(block)
        elif key in self._matrices:
            self._embeddings[embedding_name(key.removeprefix(OBSM))].append(block)

    def element(self, key: str, value: Any) -> None:  # noqa: ANN401  (any element that AnnData knows)
        """Write a complete element; elements must precede rows of matrices."""
        if self._tables is not None:
            raise SchemaError(f"{key} follows rows of a matrix; a CXG needs tables and metadata first.")
        head, _, rest = key.partition("/")
        if key in (OBS, VAR):
            # `obs` may be long and stays column by column; `_encode` needs columns of `var` together.
            self._frames[key] = value.frame() if key == VAR and isinstance(value, ColumnTable) else value
        elif head == UNS:
            self._uns.update({rest: value} if rest else dict(value))
        elif not rest and isinstance(value, Mapping):
            for name in value:
                self.wants(f"{head}/{name}")
        else:
            self.wants(key)

    def commit(self) -> str:
        """Move the CXG to its final path, and return that path."""
        self._start()
        assert self._main is not None
        assert self._tables is not None
        assert self._contents is not None
        self._main.finish()
        _check_rows(self.options.x, self._main.n_rows, self._main.shape[0])
        if self._main.first_nonfinite is not None:
            row, column = self._main.first_nonfinite
            what = f"{self._main.n_nonfinite:,} values are NaN or infinite, first at cell {row:,}, feature {column:,}; viewers cannot test such features for differential expression"
            losses = (ConversionLoss(self.options.x, "kept", what),)
            self.losses = sort_losses([*self.losses, *losses])
            if self.options.on_losses is not None:
                self.options.on_losses(losses)
        for writer in self._embeddings.values():
            writer.finish()
        embedder = self.options.embedder
        if embedder is not None and embedder.name not in self._embeddings:
            n_components = max(2, embedder.n_components)
            coordinates: NDArray[Any] = principal_components(self._main.blocks, self._main.shape, n_components)
            if embedder.layout is not None:
                coordinates = np.asarray(embedder.layout(coordinates), np.float32)
            matrix = SinkMatrix(f"{OBSM}{embedder.name}", "dense", coordinates.dtype, coordinates.shape)
            computed = _EmbeddingWriter(self._folder / EMB / embedder.name, matrix, self._main.shape[0])
            computed.append_values(coordinates)
            computed.finish()
        obs, var = self._tables
        write_table(self._folder / OBS, obs, self._contents.obs)
        write_table(self._folder / VAR, var, self._contents.var)
        write_metadata_array(self._folder / GROUP_METADATA, self._contents.group)
        if self._contents.uns:
            write_metadata_array(self._folder / UNS, self._contents.uns)
        try:
            broken = [str(problem) for problem in validate(self._folder) if problem.level == "must"]
            cxg_source(self._folder).close()
        except (NotFoundError, SourceError, LimitError) as error:
            broken = [str(error)]
        if broken:
            raise CorruptError(
                f"What was written cannot be read back ({broken[0]}), so nothing was kept. This is an error of raggedatlas; please report it."
            )
        with tiledb_errors(self.path, writes=True):
            # After a kill between the two renames, the next run moves the old CXG back (`_remove_abandoned`).
            publish(self._folder, self.path, self._work / REPLACED, overwrite=self.options.overwrite)
        self._remove_work()
        return str(self.path)

    def abort(self) -> None:
        """Remove everything written so far."""
        if self._main is not None:
            self._main.abort()
        self._remove_work()

    def _remove_work(self) -> None:
        shutil.rmtree(self._work, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _accept_embedding(self, matrix: SinkMatrix) -> None:
        """Accept an array of ``obsm`` as an embedding, or record why not."""
        self._seen_embeddings.add(matrix.key)
        name, chosen = matrix.key.removeprefix(OBSM), self.options.embeddings
        plain = matrix.form == "dense" and len(matrix.shape) == 2 and matrix.shape[1] >= 2
        if not plain:
            why = _NO_EMBEDDING
        elif chosen is not None and name not in chosen:
            why = "not among embeddings="
        elif chosen is None and not is_embedding(name, matrix.shape[1], matrix.dtype):
            why = "embeddings are named spatial or X_<name>, or have 2 or 3 columns; use embeddings= to select others"
        elif not is_path_name(embedding_name(name)):
            why = "not a valid name of an embedding; rename it"
        else:
            self._matrices[matrix.key] = matrix
            if matrix.dtype not in (np.float32, np.float64):
                self._losses.append(ConversionLoss(matrix.key, "converted", f"{matrix.dtype} is written as float32"))
            return
        self._losses.append(ConversionLoss(matrix.key, "lost", why))

    def _start(self) -> None:
        """Decide everything that needs no matrix values, report losses, and create the arrays."""
        if self._tables is not None:
            return
        x = self._matrices.get(self.options.x)
        missing = [name for name in (OBS, VAR) if name not in self._frames]
        if x is None or missing:
            rule = "C17" if x is None else "C10" if OBS in missing else "C11"
            raise SourceError(
                f"{rule}: {self.options.x if x is None else missing[0]} is missing, and a CXG needs it. {_available_text(self._losses)}"
            )
        shape = (x.shape[0], x.shape[1])
        lengths = tuple(len(self._frames[name]) for name in (OBS, VAR))
        # TileDB has no axis of length 0.
        if shape != lengths or 0 in shape:
            raise SourceError(
                f"C71: {x.key} has shape {shape}, but there are {lengths} cells and features; a CXG needs at least one of each."
            )
        names = self._embedding_names()
        if x.dtype.kind == "f" and x.dtype.itemsize > 4:
            self._losses.append(ConversionLoss(x.key, "rounded", "float64 is written as float32"))
        if x.dtype not in (np.float32, np.float64):
            self._losses.append(ConversionLoss(x.key, "converted", f"{x.dtype} is written as float32"))
        tables = self._encode()
        contents = collect_metadata(self._uns, tables[0], self.options)
        self.losses = sort_losses([*self._losses, *tables[0].losses, *tables[1].losses, *contents.losses])
        bad = [loss for loss in self.losses if loss.fate in STRICT_KINDS]
        if self.options.strict and bad:
            details = "; ".join(str(loss) for loss in bad[:8]) + (
                "" if len(bad) <= 8 else f"; and {len(bad) - 8:,} more"
            )
            raise SourceError(
                f"A CXG cannot represent everything, and strict is set: {details}. Leave these elements out, or unset strict."
            )
        if self.options.on_losses is not None:
            self.options.on_losses(self.losses)
        # `_tables` marks the start; the frames are released before rows arrive, as the tables replace them.
        self._tables, self._contents, self._frames, self._uns = tables, contents, {}, {}
        self._main = MatrixWriter(self._folder, self._work / "columns", shape, x.n_entries, self.options)
        for key, name in names.items():
            self._embeddings[name] = _EmbeddingWriter(self._folder / EMB / name, self._matrices[key], shape[0])

    def _encode(self) -> tuple[Table, Table]:
        var = self._frames[VAR]
        shown = self.options.var_index or stored_var_index(self._uns)
        if self.options.var_index is not None and shown not in var.columns:
            raise SourceError(
                f"C30: var has no column {shown!r} for var_index; available are {[str(c) for c in var.columns][:20]}."
            )
        # A stored choice (`uns["cxg"]`) is taken as it is; only a requested column is made unique.
        if self.options.var_index is not None and FEATURE_NAME not in var.columns and not var[shown].is_unique:
            self._losses.append(
                ConversionLoss(f"var/{FEATURE_NAME}", "converted", f"made of {shown}, whose names are shared")
            )
            var, shown = var.assign(**{FEATURE_NAME: make_names_unique(var[shown])}), FEATURE_NAME
        if shown is None and FEATURE_NAME in var.columns:
            names = var[FEATURE_NAME]
            shown = FEATURE_NAME if names.is_unique and not names.isna().any() else None
        shown = shown if shown in var.columns else None
        obs = self._frames[OBS]
        # Columns are encoded now, for the losses, but written in `commit`; long ones wait in files meanwhile.
        spool = self._work / "cells" if len(obs) > SPILL_ROWS else None
        return encode_table(obs, self.options, spool=spool), encode_table(var, self.options, VAR, shown)

    def _embedding_names(self) -> dict[str, str]:
        keys = [key for key in self._matrices if key.startswith(OBSM)]
        names = {key: embedding_name(key.removeprefix(OBSM)) for key in keys}
        duplicates = [key for key, name in names.items() if list(names.values()).count(name) > 1]
        if duplicates:
            raise SourceError(
                f"C25: {duplicates} would become the same embedding {names[duplicates[0]]!r}; choose one with embeddings=[...]."
            )
        if not names and self.options.embedder is None:
            raise SourceError(
                "C22: there is no embedding, which viewers need. Add one as obsm['X_<name>'], select one with "
                f"embeddings=[...], or compute one with compute_embedding='pca'. {_available_text(self._losses)}".rstrip()
            )
        for key, name in names.items():
            back = obsm_name(name, list(names.values()))
            if f"{OBSM}{back}" != key:
                self._losses.append(
                    ConversionLoss(key, "converted", f"it is written as {name!r}, and comes back as {back!r}")
                )
        return names


class _EmbeddingWriter:
    """Writer of one embedding."""

    def __init__(self, path: Path, matrix: SinkMatrix, n_cells: int) -> None:
        self._key = matrix.key
        dtype = matrix.dtype if matrix.dtype in (np.float32, np.float64) else np.dtype(np.float32)
        if matrix.shape[0] != n_cells:
            raise SourceError(
                f"C23: {matrix.key} has {matrix.shape[0]:,} rows, but there are {n_cells:,} cells; write it again."
            )
        self._bands = DenseBandWriter(path, grid_spec(matrix.shape[:2], {ANONYMOUS: str(dtype)}))
        self._dtype, self._n, self._all_missing, self._rows = dtype, n_cells, True, 0

    def append(self, block: Block) -> None:
        if isinstance(block, CsrBlock):
            raise SchemaError(f"{self._key} was announced as dense, but got a sparse block.")
        self.append_values(block.layers["values"])

    def append_values(self, values: NDArray[Any]) -> None:
        wrong = np.flatnonzero(np.isinf(values).any(axis=1)) if values.dtype.kind == "f" else np.empty(0, int)
        if len(wrong):
            raise ValuesError(
                f"C24: {self._key} has an infinite coordinate for cell {self._rows + int(wrong[0]):,}, which viewers cannot show. Make it NaN, "
                "or leave the embedding out with embeddings=[...]."
            )
        self._all_missing &= values.dtype.kind == "f" and bool(np.isnan(values).all())
        small = values.astype(self._dtype)

        def fill(band: NDArray[Any], rows: slice) -> None:
            band[:] = small[rows]

        self._bands.append(len(values), fill)
        self._rows += len(values)

    def finish(self) -> None:
        _check_rows(self._key, self._rows, self._n)
        if self._all_missing:
            raise ValuesError(f"C24: all coordinates of {self._key} are NaN; leave it out with embeddings=[...].")
        self._bands.close()


def _lock_folder(work: Path) -> int | None:
    """Lock a new work folder until this process ends; return None if the system does not support locks."""
    try:
        import fcntl
    except ImportError:
        return None
    lock = os.open(work / f"{LOCK}.new", os.O_CREAT | os.O_RDWR, 0o600)
    # Without locks (some network file systems) the first name stays: no run removes the folder after a kill.
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Renamed only once locked, so that no other run mistakes the folder for an abandoned one.
        (work / f"{LOCK}.new").rename(work / LOCK)
    return lock


def _remove_abandoned(folder: Path) -> None:
    """Remove work folders of killed runs, i.e. those whose lock is free."""
    for lock in folder.glob(f".*.partial/{LOCK}"):
        with suppress(OSError, ImportError):
            import fcntl

            with lock.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                replaced = lock.parent / REPLACED
                # `.NAME.HEX.partial` -> `NAME`; split from the right, since `NAME` has dots too.
                target = folder / lock.parent.name[1:].rsplit(".", 2)[0]
                if replaced.exists() and not target.exists():
                    # Killed between the two renames of an overwrite: restore the old CXG.
                    replaced.rename(target)
                shutil.rmtree(lock.parent, ignore_errors=True)


def _check_rows(key: str, n: int, expected: int) -> None:
    if n != expected:
        raise SchemaError(f"{key} has {n:,} of {expected:,} rows; write the rest before commit().")


def _available_text(noted: list[ConversionLoss]) -> str:
    keys = [loss.key for loss in noted if loss.fate == "lost"]
    return f"Available elements: {keys[:10]}." if keys else ""


_OVERSAMPLED = 10
_POWERS = 4
_SCALED_TO = 1e4


def principal_components(
    blocks: Callable[[], Iterator[Block]], shape: tuple[int, int], n_components: int
) -> NDArray[np.float32]:
    """Compute principal components in a few passes over the rows; counts are normalized to 10,000 per cell and logged.

    Each call of `blocks` iterates over all rows, in blocks with the layer ``"values"``; `shape` is ``(n_cells,
    n_features)``. The result is (n_cells, n_components); the entry with the largest magnitude of each component is
    positive, and missing components are 0.

    Notes
    -----
    Memory: ``n_components + 10`` float64 per cell and per feature, duplicates, and one block.
    """
    matrix = _LogNormalized(blocks, shape)
    components = np.zeros((shape[0], n_components), np.float32)
    size = min(n_components + _OVERSAMPLED, *shape)
    if not min(n_components, size):
        return components
    # Singular vectors by random projections, which only multiply the matrix.
    basis = np.linalg.qr(matrix.multiply(np.random.default_rng(0).standard_normal((shape[1], size))))[0]
    for _ in range(_POWERS):
        # Without QR in between, rounding would turn all vectors towards the first singular one.
        basis = np.linalg.qr(matrix.multiply(np.linalg.qr(matrix.multiply_transposed(basis))[0]))[0]
    left, lengths, _ = np.linalg.svd(matrix.multiply_transposed(basis).T, full_matrices=False)
    scores = basis @ left[:, :n_components] * lengths[:n_components]
    # The sign of a singular vector is arbitrary; this rule makes runs comparable.
    largest = np.take_along_axis(scores, np.abs(scores).argmax(axis=0)[None, :], axis=0)
    components[:, : scores.shape[1]] = scores * np.where(largest < 0, -1.0, 1.0)
    return components


class _LogNormalized:
    """A matrix read in blocks, log-normalized if it holds counts, minus the means of its columns, which are subtracted from products."""

    def __init__(self, blocks: Callable[[], Iterator[Block]], shape: tuple[int, int]) -> None:
        self._blocks, self._shape = blocks, shape
        values = (block.layers["values"] for block in blocks())
        self._counts = all(bool(((v >= 0) & (v == np.floor(v))).all()) for v in values)
        total = np.zeros(shape[1])
        for part in self._parts():
            total += np.asarray(part.sum(axis=0)).reshape(-1)
        self._mean = total / shape[0]

    def multiply(self, factor: NDArray[np.float64]) -> NDArray[np.float64]:
        out = np.empty((self._shape[0], factor.shape[1]))
        row = 0
        for part in self._parts():
            out[row : row + part.shape[0]] = part @ factor
            row += part.shape[0]
        out -= self._mean @ factor
        return out

    def multiply_transposed(self, factor: NDArray[np.float64]) -> NDArray[np.float64]:
        out = np.zeros((self._shape[1], factor.shape[1]))
        row = 0
        for part in self._parts():
            out += part.T @ factor[row : row + part.shape[0]]
            row += part.shape[0]
        out -= np.outer(self._mean, factor.sum(axis=0))
        return out

    def _parts(self) -> Iterator[Any]:
        from scipy.sparse import csr_array

        for block in self._blocks():
            # One NaN or infinite value would make every component NaN.
            values = np.nan_to_num(block.layers["values"].astype(np.float64), posinf=0, neginf=0)
            if isinstance(block, CsrBlock):
                rows = np.repeat(np.arange(block.n_rows), np.diff(block.indptr))
                totals: NDArray[np.float64] = np.bincount(rows, values, block.n_rows).astype(np.float64)
                scaled = self._scaled(values, totals[rows])
                yield csr_array((scaled, block.indices, block.indptr), shape=(block.n_rows, block.n_cols))
            else:
                yield self._scaled(values, values.sum(axis=1, keepdims=True))

    def _scaled(self, values: NDArray[np.float64], totals: NDArray[np.float64]) -> NDArray[np.float64]:
        if not self._counts:
            return values
        return np.log1p(values * _SCALED_TO / np.where(totals > 0, totals, 1.0))

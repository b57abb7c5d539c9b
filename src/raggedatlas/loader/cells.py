"""The cells of a loader: their places, uids and metadata, as arrays in memory, or as records of a file that processes of one machine map."""

import base64
import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.assets import asset_kind
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.features import read_ahead
from raggedatlas.errors import QueryError, StoreError
from raggedatlas.loader.batch import BatchMetadata, ModalityMetadata
from raggedatlas.model.frames import DATASET, ColumnFacts, facts_of
from raggedatlas.model.spaces import pointer_columns
from raggedatlas.query.cells import (
    BLOCK_CELLS,
    Cells,
    cell_columns,
    pointer_parts,
    uid_bytes,
    walk_cells,
    warn_of_values,
)
from raggedatlas.query.modalities import SpacePointers, find_modality, locate, read_modalities
from raggedatlas.query.plan import default_spaces, layout_codes, pin_cells, plan_read, plan_spaces
from raggedatlas.query.query import Query
from raggedatlas.query.read import SpacePlan
from raggedatlas.store.filters import Columns, to_sql
from raggedatlas.store.record_files import RecordFolder, Records
from raggedatlas.store.runtime import prefetch, release_unused_memory
from raggedatlas.store.tables import ROW_ID

IN_MEMORY_CELLS = 2**17
"""Up to this many cells are held in memory, at some 50 bytes a cell; more are mapped from a file."""

_UID = np.dtype("S16")


@dataclass(frozen=True, eq=False)
class ObsColumn:
    """One metadata column of all cells.

    `values`, (n_cells,), are int32 codes, -1 where the value is missing, or numbers: integers with missing values are
    float64 with NaN, and refused from 2**53 on.
    """

    values: NDArray[Any]
    categories: NDArray[np.object_] | None = None  # (n_categories,): what the codes mean; None for numbers


@dataclass(frozen=True)
class CellRequest:
    """What is needed of the cells of a query; pickled without what is derived."""

    query: Query
    names: Mapping[str, str]  # asked metadata column -> what the cell table calls it, or `DATASET`
    categories: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # by asked column
    extra: str | None = None  # a stored column that no batch carries

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what was asked."""
        return CellRequest, (self.query, self.names, self.categories, self.extra)

    @cached_property
    def catalog(self) -> Catalog:
        """The atlas with its cell table pinned, so that it can be walked over again."""
        return pin_cells(self.query.catalog)

    @cached_property
    def columns(self) -> Columns:
        """What may be named."""
        return cell_columns(self.catalog)

    @cached_property
    def spaces(self) -> list[SpacePointers]:
        """The spaces that are read; a cell needs one of them."""
        known = read_modalities(self.catalog)
        return [
            find_modality(known, name, self.catalog) for name in default_spaces(self.query.spec, known, self.catalog)
        ]

    @cached_property
    def modalities(self) -> dict[str, SpacePointers]:
        """The spaces and results that are read."""
        known = read_modalities(self.catalog)
        return {m.name: m for m in self.spaces} | {name: known[name] for name in self.query.spec.results}

    @cached_property
    def pointers(self) -> list[str]:
        """The pointer columns that are read."""
        stored = pointer_columns(self.columns.schema)
        return [*dict.fromkeys(p for m in self.modalities.values() for p in m.pointers if p in stored)]

    def plan(self, datasets: NDArray[np.int32], pointing: NDArray[np.bool_]) -> dict[str, SpacePlan]:
        """Plan the spaces and results for every kind of cell; each kind is one cell of the plans.

        `datasets`, (k,), is the position of each kind's dataset among those of the atlas; `pointing`, (k, n_pointers),
        tells which of the columns in `pointers` have a value.
        """
        nothing = np.zeros(len(datasets), np.int64)
        places = {
            name: (nothing, pointing[:, i].astype(np.int64), pointing[:, i]) for i, name in enumerate(self.pointers)
        }
        results = [asset_kind("results").find(self.catalog, name)[0] for name in self.query.spec.results]
        kinds = Cells(pa.table({}), datasets, self.columns, places=places)
        read_ahead(self.catalog).result()
        spaces, beside = plan_spaces(self.query.spec, self.catalog, self.spaces, results, kinds)
        return {**spaces, **beside}


@dataclass(frozen=True, eq=False)
class PlannedCells:
    """All cells of a query, and the spaces that are read of them."""

    request: CellRequest  # by which another process finds the cells again where their file is gone
    spaces: Mapping[str, SpacePlan]
    uids: NDArray[np.bytes_]  # (n_cells,)
    columns: Mapping[str, ObsColumn]
    extra: ObsColumn | None  # pickled only with the name of a file, see `keeps_extra`
    facts: BatchMetadata  # shared by all batches
    records: Records | None = None  # of which the arrays are views

    @property
    def n(self) -> int:
        """Number of cells."""
        return len(self.uids)

    @property
    def keeps_extra(self) -> bool:
        """Whether a pickle has the extra column."""
        return self.extra is not None and self.records is not None and self.records.path is not None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the name of the file in place of the arrays, which another process of the machine maps too."""
        if self.records is None or self.records.path is None:
            return PlannedCells, (self.request, self.spaces, self.uids, self.columns, None, self.facts)
        nothing = np.empty(0, self.records.array.dtype)
        bare = {name: _attached(number, space, nothing) for number, (name, space) in enumerate(self.spaces.items())}
        return _restore, (self.request, bare, self.facts, self.records.path)


def _restore(request: CellRequest, spaces: Mapping[str, SpacePlan], facts: BatchMetadata, path: Any) -> PlannedCells:  # noqa: ANN401
    from raggedatlas.store.record_files import map_records

    with suppress(StoreError):
        return _of_records(request, spaces, facts, map_records(path))
    # Another machine, or the file has been removed since.
    found = stream_cells(request)
    if found is None or found.facts.key != facts.key:
        raise StoreError(f"The cells of {request.query!r} are not those of the pickled loader; make the loader again.")
    return found


def cells_in_memory(request: CellRequest) -> PlannedCells:
    """Read the cells into memory."""
    plan = plan_read(request.query.spec, request.query.catalog)
    shown = cell_columns(request.query.catalog).shown
    columns = {
        name: obs_column(plan.obs, shown.get(stored, stored), request.categories.get(name))
        for name, stored in request.names.items()
    }
    extra = obs_column(plan.obs, shown.get(request.extra, request.extra)) if request.extra else None
    uids, spaces = uid_bytes(plan.obs.column("uid")), {**plan.spaces, **plan.results}
    known = {name: one.categories for name, one in columns.items() if one.categories is not None}
    facts = _facts(spaces, hashlib.blake2b(uids.tobytes(), digest_size=16), known)
    return PlannedCells(request, spaces, uids, columns, extra, facts)


def stream_cells(request: CellRequest) -> PlannedCells | None:
    """Write the cells to a file of records, or map the file that holds them already.

    Returns None if the atlas has at most `IN_MEMORY_CELLS` cells, where cells do not come in the order of the table,
    for results that are no spaces, and for uids of another length than those that are made here.
    """
    spec, catalog = request.query.spec, request.query.catalog
    plain = spec.search is None and spec.sample is None and spec.limit is None and not spec.order and not spec.centroids
    # Of the cells of such a query, nothing but pointers and metadata is needed.
    results = (asset_kind("results").find(catalog, name)[0] for name in spec.results)
    if not plain or any(result.kind != "space" for result in results):
        return None
    if catalog.tables.count(CELLS) <= IN_MEMORY_CELLS:
        return None
    columns, names = request.columns, [*request.names.values(), *filter(None, [request.extra])]
    # Files never change and have random names, so they tell the content, of a moved or replaced atlas too.
    fragments = request.catalog.tables.open(CELLS).get_fragments()
    identity = {
        "spec": repr(spec),
        "where": to_sql(spec.filters, columns),
        "fragments": [([file.path for file in f.data_files()], f.deletion_file()) for f in fragments],
        "datasets": list(columns.datasets.items()),
        "pointers": request.pointers,
        "columns": {name: str(columns.schema.field(name).metadata) for name in names if name in columns.schema.names},
        # Value by value: the text of a whole array or index leaves its middle out.
        "named": [
            [*request.names.items()],
            [(n, [*map(repr, v)]) for n, v in request.categories.items()],
            request.extra,
        ],
    }
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    folder = RecordFolder.of_options(catalog.location.storage_options)

    def held() -> PlannedCells | None:
        """Plan the spaces of cells that a file holds; None if they are not those for which it was made."""
        records = folder.find(key)
        if records is None:
            return None
        stored = records.facts
        pointing = np.array(stored["pointing"], bool).reshape(len(stored["datasets"]), len(request.pointers))
        planned = request.plan(np.array(stored["datasets"], np.int32), pointing)
        unpacked = zip(request.names, map(_unpacked, stored["categories"]), strict=False)
        facts = _facts(planned, hashlib.blake2b(digest_size=16), {k: v for k, v in unpacked if v is not None})
        if facts.key != stored["spaces"]:
            return None
        return _of_records(request, planned, replace(facts, key=stored["key"]), records)

    if (known := held()) is not None:
        return known
    with folder.lock(key), suppress(_OtherUidsError):
        # Another process may have written it while this one waited.
        return held() or _written(request, folder, key)
    return None


class _OtherUidsError(Exception):
    """Some uids have another length than those that are made here."""


def _written(request: CellRequest, folder: RecordFolder, key: str) -> PlannedCells:
    """Walk over the cells twice: for what kinds and values there are, and for the records."""
    spec, columns, tables = request.query.spec, request.columns, request.catalog.tables
    named = [*request.names.items(), *([(request.extra, request.extra)] if request.extra else [])]
    types = {DATASET: pa.string()} | {name: columns.schema.field(name).type for _, name in named if name != DATASET}
    coders = [
        ColumnCoder(stored, name, types[stored], columns.facts.get(stored), request.categories.get(name))
        for name, stored in named
    ]
    wanted = list(dict.fromkeys(coder.stored for coder in coders if coder.stored != DATASET))
    firsts = [pointer_parts(columns.schema, name)[0] for name in request.pointers]
    needed = {pointer for space in request.spaces for pointer in space.pointers}
    of_spaces = [i for i, name in enumerate(request.pointers) if name in needed]
    kinds: dict[bytes, tuple[int, NDArray[np.bool_]]] = {}
    in_order, last, n_seen, n_cells = True, -1, 0, 0
    for every in walk_cells(tables, spec, columns, [*wanted, *firsts]):
        n_seen += every.n
        valid = np.zeros((every.n, len(firsts)), bool)
        for i, first in enumerate(firsts):
            valid[:, i] = every.table.column(first).is_valid().to_numpy()
        kept = np.flatnonzero(valid[:, of_spaces].any(axis=1)) if request.spaces else np.arange(every.n)
        cells, valid = (every, valid) if len(kept) == every.n else (every.take(kept), valid[kept])
        n_cells += cells.n
        ids = cells.table.column(ROW_ID).to_numpy()
        in_order = in_order and bool((ids[1:] > ids[:-1]).all()) and not (len(ids) and int(ids[0]) <= last)
        last = int(ids[-1]) if len(ids) else last
        # Most cells are of one kind with the cell before them, so few are sorted.
        own = cells.dataset_code
        new = np.flatnonzero(np.r_[cells.n > 0, (own[1:] != own[:-1]) | (valid[1:] != valid[:-1]).any(axis=1)])
        rows = np.concatenate([own[new, None].view(np.uint8), np.packbits(valid[new], axis=1)], axis=1)
        _, first_rows = np.unique(rows.view(f"V{rows.shape[1]}").ravel(), return_index=True)
        kinds |= {rows[i].tobytes(): (int(own[new[i]]), valid[new[i]]) for i in first_rows.tolist()}
        for coder in coders:
            coder.look(coder.of(cells))
    warn_of_values(request.catalog, spec, columns, n_seen)
    for coder in coders:
        coder.settle()
    release_unused_memory()
    listed = [kinds[kind] for kind in sorted(kinds)]
    datasets = np.array([code for code, _ in listed], np.int32)
    pointing = np.array([valid for _, valid in listed], bool).reshape(len(listed), len(firsts))
    planned = request.plan(datasets, pointing)
    # All values of a cell are next to each other in its record.
    fields: list[tuple[str, Any]] = [("uid", _UID), *([] if in_order else [("row", "i8")])]
    for number, space in enumerate(planned.values()):
        for at in range(len(space.parts)):
            fields += [(f"{number}.{at}.start", "i8"), (f"{number}.{at}.end", "i8"), (f"{number}.{at}.code", "i4")]
        fields += [(f"{number}.layout", "i4"), (f"{number}.present", "?")]
    fields += [(f"obs.{at}", coder.dtype) for at, coder in enumerate(coders)]
    # Widest first, so that no bytes are left between the fields.
    dtype = np.dtype(sorted(fields, key=lambda one: -np.dtype(one[1]).itemsize), align=True)
    known = {
        name: one.categories for name, one in zip(request.names, coders, strict=False) if one.categories is not None
    }
    stored: dict[str, Any] = {
        "datasets": datasets.tolist(),
        "pointing": pointing.tolist(),
        "categories": [coder.packed() for coder in coders],
        "spaces": _facts(planned, hashlib.blake2b(digest_size=16), known).key,
    }

    def blocks() -> Iterator[NDArray[Any]]:
        digest = hashlib.blake2b(digest_size=16)

        def hashed(block: NDArray[Any]) -> NDArray[Any]:
            digest.update(block["uid"].tobytes())
            return block

        walked = walk_cells(tables, spec, columns, [*wanted, "uid"], request.pointers)
        made = (_filled(request, dtype, cells, planned, coders) for cells in walked)
        if not in_order:
            # By the row ids of their cells, which an update has moved in the table.
            held = RecordFolder(None, 0).write("", dtype, made, {}).array
            order = np.argsort(held["row"], kind="stable")
            made = (held[order[start : start + BLOCK_CELLS]] for start in range(0, len(order), BLOCK_CELLS))
        # The caller writes a block while the next ones are read and made.
        with closing(prefetch(map(hashed, made))) as done:
            yield from done
        stored["key"] = _facts(planned, digest, known).key

    records = None
    for place in (folder, RecordFolder(None, 0)) if n_cells > IN_MEMORY_CELLS else ():
        # A disk that is full or cannot be written to: the next place.
        with suppress(OSError):
            records = place.write(key, dtype, blocks(), stored)
            break
    if records is None:
        records = Records(np.concatenate([np.empty(0, dtype), *blocks()]), stored)
    release_unused_memory()
    facts = replace(_facts(planned, hashlib.blake2b(), known), key=stored["key"])
    return _of_records(request, planned, facts, records)


def _filled(
    request: CellRequest,
    dtype: np.dtype[Any],
    cells: Cells,
    planned: Mapping[str, SpacePlan],
    coders: "Sequence[ColumnCoder]",
) -> NDArray[Any]:
    """Make the records of those cells of a block that have one of the spaces."""
    if request.spaces:
        having = cells.pointing([pointer for space in request.spaces for pointer in space.pointers])
        cells = cells if having.all() else cells.take(np.flatnonzero(having))
    made = np.zeros(cells.n, dtype)
    made["uid"] = uids = uid_bytes(cells.table.column("uid"))
    if cells.n and uids.dtype != _UID:
        raise _OtherUidsError
    if "row" in made.dtype.fields:
        made["row"] = cells.table.column(ROW_ID).to_numpy()
    for number, (name, space) in enumerate(planned.items()):
        parts = [locate(part, cells) for part in space.parts]
        for at, part in enumerate(parts):
            made[f"{number}.{at}.start"], made[f"{number}.{at}.end"] = part.start, part.end
            made[f"{number}.{at}.code"] = part.code
        made[f"{number}.layout"] = layout_codes(space.layouts, parts[0])
        made[f"{number}.present"] = cells.pointing(request.modalities[name].pointers)
    for at, coder in enumerate(coders):
        made[f"obs.{at}"] = coder.encode(coder.of(cells))
    return made


def _of_records(
    request: CellRequest, spaces: Mapping[str, SpacePlan], facts: BatchMetadata, records: Records
) -> PlannedCells:
    """Make the arrays views of the records."""
    array = records.array
    own = {name: _attached(number, space, array) for number, (name, space) in enumerate(spaces.items())}
    columns = {name: ObsColumn(array[f"obs.{at}"], facts.categories.get(name)) for at, name in enumerate(request.names)}
    extra, last = None, len(request.names)
    if request.extra is not None:
        extra = ObsColumn(array[f"obs.{last}"], _unpacked(records.facts["categories"][last]))
    return PlannedCells(request, own, array["uid"], columns, extra, facts, records)


def _attached(number: int, space: SpacePlan, array: NDArray[Any]) -> SpacePlan:
    """Return the plan of a space whose cells are in records."""
    parts = []
    for at, part in enumerate(space.parts):
        code, start, end = (array[f"{number}.{at}.{what}"] for what in ("code", "start", "end"))
        parts.append(replace(part, code=code, start=start, end=end, group_of={}))
    layout_code, present = array[f"{number}.layout"], array[f"{number}.present"]
    return replace(space, parts=tuple(parts), layout_code=layout_code, present=present)


def _unpacked(packed: str | None) -> NDArray[np.object_] | None:
    if packed is None:
        return None
    with pa.ipc.open_stream(base64.b64decode(packed)) as stream:
        return np.array(stream.read_all().column(0).to_pylist(), dtype=object)


def _facts(spaces: Mapping[str, SpacePlan], key: Any, categories: Mapping[str, NDArray[np.object_]]) -> BatchMetadata:  # noqa: ANN401
    """Describe what all batches share; `key` is a hash of the uids."""
    modalities = {
        name: ModalityMetadata(
            space.features, space.layouts, np.vstack([space.measured, np.zeros((1, len(space.features)), bool)])
        )
        for name, space in spaces.items()
    }
    # The key stands for cells, columns and codes: a loader refuses a state that was taken with another key.
    for name, space in spaces.items():
        parts: Sequence[object] = (name, space.layers, space.n_cols, space.nan, *space.features.tolist())
        key.update(repr(parts).encode())
    key.update(repr({name: known.tolist() for name, known in categories.items()}).encode())
    return BatchMetadata(key.hexdigest(), modalities, categories)


class ColumnCoder:
    """Turns a metadata column into numbers or codes, a block of cells at a time.

    Call `look` with every block, `settle` once, and then `encode` with any block. `stored` is what the cell table calls
    the column, or `DATASET`; `facts` is what it was in its file; for `categories` see `obs_column`.
    """

    def __init__(
        self, stored: str, name: str, kind: pa.DataType, facts: ColumnFacts | None, categories: Sequence[Any] | None
    ) -> None:
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if pa.types.is_nested(kind):
            raise QueryError(
                f"The metadata column {name!r} holds {kind}; batches carry columns of numbers, text, truth values or times."
            )
        self.stored, self.name, self._kind = stored, name, kind
        self._known = None if categories is None else _given(name, kind, categories)
        # The order of those that occur, as in every output of a query.
        ordered = None if facts is None else facts.categories
        self._ordered = None if ordered is None else _given(name, kind, ordered)
        if self._known is None and pa.types.is_boolean(kind):
            # Both, so that codes do not depend on which of them occur.
            self._known = pa.array([False, True])
        self._is_number = (
            categories is None and ordered is None and bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))
        )
        self._any_missing = self._is_wide = False
        self._found: list[pa.Array] = []
        self._most = BLOCK_CELLS

    def of(self, cells: Cells) -> pa.ChunkedArray:
        """Return the column of some cells."""
        return pa.chunked_array([cells.names()]) if self.stored == DATASET else cells.table.column(self.stored)

    def look(self, column: pa.ChunkedArray) -> None:
        """Note whether values are missing, and which there are."""
        if self._is_number:
            self._any_missing = self._any_missing or column.null_count > 0
            if pa.types.is_integer(self._kind):
                least, most = pc.min_max(column).values()
                self._is_wide |= max(-(least.as_py() or 0), most.as_py() or 0) >= 2**53
        else:
            self._found.append(pc.unique(column.cast(self._kind)).drop_null())
            if sum(map(len, self._found)) > self._most:
                self._found = [pc.unique(pa.chunked_array(self._found))]
                self._most = max(BLOCK_CELLS, 2 * len(self._found[0]))

    def settle(self) -> None:
        """Number the values, if they have codes, with a warning of those outside the given categories; refuse integers that floats would round."""
        if self._any_missing and self._is_wide:
            raise QueryError(
                f"The column {self.name!r} holds integers of 2**53 or more and missing values, which batches carry as floats and would round. "
                f"Leave it out, choose cells that have it, or give its values as categories={{{self.name!r}: [...]}}, which are coded exactly."
            )
        if self._is_number:
            return
        distinct = pc.unique(pa.chunked_array(self._found, self._kind))
        distinct, self._found = distinct.take(pc.sort_indices(distinct)), []
        if self._known is None:
            ordered = distinct.slice(0, 0) if self._ordered is None else self._ordered
            first = ordered.filter(pc.is_in(ordered, value_set=distinct))
            self._known = pa.concat_arrays([first, distinct.filter(pc.invert(pc.is_in(distinct, value_set=first)))])
            return
        others = distinct.filter(pc.invert(pc.is_in(distinct, value_set=self._known))).to_pylist()
        if others:
            warnings.warn(
                f"The categories of {self.name!r} lack {len(others):,} values that cells have: "
                f"{', '.join(map(repr, others[:5]))}{', ...' if len(others) > 5 else ''}. These cells have the code -1, like cells without a "
                "value; name these categories too, or choose other cells with where(...).",
                UserWarning,
                stacklevel=2,
            )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of what `encode` returns."""
        if not self._is_number:
            return np.dtype(np.int32)
        turned = self._any_missing and pa.types.is_integer(self._kind)
        return np.dtype(np.float64 if turned else self._kind.to_pandas_dtype())

    @property
    def categories(self) -> NDArray[np.object_] | None:
        """What the codes mean; None for numbers."""
        return None if self._known is None else np.array(self._known.to_pylist(), dtype=object)

    def packed(self) -> str | None:
        """Return the categories as text that `_unpacked` reads."""
        if self._known is None:
            return None
        sink, table = pa.BufferOutputStream(), pa.table({"category": self._known})
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        return base64.b64encode(sink.getvalue()).decode()

    def encode(self, column: pa.ChunkedArray) -> NDArray[Any]:
        """Return numbers, NaN where missing, or int32 codes, -1 where missing."""
        column = column.cast(self._kind)
        if not self._is_number:
            codes = pc.index_in(column, value_set=self._known).fill_null(-1)
            return np.asarray(codes.to_numpy(), np.int32)
        if self._any_missing and pa.types.is_integer(column.type):
            column = column.cast(pa.float64())
        if column.null_count:
            column = column.fill_null(float("nan"))
        values: NDArray[Any] = np.ascontiguousarray(column.to_numpy())
        return values


def obs_column(table: pa.Table, name: str, categories: Sequence[Any] | None = None) -> ObsColumn:
    """Turn a column of a plan's `obs` into an array.

    `categories` are in the order of their codes; other values are coded -1, with a warning. None takes the values that
    occur (of truth values, both), in the order of the atlas for a categorical column, else sorted. Columns of lists or
    structs are refused.
    """
    column, kept = table.column(name), table.schema.field(name)
    coder = ColumnCoder(name, name, kept.type, facts_of(kept), categories)
    coder.look(column)
    coder.settle()
    return ObsColumn(coder.encode(column), coder.categories)


def _given(name: str, kind: pa.DataType, categories: Sequence[Any]) -> pa.Array:
    if isinstance(categories, str) or len(set(categories)) != len(categories):
        raise QueryError(f"The categories of {name!r} must be a list without duplicates, not {categories!r}.")
    try:
        return pa.array(list(categories)).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise QueryError(
            f"The column {name!r} holds {kind}; the categories {list(categories)!r} do not fit."
        ) from error

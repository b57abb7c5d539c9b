"""Plan of adding a model's result. Every refusal is raised here, before the first write (seed 003)."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.assets import RESULT_ASSETS, read_records
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.errors import DuplicateError, NameRefusedError, NotFoundError, SchemaError, SourceError, ValuesError
from raggedatlas.ingest.columns import FILLED
from raggedatlas.ingest.options import AddOptions
from raggedatlas.model.arguments import METRICS, Metric
from raggedatlas.model.assets import Kind, ResultRecord, result_columns
from raggedatlas.model.frames import find_column, metadata_columns
from raggedatlas.model.ids import COLUMN, check_length, new_uid
from raggedatlas.model.spaces import PointerKind, pointer_columns
from raggedatlas.results.dataset import ResultDataset, load_results_dataset
from raggedatlas.results.folder import read_config
from raggedatlas.results.schema import DATA
from raggedatlas.results.validation import require_intact

BLOCK_ROWS = 8192
_TAKEN = {*FILLED, "search_distance", "search_score"}


@dataclass(frozen=True, slots=True)
class ResultOptions(AddOptions):
    """Options of adding a model's result; `AddChoices` describes each."""

    space: str | None = None
    as_: Literal["space", "vector"] = "space"
    output: str | None = None
    unknown: Literal["error", "skip"] = "error"
    metric: Metric = "l2"


@dataclass(frozen=True, eq=False)
class ResultPlan:
    """Plan of what adding a result will write.

    Parameters
    ----------
    record : ResultRecord
        What will be committed, still without arrays.
    shape : tuple of int
        Of a cell's values.
    uids : pyarrow.Array
        Cells that have a result, in table order.
    rows : (n,) int64
        Row of the results of each of these.
    read : callable
        Gives some rows of the results, (k, *shape).
    replaces : ResultRecord or None
        The result of that name that goes.
    skipped : bool
        Whether there is a result of that name, and nothing is to be done.
    notes : tuple of str
        For the report.
    """

    record: ResultRecord
    shape: tuple[int, ...]
    uids: pa.Array
    rows: NDArray[np.int64]
    read: Callable[[NDArray[np.int64]], NDArray[Any]] = field(repr=False)
    replaces: ResultRecord | None = None
    skipped: bool = False
    notes: tuple[str, ...] = ()

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield the values in table order, in bounded memory."""
        for start in range(0, len(self.rows), BLOCK_ROWS):
            yield self.read(self.rows[start : start + BLOCK_ROWS])


def plan_result(catalog: Catalog, source: Any, options: ResultOptions) -> ResultPlan:  # noqa: ANN401
    """Decide what adding a result will write.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    source : ResultDataset, InferenceDataSet, str or path
        Committed results.
    options : ResultOptions
        The caller's choices.

    Raises
    ------
    NotFoundError
        If there are no results, no such output or feature space.
    NameRefusedError, SchemaError, DuplicateError
        For a name that cannot be, or is taken by a column, a feature space or a result.
    SourceError
        For ids that stand twice or are no cells, and values that are no numbers or have another shape than the space.
    ValuesError
        For values that are not finite, naming the first cell.
    CorruptError
        If a file of the results has other bytes than were written.
    """
    _check_options(options)
    dataset = load_results_dataset({}, source) if isinstance(source, str | os.PathLike) else source
    # Readers map these files and do not compare checksums, so every byte is compared here.
    if isinstance(dataset, ResultDataset) and dataset.location.is_local:
        require_intact(dataset.location.path)
    name = _checked_name(catalog, options.name, dataset)
    there = next((record for record in RESULT_ASSETS.read(catalog) if record.name == name), None)
    if there is not None and options.on_duplicate == "error":
        raise DuplicateError(
            f"The atlas has a result {name!r} already, added at {there.created_at}; choose another name, or pass "
            "on_duplicate='replace' to put this one in its place."
        )
    read, shape, dtype = _values_of(dataset, options)
    space = "" if options.as_ == "vector" else options.space or "embedding"
    _check_shape(catalog, shape, dtype, space, options)
    uids, rows, counts, notes = _match_cells(catalog, dataset, options)
    record = ResultRecord(
        uid=new_uid(), name=name, kind=_kind(options), column=name, dtype=dtype.name, space=space,
        zarr_group="", width=shape[0], metric=options.metric if options.as_ == "vector" else "",
        n_cells=len(rows), datasets=json.dumps(counts, sort_keys=True), **_origin(dataset, options),
    )  # fmt: skip
    skipped = there is not None and options.on_duplicate == "skip"
    plan = ResultPlan(record, shape, uids, rows, read, there, skipped, notes)
    # Also where the result is skipped: the note and `annotate` compare this hash with that of the old one.
    content = _content_hash(plan, dataset)
    if skipped and there is not None:
        same = "with the same values" if there.content_hash == content else "with other values"
        notes = (*notes, f"there is a result of this name, {same}")
    record = record.model_copy(update={"content_hash": content, "zarr_group": f"{record.uid}/{name}" if space else ""})
    return ResultPlan(record, shape, uids, rows, read, there, skipped, notes)


def _kind(options: ResultOptions) -> Kind:
    return "vector" if options.as_ == "vector" else "space"


def _check_options(options: ResultOptions) -> None:
    for choice, known in (("as_", ("space", "vector")), ("unknown", ("error", "skip")), ("metric", METRICS),
                          ("on_duplicate", ("error", "skip", "replace"))):  # fmt: skip
        if getattr(options, choice) not in known:
            raise SourceError(f"{choice}={getattr(options, choice)!r} is not understood; it is one of {list(known)}.")
    if options.as_ == "vector" and options.space is not None:
        raise SourceError(
            f"as_='vector' puts values into the cell table, and space={options.space!r} into an array; choose one of them."
        )


def _checked_name(catalog: Catalog, given: str | None, dataset: Any) -> str:  # noqa: ANN401
    name = given if given is not None else Path(os.fspath(dataset.data_location)).name
    check_length(name, "name of a result")
    if not COLUMN.fullmatch(name) or "__" in name or name in _TAKEN:
        raise NameRefusedError(
            f"The name {name!r} cannot be a result's: letters, digits and single '_', not beginning with a digit, and none of "
            f"{sorted(_TAKEN)}; choose one with name='scvi_64'."
        )
    schema = catalog.tables.schema(CELLS)
    columns = metadata_columns(schema)
    if name in columns or name in {facts.name for facts in columns.values()}:
        raise SchemaError(f"The cells have a column {name!r} already; choose another name for the result.")
    # A result of the same name is no clash of names here; `on_duplicate` decides about it.
    pointers = {*pointer_columns(schema)} - {*result_columns(schema)}
    if name in catalog.spaces() or name in pointers:
        raise SchemaError(f"{name!r} is a feature space of this atlas; choose another name for the result.")
    return name


def _values_of(
    dataset: Any,  # noqa: ANN401
    options: ResultOptions,
) -> tuple[Callable[[NDArray[np.int64]], NDArray[Any]], tuple[int, ...], np.dtype[Any]]:
    """Return a reader of an output, its shape (a single number is a vector of length 1) and its dtype."""
    output = options.output or DATA
    get = getattr(dataset, f"get_{output}", None)
    if get is None:
        offered = [column.name for column in getattr(dataset, "columns", ())]
        raise NotFoundError(f"{dataset!r} has no output {output!r}; name one of {offered} with output=...")
    if not len(dataset):
        raise SourceError(f"{dataset!r} has no rows; there is nothing to add.")
    first = np.asarray(get(np.arange(1)))
    shape = first.shape[1:] or (1,)
    if first.dtype.kind not in "fiu":
        raise SourceError(
            f"The output {output!r} of {dataset!r} holds {first.dtype}; a result in an atlas holds numbers."
        )

    def read(rows: NDArray[np.int64]) -> NDArray[Any]:
        return np.asarray(get(rows)).reshape(len(rows), *shape)

    return read, shape, first.dtype


def _check_shape(
    catalog: Catalog, shape: tuple[int, ...], dtype: np.dtype[Any], space: str, options: ResultOptions
) -> None:
    if options.as_ == "vector":
        if len(shape) != 1 or dtype.name not in {"float16", "float32"}:
            raise SourceError(
                f"as_='vector' takes vectors of float16 or float32, not {dtype} of shape {shape}; write them as float32, or leave "
                "as_ out to keep them as they are."
            )
        return
    known = catalog.space(space)
    if known.kind is not PointerKind.DENSE or known.has_features:
        raise SchemaError(
            f"space={space!r}: the columns of this feature space are named features, and those of a result have no names; take "
            "space='embedding', or define a space with has_features=False."
        )
    if known.rank != len(shape):
        raise SourceError(
            f"The results have shape {shape} for each cell, the feature space {space!r} holds values of {known.rank} axes; choose "
            "another with space=..."
        )


def _match_cells(
    catalog: Catalog,
    dataset: Any,  # noqa: ANN401
    options: ResultOptions,
) -> tuple[pa.Array, NDArray[np.int64], dict[str, int], tuple[str, ...]]:
    """Join ids with the cells whose dataset is visible: uids and result rows in table order, cells per dataset, notes."""
    ids = dataset.ids().to_arrow()
    _refuse_repeated(ids, dataset)
    inventory = {record.uid: record.name for record in read_records(catalog)}
    cells = catalog.tables.read(CELLS, ["uid", "dataset_uid"])
    cells = cells.filter(pc.is_in(cells.column("dataset_uid"), value_set=pa.array(list(inventory), pa.string())))
    # `index_in` needs the same type on both sides.
    uids = cells.column("uid").cast(ids.type).combine_chunks()
    found = pc.index_in(uids, value_set=ids)
    kept = found.is_valid()
    rows: NDArray[np.int64] = found.drop_null().to_numpy().astype(np.int64)
    n_unknown = len(ids) - len(rows)
    if not len(rows):
        raise SourceError(
            f"None of the {len(ids):,} ids of {dataset!r} is the uid of one of the {len(uids):,} cells of this atlas; are they of "
            f"another one? The first is {ids[0].as_py()!r}."
        )
    if n_unknown and options.unknown == "error":
        known = np.zeros(len(ids), bool)
        known[rows] = True
        first = int(np.argmin(known))
        raise SourceError(
            f"{n_unknown:,} of the {len(ids):,} ids of {dataset!r} are no cells of this atlas, the first in row {first:,}: "
            f"{ids[first].as_py()!r}. Pass unknown='skip' to leave them out."
        )
    counted = pc.value_counts(cells.column("dataset_uid").filter(kept)).to_pylist()
    counts = {entry["values"]: entry["counts"] for entry in counted}
    notes = [f"{n_unknown:,} results of cells that this atlas has not got were left out"] if n_unknown else []
    without = len(uids) - len(rows)
    notes += [f"{without:,} cells of {len(uids):,} have no result"] if without else []
    return uids.filter(kept).cast(pa.string()), rows, counts, tuple(notes)


def _refuse_repeated(ids: pa.Array, dataset: Any) -> None:  # noqa: ANN401
    # `mode="all"` counts null as a value; otherwise one missing id would look like a repeated one.
    n_repeated = len(ids) - pc.count_distinct(ids, mode="all").as_py()
    if not n_repeated:
        return
    counts = pc.value_counts(ids)
    twice = counts.filter(pc.greater(pc.struct_field(counts, "counts"), 1))[0].as_py()
    rows = np.flatnonzero(pc.equal(ids, twice["values"]).to_numpy(zero_copy_only=False))
    raise SourceError(
        f"{dataset!r} has {n_repeated:,} ids more than once, the first {twice['values']!r} in the rows {rows[:3].tolist()}; a cell has "
        "one result. Write the results again."
    )


def _content_hash(plan: ResultPlan, dataset: Any) -> str:  # noqa: ANN401
    """Hash uids and values in table order, and refuse what is not finite on the way."""
    digest = hashlib.blake2b(f"{plan.record.dtype} {plan.shape}".encode(), digest_size=16)
    start = 0
    for block in plan.blocks():
        stop = start + len(block)
        finite = np.isfinite(block).reshape(len(block), -1).all(axis=1)
        if not finite.all():
            at = start + int(np.argmin(finite))
            raise ValuesError(
                f"{dataset!r}: the result of the cell {plan.uids[at].as_py()!r} (row {plan.rows[at]:,}) holds NaN or an infinity, "
                f"and so do others of this block ({int((~finite).sum()):,} cells); leave such cells out of the run, or fix the model."
            )
        # Uids have 16 characters each, so no separator is needed. They alternate with values block by block:
        # another `BLOCK_ROWS` would change the hash of results that are longer than a block.
        digest.update("".join(plan.uids.slice(start, len(block)).to_pylist()).encode())
        digest.update(np.ascontiguousarray(block).tobytes())
        start = stop
    return digest.hexdigest()


def _origin(dataset: Any, options: ResultOptions) -> dict[str, str]:  # noqa: ANN401
    """Return where results come from, from the metadata of their table and their configuration file."""
    facts = getattr(dataset, "facts", {})
    place = os.fspath(dataset.data_location)
    config = {} if "://" in place else read_config(Path(place))
    keys = {
        "verb": "result:verb", "model": "result:model", "model_hash": "result:model_hash", "parent": "result:parent",
        "query": "atlas:query", "snapshot": "atlas:version",
    }  # fmt: skip
    return {
        **{name: str(facts.get(key, "")) for name, key in keys.items()},
        "output": options.output or DATA,
        "source": place if "://" in place else str(Path(place).absolute()),
        "config": json.dumps(config, sort_keys=True, default=str),
    }


def result_exists(catalog: Catalog, name: str) -> bool:
    """Return whether the cells have gained a metadata column of this name since it was checked."""
    schema = catalog.tables.schema(CELLS)
    return find_column(schema, name) in metadata_columns(schema)

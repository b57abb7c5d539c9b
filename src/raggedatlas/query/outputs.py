"""Outputs of a plan: AnnData and MuData in memory, and files written block by block."""

import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import ArgumentError, LimitError, QueryError
from raggedatlas.formats.modalities import make_mudata
from raggedatlas.formats.registry import open_sink
from raggedatlas.model.assets import VALUES
from raggedatlas.model.batch import Block, CsrBlock, DenseBlock, assemble_csr, sparse_dtype
from raggedatlas.model.frames import (
    ColumnFacts,
    ColumnTable,
    TableColumn,
    Texts,
    arrow_table,
    arrow_to_frame,
    arrow_to_series,
    arrow_values,
    facts_of,
    plain_array,
    remove_unused_categories,
    used_codes,
)
from raggedatlas.model.protocols import Sink, SinkMatrix
from raggedatlas.model.wings import answer
from raggedatlas.query.cells import LazyTable
from raggedatlas.query.modalities import measured_table, read_modalities, text_index
from raggedatlas.query.plan import plan_elements, plan_read
from raggedatlas.query.read import PartReader, block_tasks, row_blocks
from raggedatlas.query.read_plan import PartPlan, QuerySpec, ReadPlan, SpacePlan, refuse_arrays
from raggedatlas.store.executors import Workers, in_order, run_tasks
from raggedatlas.store.location import Address, Location, as_path
from raggedatlas.store.runtime import BufferPool, prefetch, release_unused_memory, submit, warnings_as

if TYPE_CHECKING:
    import anndata as ad
    import mudata as md
    import pandas as pd

_SETTINGS = threading.Lock()
"""Held while a setting of anndata, shared by all threads, is changed."""


def to_anndata(plan: ReadPlan, max_bytes: int | None = None) -> "ad.AnnData":
    """Read one space of a plan into an AnnData.

    Parameters
    ----------
    plan : ReadPlan
        From `plan_elements`, with one space.
    max_bytes : int or None
        Refuse a larger result; None takes the machine's memory.

    Raises
    ------
    QueryError
        If the space holds arrays of more than one axis per cell.
    LimitError
        If the result would be too large.
    """
    check_size([plan.single(), *plan.obsm.values(), *plan.results.values()], max_bytes)
    return _anndata(plan)


def to_mudata(plan: ReadPlan, max_bytes: int | None = None) -> "md.MuData":
    """Read the spaces of a plan into a MuData, one modality each.

    Every modality holds the cells that have it, in the order of the result, with the same columns of `obs` as the result;
    `obsmap` holds for each cell of the result its row in a modality, from 1, and 0 where it lacks it.

    Parameters
    ----------
    plan : ReadPlan
        From `plan_elements`, with modalities.
    max_bytes : int or None
        Refuse a larger result; None takes the machine's memory.

    Raises
    ------
    MissingExtraError
        If mudata is not installed.
    LimitError
        If the result would be too large.
    """
    members = [space for part in plan.modalities.values() for space in (part.single(), *part.obsm.values())]
    check_size([*members, *plan.results.values()], max_bytes)
    parts = {name: _anndata(part) for name, part in plan.modalities.items()}
    obs = obs_frame(plan.obs)
    result = make_mudata(parts, {"obs": obs[[]].copy()})
    with warnings_as("ignore"):
        # mudata warns of its own use of pandas.
        result.obs = obs
    for name, member in plan.results.items():
        result.obsm[name] = _matrices(member, member.parts[0])[VALUES]
    result.uns.update(make_uns(plan))
    return result


def make_uns(plan: ReadPlan) -> dict[str, Any]:
    """Return the `uns` of a result: its provenance, and the colors that its datasets agree on."""
    return {**plan.colors, "atlas": atlas_facts(plan)}


def atlas_facts(plan: ReadPlan) -> dict[str, Any]:
    """Return `uns["atlas"]`: uri, snapshot, label, query, package version, spaces, layers, layouts, cells left out, merged features."""
    facts: dict[str, Any] = dict(plan.provenance)
    facts["spaces"] = np.array(list(plan.spaces), dtype=object)
    facts["layers"] = {name: np.array(space.layers, dtype=object) for name, space in plan.spaces.items()}
    layouts = sorted({uid for space in plan.spaces.values() for uid in space.layouts})
    facts["layouts"] = np.array(layouts, dtype=object)
    facts["cells_without_space"] = plan.n_without
    facts["merged"] = {name: space.features[space.repeated] for name, space in plan.spaces.items()}
    return facts


def check_size(spaces: list[SpacePlan], max_bytes: int | None) -> int:
    """Estimate the bytes of a result, an upper bound, and refuse what is too large.

    Raises
    ------
    LimitError
        Naming the estimate and the ways out.
    """
    estimate = sum(int(space.row_bytes().sum()) for space in spaces)
    limit = _machine_memory() if max_bytes is None else max_bytes
    if estimate > limit:
        raise LimitError(
            f"The result may take {estimate:,} bytes, more than {'the machine has' if max_bytes is None else 'max_bytes'} ({limit:,}). "
            "Write it with .write(path), walk it with .batches(n), or ask for fewer cells or features."
        )
    return estimate


def _machine_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        # No limit where the system does not tell its memory, as on Windows.
        return 2**62


def make_obs(plan: ReadPlan, space: SpacePlan) -> "pd.DataFrame":
    """Describe the cells, with the layout that each has in a space."""
    frame = obs_frame(plan.obs)
    return frame.assign(layout_uid=layout_column(space)) if space.space.has_features else frame


def make_anndata(
    plan: ReadPlan, obs: "pd.DataFrame", layers: Mapping[str, Any], obsm: Mapping[str, Any]
) -> "ad.AnnData":
    """Put what was read of one space, or what will read it, into an AnnData.

    Parameters
    ----------
    plan : ReadPlan
        From `plan_elements`, with one space.
    obs : pandas.DataFrame, or xarray.Dataset for lazy columns
        The cells.
    layers, obsm : mapping of str to arrays
        By name; the first layer of the plan becomes X.
    """
    import anndata as ad

    space = plan.single()
    assert plan.var is not None
    var = plan.var.frame()
    first, *others = space.layers
    # Uids of cells are unique, and so is what `var_table` takes for names; to see that again takes longer than to read few genes.
    with _SETTINGS, ad.settings.override(check_uniqueness=False):
        made = ad.AnnData(X=layers[first], obs=obs, var=var, layers={name: layers[name] for name in others})
    if space.space.has_features:
        made.varm["measured"] = plan.var.measured(space)
    for name, member in obsm.items():
        made.obsm[name] = member
    made.uns.update(make_uns(plan))
    return made


def _anndata(plan: ReadPlan) -> "ad.AnnData":
    space = plan.single()
    refuse_arrays(space, "AnnData")
    frame = submit(partial(make_obs, plan), space)
    layers: dict[str, Any] = {}
    for part in space.parts:
        layers |= _matrices(space, part)
    obsm = {name: _matrices(member, member.parts[0])[VALUES] for name, member in {**plan.obsm, **plan.results}.items()}
    return make_anndata(plan, frame.result(), layers, obsm)


def _matrices(space: SpacePlan, part: PartPlan) -> dict[str, Any]:
    if space.sparse:
        return _sparse_matrices(space, part)
    reader = PartReader(space, part)
    blocks = [reader.read(rows) for rows in row_blocks(space)]
    # Without cells an empty block is read, which has the right width.
    dense = [b for b in blocks or [reader.read(np.empty(0, np.int64))] if isinstance(b, DenseBlock)]
    return {layer: np.concatenate([b.layers[layer] for b in dense]) for layer in part.layers}


def _sparse_matrices(space: SpacePlan, part: PartPlan) -> dict[str, Any]:
    """Read in one go where that takes the memory of the result, else block by block into arrays large enough for any."""
    import scipy.sparse as sp

    n_rows = len(space.present)
    reader = PartReader(space, part)
    most = _most_entries(space, part)
    # SciPy wants bounds and columns of one type, and it has to be chosen before the entries are read.
    index = np.dtype(np.int32 if max(most, space.n_cols) <= np.iinfo(np.int32).max else np.int64)
    indptr, indices, entry = np.zeros(n_rows + 1, index), np.empty(0, index), 0
    layers: dict[str, NDArray[Any]] = {}
    for rows, block in reader.read_blocks(whole=True):
        assert isinstance(block, CsrBlock)
        stop = entry + len(block.indices)
        indptr[1:][rows] = block.indptr[1:] + entry
        if len(rows) == n_rows:
            indices, layers = block.indices.astype(index, copy=False), dict(block.layers)
        else:
            if not layers:
                indices = np.empty(most, index)
                layers = {layer: np.empty(most, space.dtypes[layer]) for layer in part.layers}
            indices[entry:stop] = block.indices
            for layer, values in block.layers.items():
                layers[layer][entry:stop] = values
        entry = stop
    if not layers:
        layers = {layer: np.empty(0, space.dtypes[layer]) for layer in part.layers}
    matrices = {}
    for i, (layer, values) in enumerate(layers.items()):
        last = i == len(layers) - 1
        # Arrays of its own for each matrix: SciPy sorts and drops entries in place.
        columns, bounds = (_cut(indices, entry), indptr) if last else (indices[:entry].copy(), indptr.copy())
        computable = _cut(values, entry).astype(sparse_dtype(values.dtype), copy=False)
        matrix = assemble_csr(sp.csr_matrix, (computable, columns, bounds), space.n_cols)
        matrix.has_sorted_indices = matrix.has_canonical_format = True
        matrices[layer] = matrix
    return matrices


def _most_entries(space: SpacePlan, part: PartPlan) -> int:
    """Bound the entries of a result: exact unless columns are left out or NaN is put in."""
    entries = np.minimum(part.end - part.start, space.n_cols)
    if space.nan:
        absent = [space.n_cols - len(space.columns_of(uid)) for uid in _layouts(part)]
        # The 0 at the end is for code -1: rows of cells without the space stay empty.
        entries = entries + np.array([*absent, 0])[part.code]
    return int(entries.sum())


def _layouts(part: PartPlan) -> list[str]:
    return [group.layout_uid for group in part.groups]


def _cut(values: NDArray[Any], n: int) -> NDArray[Any]:
    """Keep the first n values, in memory of their own if much would be held for nothing."""
    return values if n == len(values) else values[:n].copy() if n < len(values) // 2 else values[:n]


def obs_frame(table: pa.Table) -> "pd.DataFrame":
    """Turn a plan's `obs` into a frame indexed by cell uid.

    Categoricals have the categories that occur, in the order of the atlas, as subsets of an AnnData have.
    """
    import pandas as pd

    columns = {
        field.name: obs_series(field, table.column(i)).set_axis(range(table.num_rows))
        for i, field in enumerate(table.schema)
        if field.name != "uid"
    }
    # The uids become the index later: given here, pandas would look for them in the index of each column.
    frame = pd.DataFrame(columns, index=pd.RangeIndex(table.num_rows))
    frame.index = obs_index(table)
    return frame


def obs_index(table: pa.Table) -> "pd.Index[str]":
    """Return the uids of the cells of a plan's `obs` as an index."""
    return text_index(table.column("uid"), "uid")


def obs_columns(table: LazyTable) -> ColumnTable:
    """Turn a plan's deferred `obs` into a table of the same values, each column of which is made when it is asked for."""
    fields = {field.name: i for i, field in enumerate(table.schema)}
    columns = {
        name: TableColumn(name, partial(_obs_values, table, i), partial(_obs_array, table, i))
        for name, i in fields.items()
    }
    return ColumnTable(table.num_rows, columns.pop("uid"), tuple(columns.values()))


def _obs_values(table: LazyTable, i: int) -> "pd.Series[Any] | Texts":
    field = table.schema.field(i)
    if pa.types.is_dictionary(field.type) or pa.types.is_nested(field.type):
        return obs_series(field, table.column(i))
    return remove_unused_categories(arrow_values(field, partial(table.chunks, i), table.num_rows))


def _obs_array(table: LazyTable, i: int) -> pa.Array | None:
    field = table.schema.field(i)
    if pa.types.is_dictionary(field.type):
        return _used(_joined(table.column(i)))
    array = None if pa.types.is_nested(field.type) else plain_array(field, partial(table.chunks, i), table.num_rows)
    return _used(array) if isinstance(array, pa.DictionaryArray) else array


def obs_series(field: pa.Field, column: pa.ChunkedArray) -> "pd.Series[Any]":
    """Turn a column of a plan's `obs` into a series with the dtype that its file had."""
    import pandas as pd

    if pa.types.is_dictionary(field.type):
        values = _used(_joined(column))
        labels = pd.Index(np.array(values.dictionary.to_pylist(), dtype=object))
        return pd.Series(pd.Categorical.from_codes(values.indices.to_numpy(zero_copy_only=False), categories=labels))
    if pa.types.is_nested(field.type):
        return pd.Series(column.to_pandas())
    return remove_unused_categories(arrow_to_series(column, facts_of(field) or ColumnFacts(field.name, "")))


def layout_column(space: SpacePlan) -> "pd.Categorical":
    """Return the layout of each cell as a categorical over the plan's layouts."""
    import pandas as pd

    return pd.Categorical.from_codes(space.layout_code, categories=pd.Index(list(space.layouts), dtype=object))


def _used(column: pa.DictionaryArray) -> pa.DictionaryArray:
    """Keep the categories that occur, in the order of the dictionary."""
    codes = column.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    codes, used = used_codes(codes, len(column.dictionary))
    kept = column.dictionary.filter(pa.array(used))
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), kept, ordered=column.type.ordered)


def _joined(column: pa.ChunkedArray) -> pa.DictionaryArray:
    # Chunks may have different dictionaries, in which one code means different categories.
    return column.unify_dictionaries().combine_chunks()


MULTIMODAL = ".h5mu"

STEP_BYTES = 16 << 20
"""About how many bytes of a result one step takes; one is read while another is written."""

BLOCKS_AHEAD = 16
"""Steps that workers may be ahead of what is written."""

Reading = tuple[Executor | Workers, Location] | None
"""Whose workers read, and the atlas that they must reach; None reads here."""


def write(
    spec: QuerySpec,
    catalog: Catalog,
    path: Address,
    options: Mapping[str, Any],
    executor: Executor | Workers | None = None,
) -> str:
    """Write a query to a file.

    Parameters
    ----------
    spec : QuerySpec
        What is asked.
    catalog : Catalog
        At a version.
    path : str
        Where; its ending decides the format.
    options : mapping
        Of the format.
    executor : Executor, Workers or None
        Whose workers read blocks of cells, at most `BLOCKS_AHEAD` ahead of those that are written.

    Returns
    -------
    str
        The path.

    Raises
    ------
    QueryError
        If the format cannot hold what is asked.

    Notes
    -----
    Memory: one block of values, one column of the cells' metadata, where they lie, and the metadata of features. A failed write leaves nothing under the name.
    """
    multimodal = as_path(path).suffix == MULTIMODAL
    names = None
    if multimodal and spec.spaces is None:
        names = tuple(m.name for m in read_modalities(catalog).values() if m.space.rank == 1 and not m.is_result)
    plan = plan_read(spec, catalog, spaces=names, deferred=True)
    if len(plan.spaces) != 1 and not multimodal:
        raise QueryError(
            f"{path} holds one feature space, the query reads {list(plan.spaces)}; write a .h5mu, or name one with .spaces(...)."
        )
    for space in plan.spaces.values():
        refuse_arrays(space, str(path))
    plan = plan_elements(plan, catalog, multimodal=multimodal)
    release_unused_memory()
    reading = None if executor is None else (executor, catalog.location)
    storage_options = options.get("storage_options") or catalog.location.storage_options
    # Options of the schema, which are none of the format h5ad; a CXG has a title of its own.
    schema, title, suffix = options.get("schema"), options.get("title"), as_path(path).suffix
    if (
        schema not in (None, "cellxgene")
        or (schema and suffix != ".h5ad")
        or (title and not schema and suffix != ".cxg")
    ):
        raise ArgumentError(
            f"write() takes schema='cellxgene' for an .h5ad file, and title= with it; got schema={schema!r} for {path}."
        )
    if schema:
        options = {name: value for name, value in options.items() if name not in ("schema", "title")}
    sink = open_sink(path, **{**options, "storage_options": storage_options})
    if schema:
        sink = answer("curation_sink")(sink, str(path), title)
    try:
        streams = (_begin_mudata if multimodal else _begin_space)(sink, plan)
        # The tables are written; their memory is let go of before the values take theirs.
        del plan
        release_unused_memory()
        for stream in streams:
            _write_values(sink, stream, reading)
        return sink.commit()
    except BaseException:
        # Also after KeyboardInterrupt, which is no `Exception`.
        sink.abort()
        raise


@dataclass(frozen=True, slots=True)
class _Stream:
    """Matrices that are still to be written: those of a space if there is one, and members of `obsm`."""

    space: SpacePlan | None
    obsm: Mapping[str, SpacePlan]
    prefix: str


def _begin_mudata(sink: Sink, plan: ReadPlan) -> list[_Stream]:
    streams = [_Stream(part.single(), part.obsm, f"mod/{name}/") for name, part in plan.modalities.items()]
    streams.append(_Stream(None, plan.results, ""))
    sink.begin(tuple(matrix for stream in streams for matrix in _sink_matrices(stream, plan.n_cells)))
    for name, space in plan.spaces.items():
        # An `obsmap` of MuData counts rows from 1; 0 is a cell that the modality lacks.
        own_row = np.where(space.present, np.cumsum(space.present), 0)
        sink.element(f"obsmap/{name}", own_row.astype(np.uint32))
    for name, part in plan.modalities.items():
        _write_elements(sink, part, f"mod/{name}/")
    sink.element("obs", _obs(sink, plan, None))
    sink.element("uns", make_uns(plan))
    return streams


def _begin_space(sink: Sink, plan: ReadPlan) -> list[_Stream]:
    space = plan.single()
    stream = _Stream(space, {**plan.obsm, **plan.results}, "")
    sink.begin(_sink_matrices(stream, plan.n_cells))
    _write_elements(sink, plan, "")
    return [stream]


def _sink_matrices(stream: _Stream, n_cells: int) -> tuple[SinkMatrix, ...]:
    space, prefix, matrices = stream.space, stream.prefix, []
    if space is not None:
        shape = n_cells, _ = len(space.present), space.n_cols
        form: Literal["csr", "dense"] = "csr" if space.sparse else "dense"
        for layer, dtype in space.dtypes.items():
            n = _n_entries(space, layer)
            matrices.append(
                SinkMatrix(_key(space, layer, prefix), form, np.dtype(dtype), shape, n, exact=n is not None)
            )
    for name, member in stream.obsm.items():
        wide = (n_cells, member.n_cols)
        matrices.append(SinkMatrix(f"{prefix}obsm/{name}", "dense", np.dtype(member.dtypes[VALUES]), wide))
    return tuple(matrices)


def _n_entries(space: SpacePlan, layer: str) -> int | None:
    """Count the entries of a layer, where that is known before they are read: all columns are kept, none is put in, none added up."""
    part = next(part for part in space.parts if layer in part.layers)
    layouts = {group.layout_uid for group in part.groups}
    if not space.sparse or space.nan or len(space.merged) or any((space.column_maps[uid] < 0).any() for uid in layouts):
        return None
    return int((part.end - part.start).sum())


def _key(space: SpacePlan, layer: str, prefix: str) -> str:
    return f"{prefix}X" if layer == space.layers[0] else f"{prefix}layers/{layer}"


def _write_elements(sink: Sink, plan: ReadPlan, prefix: str) -> None:
    space = plan.single()
    assert plan.var is not None
    tables = {
        "obs": _obs(sink, plan, space if space.space.has_features else None),
        "var": _sink_table(sink, plan.var.table),
    }
    if space.space.has_features:
        tables["varm/measured"] = _sink_table(sink, measured_table(space, plan.var.table))
    for key, table in tables.items():
        sink.element(f"{prefix}{key}", table)
    sink.element(f"{prefix}uns", make_uns(plan))


def _sink_table(sink: Sink, table: pa.Table) -> Any:  # noqa: ANN401  (a table or a pandas frame)
    if not getattr(sink, "by_column", False):
        return arrow_to_frame(table)
    return arrow_table(table.schema, table.num_rows, lambda i: table.column(i).chunks)


def _write_values(sink: Sink, stream: _Stream, reading: Reading) -> None:
    if stream.space is not None:
        for part in stream.space.parts:
            for block in _blocks(stream.space, part, reading):
                for layer in part.layers:
                    sink.write(_key(stream.space, layer, stream.prefix), _single(block, layer))
    for name, member in stream.obsm.items():
        for block in _blocks(member, member.parts[0], reading):
            sink.write(f"{stream.prefix}obsm/{name}", _single(block, VALUES))


def _blocks(space: SpacePlan, part: PartPlan, reading: Reading) -> Iterator[Block]:
    reader = PartReader(space, part, pool=BufferPool())
    # Column-sorted copies are read here, as they give one block of all cells and no tasks of some rows.
    if reading is not None and not reader.column_copies():
        tasks = (task for _, task in block_tasks(space, part, STEP_BYTES))
        return in_order(run_tasks(tasks, reading[0], place=reading[1], in_flight=BLOCKS_AHEAD))
    return (block for _, block in prefetch(reader.read_blocks(n_bytes=STEP_BYTES)))


def _single(block: Block, layer: str) -> Block:
    values = {"values": block.layers[layer]}
    return (
        CsrBlock(block.indptr, block.indices, values, block.n_cols)
        if isinstance(block, CsrBlock)
        else DenseBlock(values)
    )


def _obs(sink: Sink, plan: ReadPlan, space: SpacePlan | None) -> Any:  # noqa: ANN401  (a table or a pandas frame)
    """Describe the cells, and what layout of a space each has: column by column where the sink takes it so."""
    if not getattr(sink, "by_column", False):
        frame = obs_frame(plan.obs)
        if space is not None:
            frame["layout_uid"] = layout_column(space)
        return frame
    table = obs_columns(plan.obs)
    if space is None:
        return table
    columns = {column.name: column for column in table.columns}
    columns["layout_uid"] = TableColumn("layout_uid", partial(_sink_layouts, space), partial(_layout_array, space))
    return replace(table, columns=tuple(columns.values()))


def _sink_layouts(space: SpacePlan) -> Any:  # noqa: ANN401  (a pandas series)
    import pandas as pd

    return pd.Series(layout_column(space))


def _layout_array(space: SpacePlan) -> pa.Array:
    return pa.DictionaryArray.from_arrays(space.layout_code, pa.array(list(space.layouts), pa.string()))


def one_space(plan: ReadPlan) -> ReadPlan:
    """Return a plan for an AnnData.

    Raises
    ------
    QueryError
        For a plan of several spaces.
    """
    if len(plan.spaces) != 1:
        raise QueryError(
            f"AnnData holds one feature space, the query reads {list(plan.spaces)}; use .to_mudata() or .to_pandas(), or name one with .spaces(...)."
        )
    return plan

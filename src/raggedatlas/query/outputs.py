"""Outputs of a plan: AnnData and MuData in memory, and files written block by block."""

import os
import threading
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import ArgumentError, LimitError, QueryError
from raggedatlas.formats.modalities import make_mudata
from raggedatlas.formats.registry import open_sink
from raggedatlas.model.assets import VALUES
from raggedatlas.model.batch import CsrBlock, DenseBlock, assemble_csr, sparse_dtype
from raggedatlas.model.frames import (
    ColumnFacts,
    ColumnTable,
    TableColumn,
    Texts,
    arrow_table,
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
from raggedatlas.query.modalities import measured_table, read_modalities
from raggedatlas.query.plan import plan_elements, plan_read
from raggedatlas.query.read import (
    PartPlan,
    PartReader,
    ReadPlan,
    SpacePlan,
    block_plans,
    read_block,
    refuse_arrays,
    row_blocks,
)
from raggedatlas.query.spec import QuerySpec
from raggedatlas.store.executors import Workers, in_order, run_tasks
from raggedatlas.store.location import Address, as_path
from raggedatlas.store.runtime import BufferPool, prefetch, release_unused_memory, submit, warnings_as

if TYPE_CHECKING:
    import anndata as ad
    import mudata as md
    import pandas as pd

_SETTINGS = threading.Lock()
"""Held while a setting of anndata, shared by all threads, is changed."""


def to_anndata(plan: ReadPlan, max_bytes: int | None = None) -> "ad.AnnData":
    """Read one space of a plan from `plan_elements` into an AnnData; see `Query.to_anndata`."""
    check_size([plan.single(), *plan.obsm.values(), *plan.results.values()], max_bytes)
    return _anndata(plan)


def to_mudata(plan: ReadPlan, max_bytes: int | None = None) -> "md.MuData":
    """Read the spaces of a plan from `plan_elements` into a MuData, one modality each; see `Query.to_mudata`.

    Every modality holds the cells that have it, in the order of the result, with the same columns of `obs` as the
    result; `obsmap` holds for each cell of the result its row in a modality, from 1, and 0 where it lacks it.
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


def check_size(spaces: list[SpacePlan], max_bytes: int | None) -> None:
    """Refuse a result whose bytes, estimated as an upper bound, exceed `max_bytes`; None takes the memory of the machine."""
    estimate, limit = sum(int(space.row_bytes().sum()) for space in spaces), max_bytes
    if limit is None:
        try:
            limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            # No limit where the system does not tell its memory, as on Windows.
            return
    if estimate > limit:
        raise LimitError(
            f"The result may take {estimate:,} bytes, more than {'the machine has' if max_bytes is None else 'max_bytes'} ({limit:,}). "
            "Write it with .write(path), walk it with .batches(n), or ask for fewer cells or features."
        )


def make_obs(plan: ReadPlan, space: SpacePlan) -> "pd.DataFrame":
    """Describe the cells, with the layout that each has in a space."""
    frame = obs_frame(plan.obs)
    return frame.assign(layout_uid=layout_column(space)) if space.space.has_features else frame


def make_anndata(
    plan: ReadPlan, obs: "pd.DataFrame", layers: Mapping[str, Any], obsm: Mapping[str, Any]
) -> "ad.AnnData":
    """Put what was read of one space, or what will read it, into an AnnData.

    `plan` is from `plan_elements`, with one space. `obs` is an `xarray.Dataset` for lazy columns. The first layer of
    the plan becomes X.
    """
    import anndata as ad

    space = plan.single()
    assert plan.var is not None
    var = plan.var.frame()
    first, *others = space.layers
    # Uids of cells are unique, and so is what `make_var` takes for names; to see that again takes longer than to read few genes.
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
    """Read the layers of a part: sparse ones in one go where that takes the memory of the result, else into arrays large enough for any."""
    reader = PartReader(space, part)
    if not space.sparse:
        blocks = [reader.read(rows) for rows in row_blocks(space)]
        # Without cells an empty block is read, which has the right width.
        dense = [b for b in blocks or [reader.read(np.empty(0, np.int64))] if isinstance(b, DenseBlock)]
        return {layer: np.concatenate([b.layers[layer] for b in dense]) for layer in part.layers}
    import scipy.sparse as sp

    n_rows = len(space.present)
    # A bound of the entries: exact unless columns are left out or NaN is put in.
    entries = np.minimum(part.end - part.start, space.n_cols)
    if space.nan:
        absent = [space.n_cols - len(space.columns_of(group.layout_uid)) for group in part.groups]
        # The 0 at the end is for code -1: rows of cells without the space stay empty.
        entries = entries + np.array([*absent, 0])[part.code]
    most = int(entries.sum())
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
    import pandas as pd

    index: pd.Index[str] = pd.Index(arrow_to_series(table.column("uid"), ColumnFacts("uid", "string")), name="uid")
    return index


def obs_columns(table: LazyTable) -> ColumnTable:
    """Turn a plan's deferred `obs` into a table of the same values, each column of which is made when it is asked for."""

    def values(i: int) -> "pd.Series[Any] | Texts":
        field = table.schema.field(i)
        if pa.types.is_dictionary(field.type) or pa.types.is_nested(field.type):
            return obs_series(field, table.column(i))
        return remove_unused_categories(arrow_values(field, partial(table.chunks, i), table.num_rows))

    def array(i: int) -> pa.Array | None:
        field = table.schema.field(i)
        if pa.types.is_nested(field.type):
            return None
        if pa.types.is_dictionary(field.type):
            return _used(_joined(table.column(i)))
        plain = plain_array(field, partial(table.chunks, i), table.num_rows)
        return _used(plain) if isinstance(plain, pa.DictionaryArray) else plain

    columns = {
        name: TableColumn(name, partial(values, i), partial(array, i)) for i, name in enumerate(table.schema.names)
    }
    return ColumnTable(table.num_rows, columns.pop("uid"), tuple(columns.values()))


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


STEP_BYTES = 16 << 20
"""About how many bytes of a result one step takes; one is read while another is written."""

BLOCKS_AHEAD = 16
"""Steps that workers may be ahead of what is written."""


def write(
    spec: QuerySpec,
    catalog: Catalog,
    path: Address,
    options: Mapping[str, Any],
    executor: Executor | Workers | None = None,
) -> str:
    """Write a query to a file; see `Query.write`.

    In memory are one block of values, one column of the cells' metadata, where they lie, and the metadata of features;
    workers read at most `BLOCKS_AHEAD` blocks ahead of those that are written. A failed write leaves nothing under the
    name.
    """
    suffix = as_path(path).suffix
    multimodal = suffix == ".h5mu"
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
    storage_options = options.get("storage_options") or catalog.location.storage_options
    # Options of the schema, which are none of the format h5ad; a CXG has a title of its own.
    schema, title = options.get("schema"), options.get("title")
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
    try:
        if schema:
            sink = answer("curation_sink")(sink, str(path), title)
        streams = _begin(sink, plan)
        # The tables are written; their memory is let go of before the values take theirs.
        del plan
        release_unused_memory()
        for space, part, keys in streams:
            reader = PartReader(space, part, pool=BufferPool())
            # Column-sorted copies are read here, as they give one block of all cells and no tasks of some rows.
            if executor is not None and not reader.column_copies():
                plans = block_plans(space, part, STEP_BYTES)
                tasks = (partial(read_block, plan) for _, plan in plans)
                blocks = in_order(run_tasks(tasks, executor, place=catalog.location, in_flight=BLOCKS_AHEAD))
            else:
                blocks = (block for _, block in prefetch(reader.read_blocks(n_bytes=STEP_BYTES)))
            for block in blocks:
                for layer, key in keys.items():
                    sink.write(key, replace(block, layers={"values": block.layers[layer]}))
        return sink.commit()
    except BaseException:
        # Also after KeyboardInterrupt, which is no `Exception`.
        sink.abort()
        raise


def _begin(sink: Sink, plan: ReadPlan) -> list[tuple[SpacePlan, PartPlan, dict[str, str]]]:
    """Announce the matrices of a result, and write all else; return what is still to be written: parts, and what their layers are called in the file."""
    streams: list[tuple[SpacePlan, PartPlan, dict[str, str]]] = []
    parts = {f"mod/{name}/": part for name, part in plan.modalities.items()} or {"": plan}
    members = {f"{prefix}obsm/{name}": m for prefix, part in parts.items() for name, m in part.obsm.items()}
    for prefix, own_plan in parts.items():
        space = own_plan.single()
        keys = {layer: f"{prefix}layers/{layer}" for layer in space.layers} | {space.layers[0]: f"{prefix}X"}
        streams += [(space, own, {layer: keys[layer] for layer in own.layers}) for own in space.parts]
    members |= {f"obsm/{name}": member for name, member in plan.results.items()}
    streams += [(member, member.parts[0], {VALUES: key}) for key, member in members.items()]
    matrices: list[SinkMatrix] = []
    for space, part, named in streams:
        n: int | None = None
        # The entries are known before they are read if all columns are kept, none is put in and none added up.
        if space.sparse and not space.nan and not len(space.merged):
            cut = any((space.column_maps[group.layout_uid] < 0).any() for group in part.groups)
            n = None if cut else int((part.end - part.start).sum())
        for layer, key in named.items():
            dtype, shape = np.dtype(space.dtypes[layer]), (len(space.present), space.n_cols)
            matrices.append(SinkMatrix(key, "csr" if space.sparse else "dense", dtype, shape, n, exact=n is not None))
    sink.begin(tuple(matrices))
    if plan.modalities:
        for name, space in plan.spaces.items():
            # An `obsmap` of MuData counts rows from 1; 0 is a cell that the modality lacks.
            own_row = np.where(space.present, np.cumsum(space.present), 0)
            sink.element(f"obsmap/{name}", own_row.astype(np.uint32))
    by_column = getattr(sink, "by_column", False)
    for prefix, own_plan in parts.items():
        space, var = own_plan.single(), own_plan.var
        assert var is not None
        has_features = space.space.has_features
        columns = {"obs": _obs(own_plan, space if has_features else None), "var": _as_columns(var.table)}
        if has_features:
            columns["varm/measured"] = _as_columns(measured_table(space, var.table))
        for key, table in columns.items():
            sink.element(f"{prefix}{key}", table if by_column else table.frame())
        sink.element(f"{prefix}uns", make_uns(own_plan))
    if plan.modalities:
        table = _obs(plan, None)
        sink.element("obs", table if by_column else table.frame())
        sink.element("uns", make_uns(plan))
    return streams


def _as_columns(table: pa.Table) -> ColumnTable:
    return arrow_table(table.schema, table.num_rows, lambda i: table.column(i).chunks)


def _obs(plan: ReadPlan, space: SpacePlan | None) -> ColumnTable:
    """Describe the cells, and what layout of a space each has, column by column."""
    table = obs_columns(plan.obs)
    if space is None:
        return table
    names = pa.array(list(space.layouts), pa.string())

    def frame_column() -> "pd.Series[Any]":
        import pandas as pd

        return pd.Series(layout_column(space))

    layouts = TableColumn(
        "layout_uid",
        frame_column,
        lambda: pa.DictionaryArray.from_arrays(space.layout_code, names),
    )
    columns = {column.name: column for column in table.columns} | {"layout_uid": layouts}
    return replace(table, columns=tuple(columns.values()))

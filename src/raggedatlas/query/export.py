"""A query into a file, block by block: what is held at once does not grow with the cells' values."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import QueryError
from raggedatlas.formats.registry import open_sink
from raggedatlas.model.assets import VALUES
from raggedatlas.model.batch import Block, CsrBlock, DenseBlock
from raggedatlas.model.frames import Column, Texts
from raggedatlas.model.protocols import Sink, SinkMatrix
from raggedatlas.query.modalities import read_modalities
from raggedatlas.query.outputs import layout_column, make_uns, measured_frame, obs_columns, obs_frame
from raggedatlas.query.plan import plan_elements, plan_read
from raggedatlas.query.read import PartReader, block_tasks
from raggedatlas.query.read_plan import PartPlan, ReadPlan, SpacePlan, refuse_arrays
from raggedatlas.query.spec import QuerySpec
from raggedatlas.store.executors import Workers, in_order, run_tasks
from raggedatlas.store.location import Location
from raggedatlas.store.runtime import BufferPool, prefetch, release_unused_memory

MULTIMODAL = ".h5mu"

STEP_BYTES = 16 << 20
"""About how many bytes of a result one step takes; one is read while another is written."""

BLOCKS_AHEAD = 16
"""Steps that workers may be prefetch of what is written."""

Reading = tuple[Executor | Workers, Location] | None
"""Whose workers read, and the atlas that they must reach; None reads here."""


def write(
    spec: QuerySpec,
    catalog: Catalog,
    path: str | Path,
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
        Whose workers read blocks of cells, at most `BLOCKS_AHEAD` prefetch of those that are written.

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
    multimodal = Path(path).suffix == MULTIMODAL
    names = None
    if multimodal and not spec.spaces:
        names = tuple(m.name for m in read_modalities(catalog).values() if m.space.rank == 1 and not m.is_result)
    plan = plan_read(spec, catalog, spaces=names, deferred=True)
    if len(plan.spaces) != 1 and not multimodal:
        raise QueryError(
            f"{path} holds one feature space, the query names {list(plan.spaces)}; write a .h5mu, or name one with .spaces(...)."
        )
    for space in plan.spaces.values():
        refuse_arrays(space, str(path))
    plan = plan_elements(plan, catalog, multimodal=multimodal)
    release_unused_memory()
    reading = None if executor is None else (executor, catalog.location)
    sink = open_sink(path, **options)
    try:
        streams = (_begin_mudata if multimodal else _begin_space)(sink, plan)
        # The tables are written; their memory is let go of before the values take theirs.
        del plan
        release_unused_memory()
        for stream in streams:
            _write_values(sink, stream, reading)
        return sink.commit()
    except BaseException:
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
    sink.begin(tuple(matrix for stream in streams for matrix in _matrices(stream, plan.n_cells)))
    for name, space in plan.spaces.items():
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
    sink.begin(_matrices(stream, plan.n_cells))
    _write_elements(sink, plan, "")
    return [stream]


def _matrices(stream: _Stream, n_cells: int) -> tuple[SinkMatrix, ...]:
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
    var = plan.var.copy()
    sink.element(f"{prefix}obs", _obs(sink, plan, space if space.space.has_features else None))
    sink.element(f"{prefix}var", var)
    if space.space.has_features:
        sink.element(f"{prefix}varm", {"measured": measured_frame(space, var)})
    sink.element(f"{prefix}uns", make_uns(plan))


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
        times = {name: _writable(frame[name]) for name in frame.columns if frame[name].dtype.kind in "mM"}
        return frame.assign(**times) if times else frame
    table = obs_columns(plan.obs)
    columns = {column.name: Column(column.name, partial(_read_writable, column)) for column in table.columns}
    if space is not None:
        columns["layout_uid"] = Column("layout_uid", partial(_layouts, space))
    return replace(table, columns=tuple(columns.values()))


def _layouts(space: SpacePlan) -> Any:  # noqa: ANN401  (a pandas series)
    import pandas as pd

    return pd.Series(layout_column(space))


def _read_writable(column: Column) -> Any:  # noqa: ANN401  (a pandas series or texts)
    return _writable(column.read())


def _writable(values: Any) -> Any:  # noqa: ANN401  (a pandas series or texts)
    """Write times as ISO text, which AnnData files can hold."""
    return values if isinstance(values, Texts) or values.dtype.kind not in "mM" else values.astype(str)

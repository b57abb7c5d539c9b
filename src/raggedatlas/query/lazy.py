"""Plan -> AnnData whose values are dask arrays, read chunk by chunk when they are computed."""

import uuid
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from raggedatlas.errors import MissingExtraError, QueryError
from raggedatlas.model.batch import CsrBlock, assemble_csr, sparse_dtype
from raggedatlas.query.outputs import make_anndata, make_obs
from raggedatlas.query.read import PartReader, ReadPlan, SpacePlan, refuse_arrays

if TYPE_CHECKING:
    import anndata as ad

CHUNK_BYTES = 2**25
"""About how many bytes of one layer a chunk holds in memory."""

WIDE_OBS = 50
"""With more metadata columns than this, `obs` is read column by column on access."""


def to_lazy(plan: ReadPlan, chunk_bytes: int, *, lazy_obs: bool | None) -> "ad.AnnData":
    """Make an AnnData of dask arrays from one space of a plan from `plan_elements`; see `Query.lazy`."""
    if chunk_bytes < 1:
        raise QueryError(f"lazy() got chunk_bytes={chunk_bytes}; give at least 1, {CHUNK_BYTES:,} is the default.")
    space = plan.single()
    refuse_arrays(space, "AnnData")
    try:
        import dask
        import dask.array
        import xarray  # noqa: F401  (for `lazy_obs`)
    except ImportError as error:
        raise MissingExtraError("lazy() needs dask and xarray: pip install 'raggedatlas[dask]'.") from error
    # Chunks of about so many bytes; one ends where a dataset ends if that is in its second half.
    total = np.cumsum(space.row_bytes() // max(1, len(space.layers)))
    ends = np.flatnonzero(np.diff(space.parts[0].code)) + 1
    stops = [0]
    while (start := stops[-1]) < len(total):
        before = int(total[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(total, before + chunk_bytes, side="right")))
        half = int(np.searchsorted(total, before + chunk_bytes // 2, side="right"))
        at = int(np.searchsorted(ends, stop, side="right")) - 1
        if stop < len(total) and at >= 0 and ends[at] > max(start, half):
            stop = int(ends[at])
        stops.append(stop)
    chunks = tuple(np.diff(stops).tolist()) or (0,)
    layers = {layer: _array(dask, space, layer, chunks) for layer in space.layers}
    members = {**plan.obsm, **plan.results}
    obsm = {name: _array(dask, member, member.layers[0], chunks) for name, member in members.items()}
    obs: Any
    if lazy_obs or (lazy_obs is None and len(plan.obs.column_names) > WIDE_OBS):
        from raggedatlas.query.lazy_obs import lazy_frame

        obs = lazy_frame(plan, space)
    else:
        obs = make_obs(plan, space)
    return make_anndata(plan, obs, layers, obsm)


@dataclass(frozen=True, eq=False)
class _LayerRows:
    """One layer of a space, of which chunks read their rows; a reader, which has tables of all its chunks and columns, is made where the first is read."""

    space: SpacePlan

    def __getstate__(self) -> dict[str, Any]:
        # Without the cached reader: its memory maps are of this process.
        return {"space": self.space}

    @cached_property
    def reader(self) -> PartReader:
        """Reads the rows."""
        # dask computes several chunks at once, so one chunk takes one thread.
        return PartReader(self.space, self.space.parts[0], threads=1)


def _read_chunk(rows: _LayerRows, block_info: Any = None) -> Any:  # noqa: ANN401  (dask has no types)
    from raggedatlas.query.dask_chunks import CsrChunk

    (start, stop), *_ = block_info[None]["array-location"]
    block = rows.reader.read(np.arange(start, stop))
    (values,) = block.layers.values()
    if not isinstance(block, CsrBlock):
        return values
    matrix = assemble_csr(CsrChunk, (values, block.indices, block.indptr), block.n_cols)
    matrix.has_sorted_indices = matrix.has_canonical_format = True
    return matrix


def _array(dask: Any, space: SpacePlan, layer: str, chunks: tuple[int, ...]) -> Any:  # noqa: ANN401  (dask has no types)
    """Make a dask array of one layer; its graph holds the plan once, as an input of every chunk."""
    from raggedatlas.query.dask_chunks import CsrChunk

    part = next(part for part in space.parts if layer in part.layers)
    # A chunk reads its layer alone: other layers of the part would be decoded for nothing.
    groups = tuple(replace(group, layers={layer: group.layers[layer]}) for group in part.groups)
    alone = replace(part, layers=(layer,), groups=groups)
    dtype = sparse_dtype(space.dtypes[layer]) if space.sparse else space.dtypes[layer]
    rows = _LayerRows(replace(space, parts=(alone,), dtypes={layer: dtype}))
    # Keys of a dask graph name their data, so other plans must not have the same.
    token = uuid.uuid4().hex
    empty = np.empty((0, 0), dtype)
    return dask.array.map_blocks(
        _read_chunk,
        dask.delayed(rows, name=f"raggedatlas-plan-{token}", pure=True, traverse=False),
        name=f"raggedatlas-{layer}-{token}",
        chunks=(chunks, (space.n_cols,)),
        dtype=dtype,
        meta=CsrChunk(empty) if space.sparse else empty,
    )

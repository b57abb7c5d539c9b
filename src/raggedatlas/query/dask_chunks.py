"""Chunks of lazy layers: CSR matrices whose sums, means and extremes dask can compute; imported by `lazy` alone."""

# ruff: noqa: TID253

from typing import Any, cast

import numpy as np
import scipy.sparse as sp
from anndata._io.specs.registry import _REGISTRY
from dask.array.dispatch import concatenate_lookup
from numpy.typing import DTypeLike


class CsrChunk(sp.csr_matrix):
    """A CSR matrix that reduces as an array where dask asks for it, with a tuple as ``axis`` and with ``keepdims``.

    SciPy's own do not take ``keepdims``, so dask fails at the first ``x.sum(axis=1)``. Slices, comparisons and products
    of a chunk are chunks too.
    """

    def sum(self, axis: Any = None, dtype: DTypeLike | None = None, out: Any = None, keepdims: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002
        """Sum over axes; see `numpy.sum`."""
        if not isinstance(axis, tuple):
            return super().sum(axis, cast("Any", dtype), out)
        return self._reduced(super().sum(_single(axis), cast("Any", dtype)), axis, keepdims=keepdims)

    def max(self, axis: Any = None, out: Any = None, keepdims: bool = False, **more: Any) -> Any:  # noqa: ANN401, FBT001, FBT002
        """Find the largest value along axes; see `numpy.max`."""
        if not isinstance(axis, tuple):
            return super().max(axis, out, **more)
        return self._reduced(super().max(_single(axis)), axis, keepdims=keepdims)

    def min(self, axis: Any = None, out: Any = None, keepdims: bool = False, **more: Any) -> Any:  # noqa: ANN401, FBT001, FBT002
        """Find the smallest value along axes; see `numpy.min`."""
        if not isinstance(axis, tuple):
            return super().min(axis, out, **more)
        return self._reduced(super().min(_single(axis)), axis, keepdims=keepdims)

    def _reduced(self, found: Any, axis: tuple[int, ...], *, keepdims: bool) -> Any:  # noqa: ANN401
        values = np.asarray(getattr(found, "toarray", lambda: found)())
        kept = [1 if i in axis else n for i, n in enumerate(self.shape)]
        return values.reshape(kept if keepdims else [n for i, n in enumerate(self.shape) if i not in axis])


def _single(axis: tuple[int, ...]) -> int | None:
    """Return the only axis of one, or None for both."""
    return axis[0] if len(axis) == 1 else None


@concatenate_lookup.register(CsrChunk)  # type: ignore[untyped-decorator, no-untyped-call]
def _concatenate(chunks: list[CsrChunk], axis: int = 0) -> CsrChunk:
    return CsrChunk(cast("sp.csr_matrix", (sp.hstack if axis else sp.vstack)(chunks, format="csr")))


def _with_chunks(kind: Any) -> Any:  # noqa: ANN401
    """Return what names chunks where anndata's registry names CSR matrices, or a dask array of them; None elsewhere."""
    if isinstance(kind, tuple):
        return (kind[0], CsrChunk) if kind[1] is sp.csr_matrix else None
    return CsrChunk if kind is sp.csr_matrix else None


# anndata finds a writer by the exact type of a matrix, or of a dask array and its chunks.
for (_target, _kind, _modifiers), _function in [*_REGISTRY.write.items()]:
    if (_chunks := _with_chunks(_kind)) is not None:
        _REGISTRY.write[_target, _chunks, _modifiers] = _function
for _kind, _spec in [*_REGISTRY.write_specs.items()]:
    if (_chunks := _with_chunks(_kind)) is not None:
        _REGISTRY.write_specs[_chunks] = _spec

"""The `obs` of a plan as an `xarray.Dataset` whose columns are read on access; the one module that needs xarray."""

from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from xarray import Dataset, Variable
from xarray.backends import BackendArray
from xarray.core.extension_array import PandasExtensionArray
from xarray.core.indexing import IndexingSupport, LazilyIndexedArray, explicit_indexing_adapter

from raggedatlas.model.frames import facts_of
from raggedatlas.query.outputs import layout_column, obs_index, obs_series
from raggedatlas.query.read import ReadPlan, SpacePlan

if TYPE_CHECKING:
    import pandas as pd


def lazy_frame(plan: ReadPlan, space: SpacePlan) -> Dataset:
    """Describe the cells, with the layout that each has in a space; only their uids are in memory.

    The dimension is ``uid``. AnnData wraps it as it does what `anndata.experimental.read_lazy` reads.
    """
    fields = [field for field in plan.obs.schema if field.name != "uid"]
    columns = {field.name: Variable("uid", LazilyIndexedArray(_Column(plan.obs, field))) for field in fields}
    if space.space.has_features:
        columns["layout_uid"] = Variable("uid", layout_column(space))
    return Dataset(columns, coords={"uid": obs_index(plan.obs)})


class _Column(BackendArray):
    """A column of a plan's `obs`, read from the table on each access."""

    def __init__(self, table: pa.Table, field: pa.Field) -> None:
        self.table, self.field, self.shape = table, field, (table.num_rows,)

    @cached_property
    def dtype(self) -> Any:  # noqa: ANN401  (of NumPy or pandas)
        """The dtype of the values."""
        # Whole numbers and booleans get a nullable dtype where some are missing, and categories are those that occur; of others, no rows
        # tell the dtype.
        kind, facts = self.field.type, facts_of(self.field)
        varies = (
            pa.types.is_integer(kind)
            or pa.types.is_boolean(kind)
            or (facts is not None and facts.kind == "categorical")
        )
        column = self.table.column(self.field.name) if varies else pa.chunked_array([], kind)
        return _array(obs_series(self.field, column)).dtype

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401  (xarray has no types)
        return explicit_indexing_adapter(key, self.shape, IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[Any, ...]) -> Any:  # noqa: ANN401
        return _array(obs_series(self.field, self.table.column(self.field.name)).iloc[key[0]])


def _array(column: "pd.Series[Any]") -> Any:  # noqa: ANN401  (an array)
    """Return values as xarray holds them: categories and nullable numbers as pandas arrays, text and numbers as NumPy arrays."""
    import pandas as pd

    is_text = isinstance(column.dtype, pd.StringDtype)
    extended = pd.api.types.is_extension_array_dtype(column.dtype) and not is_text
    return PandasExtensionArray(column.array) if extended else column.to_numpy(object if is_text else None)

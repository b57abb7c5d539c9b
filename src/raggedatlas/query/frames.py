"""Results as pandas frames: `obs` with the dtypes of the files, `var` from the registry."""

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raggedatlas.catalog.features import Registry
from raggedatlas.model.frames import ColumnFacts, arrow_to_series, facts_of
from raggedatlas.model.tables import Column, ColumnTable, Texts, arrow_values
from raggedatlas.query.deferred import DeferredTable
from raggedatlas.query.parts import SpacePlan

if TYPE_CHECKING:
    import pandas as pd


def obs_frame(table: pa.Table) -> "pd.DataFrame":
    """Turn a plan's `obs` into a frame indexed by cell uid.

    Categoricals keep every category that the atlas knows for the column, in its order; `dataset` has only those that occur.
    """
    import pandas as pd

    columns = {
        field.name: obs_series(field, table.column(i)).set_axis(range(table.num_rows))
        for i, field in enumerate(table.schema)
        if field.name != "uid"
    }
    frame = pd.DataFrame(columns, index=pd.RangeIndex(table.num_rows))
    frame.index = obs_index(table)
    return frame


def obs_index(table: pa.Table) -> "pd.Index[str]":
    """Return the uids of the cells of a plan's `obs` as an index."""
    return _text_index(table.column("uid"), "uid")


def obs_columns(table: DeferredTable) -> ColumnTable:
    """Turn a plan's deferred `obs` into a table of the same values, each column of which is made when it is asked for."""
    fields = {field.name: i for i, field in enumerate(table.schema)}
    columns = [Column(name, partial(_obs_values, table, i)) for name, i in fields.items() if name != "uid"]
    return ColumnTable(table.num_rows, Column("uid", partial(_obs_values, table, fields["uid"])), tuple(columns))


def _obs_values(table: DeferredTable, i: int) -> "pd.Series[Any] | Texts":
    field = table.schema.field(i)
    if pa.types.is_dictionary(field.type) or pa.types.is_nested(field.type):
        return obs_series(field, table.column(i))
    return arrow_values(field, partial(table.chunks, i), table.num_rows)


def obs_series(field: pa.Field, column: pa.ChunkedArray) -> "pd.Series[Any]":
    """Turn a column of a plan's `obs` into a series with the dtype that its file had."""
    import pandas as pd

    if pa.types.is_dictionary(field.type):
        return _categorical(column)
    if pa.types.is_nested(field.type):
        return pd.Series(column.to_pandas())
    return arrow_to_series(column, facts_of(field) or ColumnFacts(field.name, ""))


def layout_column(space: SpacePlan) -> "pd.Categorical":
    """Give each cell's layout as a categorical over the plan's layouts."""
    import pandas as pd

    return pd.Categorical.from_codes(space.layout_code, categories=pd.Index(list(space.layouts), dtype=object))


def var_frame(registry: Registry | None, space: SpacePlan) -> "pd.DataFrame":
    """Describe the columns of a space: indexed by feature id where these are all known and unique, else by uid.

    Columns are those of the registry: `uid`, `symbol`, `global_index`, `aliases` joined by ``|``, and the others.
    Spaces without features number their columns.
    """
    import pandas as pd

    if registry is None:
        return pd.DataFrame(index=pd.Index([str(i) for i in range(space.n_cols)], dtype=object))
    rows = np.array([registry.row_of[uid] for uid in space.features.tolist()], np.int64)
    table = registry.table.take(pa.array(rows))
    ids = table.column("feature_id")
    by_id = ids.null_count == 0 and len(pc.unique(ids)) == len(ids)
    columns = {}
    front = ("uid", "symbol", "global_index", "feature_id")
    for name in [
        *front,
        *(n for n in table.column_names if n not in {*front, "redirect", "symbol_source", "other_type"}),
    ]:
        values = table.column(name)
        if pa.types.is_list(values.type):
            values = pc.binary_join(values.cast(pa.list_(pa.string())), "|")
        if name == "symbol":  # a gene that no file gave a symbol goes by its id
            values = pc.coalesce(values, ids)
        if pa.types.is_string(values.type):
            values = values.fill_null("")
        columns[name] = arrow_to_series(values, ColumnFacts(name, "")).set_axis(range(len(rows)))
    frame = pd.DataFrame(columns, index=pd.RangeIndex(len(rows)))
    frame.index = _text_index(ids if by_id else table.column("uid"), "feature_id" if by_id else "uid")
    if frame.index.name in frame.columns:
        frame = frame.rename_axis(None)
    return frame


def _categorical(column: pa.ChunkedArray) -> "pd.Series[str]":
    import pandas as pd

    encoded = column.unify_dictionaries().combine_chunks()
    codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    used = np.zeros(len(encoded.dictionary), bool)
    used[codes] = True
    categories = pd.Index(np.array(encoded.dictionary.to_pylist(), dtype=object)[used])
    return pd.Series(pd.Categorical.from_codes((np.cumsum(used) - 1)[codes], categories=categories))


def _text_index(column: pa.ChunkedArray, name: str) -> "pd.Index[str]":
    series = arrow_to_series(column, ColumnFacts(name, "string"))
    import pandas as pd

    index: pd.Index[str] = pd.Index(series, name=name)
    return index

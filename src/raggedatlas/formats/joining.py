"""How sources are joined: what anndata's `concat` makes of pieces of them that fit into memory."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import AtlasError, SourceError
from raggedatlas.model.tables import Column, ColumnTable, Texts
from raggedatlas.store.runtime import warnings_as

if TYPE_CHECKING:
    from anndata import AnnData

Join = Literal["inner", "outer"]
Merge = Literal["same", "unique", "first", "only"]

VALUES = 1 << 22
"""Values of a table of cells that are joined at once; at least one column is."""


@dataclass(frozen=True, slots=True)
class ConcatOptions:
    """How sources are joined; the fields are the arguments of `anndata.concat`.

    Parameters
    ----------
    join : {"inner", "outer"}
        Which features, layers and columns are kept: those of all, or of any.
    merge, uns_merge : {"same", "unique", "first", "only"} or None
        What is kept of `var`, `varm` and `varp`, and of `uns`; None keeps nothing.
    label : str or None
        Name of the column of cells that says where each is from.
    keys : tuple
        What each source is called there.
    index_unique : str or None
        What stands between the name of a cell and the key of its source; None leaves names as they are.
    fill_value : number or None
        What stands where a source has not measured; None is 0 in sparse matrices and NaN in dense ones.
    """

    join: Join
    merge: Merge | None
    uns_merge: Merge | None
    label: str | None
    keys: tuple[Any, ...]
    index_unique: str | None
    fill_value: float | None

    def joined(self, parts: "Iterable[AnnData]") -> "AnnData":
        """Join objects in memory; what anndata says of them is told as an error of ours.

        Raises
        ------
        SourceError
            If they cannot be joined.
        """
        import anndata
        import pandas as pd

        options = {name: getattr(self, name) for name in ("join", "merge", "uns_merge", "index_unique", "fill_value")}
        try:
            with warnings_as("ignore"):
                return anndata.concat(list(parts), keys=self.keys, **options)
        except AtlasError:
            raise
        except (
            ValueError, TypeError, KeyError, AttributeError, IndexError, NotImplementedError, pd.errors.InvalidIndexError
        ) as error:  # fmt: skip
            said = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
            raise SourceError(f"The sources cannot be put together ({said}); convert what differs first.") from error


def concat_cells(tables: Sequence[ColumnTable], how: ConcatOptions) -> ColumnTable:
    """Put tables of cells one below the other; types and categories are united as anndata does.

    Parameters
    ----------
    tables : sequence of ColumnTable
        One of each source.
    how : ConcatOptions
        Says which columns are kept and what cells are called.

    Raises
    ------
    SourceError
        If a table has two columns of one name.
    """
    import pandas as pd

    lengths = [len(table) for table in tables]
    found = [{column.name: column for column in table.columns} for table in tables]
    for table, columns in zip(tables, found, strict=True):
        if len(columns) < len(table.columns):
            raise SourceError(
                f"A table of cells has two columns of one name among {[c.name for c in table.columns]}; rename one."
            )
    names = list(dict.fromkeys(name for columns in found for name in columns))
    names = [name for name in names if how.join == "outer" or all(name in columns for columns in found)]
    step = max(1, VALUES // max(1, sum(lengths)))

    @lru_cache(maxsize=1)
    def read(start: int) -> dict[Any, Any]:
        few = names[start : start + step]
        return _joined_columns([{n: columns[n].read() for n in few if n in columns} for columns in found], lengths, how)

    made = {
        name: Column(name, partial(lambda i, name: read(i - i % step)[name], i, name)) for i, name in enumerate(names)
    }
    if how.label is not None:
        codes = np.repeat(np.arange(len(tables)), lengths)
        kind: Any = pd.CategoricalDtype(list(how.keys))
        made[how.label] = Column(how.label, lambda: pd.Series(pd.Categorical.from_codes(codes, dtype=kind)))
    called = {table.index.name for table in tables}
    index = Column(called.pop() if len(called) == 1 else None, partial(_joined_names, tables, how))
    return ColumnTable(sum(lengths), index, tuple(made.values()))


def _joined_columns(values: Sequence[dict[Any, Any]], lengths: list[int], how: ConcatOptions) -> dict[Any, Any]:
    """Join some columns of all tables; text that is read in blocks stays so."""
    import pandas as pd
    from anndata import AnnData

    every = dict.fromkeys(name for columns in values for name in columns)
    chained = {
        name: texts for name in every if (texts := _chained([columns.get(name) for columns in values])) is not None
    }
    # All rows have one name, as nobody asks for it: the same text takes eight bytes a row.
    parts = (
        AnnData(
            obs=pd.DataFrame(
                {name: _array(value) for name, value in columns.items() if name not in chained},
                index=pd.Index(np.full(n, "cell", object)),
            )
        )
        for columns, n in zip(values, lengths, strict=True)
    )
    obs = how.joined(parts).obs
    return chained | {name: pd.Series(obs[name].array) for name in obs}


def _array(value: Any) -> Any:  # noqa: ANN401  (an array of pandas)
    import pandas as pd

    return pd.Series(value.whole(), dtype=value.dtype).array if isinstance(value, Texts) else value.array


def _chained(values: Sequence[Any]) -> Texts | None:
    """Join text without missing values of one type, where some of it is read in blocks; None for all else."""
    import pandas as pd

    if not any(isinstance(value, Texts) for value in values) or any(value is None for value in values):
        return None
    if len({pd.api.types.pandas_dtype(value.dtype) for value in values}) > 1:
        return None
    if not all(
        isinstance(value, Texts) or pd.api.types.infer_dtype(value, skipna=False) == "string" for value in values
    ):
        return None
    return Texts(
        sum(v.n_rows if isinstance(v, Texts) else len(v) for v in values), partial(_texts, values), values[0].dtype
    )


def _texts(values: Sequence[Any], endings: Sequence[str] | None = None) -> Iterator[NDArray[np.object_]]:
    for i, value in enumerate(values):
        for block in value.blocks() if isinstance(value, Texts) else [np.asarray(value, object)]:
            yield np.asarray(block + endings[i] if endings else block, object)


def _joined_names(tables: Sequence[ColumnTable], how: ConcatOptions) -> Texts:
    """Name all cells, read in blocks."""
    endings = None if how.index_unique is None else [f"{how.index_unique}{key}" for key in how.keys]
    return Texts(sum(map(len, tables)), partial(_texts, [table.index.read() for table in tables], endings))

"""The query that a person builds call by call; each call returns a new one, and outputs read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import QueryError
from raggedatlas.model.batch import Batch
from raggedatlas.query import aggregate as aggregating
from raggedatlas.query import explain as explaining
from raggedatlas.query import export as exporting
from raggedatlas.query import outputs
from raggedatlas.query.axis import check_join
from raggedatlas.query.filters import DATASET, Filter, as_filter, to_sql
from raggedatlas.query.frames import obs_frame
from raggedatlas.query.plan import find_modality, modalities, plan_read, plan_rows
from raggedatlas.query.read import read_batches
from raggedatlas.query.rows import known_columns, metadata_names
from raggedatlas.query.search import METRICS
from raggedatlas.query.spec import Missing, QuerySpec, Sample, Search

if TYPE_CHECKING:
    import anndata as ad
    import mudata as md
    import pandas as pd


@dataclass(frozen=True)
class Query:
    """Cells and features of an atlas at one version; nothing is read before an output is asked for.

    Rows are chosen by filters, search, sample, order and limit, in this sequence whatever the sequence of the calls.
    Without order or search they come in table order. Equal queries give equal results.

    Parameters
    ----------
    catalog : Catalog
        At a version.
    spec : QuerySpec
        What is asked.

    Examples
    --------
    >>> query = view.query().where({"cell_type": ["B", "T"]}).features("CD79A", "MS4A1")  # doctest: +SKIP
    >>> query.to_anndata().varm["measured"]  # doctest: +SKIP
    """

    catalog: Catalog = field(repr=False)
    spec: QuerySpec = field(default_factory=QuerySpec)

    def where(
        self,
        condition: str | Mapping[str, Any] | Filter | None = None,
        /,
        **equal: Any,  # noqa: ANN401  (any value that people compare with)
    ) -> "Query":
        """Keep cells that meet a condition, beside those asked before.

        Parameters
        ----------
        condition : str, mapping or Filter
            SQL, used as it stands (never build it from data); or ``{column: value, list or None}``; or an expression of `col`.
        **equal
            The same as a mapping.

        Raises
        ------
        QueryError
            For an unknown column or a value that does not fit; SQL is checked when an output is asked for.

        Examples
        --------
        >>> query.where({"cell_type": ["B", "T"], "donor": None})  # doctest: +SKIP
        >>> query.where((col("percent.mt") < 5) & ~col("donor").is_null())  # doctest: +SKIP
        >>> query.where("n_genes > 200 AND cell_type LIKE 'B%'")  # doctest: +SKIP
        """
        conditions = [as_filter(c) for c in ([] if condition is None else [condition])]
        conditions += [as_filter(equal)] if equal else []
        if not conditions:
            raise QueryError("where() holds no condition; write e.g. where({'cell_type': ['B', 'T']}).")
        to_sql(conditions, known_columns(self.catalog))
        return self._with(filters=(*self.spec.filters, *conditions))

    def join(self, how: str | None = None, *, min_datasets: int | None = None) -> "Query":
        """Say which features a result over several datasets has.

        Parameters
        ----------
        how : "union" or "intersection"
            What any, or every, dataset of the result measured.
        min_datasets : int
            What at least so many of them measured.
        """
        return self._with(join=check_join(how, min_datasets))

    def features(self, *names: str | Sequence[str], space: str | None = None) -> "Query":
        """Keep some features, in the order given.

        Parameters
        ----------
        *names : str
            Uids, ids or symbols, one by one or as a list. Under ``join("intersection")`` those that not every dataset
            measured are left out.
        space : str or None
            Feature space; None is the usual one. Asking again for a space replaces what was asked.

        Raises
        ------
        FeatureError
            When an output is asked for: naming unknown, ambiguous and repeated names.
        """
        listed = _listed("features", names)
        if space is not None:
            find_modality(modalities(self.catalog), space, self.catalog)
        kept = tuple(entry for entry in self.spec.features if entry[0] != space)
        return self._with(features=(*kept, (space, listed)))

    def spaces(self, *names: str | Sequence[str]) -> "Query":
        """Read some feature spaces; without this call `to_anndata` reads gene expression, or the only one there is."""
        listed = _listed("spaces", names)
        known = modalities(self.catalog)
        return self._with(spaces=tuple(dict.fromkeys(find_modality(known, name, self.catalog).name for name in listed)))

    def layers(self, *names: str | Sequence[str]) -> "Query":
        """Read some layers: the first becomes X, the others `layers`.

        Without this call: `counts` where every dataset of the result has it, else the one layer that they share.
        With several spaces each takes those of the names that it has.
        """
        return self._with(layers=tuple(dict.fromkeys(_listed("layers", names))))

    def obs(self, *columns: str | Sequence[str]) -> "Query":
        """Keep some metadata columns, in the order given; `uid`, `cell_name` and `dataset` are always there."""
        listed = tuple(_listed("obs", columns)) if columns != ([],) else ()
        metadata_names(known_columns(self.catalog), listed)
        return self._with(obs=listed)

    def order_by(self, *columns: str | Sequence[str], descending: bool | Sequence[bool] = False) -> "Query":
        """Sort cells by columns; ties stay in table order, missing values come last, ordered categories in their order."""
        listed = _listed("order_by", columns)
        down = [descending] * len(listed) if isinstance(descending, bool) else list(descending)
        if len(down) != len(listed):
            raise QueryError(
                f"order_by got {len(listed)} columns and {len(down)} values of descending; give one, or one for each."
            )
        known = known_columns(self.catalog)
        for name in listed:
            if name != DATASET:
                known.stored(name)
        return self._with(order=tuple(zip(listed, down, strict=True)))

    def limit(self, n: int) -> "Query":
        """Keep at most the first n cells; 0 means none."""
        return self._with(limit=_count("limit", n))

    def sample(self, n: int, by: str | None = None, seed: int = 0) -> "Query":
        """Keep n cells chosen by chance, in table order.

        Parameters
        ----------
        n : int
            How many; all where there are fewer.
        by : str or None
            Take n of each value of this column, missing values being a group of their own.
        seed : int
            The same seed chooses the same cells, whatever has been compacted since.
        """
        if by is not None and by != DATASET:
            known_columns(self.catalog).stored(by)
        return self._with(sample=Sample(_count("sample", n), by, int(seed)))

    def search(
        self, query: str | Sequence[float] | np.ndarray[Any, Any], *, column: str, k: int = 10, metric: str = "l2"
    ) -> "Query":
        """Rank cells, and keep the best k of those that the filters keep.

        Parameters
        ----------
        query : str, or (d,) float
            Text is looked for word by word in a text column; a vector among the vectors of a column or an embedding.
        column : str
            A cell column or a feature space such as ``embedding``.
        k : int
            At most so many cells; best first, unless `order_by` says otherwise.
        metric : {"l2", "cosine", "dot"}
            Distance of vectors; ``l2`` is squared.

        Notes
        -----
        Where the column has an index, the index answers (vectors approximately; text with its stemming); else every cell is
        compared. `obs` gains ``search_distance`` or ``search_score``.
        """
        if metric not in METRICS:
            raise QueryError(f"search knows the metrics {METRICS}, not {metric!r}.")
        asked: str | tuple[float, ...] = (
            query if isinstance(query, str) else tuple(np.asarray(query, np.float64).ravel().tolist())
        )
        if not asked or (not isinstance(asked, str) and not np.isfinite(asked).all()):
            raise QueryError("search needs some text, or a vector of finite numbers.")
        found = Search(asked, column, _count("search", k), metric)
        from raggedatlas.query.search import search_columns

        search_columns(found, known_columns(self.catalog), modalities(self.catalog))
        return self._with(search=found)

    def missing(self, how: Missing) -> "Query":
        """Say what stands for a feature that a cell's dataset did not measure.

        Parameters
        ----------
        how : {"zero", "nan", "drop"}
            Zero; NaN, stored explicitly in sparse results, whose dtype becomes a float; or drop the features that not
            every dataset measured. ``varm["measured"]`` tells in every case.
        """
        if how not in {"zero", "nan", "drop"}:
            raise QueryError(f"missing takes 'zero', 'nan' or 'drop', not {how!r}.")
        return self._with(missing=how)

    def to_anndata(self, max_bytes: int | None = None) -> "ad.AnnData":
        """Read one feature space into an AnnData.

        Parameters
        ----------
        max_bytes : int or None
            Refuse a larger result before it is read; None takes the machine's memory.

        Returns
        -------
        anndata.AnnData
            `obs` indexed by cell uid, with `cell_name`, `dataset`, `layout_uid` and the metadata; `var` indexed by feature id;
            `X` CSR for sparse spaces; ``varm["measured"]`` (n_vars, n_layouts) bool with one column per layout uid;
            ``uns["atlas"]`` tells where it comes from, and how many chosen cells lack the space and were left out.

        Raises
        ------
        QueryError, FeatureError, LimitError
            For what cannot be answered as asked, before anything is read.
        """
        plan = plan_read(self.spec, self.catalog)
        if len(plan.spaces) != 1:
            raise QueryError(
                f"AnnData holds one feature space, the query names {list(plan.spaces)}; use .to_mudata(), or name one with .spaces(...)."
            )
        return outputs.to_anndata(plan, self.catalog, max_bytes)

    def to_mudata(self, max_bytes: int | None = None) -> "md.MuData":
        """Read several feature spaces into a MuData, all aligned to one `obs`; without `.spaces(...)` every one with vectors.

        Raises
        ------
        MissingExtraError
            If mudata is not installed.
        QueryError, FeatureError, LimitError
            As in `to_anndata`.
        """
        known = modalities(self.catalog)
        named = self.spec.spaces or tuple(m.name for m in known.values() if m.space.rank == 1)
        return outputs.to_mudata(plan_read(self.spec, self.catalog, spaces=named), self.catalog, max_bytes)

    def to_arrow(self) -> pa.Table:
        """Read the metadata of the chosen cells: `uid`, `cell_name`, `dataset` and the asked columns, facts as field metadata."""
        return plan_rows(self.spec, self.catalog, known_columns(self.catalog))[1]

    def to_pandas(self) -> "pd.DataFrame":
        """Read the metadata of the chosen cells into a frame indexed by cell uid, with the dtypes of the files."""
        return obs_frame(self.to_arrow())

    def batches(self, n: int) -> Iterator[Batch]:
        """Walk over the chosen cells, n at a time; every batch has the same columns.

        Parameters
        ----------
        n : int
            Cells of a batch; the last may have fewer.

        Returns
        -------
        iterator of Batch
            The plan is made, and refusals are raised, before the first batch is asked for.
        """
        if _count("batches", n) == 0:
            raise QueryError("batches(0) would never end; ask for at least one cell a batch.")
        plan = plan_read(self.spec, self.catalog)
        return read_batches(plan, n)

    def aggregate(self, by: str | Sequence[str], layer: str | None = None) -> "ad.AnnData":
        """Add up values per group of cells, in bounded memory.

        Parameters
        ----------
        by : str or sequence of str
            Columns whose values make the groups; missing values are a group.
        layer : str or None
            Layer; None takes the usual one.

        Returns
        -------
        anndata.AnnData
            One row per group with `n_cells`; layers `sum`, `mean` (over the cells that were measured), `count_nonzero` and
            `n_measured` per feature.
        """
        query = self if layer is None else self.layers(layer)
        columns = list(_listed("aggregate", (by,)))
        return aggregating.aggregate(query.spec, self.catalog, columns)

    def count(self, by: str | Sequence[str] | None = None) -> "int | pd.Series[int]":
        """Count the chosen cells, in all or per group.

        Returns
        -------
        int, or pandas.Series named ``n_cells``
            Sorted by group, missing values last.
        """
        return aggregating.count(self.spec, self.catalog, None if by is None else list(_listed("count", (by,))))

    def explain(self) -> str:
        """Say what would be read: cells, groups, arrays, bytes, layers, join and filter; reads metadata only."""
        return explaining.explain(self.spec, self.catalog)

    def write(self, path: str, **options: Any) -> str:  # noqa: ANN401  (options of the format)
        """Write the result to a file in bounded memory: ``.h5ad``, ``.zarr`` or ``.h5mu``; equal to the in-memory result.

        Parameters
        ----------
        path : str
            Where; its ending decides the format.
        **options
            Options of the format.

        Returns
        -------
        str
            The path.
        """
        return exporting.write(self.spec, self.catalog, path, options)

    def __repr__(self) -> str:
        """Say what is asked of which atlas."""
        snapshot = self.catalog.snapshot
        at = "the tip" if snapshot is None else f"snapshot {snapshot.version}"
        return f"Query of {self.catalog.location.uri} at {at}: {self.spec.describe()}"

    def _repr_html_(self) -> str:
        from html import escape

        rows = "".join(
            f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in self.spec.to_dict().items()
        )
        return f"<b>{escape(repr(self).split(': ', 1)[0])}</b><table>{rows}</table>"

    def _with(self, **changes: Any) -> "Query":  # noqa: ANN401  (fields of the spec)
        return Query(self.catalog, replace(self.spec, **changes))


def _listed(call: str, names: Sequence[Any]) -> tuple[str, ...]:
    """Read names given one by one or as one list."""
    given = names[0] if len(names) == 1 and not isinstance(names[0], str) else names
    listed = tuple(given)
    wrong = [name for name in listed if not isinstance(name, str)]
    if wrong or not listed:
        raise QueryError(f"{call} takes names, one by one or as a list; got {wrong[0] if wrong else 'none'!r}.")
    return tuple(map(str, listed))


def _count(call: str, n: object) -> int:
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0:
        raise QueryError(f"{call} takes a whole number from 0 on, not {n!r}.")
    return int(n)

"""What a query answers: tables, AnnData, MuData, batches, groups, counts, files."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import QueryError
from raggedatlas.model.arguments import checked
from raggedatlas.model.batch import Batch
from raggedatlas.query import aggregate as aggregating
from raggedatlas.query import explain as explaining
from raggedatlas.query import export as exporting
from raggedatlas.query import outputs
from raggedatlas.query.frames import obs_frame
from raggedatlas.query.lazy import CHUNK_BYTES, to_lazy
from raggedatlas.query.mapping import map_batches
from raggedatlas.query.parts import ReadPlan
from raggedatlas.query.plan import modalities, plan_read, plan_rows
from raggedatlas.query.read import read_batches
from raggedatlas.query.rows import known_columns
from raggedatlas.query.spec import QuerySpec, count_of, listed_names
from raggedatlas.store.executors import Workers

if TYPE_CHECKING:
    import anndata as ad
    import mudata as md
    import pandas as pd


@checked
class Answers:
    """What reads: the outputs of a `Query`, which has the catalog and what is asked."""

    catalog: Catalog
    spec: QuerySpec

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
        return outputs.to_anndata(_one_space(plan_read(self.spec, self.catalog)), self.catalog, max_bytes)

    def lazy(self, *, chunk_bytes: int = CHUNK_BYTES, lazy_obs: bool | None = None) -> "ad.AnnData":
        """Make an AnnData of dask arrays, for data that does not fit into memory.

        Nothing of the matrices is read before it is computed. `scanpy.pp.normalize_total`, `log1p`, `highly_variable_genes`, `pca` and
        `scanpy.tl.score_genes` take such an AnnData; ``to_memory()`` of it equals `to_anndata`.

        Parameters
        ----------
        chunk_bytes : int
            About how many bytes one chunk of a layer holds in memory. dask computes as many chunks at once as it has workers.
        lazy_obs : bool or None
            Whether each column of `obs` is read on access, as in `anndata.experimental.read_lazy`; not all of scanpy takes such an `obs`.
            None reads a frame of at most 50 columns at once, and more than 50 on access.

        Returns
        -------
        anndata.AnnData
            `X` and `layers` are dask arrays, (n_cells, n_features), with chunks of `scipy.sparse.csr_matrix` for sparse spaces; chunks
            hold all features, and end where a dataset ends if that makes them at least half as large. Members of `obsm` are dask arrays
            of NumPy chunks of the same rows. `var`, `varm` and `uns` are in memory. The arrays can be pickled and computed on the workers
            of a cluster that reach the atlas under the same address; the plan is in the graph of each array once.

        Raises
        ------
        MissingExtraError
            If dask or xarray is not installed; they come with the extra ``dask``.
        QueryError, FeatureError
            As in `to_anndata`.

        Examples
        --------
        >>> lazy = view.query().where(tissue="lung").lazy()  # doctest: +SKIP
        >>> sc.pp.normalize_total(lazy)  # doctest: +SKIP
        >>> sc.pp.log1p(lazy)  # doctest: +SKIP
        >>> sc.pp.highly_variable_genes(lazy, n_top_genes=2000)  # doctest: +SKIP
        """
        plan = plan_read(self.spec, self.catalog, deferred=self.catalog.tables.pinned is not None)
        return to_lazy(_one_space(plan), self.catalog, chunk_bytes, lazy_obs=lazy_obs)

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
        named = self.spec.spaces or tuple(m.name for m in known.values() if m.space.rank == 1 and not m.is_result)
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
        if count_of("batches", n) == 0:
            raise QueryError("batches(0) would never end; ask for at least one cell a batch.")
        plan = plan_read(self.spec, self.catalog)
        return read_batches(plan, n)

    def map(
        self,
        function: Callable[[Batch], Any],
        batch_size: int,
        output_schema: pa.Schema,
        *,
        executor: Executor | Workers | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> pa.Table:
        """Call a function with batches of the chosen cells, each cell once, and put what it gives into one table.

        Parameters
        ----------
        function : callable
            Takes a `Batch` and gives an Arrow table, a record batch or a dictionary of arrays, one row for each cell of the batch. With
            processes it must be importable there, or cloudpickle be installed.
        batch_size : int
            Cells of a batch; the last may have fewer.
        output_schema : pyarrow.Schema
            Columns that the function gives. Values are converted to its types, and refused where that loses something.
        executor : concurrent.futures.Executor, Workers or None
            Whose workers call the function; None calls it here. The result does not depend on it.
        progress : callable or None
            Called as ``progress("cells", done, total)``.

        Returns
        -------
        pyarrow.Table
            In the order of the cells: `uid`, then the columns of `output_schema`; `RaggedAtlas.annotate` takes it as it is.

        Raises
        ------
        QueryError, FeatureError
            For what cannot be answered as asked, before anything is read.
        SourceError
            If the function gives other columns, types or numbers of rows, naming the cells.
        ArgumentError
            If the function cannot be sent to workers.
        WorkersError
            If workers die, hang, or do not reach the atlas.

        Notes
        -----
        A task may run a second time where its worker is lost, so the function should only compute. Every batch has the same columns;
        its ``measured`` names the layouts of neighbouring cells only.

        Examples
        --------
        >>> schema = pa.schema([("n_counts", pa.float64())])  # doctest: +SKIP
        >>> table = query.map(
        ...     lambda batch: {"n_counts": batch.spaces["gene_expression"].to_csr().sum(1)}, 512, schema
        ... )  # doctest: +SKIP
        """
        plan = plan_read(self.spec, self.catalog)
        return map_batches(plan, function, batch_size, output_schema, executor, self.catalog.location, progress)

    def aggregate(
        self, by: str | Sequence[str], layer: str | None = None, *, executor: Executor | Workers | None = None
    ) -> "ad.AnnData":
        """Add up values per group of cells, in bounded memory.

        Parameters
        ----------
        by : str or sequence of str
            Columns whose values make the groups; missing values are a group.
        layer : str or None
            Layer; None takes the usual one.
        executor : concurrent.futures.Executor, Workers or None
            Whose workers add up blocks of cells; the result is the same to the last bit.

        Returns
        -------
        anndata.AnnData
            One row per group with `n_cells`; layers `sum`, `mean` (over the cells that were measured), `count_nonzero` and
            `n_measured` per feature.
        """
        spec = self.spec if layer is None else replace(self.spec, layers=(layer,))
        columns = list(listed_names("aggregate", (by,)))
        return aggregating.aggregate(spec, self.catalog, columns, executor)

    def count(
        self, by: str | Sequence[str] | None = None, *, executor: Executor | Workers | None = None
    ) -> "int | pd.Series[int]":
        """Count the chosen cells, in all or per group.

        Parameters
        ----------
        by : str, sequence of str or None
            Columns whose values make the groups; missing values are a group. None counts all.
        executor : concurrent.futures.Executor, Workers or None
            Whose workers count, each some datasets. What a sample, a search or a limit chooses is counted here.

        Returns
        -------
        int, or pandas.Series named ``n_cells``
            Sorted by group, missing values last.
        """
        groups = None if by is None else listed_names("count", (by,))
        return aggregating.count(self.spec, self.catalog, groups, executor)

    def explain(self) -> str:
        """Say what would be read: cells, groups, arrays, bytes, layers, join and filter; reads metadata only."""
        return explaining.explain(self.spec, self.catalog)

    def write(
        self,
        path: str | Path,
        *,
        executor: Executor | Workers | None = None,
        **options: Any,  # noqa: ANN401  (options of the format)
    ) -> str:
        """Write the result to a file in bounded memory: ``.h5ad``, ``.zarr`` or ``.h5mu``; equal to the in-memory result.

        Parameters
        ----------
        path : str
            Where; its ending decides the format.
        executor : concurrent.futures.Executor, Workers or None
            Whose workers read the values; this process writes them, so it helps where reading takes longer, as from object stores.
        **options
            Options of the format.

        Returns
        -------
        str
            The path.
        """
        return exporting.write(self.spec, self.catalog, path, options, executor)


def _one_space(plan: ReadPlan) -> ReadPlan:
    """Return a plan for an AnnData; refuse one of several spaces."""
    if len(plan.spaces) != 1:
        raise QueryError(
            f"AnnData holds one feature space, the query names {list(plan.spaces)}; use .to_mudata(), or name one with .spaces(...)."
        )
    return plan

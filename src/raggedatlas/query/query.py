"""The fluent query API: each call returns a new `Query`, and outputs read."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike

from raggedatlas.catalog.assets import asset_kind
from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.features import check_organism
from raggedatlas.errors import ArgumentError, AtlasError, QueryError
from raggedatlas.model.arguments import Progress, brief, checked
from raggedatlas.model.batch import Batch
from raggedatlas.model.choices import By, Missing, Unmatched
from raggedatlas.model.frames import DATASET
from raggedatlas.model.shown import Shown, ShownText
from raggedatlas.model.wings import answer
from raggedatlas.query import compute, outputs
from raggedatlas.query.cells import cell_columns, metadata_names
from raggedatlas.query.compare import CompareOptions, compare
from raggedatlas.query.compute import map_batches
from raggedatlas.query.explain import explain
from raggedatlas.query.lazy import CHUNK_BYTES, to_lazy
from raggedatlas.query.modalities import find_modality, read_modalities
from raggedatlas.query.outputs import obs_frame
from raggedatlas.query.plan import plan_elements, plan_read, plan_rows
from raggedatlas.query.read import read_batches
from raggedatlas.query.search import make_search
from raggedatlas.query.spec import AND, QuerySpec, Sample, check_count, flatten_names
from raggedatlas.query.terms import TermTree, count_level, term_tree
from raggedatlas.store.executors import Workers
from raggedatlas.store.filters import Filter, all_equal, to_sql
from raggedatlas.store.location import Address
from raggedatlas.store.sql import all_of, is_not_null
from raggedatlas.store.sql_parser import as_filter, filter_from_dict

if TYPE_CHECKING:
    import anndata as ad
    import mudata as md
    import pandas as pd


@checked
@dataclass(frozen=True)
class Query(Shown):
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

    def to_dict(self) -> dict[str, Any]:
        """Return what the query asks in JSON's types, for `from_dict`; ``uns["atlas"]["query"]`` of a result is its JSON text.

        Returns
        -------
        dict of str to JSON values
            Every part, lists whole. Names of genes are as they were given, so the dictionary asks the same of every snapshot.

        Examples
        --------
        >>> view.query().where(tissue="lung").limit(5).to_dict()["filters"]  # doctest: +SKIP
        [{'operator': '==', 'column': 'tissue', 'value': 'lung'}]
        """
        return self.spec.to_dict()

    @classmethod
    def from_dict(
        cls,
        view: Any,  # noqa: ANN401  (an AtlasView, which imports this file)
        asked: Mapping[str, Any],
    ) -> "Query":
        """Ask a snapshot what `to_dict` of a query says.

        Parameters
        ----------
        view : AtlasView
            The snapshot. ``uns["atlas"]["uri"]`` and ``["snapshot"]`` of a result name the one that was asked.
        asked : mapping
            What `to_dict` returns; parts that are absent are those of ``view.query()``.

        Returns
        -------
        Query
            Of the same result, on the same snapshot.

        Raises
        ------
        ArgumentError
            For an unknown key, or a value that its key does not take.
        QueryError, NotFoundError, FeatureError
            For what the snapshot lacks, as the methods of `Query` say.

        Examples
        --------
        >>> asked = json.loads(adata.uns["atlas"]["query"])  # doctest: +SKIP
        >>> ra.Query.from_dict(view, asked).to_anndata()  # doctest: +SKIP
        """
        # By what it has: the module of views imports this one.
        if not (callable(getattr(view, "query", None)) and isinstance(getattr(view, "version", None), int)):
            raise ArgumentError(f"from_dict() takes view as an AtlasView, e.g. atlas.checkout(1), not {brief(view)}.")
        usual = QuerySpec().to_dict()
        unknown = [key for key in asked if key not in usual]
        if unknown:
            raise ArgumentError(f"from_dict() does not know {unknown}; the parts of a query are {[*usual]}.")
        try:
            # JSON's types compare by `!=`, and lists are what the methods take for several names.
            plain = json.loads(json.dumps(asked, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"from_dict() takes what JSON holds: {error}.") from None
        given = {key: value for key, value in plain.items() if value != usual[key]}
        start: dict[str, Any] = {key: given.pop(key) for key in ("identity", "on_merge", "names") if key in given}
        key = "identity"
        try:
            if isinstance(start.get("identity"), list):
                start["identity"] = dict(start["identity"])
            query: Query = view.query(**start)
            for key, step in _STEPS.items():
                query = step(query, given[key]) if key in given else query
        except AtlasError:
            raise
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise ArgumentError(f"from_dict() cannot read {key!r} from {brief(plain[key])}: {error}.") from None
        return query

    def where(
        self,
        condition: str | Mapping[str, Any] | Filter | None = None,
        /,
        **equal: Any,  # noqa: ANN401  (any value that people compare with)
    ) -> "Query":
        """Keep cells that satisfy a condition, in addition to earlier ones.

        Parameters
        ----------
        condition : str, mapping or Filter
            SQL, used verbatim (never build it from data); or ``{column: value, list or None}``; or an expression of `col`.
        **equal
            The same as a mapping.

        Raises
        ------
        QueryError
            For an unknown column, a value that does not fit or SQL that does not parse. What else Lance does not
            evaluate is refused when an output is asked for.

        Examples
        --------
        >>> query.where({"cell_type": ["B", "T"], "donor": None})  # doctest: +SKIP
        >>> query.where((col("percent.mt") < 5) & ~col("donor").is_null())  # doctest: +SKIP
        >>> query.where("n_genes > 200 AND cell_type LIKE 'B%'")  # doctest: +SKIP
        """
        conditions = [] if condition is None else [as_filter(condition)]
        if equal:
            conditions.append(all_equal(equal))
        if not conditions:
            raise QueryError("where() holds no condition; write e.g. where({'cell_type': ['B', 'T']}).")
        # Only for its errors, so that this call refuses unknown columns and not a later output.
        to_sql(conditions, cell_columns(self.catalog))
        return self._with(filters=(*self.spec.filters, *conditions))

    def split(self, *parts: str, name: str = "split") -> "Query":
        """Keep the cells of a part of a stored split, in addition to earlier conditions.

        Parameters
        ----------
        *parts : str
            Parts, such as ``"train"``; a cell is kept that is in one of them, also if it is in others too.
        name : str
            The column that stores the split.

        Raises
        ------
        QueryError
            If there is no such column or part; the message lists the parts.

        See Also
        --------
        Split : How splits are made and stored.

        Examples
        --------
        >>> view.query().split("train")  # doctest: +SKIP
        """
        listed = flatten_names("split", parts)
        columns = cell_columns(self.catalog)
        facts = columns.facts.get(columns.stored(name))
        labels = list((facts.categories if facts is not None else None) or ())
        if not labels and columns.target(name).family == "text":
            labels = [*Query(self.catalog).count(name).index.dropna()]  # type: ignore[union-attr]
        labels = [label for label in labels if isinstance(label, str)]
        known = {part for label in labels for part in label.split(AND)}
        if lacking := sorted({*listed} - known):
            raise QueryError(
                f"The column {name!r} has no part {lacking[0]!r}; it has {sorted(known)}."
                if known
                else f"The column {name!r} holds no split; store one with atlas.annotate(ra.Split...)."
            )
        return self.where({name: [label for label in labels if {*label.split(AND)} & {*listed}]})

    def join(self, how: str | None = None, *, min_datasets: int | None = None, orthologs: str | None = None) -> "Query":
        """Set which features a result over several datasets has, and whether genes of several organisms are joined.

        Parameters
        ----------
        how : "union" or "intersection"
            What any, or every, dataset of the result measured.
        min_datasets : int
            What at least so many of them measured; after ``missing("drop")``, of these what every dataset measured.
        orthologs : str or None
            An organism: genes of others that are orthologs of its genes, one to one, count as these. Given alone it leaves `how` as it
            is; None leaves what was asked before. See `features`.

        Raises
        ------
        QueryError
            For any other `how` or number, or if no loaded table gives orthologs of the organism.

        Examples
        --------
        >>> query.join("intersection", orthologs="human")  # doctest: +SKIP
        """
        query = self._by_orthologs(orthologs)
        if orthologs is not None and how is None and min_datasets is None:
            return query
        if how is None and min_datasets is not None and min_datasets >= 1:
            return query._with(join=min_datasets)
        if min_datasets is None and how in {"union", "intersection"}:
            return query._with(join=how)
        raise QueryError(
            f"join() takes 'union', 'intersection' or a number of datasets of at least 1, such as min_datasets=2; got {how!r}"
            f"{'' if min_datasets is None else f' and min_datasets={min_datasets!r}'}."
        )

    def features(self, *names: str | Sequence[str], space: str | None = None, orthologs: str | None = None) -> "Query":
        """Keep some features, in the order given.

        Parameters
        ----------
        *names : str
            Uids, ids or symbols, one by one or as a list. Under ``join("intersection")`` those that not every dataset
            measured are left out.
        space : str or None
            Feature space; None is the usual one. Asking again for a space replaces what was asked.
        orthologs : str or None
            An organism, e.g. ``"human"``: datasets of other organisms are asked by its genes too. A gene of another organism counts as
            its ortholog if the loaded tables of orthologs say that the two are one to one; `FeatureIdentity.orthologs` lists these and
            the others. It holds for the whole query; None leaves what was asked before.

        Raises
        ------
        QueryError
            If no loaded table gives orthologs of the organism.
        FeatureError
            When an output is asked for: naming unknown, ambiguous and repeated names.

        Warns
        -----
        UserWarning
            When an output is asked for: naming asked genes with orthologs that are not one to one, and are left out.

        Examples
        --------
        >>> view.query().features("CD79A", orthologs="human")  # doctest: +SKIP
        """
        listed = flatten_names("features", names)
        if space is not None:
            find_modality(read_modalities(self.catalog), space, self.catalog)
        kept = tuple(entry for entry in self.spec.features if entry[0] != space)
        return self._by_orthologs(orthologs)._with(features=(*kept, (space, listed)))

    def spaces(self, *names: str | Sequence[str]) -> "Query":
        """Read some feature spaces; without this call gene expression, or the only one there is.

        An empty list reads no values: `batches` and a `Loader` give the metadata of all chosen cells, and results of models.
        """
        listed = () if names == ([],) else flatten_names("spaces", names)
        known = read_modalities(self.catalog)
        return self._with(spaces=tuple(dict.fromkeys(find_modality(known, name, self.catalog).name for name in listed)))

    def layers(self, *names: str | Sequence[str]) -> "Query":
        """Read some layers: the first becomes X, the others `layers`.

        Without this call: `counts` where every dataset of the result has it, else the one layer that they share.
        With several spaces each takes those of the names that it has.
        """
        return self._with(layers=tuple(dict.fromkeys(flatten_names("layers", names))))

    def obs(self, *columns: str | Sequence[str]) -> "Query":
        """Keep some metadata columns, in the order given; `uid`, `cell_name` and `dataset` are always there."""
        # An empty list asks for no columns here; `flatten_names` refuses it.
        listed = tuple(flatten_names("obs", columns)) if columns != ([],) else ()
        metadata_names(cell_columns(self.catalog), listed)
        return self._with(obs=listed)

    def order_by(self, *columns: str | Sequence[str], descending: bool | Sequence[bool] = False) -> "Query":
        """Sort cells by columns; ties stay in table order, missing values come last, ordered categories in their order."""
        listed = flatten_names("order_by", columns)
        down = [descending] * len(listed) if isinstance(descending, bool) else list(descending)
        if len(down) != len(listed):
            raise QueryError(
                f"order_by got {len(listed)} columns and {len(down)} values of descending; give one, or one for each."
            )
        known = cell_columns(self.catalog)
        for name in listed:
            if name != DATASET:
                known.stored(name)
        return self._with(order=tuple(zip(listed, down, strict=True)))

    def limit(self, n: int) -> "Query":
        """Keep at most the first n cells; 0 means none."""
        return self._with(limit=check_count("limit", n))

    def sample(self, n: int, by: str | None = None, seed: int = 0) -> "Query":
        """Keep n random cells, in table order.

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
            cell_columns(self.catalog).stored(by)
        return self._with(sample=Sample(check_count("sample", n), by, int(seed)))

    def search(
        self, query: str | Sequence[float] | np.ndarray[Any, Any], *, column: str, k: int = 10, metric: str = "l2"
    ) -> "Query":
        """Rank cells and keep the k best of those that the filters keep.

        Parameters
        ----------
        query : str, or (d,) float
            Text is looked for word by word in a text column; a vector among the vectors of a column or an embedding. Among
            those, a text is the uid of a cell whose vector is meant; it need not be among the cells that the filters keep, and
            is never its own neighbour.
        column : str
            A cell column, a feature space such as ``embedding``, or a result of a model.
        k : int
            At most so many cells; best first, unless `order_by` says otherwise.
        metric : {"l2", "cosine", "dot"}
            Distance of vectors; ``l2`` is squared. A vector with NaN or infinities is never a neighbor, nor is one of zeros under
            ``cosine``; a search for one is refused.

        Raises
        ------
        QueryError
            For an unknown metric or column, one that cannot be searched in that way, and a query that is empty or not finite.
        ArgumentError
            For what is neither text nor a vector.

        Notes
        -----
        Every cell is compared. Only vectors of a result that has an index are found by it, approximately, where the filters keep
        many cells. `obs` gains ``search_distance`` or ``search_score``, in place of a column of this name, as a file of an earlier search has.
        """
        return self._with(search=make_search(query, column, k, metric, self.catalog))

    def with_results(self, *names: str | Sequence[str], missing: Literal["nan", "drop"] = "nan") -> "Query":
        """Add results of models: each becomes ``obsm[name]``, aligned to the cells.

        Parameters
        ----------
        *names : str
            Results, one by one or as a list; those asked before stay.
        missing : {"nan", "drop"}
            NaN in the rows of cells that have no result, or leave these cells out.

        Raises
        ------
        NotFoundError
            If there is no such result in this snapshot; the message lists those there are.
        QueryError
            When an output is asked for: for whole numbers that no type holds together with NaN, or arrays of several axes.

        Notes
        -----
        `to_anndata`, `write` and a `Loader` include them; `to_mudata` and ``.h5mu`` in the `obsm` of all cells;
        `batches` in ``batch.obsm``. Results that lie in the cell table (``as_="vector"``) are held in memory for the chosen cells.
        A member of a file's `obsm` of the same name is left out.
        """
        if missing not in {"nan", "drop"}:
            raise QueryError(f"with_results takes missing='nan' or 'drop', not {missing!r}.")
        records = [asset_kind("results").find(self.catalog, name)[0] for name in flatten_names("with_results", names)]
        query = self._with(results=tuple(dict.fromkeys([*self.spec.results, *(r.name for r in records)])))
        if missing == "nan":
            return query
        # Pointers and vectors of cells without the result are null.
        return query.where(all_of(*(is_not_null(r.column) for r in records)))

    def missing(self, how: Missing) -> "Query":
        """Set the fill value of features that the dataset of a cell did not measure.

        Parameters
        ----------
        how : {"zero", "nan", "drop"}
            Zero; NaN, stored explicitly in sparse results, whose dtype becomes a float; or drop the features that not
            every dataset measured. ``varm["measured"]`` is set in every case.
        """
        if how not in {"zero", "nan", "drop"}:
            raise QueryError(f"missing takes 'zero', 'nan' or 'drop', not {how!r}.")
        return self._with(missing=how)

    def within(self, bbox: ArrayLike, space: str | None = None, *, by: By = "bbox") -> "Query":
        """Keep cells whose shape intersects a box, in addition to earlier conditions.

        Parameters
        ----------
        bbox : (2 D,) or (2, D) floats
            Least corner, then greatest, both inclusive, in world units and the order of the store's axes, D = 2 to 4:
            ``(xmin, ymin, xmax, ymax)``. Axes of the store beyond D are ignored; an end may be infinite.
        space : str or None
            Name or feature space of the geometry; None takes the only one. A feature space means the stores of all datasets,
            whatever they are called.
        by : {"bbox", "centroid", "exact"}
            ``"bbox"``: the box of the shape meets this one; ``"centroid"``: its centroid lies in it. Both are answered from
            the cell table. ``"exact"`` reads the shapes of those whose box lies across the border: a point, edge or face meets the box,
            or an outline (``segmentation_boundary``) encloses it.

        Raises
        ------
        QueryError
            For a box that is none, or has more axes than the shapes; for a feature space in which a cell chosen so far has several
            geometries.
        NotFoundError
            If there is no such geometry in this snapshot.

        Examples
        --------
        >>> query.within((0, 0, 500, 500), space="segmentation_boundary")  # doctest: +SKIP
        """
        return self._with(filters=(*self.spec.filters, answer("within")(self.spec, self.catalog, bbox, space, by)))

    def geometry(
        self,
        space: str | None = None,
        *,
        level: int | None = None,
        budget: int | None = None,
        attributes: Sequence[str] | None = None,
    ) -> Any:  # noqa: ANN401  (`Shapes`, which is of the wing of geometry)
        """Read the shapes of the chosen cells, in one pass over the touched chunks of every store.

        Parameters
        ----------
        space : str or None
            As of `within`.
        level, budget : int or None
            Which level of detail (0, the finest, by default), or the finest with at most so many vertices in a store.
        attributes : sequence of str or None
            Which attributes; None takes all.

        Returns
        -------
        Shapes
            Object ``i`` belongs to row ``i`` of the query, as `to_pandas` and `to_arrow` have it; ids are the rows. A cell without a shape
            is an empty object. Object attributes: ``uid``, ``object_id`` (in its own store, -1 without) and ``present``.

        Raises
        ------
        NotFoundError
            If there is no such geometry in this snapshot.
        QueryError
            If the touched stores hold different kinds or numbers of axes, or a chosen cell has several geometries of the feature space.
        """
        read = answer("read_shapes")
        return read(self.spec, self.catalog, space, level=level, budget=budget, attributes=attributes)

    def with_centroids(self, space: str | None = None, key: str = "spatial") -> "Query":
        """Add centroids of shapes as ``obsm[key]``, (n_cells, D) float64, as plotting tools expect in ``obsm["spatial"]``.

        Parameters
        ----------
        space : str or None
            As of `within`.
        key : str
            Under which name.

        Raises
        ------
        NotFoundError
            If there is no such geometry in this snapshot.
        QueryError
            If its stores have different numbers of axes.

        Notes
        -----
        Read from the cell table; NaN for a cell without a shape. A member of a file's `obsm` of the same name is left out.
        """
        name = answer("choose_centroids")(self.catalog, space)
        kept = tuple(entry for entry in self.spec.centroids if entry[1] != key)
        return self._with(centroids=(*kept, (name, key)))

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
            ``uns["atlas"]`` holds the provenance and the number of selected cells without the space, which are left out.

        Raises
        ------
        QueryError, FeatureError, LimitError
            For what cannot be answered as asked, before anything is read.
        """
        return outputs.to_anndata(plan_elements(plan_read(self.spec, self.catalog), self.catalog), max_bytes)

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
        plan = plan_read(self.spec, self.catalog, deferred=True)
        return to_lazy(plan_elements(plan, self.catalog), chunk_bytes, lazy_obs=lazy_obs)

    def to_mudata(self, max_bytes: int | None = None) -> "md.MuData":
        """Read several feature spaces into a MuData, all aligned to one `obs`; without `.spaces(...)` every one with vectors.

        Raises
        ------
        MissingExtraError
            If mudata is not installed.
        QueryError, FeatureError, LimitError
            As in `to_anndata`.
        """
        known = read_modalities(self.catalog)
        every = tuple(m.name for m in known.values() if m.space.rank == 1 and not m.is_result)
        named = every if self.spec.spaces is None else self.spec.spaces
        if not named:
            raise QueryError(
                "A MuData holds feature spaces, and spaces([]) reads none; use .to_pandas() for the metadata."
            )
        plan = plan_read(self.spec, self.catalog, spaces=named)
        return outputs.to_mudata(plan_elements(plan, self.catalog, multimodal=True), max_bytes)

    def to_arrow(self) -> pa.Table:
        """Read the metadata of the selected cells: `uid`, `cell_name`, `dataset` and the asked columns, facts as field metadata."""
        return plan_rows(self.spec, self.catalog, cell_columns(self.catalog))[1]

    def to_pandas(self) -> "pd.DataFrame":
        """Read the metadata of the selected cells into a frame indexed by cell uid, with the dtypes of the files."""
        return obs_frame(self.to_arrow())

    def batches(self, n: int) -> Iterator[Batch]:
        """Iterate over the selected cells, n at a time; every batch has the same columns.

        Parameters
        ----------
        n : int
            Cells of a batch; the last may have fewer.

        Returns
        -------
        iterator of Batch
            The plan is made, and refusals are raised, before the first batch is asked for.
        """
        if check_count("batches", n) == 0:
            raise QueryError("batches(0) would never end; ask for at least one cell a batch.")
        # Planned before the generator is made: its body would raise errors only when it is iterated.
        plan = plan_read(self.spec, self.catalog)
        return read_batches(plan, n)

    def map(
        self,
        function: Callable[[Batch], Any],
        batch_size: int,
        output_schema: pa.Schema,
        *,
        executor: Executor | Workers | None = None,
        progress: Progress | None = None,
    ) -> pa.Table:
        """Call a function on batches of the selected cells, each cell once, and concatenate the results into one table.

        Parameters
        ----------
        function : callable
            Takes a `Batch` and returns an Arrow table, a record batch or a dictionary of arrays, one row for each cell of the batch. With
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
            If the function returns other columns, types or numbers of rows; the message names the cells.
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
        >>> schema = pa.schema([("n_genes", pa.int64())])  # doctest: +SKIP
        >>> table = query.map(
        ...     lambda batch: {"n_genes": np.diff(batch.spaces["gene_expression"].block.indptr)}, 512, schema
        ... )  # doctest: +SKIP
        """
        plan = plan_read(self.spec, self.catalog)
        return map_batches(plan, function, batch_size, output_schema, executor, self.catalog.location, progress)

    def aggregate(
        self, by: str | Sequence[str], layer: str | None = None, *, executor: Executor | Workers | None = None
    ) -> "ad.AnnData":
        """Sum values per group of cells, in bounded memory.

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
            One row per group with `n_cells`, sorted; layers `sum` (exact for whole numbers below 2**53), `mean` (over the cells that were
            measured; NaN where none was), `count_nonzero` and `n_measured` per feature.
        """
        spec = self.spec if layer is None else replace(self.spec, layers=(layer,))
        columns = list(dict.fromkeys(flatten_names("aggregate", (by,))))
        return compute.aggregate(spec, self.catalog, columns, executor)

    def pseudobulk(
        self,
        by: str | Sequence[str],
        layer: str | None = None,
        *,
        min_cells: int = 10,
        executor: Executor | Workers | None = None,
    ) -> "ad.AnnData":
        """Sum counts per sample, for statistics whose unit is the sample, in bounded memory.

        Parameters
        ----------
        by : str or sequence of str
            Columns whose values make the samples, such as donor and cell type. Cells without a value of them are left out.
        layer : str or None
            Layer of counts; None takes the usual one.
        min_cells : int
            Samples of fewer cells are left out.
        executor : concurrent.futures.Executor, Workers or None
            Whose workers add up blocks of cells.

        Returns
        -------
        anndata.AnnData
            A row for each sample, sorted: `X` with sums (sparse, int32, or int64 where these are larger), layers `count_nonzero` (sparse, cells with the feature) and
            `measured` (bool, whether any of its cells measured the feature). `obs` has the columns of `by`, `n_cells`, `n_counts`,
            `n_features`, `measured_share`, and all columns of the cells that have one value in each sample. ``uns["pseudobulk"]`` has
            `varying`, the names of the other columns, and `notes`: what was left out, and what the samples do not allow to tell apart.

        Raises
        ------
        QueryError
            If the layer holds other values than counts, the query names several layers or spaces, or `by` names a column that `obs` has of
            the samples, such as `n_counts`.

        See Also
        --------
        test : Differential expression of samples.
        aggregate : Sums and means of any values.

        Examples
        --------
        >>> samples = query.pseudobulk(["donor", "cell_type"])  # doctest: +SKIP
        >>> samples.uns["pseudobulk"]["notes"]  # doctest: +SKIP
        """
        from raggedatlas.query.pseudobulk import pseudobulk

        spec = self.spec if layer is None else replace(self.spec, layers=(layer,))
        columns = list(dict.fromkeys(flatten_names("pseudobulk", (by,))))
        return pseudobulk(spec, self.catalog, columns, min_cells, executor)

    def test(
        self,
        design: str,
        contrast: Sequence[str],
        *,
        by: str | Sequence[str],
        layer: str | None = None,
        min_cells: int = 10,
        executor: Executor | Workers | None = None,
    ) -> "pd.DataFrame":
        """Test features for differential expression between samples, by DESeq2's model as pydeseq2 has it (extra ``stats``).

        Parameters
        ----------
        design : str
            A formula of columns of the samples, such as ``"~ condition + batch"``.
        contrast : (str, str, str)
            A column of the design, the tested value and the reference.
        by, layer, min_cells, executor
            As of `pseudobulk`.

        Returns
        -------
        pandas.DataFrame
            A row for each feature that all samples measured: `baseMean`, `log2FoldChange`, `lfcSE`, `stat`, `pvalue`, `padj` and `symbol`,
            smallest `padj` first. ``attrs["pseudobulk"]`` has the notes of `pseudobulk`, and how many features were left out.

        Raises
        ------
        QueryError
            If a column or value is not there, or a side of the contrast has fewer than two samples.
        MissingExtraError
            Without the extra ``stats``.

        Examples
        --------
        >>> query.where(cell_type="T").test(
        ...     "~ tissue", ("tissue", "lung", "blood"), by="donor"
        ... ).head()  # doctest: +SKIP
        """
        from raggedatlas.query.pseudobulk import test_samples

        samples = self.pseudobulk(by, layer, min_cells=min_cells, executor=executor)
        return test_samples(samples, design, contrast)

    def score(
        self,
        sets: Mapping[str, Any] | Address,
        method: Literal["mean", "aucell", "ulm"] = "mean",
        *,
        layer: str | None = None,
        normalize: bool | None = None,
        min_features: int = 5,
        top: int | float | None = None,
        unknown: Unmatched = "error",
        executor: Executor | Workers | None = None,
        progress: Progress | None = None,
    ) -> pa.Table:
        """Score sets of features for each cell, over what its dataset measured, in bounded memory.

        Parameters
        ----------
        sets : mapping of str to names, mapping of str to mapping of name to weight, or path
            Uids, ids or symbols as of `features`; several names of one feature count once. A path is of a GMT file, plain or gzipped.
        method : {"mean", "aucell", "ulm"}
            ``mean``: the mean of the set, or the sum of weighted values over the sum of the sizes of the weights. ``aucell``: the area under the
            recovery curve of the set among the highest values of the cell, relative to the largest possible. ``ulm``: the t-value of the
            slope of values on weights over all features, where features outside of the set have the weight 0.
        layer : str or None
            Layer; None takes the usual one.
        normalize : bool or None
            Score log1p of counts per 10,000 over all features of a cell. None does so for layers of whole numbers, and takes others as
            they are. Ranks, and so `aucell`, do not depend on it.
        min_features : int
            A score is missing where the dataset of the cell measured fewer features of the set.
        top : int, float or None
            Number of highest values at which `aucell` looks, or their share of the measured features, rounded up and at least two; None is
            5 %.
        unknown : {"error", "skip"}
            What to do with names that the atlas does not know: refuse them, or leave them out with a warning.
        executor : concurrent.futures.Executor, Workers or None
            Whose workers score blocks of cells; the result does not depend on it.
        progress : callable or None
            Called as ``progress("cells", done, total)``.

        Returns
        -------
        pyarrow.Table
            In the order of the cells: `uid`, and a column of float64 for each set, NaN where it is missing; `RaggedAtlas.annotate` takes it
            as it is.

        Raises
        ------
        FeatureError
            For unknown and ambiguous names.
        ArgumentError, QueryError
            For sets that are empty or no sets, weights that are not finite, and options that the method does not use.
        SourceError
            If the file is no GMT file.

        Warns
        -----
        UserWarning
            Naming sets of which some cells have no score, and unknown names that were left out.

        Notes
        -----
        Features that the dataset of a cell did not measure are in no mean, ranking or model. Those that the query leaves out by
        `features` or `join` neither; ``join("intersection")`` scores all cells over the same features. In rankings, equal values share the
        mean of what their places would add, which is what a random order gives on average. Where all values of a cell are equal, such as
        in cells without counts, `aucell` and `ulm` are missing.

        Examples
        --------
        >>> scores = query.score({"B cell": ["CD79A", "MS4A1"]}, min_features=2)  # doctest: +SKIP
        >>> atlas.annotate(scores, "B cell score")  # doctest: +SKIP
        """
        from raggedatlas.query.score import ScoreOptions, score

        options = ScoreOptions(method, normalize, min_features, top, unknown)
        spec = self.spec if layer is None else replace(self.spec, layers=(layer,))
        return score(spec, self.catalog, sets, options, executor, progress)

    def compare(
        self,
        group: "Selection",
        reference: "Selection | None" = None,
        *,
        method: Literal["t-test", "wilcoxon"] = "t-test",
        layer: str | None = None,
        normalize: bool | None = None,
        tie_correct: bool = False,
    ) -> "pd.DataFrame":
        """Compare two sets of cells by differential expression, in bounded memory, as `scanpy.tl.rank_genes_groups` defines it.

        The cells are taken as independent, which cells of one donor are not: for conclusions about donors or conditions, test samples with
        `test`.

        Parameters
        ----------
        group, reference : condition as of `where`, Query, or sequence of uids
            The cells; `reference` None means all other cells of this query. A condition chooses among the cells of this query, also
            of a sample. Cells without the feature space take no part.
        method : {"t-test", "wilcoxon"}
            Welch's t-test, or the Wilcoxon rank-sum test, in which equal values share their mean rank.
        layer : str or None
            Layer; None takes the usual one.
        normalize : bool or None
            Compare log1p of counts per 10,000, computed as the counts are read, over all features of a cell. None does so for layers
            of whole numbers, and takes others as they are; fold changes assume logarithms in either case.
        tie_correct : bool
            Correct the variance of Wilcoxon's statistic for ties.

        Returns
        -------
        pandas.DataFrame
            A row for each feature of the query that two cells of each set measured, highest score first: `names`, `scores`,
            `logfoldchanges`, `pvals`, `pvals_adj` (Benjamini-Hochberg), `pct_nz_group`, `pct_nz_reference` and `symbol`.
            ``attrs["compare"]`` says which values were compared, and of how many cells.

        Raises
        ------
        QueryError
            For cells that are in both sets or not in this query, sets of fewer than two cells, and unknown methods.

        Examples
        --------
        >>> query.compare({"cell_type": "B"}, {"cell_type": "T"}, method="wilcoxon").head()  # doctest: +SKIP
        """
        options = CompareOptions(method, normalize, tie_correct)
        spec = self.spec if layer is None else replace(self.spec, layers=(layer,))
        other = None if reference is None else self._uids_of(reference)
        return compare(spec, self.catalog, self._uids_of(group), other, options)

    def markers(
        self,
        by: str,
        *,
        within: str | None = None,
        layer: str | None = None,
        normalize: bool | None = None,
        executor: Executor | Workers | None = None,
    ) -> "pd.DataFrame":
        """Compare every group of cells with the rest by Welch's t-test, in one pass over the cells, in bounded memory.

        The cells are taken as independent, which cells of one donor are not: this finds features that mark a group; for conclusions about
        donors or conditions, test samples with `test`.

        Parameters
        ----------
        by : str
            Column whose values make the groups. Cells without a value take no part.
        within : str or None
            Column, such as the tissue: groups are compared with the rest of the cells of the same value. None compares with all.
        layer, normalize
            As of `compare`.
        executor : concurrent.futures.Executor, Workers or None
            Whose workers add up blocks of cells; the result is the same to the last bit.

        Returns
        -------
        pandas.DataFrame
            A row for each group and feature of the query that two cells of both sides measured, groups in their order, highest score first:
            `group`, `names`, `scores`, `logfoldchanges`, `pvals`, `pvals_adj` (Benjamini-Hochberg in each group), `pct_nz_group`,
            `pct_nz_reference`, `symbol`, and the column of `within`, as `compare` of the group with the rest gives them.
            ``attrs["markers"]`` says which values were compared, and of how many cells.

        Raises
        ------
        QueryError
            If there is no such column, or the query names several layers or spaces.
        ArgumentError
            If both columns are one, or `within` is called as a column of the table.

        Examples
        --------
        >>> query.markers("cell_type", within="tissue").groupby("group").head(5)  # doctest: +SKIP
        """
        from raggedatlas.query.markers import MarkerOptions, markers

        spec = self.spec if layer is None else replace(self.spec, layers=(layer,))
        return markers(spec, self.catalog, MarkerOptions(by, within, normalize), executor)

    def _uids_of(self, cells: "Selection") -> pa.Array:
        if isinstance(cells, str | Mapping | Filter):
            spec = self.where(cells).spec
            # Not of what a sample or a limit would choose among the cells that meet the condition.
            uids = self._uids_of(self._with(filters=spec.filters, search=None, sample=None, limit=None))
            chooses = (spec.search, spec.sample, spec.limit) != (None, None, None)
            return uids.filter(pc.is_in(uids, value_set=self._uids_of(self))) if chooses else uids
        if isinstance(cells, Query):
            return cells.obs([]).to_arrow().column("uid").cast(pa.string()).combine_chunks()
        try:
            return pa.array([*cells], pa.string())
        except (TypeError, pa.ArrowException):
            raise ArgumentError(f"compare() takes a condition, a query or uids, not {brief(cells)}.") from None

    def count(
        self,
        by: str | Sequence[str] | None = None,
        *,
        level: int | str | None = None,
        executor: Executor | Workers | None = None,
    ) -> "int | pd.Series[int]":
        """Count the selected cells, in total or per group.

        Parameters
        ----------
        by : str, sequence of str or None
            Columns whose values make the groups; missing values are a group. None counts all.
        level : int, str or None
            Count the cells under each term of the column's ontology that is so many steps below its root, or under each term of a
            curated list of CELLxGENE, such as ``"tissue_general"``, ``"cell_class"`` or ``"organ"``. Cells may be under several of them.
        executor : concurrent.futures.Executor, Workers or None
            Whose workers count, each some datasets. What a sample, a search or a limit chooses is counted here.

        Returns
        -------
        int, or pandas.Series named ``n_cells``
            Sorted by group, missing values last. With `level`, indexed by id and label of the term; cells under none of them are last.

        Raises
        ------
        QueryError
            If `level` is given without a single column, or there is no ontology for it.

        Examples
        --------
        >>> query.count("tissue", level="tissue_general")  # doctest: +SKIP
        """
        if level is not None:
            if by is None or len(column := flatten_names("count", (by,))) != 1:
                raise QueryError("count(level=...) counts by one column of terms, e.g. count('cell_type', level=2).")
            return count_level(term_tree(self.spec, self.catalog, column[0], None, executor), level)
        groups = None if by is None else tuple(dict.fromkeys(flatten_names("count", (by,))))
        return compute.count(self.spec, self.catalog, groups, executor)

    def tree(self, column: str, *, ontology: str | None = None, executor: Executor | Workers | None = None) -> TermTree:
        """Count the selected cells under each term of an ontology.

        Parameters
        ----------
        column : str
            Column of labels, of ids, or both: cells count by their id, those without one by their label, as in `under`.
        ontology : str or None
            Name of the ontology; None takes that of the column.
        executor : concurrent.futures.Executor, Workers or None
            Whose workers count.

        Returns
        -------
        TermTree
            Shown as text and in notebooks as HTML; ``to_pandas()`` gives a row for each term.

        Raises
        ------
        QueryError
            If there is no such column or ontology.

        Examples
        --------
        >>> query.tree("cell_type")  # doctest: +SKIP
        cell_type: 38 cells by CL v2026-03-26
          lymphocyte (CL:0000542): 38
            T cell (CL:0000084): 26
        """
        return term_tree(self.spec, self.catalog, column, ontology, executor)

    def explain(self) -> ShownText:
        """Describe what would be read: cells, groups, arrays, bytes, layers, join and filter; reads no values of layers.

        Of groups with a column-sorted copy, it also reads where the columns of the copy begin.
        """
        return ShownText(explain(self.spec, self.catalog))

    def write(
        self,
        path: Address,
        *,
        executor: Executor | Workers | None = None,
        **options: Any,  # noqa: ANN401  (options of the format)
    ) -> str:
        """Write the result to a file in bounded memory: ``.h5ad``, ``.zarr`` or ``.h5mu``; equal to the in-memory result.

        Parameters
        ----------
        path : str
            Where, here or in an object store; its ending decides the format.
        executor : concurrent.futures.Executor, Workers or None
            Whose workers read the values; this process writes them, so it helps where reading takes longer, as from object stores.
        **options
            Options of the format; `storage_options` of an object store, by default those of the atlas; ``schema="cellxgene"`` and `title` for
            the form of CELLxGENE's schema in an `.h5ad` file, with a warning that names required facts that the atlas lacks.

        Returns
        -------
        str
            The path.

        Raises
        ------
        QueryError
            If the format cannot hold what is asked.
        """
        return outputs.write(self.spec, self.catalog, path, options, executor)

    def __repr__(self) -> str:
        """Return the conditions and the atlas."""
        snapshot = self.catalog.snapshot
        at = "the tip" if snapshot is None else f"snapshot {snapshot.version}"
        return f"Query of {self.catalog.location.uri} at {at}: {self.spec.describe()}"

    def _by_orthologs(self, organism: str | None) -> "Query":
        return self if organism is None else self._with(orthologs=check_organism(self.catalog, organism))

    def _with(self, **changes: Any) -> "Query":  # noqa: ANN401  (fields of the spec)
        return Query(self.catalog, replace(self.spec, **changes))


def _condition(query: Query, given: Mapping[str, Any]) -> Query:
    """Add a condition as `Filter.to_dict` returns it; only boxes need the atlas."""
    if given.get("operator") != "within":
        return query.where(filter_from_dict(given))
    return query.within(**{key: value for key, value in given.items() if key != "operator"})


_STEPS: dict[str, Callable[[Query, Any], Query]] = {
    "filters": lambda query, filters: reduce(_condition, filters, query),
    "search": lambda query, search: query.search(**search),
    "sample": lambda query, sample: query.sample(**sample),
    "order": lambda query, order: query.order_by([name for name, _ in order], descending=[down for _, down in order]),
    "limit": Query.limit,
    "spaces": Query.spaces,
    "features": lambda query, spaces: reduce(lambda q, one: q.features(one[1], space=one[0]), spaces, query),
    "join": lambda query, join: query.join(join) if isinstance(join, str) else query.join(min_datasets=join),
    "layers": Query.layers,
    "obs": Query.obs,
    "missing": Query.missing,
    "results": Query.with_results,
    "centroids": lambda query, centroids: reduce(lambda q, one: q.with_centroids(*one), centroids, query),
    "orthologs": lambda query, organism: query.join(orthologs=organism),
}
"""How `Query.from_dict` asks for each part of a query, but for those that `AtlasView.query` takes."""

Selection = str | Mapping[str, Any] | Filter | Query | Sequence[str]
"""Cells of a query: a condition as of `Query.where`, another query, or uids."""

"""The query that a person builds call by call; each call returns a new one, and outputs read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.features import read_registry
from raggedatlas.catalog.identity import GENE_SPACE, IDENTITY_SCHEMA
from raggedatlas.catalog.orthologs import check_organism
from raggedatlas.catalog.results import find_result
from raggedatlas.catalog.versions import find_version
from raggedatlas.errors import ArgumentError, FeatureError, QueryError
from raggedatlas.model.arguments import brief, checked
from raggedatlas.model.columns import DATASET
from raggedatlas.query.answers import Answers
from raggedatlas.query.axis import check_join
from raggedatlas.query.plan import find_modality, modalities
from raggedatlas.query.rows import known_columns, metadata_names
from raggedatlas.query.search import METRICS
from raggedatlas.query.spatial import SpatialQuery
from raggedatlas.query.spec import (
    AS_GIVEN,
    DEFAULT,
    Missing,
    OnMerge,
    QuerySpec,
    Sample,
    Search,
    count_of,
    listed_names,
)
from raggedatlas.store.filters import Filter
from raggedatlas.store.sql import all_of, is_not_null
from raggedatlas.store.sql_parser import as_filter, to_sql

if TYPE_CHECKING:
    pass


@checked
@dataclass(frozen=True)
class Query(SpatialQuery, Answers):
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

    def join(self, how: str | None = None, *, min_datasets: int | None = None, orthologs: str | None = None) -> "Query":
        """Say which features a result over several datasets has, and whether genes of several organisms are joined.

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
            If no loaded table gives orthologs of the organism.

        Examples
        --------
        >>> query.join("intersection", orthologs="human")  # doctest: +SKIP
        """
        query = self._by_orthologs(orthologs)
        if orthologs is not None and how is None and min_datasets is None:
            return query
        return query._with(join=check_join(how, min_datasets))

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
        listed = listed_names("features", names)
        if space is not None:
            find_modality(modalities(self.catalog), space, self.catalog)
        kept = tuple(entry for entry in self.spec.features if entry[0] != space)
        return self._by_orthologs(orthologs)._with(features=(*kept, (space, listed)))

    def spaces(self, *names: str | Sequence[str]) -> "Query":
        """Read some feature spaces; without this call `to_anndata` reads gene expression, or the only one there is."""
        listed = listed_names("spaces", names)
        known = modalities(self.catalog)
        return self._with(spaces=tuple(dict.fromkeys(find_modality(known, name, self.catalog).name for name in listed)))

    def layers(self, *names: str | Sequence[str]) -> "Query":
        """Read some layers: the first becomes X, the others `layers`.

        Without this call: `counts` where every dataset of the result has it, else the one layer that they share.
        With several spaces each takes those of the names that it has.
        """
        return self._with(layers=tuple(dict.fromkeys(listed_names("layers", names))))

    def obs(self, *columns: str | Sequence[str]) -> "Query":
        """Keep some metadata columns, in the order given; `uid`, `cell_name` and `dataset` are always there."""
        listed = tuple(listed_names("obs", columns)) if columns != ([],) else ()
        metadata_names(known_columns(self.catalog), listed)
        return self._with(obs=listed)

    def order_by(self, *columns: str | Sequence[str], descending: bool | Sequence[bool] = False) -> "Query":
        """Sort cells by columns; ties stay in table order, missing values come last, ordered categories in their order."""
        listed = listed_names("order_by", columns)
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
        return self._with(limit=count_of("limit", n))

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
        return self._with(sample=Sample(count_of("sample", n), by, int(seed)))

    def search(
        self, query: str | Sequence[float] | np.ndarray[Any, Any], *, column: str, k: int = 10, metric: str = "l2"
    ) -> "Query":
        """Rank cells, and keep the best k of those that the filters keep.

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
            Distance of vectors; ``l2`` is squared.

        Notes
        -----
        Where the column has an index, the index answers (vectors approximately; text with its stemming); else every cell is
        compared. `obs` gains ``search_distance`` or ``search_score``.
        """
        if metric not in METRICS:
            raise QueryError(f"search knows the metrics {METRICS}, not {metric!r}.")
        try:
            asked: str | tuple[float, ...] = (
                query if isinstance(query, str) else tuple(np.asarray(query, np.float64).ravel().tolist())
            )
        except (TypeError, ValueError):
            raise ArgumentError(f"search() takes query as text or a vector of numbers, not {brief(query)}.") from None
        if not asked or (not isinstance(asked, str) and not np.isfinite(asked).all()):
            raise QueryError("search needs some text, or a vector of finite numbers.")
        found = Search(asked, column, count_of("search", k), metric)
        from raggedatlas.query.results import vector_results
        from raggedatlas.query.search import search_columns

        search_columns(found, known_columns(self.catalog), modalities(self.catalog), vector_results(self.catalog))
        return self._with(search=found)

    def with_results(self, *names: str | Sequence[str], missing: Literal["nan", "drop"] = "nan") -> "Query":
        """Take results of models along: each becomes ``obsm[name]``, row by row beside the cells.

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
        `to_anndata`, `write` and a `Loader` have them beside the values; `to_mudata` and ``.h5mu`` in the `obsm` of all cells;
        `batches` in ``batch.obsm``. Results that lie in the cell table (``as_="vector"``) are held in memory for the chosen cells.
        A member of a file's `obsm` of the same name is left out.
        """
        if missing not in {"nan", "drop"}:
            raise QueryError(f"with_results takes missing='nan' or 'drop', not {missing!r}.")
        records = [find_result(self.catalog, name) for name in listed_names("with_results", names)]
        query = self._with(results=tuple(dict.fromkeys([*self.spec.results, *(r.name for r in records)])))
        if missing == "nan":
            return query
        return query.where(all_of(*(is_not_null(r.column) for r in records)))

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

    def _by_orthologs(self, organism: str | None) -> "Query":
        return self if organism is None else self._with(orthologs=check_organism(self.catalog, organism))

    def _with(self, **changes: Any) -> "Query":  # noqa: ANN401  (fields of the spec)
        return Query(self.catalog, replace(self.spec, **changes))


def begin_query(catalog: Catalog, identity: str | int | Mapping[str, str], on_merge: OnMerge) -> Query:
    """Return a query of all cells under a mapping of features; see `AtlasView.query`.

    Raises
    ------
    NotFoundError
        If `identity` names no snapshot.
    FeatureError
        If a given mapping names unknown or ambiguous genes, or takes more than one step.
    """
    if isinstance(identity, Mapping):
        return Query(catalog, QuerySpec(identity=_links(catalog, identity), on_merge=on_merge))
    if identity not in (DEFAULT, AS_GIVEN):
        find_version(catalog, identity)
    return Query(catalog, QuerySpec(identity=identity, on_merge=on_merge))


def _links(catalog: Catalog, given: Mapping[str, str]) -> str | tuple[tuple[str, str], ...]:
    """Return a mapping of names of genes as pairs of uids."""
    if not given:
        return AS_GIVEN
    registry = replace(read_registry(catalog, GENE_SPACE), identity=IDENTITY_SCHEMA.empty_table())
    sources = registry.require([*given])
    links = dict(zip(sources, registry.require([*given.values()], once=False), strict=True))
    wrong = next((name for name, into in zip(given, links.values(), strict=True) if into in links), None)
    if wrong is not None:
        raise FeatureError(
            f"identity={{{wrong!r}: {given[wrong]!r}, ...}} leads to a gene that counts as another itself; name for each the gene at the end."
        )
    return tuple(sorted(links.items()))

"""What can be asked of an atlas and of a view alike: what is in it, whether it is sound, what changed."""

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, Literal

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.model.arguments import checked
from raggedatlas.model.records import AtlasVersionRecord
from raggedatlas.model.reports import Difference, Problem
from raggedatlas.model.spaces import FeatureSpace
from raggedatlas.query.dataset import Dataset, list_datasets
from raggedatlas.query.listing import list_annotations, list_geometries
from raggedatlas.query.results import list_results
from raggedatlas.store.executors import Workers

if TYPE_CHECKING:
    import pandas as pd

    from raggedatlas.query.identity import FeatureIdentity

Level = Literal["quick", "rows", "deep"]


@checked
class Readable:
    """What an atlas and a view of it have in common: looking.

    Parameters
    ----------
    catalog : Catalog
        At the tip, or pinned.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._opened = catalog

    @property
    def _catalog(self) -> Catalog:
        """What to read: during a purge the newest versions of the tables are not the current content."""
        return self._opened.current()

    @property
    def uri(self) -> str:
        """Where the atlas is."""
        return self._opened.location.uri

    @property
    def db(self) -> Any:  # noqa: ANN401  (a lancedb connection; importing its type costs seconds)
        """A LanceDB connection to the tables, for whatever this package does not offer.

        LanceDB 0.40 does not use the BTree indexes, which pylance 14 writes in a newer version; results are the same. Its warnings about
        them are off unless the environment sets ``LANCEDB_LOG``.
        """
        import lancedb

        tables = self._opened.tables.location
        return lancedb.connect(tables.lance_uri(), storage_options=tables.lance_options() or None)

    @property
    def spaces(self) -> dict[str, FeatureSpace]:
        """The feature spaces that this atlas knows, by name."""
        return self._catalog.spaces()

    def list_datasets(self) -> "pd.DataFrame":
        """List the datasets.

        Returns
        -------
        pandas.DataFrame
            One row per dataset, in the order of adding, indexed by uid: name, n_cells, spaces, layers, n_features, source, created_at.
        """
        return list_datasets(self._catalog)

    def dataset(self, uid_or_name: str) -> "Dataset":
        """Return one dataset, to be read back as it was.

        Raises
        ------
        NotFoundError
            If no dataset, or more than one, goes by that name.
        """
        return Dataset.find(self._catalog, uid_or_name)

    def results(self) -> "pd.DataFrame":
        """List the results of models.

        Returns
        -------
        pandas.DataFrame
            One row per result, in the order of adding, indexed by name: kind, space, column, width, dtype, n_cells, model, model_hash,
            query, snapshot, parent, source, created_at, content_hash, uid.
        """
        return list_results(self._catalog)

    def geometries(self) -> "pd.DataFrame":
        """List the geometry stores.

        Returns
        -------
        pandas.DataFrame
            One row per store, in the order of adding, indexed by uid: name, space, types, axes, n_cells, datasets (names), n_objects,
            n_vertices, n_levels, bounds, n_bytes, layout, source, created_at.
        """
        return list_geometries(self._catalog)

    def annotations(self) -> "pd.DataFrame":
        """List the annotations that `RaggedAtlas.annotate` wrote.

        Returns
        -------
        pandas.DataFrame
            One row per annotation, oldest first, indexed by name: columns, n_cells, n_values, on_conflict, source, snapshot, query,
            created_at, uid.
        """
        return list_annotations(self._catalog)

    def features(self, space: str = "gene_expression") -> "pd.DataFrame":
        """Give the registry of a feature space as a frame indexed by uid."""
        from raggedatlas.catalog.features import read_registry

        frame: pd.DataFrame = read_registry(self._catalog, space).table.to_pandas().set_index("uid")
        return frame

    def find_datasets_with_features(
        self, features: Sequence[str], *, space: str = "gene_expression", every: bool = True
    ) -> dict[str, tuple[str, ...]]:
        """Find the datasets that measured some features; reads no array (seed 000, `_feature_layouts`).

        Parameters
        ----------
        features : sequence of str
            Uids, ids or symbols.
        space : str
            Feature space.
        every : bool
            Whether a dataset must have measured all of them, or any.

        Returns
        -------
        dict
            Dataset uid -> the asked names that it measured.

        Raises
        ------
        FeatureError
            If a name is unknown or ambiguous.
        """
        from raggedatlas.catalog.features import find_datasets_with_features

        return find_datasets_with_features(
            self._catalog, space, [features] if isinstance(features, str) else features, every=every
        )

    @property
    def identity(self) -> "FeatureIdentity":
        """Which features are the same and why: status, explanations, and links by hand."""
        from raggedatlas.query.identity import FeatureIdentity

        return FeatureIdentity(self._catalog)

    def validate(self, level: Level = "quick", *, executor: Executor | Workers | None = None) -> list[Problem]:
        """Look for anything wrong.

        Parameters
        ----------
        level : {"quick", "rows", "deep"}
            ``quick`` compares the tables, ``rows`` also every cell's pointers, ``deep`` also reads every stored byte and
            compares its checksums.
        executor : concurrent.futures.Executor, Workers or None
            Whose workers read arrays and files, with ``rows`` and ``deep``; the result does not depend on it.

        Returns
        -------
        list of Problem
            Empty when all is well.
        """
        from raggedatlas.catalog.checks import validate

        return validate(self._catalog, level, executor)

    def list_versions(self) -> list[AtlasVersionRecord]:
        """List the snapshots, oldest first."""
        from raggedatlas.catalog.snapshots import list_versions

        return list_versions(self._catalog)

    def diff(self, old: int | str, new: int | str) -> Difference:
        """Say what changed between two snapshots, by number or label."""
        from raggedatlas.catalog.snapshots import diff

        return diff(self._catalog, old, new)

"""Views of snapshots, and the read-only methods that they share with atlases: listings, validation and diffs."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from raggedatlas.catalog.assets import asset_kind, asset_kinds, dataset_rows
from raggedatlas.catalog.catalog import CELLS, Catalog, open_catalog
from raggedatlas.catalog.identity import GENE_SPACE
from raggedatlas.catalog.versions import find_version, list_versions
from raggedatlas.errors import MissingExtraError, QueryError
from raggedatlas.model.arguments import checked
from raggedatlas.model.choices import FeatureNames, Level, OnMerge
from raggedatlas.model.records import AtlasVersionRecord
from raggedatlas.model.shown import Shown, ShownList
from raggedatlas.model.spaces import FeatureSpace
from raggedatlas.store.executors import Workers
from raggedatlas.store.location import Location

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from raggedatlas.model.reports import Difference, FileDifference
    from raggedatlas.model.validation import Validation
    from raggedatlas.query.dataset import Dataset
    from raggedatlas.query.identity import FeatureIdentity
    from raggedatlas.query.query import Query


@checked
class ReadOnlyAtlas(Shown):
    """Read-only methods of an atlas and of a view.

    Parameters
    ----------
    catalog : Catalog
        At the tip, or pinned.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._opened = catalog

    @property
    def _title(self) -> str:
        return type(self).__name__

    def __repr__(self) -> str:
        """Say where it is and what is in it."""
        catalog, listed = self._catalog, self.list_datasets()
        counts = [f"{len(listed):,} datasets", f"{int(listed['n_cells'].sum()) if len(listed) else 0:,} cells"]
        if catalog.snapshot is None:
            counts.append(f"{len(list_versions(catalog)):,} snapshots")
        lines = [f"{self._title} at {catalog.location.uri}: {', '.join(counts)}"]
        shown = listed.head(10)
        lines += [f"  {row['name']}: {row['n_cells']:,} cells, {row['spaces']}" for _, row in shown.iterrows()]
        if len(listed) > len(shown):
            lines.append(f"  ... and {len(listed) - len(shown):,} more")
        for kind in asset_kinds():
            for _, row in kind.frame(catalog).reset_index().iterrows():
                text = f"  {kind.noun} {row['name']}: {row['n_cells']:,} cells, {kind.describe(row.to_dict())}"
                lines.append(text.removesuffix(", "))
        return "\n".join(lines)

    @property
    def _catalog(self) -> Catalog:
        """The catalog to read: during a purge the newest table versions are not the current content."""
        return self._opened.current()

    @property
    def uri(self) -> str:
        """Address of the atlas."""
        # Not `_catalog`, which reads the mark of a purge; the address stays the same.
        return self._opened.location.uri

    @property
    def db(self) -> Any:  # noqa: ANN401  (a lancedb connection; importing its type costs seconds)
        """A LanceDB connection to the tables, for whatever this package does not offer; needs the extra ``lancedb``.

        LanceDB 0.40 does not use the BTree indexes, which pylance 14 writes in a newer version; results are the same. Its warnings about
        them are off unless the environment sets ``LANCEDB_LOG``.

        Raises
        ------
        MissingExtraError
            If lancedb is not installed.
        """
        try:
            import lancedb
        except ImportError as error:
            raise MissingExtraError(
                "`db` needs lancedb; install it with: pip install 'raggedatlas[lancedb]'."
            ) from error

        # Only the location is passed on: LanceDB opens the newest versions, also for a view of a snapshot.
        tables = self._opened.tables.location
        return lancedb.connect(tables.lance_uri(), storage_options=tables.lance_options() or None)

    @property
    def spaces(self) -> dict[str, FeatureSpace]:
        """Feature spaces of this atlas, by name."""
        return self._catalog.spaces()

    def list_datasets(self) -> "pd.DataFrame":
        """List the datasets.

        Returns
        -------
        pandas.DataFrame
            One row per dataset, in the order of adding, indexed by uid: name, n_cells, spaces, layers, n_features, source, linked (address of the
            file that has its values, empty where the atlas has them), created_at.
        """
        import pandas as pd

        columns = ["uid", "name", "n_cells", "spaces", "layers", "n_features", "source", "linked", "created_at"]
        return pd.DataFrame(dataset_rows(self._catalog), columns=columns).set_index("uid")

    def dataset(self, uid_or_name: str) -> "Dataset":
        """Return one dataset, to be read back as it was.

        Raises
        ------
        NotFoundError
            If no dataset, or more than one, has that name.
        """
        # Modules of single methods are imported when these are called, so that listings and `create` stay fast.
        from raggedatlas.query.dataset import Dataset

        return Dataset.find(self._catalog, uid_or_name)

    def results(self) -> "pd.DataFrame":
        """List the results of models.

        Returns
        -------
        pandas.DataFrame
            One row per result, in the order of adding, indexed by name: kind, space, column, width, dtype, n_cells, model, model_hash,
            query, snapshot, parent, source, created_at, content_hash, uid.
        """
        return self.list_assets("results")

    def geometries(self) -> "pd.DataFrame":
        """List the geometry stores.

        Returns
        -------
        pandas.DataFrame
            One row per store, in the order of adding, indexed by uid: name, space, types, axes, n_cells, datasets (names), n_objects,
            n_vertices, n_levels, bounds, n_bytes, layout, source, created_at.
        """
        return self.list_assets("geometry")

    def list_assets(self, kind: str) -> "pd.DataFrame":
        """List what is attached to cells, of one kind.

        Parameters
        ----------
        kind : str
            ``"results"``, ``"geometry"``, or a kind that an installed package brings.

        Raises
        ------
        MissingExtraError
            If no installed package has the kind.
        """
        return asset_kind(kind).frame(self._catalog)

    def annotations(self) -> "pd.DataFrame":
        """List the annotations that `RaggedAtlas.annotate` wrote.

        Returns
        -------
        pandas.DataFrame
            One row per annotation, oldest first, indexed by name: columns, n_cells, n_values, on_conflict, source, snapshot, query,
            created_at, uid.
        """
        import pandas as pd

        from raggedatlas.catalog.cells import read_annotations

        columns = [
            "name", "columns", "n_cells", "n_values", "on_conflict", "source", "snapshot", "query", "created_at", "uid",
        ]  # fmt: skip
        rows = []
        for record in read_annotations(self._catalog):
            row = {name: getattr(record, name) for name in columns if name != "n_values"}
            n_values = sum(column.n_values for column in record.columns.values())
            rows.append({**row, "columns": ", ".join(record.columns), "n_values": n_values})
        return pd.DataFrame(rows, columns=columns).set_index("name")

    def features(self, space: str = GENE_SPACE) -> "pd.DataFrame":
        """Return the registry of a feature space as a frame indexed by uid."""
        from raggedatlas.catalog.features import read_registry

        frame: pd.DataFrame = read_registry(self._catalog, space).table.to_pandas().set_index("uid")
        return frame

    def find_datasets_with_features(
        self, features: Sequence[str], *, space: str = GENE_SPACE, every: bool = True
    ) -> dict[str, tuple[str, ...]]:
        """Find the datasets that measured some features; reads no array.

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

        # A text is a sequence too, of its letters.
        return find_datasets_with_features(
            self._catalog, space, [features] if isinstance(features, str) else features, every=every
        )

    def presence(self, features: Sequence[str] | None = None, *, space: str = GENE_SPACE) -> "pd.DataFrame":
        """Return which datasets measured which features; reads no array.

        Parameters
        ----------
        features : sequence of str or None
            Uids, ids or symbols; None takes all features of the space that do not count as another one.
        space : str
            Feature space.

        Returns
        -------
        pandas.DataFrame
            Of bool, (n_datasets, n_features), indexed by the uids of the datasets. Columns are the names as given, or uids.

        Raises
        ------
        FeatureError
            If a name is unknown or ambiguous.
        """
        import pandas as pd

        from raggedatlas.catalog.features import presence

        found, uids = presence(self._catalog, space, features)
        return pd.DataFrame.from_dict(found, orient="index", columns=uids if features is None else list(features))

    @property
    def identity(self) -> "FeatureIdentity":
        """Which features are the same and why: status, explanations, and links by hand."""
        from raggedatlas.query.identity import FeatureIdentity

        return FeatureIdentity(self._catalog)

    def validate(
        self,
        level: Level = "quick",
        *,
        since: int | str | None = None,
        root_hash: str = "",
        incremental: bool = False,
        executor: Executor | Workers | None = None,
    ) -> "Validation":
        """Check the atlas for errors.

        Parameters
        ----------
        level : {"quick", "rows", "files", "deep"}
            ``quick`` compares the tables, ``rows`` also the pointers of every cell, and ``files`` every stored byte with what was recorded
            when it was written: root hashes of snapshots, table files, arrays, frames, geometry. ``deep`` is all of that.
        since : int, str or None
            Number or label of a snapshot that is known to be sound: what it has unchanged is not looked at again.
        root_hash : str
            The root hash that the snapshot of this view must have, for example one that was signed.
        incremental : bool
            With ``files`` and ``deep``, skip files that an earlier call with this argument found sound, and that have the same size, times
            and record since. What was found is kept in ``raggedatlas/checks`` in the folder of the storage option
            ``cache_dir``, or in the user's cache (``$XDG_CACHE_HOME`` or ``~/.cache``). Bits that a disk loses later are not seen: call it without from time to time.
        executor : concurrent.futures.Executor, Workers or None
            Whose workers read arrays and files; the result does not depend on it.

        Returns
        -------
        Validation
            The problems, a list that is empty if none was found, and which files were read. Problems of level ``must`` prevent a snapshot;
            ``practice`` is what is worth knowing of stored data that are sound.

        Raises
        ------
        NotFoundError
            If there is no snapshot `since`.
        ArgumentError
            If `incremental` is given for a level that reads no files, or `root_hash` for the newest state.
        """
        from raggedatlas.catalog.validation import validate

        return validate(
            self._opened, level, since=since, root_hash=root_hash, incremental=incremental, executor=executor
        )

    def verify(
        self,
        version: int | str | None = None,
        *,
        since: int | str | None = None,
        root_hash: str = "",
        incremental: bool = False,
        executor: Executor | Workers | None = None,
    ) -> "Validation":
        """Compare every stored byte with what was recorded when it was written: ``validate("files")``.

        Parameters
        ----------
        version : int, str or None
            Number or label of a snapshot. None means all of an atlas, its snapshots included, or the snapshot of a view.
        since, root_hash, incremental, executor
            As of `validate`.

        Returns
        -------
        Validation
            The problems, each with the path of what is damaged, root hashes of snapshots, and which files were read.

        Raises
        ------
        NotFoundError
            If there is no such snapshot.
        """
        from raggedatlas.catalog.validation import validate

        view = self._opened if version is None else self._opened.at(find_version(self._opened, version))
        return validate(view, "files", since=since, root_hash=root_hash, incremental=incremental, executor=executor)

    def list_versions(self) -> list[AtlasVersionRecord]:
        """List the snapshots, oldest first."""
        return ShownList(list_versions(self._catalog))

    def diff(self, old: int | str, new: int | str) -> "Difference":
        """Compare two snapshots, named by number or label."""
        from raggedatlas.catalog.snapshots import diff

        return diff(self._catalog, old, new)

    def diff_files(
        self,
        old: int | str,
        new: int | str,
        *,
        other: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, str] | None = None,
    ) -> "FileDifference":
        """Compare the files of two snapshots by what is recorded of them: root hashes, manifests and checksums; no data are read.

        Parameters
        ----------
        old, new : int or str
            Numbers or labels.
        other : str or path, optional
            Another atlas, such as a mirror, which `new` is a snapshot of.
        storage_options : mapping of str to str, or None
            Credentials and endpoint of `other`.

        Returns
        -------
        FileDifference
            Files that only one of them has, and those that differ. `diff` says what cells, datasets and features differ.

        Raises
        ------
        NotFoundError
            If there is no such snapshot, or `other` is no atlas.
        """
        from raggedatlas.catalog.snapshots import diff_files

        there = None if other is None else open_catalog(Location.of(other, storage_options))
        return diff_files(self._catalog, old, new, there)


@checked
class AtlasView(ReadOnlyAtlas):
    """A snapshot of an atlas: read-only, never changed by later calls.

    Parameters
    ----------
    catalog : Catalog
        Pinned to the snapshot.
    """

    writing_methods: ClassVar[frozenset[str]] = frozenset()
    """Methods of `RaggedAtlas`, which is defined above this layer, that a view lacks."""

    @property
    def version(self) -> int:
        """Number of the snapshot."""
        return self.record.version

    @property
    def record(self) -> AtlasVersionRecord:
        """What the snapshot names."""
        record = self._opened.snapshot
        # `checkout` always pins; only a view that is built on a catalog at the tip has no record.
        if record is None:
            raise QueryError("A view is made of a snapshot; call atlas.checkout(version).")
        return record

    @property
    def cell_columns(self) -> "pa.Schema":
        """Schema of the cell table."""
        return self._catalog.tables.schema(CELLS)

    def query(
        self,
        *,
        identity: str | int | Mapping[str, str] = "default",
        on_merge: OnMerge = "counts",
        names: FeatureNames = "id",
    ) -> "Query":
        """Ask for all cells; narrow it with `Query.where`, `features`, `join` and the rest.

        Parameters
        ----------
        identity : str, int or mapping
            Which features count as the same: ``"default"`` what the snapshot says, ``"as-given"`` none, the label or number of
            another snapshot what that one says, a mapping of names of genes (``{"SEPT7": "SEPTIN7"}``) these and no others.
        on_merge : {"counts", "sum", "refuse", "apart"}
            What becomes of columns of one dataset that are one feature: ``"counts"`` adds whole numbers up and refuses other
            layers, ``"sum"`` adds up every layer, ``"refuse"`` refuses, ``"apart"`` keeps the columns as they are. Sums are exact:
            the type of a layer is widened where they need it; floats keep theirs.
        names : {"id", "symbol"}
            What names the features of a result, as `var_names`: ids, or symbols, as plots take them; of equal symbols all but the first get a number,
            ``CD79A-1``. The column `feature_id` of `var` has the ids in either case.

        Raises
        ------
        NotFoundError
            If `identity` names no snapshot.
        FeatureError
            If a given mapping names unknown or ambiguous genes, or a gene that counts as another one itself.
        QueryError
            When an output is asked for: if columns of the result would be added up that may not be.
        """
        # Imported when used, as they import what listings do not need.
        from raggedatlas.query.identity import links_of_names
        from raggedatlas.query.query import Query
        from raggedatlas.query.spec import AS_GIVEN, DEFAULT, QuerySpec

        if isinstance(identity, Mapping):
            links = links_of_names(self._catalog, identity)
            return Query(self._catalog, QuerySpec(identity=links, on_merge=on_merge, names=names))
        if identity not in (DEFAULT, AS_GIVEN):
            # Only for its error; the version is looked up again when a read is planned.
            find_version(self._catalog, identity)
        return Query(self._catalog, QuerySpec(identity=identity, on_merge=on_merge, names=names))

    def markers(
        self,
        by: str,
        *,
        within: str | None = None,
        layer: str | None = None,
        normalize: bool | None = None,
        executor: Executor | Workers | None = None,
    ) -> "pd.DataFrame":
        """Compare every group of cells with the rest, as `Query.markers` of all cells; what `RaggedAtlas.markers` kept is read.

        Parameters
        ----------
        by, within, layer, normalize, executor
            As of `Query.markers`.

        Returns
        -------
        pandas.DataFrame
            As of `Query.markers`.

        Raises
        ------
        QueryError, ArgumentError
            As of `Query.markers`.
        CorruptError
            If a table that was kept is damaged.
        """
        from raggedatlas.query.markers import MarkerOptions, kept_markers

        return kept_markers(self._opened, layer, MarkerOptions(by, within, normalize), executor)

    def sql(self, statement: str, *, as_: Literal["pandas", "arrow", "reader"] = "pandas") -> Any:  # noqa: ANN401 - by `as_`
        """Answer a SQL statement on the snapshot, by DuckDB.

        The views are ``cells`` (uid, cell_name, dataset, and the columns under the names that results show), ``datasets``, ``features`` (with
        ``space``), and ``results_<name>`` for each result of a model (uid, value). The table function
        ``expression(features := ['CD79A', 'ENSG...'], layer := 'counts')`` gives uid, feature, value and measured for each cell and feature; it
        also takes ``space`` and ``cells``, a condition as `Query.where` takes it. A value that a dataset has not measured is NULL.

        Parameters
        ----------
        statement : str
            One statement that reads: SELECT, FROM, WITH, DESCRIBE, EXPLAIN. It cannot read other files of this machine, nor the network.
        as_ : {"pandas", "arrow", "reader"}
            A frame, a `pyarrow.Table`, or a `pyarrow.RecordBatchReader`, whose rows are computed as they are read.

        Returns
        -------
        pandas.DataFrame, pyarrow.Table or pyarrow.RecordBatchReader
            The rows.

        Raises
        ------
        QueryError
            If the statement does something else than read, or DuckDB refuses it.
        FeatureError
            If `expression` names an unknown or ambiguous feature.
        MissingExtraError
            If DuckDB is not installed.

        Examples
        --------
        >>> import raggedatlas as ra
        >>> view = ra.RaggedAtlas.checkout_latest("pbmc.atlas")  # doctest: +SKIP
        >>> view.sql("SELECT cell_type, count(*) AS n FROM cells GROUP BY 1")  # doctest: +SKIP
        """
        from raggedatlas.query.sql import run_sql

        reader = run_sql(self._opened, statement)
        return reader if as_ == "reader" else reader.read_pandas() if as_ == "pandas" else reader.read_all()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (it always raises)
        """Refuse the writing methods of an atlas by name."""
        # Only names that a view lacks come here: the methods of `RaggedAtlas` among them raise `ReadOnlyError`.
        if name in self.writing_methods:
            self._opened.require_tip(f"{name}()")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def _title(self) -> str:
        return f"AtlasView of snapshot {self.version}" + (f" ({self.record.label})" if self.record.label else "")

"""The facade: an atlas that can be written, and read-only views of its snapshots."""

import datetime as dt
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import pyarrow as pa
import pyarrow.compute as pc

from raggedatlas.catalog.catalog import CELLS, DEFAULT_CODEC, create_catalog, is_atlas, open_catalog
from raggedatlas.errors import ArgumentError, NotFoundError, QueryError, StoreError
from raggedatlas.model.arguments import Progress, checked, no_progress
from raggedatlas.model.choices import CellKey, OnConflict, Unmatched
from raggedatlas.model.options import AddChoices, OnDuplicate
from raggedatlas.model.schemas import FeatureBaseSchema, HoxBaseSchema
from raggedatlas.model.spaces import FeatureSpace
from raggedatlas.query.browse import AtlasView, ReadOnlyAtlas
from raggedatlas.store.executors import Workers
from raggedatlas.store.location import Location, as_path, with_options
from raggedatlas.store.sources import Sources

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData
    from mudata import MuData

    from raggedatlas.catalog.catalog import Catalog
    from raggedatlas.ingest.term_mapping import TermMapping
    from raggedatlas.model.protocols import Source
    from raggedatlas.model.reports import AddReport, AnnotationReport, IngestReport, MaintenanceReport
    from raggedatlas.query.query import Query
    from raggedatlas.store.filters import Filter

__all__ = ["AtlasView", "RaggedAtlas", "clone", "open"]


@checked
class RaggedAtlas(ReadOnlyAtlas):
    """An atlas: datasets that do not share their features, in one store.

    Make one with `create`, or open one with `open`; query it through a snapshot.

    Parameters
    ----------
    catalog : Catalog
        What `create` and `open` make.

    Examples
    --------
    >>> import tempfile
    >>> atlas = RaggedAtlas.create(tempfile.mkdtemp() + "/my.atlas")
    >>> len(atlas.list_datasets())
    0
    """

    @classmethod
    def create(
        cls,
        uri: str | os.PathLike[str],
        cell_schema: type[HoxBaseSchema] | None = None,
        *,
        registries: Mapping[str, type[FeatureBaseSchema]] | None = None,
        spaces: Sequence[FeatureSpace] = (),
        codec: str = DEFAULT_CODEC,
        storage_options: Mapping[str, str] | None = None,
    ) -> "RaggedAtlas":
        """Create an empty atlas, all of it or nothing.

        Parameters
        ----------
        uri : str
            A path, or ``s3://``, ``gs://``, ``az://``.
        cell_schema : type or None
            A subclass of `HoxBaseSchema`; None infers the columns from what is added.
        registries : mapping of str to type, or None
            Feature space -> a subclass of `FeatureBaseSchema`.
        spaces : sequence of FeatureSpace
            Feature spaces beyond the built-in ones.
        codec : {"packed", "standard", "archive"}
            ``packed`` reads fastest, ``standard`` is opened by every Zarr v3 reader, ``archive`` is smallest; it cannot be changed later.
        storage_options : mapping of str to str, or None
            Credentials and endpoint of an object store.

        Raises
        ------
        StoreError
            If the codec is unknown, an atlas is there, the place cannot be written, or the object store ignores conditional puts.
        """
        location = Location.of(uri, storage_options)
        return cls(create_catalog(location, cell_schema, registries=registries, spaces=spaces, codec=codec))

    @classmethod
    def open(
        cls, uri: str | os.PathLike[str], *, storage_options: Mapping[str, str] | None = None, sources: Sources = "allow",
    ) -> "RaggedAtlas":  # fmt: skip
        """Open an atlas for reading and writing; nothing but its address is needed.

        Parameters
        ----------
        uri : path
            The atlas.
        storage_options : mapping of str to str, or None
            Credentials and endpoint of an object store.
        sources : {"allow", "deny", "ask"} or callable
            Whether files outside of the atlas are read that its datasets are linked to, which `info` lists: all of them, none, or those
            that are confirmed on the terminal. A callable takes an address and returns whether the file may be read, or the storage
            options to read it with.

        Raises
        ------
        NotFoundError
            If there is no atlas.
        """
        return cls(open_catalog(Location.of(uri, storage_options), sources))

    @classmethod
    def checkout_latest(
        cls, db_uri: str | os.PathLike[str], schema: type[HoxBaseSchema] | None = None,
        store: str | os.PathLike[str] | None = None, *,
        storage_options: Mapping[str, str] | None = None,
        sources: Sources = "allow",
    ) -> "AtlasView":  # fmt: skip
        """Open the newest snapshot of an atlas.

        Parameters
        ----------
        db_uri : str
            The atlas, or its ``lance_db`` folder.
        schema : type or None
            If given, its columns must be in the cell table.
        store : str or None
            The Zarr store; None takes the ``zarr_store`` folder beside the tables.
        storage_options : mapping of str to str, or None
            Credentials and endpoint of an object store.
        sources : {"allow", "deny", "ask"} or callable
            As `open`.

        Raises
        ------
        NotFoundError
            If there is no atlas, or it has no snapshot.
        """
        from raggedatlas.catalog.snapshots import open_latest

        place = Location.of(db_uri, storage_options)
        # The catalog appends `lance_db` itself.
        place = replace(place, uri=place.uri.removesuffix("/lance_db"))
        arrays = None if store is None else Location.of(store, storage_options)
        return AtlasView(open_latest(place, schema=schema, arrays=arrays, sources=sources))

    # A path tells a type checker nothing: it may be a file, a folder of files, a geometry store or a folder of results.
    @overload
    def add(
        self, source: list[Any] | tuple[Any, ...], name: str | None = ..., *, on_duplicate: OnDuplicate = ..., dry_run: bool = ...,
        progress: Progress | bool | None = ..., executor: Executor | Workers | None = ...,
        storage_options: Mapping[str, str] | None = ..., **choices: Unpack[AddChoices],
    ) -> "list[IngestReport]": ...  # fmt: skip

    @overload
    def add(
        self, source: "AnnData | MuData | Source", name: str | None = ..., *, on_duplicate: OnDuplicate = ..., dry_run: bool = ...,
        progress: Progress | bool | None = ..., executor: Executor | Workers | None = ..., **choices: Unpack[AddChoices],
    ) -> "IngestReport": ...  # fmt: skip

    # Results and geometry are of wings, so that a type checker learns of these no more than of a path.
    @overload
    def add(
        self, source: Any, name: str | None = ..., *,  # noqa: ANN401 on_duplicate: OnDuplicate = ..., dry_run: bool = ...,
        progress: Progress | bool | None = ..., executor: Executor | Workers | None = ...,
        storage_options: Mapping[str, str] | None = ..., **choices: Unpack[AddChoices],
    ) -> "AddReport | list[IngestReport]": ...  # fmt: skip

    def add(
        self,
        source: Any,
        name: str | None = None,
        *,
        on_duplicate: OnDuplicate = "error",
        dry_run: bool = False,
        progress: Progress | bool | None = None,
        executor: Executor | Workers | None = None,
        storage_options: Mapping[str, str] | None = None,
        **choices: Unpack[AddChoices],
    ) -> "AddReport | list[IngestReport]":
        """Add a file, a folder of files, or an object in memory; nothing of it is visible before all of it is.

        Parameters
        ----------
        source : path, AnnData, MuData, Dataset, ResultDataset, Shapes, Geometry, or sequence of these
            ``.h5ad``, AnnData ``.zarr``, ``.h5mu``, CXG, 10x ``.h5``, a Market-matrix folder, or a folder of such files. A model's
            results, or their folder, are joined by uid with the cells that are there already. Shapes give these cells their geometry
            (``link=``), or become new cells: in memory, a zarr-vectors store, GeoJSON, GeoParquet, an element of SpatialData, PLY, OBJ,
            STL, or points in ``.parquet``. A `Dataset` is one of another atlas, as its `dataset` returns it; with ``copy=False``, one of a
            published atlas, whose values stay there. Files may be on ``s3://``, ``gs://``, ``az://`` or
            ``https://``, and are read by ranges without being copied first.
        name : str or None
            What to call the dataset, the result or the geometry; None takes the file's name, for geometry its feature space's.
        on_duplicate : {"error", "skip", "replace"}
            What to do with content that is in the atlas already (``replace`` also replaces a dataset of the same name), and with
            results of a name that is taken.
        dry_run : bool
            Do all but write: every refusal and the whole report.
        progress : callable, bool or None
            A callback ``(step, done, total)``; None draws a bar on a terminal, False draws nothing.
        executor : concurrent.futures.Executor, Workers or None
            Whose workers read the files, each one at a time, and write their arrays; this process alone commits. The workers must reach the
            atlas and the files under the same addresses.
        storage_options : mapping of str to str, or None
            Credentials and endpoint of files in an object store; None takes those of the atlas.
        **choices
            See `AddChoices`: which obs columns, layers, feature spaces and ids to take.

        Returns
        -------
        AddReport, or list of IngestReport
            An `IngestReport` for cells, a `ResultReport` for a model's result, a `GeometryReport` for geometry; a list for a folder or a
            sequence. Every column and element stands in it with what became of it.

        Raises
        ------
        SourceError, SchemaError, FeatureError, ValuesError, DuplicateError
            If the source is refused; the atlas is as it was.
        WorkersError
            If workers die, hang, or do not reach the atlas. Of several sources, those committed before are in the atlas.

        Examples
        --------
        >>> atlas.add("pbmc.h5ad", organism="human")  # doctest: +SKIP
        >>> atlas.add(ResultDataset({}, "results/z"), space="embedding", name="scvi_64")  # doctest: +SKIP
        >>> atlas.add("cells.zv", link="segment_id", space="segmentation_boundary")  # doctest: +SKIP
        """
        # Modules of single methods are imported when these are called, so that importing the package stays fast.
        from raggedatlas.ingest.add import add

        source = _open_datasets(source, linked=choices.get("copy", True) is False)
        # Methods that write take `_opened`: `_catalog` is pinned while a purge rewrites tables.
        return add(
            self._opened,
            source,
            {"name": name, "on_duplicate": on_duplicate, "dry_run": dry_run, **choices},
            progress,
            executor,
            storage_options,
        )

    def register_space(
        self, space: FeatureSpace, registry: type[FeatureBaseSchema] = FeatureBaseSchema
    ) -> FeatureSpace:
        """Define a feature space of your own; the definition is stored in the atlas.

        Raises
        ------
        SchemaError
            If the atlas knows another space by that name.
        """
        self._opened.session("register_space()").add_space(space, registry)
        return space

    def register_features(
        self,
        features: Any,  # noqa: ANN401  (several forms)
        *,
        space: str = "gene_expression",
    ) -> int:
        """Add or correct features of a registry: their symbols, aliases and your own columns.

        Features that are the same are linked with `atlas.identity.link`.

        Parameters
        ----------
        features : pandas.DataFrame, pyarrow.Table, or sequence of FeatureBaseSchema
            Rows with `uid`; a known uid is corrected.
        space : str
            Feature space.

        Returns
        -------
        int
            How many features were new.
        """
        from raggedatlas.ingest.columns import register

        return register(self._opened, features, space)

    def reindex_registry(self, space: str | None = None) -> int:
        """Give every feature without one its dense `global_index`; an assigned index never changes.

        Parameters
        ----------
        space : str or None
            One feature space, or None for all.

        Returns
        -------
        int
            How many were assigned.
        """
        from raggedatlas.catalog.optimization import reindex

        return reindex(self._opened, space)

    def add_csc(
        self,
        dataset: str,
        *,
        space: str = "gene_expression",
        layers: Sequence[str] | None = None,
        executor: Executor | Workers | None = None,
    ) -> tuple[str, ...]:
        """Write a column-sorted copy of a dataset's sparse layers, next to the one sorted by rows.

        Parameters
        ----------
        dataset : str
            Name or uid.
        space : str
            Feature space.
        layers : sequence of str or None
            Which layers; None takes all. Layers that have a copy already are left as they are.
        executor : concurrent.futures.Executor, Workers or None
            Whose workers write; layers with the same entries are written by one.

        Returns
        -------
        tuple of str
            The layers written now.
        """
        from raggedatlas.ingest.csc import add_csc

        return add_csc(self._opened, dataset, space, layers, executor)

    def materialize(
        self, datasets: str | Sequence[str] | None = None, *, executor: Executor | Workers | None = None
    ) -> tuple[str, ...]:
        """Copy the values of linked datasets into the atlas, which then needs their files no more.

        Each dataset is copied in one commit, under its uid and with the uids of its cells; counts are stored in the smallest type that
        holds them, as `add` does it. Snapshots from before keep the dataset as it was, linked. A call that died can be made again.
        A dataset that is refused keeps no other from being copied; the error of the first one is raised at the end.

        Parameters
        ----------
        datasets : str, sequence of str or None
            Names or uids; None takes all that are linked.
        executor : concurrent.futures.Executor, Workers or None
            Whose workers read and write, one dataset each.

        Returns
        -------
        tuple of str
            Names of the datasets that were copied now.

        Raises
        ------
        ValuesError
            If values are not what the dataset says, e.g. fractions in a layer of counts; it stays linked.
        SourceError
            If a cell names a feature twice or one that the matrix does not have; it stays linked.
        DuplicateError
            If another dataset has the same content.
        StoreError
            If a file is not there, or changed since it was linked (`StaleSourceError`).
        """
        from raggedatlas.ingest.materialize import materialize

        return materialize(self._opened, datasets, executor)

    def relink(
        self,
        dataset: str,
        path: str | os.PathLike[str] | None = None,
        *,
        hash: Literal["metadata", "full"] = "metadata",
        storage_options: Mapping[str, str] | None = None,
    ) -> str:
        """Name the place that the file of a linked dataset has moved to, or hash its values; snapshots keep what they have.

        A file with the recorded size, time (or ETag) and places of chunks is taken at once. Of any other, e.g. one that was compressed anew, all
        values are compared: with the hash of them, where the dataset was added with ``hash="full"`` and that covers all that is linked, or else
        with the old file.

        Parameters
        ----------
        dataset : str
            Name or uid.
        path : str or path
            The file or Zarr folder, or its address in an object store or on a web server; None is the recorded one.
        hash : {"metadata", "full"}
            ``"full"`` reads all values of the main matrix and records their hash, as ``add(hash="full")`` does; later calls of
            ``validate("deep")`` compare the values with it.
        storage_options : mapping of str to str, or None
            Credentials and endpoint of this address; they are not stored.

        Returns
        -------
        str
            The address that is recorded now; that of a local file near the atlas is relative to it.

        Raises
        ------
        NotFoundError
            If there is no such dataset or file.
        SourceError
            If the dataset is not linked, or the file holds something else or cannot be compared.
        DuplicateError
            If the hash of all values is that of another dataset.
        """
        from raggedatlas.ingest.relink import relink

        return relink(self._opened, dataset, None if path is None else as_path(path, storage_options), hash)

    def optimize(self) -> None:
        """Assign feature indices, compact the tables, rebuild their indexes; never touches what a snapshot names."""
        from raggedatlas.catalog.optimization import optimize

        optimize(self._opened)

    def snapshot(self, label: str | None = None) -> int:
        """Record a consistent view of all tables, and return its number.

        Optimizes and validates first, so that one call is enough. Every table version it names is tagged and never cleaned away.

        Parameters
        ----------
        label : str or None
            A name, unique in the atlas.

        Raises
        ------
        CorruptError
            If `validate` finds problems; nothing is recorded.
        """
        from raggedatlas.catalog.snapshots import snapshot

        return snapshot(self._opened, label).version

    def checkout(self, version: int | str) -> "AtlasView":
        """Open a snapshot, by number or label, as a view that never changes.

        Raises
        ------
        NotFoundError
            If there is no such snapshot; the message lists them.
        """
        from raggedatlas.catalog.versions import find_version

        return AtlasView(self._opened.at(find_version(self._opened, version)))

    def markers(
        self,
        by: str,
        *,
        within: str | None = None,
        layer: str | None = None,
        normalize: bool | None = None,
        snapshot: int | str | None = None,
        executor: Executor | Workers | None = None,
    ) -> "pd.DataFrame":
        """Compare every group of cells of a snapshot with the rest, and keep the table with the atlas, where the next call reads it.

        The cells are taken as independent, which cells of one donor are not: this finds features that mark a group; for conclusions about
        donors or conditions, test samples with `Query.test`.

        Parameters
        ----------
        by, within, layer, normalize, executor
            As of `Query.markers`.
        snapshot : int, str or None
            Number or label of the snapshot; None takes the newest.

        Returns
        -------
        pandas.DataFrame
            As of `Query.markers`. `gc` frees the tables of snapshots that were dropped; mirrors and published atlases have those of
            theirs.

        Raises
        ------
        NotFoundError
            If there is no such snapshot.
        QueryError, ArgumentError
            As of `Query.markers`.
        CorruptError
            If a table that was kept is damaged.
        ConflictError
            If a purge is unfinished.

        Examples
        --------
        >>> atlas.markers("cell_type", within="tissue").groupby("group").head(5)  # doctest: +SKIP
        """
        from raggedatlas.catalog.versions import find_version
        from raggedatlas.query.markers import MarkerOptions, kept_markers

        self._opened.require_tip("markers()")
        view = self._opened.at(find_version(self._opened, snapshot))
        return kept_markers(view, layer, MarkerOptions(by, within, normalize), executor, keep_in=self._opened)

    def restore(self, version: int | str) -> None:
        """Make a snapshot the newest state again: cells, datasets, results, geometry, links and gene tables; feature indices stay as they are."""
        from raggedatlas.catalog.snapshots import restore

        restore(self._opened, version)

    def drop_snapshot(self, version: int | str) -> "MaintenanceReport":
        """Remove a snapshot, by number or label; `gc` frees what only it reached. Its number is not given again.

        Raises
        ------
        NotFoundError
            If there is no such snapshot.
        """
        from raggedatlas.catalog.snapshots import drop_snapshot

        return drop_snapshot(self._opened, version)

    def expire_snapshots(
        self,
        *,
        older_than: dt.timedelta | None = None,
        keep_last: int | None = None,
        keep_labels: bool = True,
        dry_run: bool = False,
    ) -> "MaintenanceReport":
        """Remove old snapshots; `gc` frees what only they reached. The newest one always stays.

        Parameters
        ----------
        older_than, keep_last : dt.timedelta, int, optional
            Only snapshots that were taken longer ago, and all but the newest `keep_last`; of both, only those of which both are true.
        keep_labels : bool
            Whether snapshots with a label stay.
        dry_run : bool
            Only say which would go.

        Raises
        ------
        ArgumentError
            If neither `older_than` nor `keep_last` is given, or one is negative.
        """
        from raggedatlas.catalog.snapshots import expire_snapshots

        return expire_snapshots(
            self._opened, older_than=older_than, keep_last=keep_last, keep_labels=keep_labels, dry_run=dry_run
        )

    def rename_dataset(self, uid_or_name: str, name: str) -> None:
        """Give a dataset another name; snapshots keep the old one.

        Raises
        ------
        NotFoundError
            If there is no such dataset, or several have that name.
        DuplicateError
            If another dataset has the new name.
        """
        from raggedatlas.catalog.maintenance import rename_dataset

        rename_dataset(self._opened, uid_or_name, name)

    def set_license(self, uid_or_name: str, license: str) -> None:
        """Note the licence of a dataset, such as ``"CC-BY-4.0"``; snapshots keep the old one.

        Raises
        ------
        NotFoundError
            If there is no such dataset, or several have that name.
        NameRefusedError
            If the text is too long or cannot be printed.
        """
        from raggedatlas.catalog.maintenance import set_license

        set_license(self._opened, uid_or_name, license)

    def drop_dataset(self, uid_or_name: str) -> "MaintenanceReport":
        """Take a dataset out of the atlas; snapshots that have it keep it, and `gc` frees nothing that they reach."""
        from raggedatlas.catalog.assets import drop_dataset

        return drop_dataset(self._opened, uid_or_name)

    def delete_cells(
        self,
        condition: "str | Mapping[str, Any] | Filter | Query | None" = None,
        /,
        *,
        uids: Any = None,  # noqa: ANN401  (a list, an array, a table or a file)
        dry_run: bool = False,
        **equal: Any,  # noqa: ANN401  (any value that people compare with)
    ) -> "MaintenanceReport":
        """Delete cells, all of them or none; snapshots that have them keep them, and `restore` brings them back.

        The file that `dataset` gives back lacks them and names them in ``uns["deleted_cells"]``. Their rows stay in arrays until the dataset goes.

        Parameters
        ----------
        condition : str, mapping, Filter or Query
            Which cells, as `Query.where` takes it, of the newest state, or the cells of a query of a snapshot. One that no cell satisfies deletes
            nothing.
        uids : list, array, Series, table, AnnData or path
            Their uids: an index, a column ``uid`` (also of CSV, TSV, Parquet), or a line each (``.txt``); deleted ones are passed over.
        dry_run : bool
            Only report how many cells of which datasets would be deleted.
        **equal
            A condition as a mapping.

        Raises
        ------
        ArgumentError, QueryError
            If not one of condition and uids is given, it is invalid, or a dataset would be left empty (`drop_dataset` takes it out).
        NotFoundError, SourceError, StoreError, ConflictError
            If a uid is of no cell, uids cannot be read, a purge is unfinished, or other writers win every retry.

        Examples
        --------
        >>> atlas.delete_cells("n_genes < 200")  # doctest: +SKIP
        """
        from raggedatlas.catalog.deletion import delete_cells
        from raggedatlas.ingest.annotations import read_uids
        from raggedatlas.query.cells import find_cells
        from raggedatlas.query.query import Query

        conditions: list[str | Mapping[str, Any] | Filter] = [equal] if equal else []
        if isinstance(condition, Query):
            if equal or uids is not None:
                raise ArgumentError("delete_cells() takes a condition, a query or uids=..., one of them.")
            uids = condition.obs([]).to_arrow().column("uid")
        elif condition is not None:
            conditions.insert(0, condition)
        if bool(conditions) == (uids is not None):
            raise ArgumentError("delete_cells() takes a condition or uids=..., one of them.")
        if conditions:
            held = self._opened.session("delete_cells()")
            return delete_cells(held, *find_cells(held, conditions), dry_run=dry_run)
        uids_of_cells = read_uids(with_options(uids, self._opened.location.storage_options))
        return delete_cells(self._opened, uids_of_cells, "given uids", given=True, dry_run=dry_run)

    def drop_result(self, name: str) -> "MaintenanceReport":
        """Take a model's result out of the atlas; snapshots that have it keep it, and `gc` frees nothing that they reach."""
        return self.drop_asset("results", name)

    def annotate(
        self,
        source: Any,  # noqa: ANN401  (anything that holds columns of cells)
        name: str | None = None,
        *,
        on: CellKey = "uid",
        dataset: str | None = None,
        columns: Sequence[str] | Mapping[str, str] | None = None,
        obsm: Sequence[str] = (),
        cast: Mapping[str, str] | None = None,
        on_conflict: OnConflict = "error",
        unknown: Unmatched = "error",
        dry_run: bool = False,
    ) -> "AnnotationReport":
        """Write what an analysis found out about cells back into the atlas, as cell columns.

        Values, columns and the record of where they came from become visible in one commit. Missing values (null, NaN) say
        nothing. Queries see the values after the next `snapshot`.

        Parameters
        ----------
        source : AnnData, DataFrame, Series, Arrow table, mapping of columns, or path
            Of AnnData, `obs` is read, with the colors of its categories. Files are ``.csv``, ``.tsv`` (also gzipped),
            ``.parquet``, and all that `add` takes.
        name : str or None
            Of the annotation, unique in the atlas; None takes the file's or the column's name.
        on : {"uid", "cell_name"}
            How rows name cells: by `uid`, as results of queries do, in a column of that name or in the index; or by the names
            that cells had in their file, together with a column ``dataset``.
        dataset : str or None
            Dataset of all rows, with ``on="cell_name"``; in place of the column.
        columns : sequence of str, mapping of str to str, or None
            Which columns to write; a mapping also renames (``{old: new}``). None writes all that differ from the atlas.
        obsm : sequence of str
            Members of `obsm` of an AnnData to add as results of the same name.
        cast : mapping of str to str, or None
            Column -> ``"str"``, ``"int"``, ``"float"`` or ``"bool"``; ``{"leiden": "str"}`` for numbers of clusters in a CSV file.
        on_conflict : {"error", "replace", "keep"}
            What to do where a cell has another value already.
        unknown : {"error", "skip"}
            What to do with rows that name no cell of the atlas.
        dry_run : bool
            Write nothing; return the report of what would be written, with every refusal.

        Returns
        -------
        AnnotationReport
            What was written for each column. Its status is ``unchanged`` where the atlas has all the values already.

        Raises
        ------
        SourceError
            For rows that name no cell or one cell twice, values that differ from those in the atlas, and unreadable files.
        SchemaError
            For columns of another type than that in the atlas, and columns of more than one value per cell.
        NameRefusedError, DuplicateError
            For names that the atlas uses for something else, or has already.
        NotFoundError
            For columns and datasets that do not exist.

        Examples
        --------
        >>> import tempfile
        >>> import anndata as ad
        >>> import numpy as np
        >>> import pandas as pd
        >>> atlas = RaggedAtlas.create(tempfile.mkdtemp() + "/my.atlas")
        >>> cells, genes = pd.DataFrame(index=["c0", "c1", "c2"]), pd.DataFrame(index=["CD19", "CD3E"])
        >>> _ = atlas.add(ad.AnnData(np.ones((3, 2), np.float32), cells, genes), "pbmc", progress=False)
        >>> labels = pd.DataFrame({"label": ["B", "T", "B"]}, index=["c0", "c1", "c2"])
        >>> atlas.annotate(labels, on="cell_name", dataset="pbmc")
        label: added, 3 cells
          label: new, 3 values
        >>> atlas.checkout(atlas.snapshot()).query().where(label="B").count()
        2
        """
        from raggedatlas.ingest.annotations import annotate
        from raggedatlas.model.options import AnnotateOptions

        options = AnnotateOptions(name, on, dataset, columns, obsm, cast or {}, on_conflict, unknown, dry_run)
        return annotate(self._opened, source, options)

    def load_terms(
        self,
        source: Any,  # noqa: ANN401  (a path, the name of an ontology, or any table)
        *,
        ontology: str | None = None,
        release: str = "",
    ) -> "pd.DataFrame":
        """Keep an ontology in the atlas, which `under` and `map_terms` then use in place of the packaged one; snapshots pin it.

        Parameters
        ----------
        source : path, DataFrame, Arrow table, mapping of columns, or str
            A CSV or TSV file or a table of terms, see `store.ontologies.read_term_table`, or the name of a packaged ontology, e.g. ``"CL"``.
        ontology : str or None
            Name of the ontology; None takes the prefix of the ids. A table of this name replaces the one before.
        release : str
            Its release.

        Returns
        -------
        pandas.DataFrame
            The table, as ``identity.tables()`` lists it; ``identity.remove(name)`` takes it away.

        Raises
        ------
        SourceError
            If the table lacks columns, contradicts itself, or has a cycle, which is named.
        MissingFileError
            If there is no such file.
        """
        from raggedatlas.catalog.genes import put_tables
        from raggedatlas.model.accessions import GeneTable
        from raggedatlas.store.ontologies import read_term_table

        catalog = self._opened.session("load_terms()")
        terms = read_term_table(with_options(source, catalog.location.storage_options), ontology, release)
        put_tables(catalog, [GeneTable(info, terms.rows) for info in terms.infos])
        return self.identity.tables().loc[[info.name for info in terms.infos]]

    def map_terms(
        self,
        column: str,
        ontology: str | None = None,
        *,
        confirm: Any = None,  # noqa: ANN401  (a path, a mapping or a table)
        on_conflict: OnConflict = "keep",
        dry_run: bool = False,
    ) -> "TermMapping":
        """Find a term of an ontology for each label of a column, and write the ids as ``<column>_ontology_term_id``.

        A label gets a term if it is the name, a synonym or an id of exactly one (an old id counts for the one that replaces it), or if
        `confirm` says so. For all others the report has candidates with scores, and nothing is written for them.

        Parameters
        ----------
        column, ontology : str
            Column of labels, and the ontology; None takes that of the column, as `under` does.
        confirm : path, mapping of str to str, or table
            Terms for labels, by id or name: a CSV or TSV file with the columns ``label`` and ``term``, as the report's ``write()`` makes it. A
            label without a term there gets none. Labels that it lacks are looked up.
        on_conflict : {"error", "replace", "keep"}
            What to do where a cell has another id already.
        dry_run : bool
            Write nothing; return the report of what would be written.

        Raises
        ------
        QueryError, SourceError
            If there is no such column or ontology, or `confirm` names a term that is none of the ontology, or two for one label.
        """
        from raggedatlas.ingest.term_mapping import map_terms
        from raggedatlas.model.options import MapTermsOptions

        return map_terms(self._opened, column, MapTermsOptions(ontology, confirm, on_conflict, dry_run))

    def drop_annotation(self, name: str) -> "MaintenanceReport":
        """Take the columns of an annotation out of the atlas; columns that they covered are shown again, and snapshots keep theirs."""
        from raggedatlas.catalog.cells import drop_annotation

        return drop_annotation(self._opened, name)

    def drop_geometry(self, name: str, dataset: str | None = None) -> "MaintenanceReport":
        """Take geometry out of the atlas, of one dataset or of all; snapshots that have it keep it, and `gc` frees nothing that they reach."""
        return self.drop_asset("geometry", name, dataset)

    def drop_asset(self, kind: str, name: str, dataset: str | None = None) -> "MaintenanceReport":
        """Take what is attached to cells out of the atlas; snapshots that have it keep it, and `gc` frees nothing that they reach.

        Parameters
        ----------
        kind : str
            ``"results"``, ``"geometry"``, or a kind that an installed package brings.
        name : str
            Its name.
        dataset : str or None
            Of geometry: only that of one dataset.

        Raises
        ------
        NotFoundError
            If there is none of that name.
        MissingExtraError
            If no installed package has the kind.
        ArgumentError
            If a dataset is named for a kind other than geometry.
        """
        from raggedatlas.catalog.assets import asset_kind

        return asset_kind(kind).drop(self._opened, name, dataset)

    def sync(
        self,
        target: str | os.PathLike[str],
        *,
        values: bool = False,
        storage_options: Mapping[str, str] | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> "MaintenanceReport":
        """Mirror all snapshots to another place, or bring an earlier mirror up to date; only files that differ are copied.

        Until the last file is written the target shows what it showed before, and a call that died can be made again. Data that no
        snapshot reaches are not copied; data of snapshots that were dropped here leave the mirror with its next `gc`.

        Parameters
        ----------
        target : str or path
            An empty place, or an earlier mirror that nothing else was written to: a path, ``s3://``, ``gs://`` or ``az://``.
        values : bool
            Also copy the files that datasets are linked to; of a Zarr folder, the chunks of linked arrays. The mirror then reads these copies,
            also in earlier snapshots. Files that were copied once are not copied again.
        storage_options : mapping of str to str, or None
            Credentials and endpoint of the target.
        dry_run : bool
            Only report what would be copied.
        progress : callable or None
            Called with step, done and total.

        Returns
        -------
        MaintenanceReport
            Groups with copied files, and the bytes of all copied files.

        Raises
        ------
        NotFoundError
            If there is no snapshot.
        StoreError
            If the target is not a mirror of this atlas, is within it, or cannot be written.
        CorruptError
            If a file does not have its recorded SHA-256; the target stays as it was.
        ConflictError
            If another process drops a snapshot meanwhile; run it again.
        StaleSourceError
            With `values`, if a file that the newest snapshot is linked to is not the recorded one. Files of older snapshots alone that
            cannot be copied are named in the report.
        """
        from raggedatlas.catalog.mirror import sync

        place = Location.of(target, storage_options)
        return sync(self._opened, place, values=values, dry_run=dry_run, progress=progress or no_progress)

    def publish(
        self,
        target: str | os.PathLike[str],
        snapshot: str | int | None = None,
        *,
        keep: Sequence[str | int] = (),
        readme: str | os.PathLike[str] = "",
        license: str = "",
        citation: str | os.PathLike[str] = "",
        require_license: bool = False,
        storage_options: Mapping[str, str] | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> "MaintenanceReport":
        """Write a snapshot into a folder of a few files, which any web server can serve and `raggedatlas.open` reads from there.

        The folder is flat: ``head.json``, an index, packs of about 1 GiB, ``README.md``, ``CITATION.cff`` and ``checksums.sha256``. A call that
        died can be made again, and goes on where it stopped. Publishing another snapshot into the same folder writes what is new; files that
        only earlier snapshots need are removed an hour after they were written, unless `keep` names these.

        Parameters
        ----------
        target : str or path
            An empty place, or one with earlier snapshots of this atlas: a path, ``s3://``, ``gs://`` or ``az://``.
        snapshot : str, int or None
            Label or number; None takes the newest.
        keep : sequence of str or int
            Other snapshots to publish with it.
        readme : str or path
            Text in Markdown, or a file with it, that the README begins with. What datasets there are and how they are opened follows.
        license : str
            Licence of the whole. That of each dataset is what `add` was given or `set_license` noted.
        citation : str or path
            How to cite it: a sentence, or a ``.cff`` file.
        require_license : bool
            Refuse if a dataset has no licence.
        storage_options : mapping of str to str, or None
            Credentials and endpoint of the target.
        dry_run : bool
            Only report what would be written.
        progress : callable or None
            Called with step, done and total.

        Returns
        -------
        MaintenanceReport
            Bytes that were written; datasets without a licence are in the notes.

        Raises
        ------
        NotFoundError
            If there is no such snapshot.
        StoreError
            If a dataset is linked to a file outside of the atlas or lacks a licence that is required, or the target holds something else.
        CorruptError
            If a file does not have its recorded SHA-256.

        Examples
        --------
        >>> atlas = ra.RaggedAtlas.open("pbmc.atlas")  # doctest: +SKIP
        >>> atlas.publish("/srv/www/pbmc.atlas", "v3", license="CC-BY-4.0")  # doctest: +SKIP
        """
        from raggedatlas.catalog.publishing import Card, publish

        texts = [text if isinstance(text, str) else Path(text) for text in (readme, citation)]
        return publish(
            self._opened, Location.of(target, storage_options), at=snapshot, keep=keep, card=Card(texts[0], license, texts[1]),
            require_license=require_license, dry_run=dry_run, progress=progress or no_progress,
        )  # fmt: skip

    def gc(self, *, dry_run: bool = True, grace: dt.timedelta = dt.timedelta(hours=1)) -> "MaintenanceReport":
        """Free what no kept snapshot, no dataset, no result, no geometry and no running `add` reaches.

        Parameters
        ----------
        dry_run : bool
            Only say what would be freed.
        grace : dt.timedelta
            How long an `add` on another machine may be silent before it counts as dead.

        Raises
        ------
        ArgumentError
            If `grace` is negative.
        """
        # With a negative grace a writer on another machine always counts as dead, and `gc` frees what it writes.
        if grace < dt.timedelta(0):
            raise ArgumentError(f"gc() takes grace as a datetime.timedelta of 0 or more, not {grace}.")
        from raggedatlas.catalog.maintenance import gc

        return gc(self._opened, dry_run=dry_run, grace=grace)

    def purge(self, uid_or_name: str) -> "MaintenanceReport":
        """Remove a dataset from the tip and from every snapshot, its arrays and metadata too; this cannot be undone.

        A file that the dataset is linked to is not the atlas's and stays; the report names it. What was purged, and when, is logged in the atlas. Until the purge is finished every other write is refused, also after a
        crash: the same call, or `repair`, then finishes it.

        Raises
        ------
        NotFoundError
            If neither the tip nor a snapshot has the dataset.
        ConflictError
            If an `add`, another purge or a call that writes arrays of the dataset is under way.
        """
        from raggedatlas.catalog.purge import purge

        return purge(self._opened, uid_or_name)

    def repair(self) -> "MaintenanceReport":
        """Remove what killed or failed calls left: cells without a record and unreferenced groups, never those of a running `add`."""
        from raggedatlas.catalog.maintenance import repair

        return repair(self._opened)

    def query(self) -> "Query":
        """Refuse: a query needs a snapshot, so that its answer can be had again.

        Raises
        ------
        QueryError
            Always; the message says what to call.
        """
        raise QueryError(
            "query() needs a snapshot, so that its answer can be had again: call v = atlas.snapshot(), then atlas.checkout(v).query()."
        )


AtlasView.writing_methods = frozenset(
    name for name in dir(RaggedAtlas) if not name.startswith("_") and callable(getattr(RaggedAtlas, name))
)


@checked
def open(
    address: str | os.PathLike[str],
    *,
    cache: str | None = None,
    offline: bool = False,
    allow_redirects: bool = False,
    anonymous: bool = False,
    storage_options: Mapping[str, str] | None = None,
    sources: Sources | None = None,
) -> AtlasView:
    """Open a snapshot of an atlas by its address, for reading.

    Parameters
    ----------
    address : str or path
        A published atlas: on a web server (``https://lab.org/lung.atlas``), on the Hugging Face Hub (``hf://datasets/lab/lung``, extra ``hub``),
        a record of Zenodo (``doi:10.5281/zenodo.123``), a folder, or in an object store (``s3://``, ``gs://``, ``az://``). Or an atlas itself.
        ``@`` and the label or number of a snapshot may follow; without, it is the newest. After ``@sha256:`` comes the root hash of a
        snapshot: each file is then fetched as a whole and compared with what the hash covers before anything of it is used.
    cache : str or None
        Keep what is read of a published atlas on the local disk, for all processes of this user: tables and arrays up to this size each, such
        as ``"10 GB"``. The storage option ``cache_dir`` names another folder.
    offline : bool
        Read from that cache alone.
    allow_redirects : bool
        Follow redirects of the web server to this machine and private networks too.
    anonymous : bool
        Read an object store without credentials, as public buckets are read.
    storage_options : mapping of str to str, or None
        Credentials and endpoint of an object store.
    sources : {"allow", "deny", "ask"}, callable or None
        As of `RaggedAtlas.open`; None allows what an atlas of one's own is linked to, and nothing of a published one.

    Raises
    ------
    NotFoundError
        If there is no atlas, or no such snapshot.
    StoreError
        If it cannot be reached.
    CorruptError
        If it is damaged, or not what the root hash says.
    MissingExtraError
        If ``hf://`` is asked for without the extra ``hub``.

    Examples
    --------
    >>> atlas = ra.open("https://lab.org/lung.atlas@v3", cache="10 GB")  # doctest: +SKIP
    >>> atlas.query().where(cell_type="B cell").features(["CD79A"]).to_anndata()  # doctest: +SKIP
    """
    from raggedatlas.catalog.published import is_published, open_published, split_address
    from raggedatlas.store.location import anonymous_options

    if anonymous:
        storage_options = {**(storage_options or {}), **anonymous_options(str(address))}
    text, at = split_address(os.fspath(address)) if not isinstance(address, Location) else (address, None)
    if isinstance(text, Location) or not is_published(text, storage_options):
        if cache is not None or offline:
            raise ArgumentError(
                "cache= and offline= are for published atlases; for one of your own, give the storage options cache_dir and cache_size."
            )
        atlas = RaggedAtlas.open(text, storage_options=storage_options, sources=sources or "allow")
        return atlas.checkout("latest" if at is None else at)
    return AtlasView(
        open_published(
            text,
            at,
            storage_options=storage_options,
            cache=cache,
            offline=offline,
            any_redirect=allow_redirects,
            sources=sources or "deny",
        )
    )


@checked
def clone(
    address: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    datasets: Sequence[str] | None = None,
    where: "str | Mapping[str, Any] | Filter | None" = None,
    cache: str | None = None,
    allow_redirects: bool = False,
    storage_options: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> RaggedAtlas:
    """Copy a published atlas, or a part of it, into an atlas of one's own, which can be written.

    Every file is compared with its hash. A call that died can be made again, and copies what is missing.

    Parameters
    ----------
    address : str or path
        As of `open`.
    target : str or path
        An empty place for the atlas: a path, ``s3://``, ``gs://`` or ``az://``.
    datasets : sequence of str or None
        Names or uids of the datasets to take; None takes all.
    where : str, mapping, Filter or None
        Which cells to take, as of `Query.where`. Datasets without such cells are left out; of the others all values are copied, and the other cells
        are deleted.
    cache, allow_redirects, storage_options
        As of `open`.
    progress : callable or None
        Called with step, done and total.

    Returns
    -------
    RaggedAtlas
        With the published snapshots; of a part, with one snapshot of that part.

    Raises
    ------
    NotFoundError
        If there is no published atlas, snapshot or dataset.
    QueryError
        If no cell satisfies the condition.
    StoreError
        If the target is another atlas, or a place cannot be reached.
    CorruptError
        If a file is not what was published.

    Examples
    --------
    >>> ra.clone("https://lab.org/lung.atlas@v3", "lung.atlas", datasets=["donor_1"])  # doctest: +SKIP
    """
    from raggedatlas.catalog.assets import find_dataset
    from raggedatlas.catalog.published import published_files
    from raggedatlas.catalog.publishing import clone as clone_files
    from raggedatlas.query.cells import find_cells

    view = open(address, cache=cache, allow_redirects=allow_redirects, storage_options=storage_options)
    published = view._opened
    if published.location.server is None:
        raise StoreError(f"{view.uri} is no published atlas; copy an atlas of your own with sync().")
    chosen: set[str] | None = None
    if datasets is not None:
        records = published.dataset_records().records
        chosen = {find_dataset(published, name, records)[0].uid for name in datasets}
    uids = None if where is None else find_cells(published, [where])[0]
    if uids is not None:
        found = {uid for _, own in _select(published, uids) for uid in own.unique().to_pylist()}
        chosen = found if chosen is None else chosen & found
        if not chosen:
            raise QueryError(f"No cell of the datasets that were chosen satisfies {where!r}; nothing was copied.")
    place = Location.of(target)
    clone_files(published, place, datasets=None if chosen is None else sorted(chosen), progress=progress or no_progress)
    atlas = RaggedAtlas.open(place)
    if chosen is None:
        return atlas
    kept = {record.root_hash for record in published_files(published).head.snapshots}
    # An earlier call may have come further, in the order of these steps.
    if any(record.root_hash == view.record.root_hash for record in atlas.list_versions()):
        atlas.restore(view.version)
    for record in {record.uid: record for record in atlas._opened.dataset_records().records}.values():
        if record.uid not in chosen:
            atlas.drop_dataset(record.uid)
    if uids is not None:
        others = [cells for cells, _ in _select(atlas._opened, uids, other=True)]
        if sum(map(len, others)):
            atlas.delete_cells(uids=pa.table({"uid": pa.concat_arrays(others)}))
    for version in [record.version for record in atlas.list_versions() if record.root_hash in kept]:
        atlas.drop_snapshot(version)
    atlas.snapshot(view.record.label)
    atlas.gc(dry_run=False, grace=dt.timedelta(0))
    return atlas


def _open_datasets(source: Any, *, linked: bool) -> Any:  # noqa: ANN401  (anything that can be added)
    """Return what can be added with each `Dataset` of another atlas opened; with `linked` as it is stored in a published atlas."""
    if isinstance(source, list | tuple):
        return [_open_datasets(one, linked=linked) for one in source] if any(map(_is_dataset, source)) else source
    if _is_dataset(source):
        return source.linkable() if linked else source.source()
    return source


def _is_dataset(source: object) -> bool:
    # Not by its class, whose module most calls do without.
    return hasattr(source, "linkable")


def _select(catalog: "Catalog", uids: pa.Array, *, other: bool = False) -> Iterator[tuple[pa.Array, pa.Array]]:
    """Yield uid and dataset of the cells with some uids, or of the others, batch by batch."""
    for batch in catalog.tables.batches(CELLS, ["uid", "dataset_uid"]):
        found = pc.is_in(batch.column("uid"), pa.array(uids, pa.string()))
        rows = batch.filter(pc.invert(found) if other else found)
        yield rows.column("uid"), rows.column("dataset_uid")


def find_query(cells: Any) -> "Query | None":  # noqa: ANN401  (anything that can be read)
    """Return the cells of an atlas as a query: of its newest snapshot, of a view, or as given; None for files and other objects."""
    from raggedatlas.query.query import Query

    if isinstance(cells, str | os.PathLike):
        from raggedatlas.catalog.published import serves_atlas

        if not isinstance(cells, Location) and serves_atlas(os.fspath(cells)):
            return open(cells).query()
        place = as_path(cells)
        # A folder is an atlas if it has the tables of one.
        is_file = place.is_web if isinstance(place, Location) else not place.is_dir()
        if is_file or not is_atlas(Location.of(place)):
            return None
        cells = RaggedAtlas.open(place)
    if isinstance(cells, RaggedAtlas):
        known = cells.list_versions()
        if not known:
            raise NotFoundError(f"{cells.uri} has no snapshot to show; call atlas.snapshot() first.")
        cells = cells.checkout(known[-1].version)
    if isinstance(cells, AtlasView):
        cells = cells.query()
    return cells if isinstance(cells, Query) else None

"""The write protocol of `add`: unreferenced arrays first; then columns; features, layouts and cells in parallel; records last."""

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raggedatlas.catalog.assets import (
    Commit,
    commit_records,
    delete_cells_of_datasets,
    group_by_dataset,
    read_lease,
    read_records,
    release_lease,
    take_lease,
    this_process,
)
from raggedatlas.catalog.catalog import CELLS, DATASETS, LAYOUTS, Catalog
from raggedatlas.catalog.cells import add_cell_columns, cell_rows, frame_file
from raggedatlas.catalog.layouts import ensure_layouts, feature_set, register_features
from raggedatlas.errors import AtlasError, SourceError, StoreError, WorkersError
from raggedatlas.ingest.columns import column_values
from raggedatlas.ingest.group_writer import WrittenElements, WrittenGroup, matrix_facts, specs_json
from raggedatlas.ingest.options import AddOptions, IngestOptions
from raggedatlas.ingest.plan import ColumnOrders, IngestPlan, NewGroup, plan_cells
from raggedatlas.ingest.staging import (
    Opener,
    PlanAhead,
    StagedDataset,
    check_staged_duplicates,
    plan_source,
    recheck_duplicates,
    stage,
)
from raggedatlas.model.arguments import Progress, no_progress
from raggedatlas.model.frames import INDEX
from raggedatlas.model.ids import new_uids
from raggedatlas.model.records import BundleFacts, DatasetFacts, DatasetRecord, LayerFacts
from raggedatlas.model.reports import AddReport, Done, IngestReport, Status
from raggedatlas.model.spaces import PointerKind, pointer_field
from raggedatlas.store.executors import Workers, in_order, run_tasks
from raggedatlas.store.runtime import BackgroundWriter, warnings_as
from raggedatlas.store.sql import equals
from raggedatlas.store.upkeep import compact

COMMIT_CELLS = 500_000
"""Small datasets share a commit until they have this many cells in total."""


COMMIT_DATASETS = 100
"""Maximum number of datasets in one commit, whose feature names are all kept in memory."""

MERGE_EVERY = 16
"""After so many more records, `add` merges the fragments of small tables."""


@contextlib.contextmanager
def open_progress(progress: "Progress | bool | None", title: str) -> Iterator[Progress]:
    """Yield a progress callback: the one given, none for False, or else a bar that is drawn only on a terminal."""
    if callable(progress) or progress is False:
        yield progress or no_progress
        return
    # A notebook without ipywidgets gets the bar of a terminal; tqdm warns of that.
    with warnings_as("ignore", message="IProgress not found"):
        from tqdm.auto import tqdm
    # `disable=None` draws the bar on a terminal only.
    with tqdm(desc=title, unit="cell", unit_scale=True, disable=None, leave=False) as meter:

        def show(step: str, done: int, total: int) -> None:
            if step in ("block", "sources"):
                meter.unit = "source" if step == "sources" else "cell"
                meter.total = total
                # `done` is absolute; the difference is negative when the next source begins, which tqdm accepts.
                meter.update(done - meter.n)
            else:
                meter.set_postfix_str(step)

        yield show


Report = TypeVar("Report", bound=AddReport)


class Attachment(ABC, Generic[Report]):
    """What is attached to cells by one registry row: a result, geometry, transcripts; `attach` brings it into the atlas.

    A subclass says how one kind is planned, staged and committed. Datasets go the same way in `add_sources`, many at a time:
    there sources are planned and flushed in the background, and share a commit.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    options : AddOptions
        The caller's choices.
    """

    uid: str

    def __init__(self, catalog: Catalog, options: AddOptions) -> None:
        self.catalog, self.options = catalog, options

    @abstractmethod
    def plan(self) -> bool:
        """Decide what is written and set `uid`; refuse what can be refused. Return False where duplicates are skipped."""

    @abstractmethod
    def stage(self, progress: Progress) -> None:
        """Write what is not visible yet."""

    @abstractmethod
    def commit(self, progress: Progress) -> Done:
        """Make all of it visible by one last write; skipped where another process has added the same since the plan."""

    @abstractmethod
    def discard(self) -> None:
        """Remove what did not become visible; what did although an error was raised stays."""

    @abstractmethod
    def finish(self) -> None:
        """Remove what is replaced."""

    @abstractmethod
    def report(self, status: Status) -> Report:
        """Return the report of what was done, or would be done."""


def attach(attachment: Attachment[Report], progress: Progress | bool | None = None) -> Report:  # noqa: FBT001
    """Add what is attached to cells: plan, stage, commit.

    A process killed on the way leaves nothing visible; the call can be run again, and `repair` and `gc` free what was left.

    Parameters
    ----------
    attachment : Attachment
        What is added.
    progress : callable, bool or None
        A callback; None draws a bar on a terminal, False draws nothing.

    Raises
    ------
    AtlasError
        As the attachment refuses; and if another process adds the same meanwhile. The atlas is as it was.
    """
    catalog, options = attachment.catalog, attachment.options
    catalog.require_tip("add()")
    with open_progress(progress, options.name or "add") as callback:
        callback("plan", 0, 1)
        if not attachment.plan():
            return attachment.report("skipped")
        if options.dry_run:
            return attachment.report("dry run")
        try:
            take_lease(catalog, attachment.uid)
            callback("lease", 1, 1)
            attachment.stage(callback)
            done = attachment.commit(callback)
            callback("record", 1, 1)
        except BaseException:
            # Where the tables cannot be read, `repair` will remove it.
            with contextlib.suppress(AtlasError):
                attachment.discard()
            raise
        # What is left of a replaced asset or a skipped one, and a lease, do no harm; `repair` removes them.
        with contextlib.suppress(AtlasError):
            (attachment.discard if done == "skipped" else attachment.finish)()
        with contextlib.suppress(StoreError):
            release_lease(catalog, attachment.uid)
        callback("done", 1, 1)
        return attachment.report(done)


class AttachedColumns(Protocol):
    """Data that becomes visible together with a dataset: additional cell columns, and a last step before its record."""

    def columns(self) -> Mapping[str, tuple[pa.Field, pa.Array]]:
        """Return cell columns with their values, in the order of the source's cells."""
        ...

    def before_record(self, uid: str) -> None:
        """Write data that the record of the dataset makes visible."""
        ...


def add_sources(
    catalog: Catalog, sources: Iterable[Opener], options: IngestOptions, progress: Progress = no_progress,
    *, attached: AttachedColumns | None = None, executor: Executor | Workers | None = None,
) -> list[IngestReport]:  # fmt: skip
    """Add sources in order; small sources share a commit.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    sources : iterable of Opener
        Callables that open the sources.
    options : IngestOptions
        The caller's choices.
    progress : callable
        Called at every step.
    attached : AttachedColumns or None
        Data that is committed together with the only source.
    executor : Executor, Workers or None
        Its workers read the sources and write their arrays; this process commits.

    Returns
    -------
    list of IngestReport
        One per source, in order.

    Raises
    ------
    AtlasError
        The error of a refused single source, or a summary if some of several were refused; the others are in the atlas.
    """
    adding = _AddState(list(sources))
    try:
        if executor is None:
            _add_here(catalog, adding, options, progress, attached)
        else:
            _add_by_workers(catalog, adding, options, progress, executor)
    except BaseException:
        # The contexts inside have ended their threads, so nothing is written below these uids any more.
        _discard(catalog, adding.staged)
        raise
    if adding.refused and len(adding.openers) == 1:
        raise adding.refused[0] from adding.refused[0].__cause__
    if adding.refused:
        lines = "; ".join(str(error) for error in adding.refused)
        raise SourceError(
            f"{len(adding.refused)} of {len(adding.openers)} sources were refused, the other {len(adding.reports)} are in the atlas: {lines}"
        )
    return adding.reports


def _add_here(
    catalog: Catalog, adding: "_AddState", options: IngestOptions, progress: Progress, attached: AttachedColumns | None
) -> None:
    """Stage the sources in this process."""
    staged = adding.staged
    with PlanAhead(catalog, adding.openers, options) as plan_ahead, ThreadPoolExecutor(1, "raggedatlas-flush") as pool:
        while adding.number < len(adding.openers):
            # The source before this one may still be flushed meanwhile; `settle` waits for it.
            done = _stage(catalog, plan_ahead, adding.number, staged, options, progress)
            if adding.settle():
                if adding.take(done):
                    adding.flushing = pool.submit(staged[-1].finish)
            elif isinstance(done, StagedDataset):
                # It was staged to be committed together with a dataset that failed, so it is staged again.
                done.abandon()
            # If the last source fails, the rest may be too small for a commit.
            if _is_full([one.plan for one in staged]) and adding.settle():
                adding.close(_commit(catalog, staged, options, progress, attached))
        adding.settle()
    if staged:
        adding.close(_commit(catalog, staged, options, progress, attached))


def _add_by_workers(
    catalog: Catalog, adding: "_AddState", options: IngestOptions, progress: Progress, executor: Executor | Workers
) -> None:
    """Commit sources that workers have staged, in order."""
    with WorkerStaging(catalog, adding.openers, options, executor) as staging, closing(staging.outcomes()) as outcomes:
        for done in outcomes:
            judged = staging.judge(done, adding.staged) if isinstance(done, StagedDataset) else done
            if isinstance(done, StagedDataset) and not isinstance(judged, StagedDataset):
                done.abandon()
            adding.take(judged)
            progress("sources", adding.number, len(adding.openers))
            if adding.number == len(adding.openers) or _is_full([one.plan for one in adding.staged]):
                adding.close(_commit(catalog, adding.staged, options, progress) if adding.staged else [])


Outcome = StagedDataset | IngestReport | AtlasError
"""Outcome for a source: staged or committed; skipped; or refused."""


@dataclass
class _AddState:
    """State of one `add` of several sources.

    Parameters
    ----------
    openers : list of Opener
        All sources.
    reports : list of IngestReport
        Reports of sources that were not refused.
    staged : list of StagedDataset
        Datasets that wait for the next commit; the last may still be flushed.
    refused : list of AtlasError
        Errors of the refused sources.
    number : int
        Index of the next source.
    origins : dict of str to int
        Uid of a staged dataset -> number of its source.
    flushing : Future or None
        The last staged source, whose last rows a thread writes while the next source is read.
    """

    openers: list[Opener]
    reports: list[IngestReport] = field(default_factory=list)
    staged: list[StagedDataset] = field(default_factory=list)
    refused: list[AtlasError] = field(default_factory=list)
    number: int = 0
    origins: dict[str, int] = field(default_factory=dict)
    flushing: Future[None] | None = None

    def settle(self) -> bool:
        """Wait for the last staged source, and remove it if it failed; return whether it succeeded."""
        running, self.flushing = self.flushing, None
        lost = None if running is None else running.exception()
        # Only an `AtlasError` concerns one source; an interrupt or a defect ends the call.
        if lost is not None and not isinstance(lost, AtlasError):
            raise lost
        if lost is not None:
            # What is flushed is the last of both lists, because `settle` comes before the next `take`.
            self.staged.pop()
            self.reports.pop()
            self.refused.append(self.openers[self.number - 1].explain(lost))
        return lost is None

    def take(self, done: Outcome) -> bool:
        """Record the outcome of the next source; return whether it is staged."""
        self.number += 1
        if isinstance(done, AtlasError):
            self.refused.append(self.openers[self.number - 1].explain(done))
            return False
        self.reports.append(done if isinstance(done, IngestReport) else done.report)
        if isinstance(done, StagedDataset):
            self.staged.append(done)
            self.origins[done.plan.uid] = self.number - 1
        return isinstance(done, StagedDataset)

    def close(self, outcomes: Sequence[Outcome]) -> None:
        """Record the outcomes of a commit."""
        for one, outcome in zip(self.staged, outcomes, strict=True):
            # Reports of skipped sources lie between those of this commit, so positions do not agree.
            at = next(i for i, report in enumerate(self.reports) if report is one.report)
            if isinstance(outcome, AtlasError):
                del self.reports[at]
                self.refused.append(self.openers[self.origins[one.plan.uid]].explain(outcome))
            else:
                self.reports[at] = outcome.report if isinstance(outcome, StagedDataset) else outcome
        self.staged.clear()


def _stage(
    catalog: Catalog,
    plan_ahead: PlanAhead,
    number: int,
    staged: Sequence[StagedDataset],
    options: IngestOptions,
    progress: Progress,
) -> Outcome:
    """Stage one source, or return its error; the next source is planned in the background if it belongs to the same commit."""
    progress("plan", 0, 1)
    coming = [one.plan for one in staged]
    try:
        planned = plan_ahead.take(number, coming)
        then = [*coming, planned.plan]
        meanwhile = contextlib.nullcontext() if _is_full(then) else plan_ahead.meanwhile(number + 1, then)
        return stage(catalog, planned, options, progress, staged=staged, meanwhile=meanwhile)
    except AtlasError as error:
        return error


def _is_full(plans: Sequence[IngestPlan]) -> bool:
    return len(plans) >= COMMIT_DATASETS or sum(plan.schema.n_cells for plan in plans) >= COMMIT_CELLS


def _discard(catalog: Catalog, staged: Sequence[StagedDataset]) -> None:
    """Remove staged datasets that did not become visible; if the datasets cannot be read, `repair` will do so."""
    with contextlib.suppress(AtlasError):
        # A commit that raised may have been done although its answer was lost; its datasets must stay.
        visible = {record.uid for record in read_records(catalog)}
        for uid in [s.plan.uid for s in staged if s.plan.uid not in visible]:
            catalog.tables.delete(CELLS, equals("dataset_uid", uid))
            catalog.arrays.child(uid).delete_prefix()


def _commit(
    catalog: Catalog,
    staged: Sequence[StagedDataset],
    options: IngestOptions,
    progress: Progress,
    attached: AttachedColumns | None = None,
) -> list[Outcome]:
    """Make staged sources visible, except those that another process added first; return the outcome of each."""
    by_space: dict[str, list[NewGroup]] = {}
    for group in (written.group for one in staged for written in one.groups):
        by_space.setdefault(group.space.name, []).append(group)
    for groups in by_space.values():
        catalog.add_space(groups[0].space)
    further = {} if attached is None else attached.columns()
    pointers = [
        pointer_field(w.group.pointer, w.group.space.kind, w.group.space.name) for s in staged for w in s.groups
    ]
    pointers += [field for field, _ in further.values()]
    # Before the cells: Lance refuses rows with a column that the table lacks.
    add_cell_columns(
        catalog, [c.column for s in staged for c in s.plan.columns], list({p.name: p for p in pointers}.values())
    )
    progress("columns", 1, 1)
    # Cells are written on a background thread, features and layouts on this one: they are independent, and invisible before the records.
    with BackgroundWriter() as meanwhile:
        meanwhile(partial(_write_cells, catalog, staged, further))
        for space, groups in by_space.items():
            rows = [group.features.rows for group in groups if group.features is not None]
            if rows:
                register_features(catalog, space, *rows)
        progress("features", 1, 1)
        for groups in by_space.values():
            _write_layouts(catalog, groups)
        progress("layouts", 1, 1)
    progress("cells", 1, 1)
    if attached is not None:
        attached.before_record(staged[0].plan.uid)
    outcomes: list[Outcome] = []
    n_records: list[int] = []

    def choose(old: list[DatasetRecord]) -> Commit:
        # Called again after a lost race, but not when an earlier attempt turns out to be committed: `outcomes` then
        # still has what that attempt chose.
        outcomes[:] = _recheck_all(old, staged, options)
        kept = [one for one in outcomes if isinstance(one, StagedDataset)]
        replaces = frozenset(uid for one in kept for uid in one.replaces)
        records = tuple(record for one in kept for record in _records(one))
        n_records[:] = [len(old), len(old) + len(records)]
        return Commit(records, replaces)

    commit_records(catalog, choose)
    progress("records", 1, 1)
    _discard(
        catalog, [one for one, outcome in zip(staged, outcomes, strict=True) if not isinstance(outcome, StagedDataset)]
    )
    for one in outcomes:
        if isinstance(one, StagedDataset):
            # The dataset is visible now. A remaining lease does no harm, and `repair` removes the rest of replaced datasets.
            with contextlib.suppress(AtlasError):
                delete_cells_of_datasets(catalog, one.replaces)
            with contextlib.suppress(StoreError):
                release_lease(catalog, one.plan.uid)
    _merge_fragments(catalog, by_space, n_records)
    progress("done", 1, 1)
    return outcomes


def _merge_fragments(catalog: Catalog, spaces: Iterable[str], n_records: Sequence[int]) -> None:
    """Merge what commits have left in small tables that every `add` reads, which would take each longer than the last.

    Versions that a snapshot names, or a reader has open, stay as they are.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    spaces : iterable of str
        Feature spaces of what was added.
    n_records : sequence of int
        Records before and after the commit; one in `MERGE_EVERY` is followed by a merge.
    """
    if len({n // MERGE_EVERY for n in n_records}) < 2:
        return
    for name in (DATASETS, LAYOUTS, *(catalog.space(space).registry for space in spaces)):
        # It only saves time: others may be writing, or a purge may have begun.
        with contextlib.suppress(AtlasError):
            if catalog.tables.has(name) and len(catalog.tables.open(name).get_fragments()) >= MERGE_EVERY:
                compact(catalog.tables, name)


def _recheck_all(
    old: Sequence[DatasetRecord], staged: Sequence[StagedDataset], options: IngestOptions
) -> list[Outcome]:
    """Check all sources of a commit for duplicates among the datasets that they are committed to."""
    datasets = group_by_dataset(old)
    names = {records[0].name for records in datasets.values()}
    outcomes: list[Outcome] = []
    for one in staged:
        outcome = recheck_duplicates(datasets, one, options, names)
        if isinstance(outcome, StagedDataset):
            names.add(outcome.plan.name)
        outcomes.append(outcome)
    return outcomes


def _write_cells(
    catalog: Catalog, staged: Sequence[StagedDataset], further: Mapping[str, tuple[pa.Field, pa.Array]]
) -> None:
    schema = catalog.tables.schema(CELLS)
    catalog.tables.append(CELLS, pa.concat_tables([_cells(schema, s, further) for s in staged]))


def _write_layouts(catalog: Catalog, groups: Sequence[NewGroup]) -> None:
    lists = {group.layout: group.stored_uids for group in groups if group.features is not None}
    if lists:
        registry = catalog.tables.read(groups[0].space.registry, ["uid", "global_index"])
        # New features have no index before `reindex_registry`; `ensure_layouts` stores -1 as null.
        known, index = registry.column("uid").combine_chunks(), registry.column("global_index").fill_null(-1).to_numpy()
        rows = {uid: pc.index_in(pa.array(uids, pa.string()), value_set=known) for uid, uids in lists.items()}
        ensure_layouts(catalog, [(uids, index[rows[uid].to_numpy()]) for uid, uids in lists.items()])


def _cells(schema: pa.Schema, staged: StagedDataset, further: Mapping[str, tuple[pa.Field, pa.Array]]) -> pa.Table:
    plan = staged.plan
    n = plan.schema.n_cells
    columns: dict[str, Any] = {
        "uid": new_uids(n),
        "dataset_uid": pa.repeat(plan.uid, n),
        "cell_name": plan.cells.column(INDEX).cast(pa.string()),
    }
    for column in plan.columns:
        # The type of the column can differ from the plan: it became text, or another writer added it first.
        columns[column.column.stored] = column_values(column, plan.cells, schema.field(column.column.stored).type)
    for written in staged.groups:
        columns[written.group.pointer] = pointer_array(written, n)
    columns |= {name: values for name, (_, values) in further.items()}
    return cell_rows(schema, columns, n)


def pointer_array(written: WrittenGroup, n_cells: int) -> pa.Array:
    """Build the pointer column of one group: one struct per cell, null where the cell has no row in it.

    Parameters
    ----------
    written : WrittenGroup
        The group.
    n_cells : int
        Cells of the dataset.
    """
    row = np.full(n_cells, -1, np.int64)
    row[np.arange(written.n_rows) if written.present is None else written.present] = np.arange(written.n_rows)
    missing = row < 0
    # Masked cells are looked up too, so they need an index that exists.
    at = np.where(missing, 0, row)
    group = pa.repeat(written.path, n_cells)
    if written.indptr is None:
        return pa.StructArray.from_arrays([group, pa.array(at)], ["zarr_group", "position"], mask=pa.array(missing))
    # Without rows `indptr` is [0], and `at + 1` would be beyond it.
    bounds = written.indptr if written.n_rows else np.zeros(2, np.int64)
    parts = [group, pa.array(bounds[at]), pa.array(bounds[at + 1]), pa.array(at)]
    return pa.StructArray.from_arrays(parts, ["zarr_group", "start", "end", "zarr_row"], mask=pa.array(missing))


def _records(staged: StagedDataset) -> list[DatasetRecord]:
    """Return the records of the groups; the first one also lists the other elements and frames."""
    return [_record(staged, written, is_first=n == 0) for n, written in enumerate(staged.groups)]


def _record(staged: StagedDataset, written: WrittenGroup, *, is_first: bool) -> DatasetRecord:
    plan, bundle = staged.plan, staged.bundle
    extras, frames = (staged.extras, dict(staged.frames)) if is_first else (WrittenElements(), {})
    places = {name: frame_file(plan.uid, name) for name in frames}
    left_out = {
        report.name: plan.schema.left_out.get(report.name, report.note)
        for report in plan.element_reports
        if report.fate == "left out"
    }
    return DatasetRecord(
        uid=plan.uid,
        zarr_group=written.path,
        feature_space=written.group.space.name,
        n_cells=written.n_rows,
        layout_uid=written.group.layout,
        pointer=written.group.pointer,
        name=plan.name,
        source=plan.schema.uri,
        content_hash=staged.content_hash,
        n_features=written.group.width,
        n_entries=written.n_entries,
        layers=list(written.layers),
        arrays=specs_json(written.specs | extras.specs),
        checksums=json.dumps(written.checksums | extras.checksums, sort_keys=True),
        facts=DatasetFacts(
            format=plan.schema.format,
            n_cells=plan.schema.n_cells,
            layers={
                name: LayerFacts(key=p.info.key, features=p.info.features, **matrix_facts(p.info))
                for name, p in written.layers.items()
            },
            left_out=left_out,
            extras=extras.facts,
            colors={column: dict(colors) for column, colors in staged.colors.items()},
            column_order=written.group.column_order,
            feature_set=written.group.feature_set,
            cell_names=plan.cell_names,
            frames=frames,
            bundle=None
            if not (is_first and bundle.spans)
            else BundleFacts(
                n_bytes=bundle.n_bytes,
                sha256=bundle.sha256,
                frames={name: bundle.spans[path] for name, path in places.items() if path in bundle.spans},
            ),
        ).to_json(),
    )


T = TypeVar("T")


_CALL = "call"


@dataclass(frozen=True)
class _HashFeatures:
    """Hashes the names of the features of a source's matrices, in no order; identifying them would take as long as writing few cells."""

    opener: Opener

    def __call__(self) -> frozenset[str]:
        try:
            source = self.opener()
        except AtlasError:
            return frozenset()  # `_StageSource` refuses it.
        with closing(source):
            keys = {info.features for info in source.describe().matrices if info.features}
            tables = [source.features(key).column(INDEX).cast(pa.string()).to_pylist() for key in sorted(keys)]
        return frozenset(feature_set([text or "" for text in names]) for names in tables)


@dataclass(frozen=True)
class _FindColumnOrder:
    """Finds out in which order a source would store its features."""

    catalog: Catalog
    opener: Opener
    options: IngestOptions

    def __call__(self) -> ColumnOrders:
        try:
            planned = plan_source(self.catalog, self.opener, self.options, ())
        except AtlasError:
            return {}  # `_StageSource` refuses it.
        planned.source.close()
        groups = [g for g in planned.plan.groups if g.features is not None and g.space.kind is PointerKind.SPARSE]
        return {g.feature_set: g.stored_uids for g in groups}


@dataclass(frozen=True)
class _StageSource:
    """Writes the arrays of a source, which nothing refers to yet, below a uid that every attempt draws anew."""

    catalog: Catalog
    opener: Opener
    options: IngestOptions
    orders: ColumnOrders = field(repr=False)
    owner: Mapping[str, Any]

    def __call__(self) -> StagedDataset | IngestReport | AtlasError:
        try:
            source = plan_source(self.catalog, self.opener, self.options, (), self.orders)
            done = stage(
                self.catalog, source, self.options, no_progress, staged=(), meanwhile=nullcontext(), owner=self.owner
            )
            if isinstance(done, StagedDataset):
                done.finish()
                return replace(done, report=self._noted(done.report))
            return self._noted(done)
        except WorkersError:
            raise
        except AtlasError as error:
            return self.opener.explain(error)

    def _noted(self, report: IngestReport) -> IngestReport:
        return replace(report, notes=(*report.notes, *self.opener.notes))


class WorkerStaging:
    """Sources on their way through workers.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    openers : sequence of Opener
        Open the sources.
    options : IngestOptions
        The caller's choices.
    executor : Executor or Workers
        Whose workers write.
    """

    def __init__(
        self, catalog: Catalog, openers: Sequence[Opener], options: IngestOptions, executor: Executor | Workers
    ) -> None:
        self._catalog, self._openers, self._options, self._executor = catalog, openers, options, executor
        self._owner = {**this_process(), _CALL: uuid4().hex}
        lost = (
            "Nothing of sources that were not committed is visible; add() with on_duplicate='skip' goes on from there."
        )
        self._run: dict[str, Any] = {"place": catalog.location, "lost": lost}

    def __enter__(self) -> "WorkerStaging":
        """Start with nothing staged."""
        return self

    def __exit__(self, *error: object) -> None:
        """Remove what workers wrote for this call and what was not committed."""
        with suppress(AtlasError):
            visible = {record.uid for record in read_records(self._catalog)}
            # Found by lease, because attempts of lost workers have uids that never came back.
            for uid in set(self._catalog.arrays.list_children()) - visible:
                if (read_lease(self._catalog, uid) or {}).get(_CALL) == self._owner[_CALL]:
                    self._catalog.arrays.child(uid).delete_prefix()

    def outcomes(self) -> Generator[StagedDataset | IngestReport | AtlasError, None, None]:
        """Yield the outcome of each source, in order."""
        return in_order(run_tasks(self._tasks(), self._executor, **self._run))

    def _tasks(self) -> Iterator[_StageSource]:
        """Send each source with the orders that its features have in sources before it, so that they get one layout."""
        several = len(self._openers) > 1 and self._options.column_order == "detected"
        sets = self._all([_HashFeatures(opener) for opener in self._openers] if several else [])
        first: dict[str, int] = {}
        # `setdefault` gives the first source with a set, so `shared` has the sets that come again.
        shared = {s for number, own in enumerate(sets) for s in own if first.setdefault(s, number) != number}
        leaders = sorted({first[names] for names in shared})
        found = self._all([_FindColumnOrder(self._catalog, self._openers[number], self._options) for number in leaders])
        orders = dict(zip(leaders, found, strict=True))
        for number, opener in enumerate(self._openers):
            known: dict[str, Sequence[str]] = {}
            for leader in sorted({first[s] for s in sets[number] if first[s] < number} if several else ()):
                # The earliest source wins, as when sources are added one after the other.
                known = {**orders[leader], **known}
            yield _StageSource(self._catalog, opener, self._options, known, self._owner)

    def _all(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        return list(in_order(run_tasks(tasks, self._executor, **self._run)))

    def judge(self, done: StagedDataset, staged: Sequence[StagedDataset]) -> StagedDataset | IngestReport | AtlasError:
        """Judge a staged source by those that are to be committed together with it, which its worker did not know.

        Parameters
        ----------
        done : StagedDataset
            The source.
        staged : sequence of StagedDataset
            Those before it.
        """
        try:
            # The worker wrote the lease: one that cannot be read here is in another place.
            if not read_lease(self._catalog, done.plan.uid):
                raise WorkersError(
                    f"A worker wrote {done.plan.name!r} to a place that is not {self._catalog.location.uri} here, though it has the same "
                    "address; put the atlas in a folder or an object store that all workers share."
                )
            duplicate = check_staged_duplicates(done, staged, self._options)
            if duplicate is not None:
                return duplicate
            plan = plan_cells(self._catalog, done.plan, self._options, [one.plan for one in staged])
        except WorkersError:
            raise
        except AtlasError as error:
            return error
        return _planned(done, plan)


def _planned(done: StagedDataset, plan: IngestPlan) -> StagedDataset:
    """Return a staged source the name and columns of a plan."""
    before = {column.column.stored: column.source for column in done.plan.columns}
    now = {column.source: column.column.stored for column in plan.columns}
    # Keyed by stored name, which other sources of the commit may have changed.
    colors = {now[before[stored]]: values for stored, values in done.colors.items()}
    report = replace(done.report, columns=plan.column_reports)
    return replace(done, plan=replace(plan, name=done.plan.name), colors=colors, report=report).renamed(plan.name)

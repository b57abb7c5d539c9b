"""Add whatever can be added: files and objects with cells, and what is attached to cells.

Unreferenced arrays are written first; then columns; features, layouts and cells side by side; records last.
"""

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Generic, Protocol, TypeVar
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raggedatlas.catalog.assets import (
    Commit,
    array_columns,
    commit_records,
    delete_cells_of_datasets,
    find_kind,
    group_by_dataset,
    read_lease,
    release_lease,
    take_lease,
    this_process,
    without_record,
)
from raggedatlas.catalog.catalog import CELLS, DATASETS, LAYOUTS, Catalog
from raggedatlas.catalog.cells import add_cell_columns, cell_rows, frame_file
from raggedatlas.catalog.layouts import ensure_layouts, feature_set, register_features, registry_rows
from raggedatlas.errors import ArgumentError, AtlasError, ConflictError, SourceError, StoreError, WorkersError
from raggedatlas.formats.registry import list_left_out, list_sources
from raggedatlas.ingest.columns import column_values
from raggedatlas.ingest.group_writer import WrittenGroup, matrix_facts
from raggedatlas.ingest.options import AddOptions, IngestOptions, read_options
from raggedatlas.ingest.plan import ColumnOrders, IngestPlan, plan_cells
from raggedatlas.ingest.staging import (
    Opener,
    StagedDataset,
    find_replaced,
    plan_source,
    recheck_duplicates,
    skip,
    stage,
)
from raggedatlas.model.arguments import Progress, no_progress
from raggedatlas.model.frames import INDEX
from raggedatlas.model.ids import new_uids
from raggedatlas.model.protocols import Source
from raggedatlas.model.records import BundleFacts, DatasetFacts, DatasetRecord, LayerFacts
from raggedatlas.model.reports import AddReport, Done, IngestReport, Status
from raggedatlas.model.shown import ShownList
from raggedatlas.model.spaces import pointer_field
from raggedatlas.store.executors import Workers, in_order, run_tasks
from raggedatlas.store.location import Location, as_path, with_options
from raggedatlas.store.runtime import BackgroundWriter, prefetch_map, release_unused_memory, warnings_as
from raggedatlas.store.sources import recorded_address
from raggedatlas.store.sql import equals
from raggedatlas.store.upkeep import MANY_FRAGMENTS, compact

COMMIT_CELLS = 100_000
"""Small datasets share a commit until they have this many cells in total."""


COMMIT_DATASETS = 100
"""Maximum number of datasets in one commit, whose feature names are all kept in memory."""


_ATTEMPTS = 5
"""How often cells are written before others that take columns away are given way."""


def add(
    catalog: Catalog,
    source: Any,  # noqa: ANN401  (anything that can be added)
    choices: Mapping[str, Any],
    progress: Progress | bool | None = None,  # noqa: FBT001  (passed on as the caller gave it)
    executor: Executor | Workers | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> AddReport | list[IngestReport]:
    """Add whatever `source` is.

    A sequence adds its members, and a folder that is no source itself the files in it; both return a list of reports. A
    folder of results is a model's result; zarr-vectors stores, files of shapes or points, and elements of SpatialData
    are geometry.

    `choices` are the keyword arguments of `IngestOptions`. `progress` None draws a bar on a terminal, False draws
    nothing. The workers of `executor` read files and write their arrays. `storage_options` are the credentials and
    endpoint of files in an object store, by default those of the atlas.
    """
    catalog.require_writable("add()")
    # A file in an object store is usually near the atlas; the options of a local atlas are those of its files.
    storage_options = storage_options or catalog.location.storage_options
    # Before `open_source`, which takes a zarr-vectors store for an AnnData Zarr folder: both have a `zarr.json`.
    source = with_options(source, storage_options)
    kind = find_kind(source)
    if kind is not None:
        if executor is not None:
            raise ArgumentError(
                f"add() takes executor= for files of cells; of the kind {kind.noun!r} they are added without."
            )
        made: Attachment[AddReport] = resolve_name(kind.attachment)(catalog, source, choices)
        return attach(made, progress)
    catalog = catalog.session("add()")
    options = read_options(IngestOptions, choices, "add()")
    openers, several = _openers(source, storage_options)
    if several and options.name is not None:
        raise SourceError(
            f"name={options.name!r} is one name for {len(openers)} sources; leave it out, and each takes its file's name."
        )
    for opener in openers:
        opener.curate, opener.genome, opener.linked = options.curate, options.genome, not options.copy
    if options.copy is not True:
        # Options to reach a file are not stored.
        for place in (opener.place for opener in openers):
            if isinstance(place, Location):
                catalog.sources.remember(recorded_address(place, catalog.location), place)
    with open_progress(progress, options.name or "add") as callback:
        reports = add_sources(catalog, openers, options, callback, executor=executor)
    # `add_sources` raises where a source is refused, so there is one report for each opener here.
    # Workers that are threads share the opener, and their reports have its notes already.
    reports = [
        replace(r, notes=(*r.notes, *(note for note in o.notes if note not in r.notes)))
        for r, o in zip(reports, openers, strict=True)
    ]
    return ShownList(reports) if several else reports[0]


def _openers(source: Any, storage_options: Mapping[str, str]) -> tuple[list[Opener], bool]:  # noqa: ANN401  (anything that can be added)
    if isinstance(source, list | tuple) and not hasattr(source, "describe"):
        parts: Sequence[Any] = source
        openers = [opener for part in parts for opener in _openers(part, storage_options)[0]]
        if not openers:
            raise SourceError("add() got an empty sequence; pass at least one source.")
        return openers, True
    if isinstance(source, str | os.PathLike):
        path = as_path(source, storage_options)
        if isinstance(path, Path):
            is_folder = path.is_dir()
        else:
            # A folder in an object store that is a source itself is not listed.
            is_source = path.is_web or path.suffix or any((path / name).is_file() for name in ("zarr.json", ".zgroup"))
            is_folder = not is_source and path.is_dir()
        if is_folder:
            files = list_sources(path)
            if files != [path]:
                left = list_left_out(path, files)
                more = f", and {len(left) - 10:,} more" if len(left) > 10 else ""
                note = f"of the folder, {', '.join(left[:10])}{more} are left out: no files of cells; add others by their own path"
                # A list also for one file: the type of the answer depends on the argument alone.
                return [Opener(file, notes=(note,) if left and file == files[0] else ()) for file in files], True
        return [Opener(path)], False
    return [Opener(source)], False


@contextmanager
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


T = TypeVar("T")
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

    A process killed on the way leaves nothing visible; the call can be run again, and `repair` and `gc` free what was
    left. After an error, also if another process adds the same meanwhile, the atlas is as it was. `progress` None draws
    a bar on a terminal, False draws nothing.
    """
    options = attachment.options
    catalog = attachment.catalog = attachment.catalog.session("add()")
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
            # Where the tables cannot be read, `repair` will remove it. A commit whose answer was lost may be newer than the session.
            with suppress(AtlasError):
                catalog.tables.refresh()
                attachment.discard()
            raise
        # What is left of a replaced asset or a skipped one, and a lease, do no harm; `repair` removes them.
        with suppress(AtlasError):
            (attachment.discard if done == "skipped" else attachment.finish)()
        with suppress(StoreError):
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
    """Add sources in order and return one report for each; small sources share a commit.

    `attached` is committed together with the only source. The workers of `executor` read the sources and write their
    arrays; this process commits. The error of a refused single source is raised as it is; if some of several are
    refused, a summary is raised and the others are in the atlas.
    """
    openers = list(sources)
    outcomes: dict[int, Outcome] = {}
    # Staged sources that wait for the next commit, by number; a thread may still be writing the last rows of the latest.
    waiting: dict[int, StagedDataset] = {}

    def finish(number: int) -> None:
        try:
            waiting[number].finish()
        except AtlasError as error:
            outcomes[number] = error

    if executor is None:
        staging = _stage_here(catalog, openers, options, progress)
    else:
        staging = _stage_by_workers(catalog, openers, options, executor)
    try:
        with BackgroundWriter() as behind, closing(staging):
            for number, done in enumerate(staging):
                outcomes[number] = done
                if isinstance(done, StagedDataset):
                    waiting[number] = done
                if executor is not None:
                    progress("sources", number + 1, len(openers))
                elif number in waiting:
                    behind(partial(finish, number))
                n_cells = sum(one.plan.schema.n_cells for one in waiting.values())
                if number + 1 == len(openers) or len(waiting) >= COMMIT_DATASETS or n_cells >= COMMIT_CELLS:
                    behind.join()
                    written = {n: one for n, one in waiting.items() if outcomes[n] is one}
                    outcomes |= _commit(catalog, written, options, progress, attached)
                    # What is staged has the names of its cells and features.
                    outcomes = {n: one.report if isinstance(one, StagedDataset) else one for n, one in outcomes.items()}
                    waiting.clear()
                    written.clear()
                    release_unused_memory()
    except BaseException:
        # The contexts inside have ended their threads, so nothing is written below these uids any more.
        _discard(catalog, [*waiting.values()])
        raise
    added = [report for report in outcomes.values() if isinstance(report, IngestReport)]
    refused = [openers[n].explain(one) for n, one in outcomes.items() if isinstance(one, AtlasError)]
    if refused and len(openers) == 1:
        raise refused[0] from refused[0].__cause__
    if refused:
        raise SourceError(
            f"{len(refused)} of {len(openers)} sources were refused, the other {len(added)} are in the atlas: {'; '.join(map(str, refused))}"
        )
    return added


Outcome = StagedDataset | IngestReport | AtlasError
"""Outcome for a source: staged or committed; skipped; or refused."""


def _stage_here(
    catalog: Catalog, openers: Sequence[Opener], options: IngestOptions, progress: Progress
) -> Generator[Outcome, None, None]:
    """Stage sources in this process, in order; each is planned while the one before it is written.

    The last rows of a staged source are still being written when it is yielded; the caller calls `finish`.
    """
    orders: dict[str, Sequence[str]] = {}
    ahead: deque[Source] = deque()

    def plan(opener: Opener) -> IngestPlan | AtlasError:
        try:
            source, planned = plan_source(catalog, opener, options, orders)
        except AtlasError as error:
            return error
        ahead.append(source)
        for features, order in planned.column_orders.items():
            orders.setdefault(features, order)
        # Older ones are committed, or refused.
        while len(orders) > COMMIT_DATASETS:
            del orders[next(iter(orders))]
        return planned

    try:
        # A single source is planned on this thread, where an interrupt ends it at once.
        plans = prefetch_map(plan, openers, threads=min(1, len(openers) - 1), depth=1)
        with closing(plans):
            for _ in openers:
                progress("plan", 0, 1)
                planned = next(plans)
                try:
                    if isinstance(planned, AtlasError):
                        raise planned
                    yield stage(catalog, ahead.popleft(), planned, options, progress)
                except AtlasError as error:
                    yield error
    finally:
        for source in ahead:
            source.close()


def _stage_by_workers(
    catalog: Catalog, openers: Sequence[Opener], options: IngestOptions, executor: Executor | Workers
) -> Generator[Outcome, None, None]:
    """Let workers stage sources, whose outcomes come in order; what they wrote and nobody committed is removed at the end."""
    owner = {**this_process(), _CALL: uuid4().hex}
    lost = "Nothing of sources that were not committed is visible; add() with on_duplicate='skip' goes on from there."

    def run(tasks: Iterable[Callable[[], T]]) -> Generator[T, None, None]:
        return in_order(run_tasks(tasks, executor, place=catalog.location, lost=lost))

    def tasks() -> Iterator[Callable[[], Outcome]]:
        """Send each source with the orders that its features have in sources before it, so that they get one layout."""
        several = len(openers) > 1 and options.column_order == "detected"
        hashed = run(partial(_hash_features, opener) for opener in openers) if several else [frozenset()] * len(openers)
        sets: list[frozenset[str]] = list(hashed)
        first: dict[str, int] = {}
        # `setdefault` gives the first source with a set, so `shared` has the sets that come again.
        shared = {
            names for number, own in enumerate(sets) for names in own if first.setdefault(names, number) != number
        }
        leaders = sorted({first[names] for names in shared})
        found = run(partial(_find_column_orders, catalog, openers[number], options) for number in leaders)
        orders = dict(zip(leaders, found, strict=True))
        for number, opener in enumerate(openers):
            known: dict[str, Sequence[str]] = {}
            for leader in sorted({first[names] for names in sets[number] if first[names] < number}):
                # The earliest source wins, as when sources are added one after the other.
                known = {**orders[leader], **known}
            yield partial(_stage_source, catalog, opener, options, known, owner)

    try:
        with closing(run(tasks())) as outcomes:
            for done in outcomes:
                # The worker wrote the lease: one that cannot be read here is in another place.
                if isinstance(done, StagedDataset) and not read_lease(catalog, done.plan.uid):
                    raise WorkersError(
                        f"A worker wrote {done.plan.name!r} to a place that is not {catalog.location.uri} here, though it has the same "
                        "address; put the atlas in a folder or an object store that all workers share."
                    )
                yield done
    finally:
        with suppress(AtlasError):
            # Found by lease, because attempts of lost workers have uids that never came back.
            for uid in without_record(catalog, catalog.arrays.list_children()):
                if (read_lease(catalog, uid) or {}).get(_CALL) == owner[_CALL]:
                    catalog.arrays.child(uid).delete_prefix()


_CALL = "call"
"""In the lease of what a worker writes: the call that it writes for."""


def _hash_features(opener: Opener) -> frozenset[str]:
    """Hash the names of the features of a source's matrices, in no order; identifying them would take as long as writing few cells."""
    try:
        source = opener()
    except AtlasError:
        return frozenset()  # `_stage_source` refuses it.
    with closing(source):
        keys = {info.features for info in source.describe().matrices if info.features}
        tables = [source.features(key).column(INDEX).cast(pa.string()).to_pylist() for key in sorted(keys)]
    return frozenset(feature_set([text or "" for text in names]) for names in tables)


def _find_column_orders(catalog: Catalog, opener: Opener, options: IngestOptions) -> ColumnOrders:
    """Find out in which order a source would store its features."""
    try:
        source, plan = plan_source(catalog, opener, options)
    except AtlasError:
        return {}  # `_stage_source` refuses it.
    source.close()
    return plan.column_orders


def _stage_source(
    catalog: Catalog, opener: Opener, options: IngestOptions, orders: ColumnOrders, owner: Mapping[str, Any]
) -> Outcome:
    """Write the arrays of a source, which nothing refers to yet, below a uid that every attempt draws anew."""
    try:
        catalog = catalog.session("add()")
        done = stage(catalog, *plan_source(catalog, opener, options, orders), options, no_progress, owner)
        if isinstance(done, StagedDataset):
            done.finish()
            return replace(done, report=replace(done.report, notes=(*done.report.notes, *opener.notes)))
        return replace(done, notes=(*done.notes, *opener.notes))
    except WorkersError:
        raise
    except AtlasError as error:
        return opener.explain(error)


def _discard(catalog: Catalog, staged: Sequence[StagedDataset]) -> None:
    """Remove staged datasets that did not become visible; if the datasets cannot be read, `repair` will do so."""
    with suppress(AtlasError):
        # A commit that raised may have been done although its answer was lost; its datasets must stay.
        for uid in without_record(catalog, [one.plan.uid for one in staged]) if staged else ():
            catalog.tables.delete(CELLS, equals("dataset_uid", uid))
            catalog.arrays.child(uid).delete_prefix()


def _judge(catalog: Catalog, one: StagedDataset, others: Sequence[StagedDataset], options: IngestOptions) -> Outcome:
    """Plan the cells of a staged source again and look for its duplicates, now that all sources before it are known."""
    space = one.plan.groups[0].space.name
    same = [s.plan.name for s in others if s.content_hash == one.content_hash and s.plan.groups[0].space.name == space]
    if same and options.on_duplicate != "error":
        return skip(one.plan, one.content_hash, same[0])
    try:
        if same:
            find_replaced({}, one.plan, (same[0],), options)
        plan = plan_cells(catalog, one.plan, options, [other.plan for other in others])
    except AtlasError as error:
        return error
    before = {column.column.stored: column.source for column in one.plan.columns}
    now = {column.source: column.column.stored for column in plan.columns}
    # Keyed by stored name, which other sources of the commit may have changed.
    colors = {now[before[stored]]: values for stored, values in one.colors.items()}
    report = replace(one.report, columns=plan.column_reports)
    return replace(one, plan=replace(plan, name=one.plan.name), colors=colors, report=report).renamed(plan.name)


def _commit(
    catalog: Catalog,
    sources: Mapping[int, StagedDataset],
    options: IngestOptions,
    progress: Progress,
    attached: AttachedColumns | None,
) -> dict[int, Outcome]:
    """Make staged sources visible, by number, unless they do not fit those before them; return the outcome of each."""
    judged: dict[int, Outcome] = {}
    staged: list[StagedDataset] = []
    for number, source in sources.items():
        # The first of a call was planned with all that is before it.
        judged[number] = outcome = _judge(catalog, source, staged, options) if number else source
        if isinstance(outcome, StagedDataset):
            staged.append(outcome)
        else:
            source.abandon()
    if not staged:
        return judged
    # What others committed meanwhile, such as columns of other types, would make these commits start again, one after the other.
    groups = [written.group for one in staged for written in one.groups]
    spaces = {group.space.name: group.space for group in groups}
    catalog.tables.refresh((DATASETS, CELLS, LAYOUTS, *(space.registry for space in spaces.values())))
    for space in spaces.values():
        catalog.add_space(space)
    further = {} if attached is None else attached.columns()
    pointers = [pointer_field(group.pointer, group.space.kind, group.space.name) for group in groups]
    pointers += [field for field, _ in further.values()]
    columns = [c.column for one in staged for c in one.plan.columns]
    # Before the cells: Lance refuses rows with a column that the table lacks.
    add_columns = partial(add_cell_columns, catalog, columns, [*{p.name: p for p in pointers}.values()])
    add_columns()
    progress("columns", 1, 1)

    def write_cells() -> None:
        _append_cells(
            catalog, lambda schema: pa.concat_tables([_cells(schema, one, further) for one in staged]), add_columns
        )

    featured = {name: [g for g in groups if g.space.name == name and g.features is not None] for name in spaces}
    featured = {name: own for name, own in featured.items() if own}

    def write_layouts() -> None:
        for name, own in featured.items():
            _, registry = registry_rows(catalog, spaces[name].registry)
            known = registry.column("uid").combine_chunks()
            # Those of new features are not known yet; `ensure_layouts` stores -1 as null, and the next snapshot brings them.
            index = registry.column("global_index").fill_null(-1)
            orders = {group.layout: pa.array(group.stored_uids, pa.string()) for group in own}
            numbered = [
                (o.to_pylist(), index.take(pc.index_in(o, value_set=known)).fill_null(-1)) for o in orders.values()
            ]
            ensure_layouts(catalog, [(uids, numbers.to_numpy()) for uids, numbers in numbered])

    # Side by side, and a process that is killed may leave any of them: without a record they are invisible.
    with BackgroundWriter() as first, BackgroundWriter() as second:
        first(write_cells)
        second(write_layouts)
        for name, own in featured.items():
            register_features(catalog, name, *(group.features.rows for group in own if group.features is not None))
        progress("features", 1, 1)
        second.join()
        progress("layouts", 1, 1)
    progress("cells", 1, 1)
    if attached is not None:
        attached.before_record(staged[0].plan.uid)
    outcomes: list[Outcome] = []

    def choose(old: list[DatasetRecord]) -> Commit:
        # Called again after a lost race, but not when an earlier attempt turns out to be committed: `outcomes` then
        # still has what that attempt chose.
        outcomes.clear()
        datasets = group_by_dataset(old)
        names = {own[0].name for own in datasets.values()}
        commit = Commit(())
        for one in staged:
            outcome = recheck_duplicates(datasets, one, options, names)
            outcomes.append(outcome)
            if isinstance(outcome, StagedDataset):
                names.add(outcome.plan.name)
                commit = Commit((*commit.records, *_records(outcome)), commit.replaces | {*outcome.replaces})
        return commit

    commit_records(catalog, choose)
    progress("records", 1, 1)
    committed = {one.plan.uid: outcome for one, outcome in zip(staged, outcomes, strict=True)}
    _discard(catalog, [one for one in staged if not isinstance(committed[one.plan.uid], StagedDataset)])
    for one in outcomes:
        if isinstance(one, StagedDataset):
            # The dataset is visible now. A remaining lease does no harm, and `repair` removes the rest of replaced datasets.
            with suppress(AtlasError):
                delete_cells_of_datasets(catalog, one.replaces)
            with suppress(StoreError):
                release_lease(catalog, one.plan.uid, own=True)
    # Small tables that every `add` reads, which would take each longer than the last. Versions that a snapshot names, or a reader has open, stay
    # as they are. It only saves time: others may be writing, or a purge may have begun.
    for table in (DATASETS, LAYOUTS, *(space.registry for space in spaces.values())):
        with suppress(AtlasError):
            if catalog.tables.has(table):
                compact(catalog.tables, table, MANY_FRAGMENTS)
    progress("done", 1, 1)
    return {n: committed.get(source.plan.uid, judged[n]) for n, source in sources.items()}


def _append_cells(
    catalog: Catalog, make_rows: Callable[[pa.Schema], pa.Table], add_columns: Callable[[], None]
) -> None:
    """Append rows; again where `restore` has taken away columns that were added before."""
    for attempt in range(_ATTEMPTS):
        try:
            catalog.tables.append(CELLS, make_rows(catalog.tables.schema(CELLS)))
            return
        except ConflictError:
            if attempt + 1 == _ATTEMPTS:
                raise
            catalog.tables.refresh([CELLS])
            add_columns()


def _cells(schema: pa.Schema, staged: StagedDataset, further: Mapping[str, tuple[pa.Field, pa.Array]]) -> pa.Table:
    """Return the rows of a dataset's cells."""
    plan = staged.plan
    n = plan.schema.n_cells
    columns: dict[str, Any] = {
        "uid": new_uids(n),
        "dataset_uid": pa.repeat(plan.uid, n),
        "cell_name": plan.cells.column(INDEX).cast(pa.string()),
    }
    for column in plan.columns:
        columns[column.column.stored] = partial(column_values, column, plan.cells)
    for written in staged.groups:
        columns[written.group.pointer] = _pointers(written, n)
    columns |= {name: values for name, (_, values) in further.items()}
    return cell_rows(schema, columns, n)


def _pointers(written: WrittenGroup, n_cells: int) -> pa.Array:
    """Return the pointer column of one group: one struct per cell, null where the cell has no row in it."""
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
    """Return the records of the groups; the first one also lists the other elements, frames and small files."""
    plan, bundle, extras = staged.plan, staged.bundle, staged.extras
    places = {name: frame_file(plan.uid, name) for name in staged.frames}
    spans = {name: bundle.spans[path] for name, path in places.items() if path in bundle.spans}
    facts = DatasetFacts(
        format=plan.schema.format,
        n_cells=plan.schema.n_cells,
        left_out={
            report.name: plan.schema.left_out.get(report.name, report.note)
            for report in plan.element_reports
            if report.fate == "left out"
        },
        colors={column: dict(colors) for column, colors in staged.colors.items()},
        cell_names=plan.cell_names,
        license=plan.license,
    )
    with_files = {
        "extras": extras.facts,
        "frames": dict(staged.frames),
        "linked": staged.linked,
        "bundle": BundleFacts(n_bytes=bundle.n_bytes, sha256=bundle.sha256, frames=spans) if bundle.spans else None,
    }
    return [
        DatasetRecord(
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
            **array_columns(
                written.specs | (extras.specs if n == 0 else {}),
                written.checksums | (extras.checksums if n == 0 else {}),
            ),
            facts=facts.model_copy(
                update={
                    "layers": {
                        name: LayerFacts(key=p.info.key, features=p.info.features, **matrix_facts(p.info))
                        for name, p in written.layers.items()
                    },
                    "column_order": written.group.column_order,
                    "feature_set": written.group.feature_set,
                    **(with_files if n == 0 else {}),
                }
            ).to_json(),
        )
        for n, written in enumerate(staged.groups)
    ]

"""Add whatever can be added: open a source, plan what becomes of it, stage its arrays, which nothing refers to yet, and commit them.

Of a commit, columns come first; features, layouts and cells side by side; records last.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Executor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, Literal, TypeVar
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
    read_records,
    release_lease,
    take_lease,
    this_process,
    without_record,
)
from raggedatlas.catalog.catalog import CELLS, DATASETS, LAYOUTS, Catalog
from raggedatlas.catalog.cells import add_cell_columns, cell_rows, frame_file, write_frame
from raggedatlas.catalog.layouts import (
    ensure_layouts,
    feature_set,
    records_with_features,
    register_features,
    registry_rows,
)
from raggedatlas.errors import (
    ArgumentError,
    AtlasError,
    ConflictError,
    DuplicateError,
    SourceError,
    StoreError,
    WorkersError,
)
from raggedatlas.formats.registry import detect, is_copied, list_left_out, list_sources, open_source
from raggedatlas.formats.transfer import CopiedSource
from raggedatlas.ingest.attachment import Attachment, attach
from raggedatlas.ingest.columns import column_values, merge_colors
from raggedatlas.ingest.group_writer import (
    PendingWrite,
    WrittenElements,
    WrittenGroup,
    link_columns,
    link_group,
    matrix_facts,
    serialize_other_elements,
    to_dense,
    write_group,
    write_other_elements,
)
from raggedatlas.ingest.linking import ColumnLinks, LinkPlan, plan_column_links, plan_links
from raggedatlas.ingest.plan import (
    ColumnOrders,
    IngestPlan,
    NewGroup,
    dataset_name,
    order_columns,
    plan_cells,
    plan_ingest,
    rename_notes,
    select_source,
)
from raggedatlas.ingest.values import iterate_blocks, to_csr
from raggedatlas.model.arguments import Progress, no_progress
from raggedatlas.model.choices import Curation
from raggedatlas.model.frames import INDEX
from raggedatlas.model.ids import free_name, new_uids
from raggedatlas.model.options import IngestOptions, read_options
from raggedatlas.model.protocols import NO_MATRIX, Source
from raggedatlas.model.records import BundleFacts, DatasetFacts, DatasetRecord, LayerFacts, SourceFacts
from raggedatlas.model.reports import AddReport, ColumnReport, IngestReport, SpaceReport
from raggedatlas.model.shown import ShownList
from raggedatlas.model.spaces import PointerKind, pointer_field
from raggedatlas.model.wings import answer
from raggedatlas.store.arrays import describe_group, write_group_attributes
from raggedatlas.store.bundle import Bundle
from raggedatlas.store.content_hash import ContentHash
from raggedatlas.store.executors import Workers, in_order, run_tasks
from raggedatlas.store.location import AnyPath, Location, as_path, with_options
from raggedatlas.store.runtime import BackgroundWriter, prefetch_map, release_unused_memory, submit, warnings_as
from raggedatlas.store.sources import recorded_address
from raggedatlas.store.sparse import canonicalize
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
        with open_progress(progress, made.options.name or "add") as callback:
            return attach(made, callback)
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


def _openers(source: Any, storage_options: Mapping[str, str]) -> "tuple[list[Opener], bool]":  # noqa: ANN401  (anything that can be added)
    """Return what opens each source, and whether several may be meant, by a sequence or a folder."""
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


Values = tuple[pa.Field, pa.Array]
"""A cell column, and its values in the order of the cells."""


def add_sources(
    catalog: Catalog, openers: "Sequence[Opener]", options: IngestOptions, progress: Progress = no_progress,
    *, further: Callable[[], Mapping[str, Values]] = dict, before_record: Callable[[str], None] | None = None,
    executor: Executor | Workers | None = None,
) -> list[IngestReport]:  # fmt: skip
    """Add sources in order and return one report for each; small sources share a commit.

    `further` gives more cell columns of the only source, and `before_record` gets its uid and writes data that its
    record makes visible. The workers of `executor` read the sources and write their arrays; this process commits. The
    error of a refused single source is raised as it is; if some of several are refused, a summary is raised and the
    others are in the atlas.
    """
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
                    outcomes |= _commit(catalog, written, options, progress, further, before_record)
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


# ---- open, and plan


ANNDATA_FORMATS = ("h5ad", "zarr", "h5mu")
"""Formats whose files are held against the rules of AnnData before they are opened."""


class Opener:
    """Opens one source, once it was found to keep the rules of its format.

    `what` is anything that `open_source` takes. `curate` names the schema whose missing facts are noted, or refused;
    `genome` the one to read from a 10x file with several. `notes` are lines for the report, whatever is found in the
    source. Of a remote file that is `linked`, little is read, at many places.
    """

    def __init__(
        self,
        what: Any,  # noqa: ANN401  (anything that can be added)
        curate: Curation | None = None,
        genome: str | None = None,
        notes: tuple[str, ...] = (),
        *,
        linked: bool = False,
    ) -> None:
        self.what, self.curate, self.genome, self.linked = what, curate, genome, linked
        self.notes = self._given = notes
        self._checked: AnyPath | None = None

    @property
    def place(self) -> AnyPath | None:
        """The file or folder; None of an object in memory."""
        path = as_path(self.what) if isinstance(self.what, str | os.PathLike) else None
        return path.in_small_blocks() if self.linked and isinstance(path, Location) else path

    def __call__(self) -> Source:
        """Open it; a broken rule and a missing fact of a strict schema are refused before anything is read that takes long."""
        path = self.place
        name = "" if path is None else detect(path)
        if path is not None and is_copied(path, name):
            local = Opener(None, self.curate, self.genome)

            def open_copy(copy: Path) -> Source:
                local.what = copy
                return local()

            source: Source = CopiedSource(path, open_copy)
            self.notes = (*self._given, *local.notes)
            return source
        self.notes = self._given
        if path is not None and name in ANNDATA_FORMATS:
            from raggedatlas.formats.anndata import raise_if_invalid

            self._checked = path
            broken = (f"breaks {found}" for found in raise_if_invalid(path) if found.level == "must")
            self.notes += (*broken,)
        options: dict[str, Any] = {} if self.genome is None else {"genome": self.genome}
        source = open_source(self.what if path is None else path, **options)
        if self.curate is not None:
            missing = answer("missing_facts")(source)
            if missing and self.curate == "cellxgene-strict":
                uri = source.describe().uri
                source.close()
                raise SourceError(
                    f"{uri} was not added: {'; '.join(missing)}. Add these facts, or use curate='cellxgene' to note them."
                )
            self.notes += missing
        return source

    def explain(self, error: AtlasError) -> AtlasError:
        """Name the rule behind an error that came while the source was read, where there is one."""
        if self._checked is None:
            return error
        from raggedatlas.formats.anndata import with_rule_id

        return with_rule_id(self._checked, error)


def plan_source(
    catalog: Catalog, opener: Opener, options: IngestOptions, orders: ColumnOrders = MappingProxyType({})
) -> tuple[Source, IngestPlan]:
    """Open a source, which the caller closes, and plan it, without writing; `orders` are those of `order_columns`."""
    source = select_source(opener(), options)
    try:
        plan = replace(plan_ingest(catalog, source, options), place=opener.place or getattr(source, "place", None))
        plan = order_columns(catalog, source, plan, options, orders)
        return source, plan
    except BaseException:
        source.close()
        raise


# ---- stage


@dataclass(frozen=True)
class StagedDataset:
    """A dataset whose arrays are written, or being flushed, and that nothing refers to yet."""

    plan: IngestPlan
    bundle: Bundle  # its small files
    pending: tuple[PendingWrite, ...]  # groups that are written; `finish` completes them
    arrays: Location  # the Zarr store
    content_hash: str  # of the source
    report: IngestReport  # so far
    replaces: tuple[str, ...] = ()  # datasets to drop once this one is visible
    # Elements stored next to the groups.
    extras: WrittenElements = field(default_factory=WrittenElements)
    # Stored column -> category -> color.
    colors: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    frames: Mapping[str, str] = field(default_factory=dict)  # stored frame -> SHA-256 of its file
    linked: SourceFacts | None = None  # the file that it is linked to

    @property
    def groups(self) -> tuple[WrittenGroup, ...]:
        """Groups that were written."""
        return tuple(part.written for part in self.pending)

    def renamed(self, name: str) -> "StagedDataset":
        """Return the same dataset under another name."""
        schema, before = self.plan.schema, rename_notes(self.plan.schema, self.plan.name)
        notes = (*rename_notes(schema, name), *(note for note in self.report.notes if note not in before))
        return replace(self, plan=replace(self.plan, name=name), report=replace(self.report, name=name, notes=notes))

    def finish(self) -> None:
        """Wait until everything is written; if a write failed, everything written is removed."""
        try:
            for part in self.pending:
                part.finish()
            # The metadata of groups come when their arrays are there.
            steps: list[Callable[[], None]] = [partial(self.bundle.write, self.arrays)]
            for n, written in enumerate(self.groups):
                space, specs = written.group.space, written.specs | (self.extras.specs if n == 0 else {})
                facts = {"raggedatlas": {"feature_space": space.name, "kind": space.kind.value}}
                if written.listed:
                    steps.append(partial(describe_group, self.arrays, written.path, facts, specs))
                else:
                    steps.append(partial(write_group_attributes, self.arrays, written.path, facts))
            self.arrays.side_by_side(steps)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Stop writing, and remove everything written."""
        for part in self.pending:
            part.abandon()
        self.arrays.child(self.plan.uid).delete_prefix()


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


def stage(
    catalog: Catalog,
    source: Source,
    plan: IngestPlan,
    options: IngestOptions,
    progress: Progress,
    owner: Mapping[str, Any] | None = None,
) -> StagedDataset | IngestReport:
    """Check whether a planned source is in the atlas already, and write its arrays and frames if it is not.

    The last rows are still being written when this returns; the caller calls `finish`. Returns the report if the source
    was skipped, or with ``dry_run``. The source is always closed at the end. If it is refused, everything written is
    removed. `owner` is the process that will commit it; None for this process.
    """
    bundle, pending, frames = Bundle(plan.uid), list[PendingWrite](), dict[str, str]()

    def write_frames() -> None:
        features = {f"var.{group.pointer}": group.features.frame for group in plan.groups if group.features is not None}
        for name, table in {"obs": plan.cells, **features}.items():
            frames[name] = write_frame(catalog, plan.uid, name, table, bundle)

    try:
        links: LinkPlan | None = None
        columns: ColumnLinks | None = None
        if options.copy is False:
            links = plan_links(catalog, source, plan, _hash_values(source, plan) if options.hash == "full" else "")
            text = links.content_hash
            same = tuple({r.uid: None for r in read_records(catalog) if r.content_hash == text})
        else:
            if options.copy == "rows":
                columns = plan_column_links(catalog, source, plan)
                linked = (
                    f"{', '.join(columns.matrices)}: columns are linked to {columns.facts.address}, rows are copied"
                )
                plan = replace(plan, notes=(*plan.notes, linked))
            same, text = _same_content(catalog, source, plan)
        references = links or columns
        if same and options.on_duplicate == "skip":
            return skip(plan, text, same[0])
        replaces = find_replaced(group_by_dataset(read_records(catalog)), plan, same, options)
        # Before the lease: an element that cannot be stored is refused with nothing written.
        packed = serialize_other_elements(source, plan.extras)
        colors = merge_colors(source, plan.cells, plan.extras.elements)
        # Side by side with the lease.
        counted = [submit(partial(_count_new, catalog), group) for group in plan.groups]
        try:
            if not options.dry_run:
                progress("lease", 0, 1)
                # Inside `try`: during a purge it raises after it has created the group.
                take_lease(catalog, plan.uid, owner)
            content = _content_hash(plan) if links is None else None
            if references is not None and not options.dry_run:
                references.write(catalog, plan.uid, bundle)
            taken: dict[str, set[str]] = {}
            for group in plan.groups:
                taken.setdefault(group.space.name, set()).update(p.name for p in group.layers if p.name)
            with BackgroundWriter() as aside:
                if not options.dry_run:
                    aside(write_frames)
                for i, group in enumerate(plan.groups):
                    if i:
                        # Only the end of the last group overlaps with the next source.
                        pending[-1].finish()
                    path = plan.group_path(group)
                    if links is None:
                        part = write_group(
                            catalog, source, path, group, options, progress,
                            taken=taken[group.space.name], content=None if i else content, bundle=bundle,
                        )  # fmt: skip
                    else:
                        part = link_group(catalog, path, group, links, i, options, bundle)
                    pending.append(part)
                    if columns is not None and not options.dry_run:
                        link_columns(catalog, part.written, columns, bundle)
                    part.written.n_new_features = counted[i].result()
            text = text if content is None else content.hexdigest()
            groups = [part.written for part in pending]
            if options.dry_run:
                pending[-1].finish()
                return _report(plan, groups, text, "dry run", links)
            progress("arrays", 1, 1)
            extras = write_other_elements(
                catalog, source, plan.group_path(plan.groups[0]), plan.extras, packed, bundle, links
            )
            progress("frames", 1, 1)
        except BaseException:
            # Threads first: they would write files again after the prefix is deleted.
            for part in pending:
                part.abandon()
            if not options.dry_run:
                catalog.arrays.child(plan.uid).delete_prefix()
            raise
        report = _report(plan, groups, text, "replaced" if replaces else "added", links)
        # By stored column name.
        colored = {column.stored: colors[column.source] for column in plan.columns if column.source in colors}
        return StagedDataset(
            plan,
            bundle,
            tuple(pending),
            catalog.arrays,
            text,
            report,
            replaces,
            extras,
            colored,
            frames,
            None if references is None else references.facts,
        )
    finally:
        source.close()


def _same_content(catalog: Catalog, source: Source, plan: IngestPlan) -> tuple[tuple[str, ...], str]:
    """Return the datasets with the content of a source, and its hash, which is computed only where one may have it."""
    main = plan.groups[0]
    records = [r for r in read_records(catalog) if r.n_cells == main.layers[0].info.shape[0]]
    alike = records_with_features(records, main.space.name, main.width, main.feature_set)
    # Values are read once more only where features and cells may be those of another dataset.
    alike = [record for record in alike if record.cell_names == plan.cell_names]
    if not alike:
        return (), ""
    text = _hash_values(source, plan)
    return tuple({r.uid: None for r in alike if r.content_hash == text}), text


def _hash_values(source: Source, plan: IngestPlan) -> str:
    """Hash features, cells and all values of the main matrix."""
    content, main = _content_hash(plan), plan.groups[0]
    info = main.layers[0].info
    for row, block in iterate_blocks(source, info):
        # The same form as `write_group` hashes, otherwise equal files would have different hashes.
        if main.space.kind is PointerKind.SPARSE:
            values: Any = canonicalize(to_csr(block), info.key, row, sum_duplicates=True)[0]
        else:
            values = to_dense(block)
        content.update(values)
    return content.hexdigest()


def _content_hash(plan: IngestPlan) -> ContentHash:
    features = plan.groups[0].features
    return ContentHash(plan.cells, () if features is None else features.uids)


def _count_new(catalog: Catalog, group: NewGroup) -> int:
    if group.features is None:
        return 0
    table = group.space.registry
    if not catalog.tables.has(table):
        return len(group.features.uids)
    known = registry_rows(catalog, table)[1].column("uid").combine_chunks()
    # None for a group without features.
    there = pc.sum(pc.is_in(pa.array(group.features.uids, pa.string()), value_set=known)).as_py()
    return len(group.features.uids) - int(there or 0)


def find_replaced(
    records: Mapping[str, Sequence[DatasetRecord]], plan: IngestPlan, same: tuple[str, ...], options: IngestOptions
) -> tuple[str, ...]:
    """Return the datasets in whose place a source comes.

    Raises `DuplicateError` if there is one with its content or its chosen name, and it may not be replaced.
    """
    named = tuple(uid for uid, group in records.items() if group[0].name == plan.name)
    if options.on_duplicate == "replace":
        return tuple(dict.fromkeys(uid for uid in (*same, *named) if uid in records))
    if same:
        name = records[same[0]][0].name if same[0] in records else same[0]
        raise DuplicateError(
            f"{plan.schema.uri or plan.name} has the same cells, features and values as the dataset {name!r}; pass on_duplicate='skip' to "
            "leave it, or on_duplicate='replace' to put this one in its place."
        )
    # A name that nobody chose gets a number in the commit, where it is taken since the plan.
    if named and options.name is not None:
        raise DuplicateError(
            f"A dataset is called {plan.name!r} already; choose another name, or pass on_duplicate='replace' to put this one in its place."
        )
    return ()


def skip(plan: IngestPlan, content_hash: str, duplicate: str) -> IngestReport:
    """Return the report of a source with the content of a dataset, named by its uid or name."""
    # No dataset gets the number that made the name of this one free.
    numbered = rename_notes(plan.schema, plan.name)
    if numbered and set(numbered) <= set(plan.notes):
        notes = tuple(note for note in plan.notes if note not in numbered)
        plan = replace(plan, name=dataset_name(plan.schema), notes=notes)
    report = _report(plan, (), content_hash, "skipped")
    return replace(report, notes=(*report.notes, f"the same content is in the atlas as {duplicate}"))


SAMPLED = "counts by a sample of its values; others are refused when they are read"


BY_COLUMN = "by column: cells are read by a walk over all of it"
"""Notes about a linked layer."""


def _report(
    plan: IngestPlan,
    groups: Sequence[WrittenGroup],
    content_hash: str,
    status: Literal["added", "skipped", "replaced", "dry run"],
    links: LinkPlan | None = None,
) -> IngestReport:
    elements, notes = [*plan.element_reports], [*plan.notes]
    if links is not None:
        elements = [
            replace(row, fate="linked", stored_as="the file") if row.name in links.extras else row for row in elements
        ]
        notes.append(
            f"linked to {links.facts.address}: values stay in the file; materialize() copies them into the atlas"
        )
    for n, written in enumerate(groups):
        for name, layer in written.layers.items():
            key, dtype, stored = layer.info.key, str(layer.info.dtype), f"{written.group.space.name}/{name}"
            if links is not None:
                # The path of a layer ends with its name.
                sampled = any(path.endswith(f"layers/{name}") for path in links.groups[n].sampled)
                by_column = BY_COLUMN if layer.info.form == "csc" else ""
                note = "; ".join(filter(None, (SAMPLED if sampled else "", by_column)))
                elements.append(ColumnReport(key, "linked", stored, note))
            elif key != NO_MATRIX and str(written.stored[name]) == dtype:
                elements.append(ColumnReport(key, "kept", stored))
            elif key != NO_MATRIX:
                elements.append(ColumnReport(key, "cast", stored, f"{dtype} held exactly as {written.stored[name]}"))
        if written.n_summed:
            notes.append(f"{written.group.layers[0].info.key}: {written.n_summed:,} repeated entries summed")
    return IngestReport(
        dataset_uid=plan.uid if status in ("added", "replaced") else "",
        name=plan.name,
        source=plan.schema.uri,
        content_hash=content_hash,
        n_cells=plan.schema.n_cells,
        status=status,
        spaces=tuple(
            SpaceReport(
                w.group.space.name, w.path, w.group.layout, tuple(w.layers), w.group.width, w.n_new_features, w.n_entries,
                column_order=w.group.column_order,
            )
            for w in groups
        ),
        columns=plan.column_reports,
        elements=tuple(elements),
        notes=tuple(notes),
    )  # fmt: skip


# ---- commit


def _commit(
    catalog: Catalog,
    sources: Mapping[int, StagedDataset],
    options: IngestOptions,
    progress: Progress,
    further: Callable[[], Mapping[str, Values]],
    before_record: Callable[[str], None] | None,
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
    more = further()
    pointers = [pointer_field(group.pointer, group.space.kind, group.space.name) for group in groups]
    pointers += [field for field, _ in more.values()]
    columns = [column for one in staged for column in one.plan.columns]
    # Before the cells: Lance refuses rows with a column that the table lacks.
    add_columns = partial(add_cell_columns, catalog, columns, [*{p.name: p for p in pointers}.values()])
    add_columns()
    progress("columns", 1, 1)

    def write_cells() -> None:
        for attempt in range(_ATTEMPTS):
            try:
                schema = catalog.tables.schema(CELLS)
                catalog.tables.append(CELLS, pa.concat_tables([_cells(schema, one, more) for one in staged]))
                return
            except ConflictError:
                if attempt + 1 == _ATTEMPTS:
                    raise
                # `restore` has taken away columns that were added before.
                catalog.tables.refresh([CELLS])
                add_columns()

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
    if before_record is not None:
        before_record(staged[0].plan.uid)
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
    before = {column.stored: column.source for column in one.plan.columns}
    now = {column.source: column.stored for column in plan.columns}
    # Keyed by stored name, which other sources of the commit may have changed.
    colors = {now[before[stored]]: values for stored, values in one.colors.items()}
    report = replace(one.report, columns=plan.column_reports)
    return replace(one, plan=replace(plan, name=one.plan.name), colors=colors, report=report).renamed(plan.name)


def _cells(schema: pa.Schema, staged: StagedDataset, further: Mapping[str, Values]) -> pa.Table:
    """Return the rows of a dataset's cells."""
    plan = staged.plan
    n = plan.schema.n_cells
    columns: dict[str, Any] = {
        "uid": new_uids(n),
        "dataset_uid": pa.repeat(plan.uid, n),
        "cell_name": plan.cells.column(INDEX).cast(pa.string()),
    }
    for column in plan.columns:
        columns[column.stored] = partial(column_values, column, plan.cells)
    for written in staged.groups:
        row = np.full(n, -1, np.int64)
        row[np.arange(written.n_rows) if written.present is None else written.present] = np.arange(written.n_rows)
        missing = row < 0
        # Masked cells are looked up too, so they need an index that exists.
        at = np.where(missing, 0, row)
        parts = {"zarr_group": pa.repeat(written.path, n)}
        if written.indptr is None:
            parts["position"] = pa.array(at)
        else:
            # Without rows `indptr` is [0], and `at + 1` would be beyond it.
            bounds = written.indptr if written.n_rows else np.zeros(2, np.int64)
            parts |= {"start": pa.array(bounds[at]), "end": pa.array(bounds[at + 1]), "zarr_row": pa.array(at)}
        # One struct per cell, null where it has no row in the group.
        pointers = pa.StructArray.from_arrays([*parts.values()], [*parts], mask=pa.array(missing))
        columns[written.group.pointer] = pointers
    columns |= {name: values for name, (_, values) in further.items()}
    return cell_rows(schema, columns, n)


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


def recheck_duplicates(
    records: Mapping[str, Sequence[DatasetRecord]],
    staged: StagedDataset,
    options: IngestOptions,
    taken: AbstractSet[str],
) -> StagedDataset | IngestReport | AtlasError:
    """Check a staged source for duplicates among the datasets that it is committed to.

    These may have changed since `stage`; `taken` are their names. Returns the dataset to commit, the report of a
    skipped source, or the error of a refused one.
    """
    plan, space = staged.plan, staged.plan.groups[0].space.name
    # Duplicates with feature uids of an older version have another hash; `stage` found them.
    hashed = {
        r.uid
        for own in records.values()
        for r in own
        if r.content_hash == staged.content_hash and r.feature_space == space
    }
    hashed.update(staged.replaces)
    same = tuple(uid for uid in records if uid in hashed)
    if same and options.on_duplicate == "skip":
        return skip(plan, staged.content_hash, same[0])
    # Only a name that nobody chose gets a number; a chosen one is refused below.
    if not same and options.name is None and options.on_duplicate != "replace" and plan.name in taken:
        staged = staged.renamed(free_name(dataset_name(plan.schema), taken, "-"))
    try:
        replaces = find_replaced(records, staged.plan, same, options)
    except DuplicateError as error:
        return error
    report = replace(staged.report, status="replaced" if replaces else "added")
    return replace(staged, replaces=replaces, report=report)


def _discard(catalog: Catalog, staged: Sequence[StagedDataset]) -> None:
    """Remove staged datasets that did not become visible; if the datasets cannot be read, `repair` will do so."""
    with suppress(AtlasError):
        # A commit that raised may have been done although its answer was lost; its datasets must stay.
        for uid in without_record(catalog, [one.plan.uid for one in staged]) if staged else ():
            catalog.tables.delete(CELLS, equals("dataset_uid", uid))
            catalog.arrays.child(uid).delete_prefix()


# ---- sources that workers stage


_CALL = "call"
"""In the lease of what a worker writes: the call that it writes for."""


T = TypeVar("T")


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

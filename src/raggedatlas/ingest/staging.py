"""Stage one source: open and plan it, check for duplicates, and write its arrays and frames; only records are missing."""

import os
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from raggedatlas.catalog.assets import group_by_dataset, read_records, take_lease
from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.cells import write_frame
from raggedatlas.catalog.layouts import records_with_features, registry_rows
from raggedatlas.errors import AtlasError, DuplicateError, SourceError
from raggedatlas.formats.registry import detect, is_copied, open_source
from raggedatlas.formats.transfer import CopiedSource
from raggedatlas.ingest.columns import merge_colors
from raggedatlas.ingest.group_writer import (
    PendingWrite,
    WrittenElements,
    WrittenGroup,
    link_columns,
    link_group,
    serialize_other_elements,
    to_dense,
    write_group,
    write_other_elements,
)
from raggedatlas.ingest.linking import ColumnLinks, LinkPlan, plan_column_links, plan_links
from raggedatlas.ingest.options import IngestOptions
from raggedatlas.ingest.plan import (
    ColumnOrders,
    IngestPlan,
    NewGroup,
    dataset_name,
    order_columns,
    plan_ingest,
    rename_notes,
    select_source,
)
from raggedatlas.ingest.values import iterate_blocks, to_csr
from raggedatlas.model.arguments import Progress
from raggedatlas.model.choices import Curation
from raggedatlas.model.ids import free_name
from raggedatlas.model.protocols import NO_MATRIX, Source
from raggedatlas.model.records import DatasetRecord, SourceFacts
from raggedatlas.model.reports import ColumnReport, IngestReport, SpaceReport
from raggedatlas.model.spaces import PointerKind
from raggedatlas.model.wings import answer
from raggedatlas.store.arrays import describe_group, write_group_attributes
from raggedatlas.store.bundle import Bundle
from raggedatlas.store.content_hash import ContentHash
from raggedatlas.store.location import AnyPath, Location, as_path
from raggedatlas.store.runtime import BackgroundWriter, submit
from raggedatlas.store.sparse import canonicalize


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
            same, text, links = _same_link(catalog, source, plan, options)
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
        colored = {column.column.stored: colors[column.source] for column in plan.columns if column.source in colors}
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


def _same_link(
    catalog: Catalog, source: Source, plan: IngestPlan, options: IngestOptions
) -> tuple[tuple[str, ...], str, LinkPlan]:
    """Return the datasets with the content of a source that is linked, its hash, and what is linked."""
    links = plan_links(catalog, source, plan, _hash_values(source, plan) if options.hash == "full" else "")
    return (
        tuple({r.uid: None for r in read_records(catalog) if r.content_hash == links.content_hash}),
        links.content_hash,
        links,
    )


def _content_hash(plan: IngestPlan) -> ContentHash:
    features = plan.groups[0].features
    return ContentHash(plan.cells, () if features is None else features.uids)


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


SAMPLED = "counts by a sample of its values; others are refused when they are read"
BY_COLUMN = "by column: cells are read by a walk over all of it"
"""Notes about a linked layer."""


def skip(plan: IngestPlan, content_hash: str, duplicate: str) -> IngestReport:
    """Return the report of a source with the content of a dataset, named by its uid or name."""
    # No dataset gets the number that made the name of this one free.
    numbered = rename_notes(plan.schema, plan.name)
    if numbered and set(numbered) <= set(plan.notes):
        notes = tuple(note for note in plan.notes if note not in numbered)
        plan = replace(plan, name=dataset_name(plan.schema), notes=notes)
    report = _report(plan, (), content_hash, "skipped")
    return replace(report, notes=(*report.notes, f"the same content is in the atlas as {duplicate}"))


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

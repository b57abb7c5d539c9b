"""The write protocol: arrays first, unreferenced; then features, layouts, columns, cells; the records last."""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raggedatlas.catalog.catalog import CELLS, Catalog, facts_json
from raggedatlas.catalog.cells import cell_rows, widen
from raggedatlas.catalog.datasets import commit_records, group_by_dataset, read_records
from raggedatlas.catalog.features import read_registry, register_features
from raggedatlas.catalog.frames import write_frame
from raggedatlas.catalog.layouts import ensure_layout, records_with_features
from raggedatlas.catalog.leases import release_lease, take_lease
from raggedatlas.catalog.upkeep import drop_dataset
from raggedatlas.errors import AtlasError, DuplicateError, SourceError, StoreError
from raggedatlas.ingest.columns import column_values
from raggedatlas.ingest.extras import WrittenExtras, matrix_facts, merged_colors, pack_extras, write_extras
from raggedatlas.ingest.groups import WrittenGroup, specs_json, to_dense, write_group
from raggedatlas.ingest.options import IngestOptions, Progress, no_progress
from raggedatlas.ingest.order import order_columns
from raggedatlas.ingest.patterns import ContentHash, walk
from raggedatlas.ingest.plan import GroupPlan, IngestPlan, plan_ingest
from raggedatlas.ingest.values import canonical, to_csr
from raggedatlas.model.contracts import Source
from raggedatlas.model.frames import INDEX
from raggedatlas.model.ids import new_uids
from raggedatlas.model.pointers import PointerKind, pointer_field
from raggedatlas.model.records import DatasetRecord
from raggedatlas.model.reports import ColumnReport, IngestReport, SpaceReport

COMMIT_CELLS = 500_000
"""Many small datasets share one commit until they have this many cells together."""

COMMIT_DATASETS = 100
"""Most datasets that share one commit: until then the names of all their features are kept in memory."""


@dataclass(frozen=True)
class Staged:
    """A dataset whose arrays are written and that nothing refers to yet.

    Parameters
    ----------
    plan : IngestPlan
        What was planned.
    groups : tuple of WrittenGroup
        What was written.
    content_hash : str
        Of the source.
    report : IngestReport
        So far.
    replaces : tuple of str
        Datasets to drop once this one is visible.
    extras : WrittenExtras
        What is kept beside the groups.
    colors : mapping of str to (mapping of str to str)
        Column -> category -> colour.
    """

    plan: IngestPlan
    groups: tuple[WrittenGroup, ...]
    content_hash: str
    report: IngestReport
    replaces: tuple[str, ...] = ()
    extras: WrittenExtras = field(default_factory=WrittenExtras)
    colors: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


class Opening(Protocol):
    """What opens a source."""

    def __call__(self) -> Source:
        """Open it."""
        ...

    def explain(self, error: AtlasError) -> AtlasError:
        """Say more about an error that came while the source was read, if there is more to say."""
        ...


class Beside(Protocol):
    """What becomes visible together with a dataset: further columns of its cells, and a last step before its record."""

    def columns(self) -> Mapping[str, tuple[pa.Field, pa.Array]]:
        """Give cell columns with their values, in the order of the source's cells."""
        ...

    def before_record(self, uid: str) -> None:
        """Write what the record of the dataset makes visible."""
        ...


def add_sources(
    catalog: Catalog, sources: Iterable[Opening], options: IngestOptions, progress: Progress = no_progress,
    *, beside: Beside | None = None,
) -> list[IngestReport]:  # fmt: skip
    """Add sources one after the other; the cells of many small ones go in with one commit.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    sources : iterable of Opening
        Each opens a source.
    options : IngestOptions
        The caller's choices.
    progress : callable
        Told every step.
    beside : Beside or None
        With one source: what is committed with it.

    Returns
    -------
    list of IngestReport
        One per source, in order.

    Raises
    ------
    AtlasError
        What the only source was refused for, or a summary when some of several were; the others are in the atlas.
    """
    reports: list[IngestReport] = []
    staged: list[Staged] = []
    refused: list[AtlasError] = []
    openers = list(sources)
    try:
        for opener in openers:
            try:
                done = _stage(catalog, opener, options, progress, staged)
            except AtlasError as caught:
                error = opener.explain(caught)
                if len(openers) == 1:
                    raise error from error.__cause__
                refused.append(error)
                continue
            reports.append(done if isinstance(done, IngestReport) else done.report)
            if isinstance(done, Staged):
                staged.append(done)
            if len(staged) >= COMMIT_DATASETS or sum(s.plan.schema.n_cells for s in staged) >= COMMIT_CELLS:
                _commit(catalog, staged, progress)
                staged = []
        _commit(catalog, staged, progress, beside)
    except BaseException:
        _discard(catalog, staged)
        raise
    if refused:
        lines = "; ".join(str(error) for error in refused)
        raise SourceError(
            f"{len(refused)} of {len(openers)} sources were refused, the other {len(reports)} are in the atlas: {lines}"
        )
    return reports


def _discard(catalog: Catalog, staged: Sequence[Staged]) -> None:
    """Remove what is staged and did not become visible; where the inventory cannot be read, `repair` will do so."""
    with contextlib.suppress(AtlasError):
        visible = {record.uid for record in read_records(catalog)}
        for uid in [s.plan.uid for s in staged if s.plan.uid not in visible]:
            catalog.tables.delete(CELLS, f"dataset_uid = '{uid}'")
            catalog.arrays.child(uid).delete_prefix()


def _stage(
    catalog: Catalog, opener: Opening, options: IngestOptions, progress: Progress, staged: Sequence[Staged]
) -> Staged | IngestReport:
    source = opener()
    try:
        progress("plan", 0, 1)
        plan = plan_ingest(catalog, source, options, [s.plan for s in staged])
        twins = {s.content_hash: s.plan.name for s in staged}
        same, content = _same_content(catalog, source, plan, twins)
        if same and (options.on_duplicate == "skip" or (options.on_duplicate == "replace" and content in twins)):
            return _report(plan, (), content or "", "skipped", [f"the same content is in the atlas as {same[0]}"])
        replaces = _judge_duplicates(catalog, plan, same, options)
        plan = order_columns(catalog, source, plan, [s.plan for s in staged], options)
        packed = pack_extras(source, plan.extras)
        colors = merged_colors(source, plan.cells, plan.extras.elements)
        if options.dry_run:
            groups = _write_groups(catalog, source, plan, options, progress)
            return _report(plan, groups[0], groups[1], "dry run", [])
        place = catalog.arrays.child(plan.uid)
        try:
            progress("lease", 0, 1)
            take_lease(catalog, plan.uid)
            written, content_hash = _write_groups(catalog, source, plan, options, progress)
            progress("arrays", 1, 1)
            _write_frames(catalog, plan)
            extras = write_extras(catalog, source, plan.group_path(plan.groups[0]), plan.extras, packed)
            progress("frames", 1, 1)
        except BaseException:
            place.delete_prefix()
            raise
        report = _report(plan, written, content_hash, "replaced" if replaces else "added", [])
        return Staged(plan, written, content_hash, report, replaces, extras, _by_cell_column(plan, colors))
    finally:
        source.close()


def _by_cell_column(plan: IngestPlan, colors: Mapping[str, Mapping[str, str]]) -> dict[str, Mapping[str, str]]:
    """Put colours under the stored names of their columns."""
    return {column.column.stored: colors[column.source] for column in plan.columns if column.source in colors}


def _same_content(
    catalog: Catalog, source: Source, plan: IngestPlan, seen: dict[str, str]
) -> tuple[tuple[str, ...], str | None]:
    main = plan.groups[0]
    records = [r for r in read_records(catalog) if r.n_cells == main.layers[0].info.shape[0]]
    alike = records_with_features(catalog, records, main.space.name, main.width, main.feature_set)
    if not alike and not seen:
        return (), None
    content = _content_hash(plan)
    info = main.layers[0].info
    for row, block in walk(source, info):
        if main.space.kind is PointerKind.SPARSE:
            content.update(canonical(to_csr(block), info.key, row, sum_duplicates=True)[0])
        else:
            content.update(to_dense(block))
    text = content.hexdigest()
    uids = {r.uid: None for r in alike if r.content_hash == text}
    return (*uids, *([seen[text]] if text in seen else [])), text


def _content_hash(plan: IngestPlan) -> ContentHash:
    features = plan.groups[0].features
    return ContentHash(plan.cells, () if features is None else features.uids)


def _judge_duplicates(
    catalog: Catalog, plan: IngestPlan, same: tuple[str, ...], options: IngestOptions
) -> tuple[str, ...]:
    records = group_by_dataset(read_records(catalog))
    named = tuple(uid for uid, group in records.items() if group[0].name == plan.name)
    if options.on_duplicate == "replace":
        return tuple(dict.fromkeys(uid for uid in (*same, *named) if uid in records))
    if same:
        name = records[same[0]][0].name if same[0] in records else same[0]
        raise DuplicateError(
            f"{plan.schema.uri or plan.name} has the same cells, features and values as the dataset {name!r}; pass on_duplicate='skip' to "
            "leave it, or 'replace' to put this one in its place."
        )
    if named:
        raise DuplicateError(
            f"A dataset is called {plan.name!r} already; choose another name, or pass on_duplicate='replace' to put this one in its place."
        )
    return ()


def _write_groups(
    catalog: Catalog, source: Source, plan: IngestPlan, options: IngestOptions, progress: Progress
) -> tuple[tuple[WrittenGroup, ...], str]:
    content = _content_hash(plan)
    taken: dict[str, set[str]] = {}
    for group in plan.groups:
        taken.setdefault(group.space.name, set()).update(p.name for p in group.layers if p.name)
    written = []
    for i, group in enumerate(plan.groups):
        done = write_group(
            catalog, source, (plan.group_path(group), group), options, progress,
            taken=taken[group.space.name], content=content if i == 0 else None,
        )  # fmt: skip
        written.append(replace(done, n_new_features=_count_new(catalog, group)))
    return tuple(written), content.hexdigest()


def _count_new(catalog: Catalog, group: GroupPlan) -> int:
    if group.features is None:
        return 0
    if not catalog.tables.has(group.space.registry):
        return len(group.features.uids)
    known = read_registry(catalog, group.space.name).table.column("uid")
    there = pc.sum(pc.is_in(pa.array(group.features.uids, pa.string()), value_set=known.combine_chunks())).as_py()
    return len(group.features.uids) - int(there or 0)


def _write_frames(catalog: Catalog, plan: IngestPlan) -> None:
    write_frame(catalog, plan.uid, "obs", plan.cells)
    for group in plan.groups:
        if group.features is not None:
            write_frame(catalog, plan.uid, f"var.{group.pointer}", group.features.frame)


def _commit(catalog: Catalog, staged: Sequence[Staged], progress: Progress, beside: Beside | None = None) -> None:
    if not staged:
        return
    for one in staged:
        for written in one.groups:
            _register(catalog, written.group)
    progress("features", 1, 1)
    for one in staged:
        for written in one.groups:
            _lay_out(catalog, written.group)
    progress("layouts", 1, 1)
    pointers = [
        pointer_field(w.group.pointer, w.group.space.kind, w.group.space.name) for s in staged for w in s.groups
    ]
    further = {} if beside is None else beside.columns()
    pointers += [field for field, _ in further.values()]
    widen(catalog, [c.column for s in staged for c in s.plan.columns], list({p.name: p for p in pointers}.values()))
    progress("columns", 1, 1)
    schema = catalog.tables.schema(CELLS)
    catalog.tables.append(CELLS, pa.concat_tables([_cells(schema, s, further) for s in staged]))
    progress("cells", 1, 1)
    if beside is not None:
        beside.before_record(staged[0].plan.uid)
    commit_records(catalog, [record for s in staged for record in _records(s)])
    progress("records", 1, 1)
    for one in staged:
        # The dataset is visible now; a note that stays behind does no harm.
        with contextlib.suppress(StoreError):
            release_lease(catalog, one.plan.uid)
        for uid in one.replaces:
            drop_dataset(catalog, uid)
    progress("done", 1, 1)


def _register(catalog: Catalog, group: GroupPlan) -> int:
    catalog.add_space(group.space)
    if group.features is None:
        return 0
    return register_features(catalog, group.space.name, group.features.rows)


def _lay_out(catalog: Catalog, group: GroupPlan) -> None:
    if group.features is not None:
        registry = read_registry(catalog, group.space.name)
        uids = group.stored_uids
        rows = pc.index_in(pa.array(uids, pa.string()), value_set=registry.table.column("uid").combine_chunks())
        ensure_layout(catalog, uids, registry.global_index[rows.to_numpy()])


def _cells(schema: pa.Schema, staged: Staged, further: Mapping[str, tuple[pa.Field, pa.Array]]) -> pa.Table:
    plan = staged.plan
    n = plan.schema.n_cells
    columns: dict[str, Any] = {
        "uid": pa.array(new_uids(n), pa.string()),
        "dataset_uid": pa.array([plan.uid] * n, pa.string()),
        "cell_name": plan.cells.column(INDEX).cast(pa.string()),
    }
    for column in plan.columns:
        values = column_values(column, plan.cells)
        target = schema.field(column.column.stored).type
        columns[column.column.stored] = (
            values
            if values.type == target
            else column_values(replace(column, column=replace(column.column, type=target)), plan.cells)
        )
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
    at = np.where(missing, 0, row)
    group = pa.array([written.path] * n_cells, pa.string())
    if written.indptr is None:
        return pa.StructArray.from_arrays([group, pa.array(at)], ["zarr_group", "position"], mask=pa.array(missing))
    parts = [group, pa.array(written.indptr[at]), pa.array(written.indptr[at + 1]), pa.array(at)]
    return pa.StructArray.from_arrays(parts, ["zarr_group", "start", "end", "zarr_row"], mask=pa.array(missing))


def _records(staged: Staged) -> list[DatasetRecord]:
    """Describe the groups; the first one also what is kept beside."""
    kept = [staged.extras, *(WrittenExtras() for _ in staged.groups[1:])]
    return [_record(staged, written, extras) for written, extras in zip(staged.groups, kept, strict=True)]


def _record(staged: Staged, written: WrittenGroup, extras: WrittenExtras) -> DatasetRecord:
    plan = staged.plan
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
        facts=facts_json(
            format=plan.schema.format,
            n_cells=plan.schema.n_cells,
            layers={
                name: {**matrix_facts(p.info), "key": p.info.key, "features": p.info.features}
                for name, p in written.layers.items()
            },
            left_out=left_out,
            extras=extras.facts,
            colors=staged.colors,
            column_order=written.group.column_order,
            feature_set=written.group.feature_set,
        ),
    )


def _report(
    plan: IngestPlan, groups: Sequence[WrittenGroup], content_hash: str,
    status: Literal["added", "skipped", "replaced", "dry run"], notes: Sequence[str],
) -> IngestReport:  # fmt: skip
    elements = list(plan.element_reports)
    summed = []
    for written in groups:
        for name, layer in written.layers.items():
            elements.append(_layer_report(written, name, layer.info.key, str(layer.info.dtype)))
        if written.n_summed:
            summed.append(f"{written.group.layers[0].info.key}: {written.n_summed:,} repeated entries summed")
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
        notes=(*plan.notes, *summed, *notes),
    )  # fmt: skip


def _layer_report(written: WrittenGroup, name: str, key: str, dtype: str) -> ColumnReport:
    stored = f"{written.group.space.name}/{name}"
    if str(written.stored[name]) != dtype:
        return ColumnReport(key, "cast", stored, f"{dtype} held exactly as {written.stored[name]}")
    return ColumnReport(key, "kept", stored)

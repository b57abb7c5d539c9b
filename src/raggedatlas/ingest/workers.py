"""Sources staged by workers of an executor: each opens, reads and writes arrays; the caller judges them in order, and commits."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from uuid import uuid4

import pyarrow as pa

from raggedatlas.catalog.assets import read_lease, read_records, this_process
from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.layouts import feature_set
from raggedatlas.errors import AtlasError, WorkersError
from raggedatlas.ingest.feature_order import ColumnOrders
from raggedatlas.ingest.options import IngestOptions
from raggedatlas.ingest.plan import IngestPlan, plan_cells
from raggedatlas.ingest.staging import SourceOpener, StagedDataset, check_staged_duplicates, plan_source, stage
from raggedatlas.model.arguments import no_progress
from raggedatlas.model.frames import INDEX
from raggedatlas.model.reports import IngestReport
from raggedatlas.model.spaces import PointerKind
from raggedatlas.store.executors import Workers, in_order, run_tasks

T = TypeVar("T")

_CALL = "call"


@dataclass(frozen=True)
class _HashFeatures:
    """Hashes the names of the features of a source's matrices, in no order; identifying them would take as long as writing few cells."""

    opener: SourceOpener

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
    opener: SourceOpener
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
    opener: SourceOpener
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
    openers : sequence of SourceOpener
        Open the sources.
    options : IngestOptions
        The caller's choices.
    executor : Executor or Workers
        Whose workers write.
    """

    def __init__(
        self, catalog: Catalog, openers: Sequence[SourceOpener], options: IngestOptions, executor: Executor | Workers
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

"""What is attached to cells by one registry row, such as a result or geometry: planned, staged and committed by itself."""

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Generic, TypeVar

from raggedatlas.catalog.assets import release_lease, take_lease
from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import AtlasError, StoreError
from raggedatlas.model.arguments import Progress, no_progress
from raggedatlas.model.options import AddOptions
from raggedatlas.model.reports import AddReport, Done, Status

Report = TypeVar("Report", bound=AddReport)


class Attachment(ABC, Generic[Report]):
    """What is attached to cells by one registry row: a result, geometry, transcripts; `attach` brings it into the atlas.

    A subclass says how one kind is planned, staged and committed. Datasets go the same way in
    `raggedatlas.ingest.add.add_sources`, many at a time: there sources are planned and flushed in the background, and
    share a commit.

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


def attach(attachment: Attachment[Report], progress: Progress = no_progress) -> Report:
    """Add what is attached to cells: plan, stage, commit.

    A process killed on the way leaves nothing visible; the call can be run again, and `repair` and `gc` free what was
    left. After an error, also if another process adds the same meanwhile, the atlas is as it was.
    """
    catalog = attachment.catalog = attachment.catalog.session("add()")
    progress("plan", 0, 1)
    if not attachment.plan():
        return attachment.report("skipped")
    if attachment.options.dry_run:
        return attachment.report("dry run")
    try:
        take_lease(catalog, attachment.uid)
        progress("lease", 1, 1)
        attachment.stage(progress)
        done = attachment.commit(progress)
        progress("record", 1, 1)
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
    progress("done", 1, 1)
    return attachment.report(done)

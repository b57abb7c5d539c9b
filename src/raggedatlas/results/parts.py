"""Results written by several processes: each writes a part, and one commit makes all of them one table."""

import os
from dataclasses import dataclass
from pathlib import Path

from raggedatlas.errors import DuplicateError, NotFoundError, ReadOnlyError, StoreError
from raggedatlas.results.batches import BatchWriter
from raggedatlas.results.folder import DATABASE
from raggedatlas.results.receipts import Receipt, read_receipt
from raggedatlas.store.location import store_errors

PARTS = ".parts"


@dataclass(frozen=True)
class ResultPart:
    """A share of one run that another process may write; it travels by pickle (see `ResultDatasetWriter.parts`).

    Parameters
    ----------
    result_dir : str
        Result folder, by the same path on every machine.
    run : str
        Which run it belongs to.
    number : int
        Which part, from 0; rows of the table stand in the order of the parts.
    """

    result_dir: str
    run: str
    number: int

    @property
    def folder(self) -> Path:
        """Where the parts of the run tell what they wrote; it is there as long as the run."""
        return Path(self.result_dir) / DATABASE / PARTS / self.run

    @property
    def receipt(self) -> Path:
        """The file that says what the part wrote; it is there once the part is finished."""
        return self.folder / f"{self.number}.json"

    @property
    def checkpoint(self) -> Path:
        """The file that says what is finished of the part while it is written."""
        return self.folder / f"{self.number}.partial"

    def writer(self) -> "ResultPartWriter":
        """Begin to write, in the process that this part is for."""
        return ResultPartWriter(self)


class ResultPartWriter(BatchWriter):
    """Writes one part of a run, in a process of its own; nothing is visible before the run's writer commits.

    Parameters
    ----------
    part : ResultPart
        Which part.

    Raises
    ------
    NotFoundError
        If the run has ended.
    DuplicateError
        If the part is written already.

    Examples
    --------
    >>> with part.writer() as writer:  # doctest: +SKIP
    ...     writer.write_batch(ids, values)
    """

    def __init__(self, part: ResultPart) -> None:
        super().__init__(Path(part.result_dir), {}, part.checkpoint)
        self.part = part
        self._refuse_ended()
        if part.receipt.exists():
            raise DuplicateError(self._twice())
        begun = read_receipt(part.checkpoint)
        if begun is not None:
            self._take_up(begun)

    def commit(self) -> None:
        """Finish the part: say which files it wrote; a second call does nothing.

        Raises
        ------
        ReadOnlyError
            After `abort`.
        NotFoundError
            If the run has ended meanwhile; the files are removed.
        DuplicateError
            If another process has written the same part.
        """
        if self._state == "finished":
            return
        if self._state != "open":
            raise ReadOnlyError(f"Part {self.part.number} of the results in {self.result_dir} was given up.")
        self._refuse_ended()
        receipt = Receipt(self.columns, tuple(self._finish_files()))
        beside = self.part.receipt.with_name(f".{self.part.number}.{os.getpid()}")
        try:
            with store_errors(f"write {self.part.receipt}"):
                beside.write_text(receipt.to_json(), encoding="utf-8")
            # unlike a renaming, a link never takes the place of another receipt
            os.link(beside, self.part.receipt)
        except FileExistsError as error:
            self.abort()
            raise DuplicateError(self._twice()) from error
        except FileNotFoundError as error:
            self.abort()
            raise NotFoundError(self._ended()) from error
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"{self.part.receipt} cannot be written: {error.strerror or error}.") from error
        finally:
            beside.unlink(missing_ok=True)
        self.part.checkpoint.unlink(missing_ok=True)
        self._state = "finished"

    def _refuse_ended(self) -> None:
        if not self.part.folder.is_dir():
            self.abort()
            raise NotFoundError(self._ended())

    def _ended(self) -> str:
        return (
            f"Part {self.part.number} belongs to a run into {self.result_dir} that has ended; its writer was committed or given "
            "up, or this machine does not see the folder."
        )

    def _twice(self) -> str:
        return f"Part {self.part.number} of the results in {self.result_dir} is written already; each part is written once."


def missing_parts(parts: list[ResultPart]) -> list[int]:
    """Number the parts that are not finished."""
    return [part.number for part in parts if not part.receipt.is_file()]

"""What a writer has finished: columns and data files, noted in one small file that another process can go on from."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from raggedatlas.errors import CorruptError
from raggedatlas.results.folder import removed_on_error
from raggedatlas.results.fragments import Fragment
from raggedatlas.results.schema import ResultColumn
from raggedatlas.store.location import file_digest


@dataclass(frozen=True)
class Receipt:
    """What is finished of a run, or of a part of one.

    Parameters
    ----------
    columns : tuple of ResultColumn
        Outputs; none before the first batch.
    fragments : tuple of Fragment
        Finished files in row order.
    facts : mapping of str to str
        Metadata that the run began with.
    run : str
        Name of the folder of the parts, where several processes share the run.
    n_parts : int
        How many parts there are.
    """

    columns: tuple[ResultColumn, ...] = ()
    fragments: tuple[Fragment, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    run: str = ""
    n_parts: int = 0

    @property
    def n_rows(self) -> int:
        """Rows of the finished files."""
        return sum(each.n_rows for each in self.fragments)

    def to_json(self) -> str:
        """Return it as JSON."""
        columns = [{"name": each.name, "shape": each.shape, "dtype": each.dtype.name} for each in self.columns]
        files = [asdict(each) for each in self.fragments]
        told = {"columns": columns, "files": files, "facts": dict(self.facts), "run": self.run, "n_parts": self.n_parts}
        return json.dumps(told)


def write_receipt(path: Path, receipt: Receipt) -> None:
    """Replace a receipt in one step.

    Raises
    ------
    StoreError
        If the disk refuses.
    """
    with removed_on_error(path) as beside:
        beside.write_text(receipt.to_json(), encoding="utf-8")


def read_receipt(path: Path) -> Receipt | None:
    """Read a receipt; None where there is none.

    Raises
    ------
    CorruptError
        If it does not read.
    """
    if not path.is_file():
        return None
    try:
        told: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        columns = tuple(
            ResultColumn(each["name"], tuple(each["shape"]), np.dtype(each["dtype"])) for each in told["columns"]
        )
        fragments = tuple(Fragment(**each) for each in told["files"])
        run, n_parts = str(told.get("run", "")), int(told.get("n_parts", 0))
        facts = {str(name): str(value) for name, value in told.get("facts", {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{path} does not read: {error}.") from error
    if Path(run).name != run or any(Path(each.name).name != each.name for each in fragments):
        raise CorruptError(f"{path} names files outside of the folder of the results.")
    return Receipt(columns, fragments, facts, run, n_parts)


def check_files(receipt: Receipt, data: Path, what: str, *, deep: bool = False) -> None:
    """Compare the files of a receipt with what it says.

    Parameters
    ----------
    receipt : Receipt
        What was finished.
    data : pathlib.Path
        The folder of the files.
    what : str
        Who wrote them, for messages.
    deep : bool
        Whether every byte is compared, and not the sizes alone.

    Raises
    ------
    CorruptError
        If one is missing or differs.
    """
    for fragment in receipt.fragments:
        path = data / fragment.name
        if not path.is_file() or path.stat().st_size != fragment.n_bytes:
            raise CorruptError(
                f"{what} wrote {path} with {fragment.n_bytes:,} bytes; it is not there any more, or has another size."
            )
        if deep and fragment.sha256 and file_digest(path) != fragment.sha256:
            raise CorruptError(f"{what} wrote {path} with other bytes than it has now; begin again without it.")

"""Makes ``docs/reference/foreign-files.md`` from ``tests/data/foreign.json``; ``--check`` only says whether it is up to date."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIST = ROOT / "tests" / "data" / "foreign.json"
PAGE = ROOT / "docs" / "reference" / "foreign-files.md"

HEAD = """# Files of other software

Files that other software wrote and the tests read, with what is compared. `scripts/foreign_files.py` makes this page from
`tests/data/foreign.json`; origins and licences are in `tests/data/README.md`.

| file | written by | version | read by | compared |
|---|---|---|---|---|
"""


def page() -> str:
    """Return the text of the page."""
    rows = json.loads(LIST.read_text())
    lines = [
        f"| `{row['file']}` | {row['software']} | {row['version']} | `{row['read_by'].replace(', ', '`, `')}` | {row['compared']} |"
        for row in sorted(rows, key=lambda row: (row["file"], row["software"], row["version"], row["read_by"]))
    ]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(
            0 if PAGE.exists() and PAGE.read_text() == page() else f"{PAGE} is not what {LIST} makes; run {__file__}."
        )
    PAGE.write_text(page())

"""The command ``raggedatlas``: each verb parses its options, calls one library function and prints the result."""

import sys

from raggedatlas.cli.startup import configure_process, defer_pandas_import, import_command


def main() -> None:
    """Run the command line; exit codes are 0 (success), 1 (refused, or problems found) and 2 (usage error)."""
    # Both before the command is imported: that creates most of the objects, and may import pandas.
    configure_process()
    defer_pandas_import()
    app = import_command(*sys.argv[1:2])
    app(prog_name="raggedatlas")

"""The command ``raggedatlas``: each verb parses, calls one library function, and prints."""

import sys

from raggedatlas.cli.startup import import_verb, put_off_pandas, quicken


def main() -> None:
    """Run the command line; exit codes are 0 for done, 1 for refused or found wrong, 2 for a command that was not understood."""
    quicken()
    put_off_pandas()
    app = import_verb(*sys.argv[1:2])
    app(prog_name="raggedatlas")

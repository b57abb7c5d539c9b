"""``python -m raggedatlas.cli`` is the command ``raggedatlas``."""

from raggedatlas.cli import main

main()

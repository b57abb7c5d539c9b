"""``python -m raggedatlas`` is the command ``raggedatlas``."""

from raggedatlas.cli import main

main()

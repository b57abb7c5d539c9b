"""The options of `add` are declared for type checkers and for the code, and described once: the three agree."""

from dataclasses import fields
from typing import get_type_hints

import pytest

from raggedatlas.cli.options import described
from raggedatlas.model.options import AddChoices, AddOptions, GeometryOptions, IngestOptions, ResultOptions

pytestmark = pytest.mark.fast

KINDS = (IngestOptions, ResultOptions, GeometryOptions)


def test_every_option_is_a_keyword_argument() -> None:
    """`AddChoices` has the options of all kinds of `add`, with the same types except that None, the default, is left out."""
    common = {field.name for field in fields(AddOptions)}
    names = {field.name for kind in KINDS for field in fields(kind)} - common
    hints = get_type_hints(AddChoices)
    assert set(hints) == names
    for kind in KINDS:
        for name, hint in get_type_hints(kind).items():
            if name not in common:
                assert hint in (hints[name], hints[name] | None), (kind, name)


def test_every_option_is_described() -> None:
    """The command line finds a sentence for each option, in plain text."""
    for name in {field.name for kind in KINDS for field in fields(kind)}:
        assert len(described(name)) > 10, name
        assert "`" not in described(name), name

"""The options of `add` are declared for type checkers, for the code and for the command line: the three agree."""

from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest

from raggedatlas.cli.add import AddOptions as CommandOptions
from raggedatlas.cli.options import GeometryLinkOptions
from raggedatlas.ingest.geometry_plan import GeometryOptions
from raggedatlas.ingest.options import AddChoices, AddOptions, IngestOptions
from raggedatlas.ingest.results import ResultOptions

pytestmark = pytest.mark.fast

KINDS = (IngestOptions, ResultOptions, GeometryOptions)
TEXTS = {"obs", "cast", "feature_id", "link", "unassigned"}
"""Options that the command line reads from texts such as ``OLD=NEW``."""


def default_of(field: "Field[Any]") -> Any:
    """Return the default of a field."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def choices_of(hint: Any) -> tuple[Any, ...]:
    """Return the values that a hint allows, none where it is no choice between values."""
    hint = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return get_args(hint) if get_origin(hint) is Literal else ()


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


@pytest.mark.parametrize("group", [CommandOptions, GeometryLinkOptions])
def test_the_command_line_has_the_same_defaults_and_choices(group: Any) -> None:
    """An option that the command line passes on as it is has the choices and the default of the Python call."""
    hints, checked = get_type_hints(group, include_extras=True), 0
    for field in fields(group):
        for kind in KINDS:
            known = {one.name: one for one in fields(kind)}
            if field.name not in known or field.name in TEXTS or (field.name, group) == ("space", CommandOptions):
                continue
            assert default_of(field) == default_of(known[field.name]), (kind, field.name)
            assert choices_of(hints[field.name]) == choices_of(get_type_hints(kind)[field.name]), (kind, field.name)
            checked += 1
    assert checked > 5

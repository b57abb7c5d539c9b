"""A default that the command line states is that of the Python call: options that `like` cannot take over, as their modules are slow to import."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import typer.main

import raggedatlas as ra
from raggedatlas.cli.commands import app
from raggedatlas.query.query import Query
from raggedatlas.wings.results.verbs import evaluation, inference, lookup
from raggedatlas.wings.vectors.builder import ChunkingOptions
from raggedatlas.wings.vectors.converters.convert import Conversion
from raggedatlas.wings.vectors.pyramid import PyramidOptions
from raggedatlas.wings.viewer.scene import Look

CALLS: dict[str, list[Callable[..., Any]]] = {
    "infer": [inference.infer],
    "test": [evaluation.test],
    "engine": [inference.engine],
    "neighbors": [lookup.neighbors],
    "save-to-database": [lookup.save_to_database],
    "search": [Query.search],
    "view": [Look],
    "visualize": [Look],
    "convert": [PyramidOptions, Conversion, ChunkingOptions],
    "query": [Query.sample, Query.join, Query.within, ra.AtlasView.query],
    "add-csc": [ra.RaggedAtlas.add_csc],
    "find": [ra.AtlasView.find_datasets_with_features],
}
RENAMED = {"queries": "n_queries", "within_by": "by", "level_links": "cross_level_storage"}
"""Options whose Python argument has another name."""


@pytest.mark.parametrize("command", CALLS)
def test_defaults_are_those_of_python(command: str) -> None:
    """Each command has some of them."""
    stated = {one.name: one.default for one in typer.main.get_command(app).commands[command].params if one.default}  # type: ignore[attr-defined]
    compared = {}
    for call in CALLS[command]:
        for name, parameter in inspect.signature(call).parameters.items():
            option = next((own for own, other in RENAMED.items() if other == name and own in stated), name)
            if option in stated and parameter.default is not parameter.empty and parameter.default is not None:
                compared[option] = (stated[option], parameter.default)
    assert compared
    assert {name: own for name, (own, theirs) in compared.items() if own != theirs} == {}

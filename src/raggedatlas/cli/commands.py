"""The application with all commands. The order of the imports is the order of the commands within a panel of the help."""

from raggedatlas.cli import add, assets, browse, convert, genes, maintenance, models, query, validate, viewers
from raggedatlas.cli.app import app
from raggedatlas.model.plugins import COMMANDS, plugins

__all__ = [
    "add",
    "app",
    "assets",
    "browse",
    "convert",
    "genes",
    "maintenance",
    "models",
    "query",
    "validate",
    "viewers",
]

for entry in plugins(COMMANDS).values():
    app.command(entry.name, rich_help_panel="Extensions")(entry.load())

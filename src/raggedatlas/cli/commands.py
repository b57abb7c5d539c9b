"""The application with all commands. The order of the imports is the order of the commands within a panel of the help."""

import warnings
from pkgutil import resolve_name

from raggedatlas.cli import add, browse, convert, genes, maintenance, models, query, validate, viewers
from raggedatlas.cli.app import app
from raggedatlas.model.wings import installed_wings

__all__ = [
    "add",
    "app",
    "browse",
    "convert",
    "genes",
    "maintenance",
    "models",
    "query",
    "validate",
    "viewers",
]

# Built-in commands win: `import_command` runs the frequent ones without this module, so an extension of
# the same name would replace a command only where all are imported.
BUILT_IN = {info.name for info in app.registered_commands} | {info.name for info in app.registered_groups}

for name, where in (item for wing in installed_wings() for item in wing.commands.items()):
    if name in BUILT_IN:
        continue
    try:
        function = resolve_name(where)
    except Exception as error:  # noqa: BLE001  (another package's import: it must not end the commands of this one)
        warnings.warn(f"The command {name!r} of another package cannot be loaded: {error!r}", stacklevel=1)
        continue
    app.command(name, rich_help_panel="Extensions")(function)

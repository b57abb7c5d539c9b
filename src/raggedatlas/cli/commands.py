"""The application with all commands: those of the core, and those of the wings."""

import warnings
from pkgutil import resolve_name

from raggedatlas.cli import add, browse, convert, genes, maintenance, query, validate  # noqa: F401  (they add commands)
from raggedatlas.cli.app import PANELS, app
from raggedatlas.model.wings import every_wing

__all__ = ["app"]


def names() -> set[str | None]:
    """Return the names of all commands so far."""
    return {info.name for info in app.registered_commands} | {info.name for info in app.registered_groups}


# Commands of the core win: `import_command` runs the frequent ones without this module, so an extension of
# the same name would replace a command only where all are imported.
for name, where in (item for wing in every_wing() for item in wing.commands.items()):
    if name in names():
        continue
    try:
        function = resolve_name(where)
    except Exception as error:  # noqa: BLE001  (another package's import: it must not end the commands of this one)
        warnings.warn(f"The command {name!r} of another package cannot be loaded: {error!r}", stacklevel=1)
        continue
    # The decorator `command` has put it among the commands already; other functions have typer's annotations only.
    if name not in names():
        app.command(name, rich_help_panel="Extensions")(function)

# The order of the panels in the help is that of their first commands.
app.registered_commands.sort(key=lambda info: PANELS.index(p) if (p := info.rich_help_panel) in PANELS else len(PANELS))

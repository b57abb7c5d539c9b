"""The page of all commands and their options, made of the commands themselves: docs/reference/options.md."""

from enum import Enum
from typing import Any, get_args

import typer.main

from raggedatlas.cli.commands import app

HEAD = """# Options of the command

What `raggedatlas COMMAND --help` prints, on one page; [the command](command.md) says what each command is for. Commands on an atlas also
take `--storage-option KEY=VALUE`, `--sources allow|deny|ask` (may files that datasets are [linked](../how-to/link-files.md) to be read?), `--json` and `--debug`.
"""
SHARED = ("storage_option", "sources", "as_json", "debug")
WORDS = {str: "TEXT", int: "NUMBER", float: "NUMBER"}


def options_page() -> str:
    """Return the page as Markdown."""
    page = HEAD
    for name, command in sorted(commands_of(typer.main.get_command(app))):
        rows = "".join(row_of(parameter) for parameter in command.params if parameter.name not in SHARED)
        page += f"\n## {name}\n\n{command.help}\n\n| | |\n|---|---|\n{rows}"
    return page


def commands_of(group: Any, path: str = "") -> list[tuple[str, Any]]:
    """List the commands of a group with their names, those of groups within it too."""
    found = []
    for name, command in group.commands.items():
        found += commands_of(command, f"{name} ") if hasattr(command, "commands") else [(f"{path}{name}", command)]
    return found


def row_of(parameter: Any) -> str:
    """Return the row of an argument or option: how it is spelled, and its help with the default."""
    kind = parameter.type_descriptor.annotation
    choices = [one.value for one in kind] if isinstance(kind, type) and issubclass(kind, Enum) else get_args(kind)
    choices = [one for one in choices if isinstance(one, str)]
    value = parameter.metavar or ", ".join(choices) or WORDS.get(kind, "")
    if parameter.param_type_name == "argument":
        names = parameter.metavar or parameter.name.upper()
    else:
        names = ", ".join((*parameter.opts, *parameter.secondary_opts))
        names += f" {value}" if value and not parameter.is_flag else ""
    default = parameter.default if parameter.show_default is True else parameter.show_default
    text = parameter.help + (f" Default: {default}." if default not in (None, False, "") else "")
    return f"| `{names}` | {text} |\n".replace("ATLAS|FILE", "ATLAS or FILE")

"""The application `raggedatlas`: its group of commands, and errors in one line that name commands and options in place of methods."""

import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Container
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from raggedatlas import __version__
from raggedatlas.cli.options import DEBUG, Verb, expand_option_groups
from raggedatlas.cli.printing import print_error, print_json, print_text
from raggedatlas.errors import AtlasError, UnknownValueWarning

# The words of a call may hold one level of parentheses. A call that is followed by `.name` is left alone,
# as it is the beginning of a chain that no command replaces.
_CALL = re.compile(
    r"(?<![\w.])(?:RaggedAtlas\.|atlas\.)?(?P<name>(?:identity\.)?[a-z_]+)\((?P<words>(?:[^()]|\([^()]*\))*)\)(?!\.[a-z])"
)
_VERBS = {
    "drop_dataset": "drop", "drop_snapshot": "drop-snapshot", "expire_snapshots": "expire-snapshots", "rename_dataset": "rename", "set_license": "set-license",
    "delete_cells": "delete-cells", "drop_result": "drop-result", "drop_geometry": "drop-geometry", "add_csc": "add-csc",
    "map_terms": "map-terms", "load_terms": "load-terms", "list_versions": "versions", "list_datasets": "ls", "geometries": "geometries", "results": "results",
    **{f"identity.{name}": f"genes {name}" for name in ("link", "unlink", "load", "remove", "explain", "tables", "history")},
    **{name: name for name in ("create", "add", "annotate", "validate", "verify", "repair", "snapshot", "restore", "optimize", "gc", "purge", "diff", "materialize", "relink", "publish", "clone")},
}  # fmt: skip
"""Methods of an atlas -> the commands that do the same."""


_ARGUMENT = re.compile(
    r"(?<![\w.'-])(?P<name>[a-z_]+)="
    r"(?P<value>'[^']*'|\"[^\"]*\"|\d[\w.]*|\{[^{}]*\}|\[[^\]]*\]|\([^()]*\)|True\b|False\b|\.\.\.|(?=[\s.,;:)]|$))"
    r"(?P<others>(?:(?:,? or |, )'[^']*')*)"
)
_METHOD = re.compile(r"(?<![\w.])\.(?P<name>[a-z_]+)\((?P<words>(?:[^()]|\(\))*)\)")
_PAIR = re.compile(r"(?:'([^']*)'|([\w ]+)): *(?:'([^']*)'|(\.\.\.|[\w ]+))")
_QUOTED = re.compile(r"'([^']*)'|\"([^\"]*)\"")

_OPTIONS = {
    "axes": "--option axes=", "bbox": "--within", "by": "--within-by", "categories": "--category", "cutting": "--chunk-shape", "element": "--option element=",
    "embeddings": "--embedding", "format": "--to", "genes": "--gene", "k": "-k", "min_datasets": "--join", "n_parts": "--parts",
    "n_queries": "--queries", "output": "--prediction", "outputs": "--output-name", "steps": "--levels", "system": "--option system=", "uns": "--no-uns",
    "version": "--cxg-version",
}  # fmt: skip
"""Arguments -> options of other names that give them, where the command has these."""

_PYTHON_ONLY = (
    "allow_unknown", "axes", "extras", "gene_names", "has_features", "max_element_bytes", "measurement", "registries", "uns", "version", "zipmap",
)  # fmt: skip
"""Arguments of calls that commands make, for which they have no option."""


def to_command_line(text: str, options: Container[str] = ()) -> str:
    """Replace Python calls and arguments in a message by commands and options.

    ATLAS and FILE are placeholders for the reader. `options` are those of the command that prints the message, which
    replace arguments; values are spelled as a shell takes them.

    Examples
    --------
    >>> to_command_line("Run repair(), or drop_dataset('5a3e').")
    'Run raggedatlas repair ATLAS, or raggedatlas drop ATLAS 5a3e.'
    >>> to_command_line("Pass cast={'c': 'str'}, or layers=[...].", {"--cast", "--layer"})
    'Pass --cast c=str, or --layer.'
    """
    parts, start = [], 0
    # Calls first, as the arguments within are theirs.
    for call in _CALL.finditer(text):
        parts += [_outside_calls(text[start : call.start()], options), _call_to_command(call)]
        start = call.end()
    return "".join([*parts, _outside_calls(text[start:], options)])


def _call_to_command(found: re.Match[str]) -> str:
    """Return the command that does what a call does; what no command does is said to be of Python."""
    verb, words = _VERBS.get(found["name"]), found["words"]
    if verb is None:
        return f"{found[0]} in Python" if found[0].startswith("atlas.") or _ARGUMENT.search(words) else found[0]
    given = [_argument_to_option(one, None) for one in _ARGUMENT.finditer(words) if one["value"] not in ("...", "")]
    # Only quoted texts can become words of a command; for anything else the reader gets placeholders.
    plain = re.findall(r"'([^']*)'", words) if re.fullmatch(r"(?:'[^']*'(?:, )?)+", words) else []
    plain = [shlex.quote(word) for word in plain]
    if verb == "validate" and plain:
        plain = ["--level", *plain]
    if verb == "create":
        return " ".join(["raggedatlas create", *(plain or ["ATLAS"]), *given])
    return " ".join([f"raggedatlas {verb} ATLAS", *(plain or ["FILE"] * (verb in ("add", "annotate"))), *given])


def _outside_calls(text: str, options: Container[str]) -> str:
    text = _METHOD.sub(lambda found: _method_to_option(found, options), text)
    # Of a chain of calls.
    text = re.sub(r"(?<=[\w'])--(?=[a-z])", " --", text)
    return _ARGUMENT.sub(lambda found: _argument_to_option(found, options), text)


def _method_to_option(found: re.Match[str], options: Container[str]) -> str:
    """Return the options that do what a method of a query does; `[]` is no value of an option."""
    option, words = _option_of(found["name"], options), found["words"]
    if option is None or words == "[]":
        return f"{found[0]} in Python" if option else found[0]
    plain = [one or two for one, two in _QUOTED.findall(words)] if re.fullmatch(r"(?:'[^']*'(?:, )?)+", words) else []
    return " ".join(f"{option} {shlex.quote(word)}" for word in plain) or option


def _option_of(name: str, options: Container[str] | None) -> str | None:
    """Return the option that gives an argument, where a command has it; repeatable options have a singular name."""
    word = f"--{name.strip('_').replace('_', '-')}"
    known = (_OPTIONS.get(name, word), word, word.removesuffix("s"), f"{word}s")
    return next((one for one in known if options is None or one.partition(" ")[0] in options), None)


def _argument_to_option(found: re.Match[str], options: Container[str] | None) -> str:
    name, value = found["name"], found["value"]
    if name == "copy" and (options is None or "--link" in options):
        return {"True": "no --link", "False": "--link"}.get(value, "--link-columns")
    option = _option_of(name, options)
    if option is None:
        return f"{found[0]} in Python" if name in _PYTHON_ONLY else found[0]
    if option.endswith("="):
        return f"{option}NAME"
    if value.startswith("{"):
        words = [f"{a or b}={c or d}".replace("...", "NAME") for a, b, c, d in _PAIR.findall(value)]
    elif value == "[]":
        words = [""]
    else:
        words = [value] if value[:1].isdigit() else [one or two for one, two in _QUOTED.findall(value)]
    others = _QUOTED.sub(lambda word: shlex.quote(word[1] or word[2]), found["others"])
    return (" ".join(f"{option} {shlex.quote(word)}" for word in words) or option) + others


EXIT_OK, EXIT_FAILURE, EXIT_USAGE = 0, 1, 2

BUILD, INSPECT, QUERY, MODELS, SNAPSHOTS, MAINTENANCE = (
    "Build",
    "Inspect",
    "Query",
    "Models",
    "Snapshots",
    "Maintenance",
)
PANELS = (BUILD, INSPECT, SNAPSHOTS, MAINTENANCE, MODELS, QUERY)
"""Panels of the help, in order."""


class Commands(TyperGroup):
    """Command group that reports errors in one line."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401  (typer does not export the class)
        """Run a verb; errors of this package or of the system end it with exit code 1."""
        try:
            with warnings.catch_warnings():
                # `--strict` turns these into errors later, when `super().invoke` parses the options of the verb.
                warnings.simplefilter("always", UnknownValueWarning)
                warnings.showwarning = _show_warnings_once()
                done = super().invoke(ctx)
            # Here instead of at exit, so that a closed pipe is noticed within this `try`.
            sys.stdout.flush()
            return done
        except BrokenPipeError:
            # The reader has closed the pipe, for instance `head`; flushing at exit must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_OK) from None
        except (AtlasError, OSError, UnknownValueWarning) as error:
            if ctx.meta.get(DEBUG):
                raise
            command = self.commands.get(ctx.invoked_subcommand)
            # A group such as `genes` has no options of its own; those of its commands count.
            called = [item for item in (command, *getattr(command, "commands", {}).values()) if item]
            options = {option for item in called for parameter in item.params for option in parameter.opts}
            print_error(to_command_line(str(error) or type(error).__name__, options))
            raise typer.Exit(EXIT_FAILURE) from None

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401  (typer does not export the classes)
        """Find a command; underscores are hyphens, as the names of functions have them."""
        return super().get_command(ctx, cmd_name) or super().get_command(ctx, cmd_name.replace("_", "-"))

    def main(self, *args: Any, **extra: Any) -> Any:  # noqa: ANN401  (as the parent has it)
        """Parse, run and exit; usage errors are reported in one line too."""
        # In standalone mode typer prints usage errors itself, in several lines, and exits.
        exits = extra.pop("standalone_mode", True)
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
        except typer.Abort:
            print_error("stopped")
            code = EXIT_FAILURE
        except typer.TyperException as error:
            # typer exports only the root of the classes that have a context.
            failed: Any = error
            context = getattr(failed, "ctx", None)
            path = context.command_path if context is not None else "raggedatlas"
            # Values are parsed by pydantic, which puts this before the message of a parser.
            message = failed.format_message().replace("Value error, ", "").rstrip(".")
            print_error(f"{message}{'' if message.endswith('?') else '.'} See {path} --help.")
            code = EXIT_USAGE
        if not exits:
            return code
        sys.exit(code if isinstance(code, int) else EXIT_OK)


def _show_warnings_once() -> Callable[..., None]:
    """Return a `showwarning` that prints warnings of this package once, in one line, and others as usual."""
    usual, seen = warnings.showwarning, set[str]()

    def show(message: Warning | str, category: type[Warning], *atlas_options: Any) -> None:  # noqa: ANN401  (as warnings calls it)
        if category is not UserWarning and not issubclass(category, UnknownValueWarning):
            usual(message, category, *atlas_options)
        elif str(message) not in seen:
            seen.add(str(message))
            print_error(f"warning: {message}")

    return show


app = typer.Typer(
    name="raggedatlas",
    cls=Commands,
    help="One store for single-cell and spatial atlases whose datasets do not share their features.",
    epilog="Start with: raggedatlas create pbmc.atlas",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def print_result(result: Any, as_json: bool) -> None:  # noqa: ANN401
    """Print a report, as `to_dict` or as Python shows it, with commands in place of calls; or one of a document and a text."""
    if isinstance(result, tuple):
        document, text = result
    else:
        document, text = result.to_dict(), to_command_line(str(result))
    print_json(document) if as_json else print_text(text)


def command(
    panel: str | None, example: str, *, name: str | None = None, group: typer.Typer = app
) -> Callable[[Verb], Callable[..., None]]:
    """Return a decorator that makes a function a command, whose parameters may be groups of options.

    `panel` of the help lists the command; `example` is a command line shown below its help, without the name of the
    program. `name` is by default that of the function. The command is added to `group`.
    """

    def add(verb: Verb) -> Callable[..., None]:
        epilog = f"Example: raggedatlas {example}"
        own = name or verb.__name__.replace("_", "-")
        return group.command(own, rich_help_panel=panel, epilog=epilog)(expand_option_groups(verb, print_result))

    return add


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"raggedatlas {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Print the help if no verb is given."""
    ctx.meta[DEBUG] = debug
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(EXIT_USAGE)

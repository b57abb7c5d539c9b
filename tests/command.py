"""The command in this process, as tests call it: what it answers, prints, or refuses in one line."""

import json
import shlex
from typing import Any

from typer.testing import CliRunner

from raggedatlas.cli.commands import app


def ask(*words: object) -> Any:
    """Run a command, given as words or as one line, and return its result."""
    given = shlex.split(str(words[0])) if len(words) == 1 else [str(word) for word in words]
    return CliRunner().invoke(app, given)


def done(*words: object) -> str:
    """Run a command that must succeed, and return what it printed on stdout."""
    result = ask(*words)
    assert result.exit_code == 0, (result.stdout, result.stderr, result.exception)
    return str(result.stdout)


def read(*words: object) -> Any:
    """Run a command that must succeed with --json, and return the document."""
    return json.loads(done(f"{words[0]} --json") if len(words) == 1 else done(*words, "--json"))


def refused(*words: object, code: int = 1) -> str:
    """Run a command that must be refused: one line on stderr, no traceback; return the line."""
    result = ask(*words)
    assert result.exit_code == code, (words, result.exit_code, result.stdout, result.stderr, result.exception)
    lines = [line for line in result.stderr.splitlines() if line.startswith("raggedatlas: ")]
    assert len(lines) == 1, (words, result.stderr)
    assert "Traceback" not in result.output, words
    return str(lines[0])

"""Advice of the library, which speaks of methods, spelled as commands."""

import re

_CALL = re.compile(
    r"(?<![\w.])(?:RaggedAtlas\.|atlas\.)?(?P<name>(?:identity\.)?[a-z_]+)\((?P<words>(?:[^()]|\([^()]*\))*)\)(?!\.[a-z])"
)
_VERBS = {
    "drop_dataset": "drop", "drop_result": "drop-result", "drop_geometry": "drop-geometry", "add_csc": "add-csc",
    "list_versions": "versions", "list_datasets": "ls", "geometries": "geometries", "results": "results",
    **{f"identity.{name}": f"genes {name}" for name in ("link", "unlink", "load", "remove", "explain", "tables", "history")},
    **{name: name for name in ("create", "add", "validate", "repair", "snapshot", "restore", "optimize", "gc", "purge", "diff")},
}  # fmt: skip
"""Methods of an atlas -> the commands that do the same."""


def as_commands(text: str) -> str:
    """Spell the methods of an atlas that a text names as commands; ATLAS and FILE are for the reader to fill in.

    Examples
    --------
    >>> as_commands("Run repair(), or drop_dataset('5a3e').")
    'Run raggedatlas repair ATLAS, or raggedatlas drop ATLAS 5a3e.'
    """
    return _CALL.sub(_as_command, text)


def _as_command(found: re.Match[str]) -> str:
    """Spell the call of a method of an atlas as a command; the atlas that it is about is for the reader to fill in."""
    verb = _VERBS.get(found["name"])
    if verb is None:
        return found[0] if not found[0].startswith("atlas.") else f"{found[0]} in Python"
    words = re.findall(r"'([^']*)'", found["words"]) if re.fullmatch(r"(?:'[^']*'(?:, )?)+", found["words"]) else []
    if verb == "validate" and words:
        words = ["--level", *words]
    if verb == "create":
        return " ".join(["raggedatlas create", *(words or ["ATLAS"])])
    return " ".join([f"raggedatlas {verb} ATLAS", *(words or ["FILE"] * (verb == "add"))])

"""The HTML page: program, style and (in a file) data in one document; nothing is fetched from elsewhere."""

import base64
import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.formats.output_files import written_aside
from raggedatlas.wings.viewer.arrow_streams import (
    bounds_of,
    column_part,
    describe_columns,
    ids_part,
    is_hex,
    numbers_part,
    points_part,
)
from raggedatlas.wings.viewer.means import compute_means, groups_of, has_groups
from raggedatlas.wings.viewer.scene import Scene

PROGRAM, STYLE, LICENCES, RECORD = "viewer.js", "viewer.css", "LICENCES.txt", "record.json"
_HEX_BYTES = 8
_EMPTY = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"  # an empty style element, which regl-scatterplot makes
_LEVEL = 4


def bundled(name: str) -> str:
    """Read a file of the built page."""
    return (files("raggedatlas.wings.viewer") / "bundle" / name).read_text(encoding="utf-8")


def policy(script: str, style: str, connect: str) -> str:
    """Write a content-security policy: nothing but what is named, and no other page may frame this one.

    `script` and `style` are the sources of program and looks, and `connect` is where data may be fetched from.
    ``'unsafe-eval'`` is added to `script`, because regl compiles its drawing commands from source text that it
    generates; inline scripts stay refused.

    Examples
    --------
    >>> policy("'self'", "'self'", "'none'").split("; ")[0]
    "default-src 'none'"
    """
    rules = {
        "default-src": "'none'",
        "script-src": f"{script} 'unsafe-eval'",
        "style-src": f"{style} {_EMPTY}",
        "img-src": "data: blob:",
        "connect-src": connect,
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def manifest_of(
    scene: Scene, genes: Mapping[str, NDArray[np.float32]] | None = None, *, allow_annotate: bool = False
) -> dict[str, Any]:
    """Describe a scene for the page.

    `genes`, (n,) by name, are those that a file holds; None if the page fetches its data from a server.
    `allow_annotate` is whether that server writes labels.
    """
    served = genes is None
    origin = scene.origin if served else None
    grouping = [column for column in scene.columns if has_groups(column)]
    return {
        "scene": scene.key,
        "title": scene.look.title,
        "subtitle": scene.look.subtitle,
        "theme": scene.look.theme,
        "color": scene.colored_by(),
        "n": scene.n,
        "n_total": scene.n_total,
        "notes": list(scene.notes),
        "bounds": bounds_of(scene),
        "hex": _HEX_BYTES if is_hex(scene.ids) else None,
        "columns": describe_columns(scene),
        "genes": [{"name": name, "key": f"g{i}"} for i, name in enumerate(genes or ())],
        "genes_served": served and scene.genes is not None,
        "served": served,
        # A server computes those that are asked for.
        "means": {
            column.name: None if genes is None else compute_means(genes, groups_of(column)) for column in grouping
        },
        "compares": served and hasattr(scene.genes, "compare"),
        "embeddings": [] if origin is None else origin.embeddings(),
        "allow_annotate": allow_annotate,
    }


def embed_json(document: Mapping[str, Any]) -> str:
    r"""Return JSON that is safe inside a script element, whatever the names and values are.

    Examples
    --------
    >>> embed_json({"a": "</script>"})
    '{"a": "\\u003c/script\\u003e"}'
    """
    text = json.dumps(document, ensure_ascii=False, allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def served_page(scene: Scene, *, allow_annotate: bool = False) -> str:
    """Return the page for a server, which loads program, style and data by relative addresses."""
    manifest = embed_json(manifest_of(scene, allow_annotate=allow_annotate))
    return "".join(
        _document(
            scene, "", f'<link rel="stylesheet" href="{STYLE}">', manifest, [f'<script src="{PROGRAM}"></script>']
        )
    )


def write_page(scene: Scene, path: Path, *, genes: Sequence[str] = (), overwrite: bool = False) -> Path:
    """Write one HTML file that needs nothing else, not even a network, with the values of some genes."""
    color = scene.look.color
    if color is not None and color not in {column.name for column in scene.columns}:
        # A file has no server to ask for the gene that it is first coloured by.
        genes = [color, *(name for name in genes if name != color)]
    values = scene.read_genes(genes)
    program, style = bundled(PROGRAM), bundled(STYLE)
    rules = policy(_hash_of(program), _hash_of(style), "'none'")
    manifest = embed_json(manifest_of(scene, values))
    # The program is last: it runs as soon as it is parsed, and needs the elements before it.
    body = chain(_parts_of(scene, values.values()), [f"<script>{program}</script>"])
    head = f"<style>{style}</style>"
    # Translated line ends would change the program, whose hash is in the policy.
    with written_aside(path, overwrite=overwrite) as new, new.open("w", encoding="utf-8", newline="\n") as out:
        out.writelines(_document(scene, rules, head, manifest, body))
    return path


def _parts_of(scene: Scene, genes: Iterable[NDArray[np.float32]]) -> Iterator[str]:
    yield _part("points", points_part(scene))
    yield _part("ids", ids_part(scene))
    for i, column in enumerate(scene.columns):
        yield _part(f"c{i}", column_part(column))
    for i, values in enumerate(genes):
        yield _part(f"g{i}", numbers_part(values))


def _part(key: str, data: bytes) -> str:
    text = base64.b64encode(gzip.compress(data, _LEVEL, mtime=0)).decode("ascii")
    return f'<script type="application/octet-stream" id="part-{key}">{text}</script>\n'


def _hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def _document(scene: Scene, rules: str, head: str, manifest: str, body: Iterable[str]) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    # A policy in a `meta` element applies only to what follows it.
    if rules:
        yield f'<meta http-equiv="Content-Security-Policy" content="{escape(rules)}">\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="referrer" content="no-referrer">\n'
    yield f'<link rel="icon" href="data:,">\n<title>{escape(scene.look.title)}</title>\n{head}\n</head>\n<body>\n'
    yield f'<script type="application/json" id="manifest">{manifest}</script>\n'
    yield from body
    yield "\n</body>\n</html>\n"

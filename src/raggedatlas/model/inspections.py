"""What stands in a file or folder, as a tree that prints and shows itself."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from math import prod
from pathlib import Path
from typing import Any

FOLDED = {
    "csr_matrix", "csc_matrix", "categorical", "nullable-integer", "nullable-boolean", "nullable-string-array", "awkward-array",
}  # fmt: skip
"""Encodings whose members are parts of one value, and are told in one line."""

_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True, slots=True)
class Element:
    """One element of a file.

    Parameters
    ----------
    path, name : str
        Where it stands, and the last part of that.
    encoding : str
        Type and version as declared, ``""`` where it declares none.
    kind : str
        What it is: the declared type, or what it looks like.
    shape : tuple of int, optional
        Its sizes; None for a mapping.
    dtype : str
        Type of its values; of a group, of its main part.
    chunks, shards : tuple of int, optional
        What is decoded at once, and what is stored as one object.
    compression : str
        Filters and compressors in the order of writing, ``""`` for none.
    n_bytes : int
        Decoded size without variable-length text.
    n_stored : int
        Bytes in the file; text of variable length in HDF5 is not counted.
    n_entries : int, optional
        Stored entries of a sparse matrix.
    fault : str
        Why it cannot be read, ``""`` where it can.
    children : tuple of Element
        What a group holds.
    """

    path: str
    name: str
    encoding: str
    kind: str
    shape: tuple[int, ...] | None
    dtype: str
    chunks: tuple[int, ...] | None
    shards: tuple[int, ...] | None
    compression: str
    n_bytes: int
    n_stored: int
    n_entries: int | None
    fault: str
    children: "tuple[Element, ...]"

    @property
    def shown(self) -> "tuple[Element, ...]":
        """The children that have a line of their own."""
        return () if self.encoding and self.kind in FOLDED else self.children

    def facts(self) -> str:
        """Say in one line what it is."""
        parts = [self.encoding or (f"({self.kind}, undeclared)" if self.kind else "")]
        if self.shape is not None:
            parts.append(" x ".join(f"{n:,}" for n in self.shape) or "one value")
        parts.append(self.dtype)
        if self.n_entries is not None:
            cells = prod(self.shape or (0,))
            parts.append(f"{self.n_entries:,} entries" + (f" ({self.n_entries / cells:.1%})" if cells else ""))
        if self.chunks:
            parts.append(f"chunks {_sizes(self.chunks)}" + (f" in shards {_sizes(self.shards)}" if self.shards else ""))
        parts.append(self.compression)
        if self.n_stored or self.n_bytes:
            parts.append(size_text(self.n_stored) + self._ratio())
        parts.append(f"UNREADABLE: {self.fault}" if self.fault else "")
        return ", ".join(part for part in parts if part)

    def _ratio(self) -> str:
        if not self.n_stored or self.n_bytes <= self.n_stored or not self.compression:
            return ""
        return f" of {size_text(self.n_bytes)}"


@dataclass(frozen=True, slots=True)
class Inspection:
    """What `inspect` found; prints as a tree, and shows as one in a notebook.

    Parameters
    ----------
    path : str
        The file.
    store : str
        ``"HDF5"``, ``"Zarr 2"`` or ``"Zarr 3"``.
    n_bytes : int
        Its size.
    root : Element
        Its top.
    """

    path: str
    store: str
    n_bytes: int
    root: Element

    def lines(self, depth: int | None = None) -> Iterator[tuple[str, Element]]:
        """Walk down the tree.

        Parameters
        ----------
        depth : int, optional
            How many levels below the root.

        Yields
        ------
        branch : str
            What is drawn before the name.
        element : Element
            What stands there.
        """
        yield from _lines(self.root, "", depth)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain Python."""
        return asdict(self)

    def __str__(self) -> str:
        """Draw the tree."""
        head = f"{Path(self.path).name}: {self.store}, {size_text(self.n_bytes)}; {self.root.facts()}"
        return "\n".join([head, *(f"{branch}{element.name}: {element.facts()}" for branch, element in self.lines())])

    def _repr_html_(self) -> str:
        head = f"<b>{escape(Path(self.path).name)}</b> {escape(self.store)}, {size_text(self.n_bytes)}"
        inner = "".join(_html(child, opened=True) for child in self.root.shown)
        return f'<div style="font-family:monospace;line-height:1.5">{head}{_html_facts(self.root)}{inner}</div>'


def size_text(n: int) -> str:
    """Write a number of bytes.

    Examples
    --------
    >>> size_text(0), size_text(999), size_text(12_345), size_text(1_234_567_890)
    ('0 B', '999 B', '12.3 kB', '1.23 GB')
    """
    value, unit = float(n), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{n} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def _sizes(sizes: tuple[int, ...] | None) -> str:
    return "x".join(f"{n:,}" for n in sizes or ())


def _lines(element: Element, stem: str, depth: int | None) -> Iterator[tuple[str, Element]]:
    if depth is not None and depth <= 0:
        return
    children = element.shown
    for i, child in enumerate(children):
        last = i == len(children) - 1
        yield stem + ("└── " if last else "├── "), child
        yield from _lines(child, stem + ("    " if last else "│   "), None if depth is None else depth - 1)


def _html(element: Element, *, opened: bool) -> str:
    line = f"<b>{escape(element.name)}</b>{_html_facts(element)}"
    if not element.shown:
        return f'<div style="margin-left:2.4em">{line}</div>'
    inner = "".join(_html(child, opened=False) for child in element.shown)
    state = " open" if opened else ""
    return (
        f'<details{state} style="margin-left:1.2em"><summary style="cursor:pointer">{line}</summary>{inner}</details>'
    )


def _html_facts(element: Element) -> str:
    color = "#b00020" if element.fault else "#666"
    return f' <span style="color:{color}">{escape(element.facts())}</span>'

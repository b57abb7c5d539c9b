"""The numbered rules of AnnData's on-disk format, and the checker of an AnnData: encodings and shapes of its nodes."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import AtlasError, LimitError
from raggedatlas.formats.anndata.file_tree import Node, plain_attribute
from raggedatlas.formats.containers import readable
from raggedatlas.model import validation
from raggedatlas.model.validation import Checker, Rule

REWRITE = "Write the file again from its source; the values cannot be guessed."
SHAPE = "Write the element again with the size of its axis, or remove it."
TYPED = "Convert it to a dense or sparse matrix, or move it to uns."
_NESTED = "Move the members of the group up, under names without a slash."
_NAMES = "Give its rows the names of the axis, if they are in that order."
AGAIN = "Write the element again."
_ENCODED = "Set the attributes encoding-type and encoding-version."

_GENERAL = (
    Rule("A00", "must", "Every element can be opened and decoded: nothing is damaged, truncated, stored in other files, or compressed by a filter that is not installed.", "Fetch or write the file again; install raggedatlas[plugins] for a missing filter.", stated=False, refused=True),
    Rule("A01", "must", "Every element has a text attribute encoding-type.", _ENCODED, fixed=True),
    Rule("A02", "must", "Every element has a text attribute encoding-version that reads as a version.", _ENCODED, fixed=True),
    Rule("A03", "must", "The pair of type and version is registered.", "Write the element in a registered encoding, or remove it.", stated=False, refused=True),
    Rule("A04", "practice", "Encoding attributes are text, not bytes.", "Write them as UTF-8 text.", fixed=True, stated=False),
    Rule("A05", "must", "Consolidated metadata of a Zarr folder, if there are any, describe the members that are there, and zarr-python finds each by them.", "Consolidate the metadata again, with the members of each group one after the other.", depth="full", fixed=True, stated=False),
)  # fmt: skip

_ANNDATA = (
    Rule("A10", "must", "An AnnData is a group.", "Pass the folder or file whose root has obs and var.", refused=True),
    Rule("A11", "must", "Its encoding is anndata 0.1.0.", _ENCODED, fixed=True),
    Rule("A12", "must", "It has obs and var.", "Write the table, with at least its index.", refused=True),
    Rule("A13", "must", "Both are dataframes, which may have no columns.", "Write the table as a dataframe.", refused=True),
    Rule("A14", "must", "X is a dense or sparse array, if there is one.", TYPED, refused=True),
    Rule("A15", "must", "X has the shape (n_obs, n_var).", SHAPE, refused=True),
    Rule("A16", "must", "Entries of layers are dense or sparse arrays.", _NESTED, fixed=True, refused=True),
    Rule("A17", "must", "They have the shape (n_obs, n_var).", SHAPE, refused=True),
    Rule("A18", "must", "Entries of obsm are sparse or dense arrays, dataframes or awkward arrays, of two axes or more.", _NESTED, fixed=True),
    Rule("A19", "must", "They have n_obs rows; rows of a dataframe have the names that obs has.", _NAMES, refused=True),
    Rule("A20", "must", "Entries of varm are sparse or dense arrays, dataframes or awkward arrays, of two axes or more.", _NESTED, fixed=True),
    Rule("A21", "must", "They have n_var rows; rows of a dataframe have the names that var has.", _NAMES, refused=True),
    Rule("A22", "must", "Entries of obsp are sparse or dense arrays.", _NESTED, fixed=True, refused=True),
    Rule("A23", "must", "They begin with two axes of n_obs.", SHAPE, refused=True),
    Rule("A24", "must", "Entries of varp are sparse or dense arrays.", _NESTED, fixed=True, refused=True),
    Rule("A25", "must", "They begin with two axes of n_var.", SHAPE, refused=True),
    Rule("A26", "must", "Every entry of uns, at any depth, is an encoded element.", _ENCODED, fixed=True),
    Rule("A27", "must", "raw is a group of encoding raw 0.1.0 with X, var and, maybe, varm; X has n_obs rows and a column for each row of raw/var.", _ENCODED, stated=False, fixed=True, refused=True),
    Rule("A28", "must", "An HDF5 file has no other members at its root; anndata refuses to read a file that has.", "Move the member into uns.", stated=False),
    Rule("A29", "practice", "Names of cells and of features are unique.", "Make them unique, e.g. by adata.obs_names_make_unique().", depth="full", stated=False),
    Rule("A30", "must", "X is numbers or booleans on two axes.", TYPED, stated=False, refused=True),
)  # fmt: skip

_MATRICES = (
    Rule("A40", "must", "A dense array is stored as an array.", AGAIN, refused=True),
    Rule("A41", "must", "Its encoding is array 0.2.0.", _ENCODED, fixed=True),
    Rule("A50", "must", "A sparse array is a group.", AGAIN, refused=True),
    Rule("A51", "must", "It has the arrays indices, indptr and data, each of one axis; data are numbers or booleans.", REWRITE, refused=True),
    Rule("A52", "must", "Its encoding-type is csr_matrix or csc_matrix.", "Set encoding-type according to its pointers.", fixed=True, refused=True),
    Rule("A53", "must", "Its encoding-version is 0.1.0.", _ENCODED, fixed=True),
    Rule("A54", "must", "Its attribute shape is two integers: the sizes of its axes.", REWRITE, refused=True),
    Rule("A55", "must", "There is one pointer more than rows (CSR) or columns (CSC).", REWRITE, stated=False, refused=True),
    Rule("A56", "must", "Pointers start at 0 and never decrease.", REWRITE, depth="full", stated=False, refused=True),
    Rule("A57", "must", "The last pointer is the number of indices and of values.", REWRITE, stated=False, refused=True),
    Rule("A58", "must", "Indices are within the other axis.", REWRITE, depth="full", stated=False, refused=True),
    Rule("A59", "practice", "Indices ascend within a row (CSR) or column (CSC), without duplicates.", "Sort them and sum duplicates, e.g. by X.sum_duplicates().", depth="full", fixed=True, stated=False),
    Rule("A60", "must", "Pointers and indices are integers, signed and of at most 64 bits; unsigned ones are a matter of practice.", "Cast them to int64.", fixed=True, stated=False, refused=True),
    Rule("A61", "must", "Values are of a type that SciPy's sparse matrices support: not float16, and in the machine's byte order.", "Cast them, float16 to float32.", stated=False),
)  # fmt: skip

_FRAMES = (
    Rule("A70", "must", "A dataframe is a group.", AGAIN, refused=True),
    Rule("A71", "must", "Its attribute _index names one of its members.", "Set _index to the member with the names.", fixed=True, refused=True),
    Rule("A72", "must", "Its encoding is dataframe 0.2.0.", _ENCODED, fixed=True, refused=True),
    Rule("A73", "must", "Its attribute column-order is an array of text, naming members, each once.", "List the existing columns.", fixed=True, refused=True),
    Rule("A74", "must", "The member that is the index is an array, or a nullable-string-array.", "Write the index again as a string-array.", refused=True),
    Rule("A75", "must", "All members have the same number of rows, on one axis; members not in column-order are a matter of practice.", REWRITE, refused=True),
    Rule("A76", "should", "Chunked members share one chunk size.", "Write the columns again with one chunk size."),
    Rule("A77", "practice", "column-order lists every member but the index; no name has a slash.", "List every column.", fixed=True, stated=False),
    Rule("A78", "must", "No column is called _index.", "Rename the column.", stated=False, refused=True),
    Rule("A80", "must", "A mapping is a group.", AGAIN),
    Rule("A81", "must", "Its encoding is dict 0.1.0.", _ENCODED, fixed=True),
)  # fmt: skip

_SCALARS = (
    Rule("A90", "must", "A scalar is an array without axes.", "Write it without axes."),
    Rule("A91", "must", "The encoding of a number is numeric-scalar 0.2.0.", _ENCODED, fixed=True),
    Rule("A92", "must", "A numeric-scalar is one boolean, integer, real or complex number.", AGAIN),
    Rule("A93", "must", "The encoding of a text is string 0.2.0.", _ENCODED, fixed=True),
    Rule("A94", "must", "In Zarr a text is of fixed-length unicode, or of variable length as all writers store it.", "Write it as text.", fixed=True),
    Rule("A95", "must", "In HDF5 a text is of variable length, in UTF-8.", "Write it as text of variable length.", fixed=True),
    Rule("A96", "practice", "Scalars are in uns only.", "Move it into uns."),
)  # fmt: skip

_COLUMNS = (
    Rule("A100", "must", "A categorical is a group.", AGAIN, refused=True),
    Rule("A101", "must", "Its encoding is categorical 0.2.0.", _ENCODED, fixed=True, refused=True),
    Rule("A102", "must", "Its attribute ordered is a boolean; a number in its place is a matter of practice.", "Set ordered to true or false.", fixed=True),
    Rule("A103", "must", "Its member codes is an array of integers, of one axis.", REWRITE, refused=True),
    Rule("A104", "must", "No code exceeds the last category.", REWRITE, depth="full", refused=True),
    Rule("A105", "must", "The code of a missing value is -1; no code is lower.", REWRITE, depth="full", refused=True),
    Rule("A106", "must", "Its member categories is an array, of one axis.", REWRITE, refused=True),
    Rule("A107", "must", "Categories are unique and none is missing.", "Merge equal categories; code missing values as -1.", depth="full", stated=False, refused=True),
    Rule("A110", "must", "A string array is stored as an array.", AGAIN, refused=True),
    Rule("A111", "must", "Its encoding is string-array 0.2.0.", _ENCODED, fixed=True),
    Rule("A112", "must", "In Zarr it is of variable-length UTF-8 text.", "Write it as text of variable length.", fixed=True),
    Rule("A113", "must", "In HDF5 it is of variable-length UTF-8 text; fixed lengths and ASCII are a matter of practice.", "Write it as UTF-8 text of variable length.", depth="full", fixed=True, refused=True),
    Rule("A120", "must", "A nullable integer array is a group.", AGAIN, refused=True),
    Rule("A121", "must", "Its encoding is nullable-integer 0.1.0.", _ENCODED, fixed=True, refused=True),
    Rule("A122", "must", "Its member values is an array of integers.", REWRITE, refused=True),
    Rule("A123", "must", "Its member mask is an array of booleans, of the shape of values.", "Write a mask of booleans, one for each value.", fixed=True, refused=True),
    Rule("A130", "must", "A nullable boolean array is a group.", AGAIN, refused=True),
    Rule("A131", "must", "Its encoding is nullable-boolean 0.1.0.", _ENCODED, fixed=True, refused=True),
    Rule("A132", "must", "Its member values is an array of booleans.", "Write the values as booleans.", fixed=True, refused=True),
    Rule("A133", "must", "Its member mask is an array of booleans.", "Write the mask as booleans.", fixed=True, refused=True),
    Rule("A134", "must", "Both have one shape.", REWRITE, refused=True),
    Rule("A140", "must", "A nullable string array is a group.", AGAIN, refused=True),
    Rule("A141", "must", "Its encoding is nullable-string-array 0.1.0.", _ENCODED, fixed=True, refused=True),
    Rule("A142", "practice", "Its attribute na-value is text, if there is one.", "Set na-value to NA or NaN.", fixed=True),
    Rule("A143", "must", "Its member values is an array of text.", REWRITE, refused=True),
    Rule("A144", "must", "Its member mask is an array of booleans.", "Write the mask as booleans.", fixed=True, refused=True),
    Rule("A145", "must", "Both have one shape.", REWRITE, refused=True),
    Rule("A146", "should", "na-value is NA or NaN; anything else is read as NA.", "Set na-value to NA or NaN.", fixed=True),
    Rule("A150", "must", "An awkward array is a group of encoding awkward-array 0.1.0 with attributes form, a JSON text, and length; it has an array, long enough, for each buffer of the form.", REWRITE, stated=False, refused=True),
    Rule("A151", "must", "Its length is the size of its axis.", SHAPE, stated=False, refused=True),
    Rule("A152", "practice", "Awkward arrays are experimental; readers other than anndata may not know them.", "Store it in a second form if other tools read the file."),
)  # fmt: skip

RULES: dict[str, Rule] = {rule.id: rule for rule in (*_GENERAL, *_ANNDATA, *_MATRICES, *_FRAMES, *_SCALARS, *_COLUMNS)}
"""Id -> rule, in order."""


def is_fixable(problem: validation.Problem) -> bool:
    """Return whether `fix` fixes a problem: a problem that it cannot fix has an advice of its own in place of the rule's."""
    rule = RULES[problem.rule]
    return rule.fixed and problem.fix == rule.fix


Layout = Literal["", "0.7", "0.5"]
Check = Callable[["AnnDataChecker", Node], None]

MAX_NODES = 1_000_000
"""Number of elements beyond which a file is not checked further: links can multiply without end."""


class Encoding(NamedTuple):
    """A registered encoding-type."""

    versions: tuple[str, ...]  # known versions, the current one first
    structure: str = "A03"  # the rule on being a group, or an array if `is_array`
    declaration: str = "A03"  # the rule on its declared type and version
    is_array: bool = False
    text: tuple[str, str] | None = None  # the rules on text in Zarr and in HDF5, for an encoding of text


ENCODINGS = {
    "anndata": Encoding(("0.1.0",), "A10", "A11"),
    "raw": Encoding(("0.1.0",), "A27", "A27"),
    "dict": Encoding(("0.1.0",), "A80", "A81"),
    "dataframe": Encoding(("0.2.0", "0.1.0"), "A70", "A72"),
    "array": Encoding(("0.2.0",), "A40", "A41", is_array=True),
    "string-array": Encoding(("0.2.0",), "A110", "A111", is_array=True, text=("A112", "A113")),
    "rec-array": Encoding(("0.2.0",), is_array=True),
    "bytes": Encoding(("0.2.0",), is_array=True),
    "numeric-scalar": Encoding(("0.2.0",), "A90", "A91", is_array=True),
    "string": Encoding(("0.2.0",), "A90", "A93", is_array=True, text=("A94", "A95")),
    "null": Encoding(("0.1.0",), is_array=True),
    "csr_matrix": Encoding(("0.1.0",), "A50", "A53"),
    "csc_matrix": Encoding(("0.1.0",), "A50", "A53"),
    "categorical": Encoding(("0.2.0",), "A100", "A101"),
    "nullable-integer": Encoding(("0.1.0",), "A120", "A121"),
    "nullable-boolean": Encoding(("0.1.0",), "A130", "A131"),
    "nullable-string-array": Encoding(("0.1.0",), "A140", "A141"),
    "awkward-array": Encoding(("0.1.0",), "A150", "A150"),
}
"""Encoding-type -> its description."""

SPARSE = ("csr_matrix", "csc_matrix")

_VERSION = re.compile(r"v?\d+(\.\d+)*((a|b|rc|\.?dev|\.?post)\d*)?", re.IGNORECASE)


@dataclass
class AnnDataChecker(Checker[Node]):
    """Checker of one AnnData."""

    rules: ClassVar[Mapping[str, Rule]] = RULES
    damage: ClassVar[str] = "A00"

    checks: Mapping[str, Check]  # encoding-type -> check of such an element
    full: bool  # whether values are read
    layout: Layout = ""  # of an old file, in which encodings need not be declared
    prefix: str = ""  # path of the AnnData in its file, such as `mod/rna`
    # Whether row names of frames are compared with those of their axis even if other values are not read.
    compare: bool = False
    n_nodes: int = 0  # number of elements checked so far
    # Path of an index -> hashes of its blocks, collected if the key exists, so that names are read once.
    read_names: dict[str, list[NDArray[np.uint64]]] = field(default_factory=dict)

    def unreadable(self, node: Node, fault: str) -> None:
        """Report an element that cannot be read; the text after the last semicolon of `fault` is the fix."""
        reason, _, fix = fault.removeprefix(f"{node.uri}: ").rpartition("; ")
        if reason and fix.endswith("."):
            self.report("A00", node, f"{reason}.", fix=f"{fix[0].upper()}{fix[1:]}")
        else:
            self.report("A00", node, fault)

    def element(self, node: Node, *, declared: bool = True) -> None:
        """Check an element and its members.

        `declared` is False where the element need not declare its encoding: within frames of anndata 0.7. The
        `LimitError` for more than `MAX_NODES` elements ends the check, whatever guards are around it.
        """
        self.n_nodes += 1
        if self.n_nodes > MAX_NODES:
            raise LimitError(f"{node.uri} has more than {MAX_NODES:,} elements; it is not checked further.")
        if node.fault:
            self.unreadable(node, node.fault)
        if node.stored is not None:
            with self.guarded(node):
                encoding = self._encoding(node, declared=declared and not self.layout)
                if encoding and self._fits(node, encoding):
                    self.checks.get(encoding, decode)(self, node)

    def inner(self, node: Node | None, *, text: bool = True) -> None:
        """Check how a part of an element, such as the codes of a categorical, declares its encoding.

        An undeclared part is read by its type. `text` is False for a part that must be text by another rule.
        """
        if node is not None and node.stored is not None and not node.fault:
            encoding = self._encoding(node, declared=False)
            fits = bool(encoding) and self._fits(node, encoding)
            rules = ENCODINGS[encoding].text if text and fits else None
            if rules is not None and node.text is None:
                text_of = f"its values are of type {node.dtype}; expected text."
                self.report(rules[node.in_hdf5], node, text_of, fix=REWRITE)

    @contextmanager
    def guarded(self, place: Node, rule: str = "") -> Iterator[None]:
        """Report what cannot be read as a problem of its own."""
        with super().guarded(place, rule), readable(place.uri, str(place) or "the root"):
            yield

    def report_error(self, place: Node, error: BaseException, rule: str) -> None:
        """Report an exception, unless it ends the check or the node is already known to be unreadable."""
        # Every level of nesting has a guard; the limit must pass all of them to end the check.
        if self.n_nodes > MAX_NODES and isinstance(error, LimitError):
            raise error
        if isinstance(error, MemoryError):
            reason = str(error) or "out of memory"
            self.unreadable(place, f"it cannot be read ({reason}); the file is damaged. Fetch or write it again.")
        elif not isinstance(error, AtlasError):
            super().report_error(place, error, rule)
        elif not place.fault:
            self.unreadable(place, str(error))

    def _encoding(self, node: Node, *, declared: bool) -> str:
        """Return the encoding by which a node is checked, ``""`` for none."""
        kind, version = declared_encoding(node)
        for name in ("encoding-type", "encoding-version"):
            if isinstance(plain_attribute(node.attrs.get(name)), bytes):
                self.report("A04", node, f"{name} is stored as bytes.")
        if not kind:
            partly = {"encoding-type", "encoding-version"} & set(node.attrs)
            if declared or (partly and not self.layout):
                rule = "A26" if self.in_uns(node) else "A01"
                self.report(rule, node, f"it has no text attribute encoding-type; it looks like {infer(node)}.")
            return infer(node)
        if kind not in ENCODINGS:
            looks = infer(node)
            sparse = {"data", "indices", "indptr"} <= set(node.children)
            plain = looks in {"dict", "array", "string-array", "rec-array", "null", "numeric-scalar", "string"}
            # A03 where the element could be anything, else the rule of the encoding that its members indicate.
            rule = "A52" if sparse else "A03" if plain else ENCODINGS[looks].declaration
            self.report(rule, node, f"its encoding-type {kind!r} is unknown; it looks like {looks}.")
            return "" if plain else looks
        if not version or not _VERSION.fullmatch(version):
            if not self.layout:
                self.report("A02", node, f"its encoding-version is {version!r}, which is not a version.")
        elif version not in ENCODINGS[kind].versions:
            known = " or ".join(ENCODINGS[kind].versions)
            self.report(ENCODINGS[kind].declaration, node, f"its encoding is {kind} {version}; known is {known}.")
        return kind

    def _fits(self, node: Node, encoding: str) -> bool:
        is_old_frame = bool(self.layout) and encoding == "dataframe" and node.kind == "record"
        if ENCODINGS[encoding].is_array == node.is_array or is_old_frame:
            return True
        form, expected = ("an array", "a group") if node.is_array else ("a group", "an array")
        self.report(ENCODINGS[encoding].structure, node, f"{encoding} is stored as {form}; expected {expected}.")
        return False

    def in_uns(self, node: Node) -> bool:
        """Return whether a node is in `uns`, at any depth."""
        return node.path.removeprefix(self.prefix).strip("/").startswith("uns/")


def decode(checker: AnnDataChecker, node: Node) -> None:
    """Read all values of an array, to find out whether they can be decoded."""
    if checker.full and node.is_array and not node.fault:
        for _ in node.blocks():
            pass


def declared_encoding(node: Node) -> tuple[str, str]:
    """Return encoding-type and encoding-version as text; ``""`` if missing or not text."""
    kind, version = (as_text(node.attrs.get(name)) for name in ("encoding-type", "encoding-version"))
    if not kind and "h5sparse_format" in node.attrs:
        return f"{as_text(node.attrs['h5sparse_format'])}_matrix", "0.1.0"
    return kind, version


def as_text(value: object) -> str:
    """Return an attribute of text or bytes as text, anything else as ``""``."""
    value = plain_attribute(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    return value if isinstance(value, str) else ""


def infer(node: Node) -> str:
    """Return the encoding of a node according to its structure."""
    if node.is_array:
        if node.shape is None:
            return "null"
        if node.kind == "record":
            return "rec-array"
        if node.text is not None and (node.shape == () or node.text.variable):
            return "string" if node.shape == () else "string-array"
        return "numeric-scalar" if node.shape == () else "array"
    names = set(node.children)
    # Frames first, because their columns may be called codes and categories, or values and mask.
    if "_index" in node.attrs or "column-order" in node.attrs:
        return "dataframe"
    if {"data", "indices", "indptr"} <= names:
        shape, pointers = sparse_shape(node), node.children["indptr"].shape
        # Both fit a square matrix, which is taken for CSR.
        by_rows = shape is None or not pointers or pointers[0] - 1 == shape[0]
        return "csr_matrix" if by_rows else "csc_matrix"
    if {"codes", "categories"} <= names:
        return "categorical"
    if {"values", "mask"} <= names:
        kind = node.children["values"].kind
        return {"bool": "nullable-boolean", "text": "nullable-string-array"}.get(kind, "nullable-integer")
    if {"form", "length"} <= set(node.attrs):
        return "awkward-array"
    return "anndata" if {"obs", "var"} <= names else "dict"


def is_binary(node: Node) -> bool:
    """Return whether numbers are all 0 or 1, so that they can be booleans."""
    return node.kind in ("integer", "real") and bool(np.isin(node.whole(), (0, 1)).all())


def nested_members(node: Node) -> Iterator[Node]:
    """Iterate over the elements in a group and the groups in it, which older versions of anndata wrote for a name with slashes."""
    for child in node.children.values():
        if encoding_of(child) == "dict":
            yield from nested_members(child)
        else:
            yield child


def encoding_of(node: Node) -> str:
    """Return the declared encoding-type if it is known, else the inferred one."""
    kind, _ = declared_encoding(node)
    return kind if kind in ENCODINGS else infer(node)


def sparse_shape(node: Node) -> tuple[int, int] | None:
    """Return the declared shape of a sparse matrix; None if it is not two non-negative integers."""
    shape = plain_attribute(node.attrs.get("shape", node.attrs.get("h5sparse_shape")))
    if not isinstance(shape, list | tuple) or len(shape) != 2:
        return None
    is_size = [isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape]
    return (int(shape[0]), int(shape[1])) if all(is_size) else None


def index_node(node: Node) -> Node | None:
    """Return the index of a frame."""
    return node.child(as_text(node.attrs.get("_index")) or "_index")


def n_rows(node: Node) -> int | None:
    """Return the number of rows of a frame, a column, or an array; None if unknown."""
    shape = extent(node)
    return shape[0] if shape else None


def extent(node: Node) -> tuple[int, ...] | None:
    """Return the shape of an element of any encoding; None if unknown."""
    if node.is_array:
        return node.shape
    encoding = encoding_of(node)
    if encoding in SPARSE:
        return sparse_shape(node)
    if encoding == "dataframe":
        index = index_node(node)
        rows = n_rows(index) if index is not None else None
        return None if rows is None else (rows, sum(child is not index for child in node.children.values()))
    if encoding == "awkward-array":
        length = plain_attribute(node.attrs.get("length"))
        return (length,) if isinstance(length, int) else None
    inner = node.children.get("codes") or node.children.get("values")
    return inner.shape if inner is not None else None


def layout_of(root: Node) -> Layout:
    """Return the layout of an AnnData: the version of anndata that introduced it; ``""`` for 0.8 and later."""
    obs = root.child("obs")
    if obs is None:
        return ""
    if obs.is_array:
        return "0.5" if obs.kind == "record" and not declared_encoding(root)[0] else ""
    # mudata 0.1 declared the encoding of the root of such a file, and nothing below.
    return "0.7" if declared_encoding(obs) == ("dataframe", "0.1.0") else ""


def listed(value: object) -> list[str] | None:
    """Return the names in an attribute such as column-order; None if it is not a list of text."""
    value = plain_attribute(value)
    names = [value] if isinstance(value, str | bytes) else value
    if not isinstance(names, list | tuple):
        return None
    if not all(isinstance(name, str | bytes) for name in names):
        return None
    return [name.decode("utf-8", errors="replace") if isinstance(name, bytes) else name for name in names]


Hashes = NDArray[np.uint64]


def names_node(frame: Node) -> Node | None:
    """Return the array with the row names of a frame; None if there is none that can be read."""
    index = index_node(frame)
    if index is not None and not index.is_array:
        index = index.child("values")
    readable = index is not None and index.is_array and not index.fault and len(index.shape or ()) == 1
    return index if readable else None


def name_hashes(frame: Node) -> Hashes | None:
    """Return hashes of the row names of a frame, (n,) uint64; None if there are none."""
    index = names_node(frame)
    return None if index is None else _hash_blocks(index)


def _hash_blocks(index: Node) -> Hashes:
    return np.concatenate([np.empty(0, np.uint64), *(hash_names(values) for _, values in index.blocks())])


def hash_names(values: NDArray[Any]) -> Hashes:
    """Return hashes of names, (n,) uint64; text and its UTF-8 bytes have the same hash."""
    import pandas as pd

    flat = values.astype(object) if values.dtype.kind in "SUT" else values
    hashes: Hashes = pd.util.hash_array(flat, categorize=False)
    return hashes


def check_unique_names(checker: AnnDataChecker, frame: Node) -> Hashes | None:
    """Check that the row names of a frame are unique (A29), and return their hashes."""
    index = names_node(frame)
    if index is None:
        return None
    hashes = np.concatenate([np.empty(0, np.uint64), *checker.read_names.pop(index.path, [])])
    # Not collected, or not completely: `check_text` stops at the first invalid UTF-8.
    if len(hashes) != (index.shape or (0,))[0]:
        hashes = _hash_blocks(index)
    ordered = np.sort(hashes)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    known: set[object] = set()
    # different names can have the same hash, so the names are compared
    for start, values in index.blocks() if len(repeated) else ():
        for name in values[np.isin(hashes[start : start + len(values)], repeated)]:
            if name in known:
                text = name.decode("utf-8", errors="replace") if isinstance(name, bytes) else str(name)
                checker.report("A29", index, f"the name {text!r} occurs more than once.")
                return hashes
            known.add(name)
    return hashes

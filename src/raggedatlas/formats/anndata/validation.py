"""Validator and inspection of AnnData files: `validate` lists every rule that a file breaks, `inspect` describes its elements."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from raggedatlas import errors
from raggedatlas.errors import AtlasError, SourceError
from raggedatlas.formats.anndata.checks_arrays import (
    check_array,
    check_awkward,
    check_members,
    check_number,
    check_sparse,
    check_string,
    check_string_array,
)
from raggedatlas.formats.anndata.checks_frames import (
    check_anndata,
    check_categorical,
    check_frame,
    check_nullable,
)
from raggedatlas.formats.anndata.file_tree import Node, disk_bytes, open_tree
from raggedatlas.formats.anndata.rules import (
    RULES,
    SPARSE,
    AnnDataChecker,
    Check,
    declared_encoding,
    encoding_of,
    extent,
    infer,
    is_fixable,
    layout_of,
    sparse_shape,
)
from raggedatlas.formats.containers import FETCH_AGAIN, MAX_DEPTH, READ_ERRORS, is_zip, readable
from raggedatlas.formats.hdf5_chunks import FILTERS
from raggedatlas.model.arguments import checked
from raggedatlas.model.reports import FOLDED, Element, Inspection
from raggedatlas.model.validation import Depth, Problem, Problems
from raggedatlas.store.location import Address, AnyPath, Location, as_path
from raggedatlas.store.runtime import warnings_as

CHECKS: dict[str, Check] = {
    "anndata": check_anndata,
    "raw": check_members,
    "dict": check_members,
    "dataframe": check_frame,
    "array": check_array,
    "string-array": check_string_array,
    "numeric-scalar": check_number,
    "string": check_string,
    "csr_matrix": check_sparse,
    "csc_matrix": check_sparse,
    "categorical": check_categorical,
    "nullable-integer": check_nullable,
    "nullable-boolean": check_nullable,
    "nullable-string-array": check_nullable,
    "awkward-array": check_awkward,
}
"""Encoding-type -> its check; values of other types are only decoded."""

HOLDERS = ("anndata", "raw", "dict", "dataframe")
"""Encodings whose members are elements of their own."""

MUDATA_PARTS = ("obs", "var", "obsm", "varm", "obsp", "varp", "obsmap", "varmap", "uns")
"""Members of a MuData other than its modalities."""

_UPDATE = "Write it again in the current layout, e.g. by raggedatlas convert."


@dataclass(frozen=True, slots=True)
class Limits:
    """What checker a file may take, in a process of its own.

    Damaged bytes can make the HDF5 library loop without end or allocate gigabytes, which no Python code can stop from within.

    Parameters
    ----------
    seconds : float
        Time after which the process is killed.
    memory : int
        Bytes that it may allocate (not enforced on Windows).
    """

    seconds: float
    memory: int

    @classmethod
    def of(cls, path: Address) -> "Limits":
        """Return limits that a valid file of this size stays far below.

        Examples
        --------
        >>> Limits.of("tests/data").seconds > 60
        True
        """
        n_bytes = disk_bytes(as_path(path))
        return cls(60 + n_bytes / 1e6, 2 * 2**30 + 4 * n_bytes)


@checked
def validate(path: Address, level: Depth = "metadata", *, limits: Limits | None = None) -> Problems:
    """List the rules that an AnnData file breaks.

    Parameters
    ----------
    path : str, Path or Location
        An `.h5ad` or `.h5mu` file, or a Zarr folder, format 2 or 3; ``s3://``, ``gs://``, ``az://`` or ``https://`` too, read by ranges.
    level : {"metadata", "full"}
        ``metadata`` reads attributes, shapes and types, and the last pointer of sparse matrices. ``full`` reads every value
        as well, a block at a time: memory is bounded by the blocks, eight bytes per cell, and eight bytes per position of the
        minor axis of a sparse matrix.
    limits : Limits or None
        Check the file in a separate process with these limits, e.g. ``Limits.of(path)`` for untrusted files; a file that exceeds
        them breaks A00. None checks it in this process.

    Returns
    -------
    Problems
        In the order of the file; empty for a valid file.

    Raises
    ------
    NotFoundError
        If there is no such file.
    SourceError
        If it is neither HDF5 nor Zarr, or is cut short.

    References
    ----------
    AnnData on-disk format.

    Examples
    --------
    >>> validate("tests/data/pbmc_5k_protein_v3.h5ad")  # doctest: +SKIP
    Nothing is wrong.
    """
    path = as_path(path)
    if limits is not None:
        return _validate_apart(path, level, limits)
    from raggedatlas.formats.tenx import is_market

    # Sound files of formats without numbered rules would break most of those of AnnData.
    if not isinstance(path, Location) and is_market(path):
        raise _no_rules(str(path), "Market matrix")
    with open_tree(path) as root, readable(str(path), "the root"):
        kind = ""
        if root.in_hdf5 and not declared_encoding(root)[0] and not {"obs", "mod"} & set(root.children):
            if {"matrix", "row_attrs", "col_attrs"} <= set(root.children):
                kind = "loom file"
            elif any({"barcodes", "indptr"} <= set(member.children) for member in root.children.values()):
                kind = "10x file"
        if kind:
            raise _no_rules(root.uri, kind)
        return check_root(root, full=level == "full")


def _no_rules(uri: str, kind: str) -> SourceError:
    return SourceError(
        f"{uri} is a {kind}, and the numbered rules are of AnnData and MuData; add(path, dry_run=True) reads and checks all of it."
    )


def _validate_apart(path: AnyPath, level: Depth, limits: Limits) -> Problems:
    """Validate a file in a separate process."""
    call = f"from {__name__} import _answer; _answer()"
    words = [sys.executable, "-W", "ignore", "-c", call, level, str(limits.memory)]
    # By the standard input, since every user of a machine can list the arguments of a process.
    address = [path.uri, path.storage_options] if isinstance(path, Location) else [os.fspath(path), {}]
    # on machines of many cores the buffers of BLAS threads alone would exceed the limit; nothing here needs them
    environment = os.environ | {f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "MKL")}
    try:
        process = subprocess.run(
            words,
            input=json.dumps(address).encode(errors="surrogateescape"),
            capture_output=True,
            timeout=limits.seconds,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return _limit_exceeded(
            f"it was not checked within {limits.seconds:,.0f} s; damaged bytes can make the reader loop without end."
        )
    # A process that crashed or was killed has written no complete JSON.
    try:
        answer = json.loads(process.stdout)
    except ValueError:
        return _limit_exceeded(f"reading it crashed the process (code {process.returncode}).")
    if "error" in answer:
        raise getattr(errors, answer["error"], SourceError)(answer["message"])
    return Problems(Problem(**problem) for problem in answer["problems"])


def _limit_exceeded(message: str) -> Problems:
    return Problems([Problem("A00", RULES["A00"].level, "", message, RULES["A00"].fix)])


def _answer() -> None:
    """Validate the file named on the standard input and write the problems as JSON; runs in the process of `_validate_apart`."""
    level, memory = sys.argv[1:]
    address, options = json.load(sys.stdin)
    try:
        import resource
    except ImportError:  # Windows
        pass
    else:
        # private memory; the address space would count every library and thread
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        most = int(memory) if hard == resource.RLIM_INFINITY else min(int(memory), hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        answer = {"problems": validate(as_path(address, options), "full" if level == "full" else "metadata").to_dict()}
    except AtlasError as error:
        answer = {"error": type(error).__name__, "message": str(error)}  # type: ignore[dict-item]
    except MemoryError:
        answer = {"problems": _limit_exceeded(f"reading it needs more than {int(memory):,} bytes of memory.").to_dict()}
    sys.stdout.write(json.dumps(answer))


def check_root(root: Node, *, full: bool, compare: bool = False) -> Problems:
    """Check the root of an opened file, which is an AnnData or a MuData; see `AnnDataChecker` for what is read."""
    # `mod` decides only without a declaration: in an AnnData it is an unknown member (A28).
    multimodal = declared_encoding(root)[0] == "MuData" or (
        not declared_encoding(root)[0] and root.child("mod") is not None
    )
    problems = (_check_mudata if multimodal else _check_one)(root, full=full, compare=compare)
    if full and root.stored is not None and not root.is_array and not root.in_hdf5:
        checker = AnnDataChecker(CHECKS, full=True)
        with warnings_as("ignore"):
            fault = _consolidated_fault(root)
        if fault:
            checker.report("A05", root, fault)
        return Problems([*checker.problems, *problems])
    return problems


def _consolidated_fault(root: Node) -> str:
    """Return what readers find wrong by the consolidated metadata of a Zarr folder, ``""`` if that is nothing or there are none."""
    import zarr

    if root.stored.metadata.consolidated_metadata is not None:
        # The root of a remote folder is read by them, since each node is a request.
        return ""
    nodes = dict(_nodes(root))
    try:
        whole = zarr.open_group(store=root.stored.store, path=root.stored.path, mode="r", use_consolidated=None)
        if whole.metadata.consolidated_metadata is None:
            return ""
        listed = whole.metadata.consolidated_metadata.flattened_metadata
        for path in sorted(nodes.keys() ^ listed.keys()):
            return f"the consolidated metadata {'do not list' if path in nodes else 'still list'} {path!r}."
        for path, node in nodes.items():
            if node.stored is not None and _metadata_text(node.stored.metadata) != _metadata_text(listed[path]):
                return f"the consolidated metadata describe {path!r} as it was before a change."
        found = {path for path, _ in whole.members(max_depth=None)}
    except (AtlasError, *READ_ERRORS, zarr.errors.BaseZarrError) as error:
        reason = next(iter(str(error).strip("'\"").splitlines()), type(error).__name__)
        return f"the consolidated metadata cannot be read ({reason})."
    return "" if found == nodes.keys() else "readers find other members by the consolidated metadata than there are."


def _nodes(node: Node) -> Iterator[tuple[str, Node]]:
    for child in node.children.values():
        yield child.path, child
        yield from _nodes(child)


def _metadata_text(metadata: Any) -> str:  # noqa: ANN401  (of a group or an array)
    # As text, in which a missing fill value equals itself.
    facts = {key: value for key, value in metadata.to_dict().items() if key != "consolidated_metadata"}
    return json.dumps(facts, sort_keys=True, default=str)


def _check_one(node: Node, *, full: bool, compare: bool) -> Problems:
    checker = AnnDataChecker(CHECKS, full, layout_of(node), node.path, compare)
    if node.stored is None:
        checker.unreadable(node, node.fault)
        return checker.problems
    kind, version = declared_encoding(node)
    if not node.is_array and not checker.layout and (kind, version) != ("anndata", "0.1.0"):
        text = f"its encoding is {kind} {version}".rstrip() if kind else "it declares no encoding"
        checker.report("A11", node, f"{text}; expected anndata 0.1.0.")
    _report_layout(checker, node)
    if isinstance(node.attrs.get("encoding-type"), bytes):
        checker.report("A04", node, "encoding-type is stored as bytes.")
    with checker.guarded(node):
        check_anndata(checker, node)
    return checker.problems


def _report_layout(checker: AnnDataChecker, node: Node) -> None:
    if checker.layout:
        version = "0.7" if checker.layout == "0.7" else "0.5 or 0.6"
        text = f"it has the layout of anndata {version}, which readers still support."
        checker.report("A11", node, text, "practice", _UPDATE)


def _check_mudata(root: Node, *, full: bool, compare: bool) -> Problems:
    checker = AnnDataChecker(CHECKS, full, layout_of(root))
    _report_layout(checker, root)
    for name in MUDATA_PARTS:
        part = root.child(name)
        if part is not None:
            checker.element(part)
    mod = root.child("mod")
    for child in mod.children.values() if mod is not None else ():
        checker.problems += _check_one(child, full=full, compare=compare)
    return checker.problems


def raise_if_invalid(path: AnyPath, *, compare: bool = True) -> Problems:
    """Raise for a file that breaks a rule without which it cannot be added, before its values are read.

    The `SourceError` names the first such rule by its id, the element that breaks it, and the fix. Elements that cannot
    be opened or decoded (A00) are left to the reader, whose error is more precise. Row names are read and compared if
    `compare`; else metadata alone are read. Returns the other problems, for the report of the add.
    """
    with open_tree(path) as root:
        problems = check_root(root, full=False, compare=compare)
    refused = [p for p in problems if p.level == "must" and RULES[p.rule].refused and p.rule != "A00"]
    if refused:
        more = f" ({len(refused) - 1:,} more such; raggedatlas validate {path} lists them)" if len(refused) > 1 else ""
        broken = [problem for problem in problems if problem.level == "must"]
        raise SourceError(f"{path}: {refused[0]}{more}{_way_out(path, broken).replace('; ', ' ')}")
    return problems


def _way_out(path: Address, problems: Iterable[Problem]) -> str:
    """Return the command that fixes problems in a copy, ``""`` if it cannot fix one of them."""
    return f"; `raggedatlas fix {path} COPY` fixes it in a copy" if all(map(is_fixable, problems)) else ""


_NAMES_A_RULE = re.compile(r"\b[A-Z]+\d+ (must|should|practice): |\(rule ")


def with_rule_id(path: AnyPath, error: AtlasError) -> AtlasError:
    """Return an error of reading a file with the id of the rule that it breaks, and how a copy is fixed if it can be.

    `error` is that of the reader; its message names the element, which is read once more. The result is of the same
    class; it is `error` itself if that already names a rule or is not an error of reading, or the element breaks no
    rule.
    """
    message = str(error).removeprefix(f"{path}: ")
    # By exact type: `DuplicateError` and `ValuesError` are subclasses, but no errors of reading.
    if type(error) is not SourceError or message == str(error) or _NAMES_A_RULE.search(message):
        return error
    try:
        with open_tree(path) as root:
            problems = _check_named(root, message)
    except AtlasError:
        return error
    # First those that readers stop at.
    broken = sorted((p for p in problems if p.level == "must"), key=lambda problem: not RULES[problem.rule].refused)
    if not broken:
        return error
    text, way_out = str(error), _way_out(path, broken)
    text = text.removesuffix(FETCH_AGAIN) if way_out else text
    named = SourceError(f"{text} (rule {broken[0].rule}{way_out})")
    named.__cause__ = error
    return named


def _check_named(root: Node, message: str) -> Problems:
    """Check the values of the element that a message names, and all metadata; of a file of another kind nothing."""
    if root.child("obs") is None:
        return Problems()
    adata, node = root, root
    while not node.is_array and (node is adata or encoding_of(node) in HOLDERS):
        # Complete paths only: `obs` must not be found in `obsm` or `mod/rna/obs`.
        named = [
            child for child in node.children.values() if re.search(rf"(?<![\w/]){re.escape(child.path)}(?!\w)", message)
        ]
        if not named:
            break
        node = max(named, key=lambda child: len(child.path))
        adata = node if node.parent is not None and node.parent.path == "mod" else adata
    if node is adata:
        return Problems()
    checker = AnnDataChecker(CHECKS, full=True, layout=layout_of(adata), prefix=adata.path)
    checker.element(node, declared=False)
    around = check_root(root, full=False, compare=True)
    return Problems([*(p for p in around if f"{p.path}/".startswith(f"{node.path}/")), *checker.problems])


ZARR_METADATA = ("zarr.json", ".zarray", ".zattrs")
"""Names of the files of a Zarr array that hold no values."""

_MAIN = ("data", "codes", "values")


@checked
def inspect(path: Address) -> Inspection:
    """Inspect an AnnData or MuData file without reading its values.

    Parameters
    ----------
    path : str, Path or Location
        An HDF5 file or a Zarr folder, here, in an object store or on a web server.

    Returns
    -------
    Inspection
        A tree of elements; those that cannot be opened are included with the reason.

    Raises
    ------
    NotFoundError
        If there is no such file.
    SourceError
        If it is neither HDF5 nor Zarr, or is cut short.

    Examples
    --------
    >>> inspection = inspect("tests/data/pbmc_5k_protein_v3.h5ad")  # doctest: +SKIP
    >>> print(inspection)  # doctest: +SKIP
    """
    path = as_path(path)
    with open_tree(path) as root:
        store = "HDF5" if root.in_hdf5 else f"Zarr {root.stored.metadata.zarr_format}"
        # Of a remote zip file `root` is the local copy.
        file = Path(root.uri) if path.suffix == ".zip" else path
        return Inspection(str(path), store, disk_bytes(path), _described(root, file))


def _described(node: Node, file: AnyPath) -> Element:
    kind, version = declared_encoding(node)
    encoding = f"{kind} {version}".strip()
    kind = kind or ("" if node.stored is None else infer(node))
    element = Element(node.path, node.name, encoding, kind, fault=node.fault)
    if node.stored is None:
        return element
    if node.is_array:
        return _described_array(node, element, file)
    children = tuple(_described(child, file) for child in node.children.values())
    is_sparse = kind in SPARSE
    element = replace(
        element,
        shape=sparse_shape(node) if is_sparse else extent(node),
        n_bytes=sum(child.n_bytes for child in children),
        n_stored=sum(child.n_stored for child in children),
        children=children,
    )
    main = next((child for child in children if child.name in _MAIN), None) if kind in FOLDED else None
    if main is None:
        return element
    of_main = {name: getattr(main, name) for name in ("dtype", "chunks", "shards", "compression")}
    return replace(element, n_entries=main.shape[0] if is_sparse and main.shape else None, **of_main)


def _described_array(node: Node, element: Element, file: AnyPath) -> Element:
    array = node.stored
    variable = node.text is not None and node.text.variable
    fields = node.dtype.names
    chunks, shards = getattr(array, "chunks", None), getattr(array, "shards", None)
    return replace(
        element,
        shape=node.shape,
        dtype="text" if variable else str(node.dtype) if fields is None else f"records of {len(fields):,} fields",
        chunks=tuple(chunks) if chunks else None,
        shards=tuple(shards) if shards else None,
        compression=_hdf5_compression(array) if node.in_hdf5 else _zarr_compression(array),
        n_bytes=0 if variable or node.shape is None else prod(node.shape) * node.dtype.itemsize,
        n_stored=_stored_bytes(node, file),
    )


def _stored_bytes(node: Node, file: AnyPath) -> int:
    if node.in_hdf5:
        return int(node.stored.id.get_storage_size())
    if isinstance(file, Location):
        # A web server does not list the chunks.
        objects = () if file.is_web else (file / node.path).rglob("*")
        return sum(one.stat().st_size for one in objects if one.name not in ZARR_METADATA)
    if is_zip(file):
        return _zip_bytes(node.uri, file.stat().st_mtime_ns)[node.path]
    files = (path for path in (file / node.path).rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in files if path.name not in ZARR_METADATA)


@lru_cache(maxsize=1)
def _zip_bytes(uri: str, changed: int) -> Counter[str]:
    """Return the stored bytes of all values below each folder of a zip file that was changed at a time."""
    del changed  # only tells the cache when to read again
    sizes: Counter[str] = Counter()
    with ZipFile(uri) as archive:
        for member in archive.infolist():
            *folders, name = member.filename.split("/")
            if name not in ZARR_METADATA:
                for depth in range(min(len(folders), MAX_DEPTH) + 1):
                    sizes["/".join(folders[:depth])] += member.compress_size
    return sizes


def _hdf5_compression(array: Any) -> str:  # noqa: ANN401
    plist = array.id.get_create_plist()
    names = []
    for i in range(plist.get_nfilters()):
        code, _, values, label = plist.get_filter(i)
        name = FILTERS.get(code) or label.decode(errors="replace") or f"filter {code}"
        names.append(f"{name} {values[0]}" if code == 1 and values else name)
    return " + ".join(names)


def _zarr_compression(array: Any) -> str:  # noqa: ANN401
    try:
        codecs = [*(array.filters or ()), *(array.compressors or ())]
    except READ_ERRORS:
        return ""
    texts = []
    for codec in codecs:
        # Codecs of Zarr format 2 are those of numcodecs, codecs of format 3 those of zarr-python.
        if hasattr(codec, "get_config"):
            settings = codec.get_config()
            name = str(settings.get("id", ""))
        else:
            config = codec.to_dict()
            name, settings = str(config.get("name", "")), config.get("configuration") or {}
        # These codecs encode text of variable length and compress nothing.
        if name not in ("vlen-utf8", "vlen-bytes"):
            values = [settings[key] for key in ("cname", "level", "clevel") if settings.get(key) is not None]
            texts.append(" ".join(map(str, [name, *values])))
    return " + ".join(texts)

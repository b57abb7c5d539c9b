"""A campaign of random damage against the AnnData validator: ``python tests/campaigns/random_damage.py --n 3000``.

Each case changes a good file at random: bytes of the file, attributes, arrays, groups. The damaged file is validated, and then read by
anndata and by us, each in a process of its own with limits of time and memory. Counted are errors that are none of ours, checks that go
beyond the limits and are not told by those of `validate`, and files in which the validator finds nothing that must not be though neither reads
them. With ``--attributes`` nothing is left to chance: each attribute of each kind of element is removed, and set to values of every type.
"""

import argparse
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from support.anndata_faults import FORMS, Form, open_for_writing, write_good

SECONDS, MEMORY = 20, 3 << 30
"""What one case may take; the address space counts."""

Change = Callable[[Path, np.random.Generator], str]


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(at for at in path.rglob("*") if at.is_file() and at.stat().st_size)


def _bytes(path: Path, rng: np.random.Generator) -> tuple[Path, bytearray]:
    found = _files(path)
    chosen = found[int(rng.integers(len(found)))]
    return chosen, bytearray(chosen.read_bytes())


def flip(path: Path, rng: np.random.Generator) -> str:
    """Set up to four bytes of a file to other values."""
    file, data = _bytes(path, rng)
    places = rng.integers(0, len(data), int(rng.integers(1, 5)))
    for at in places.tolist():
        data[at] ^= int(rng.integers(1, 256))
    file.write_bytes(bytes(data))
    return f"flip {file.name} {places.tolist()}"


def zero(path: Path, rng: np.random.Generator) -> str:
    """Zero a run of bytes."""
    file, data = _bytes(path, rng)
    at, n = int(rng.integers(len(data))), int(2 ** rng.integers(0, 12))
    data[at : at + n] = bytes(len(data[at : at + n]))
    file.write_bytes(bytes(data))
    return f"zero {file.name} {at}+{n}"


def cut(path: Path, rng: np.random.Generator) -> str:
    """Cut a file short."""
    file, data = _bytes(path, rng)
    at = int(rng.integers(len(data)))
    file.write_bytes(bytes(data[:at]))
    return f"cut {file.name} {at}"


def _nodes(root: Any) -> list[str]:
    found: list[str] = []

    def walk(group: Any, prefix: str) -> None:
        for name in sorted(group):
            path = f"{prefix}{name}"
            found.append(path)
            if not hasattr(group[name], "dtype"):
                walk(group[name], f"{path}/")

    walk(root, "")
    return found


def _chosen(root: Any, rng: np.random.Generator) -> str:
    nodes = _nodes(root)
    return nodes[int(rng.integers(len(nodes)))]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    root = open_for_writing(path)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield root
    finally:
        if isinstance(root, h5py.File):
            root.close()


VALUES: tuple[Any, ...] = (
    "", "array", "dict", "categorical", "csr_matrix", "nonsense", "0.1.0", "0.2.0", "9.9.9", "_index", 0, -1, 3, 2**40, 1.5, True,
    [1, 2], [3, 4], [2**40, 2**40], ["a", "b"], [],
)  # fmt: skip


HDF5_VALUES: tuple[Any, ...] = (
    b"array", np.bytes_(b"\xff\xfe"), h5py.Empty("f4"), h5py.Empty(h5py.string_dtype()), np.array([b"a", b"\xff"], object), np.ones((2, 2)),
    np.float32(np.nan), np.array([3, 4], np.uint8), np.array([True, False]), np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]), 1j,
    np.void(b"abc"), np.array([3, 4], ">i4"), np.array([2**63 + 5, 4], np.uint64),
)  # fmt: skip
ZARR_VALUES: tuple[Any, ...] = (None, {}, {"a": 1}, [None, None], [[3, 4]], 1e308, 10**30, "\x00")

REMOVED: Any = object()
"""In the place of a value: the attribute is removed."""


def attribute(path: Path, rng: np.random.Generator) -> str:
    """Change, add or remove an attribute of any node."""
    with _opened(path) as root:
        at = _chosen(root, rng) if rng.random() < 0.9 else ""
        node = root[at] if at else root
        names = [*sorted(node.attrs), "encoding-type", "encoding-version", "shape", "column-order", "ordered"]
        name = names[int(rng.integers(len(names)))]
        if rng.random() < 0.4 and name in node.attrs:
            del node.attrs[name]
            return f"attribute {at}.{name} removed"
        value = VALUES[int(rng.integers(len(VALUES)))]
        node.attrs[name] = value
        return f"attribute {at}.{name} = {value!r}"


def array(path: Path, rng: np.random.Generator) -> str:
    """Replace any node by an array of another type or shape; its attributes may stay."""
    made = (
        np.zeros(0), np.ones(2), np.arange(3), np.ones(3, bool), np.arange(4) - 2, np.ones((3, 2)), np.array(3), np.array([b"a", b"b"]),
        np.full(3, np.nan), np.arange(3, dtype=np.uint8), np.array([0, 2**31 - 1, 5], np.int64), np.ones((3, 4, 2)), np.array(b"x"),
        np.ones(3, np.complex64),
    )  # fmt: skip
    values = made[int(rng.integers(len(made)))]
    with _opened(path) as root:
        at = _chosen(root, rng)
        kept = dict(root[at].attrs) if rng.random() < 0.7 else {}
        parent, _, name = at.rpartition("/")
        group = root[parent] if parent else root
        del group[name]
        if isinstance(root, h5py.File):
            new = group.create_dataset(name, data=values)
        else:
            new = group.create_array(name, shape=values.shape, dtype=values.dtype, chunks=values.shape or ())
            new[...] = values
        for key, value in kept.items():
            new.attrs[key] = value
        return f"array {at} of {values.dtype}{values.shape}{'' if kept else ' bare'}"


def member(path: Path, rng: np.random.Generator) -> str:
    """Remove a node, put a group in its place, move it, or, in HDF5, put a named datatype or a link there."""
    with _opened(path) as root:
        at = _chosen(root, rng)
        other = _chosen(root, rng)
        kept = dict(root[at].attrs)
        what = ("removed", "a group", "a named datatype", "moved", "a link")[int(rng.integers(5))]
        if what == "moved":
            if f"{other}/".startswith(f"{at}/") or hasattr(root[other], "dtype"):
                return "nothing"
            root.move(at, f"{other}/moved") if not isinstance(root, h5py.File) else root.move(at, f"/{other}/moved")
            return f"member {at} moved to {other}"
        del root[at]
        if what == "a group":
            new = root.create_group(at)
            for key, value in kept.items():
                new.attrs[key] = value
        elif what != "removed" and isinstance(root, h5py.File):
            root[at] = np.dtype("f8") if what == "a named datatype" else h5py.SoftLink("/nowhere")
            if what == "a named datatype":
                for key, value in kept.items():
                    root[at].attrs[key] = value
        return f"member {at}: {what}"


def sweep(form: Form, folder: Path, every: int = 1) -> Iterator[dict[str, Any]]:
    """Remove each attribute of each kind of element, and set it to values of every type.

    Parameters
    ----------
    form : {"hdf5", "zarr2", "zarr3"}
        Kind of file.
    folder : Path
        Empty.
    every : int
        Only every so many changes.

    Yields
    ------
    dict
        As of `one_case`, for each change that the library makes.
    """
    path = folder / ("case.h5ad" if form == "hdf5" else "case.zarr")
    _write_and_read(path, form)
    with _opened(path) as root:
        kinds: dict[tuple[str, str], str] = {}
        for at in ("/", *_nodes(root)):
            own = dict(root[at].attrs)
            for name in {*own, "encoding-type", "encoding-version"}:
                kinds.setdefault((str(own.get("encoding-type")), name), at)
    values = (REMOVED, *VALUES, "a/b", "..", ["a", "a"], [3.0, 4.0], *(HDF5_VALUES if form == "hdf5" else ZARR_VALUES))
    changes = [(at, name, value) for (_, name), at in sorted(kinds.items()) for value in values]
    good = {file: file.read_bytes() for file in _files(path)}
    for at, name, value in changes[::every]:
        done = _inside(lambda at=at, name=name, value=value: _set(path, at, name, value), SECONDS)  # type: ignore[misc]
        if "did" in done:
            yield _judged(path, {"form": form, **done})
        for file, data in good.items():
            if not file.exists() or file.read_bytes() != data:
                file.write_bytes(data)


def _set(path: Path, at: str, name: str, value: Any) -> dict[str, Any]:
    with _opened(path) as root:
        if value is REMOVED:
            del root[at].attrs[name]
        else:
            root[at].attrs[name] = value
    return {"did": f"attribute {at}.{name} {'removed' if value is REMOVED else f'= {value!r}'}"}


CHANGES: tuple[Change, ...] = (flip, flip, zero, cut, attribute, attribute, array, member)


def read_by_anndata(path: Path) -> str:
    """Return why anndata cannot read a file, ``""`` if it can."""
    import anndata as ad

    try:
        with warnings.catch_warnings(action="ignore"):
            ad.read_h5ad(path) if path.is_file() else ad.read_zarr(path)
    except Exception as error:  # noqa: BLE001  (whatever it raises, it cannot read the file)
        return f"{type(error).__name__}: {str(error)[:100]}"
    return ""


def read_by_us(path: Path) -> str:
    """Return why a file cannot be added to an atlas, ``""`` if it can be read."""
    from raggedatlas.formats.registry import open_source

    try:
        source = open_source(path)
        try:
            source.cells()
            for matrix in source.describe().matrices:
                if matrix.features:
                    source.features(matrix.features)
                list(source.blocks((matrix.key,), 2))
        finally:
            source.close()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {str(error)[:100]}"
    return ""


def _inside(work: Callable[[], dict[str, Any]], seconds: int) -> dict[str, Any]:
    """Run something in a forked process with limits, and return what it says, or how it ended."""
    out, into = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(out)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.write(into, json.dumps(work()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(into)
    until = time.monotonic() + seconds
    ended = 0
    while not ended and time.monotonic() < until:
        ended = os.waitpid(child, os.WNOHANG)[0]
        time.sleep(0 if ended else 0.002)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    said = b"".join(iter(lambda: os.read(out, 1 << 16), b""))
    os.close(out)
    if not ended:
        return {"ended": f"still running after {seconds} s"}
    found: dict[str, Any] = json.loads(said) if said else {"ended": "crashed or out of memory"}
    return found


def _validated(path: Path) -> dict[str, Any]:
    from raggedatlas.errors import AtlasError
    from raggedatlas.formats.anndata.validation import validate

    try:
        found = validate(path, "full")
    except AtlasError as error:
        return {"refused": str(error)[:200]}
    except BaseException as error:  # noqa: BLE001  (this is what is looked for)
        import traceback

        return {"foreign": f"{type(error).__name__}: {str(error)[:100]}", "at": traceback.format_exc()[-900:]}
    return {"musts": sorted({f"{p.rule} {p.path}" for p in found if p.level == "must"})}


def _by_limits(path: Path) -> str:
    """Say how a file fares that loops, crashes or takes too much memory, once it is validated with limits, as strangers' files are."""
    from raggedatlas.errors import AtlasError
    from raggedatlas.formats.anndata.validation import Limits, validate

    try:
        found = validate(path, "full", limits=Limits(SECONDS, MEMORY))
    except AtlasError:
        return "told by the limits"
    # On a busy machine a check that took too long the first time may end the second time, and tell another rule.
    return "told by the limits" if any(problem.level == "must" for problem in found) else "beyond the limits"


def one_case(good: dict[Form, Path], folder: Path, seed: int) -> dict[str, Any]:
    """Damage one file, and say how it went."""
    rng = np.random.default_rng(seed)
    form = FORMS[int(rng.integers(len(FORMS)))] if rng.random() < 0.5 else "hdf5"
    path = folder / ("case.h5ad" if form == "hdf5" else "case.zarr")
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    shutil.copytree(good[form], path) if good[form].is_dir() else shutil.copyfile(good[form], path)
    change = CHANGES[int(rng.integers(len(CHANGES)))]
    said = _inside(lambda: {"did": change(path, rng)}, SECONDS)
    if "did" not in said:
        return {"seed": seed, "form": form, "did": f"{change.__name__}: not done ({said})", "outcome": "not damaged"}
    return _judged(path, {"seed": seed, "form": form, **said})


def _judged(path: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Add to a case what the validator and the readers say of its file."""
    found = _inside(lambda: _validated(path), SECONDS)
    case |= found
    if "ended" in found:
        case["outcome"] = _by_limits(path)
    elif "foreign" in found:
        case["outcome"] = "foreign error"
    elif "refused" in found or found["musts"]:
        case["outcome"] = "told"
    else:
        readers = {"anndata": read_by_anndata, "us": read_by_us}
        for name, read in readers.items():
            answer = _inside(lambda read=read: {"said": read(path)}, SECONDS)  # type: ignore[misc]
            case[name] = answer.get("said", answer.get("ended"))
        unread = [name for name in readers if case[name]]
        case["outcome"] = {
            0: "sound and read",
            1: f"sound, but not read by {''.join(unread)}",
            2: "sound, but read by nobody",
        }[len(unread)]
    return case


def _write_and_read(path: Path, form: Form) -> None:
    """Write a good file, and read it once before the forks, so that no case pays for imports and compiled code."""
    write_good(path, form, awkward=True)
    for read in (_validated, read_by_anndata, read_by_us):
        read(path)


def campaign(n: int, first: int) -> list[dict[str, Any]]:
    """Run cases with the seeds from `first` on."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        good: dict[Form, Path] = {}
        for form in FORMS:
            good[form] = folder / f"good-{form}"
            _write_and_read(good[form], form)
        return [one_case(good, folder, seed) for seed in range(first, first + n)]


def attributes(forms: Sequence[Form] = FORMS, every: int = 1) -> list[dict[str, Any]]:
    """Sweep over the attributes of some kinds of file; call it in a process without threads, since each case forks."""
    cases = []
    for form in forms:
        with tempfile.TemporaryDirectory() as folder:
            cases += list(sweep(form, Path(folder), every))
    return cases


def main() -> int:
    """Run the campaign, print what is wrong and the counts; the exit code is 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--attributes", action="store_true", help="sweep over attributes instead")
    parser.add_argument("--all", action="store_true", help="print every case that was not told")
    chosen = parser.parse_args()
    cases = attributes() if chosen.attributes else campaign(chosen.n, chosen.first)
    counts = Counter(case["outcome"] for case in cases)
    bad = ("foreign error", "beyond the limits", "sound, but read by nobody")
    for case in cases:
        if case["outcome"] in bad or (chosen.all and case["outcome"].startswith("sound, but")):
            sys.stdout.write(json.dumps(case) + "\n")
    sys.stdout.write(json.dumps(dict(sorted(counts.items()))) + "\n")
    return int(any(counts[outcome] for outcome in bad))


if __name__ == "__main__":
    sys.exit(main())

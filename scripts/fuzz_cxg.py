"""The long campaign behind the short one in tests/wings/cxg/test_hostile.py: damaged CXGs by the hundred.

``python scripts/fuzz_cxg.py --n 500 --seed 0`` ends with 0 when of each damaged CXG nothing but our own errors came, within the limit,
and none was called sound that could not be read. What goes wrong is named with the number to repeat: ``--first 123 --n 1``.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anndata  # noqa: F401  (here once, instead of in each child)
import numpy as np

from raggedatlas.errors import AtlasError
from raggedatlas.formats.copying import copy, read_source
from raggedatlas.formats.registry import open_sink
from raggedatlas.wings.cxg import inspect, validate
from raggedatlas.wings.cxg.source import cxg_source
from raggedatlas.wings.cxg.tiledb_arrays import import_tiledb, open_array

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.cxg_files import FORMS, set_meta, write_cxg

MEMORY = 6 << 30
"""Bytes of address space of a process that looks at a damaged CXG."""

Damaging = Callable[[Path, np.random.Generator], str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one damaged CXG.

    Parameters
    ----------
    source : str
        Name of the sound CXG.
    damage : str
        What was done to it.
    outcome : {"refused", "changed", "same", "fault"}
        Whether reading was refused, gave other values, or the same; a fault is what must not happen.
    broken : bool
        Whether the validator says that a must is broken.
    what : str
        The refusal or the fault.
    """

    source: str
    damage: str
    outcome: str
    broken: bool
    what: str = ""


def write_sound(folder: Path, data: Path, *, small: bool) -> list[Path]:
    """Write sound CXGs of every kind, in a separate process, since one that has used TileDB cannot be forked.

    Parameters
    ----------
    folder : Path
        Where to.
    data : Path
        The folder of the real files of the tests.
    small : bool
        Whether only the small forms are written.

    Returns
    -------
    list of Path
        One of each small form, three by our writer, and those of 2020.
    """
    folder.mkdir()
    child = multiprocessing.get_context("fork").Process(
        target=_write_sound, args=(folder, data), kwargs={"small": small}
    )
    child.start()
    child.join()
    if child.exitcode:
        raise RuntimeError("the sound CXGs could not be written")
    return sorted(path for path in folder.rglob("*.cxg"))


def _write_sound(folder: Path, data: Path, *, small: bool) -> None:
    for form in FORMS:
        write_cxg(folder / f"small_{form}.cxg", form)
    if small:
        return
    for profile, layout in (("0.3.0", "sparse"), ("0.3.0", "dense"), ("0.2.0", "sparse")):
        path = folder / f"written_{profile}_{layout}.cxg"
        copy(data / "pbmc68k_reduced.h5ad", open_sink(path, profile=profile, layout=layout))
    for stored in sorted(data.glob("cxg_tiledb_*.zip")):
        with zipfile.ZipFile(stored) as opened:
            opened.extractall(folder / stored.stem)


def campaign(
    sound: Sequence[Path], folder: Path, numbers: Sequence[int], *, seed: int = 0, limit_s: float = 60
) -> Iterator[Verdict]:
    """Damage and judge CXGs.

    Parameters
    ----------
    sound : sequence of Path
        Of `write_sound`.
    folder : Path
        For temporary copies.
    numbers : sequence of int
        Of the damages; the same number and seed give the same damage.
    seed : int
        Of the campaign.
    limit_s : float
        Seconds after which a process hangs.

    Yields
    ------
    Verdict
        One for each number.
    """
    forking = multiprocessing.get_context("fork")
    import_tiledb()
    known: dict[Path, str] = {}
    for number in numbers:
        path = sound[number % len(sound)]
        if path not in known:
            known[path] = _asked(forking, _read_in_child, (path,), limit_s)
        copied = folder / f"{number}.cxg"
        yield _verdict(_asked(forking, _judge_in_child, (path, copied, known[path], seed, number), limit_s), path)
        shutil.rmtree(copied, ignore_errors=True)


def _asked(forking: Any, target: Callable[..., None], words: tuple[Any, ...], limit_s: float) -> Any:
    """Run a function in a child, and return what it sends; a text says what became of a child that sends nothing."""
    mine, theirs = forking.Pipe(duplex=False)
    child = forking.Process(target=target, args=(theirs, *words))
    child.start()
    theirs.close()
    try:
        answered = mine.poll(limit_s)
        return mine.recv() if answered else f"hangs for more than {limit_s:g} s"
    except EOFError:
        child.join()
        return f"ends by {child.exitcode}"
    finally:
        child.kill()
        child.join()


def _verdict(answer: Any, path: Path) -> Verdict:
    return answer if isinstance(answer, Verdict) else Verdict(path.name, "", "fault", broken=False, what=str(answer))


def _read_in_child(pipe: Connection, path: Path) -> None:
    pipe.send(_digest(path))


def _judge_in_child(pipe: Connection, path: Path, copied: Path, known: str, seed: int, number: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    shutil.copytree(path, copied)
    rng = np.random.default_rng([seed, number])
    damage = _damaged(copied, rng)
    pipe.send(_judged(path.name, copied, damage, known))


def _judged(name: str, path: Path, damage: str, known: str) -> Verdict:
    try:
        broken = [str(problem) for problem in validate(path, "full") if problem.level == "must"]
        try:
            inspect(path)
        except AtlasError as error:
            if not broken:
                return Verdict(name, damage, "fault", broken=False, what=f"sound, and not inspected: {error}")
        try:
            found = _digest(path)
        except AtlasError as error:
            if not broken:
                return Verdict(name, damage, "fault", broken=False, what=f"sound, and not read: {error}")
            return Verdict(name, damage, "refused", broken=True, what=str(error))
    except Exception:  # noqa: BLE001  (what comes here is what is looked for)
        return Verdict(name, damage, "fault", broken=False, what=traceback.format_exc())
    return Verdict(name, damage, "same" if found == known else "changed", broken=bool(broken), what="; ".join(broken))


def _digest(path: Path) -> str:
    """Read everything, by rows and by columns, and return a digest of it."""
    source = cxg_source(path)
    try:
        read = read_source(source)
        by_column = [_dense(values) for _, values in source.column_blocks()]
    finally:
        source.close()
    made = hashlib.sha256()
    for part in (read.X, np.concatenate(by_column, axis=1), *(read.obsm[key] for key in sorted(read.obsm))):
        made.update(np.ascontiguousarray(_dense(part)).tobytes())
    for frame in (read.obs, read.var):
        made.update(frame.to_csv().encode())
    made.update(repr(sorted(read.uns.items(), key=lambda item: str(item[0]))).encode())
    return made.hexdigest()


def _dense(values: Any) -> Any:
    return values.toarray() if hasattr(values, "toarray") else np.asarray(values)


def _damaged(path: Path, rng: np.random.Generator) -> str:
    names = list(DAMAGINGS)
    shares = np.array([DAMAGINGS[name][1] for name in names], float)
    name = str(rng.choice(names, p=shares / shares.sum()))
    return f"{name}: {DAMAGINGS[name][0](path, rng)}"


def _file(path: Path, rng: np.random.Generator) -> Path:
    """Choose a file, of each array and folder as often."""
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)
    folders = sorted({file.parent for file in files})
    chosen = folders[int(rng.integers(len(folders)))]
    inner = [file for file in files if file.parent == chosen]
    return inner[int(rng.integers(len(inner)))]


def _bytes(change: Callable[[bytearray, np.random.Generator], bytes]) -> Damaging:
    """Make a damage that rewrites one file."""

    def damage(path: Path, rng: np.random.Generator) -> str:
        file = _file(path, rng)
        file.write_bytes(change(bytearray(file.read_bytes()), rng))
        return str(file.relative_to(path))

    return damage


def _flip(raw: bytearray, rng: np.random.Generator) -> bytes:
    for _ in range(int(rng.integers(1, 4))):
        raw[int(rng.integers(len(raw)))] ^= 1 << int(rng.integers(8))
    return bytes(raw)


def _overwrite(raw: bytearray, rng: np.random.Generator) -> bytes:
    n = int(rng.choice([1, 4, 8]))
    # Lengths stand at the beginning and the end of files.
    near = int(rng.integers(1, 48))
    at = (int(rng.integers(len(raw))), near % len(raw), max(0, len(raw) - near))[int(rng.integers(3))]
    word = [b"\0" * n, b"\xff" * n, b"\xff" * (n - 1) + b"\x7f", rng.bytes(n)][int(rng.integers(4))]
    raw[at : at + n] = word[: len(raw[at : at + n])]
    return bytes(raw)


def _cut(raw: bytearray, rng: np.random.Generator) -> bytes:
    return bytes(raw[: int(rng.integers(len(raw)))])


def _grow(raw: bytearray, rng: np.random.Generator) -> bytes:
    return bytes(raw) + rng.bytes(int(rng.integers(1, 64)))


def _swap(path: Path, rng: np.random.Generator) -> str:
    one, other = _file(path, rng), _file(path, rng)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    return f"{one.relative_to(path)} and {other.relative_to(path)}"


def _replace(path: Path, rng: np.random.Generator) -> str:
    file = _file(path, rng)
    file.unlink()
    makers: list[Callable[[], Any]] = [
        lambda: None,
        file.mkdir,
        lambda: os.mkfifo(file),
        lambda: file.symlink_to("no such file"),
    ]
    what = int(rng.integers(len(makers)))
    makers[what]()
    return f"{file.relative_to(path)} by {('nothing', 'a folder', 'a pipe', 'a broken link')[what]}"


def _drop(path: Path, rng: np.random.Generator) -> str:
    folders = sorted(folder for folder in path.rglob("*") if folder.is_dir())
    folder = folders[int(rng.integers(len(folders)))]
    shutil.rmtree(folder)
    return str(folder.relative_to(path))


def _metadata(path: Path, rng: np.random.Generator) -> str:
    """Write other JSON, or other text, into the metadata of an array."""
    places = [("obs", "cxg_schema"), ("var", "cxg_schema")]
    if (path / "cxg_group_metadata").is_dir():
        keys = ("cxg_version", "cxg_properties", "cxg_category_colors", "corpora")
        places += [("cxg_group_metadata", key) for key in keys]
    places += [("uns", "spatial")] if (path / "uns").is_dir() else []
    array, key = places[int(rng.integers(len(places)))]
    with open_array(path / array) as opened:
        text = opened.meta.get(key, "{}")
    made = _other_json(text, rng) if rng.random() < 0.6 else _other_text(text, rng)
    set_meta(path / array, **{key: made})
    return f"{array}@{key}: {made!r:.80}"


def _other_text(text: str, rng: np.random.Generator) -> str | bytes | int:
    at, to = sorted(int(n) for n in rng.integers(0, len(text) + 1, 2))
    choices: list[str | bytes | int] = [text[:at] + text[to:], text[:at], "", 999 * "[", 7, text.encode("utf-16")]
    return choices[int(rng.integers(len(choices)))]


def _other_json(text: str, rng: np.random.Generator) -> str:
    """Put another value in the place of one, at any depth."""
    try:
        found = json.loads(text)
    except ValueError:
        return "null"
    others: list[Any] = [None, -1, 1.5, "text", [], {}, [[1], "a"], True, "\0", {"type": "categorical"}, 10**30]
    other = others[int(rng.integers(len(others)))]
    held: Any = found
    while isinstance(held, dict | list) and held:
        keys: list[Any] = list(held) if isinstance(held, dict) else list(range(len(held)))
        key = keys[int(rng.integers(len(keys)))]
        if not isinstance(held[key], dict | list) or not held[key] or rng.random() < 0.4:
            held[key] = other
            return json.dumps(found)
        held = held[key]
    return json.dumps(other)


DAMAGINGS: dict[str, tuple[Damaging, int]] = {
    "flip": (_bytes(_flip), 6),
    "overwrite": (_bytes(_overwrite), 6),
    "cut": (_bytes(_cut), 3),
    "grow": (_bytes(_grow), 1),
    "swap": (_swap, 2),
    "replace": (_replace, 3),
    "drop": (_drop, 2),
    "metadata": (_metadata, 4),
}
"""Name -> what it does, and how often relative to the others."""


def main() -> int:
    """Run it, and say what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=60, help="seconds for each")
    parser.add_argument("--small", action="store_true", help="only of the small CXGs that the tests make")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent.parent / "tests" / "data")
    chosen = parser.parse_args()
    counts: Counter[str] = Counter()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        sound = write_sound(Path(folder) / "sound", chosen.data, small=chosen.small)
        numbers = range(chosen.first, chosen.first + chosen.n)
        judged = campaign(sound, Path(folder), numbers, seed=chosen.seed, limit_s=chosen.limit)
        for number, verdict in zip(numbers, judged, strict=True):
            kind = verdict.source.partition("_")[0]
            counts[f"{verdict.outcome}{', a must broken' if verdict.broken else ''}"] += 1
            counts[f"{kind}: {verdict.outcome}{', a must broken' if verdict.broken else ''}"] += 1
            if verdict.outcome == "fault" or (verdict.outcome == "changed" and not verdict.broken):
                print(f"{number} {verdict.source} {verdict.damage}\n  {verdict.outcome}: {verdict.what}", flush=True)
    for name in sorted(counts):
        print(f"{counts[name]:6,} {name}")
    print(f"{len(sound)} sound CXGs, {chosen.n} damages, {time.monotonic() - began:.0f} s")
    return int(counts["fault"] > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Compiles the sources of this folder into one shared library; needs Python and a C compiler, nothing else.

``python native/compile.py`` compiles into ``native/build`` unless the library of these very sources is there, and prints
its path. ``--sanitize`` compiles with AddressSanitizer and UndefinedBehaviorSanitizer. Wheels and checkouts use it.
"""

import contextlib
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
LIBRARY = f"libraggedatlas{SUFFIX}"
"""Its name in the package's folder ``store``, where the wheel has it."""
FLAGS = [
    "-std=c11",
    "-O3",
    "-fno-strict-aliasing",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
]
SANITIZE = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


class CompileError(Exception):
    """There is no compiler, or it failed; the text says which and what to do."""


def machine_compiler() -> list[str] | None:
    """Return the command of this machine's C compiler: CC, cc, gcc or clang; None where there is none."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    return next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


def compiler() -> list[str]:
    """Return the command of a C compiler, that of the ``ziglang`` package where the machine has none."""
    found = machine_compiler()
    if found is not None:
        return found
    if importlib.util.find_spec("ziglang") is None:
        raise CompileError("No C compiler was found: install gcc or clang, name one in CC, or `pip install ziglang`.")
    # Else zig would compile for the very processor that it runs on.
    return [sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline"]


def sources() -> list[Path]:
    """List all files that decide what the library is."""
    return sorted([*HERE.glob("*.c"), *HERE.glob("*.h"), HERE / "compile.py"])


def library_path(*, sanitize: bool = False) -> Path:
    """Return where the library of these sources belongs: its name has their hash."""
    digest = hashlib.sha256(f"{sysconfig.get_platform()} {platform.machine()}".encode())
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    kind = "-sanitized" if sanitize else ""
    return HERE / "build" / f"libraggedatlas{kind}-{digest.hexdigest()[:16]}{SUFFIX}"


def compile_library(target: Path, *, sanitize: bool = False) -> Path:
    """Compile the library unless it is there; other processes see it whole or not at all."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        flags = [*FLAGS, *(SANITIZE if sanitize else []), *([] if sys.platform == "win32" else ["-fPIC"])]
        command = [*compiler(), *flags]
        objects = {path: f"{folder}/{path.stem}.o" for path in sorted(HERE.glob("*.c"))}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda pair: run([*command, "-c", "-o", pair[1], str(pair[0])]), objects.items()))
        run([*command, "-shared", "-o", str(made), *objects.values()])
        made.replace(target)
    _remove_older(target, sanitize=sanitize)
    return target


def _remove_older(target: Path, *, sanitize: bool) -> None:
    """Remove libraries of other sources; one that a process has loaded stays with it, or, on Windows, in its place."""
    for path in target.parent.glob(f"libraggedatlas-*{SUFFIX}"):
        if path != target and ("-sanitized" in path.name) == sanitize:
            with contextlib.suppress(OSError):
                path.unlink()


def run(command: list[str]) -> None:
    """Run a compiler; what it warns of goes to standard error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{shlex.join(command)}\nfailed:\n{done.stdout}{done.stderr}")
    sys.stderr.write(done.stderr)


if __name__ == "__main__":
    wanted = "--sanitize" in sys.argv[1:]
    try:
        print(compile_library(library_path(sanitize=wanted), sanitize=wanted))
    except CompileError as error:
        sys.exit(str(error))

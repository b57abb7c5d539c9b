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
PLATFORMS = {
    "manylinux_2_17_x86_64": "x86_64-linux-gnu.2.17",
    "manylinux_2_17_aarch64": "aarch64-linux-gnu.2.17",
    "musllinux_1_2_x86_64": "x86_64-linux-musl",
    "musllinux_1_2_aarch64": "aarch64-linux-musl",
    "macosx_11_0_arm64": "aarch64-macos.11.0",
    "macosx_11_0_x86_64": "x86_64-macos.11.0",
    "win_amd64": "x86_64-windows-gnu",
}
"""Platforms of wheels that ``ziglang`` compiles for on any machine, and its names of them."""
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


def compiler(platform_tag: str = "") -> list[str]:
    """Return the command of a C compiler: that of the ``ziglang`` package for another platform, or where the machine has none."""
    found = machine_compiler()
    if found is not None and not platform_tag:
        return found
    if importlib.util.find_spec("ziglang") is None:
        raise CompileError("No C compiler was found: install gcc or clang, name one in CC, or `pip install ziglang`.")
    # Else zig would compile for the very processor that it runs on.
    target = ["-target", PLATFORMS[platform_tag]] if platform_tag else []
    return [sys.executable, "-m", "ziglang", "cc", *target, "-mcpu=baseline", "-g0"]


def suffix(platform_tag: str = "") -> str:
    """Return the end of a library's name on a platform of `PLATFORMS`, by default on this machine."""
    return {"win": ".dll", "mac": ".dylib", "": SUFFIX}.get(platform_tag[:3], ".so")


def sources() -> list[Path]:
    """List all files that decide what the library is."""
    return sorted([*HERE.glob("*.c"), *HERE.glob("*.h"), HERE / "compile.py"])


def library_path(*, sanitize: bool = False, platform_tag: str = "") -> Path:
    """Return where the library of these sources belongs: its name has their hash."""
    digest = hashlib.sha256(f"{platform_tag or sysconfig.get_platform()} {platform.machine()}".encode())
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    kind = "sanitized-" if sanitize else f"{platform_tag}-" if platform_tag else ""
    return HERE / "build" / f"libraggedatlas-{kind}{digest.hexdigest()[:16]}{suffix(platform_tag)}"


def compile_library(target: Path, *, sanitize: bool = False, platform_tag: str = "") -> Path:
    """Compile the library unless it is there; other processes see it whole or not at all."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        flags = [*FLAGS, *(SANITIZE if sanitize else []), *([] if target.suffix == ".dll" else ["-fPIC"])]
        command = [*compiler(platform_tag), *flags]
        objects = {path: f"{folder}/{path.stem}.o" for path in sorted(HERE.glob("*.c"))}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda pair: run([*command, "-c", "-o", pair[1], str(pair[0])]), objects.items()))
        run([*command, "-shared", "-o", str(made), *objects.values()])
        made.replace(target)
    _remove_older(target)
    return target


def _remove_older(target: Path) -> None:
    """Remove libraries of other sources; one that a process has loaded stays with it, or, on Windows, in its place."""
    kind, _, _ = target.stem.rpartition("-")
    for path in target.parent.glob(f"{kind}-*{target.suffix}"):
        if path != target and path.stem.rpartition("-")[0] == kind:
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

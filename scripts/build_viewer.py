"""Builds the page of the viewer from viewer/ and pinned npm packages, and records what it was built of.

Needs Node.js with npm. ``--check`` builds into a temporary folder and compares; nothing is written then.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from raggedatlas.wings.viewer.page import LICENCES, PROGRAM, RECORD, STYLE
from raggedatlas.wings.viewer.palette import CATEGORICAL

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "viewer"
BUNDLE = ROOT / "src" / "raggedatlas" / "wings" / "viewer" / "bundle"
PALETTE = "palette.js"


def inputs() -> dict[str, str]:
    """Hash everything that the page is built of: sources, pins, and the palette that Python shares with it."""
    named = [SOURCE / "package.json", SOURCE / "package-lock.json", *sorted((SOURCE / "src").iterdir())]
    hashes = {str(path.relative_to(SOURCE)): sha256(path.read_bytes()) for path in named}
    return {**hashes, f"src/{PALETTE}": sha256(palette().encode())}


def palette() -> str:
    """Write the palette as a module."""
    return f"export const CATEGORICAL = {json.dumps(list(CATEGORICAL))};\n"


def sha256(data: bytes) -> str:
    """Hash bytes."""
    return hashlib.sha256(data).hexdigest()


def build(out: Path) -> None:
    """Install what the lock names, bundle, gather the licences, and write the record."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for path in [SOURCE / "package.json", SOURCE / "package-lock.json"]:
            (work / path.name).write_bytes(path.read_bytes())
        run(work, "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent")
        (work / "src").mkdir()
        for path in (SOURCE / "src").iterdir():
            (work / "src" / path.name).write_bytes(path.read_bytes())
        (work / "src" / PALETTE).write_text(palette(), encoding="utf-8")
        flags = ["--minify", "--legal-comments=none", "--charset=ascii", "--log-level=warning"]
        esbuild = ["node", "node_modules/esbuild/bin/esbuild"]
        program = ["src/main.js", "--bundle", "--format=iife", "--target=es2022", f"--outfile=out/{PROGRAM}"]
        metafile = "--metafile=meta.json"
        run(work, *esbuild, *program, *flags, metafile)
        run(work, *esbuild, "src/page.css", f"--outfile=out/{STYLE}", *flags)
        out.mkdir(parents=True, exist_ok=True)
        for built in (PROGRAM, STYLE):
            (out / built).write_bytes((work / "out" / built).read_bytes())
        used = packages(work)
        (out / LICENCES).write_text(licences(work, used), encoding="utf-8")
    files = {built: sha256((out / built).read_bytes()) for built in (PROGRAM, STYLE, LICENCES)}
    record = {"packages": used, "inputs": inputs(), "files": files}
    (out / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def run(folder: Path, *command: str) -> None:
    """Run a command in a folder, and stop where it fails."""
    subprocess.run(command, cwd=folder, check=True)


def packages(work: Path) -> dict[str, str]:
    """Name the packages of which something went into the bundle, with their versions."""
    paths = json.loads((work / "meta.json").read_text(encoding="utf-8"))["inputs"]
    names = set()
    for path in paths:
        parts = path.split("/")
        if parts[0] == "node_modules":
            names.add("/".join(parts[1:3] if parts[1].startswith("@") else parts[1:2]))
    return {name: describe(work, name)["version"] for name in sorted(names)}


def describe(work: Path, name: str) -> dict[str, str]:
    """Read a package's own description."""
    found: dict[str, str] = json.loads((work / "node_modules" / name / "package.json").read_text(encoding="utf-8"))
    return found


def licences(work: Path, used: dict[str, str]) -> str:
    """Gather the licences of all that went into the bundle."""
    texts = ["The bundled page of the viewer contains parts of these packages.\n"]
    for name, version in used.items():
        folder = work / "node_modules" / name
        found = sorted(
            path for path in folder.iterdir() if path.name.upper().startswith(("LICEN", "NOTICE", "COPYING"))
        )
        stated = describe(work, name).get("license", "")
        if not found and not stated:
            sys.exit(f"{name} {version} states no licence.")
        texts.append(f"{'=' * 80}\n{name} {version} ({stated})\n{'=' * 80}\n")
        texts += [path.read_text(encoding="utf-8", errors="replace").strip() + "\n" for path in found]
    return "\n".join("\n".join(line.rstrip() for line in text.splitlines()) for text in texts) + "\n"


def main() -> None:
    """Build, or compare a new build with what is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="build again elsewhere and compare")
    if not parser.parse_args().check:
        build(BUNDLE)
        sizes = ", ".join(f"{path.name} {path.stat().st_size:,} bytes" for path in sorted(BUNDLE.iterdir()))
        print(f"Built {sizes}")
        return
    with tempfile.TemporaryDirectory() as name:
        build(Path(name))
        for path in sorted(Path(name).iterdir()):
            if path.read_bytes() != (BUNDLE / path.name).read_bytes():
                sys.exit(f"{path.name} is not what viewer/ builds; run scripts/build_viewer.py")
    print("The built page is what viewer/ builds.")


if __name__ == "__main__":
    main()

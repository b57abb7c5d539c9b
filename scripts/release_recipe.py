"""Writes the conda recipe of a release: that of the checkout, with the address and the hash of the sdist as its source, parsed and rendered."""

import hashlib
import sys
from pathlib import Path

from rattler_build import Stage0Recipe, VariantConfig

ADDRESS = "https://pypi.org/packages/source/r/raggedatlas/raggedatlas-${{ version }}.tar.gz"


def main(recipe: Path, sdist: Path, target: Path) -> None:
    """Write and render `target`; say what of conda-forge's rules only its maintainers can enter."""
    text = recipe.read_text("utf-8")
    source = f"  url: {ADDRESS}\n  sha256: {hashlib.sha256(sdist.read_bytes()).hexdigest()}\n"
    assert text.count("  path: ..\n") == 1, "the recipe's source is the checkout"
    target.write_text(text.replace("  path: ..\n", source), encoding="utf-8")
    made = Stage0Recipe.from_file(target)
    variant = VariantConfig({"c_stdlib": ["sysroot"], "c_stdlib_version": ["2.28"], "python": ["3.13.*"]})
    assert made.render(variant), "the recipe renders to no package"
    fields = made.to_dict()
    entered = {
        "about.homepage": fields["about"].get("homepage"),
        "extra.recipe-maintainers": fields.get("extra", {}).get("recipe-maintainers"),
    }
    print(
        "conda recipe: valid; to enter before it is sent to conda-forge:",
        [name for name, value in entered.items() if not value] or "nothing",
    )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

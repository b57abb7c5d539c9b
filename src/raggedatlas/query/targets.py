"""Targets of perturbations: labels that name one gene in several ways, or several genes in any order, made one label."""

from collections.abc import Iterable

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.features import read_registry
from raggedatlas.catalog.identity import GENE_SPACE


def target_labels(catalog: Catalog, values: Iterable[str], separator: str | None = None) -> dict[str, str]:
    """Return one label for all values that name the same targets: value -> the symbols of its targets, sorted.

    The genes of the atlas, and which of them count as the same, decide; what names no gene, or several, stays as it is.
    `separator` stands between the targets of a combination, whose order does not count.
    """
    parts = {value: [value] if separator is None else value.split(separator) for value in values}
    names = [*dict.fromkeys(name for some in parts.values() for name in some if name)]
    known: dict[str, str] = {}
    if GENE_SPACE in catalog.spaces():
        registry = read_registry(catalog, GENE_SPACE)
        found = registry.resolve(names)
        left_out = {*found.unknown, *(found.ambiguous or ())}
        resolved = [name for name in names if name not in left_out]
        # Two features may have one symbol; these stay apart, by their ids.
        symbols = registry.names_of(found.uids)
        owners: dict[str, set[str]] = {}
        for uid, symbol in zip(found.uids, symbols, strict=True):
            owners.setdefault(symbol, set()).add(uid)
        ids = registry.ids_of(found.uids)
        shown = [
            symbol if len(owners[symbol]) == 1 else uid_name for symbol, uid_name in zip(symbols, ids, strict=True)
        ]
        known = dict(zip(resolved, shown, strict=True))
    joined = {}
    for value, some in parts.items():
        targets = [known.get(name, name) for name in some]
        joined[value] = targets[0] if separator is None else separator.join(sorted(targets))
    return joined

"""Other elements of a file than cells, features and layers: kept with the dataset, so that they are returned unchanged."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import NotFoundError
from raggedatlas.formats.archive import pack
from raggedatlas.ingest.content_hash import iterate_blocks
from raggedatlas.model.batch import CsrBlock
from raggedatlas.model.frames import facts_of
from raggedatlas.model.protocols import MatrixInfo, Source
from raggedatlas.model.records import ELEMENTS, EXTRAS, ExtraFacts
from raggedatlas.model.reports import ColumnReport
from raggedatlas.store.arrays import ArraySpec, ArrayWriter, create_group

SIDES = ("obsm", "varm", "obsp", "varp", "uns", "raw/varm")
"""Groups whose members `extras=` chooses among; the tables of cells and features are always kept."""

PRESENT = "present/"
"""Before the key of a modality's cells: which cell each of its rows is."""


@dataclass(frozen=True, slots=True)
class OtherElements:
    """Elements of a source that are kept outside its groups.

    Parameters
    ----------
    arrays : tuple of MatrixInfo
        Matrices that are streamed into arrays.
    elements : tuple of str
        Keys of what is kept whole.
    modalities : tuple of str
        Names of the modalities.
    """

    arrays: tuple[MatrixInfo, ...] = ()
    elements: tuple[str, ...] = ()
    modalities: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of all that is kept."""
        return (*(info.key for info in self.arrays), *self.elements)

    def reports(self) -> list[ColumnReport]:
        """Return a line for each."""
        return [ColumnReport(key, "kept", "the dataset") for key in self.keys]


@dataclass
class WrittenElements:
    """What writing found out.

    Parameters
    ----------
    facts : dict
        Key of each array -> where it is, its form, dtype and shape.
    specs, checksums : dict
        Path below the group -> array description, checksum.
    """

    facts: dict[str, ExtraFacts] = field(default_factory=dict)
    specs: dict[str, ArraySpec] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)


def plan_other_elements(
    source: Source, taken: Collection[str], tables: Collection[str], wanted: Literal["all"] | Sequence[str]
) -> OtherElements:
    """Decide what is kept.

    Parameters
    ----------
    source : Source
        The source.
    taken : collection of str
        Keys of the matrices that become layers.
    tables : collection of str
        Keys of the tables of features that the groups keep.
    wanted : "all" or sequence of str
        Keys, groups such as ``"uns"``, or modalities.

    Raises
    ------
    NotFoundError
        If there is nothing by a wanted name.
    """
    schema = source.describe()
    sides = [info for info in (*schema.matrices, *schema.others) if info.key not in taken]
    sides = [info for info in sides if _side(info.key) or info in schema.others]
    offered = [*(info.key for info in sides), *schema.elements]
    chosen = set(offered) if wanted == "all" else _chosen(offered, wanted)
    # Empty matrices go into the zip: `ArrayWriter` refuses rows without elements.
    streamed = [
        info for info in sides if info.key in chosen and info.key not in schema.elements and 0 not in info.shape
    ]
    keys = dict.fromkeys([*schema.elements, *(info.key for info in sides if info not in streamed)])
    whole = [key for key in keys if key in chosen]
    modalities = tuple(
        dict.fromkeys(key.split("/")[1] for key in (*taken, *offered, *tables) if key.startswith("mod/"))
    )
    prefixes = ["", *(f"mod/{name}/" for name in modalities)]
    named = dict.fromkeys([*(f"{prefix}var" for prefix in prefixes), *(i.features for i in sides if not _side(i.key))])
    # Tables of features that no group keeps, such as that of a modality whose matrices were left out.
    lacking = [key for key in named if key and key not in tables and key not in keys and _has_table(source, key)]
    return OtherElements(tuple(streamed), (*whole, *lacking), modalities)


def serialize_other_elements(source: Source, extras: OtherElements) -> bytes:
    """Read what is kept whole, as one file; empty where there is nothing.

    Raises
    ------
    SchemaError
        If something cannot be kept as it is; the message names it.
    """
    found = {key: source.element(key) for key in extras.elements}
    for name in extras.modalities:
        cells = source.present(f"mod/{name}/obs")
        if cells is not None:
            found[f"{PRESENT}mod/{name}/obs"] = cells
    return pack(found) if found else b""


def write_other_elements(
    catalog: Catalog, source: Source, group: str, extras: OtherElements, packed: bytes
) -> WrittenElements:
    """Write what is kept below a group, matrices in blocks of rows.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    source : Source
        The source.
    group : str
        Path of the dataset's first group.
    extras : OtherElements
        What `plan_other_elements` decided.
    packed : bytes
        What `serialize_other_elements` made.
    """
    written = WrittenElements()
    if not packed and not extras.arrays:
        return written
    create_group(catalog.arrays, f"{group}/{EXTRAS}")
    profile = catalog.codec()
    if packed:
        _close(written, group, {ELEMENTS: _filled(catalog, f"{group}/{ELEMENTS}", np.frombuffer(packed, np.uint8))})
    for i, info in enumerate(extras.arrays):
        path = f"{EXTRAS}/{i}"
        create_group(catalog.arrays, f"{group}/{path}")
        dtype = np.dtype(np.uint8) if info.dtype.kind == "b" else info.dtype
        rows = info.shape[1:] if info.form == "dense" else ()
        writers = {f"{path}/data": ArrayWriter(catalog.arrays, f"{group}/{path}/data", dtype, rows, profile=profile)}
        if info.form != "dense":
            writers[f"{path}/indices"] = ArrayWriter(
                catalog.arrays, f"{group}/{path}/indices", np.uint32, profile=profile
            )
        bounds = [np.zeros(1, np.int64)]
        for _, block in iterate_blocks(source, info):
            writers[f"{path}/data"].append(block.layers["values"].astype(dtype, copy=False))
            if isinstance(block, CsrBlock):
                writers[f"{path}/indices"].append(block.indices.astype(np.uint32))
                # Pointers of each block start at 0 again.
                bounds.append(block.indptr[1:] + bounds[-1][-1])
        if info.form != "dense":
            indptr = np.concatenate(bounds)
            writers[f"{path}/indptr"] = _filled(catalog, f"{group}/{path}/indptr", indptr)
        _close(written, group, writers)
        written.facts[info.key] = ExtraFacts(path=path, shape=info.shape, **matrix_facts(info))
    return written


def matrix_facts(info: MatrixInfo) -> dict[str, Any]:
    """Return the form in which a matrix is read back: the fields of `MatrixFacts`."""
    return {"form": info.form, "dtype": str(info.dtype), "wide": info.wide}


def merge_colors(source: Source, cells: pa.Table, elements: Sequence[str]) -> dict[str, dict[str, str]]:
    """Read the colours of categories: column -> category -> colour.

    Colours that are not one text for each category are left out; they stay among the elements.

    Parameters
    ----------
    source : Source
        Its elements ``"uns/<column>_colors"`` are read.
    cells : pyarrow.Table
        With the facts of its columns.
    elements : sequence of str
        Keys that are kept.
    """
    found = {}
    for key in elements:
        head, _, name = key.rpartition("uns/")
        if not key.startswith((f"{head}uns/", "uns/")) or "/" in name or not name.endswith("_colors"):
            continue
        own = name.removesuffix("_colors")
        column = f"{head.split('/')[1]}:{own}" if head else own
        categories = _categories(cells, column)
        colors = np.atleast_1d(np.asarray(source.element(key), dtype=object)).tolist()
        if len(categories) == len(colors) and all(isinstance(color, str) for color in colors) and categories:
            found[column] = dict(zip(categories, map(str, colors), strict=True))
    return found


def _categories(cells: pa.Table, column: str) -> list[str]:
    facts = facts_of(cells.schema.field(column)) if column in cells.column_names else None
    return [str(name) for name in (facts.categories or ())] if facts is not None else []


def _side(key: str) -> bool:
    parts = key.split("/")
    parts = parts[2:] if parts[0] == "mod" else parts
    return parts[0] in SIDES or "/".join(parts[:2]) in SIDES


def _chosen(offered: Sequence[str], wanted: Sequence[str]) -> set[str]:
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    for name in names:
        if not any(key == name or key.startswith(f"{name}/") for key in offered):
            raise NotFoundError(f"extras={names!r}: the source has no {name!r}; it has {list(offered)}.")
    return {
        key for key in offered if not _side(key) or any(key == name or key.startswith(f"{name}/") for name in names)
    }


def _has_table(source: Source, key: str) -> bool:
    try:
        source.element(key)
    except NotFoundError:
        return False
    return True


def _filled(catalog: Catalog, path: str, values: NDArray[Any]) -> ArrayWriter:
    writer = ArrayWriter(catalog.arrays, path, values.dtype, profile=catalog.codec())
    writer.append(values)
    return writer


def _close(written: WrittenElements, group: str, writers: Mapping[str, ArrayWriter]) -> None:
    for path, writer in writers.items():
        written.specs[path] = writer.close()
        written.checksums[path] = writer.checksum

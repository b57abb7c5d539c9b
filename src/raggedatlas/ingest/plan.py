"""What an `add` will write, decided from metadata alone; every refusal that needs no values is made here."""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.assets import read_records
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.cells import CellColumn, takes_over
from raggedatlas.catalog.features import read_layouts
from raggedatlas.catalog.layouts import feature_set, records_with_features
from raggedatlas.errors import DuplicateError, NameRefusedError, NotFoundError, SchemaError, SourceError
from raggedatlas.ingest.columns import Features, column_values, identify, plan_columns
from raggedatlas.ingest.values import entry_hash, hash_texts, rank_columns, sample_counts
from raggedatlas.model.assets import result_columns
from raggedatlas.model.batch import Block
from raggedatlas.model.frames import INDEX, facts_of
from raggedatlas.model.ids import (
    LONGEST_NAME,
    check_given_name,
    check_license,
    column_name,
    fit_name,
    free_name,
    is_unicode,
    layout_uid,
    new_uid,
)
from raggedatlas.model.options import IngestOptions
from raggedatlas.model.protocols import NO_MATRIX, MatrixInfo, Source, SourceSchema
from raggedatlas.model.reports import ColumnOrder, ColumnReport
from raggedatlas.model.schemas import FeatureBaseSchema
from raggedatlas.model.spaces import FeatureSpace, PointerKind, pointer_columns
from raggedatlas.store.location import AnyPath

SIDES = ("obsm", "varm", "obsp", "varp", "uns", "raw/varm")
"""Groups whose members `extras=` chooses among; the tables of cells and features are always kept."""


@dataclass(frozen=True, slots=True)
class OtherElements:
    """Elements of a source that are kept outside its groups."""

    arrays: tuple[MatrixInfo, ...] = ()  # matrices that are streamed into arrays
    elements: tuple[str, ...] = ()  # keys of what is kept whole
    modalities: tuple[str, ...] = ()  # names of the modalities

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of all that is kept."""
        return (*(info.key for info in self.arrays), *self.elements)


def plan_other_elements(
    source: Source, taken: Collection[str], tables: Collection[str], wanted: Literal["all"] | Sequence[str]
) -> OtherElements:
    """Decide what is kept."""
    schema = source.describe()
    sides = [info for info in (*schema.matrices, *schema.others) if info.key not in taken]
    sides = [info for info in sides if _side(info.key) or info in schema.others]
    offered = [*(info.key for info in sides), *schema.elements]
    chosen = set(offered)
    if wanted != "all":
        named = {name: [key for key in offered if key == name or key.startswith(f"{name}/")] for name in wanted}
        for name in (name for name, found in named.items() if not found):
            raise NotFoundError(f"extras={list(wanted)!r}: the source has no {name!r}; it has {list(offered)}.")
        chosen = {key for key in offered if not _side(key)}.union(*named.values())
    # Empty matrices go into the zip: `ArrayWriter` refuses rows without elements.
    streamed = [
        info for info in sides if info.key in chosen and info.key not in schema.elements and 0 not in info.shape
    ]
    keys = dict.fromkeys([*schema.elements, *(info.key for info in sides if info not in streamed)])
    whole = [key for key in keys if key in chosen]
    for key in (*(info.key for info in streamed), *whole):
        if not is_unicode(key):
            raise NameRefusedError(f"{_where(schema)}: {key!a} has a name that is not Unicode; rename it.")
    modalities = tuple(
        dict.fromkeys(key.split("/")[1] for key in (*taken, *offered, *tables) if key.startswith("mod/"))
    )
    prefixes = ["", *(f"mod/{name}/" for name in modalities)]
    # Tables of features that no group keeps, such as that of a modality whose matrices were left out.
    lacking = []
    for key in dict.fromkeys(
        [*(f"{prefix}var" for prefix in prefixes), *(i.features for i in sides if not _side(i.key))]
    ):
        if key and key not in tables and key not in keys:
            with suppress(NotFoundError):
                source.element(key)
                lacking.append(key)
    return OtherElements(tuple(streamed), (*whole, *lacking), modalities)


def _side(key: str) -> bool:
    parts = key.split("/")
    parts = parts[2:] if parts[0] == "mod" else parts
    return parts[0] in SIDES or "/".join(parts[:2]) in SIDES


COUNTS = "counts"


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One matrix that becomes one layer."""

    info: MatrixInfo
    # Empty where the values decide: "counts" for whole non-negative numbers, else `otherwise`.
    name: str
    otherwise: str  # name for other values


@dataclass(frozen=True, slots=True)
class NewGroup:
    """Matrices that share features and, in a sparse space, their entries; they become one Zarr group."""

    space: FeatureSpace
    # Cell column: the space's name, or `<space>__<matrix>` for a further group of the space.
    pointer: str
    layers: tuple[LayerPlan, ...]
    features: Features | None  # the columns; None for spaces without features
    layout: str = ""  # uid of the layout in the stored order; empty for spaces without features
    feature_set: str = ""  # hash of the features in no order; empty for spaces without features
    # (width,): stored column of every column of the file; None where they are the same.
    columns: NDArray[np.int64] | None = field(default=None, compare=False)
    column_order: ColumnOrder = "file"  # where the stored order comes from

    @property
    def width(self) -> int:
        """Number of columns (the first axis of a cell's value)."""
        return self.layers[0].info.shape[1] if len(self.layers[0].info.shape) > 1 else 1

    @property
    def stored_uids(self) -> tuple[str, ...]:
        """Feature uids in the order of the stored columns."""
        uids = () if self.features is None else self.features.uids
        # `argsort` inverts the permutation: it gives the column of the file for each stored column.
        return uids if self.columns is None else tuple(np.array(uids, object)[np.argsort(self.columns)].tolist())

    def reordered(self, columns: NDArray[np.int64], column_order: ColumnOrder) -> "NewGroup":
        """Return the same group with other stored columns: `columns`, (width,), is that of every column of the file."""
        # None instead of the identity: the array `columns` is absent where the order is the file's own.
        same = bool((columns == np.arange(len(columns))).all())
        made = replace(self, columns=None if same else columns, column_order=column_order)
        return replace(made, layout=layout_uid(made.stored_uids))


@dataclass(frozen=True, slots=True)
class IngestPlan:
    """Everything that is decided before the first write."""

    uid: str  # of the dataset
    name: str
    schema: SourceSchema  # of the source
    groups: tuple[NewGroup, ...]  # what is written
    cells: pa.Table  # the source's cells, index first
    columns: tuple[CellColumn, ...]  # what becomes of the cells' columns
    column_reports: tuple[ColumnReport, ...]
    element_reports: tuple[ColumnReport, ...]
    notes: tuple[str, ...]  # more lines for the report
    extras: OtherElements  # other elements, kept outside the groups
    cell_names: str  # hash of the names of the cells, in their order
    place: AnyPath | None = None  # the file or folder; None of an object in memory
    license: str = ""  # empty where it is not known

    @property
    def column_orders(self) -> "ColumnOrders":
        """Orders of the stored columns of the sparse groups with features."""
        groups = [g for g in self.groups if g.features is not None and g.space.kind is PointerKind.SPARSE]
        return {group.feature_set: group.stored_uids for group in groups}

    def group_path(self, group: NewGroup) -> str:
        """Path of a group in the Zarr store."""
        return f"{self.uid}/{group.pointer}"


class CellsOnly:
    """A source of which no matrix is added: only its cells, their tables and other elements are added.

    A dataset is known by its groups, so it gets one of no rows and no features, into which no cell points.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        schema = source.describe()
        none = MatrixInfo(NO_MATRIX, "csr", np.dtype(np.uint8), (0, 0), "none", "gene_expression", 0)
        self._schema = replace(schema, matrices=(*schema.matrices, none))

    def describe(self) -> SourceSchema:
        """Describe the source, with the group of no rows among its matrices."""
        return self._schema

    def features(self, key: str) -> pa.Table:
        """Return the features of a matrix; that of no rows has none."""
        empty = pa.table({INDEX: pa.array([], pa.string())})
        return empty if key == "none" else self._source.features(key)

    def blocks(
        self, keys: tuple[str, ...], n_rows: int, rows: tuple[int, int] | None = None
    ) -> Iterator[tuple[Block, ...]]:
        """Iterate over the rows of matrices."""
        return iter(()) if keys == (NO_MATRIX,) else self._source.blocks(keys, n_rows, rows)

    def present(self, key: str) -> NDArray[np.int64] | None:
        """Return which cell each row belongs to."""
        return np.empty(0, np.int64) if key == NO_MATRIX else self._source.present(key)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (what the source itself answers)
        """Answer the rest as the source does."""
        return getattr(self._source, name)


def select_source(source: Source, options: IngestOptions) -> Source:
    """Return a source as it is added: the cells alone where it has no matrix, or none of them is chosen."""
    keys = [info.key for info in source.describe().matrices]
    chosen = [key for key in keys if not _side(key)] if options.layers == "auto" else options.layers
    return source if chosen or options.spaces or options.embeddings else CellsOnly(source)


def plan_ingest(catalog: Catalog, source: Source, options: IngestOptions) -> IngestPlan:
    """Decide what an `add` will write.

    Refused are shapes that do not agree, choices that name what is not there, types that clash, and cells that are
    named by uids of this atlas (`DuplicateError`).
    """
    catalog.require_writable("add()")
    schema = source.describe()
    options, spaces = _plan_embeddings(schema, options, catalog.spaces())
    chosen, element_reports = _choose_matrices(schema, options)
    by_space: dict[str, list[LayerPlan]] = {}
    for layer in chosen:
        by_space.setdefault(_space_of(layer.info, options, spaces), []).append(layer)
    groups = [
        group
        for space, layers in by_space.items()
        for group in _plan_groups(catalog, source, spaces[space], layers, options)
    ]
    cells = source.cells()
    if cells.num_rows != schema.n_cells:
        raise SourceError(
            f"{_where(schema)} has {schema.n_cells} cells by its matrices but {cells.num_rows} rows of obs; fix the file."
        )
    _refuse_known_uids(catalog, schema, cells)
    tables = {layer.info.features for group in groups if group.features is not None for layer in group.layers}
    extras = plan_other_elements(source, {plan.info.key for plan in chosen}, tables, options.extras)
    element_reports = [report for report in element_reports if report.name not in extras.keys]
    element_reports += [ColumnReport(key, "kept", "the dataset") for key in extras.keys]
    notes = []
    if schema.n_cells == 0:
        notes.append("there are no cells; the dataset is kept with its features, tables and elements")
    if any(info.key == NO_MATRIX for info in schema.matrices):
        notes.append(
            "no matrix is added; the cells are kept with their tables and elements, and are in what a query gives as a table"
        )
    notes += [note for group in groups if group.features is not None for note in group.features.notes]
    plan = IngestPlan(
        new_uid(), "", schema, tuple(groups), cells, (), (), tuple(element_reports), tuple(dict.fromkeys(notes)), extras,
        hash_texts(cells.column(INDEX).cast(pa.string()).combine_chunks()), license=_find_license(source, schema, options),
    )  # fmt: skip
    # Separate, because sources are judged again by this part alone, when those before them are known.
    return plan_cells(catalog, plan, options)


def _find_license(source: Source, schema: SourceSchema, options: IngestOptions) -> str:
    """Return the licence that was given, else that which `uns` of the file names."""
    if options.license is not None:
        return check_license(options.license)
    for key in ("uns/license", "uns/licence"):
        # Others than a text are kept as what they are, elements.
        if key in schema.elements and isinstance(found := source.element(key), str) and 0 < len(found) <= LONGEST_NAME:
            return found
    return ""


def plan_cells(
    catalog: Catalog, plan: IngestPlan, options: IngestOptions, coming: Sequence[IngestPlan] = ()
) -> IngestPlan:
    """Decide the dataset's name and what becomes of its columns, also again where others, `coming`, are committed together with it now."""
    options, spaces = _plan_embeddings(plan.schema, options, catalog.spaces())
    # The schema of the cell table as it will be when the sources before this one are committed.
    fields: dict[str, pa.Field] = {field.name: field for field in catalog.tables.schema(CELLS)}
    for column in (column for other in coming for column in other.columns):
        there = fields.get(column.stored)
        # As in `add_cell_columns`.
        if there is None or takes_over(there.type, facts_of(there), column):
            fields[column.stored] = pa.field(column.stored, column.type, metadata=column.facts.to_metadata())
    pointers = [*spaces, *(group.pointer for group in plan.groups)]
    columns, reports = plan_columns(plan.cells, pa.schema([*fields.values()]), options, pointers)
    for column in columns:
        values, stored = column_values(column, plan.cells, column.type), column.stored
        if values.null_count and stored in fields and not fields[stored].nullable:
            raise SchemaError(
                f"The column {column.source!r} lacks a value in {values.null_count:,} cells, but the schema needs {stored!r} in every cell; "
                "fill it in, or name another column with obs={...}."
            )
    if options.name is not None:
        name = check_given_name(options.name, "name of a dataset")
    else:
        taken = {other.name for other in coming}
        # With "replace", the dataset that has the name goes, so the name is free.
        if options.on_duplicate != "replace":
            taken |= {record.name for record in read_records(catalog)}
        name = free_name(dataset_name(plan.schema), taken, "-")
    # A plan that is made again still has the note about its earlier name.
    before = rename_notes(plan.schema, plan.name) if plan.name else []
    notes = [note for note in plan.notes if note not in before]
    if options.name is None:
        notes = [*rename_notes(plan.schema, name), *notes]
    return replace(plan, name=name, columns=columns, column_reports=reports, notes=tuple(notes))


def _refuse_known_uids(catalog: Catalog, schema: SourceSchema, cells: pa.Table) -> None:
    """Refuse cells that are named by uids of this atlas, as a query names them: they would be there twice."""
    names = cells.column(INDEX).cast(pa.string())
    # Few files have names of this form, so the cell table is rarely read.
    names = names.filter(pc.match_substring_regex(names, r"^[0-9a-f]{16}$"))
    if not len(names):
        return
    uids = catalog.tables.read(CELLS, ["uid"]).column("uid")
    known = names.filter(pc.is_in(names, value_set=uids.combine_chunks()))
    if len(known):
        raise DuplicateError(
            f"{_where(schema)} names {len(known):,} of its {cells.num_rows:,} cells by uids of cells that this atlas has, first "
            f"{known[0].as_py()!r}, as the result of a query does; they would be there twice. To write new values of these cells back, "
            "call atlas.annotate(adata). To add them as new cells, give them other names first, e.g. adata.obs_names = "
            "adata.obs['cell_name']."
        )


def _where(schema: SourceSchema) -> str:
    return schema.uri or schema.name or "The source"


def _choose_matrices(schema: SourceSchema, options: IngestOptions) -> tuple[list[LayerPlan], list[ColumnReport]]:
    keys = [m.key for m in schema.matrices]
    picked = options.layers
    names: dict[str, str] = dict(picked) if isinstance(picked, Mapping) else {}
    owners = {k.split("/")[1] for k in keys if k.startswith("mod/")} | {m.features for m in schema.matrices}
    astray = sorted(set(options.spaces) - set(keys) - owners)
    if astray:
        raise NotFoundError(
            f"{_where(schema)} has no matrix or modality {astray} to give a feature space; it has {keys}."
        )
    # Naming a feature space for a matrix also chooses the matrix.
    sides = [k for k in options.spaces if k in keys]
    only = [NO_MATRIX] if NO_MATRIX in keys else []
    wanted = sides if isinstance(picked, str) else list(dict.fromkeys([*picked, *sides, *only]))
    absent = sorted(set(wanted) - set(keys))
    if absent:
        raise NotFoundError(f"{_where(schema)} has no matrices {absent}; it has {keys}.")
    plans, reports = [], [ColumnReport(k, "left out", "", what) for k, what in schema.left_out.items()]
    for info in schema.matrices:
        automatic = isinstance(picked, str) and not _side(info.key)
        if automatic or info.key in wanted:
            plans.append(_layer(info, names.get(info.key)))
        else:
            hint = "not among extras=..." if _side(info.key) else "not among layers=..."
            reports.append(ColumnReport(info.key, "left out", "", hint))
    seen: dict[tuple[str, str], str] = {}
    for plan in (plan for plan in plans if plan.name):
        other = seen.setdefault((plan.info.key.rpartition("/layers/")[0], plan.name), plan.info.key)
        if other != plan.info.key:
            raise SchemaError(
                f"{other} and {plan.info.key} would both become the layer {plan.name!r}; name one with layers={{...}}."
            )
    for info in (plan.info for plan in plans if plan.info.dtype.kind == "c"):
        raise SchemaError(
            f"{_where(schema)}: {info.key} holds complex numbers ({info.dtype}), which no layer of an atlas holds; add its real and "
            "imaginary parts as two matrices, or leave it out with layers=[...]."
        )
    return plans, reports


def _layer(info: MatrixInfo, name: str | None) -> LayerPlan:
    if not is_unicode(info.key):
        raise NameRefusedError(f"The layer {info.key!a} has a name that is not Unicode; rename it.")
    if name is not None:
        if column_name(name) != name:
            raise SchemaError(f"The layer name {name!r} for {info.key} may hold only letters, digits and '_'.")
        return LayerPlan(info, name, name)
    if info.key == NO_MATRIX:
        return LayerPlan(info, "none", "none")
    if "/" in info.key.partition("layers/")[2]:
        raise NameRefusedError(
            f"The layer {info.key} has a '/' in its name; name it with layers={{{info.key!r}: 'name'}}."
        )
    parts = info.key.split("/")
    if parts[-1] == "X" and "layers" not in parts:
        return LayerPlan(info, "", "raw" if "raw" in parts[:-1] else "X")
    # A key such as `X:Antibody Capture`: 10x files have a matrix for each feature type.
    if _side(info.key) or parts[0].startswith("X"):
        return LayerPlan(info, "", "X")
    return LayerPlan(info, column_name(parts[-1]), column_name(parts[-1]))


def _space_of(info: MatrixInfo, options: IngestOptions, spaces: Mapping[str, FeatureSpace]) -> str:
    """Return the feature space of a matrix, chosen or as the source has it."""
    modality = info.key.split("/")[1] if info.key.startswith("mod/") else info.key
    chosen = (options.spaces.get(key) for key in (info.key, modality, info.features))
    name = next(filter(None, chosen), info.space)
    if not name:
        raise SourceError(
            f"The feature space of {info.key} is not known; say it with spaces={{{modality!r}: ...}}, one of {sorted(spaces)}, or "
            f"leave the matrix out with layers=[...]."
        )
    if name not in spaces:
        raise NotFoundError(
            f"spaces={{{modality!r}: {name!r}}}: the atlas knows no feature space {name!r}, only {sorted(spaces)}; define it with "
            "atlas.register_space(FeatureSpace(...))."
        )
    if spaces[name].kind is PointerKind.GEOMETRY:
        raise SchemaError(
            f"The feature space {name!r} holds shapes, {info.key} is a matrix; name another with spaces={{{modality!r}: ...}}."
        )
    if len(info.shape) != spaces[name].rank + 1:
        raise SourceError(
            f"{info.key} has {len(info.shape)} axes; the feature space {name!r} needs {spaces[name].rank + 1}, cells first."
        )
    return name


def _plan_groups(
    catalog: Catalog, source: Source, space: FeatureSpace, layers: Sequence[LayerPlan], options: IngestOptions
) -> list[NewGroup]:
    by_features: dict[str, list[LayerPlan]] = {}
    for layer in layers:
        by_features.setdefault(layer.info.features, []).append(layer)
    groups: list[NewGroup] = []
    schema = catalog.tables.schema(CELLS)
    results = result_columns(schema)
    # Pointer columns of spaces stay free, as all datasets share them; those of results do not.
    used = {*schema.names} - {*pointer_columns(schema)} | {*results, *(name for _, name in results.values())}
    for key, members in by_features.items():
        features = _identify(catalog, source, space, key, members[0].info, options) if space.has_features else None
        sparse = space.kind is PointerKind.SPARSE
        alike: dict[Hashable, list[LayerPlan]] = {}
        for layer in members:
            # Layers of a sparse group share `csr/indices`, so their entries must be the same. A single layer needs no hash, for which all
            # values are read.
            entries: Hashable = entry_hash(source, layer.info) if sparse and len(members) > 1 else layer.info.shape
            # Linked ones are read by row or by column, as the file has them.
            alike.setdefault((entries, options.copy is False and layer.info.form == "csc"), []).append(layer)
        for together in alike.values():
            slug = column_name(together[0].info.key.replace("/X", "").replace("layers/", "").replace("obsm/", ""))
            pointer = free_name(space.name if not groups else f"{space.name}__{slug}", used)
            used.add(pointer)
            hashes = ("", "") if features is None else (layout_uid(features.uids), feature_set(features.uids))
            groups.append(NewGroup(space, pointer, tuple(together), features, *hashes))
    return groups


def _identify(
    catalog: Catalog, source: Source, space: FeatureSpace, key: str, info: MatrixInfo, options: IngestOptions
) -> Features:
    if not key:
        raise SourceError(
            f"The columns of {info.key} have no names, which the feature space {space.name!r} needs; give them names in the file, or use a "
            "space without features such as 'embedding'."
        )
    extra: list[pa.Field] = []
    if catalog.tables.has(space.registry):
        own = set(FeatureBaseSchema.arrow_schema().names)
        extra = [f for f in catalog.tables.schema(space.registry) if f.name not in own]
    var = source.features(key)
    if var.num_rows != info.shape[1]:
        raise SourceError(
            f"{info.key} has {info.shape[1]} columns but {key} names {var.num_rows} features; fix the file."
        )
    lacking = [
        f.name for f in extra if not f.nullable and (f.name not in var.column_names or var.column(f.name).null_count)
    ]
    if lacking:
        raise SchemaError(
            f"The registry of {space.name!r} needs {lacking} for every feature, which {key} lacks; add such columns to the file's var."
        )
    return identify(var, space.name, options.feature_id_of(space.name), options.organism, [f.name for f in extra])


def rename_notes(schema: SourceSchema, name: str) -> list[str]:
    """Return a note if the name of the source was taken."""
    base = dataset_name(schema)
    return [f"the name {base!r} is taken; this dataset is called {name!r}"] if name != base else []


def dataset_name(schema: SourceSchema) -> str:
    """Return the name of a dataset that is given none: that of its source."""
    return fit_name(schema.name)


def _plan_embeddings(
    schema: SourceSchema, options: IngestOptions, spaces: Mapping[str, FeatureSpace]
) -> tuple[IngestOptions, dict[str, FeatureSpace]]:
    """Return the choices with `embeddings` among their `spaces`, and the feature spaces of the atlas with those that are new."""
    asked = options.embeddings
    if not isinstance(asked, Mapping):
        asked = {key: column_name(key.rpartition("/")[2].removeprefix("X_")) for key in asked}
    known, chosen = dict(spaces), dict(options.spaces)
    for key, name in asked.items():
        # Stored only by the commit, so a refused source leaves no space in the atlas.
        space = known.setdefault(
            name,
            FeatureSpace(
                name, PointerKind.DENSE, has_features=False, is_counts=False, description=f"Vectors of {key}."
            ),
        )
        if space.kind is not PointerKind.DENSE or space.has_features or space.rank != 1:
            raise SchemaError(
                f"embeddings={{{key!r}: {name!r}}}: the feature space {name!r} is no embedding but {space}; choose another name."
            )
        offered = [info.key for info in schema.matrices if "obsm" in info.key.split("/")[:-1]]
        found = [name for name in offered if name == key or name.rpartition("obsm/")[2] == key.removeprefix("obsm/")]
        if len(found) != 1:
            several = f"; it is one of {found}, name it in full" if found else ""
            raise NotFoundError(f"embeddings: the source has no matrix obsm/{key}{several}; it has {offered}.")
        chosen[found[0]] = name
    return replace(options, spaces=chosen), known


ColumnOrders = Mapping[str, Sequence[str]]
"""Hash of a set of features -> their uids in the order in which others store them."""


def order_columns(
    catalog: Catalog, source: Source, plan: IngestPlan, options: IngestOptions, orders: ColumnOrders
) -> IngestPlan:
    """Decide the stored column order of every sparse group with features.

    Neighbouring columns that most cells detect make short gaps, so the stored numbers are small. A layout of the same
    features keeps its order, so that datasets with the same features share one layout, whatever their files' orders.

    A bounded, evenly spread sample of the values of `source` is read. `plan` is as `plan_ingest` makes it, with columns
    in the file's order; ``column_order="file"`` leaves it so. `orders` are the column orders of sources that are added
    before this one.
    """
    # The columns of a linked file stay where they are.
    if options.column_order == "file" or options.copy is not True:
        return plan
    records = read_records(catalog)
    known = dict(orders)
    groups: list[NewGroup] = []
    for group in plan.groups:
        if group.features is None or group.space.kind is not PointerKind.SPARSE:
            groups.append(group)
            continue
        # The order of a committed dataset comes first: its layout cannot change any more.
        same = records_with_features(records, group.space.name, group.width, group.feature_set)
        layouts = read_layouts(catalog, [r.layout_uid for r in same[:1]])
        order = layouts[same[0].layout_uid].features.tolist() if layouts else known.get(group.feature_set, ())
        if order:
            place = {uid: i for i, uid in enumerate(order)}
            groups.append(group.reordered(np.array([place[uid] for uid in group.features.uids], np.int64), "shared"))
        else:
            groups.append(group.reordered(rank_columns(_counts(source, group, plan.groups)), "detected"))
        # Further groups of this source with the same features follow this one.
        known[group.feature_set] = groups[-1].stored_uids
    return replace(plan, groups=tuple(groups))


def _counts(source: Source, group: NewGroup, groups: Sequence[NewGroup]) -> NDArray[np.int64]:
    """Add up over all groups with these features: a matrix without zeros, as scaling makes it, says nothing by itself."""
    uids = () if group.features is None else group.features.uids
    place = {uid: i for i, uid in enumerate(uids)}
    counts = np.zeros(len(uids), np.int64)
    for other in groups:
        if other.features is group.features:
            counts += sample_counts(source, other.layers[0].info)
        elif other.features is not None and other.feature_set == group.feature_set:
            columns = np.array([place[uid] for uid in other.features.uids], np.int64)
            counts[columns] += sample_counts(source, other.layers[0].info)
    return counts

"""Planning: a query and a catalog become a frozen `ReadPlan`; every error that needs no values is raised here."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.assets import (
    asset_kind,
    group_by_dataset,
    open_array,
    read_records,
    read_specs,
)
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.features import (
    OrthologFeatures,
    Registry,
    map_to_orthologs,
    read_ahead,
    read_layouts,
    read_registry,
)
from raggedatlas.catalog.identity import GENE_SPACE, IDENTITY_SCHEMA
from raggedatlas.catalog.versions import find_version
from raggedatlas.errors import CorruptError, FeatureError, QueryError
from raggedatlas.model.assets import VALUES, ResultRecord, annotation_columns
from raggedatlas.model.frames import DATASET, arrow_to_series, column_stacks, facts_of, remove_unused_categories
from raggedatlas.model.records import DatasetRecord
from raggedatlas.model.spaces import AXES, FeatureSpace, PointerKind
from raggedatlas.model.terms import Expansion
from raggedatlas.model.wings import answer
from raggedatlas.query.cells import (
    DATASET_UID,
    Cells,
    LazyTable,
    arrange,
    cell_columns,
    choose_rows,
    column_vectors,
    metadata_names,
    needed_columns,
    pointer_column,
    read_cells,
    short_ids,
    warn_of_values,
)
from raggedatlas.query.modalities import (
    USUAL,
    FeatureAxis,
    FeatureRows,
    SpacePointers,
    build_axis,
    choose_layers,
    find_modality,
    join_dtypes,
    make_var,
    merged_columns,
    plan_parts,
    read_modalities,
    sum_dtype,
    vector_results,
)
from raggedatlas.query.read import GroupPlan, InMemoryRows, PartPlan, ReadPlan, SpacePlan, refuse_arrays
from raggedatlas.query.search import rank_cells, search_columns
from raggedatlas.query.spec import AS_GIVEN, DEFAULT, QuerySpec
from raggedatlas.store.filters import Columns, UnderTerm, calling_level, to_sql
from raggedatlas.store.read import ArrayReader
from raggedatlas.store.sql import in_list
from raggedatlas.store.tables import ROW_ID

_DATASET_TYPE = pa.dictionary(pa.int32(), pa.string())


def plan_read(
    spec: QuerySpec, catalog: Catalog, *, spaces: Sequence[str] | None = None, deferred: bool = False
) -> ReadPlan:
    """Turn a query into a plan: which cells, which columns, from which arrays.

    The cells are those chosen that have at least one of the spaces; all where no space is read. `spaces` None takes
    those that the query names, or the usual one. `deferred` lets the columns of `obs` wait until they are asked for, in
    a `LazyTable`. Raises `QueryError` for unknown columns, spaces and layers, and clashing dtypes or widths, and
    `FeatureError` for unknown, ambiguous or repeated features.
    """
    layouts = read_ahead(catalog)
    known = read_modalities(catalog)
    names = default_spaces(spec, known, catalog) if spaces is None else tuple(spaces)
    chosen = [find_modality(known, name, catalog) for name in names]
    columns = cell_columns(catalog)
    results = [asset_kind("results").find(catalog, name)[0] for name in spec.results]
    pointing = [r.column for r in results if r.kind == "space"]
    wanted = tuple(dict.fromkeys([*(p for m in chosen for p in m.pointers), *pointing]))
    held = tuple(r.column for r in results if r.kind == "vector") + centroid_columns(catalog, spec.centroids)
    cells, obs = plan_rows(spec, catalog, columns, wanted, held, deferred=deferred)
    n_without = 0
    if chosen and not (having := cells.pointing([p for m in chosen for p in m.pointers])).all():
        kept = np.flatnonzero(having)
        n_without, cells, obs = cells.n - len(kept), cells.take(kept), obs.take(pa.array(kept))
    layouts.result()
    if deferred:
        # `obs` reads for itself; only vectors and centroids are still needed.
        cells = replace(cells, table=cells.table.select([*held]))
    planned, made = plan_spaces(spec, catalog, chosen, results, cells)
    return ReadPlan(
        obs,
        planned,
        n_without,
        provenance(spec, catalog),
        made | centroid_plans(catalog, spec.centroids, cells),
        names=spec.names,
    )


def plan_spaces(
    spec: QuerySpec,
    catalog: Catalog,
    chosen: Sequence[SpacePointers],
    results: Sequence[ResultRecord],
    cells: Cells,
) -> tuple[dict[str, SpacePlan], dict[str, SpacePlan]]:
    """Plan the spaces and the results of cells, and return both by name.

    The cells were read with their pointers and the vectors of results that lie in the cell table.
    """
    known = read_modalities(catalog)
    asked = requested_features(spec, chosen)
    # With one space, all asked layers are its own, so that a missing one is refused. Else each space takes the layers that it has, and a
    # name is wrong only if no dataset has it in any space.
    layers, several = spec.layers, len(chosen) > 1
    if several:
        every = {layer for m in known.values() for uid in m.records for layer in m.layers(uid)}
        if unknown := [layer for layer in layers if layer not in every]:
            raise QueryError(f"No dataset has the layer {unknown[0]!r}; there are {sorted(every)}.")
    planned = {}
    for modality in chosen:
        if several:
            own = {layer for uid in modality.records for layer in modality.layers(uid)}
            layers = tuple(layer for layer in spec.layers if layer in own)
        planned[modality.name] = _plan_space(spec, catalog, modality, cells, asked.get(modality.name), layers)
    # The choice of `missing` is about features; cells without a result are marked by NaN in any case.
    plain, made = replace(spec, missing="zero"), {}
    for record in results:
        if record.kind == "vector":
            space = _plan_held(record.name, *column_vectors(cells, record.column), np.dtype(record.dtype), catalog)
        else:
            space = _plan_space(plain, catalog, known[record.name], cells, None, ())
        refuse_arrays(space, "obsm")
        # A result keeps its dtype, which `_plan_space` may have widened: `join_dtypes` makes float32 of float16.
        stored = np.dtype(record.dtype)
        space = replace(space, dtypes={VALUES: stored})
        if not space.present.all():
            dtype = join_dtypes({stored}, nan=True, largest=space.parts[0].groups[0].layers[VALUES].spec.largest)
            if dtype is None and stored.kind != "f":
                raise QueryError(
                    f"The result {record.name!r} is stored as {stored}, and no type holds these exactly together with NaN for the "
                    f"{int((~space.present).sum()):,} cells without it; leave them out with with_results({record.name!r}, missing='drop')."
                )
            space = replace(space, nan=True, dtypes={VALUES: stored if dtype is None or stored.kind == "f" else dtype})
        made[record.name] = space
    return planned, made


def plan_elements(plan: ReadPlan, catalog: Catalog, *, multimodal: bool = False) -> ReadPlan:
    """Add to a plan of `plan_read` what an AnnData or MuData holds besides values: `obsm`, colors, and `var`.

    Outputs read the returned plan without the catalog. Plans for batches and training do without: members of `obsm` of
    sparse spaces take one more read of the cell table. `multimodal` plans each space as a modality of a MuData, of the
    cells that have it, instead of one space as an AnnData.
    """
    if not multimodal and len(plan.spaces) != 1:
        raise QueryError(
            f"AnnData holds one feature space, the query reads {list(plan.spaces)}; use .to_mudata() or .to_pandas(), or name one with .spaces(...)."
        )
    colors = plan_colors(plan, catalog)
    if not multimodal:
        space = plan.single()
        return replace(
            plan, obsm=plan_obsm(plan, space, catalog), colors=colors, var=make_var(space, catalog, plan.names)
        )
    modalities = {}
    for name, space in plan.spaces.items():
        rows = np.flatnonzero(space.present)
        # Without results: in a MuData these are in `obsm` of all cells, not of a modality.
        part = ReadPlan(
            plan.obs.take(pa.array(rows)), {name: space.take(rows)}, plan.n_without, plan.provenance, names=plan.names
        )
        modalities[name] = plan_elements(part, catalog)
    return replace(plan, colors=colors, modalities=modalities)


def plan_rows(
    spec: QuerySpec,
    catalog: Catalog,
    columns: Columns,
    pointers: Sequence[str] = (),
    more: Sequence[str] = (),
    *,
    deferred: bool = False,
) -> tuple[Cells, "pa.Table | LazyTable"]:
    """Choose the cells of a query, and read some pointers and further columns with them.

    Returns the cells with what was read of them, and their `obs`: `uid`, `cell_name`, `dataset`, the asked columns with
    their facts, and what a search found. Only a pinned catalog lets columns wait (`deferred`): the tip may change
    before they are read.
    """
    deferred = deferred and catalog.tables.pinned is not None
    metadata = metadata_names(columns, spec.obs)
    known = read_modalities(catalog)
    sought, extra = search_columns(spec.search, columns, known, vector_results(catalog)) if spec.search else ((), ())
    asked = tuple(dict.fromkeys([*pointers, *extra]))
    own = () if deferred else metadata
    if spec.search is None and (spec.sample is not None or spec.limit is not None):
        # Found first, so that of the other columns no more than the chosen cells is read.
        pinned = pin_cells(catalog)
        ids, n_found = choose_rows(pinned.tables, spec, columns)
        warn_of_values(catalog, spec, columns, n_found)
        cells = read_cells(pinned, spec, columns, (*own, *more), asked, bounded=deferred, ids=ids)
    else:
        wanted = tuple(dict.fromkeys([*own, *needed_columns(spec, columns), *sought, *more]))
        # A search looks at names of cells.
        cells = read_cells(catalog, spec, columns, wanted, asked, bounded=deferred and spec.search is None)
        if spec.search is not None:
            cells = rank_cells(cells, spec, catalog, known)
        cells = arrange(cells, spec)
    if deferred:
        ids, where = cells.table.column(ROW_ID).to_numpy(), to_sql(spec.filters, columns)
        schema, stored, held = obs_schema(cells, metadata)
        return cells, LazyTable(schema, catalog.tables, where, short_ids(ids), stored, held)
    return cells, cells_table(cells, metadata)


def cells_table(cells: Cells, metadata: Sequence[str]) -> pa.Table:
    """Return the `obs` of cells of which the metadata was read, of ids only those that were."""
    schema, stored, held = obs_schema(cells, metadata)
    read = held | {name: cells.table.column(at) for name, at in stored.items() if at in cells.table.column_names}
    shown = pa.schema([field for field in schema if field.name in read])
    return pa.Table.from_arrays([read[name] for name in shown.names], schema=shown)


def pin_cells(catalog: Catalog) -> Catalog:
    """Return a catalog whose cell table stays at one version, for what reads it more than once."""
    tables = catalog.tables
    if tables.pinned is not None:
        return catalog
    return replace(catalog, tables=replace(tables, pinned={CELLS: tables.version(CELLS)}, _opened={}))


def obs_schema(cells: Cells, metadata: Sequence[str]) -> tuple[pa.Schema, dict[str, str], dict[str, pa.ChunkedArray]]:
    """Put the metadata of cells under the names of their files.

    Returns the columns of `obs` in order, with their facts; the stored names of those that the cell table has; and the
    other columns.
    """
    columns, rank = cells.columns, cells.rank
    fields = [pa.field("uid", pa.string()), pa.field("cell_name", pa.string()), pa.field(DATASET, _DATASET_TYPE)]
    found = {"uid": "uid", "cell_name": "cell_name"}
    for stored in metadata:
        name = columns.shown.get(stored, stored)
        if name in rank.column_names:
            # What this search found, not what a file has from an earlier one.
            continue
        found[name] = stored
        kept = columns.facts[stored].to_metadata() if stored in columns.facts else None
        fields.append(pa.field(name, columns.schema.field(stored).type, metadata=kept))
    held = {DATASET: pa.chunked_array([cells.names()]), **{name: rank.column(name) for name in rank.column_names}}
    return pa.schema([*fields, *rank.schema]), found, held


def default_spaces(spec: QuerySpec, known: Mapping[str, SpacePointers], catalog: Catalog) -> tuple[str, ...]:
    """Decide which spaces a query reads: those it names, those its features are of, else gene expression or the only one."""
    if spec.spaces is not None:
        if not spec.spaces and (spec.layers or spec.features):
            given = "layers" if spec.layers else "features"
            raise QueryError(f"spaces([]) reads no values, so {given}(...) has no effect; leave one of the two out.")
        return spec.spaces
    named = tuple(dict.fromkeys(space for space, _ in spec.features if space is not None))
    if named:
        return named
    if GENE_SPACE in known:
        return (GENE_SPACE,)
    measured = tuple(name for name, modality in known.items() if not modality.is_result)
    if len(measured) == 1:
        return measured
    # Geometry is no modality, so datasets without modalities have shapes alone.
    if not known and read_records(catalog):
        raise QueryError(
            f"The datasets of {catalog.location.uri} have shapes, no values; read them with .geometry(...)."
        )
    if not known:
        raise QueryError(
            f"The atlas {catalog.location.uri} holds no dataset at this version; add one and take a snapshot."
        )
    raise QueryError(f"The datasets hold {sorted(known)}; name one with .spaces(...).")


def requested_features(spec: QuerySpec, chosen: Sequence[SpacePointers]) -> dict[str, tuple[str, ...]]:
    """Assign the asked features to spaces: modality name -> names."""
    found = {}
    for space, names in spec.features:
        fitting = [m for m in chosen if space is None or space in {m.name, m.space.name}]
        if space is None and len(fitting) > 1:
            fitting = [m for m in fitting if m.name == GENE_SPACE] or fitting[:1]
        for modality in fitting[:1]:
            found[modality.name] = names
    return found


def provenance(spec: QuerySpec, catalog: Catalog) -> dict[str, str | int]:
    """Return the provenance of a result: `query` is the JSON text of `Query.to_dict`, `summary` a line for people."""
    snapshot = catalog.snapshot
    return {
        "uri": catalog.location.uri,
        "snapshot": 0 if snapshot is None else snapshot.version,
        "label": "" if snapshot is None else snapshot.label or "",
        "query": json.dumps(spec.to_dict(), allow_nan=False),
        "summary": spec.describe(),
        "identity": spec.describe_identity(),
        "on_merge": spec.on_merge,
        **({} if spec.orthologs is None else {"orthologs": spec.orthologs}),
        **({"ontologies": "; ".join(versions)} if (versions := [*expansions(spec, catalog)]) else {}),
        "raggedatlas": _release(),
    }


def expansions(spec: QuerySpec, catalog: Catalog) -> dict[str, list[Expansion]]:
    """Return what `under` means in the filters of a query, by the version of the ontology."""
    found: dict[str, list[Expansion]] = {}
    if spec.filters:
        columns = cell_columns(catalog)
        for leaf in (leaf for part in spec.filters for leaf in part.leaves(columns)):
            if isinstance(leaf, UnderTerm):
                one = columns.expand(leaf.column, leaf.under)
                found.setdefault(one.version, []).append(one)
    return found


@cache
def _release() -> str:
    """Return the version of this package, cached because finding it reads files."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("raggedatlas")
    except PackageNotFoundError:
        return ""


def _plan_space(
    spec: QuerySpec,
    catalog: Catalog,
    modality: SpacePointers,
    cells: Cells,
    asked: Sequence[str] | None,
    layers: tuple[str, ...],
) -> SpacePlan:
    datasets = modality.touched(cells)
    if not datasets:
        # An empty result has the features of the datasets that have the layers.
        held = {uid: set(modality.layers(uid)) for uid in modality.records}
        if layers:
            datasets = tuple(uid for uid in held if held[uid].issuperset(layers)) or tuple(held)
        else:
            first = next(iter(held.values()))
            usual = tuple(uid for uid in held if USUAL in held[uid])
            datasets = usual or tuple(uid for uid in held if held[uid] == first)
    chosen = choose_layers(modality, datasets, layers)
    parts = plan_parts(modality, datasets, chosen, cells, catalog)
    axis = _axis(spec, catalog, modality, parts, asked)
    n_cols = len(axis.features)
    if not modality.space.has_features:
        shapes = {r.spec.row_shape for part in parts for g in part.groups for r in g.layers.values()}
        if len(shapes) > 1:
            raise QueryError(
                f"The datasets of the query have rows of different shapes in {modality.name!r}: {sorted(shapes)}; "
                "choose datasets that agree with .where({'dataset': [...]})."
            )
        shape = next(iter(shapes), ())
        n_cols = shape[0] if len(shape) == 1 else 0
    nan = False
    if spec.missing == "nan":
        # Columns from n on are added to a column that the layout has anyway, so they measure no further feature.
        n, maps = len(axis.features), [axis.column_maps.get(g.layout_uid) for part in parts for g in part.groups]
        absent = any(len(np.unique(m[(m >= 0) & (m < n)])) < n for m in maps if m is not None)
        nan = absent or any(bool((part.code < 0).any()) for part in parts)
    # Before the dtypes are joined: for sums that are refused here, `sum_dtype` gives None.
    if axis.added:
        _refuse_sums(spec, catalog, modality, parts, axis)
    dtypes = {layer: _joined_dtype(catalog, modality.name, layer, parts, axis.added, nan=nan) for layer in chosen}
    return SpacePlan(
        modality.name, modality.space, axis.features, n_cols, axis.layouts, axis.measured, axis.column_maps, parts, dtypes,
        layout_codes(axis.layouts, parts[0]), cells.pointing(modality.pointers), nan, axis.merged, axis.repeated,
    )  # fmt: skip


def layout_codes(layouts: Sequence[str], part: PartPlan) -> NDArray[np.int32]:
    """Return the position in `layouts` of the layout of each cell of a part, -1 where there is none."""
    position = {uid: i for i, uid in enumerate(layouts)}
    # The last entry is for code -1: cells without the space have layout -1.
    return np.array([*(position.get(g.layout_uid, -1) for g in part.groups), -1], np.int32)[part.code]


def _axis(
    spec: QuerySpec, catalog: Catalog, modality: SpacePointers, parts: Sequence[PartPlan], asked: Sequence[str] | None
) -> FeatureAxis:
    if not modality.space.has_features:
        if asked is not None:
            raise QueryError(f"The columns of {modality.name!r} have no names, so no features can be asked of it.")
        return FeatureAxis(np.empty(0, object), {}, (), np.empty((0, 0), bool))
    # Each part has one group for each dataset, in the same order, so group i is of the same dataset in all parts.
    per_dataset = [tuple(part.groups[i].layout_uid for part in parts) for i in range(len(parts[0].groups))]
    registry, orthologs = apply_identity(spec, catalog, modality.space.name)
    # Names that only features have which are orthologs of the gene, but not one to one.
    for name in [] if orthologs is None or asked is None else orthologs.registry.resolve(list(asked)).unknown:
        if orthologs is not None and (several := orthologs.named(name)):
            raise FeatureError(
                f"{name!r} has no ortholog one to one here; its orthologs are {', '.join(orthologs.registry.describe_all(several))}. Ask for "
                "these by their own names, or leave it out."
            )
    uids = None if asked is None else tuple(registry.require(list(asked)))
    if orthologs is not None and uids is not None and (lacking := orthologs.lacking(uids)):
        said = f"These genes have orthologs that are not one to one, which the result leaves out: {'; '.join(lacking)}."
        warnings.warn(said, stacklevel=calling_level())
    join, drop, apart = spec.join, spec.missing == "drop", spec.on_merge == "apart"

    def build() -> FeatureAxis:
        features = FeatureRows(registry, read_layouts(catalog, {uid for uids in per_dataset for uid in uids}), apart)
        return build_axis(
            features, per_dataset, main=[uids[0] for uids in per_dataset], join=join, drop=drop, asked=uids
        )

    # All that `build` depends on: with a choice missing here, another query would get this axis from the cache.
    facts = (modality.space.name, tuple(per_dataset), join, drop, uids, spec.identity, apart, spec.orthologs)
    return catalog.remember("axis", facts, build)


def apply_identity(spec: QuerySpec, catalog: Catalog, space: str) -> tuple[Registry, OrthologFeatures | None]:
    """Return the features of a space, which count as others by the asked mapping and orthologs, and what is known of the latter."""
    registry, then, identity = read_registry(catalog, space), catalog, spec.identity
    if isinstance(identity, tuple):
        # Given pairs are uids of genes; in other spaces the mapping of the queried snapshot holds.
        if space == GENE_SPACE:
            given = [pa.array(uids, pa.string()) for uids in zip(*identity, strict=True)]
            registry = replace(registry, identity=pa.table(given, names=["feature_uid", "target_uid"]))
    elif identity == AS_GIVEN:
        registry = replace(registry, identity=IDENTITY_SCHEMA.empty_table())
    elif identity != DEFAULT:
        own, then = registry, catalog.at(find_version(catalog, identity))

        def build() -> Registry:
            redirects = read_registry(then, space).redirects if space in then.spaces() else {}
            pairs = pa.table({"feature_uid": list(redirects), "target_uid": list(redirects.values())})
            return replace(own, identity=pairs.cast(pa.schema([(n, pa.string()) for n in pairs.column_names])))

        registry = catalog.remember("identity", (space, identity), build)
    if spec.orthologs is None or space != GENE_SPACE:
        return registry, None
    organism, as_given = spec.orthologs, identity == AS_GIVEN or isinstance(identity, tuple)
    found = catalog.remember(
        "orthologs", (organism, identity), lambda: map_to_orthologs(registry, then, organism, as_given=as_given)
    )
    return found.registry, found


def _refuse_sums(
    spec: QuerySpec, catalog: Catalog, modality: SpacePointers, parts: Sequence[PartPlan], axis: FeatureAxis
) -> None:
    """Refuse columns of one dataset that are one feature, where the query or the type of a layer does not let them be added."""
    every = ((g, layer) for part in parts for g in part.groups for layer in part.layers if g.layout_uid in axis.added)
    for group, layer in every:
        array, n = group.layers[layer].spec, axis.added[group.layout_uid]
        stored = np.dtype(array.dtype)
        if spec.on_merge == "refuse":
            why = "on_merge='refuse' does not add them up"
        elif spec.on_merge == "counts" and stored.kind == "f":
            why = f"the values of layer {layer!r} are {stored}, which are not counts to add up"
        elif sum_dtype(stored, n, array.largest) is None:
            why = f"no type holds every sum of the {stored} of layer {layer!r}"
        else:
            continue
        [layout] = read_layouts(catalog, {group.layout_uid}).values()
        sums = merged_columns(axis.column_maps[layout.uid], axis.merged, len(axis.features))
        column, local = next(iter(sums.items()))
        names = read_registry(catalog, modality.space.name).names_of([axis.features[column], *layout.features[local]])
        record = next(r for records in modality.records.values() for r in records if r.zarr_group == group.path)
        ways = "" if spec.on_merge == "sum" else ", and on_merge='sum' adds them up"
        raise QueryError(
            f"Dataset {record.name or record.uid!r} has several columns for one feature of {modality.name!r} ({len(sums):,} such "
            f"feature{'s' if len(sums) > 1 else ''}, e.g. {names[0]}: {', '.join(names[1:])}), and {why}. In a query, "
            f"on_merge='apart' keeps the columns as they are, identity='as-given' joins nothing{ways}."
        )


def _joined_dtype(
    catalog: Catalog, space: str, layer: str, parts: Sequence[PartPlan], added: Mapping[str, int], *, nan: bool
) -> np.dtype[np.generic]:
    arrays = [
        (g, g.layers[layer].spec, added.get(g.layout_uid, 1))
        for part in parts if layer in part.layers for g in part.groups
    ]  # fmt: skip
    found = {sum_dtype(np.dtype(array.dtype), n, array.largest) for _, array, n in arrays}
    stored = {dtype for dtype in found if dtype is not None}
    # The values decide where they were looked at; a cast of the declared type would refuse small counts in wide integers.
    largest = {
        g.path: n * (int(np.iinfo(array.dtype).max) if array.largest is None else array.largest)
        for g, array, n in arrays if np.dtype(array.dtype).kind in "iu"
    }  # fmt: skip
    joined = join_dtypes(stored, nan=nan, largest=max(largest.values(), default=None))
    if joined is None:
        at = max(largest, key=largest.__getitem__)
        names = {r.zarr_group: r.name or r.uid for r in read_records(catalog)}
        why = "with NaN for what was not measured" if nan else "together"
        raise QueryError(
            f"The layer {layer!r} of {space!r} is stored as {sorted(map(str, stored))}; no type holds these exactly {why}, because of "
            f"dataset {names.get(at, at)!r}, whose values go up to {largest[at]:,}. Leave it out with .where(), or query it by itself"
            + (", or use .missing('zero') or .missing('drop')." if nan else ".")
        )
    return joined


def plan_obsm(plan: ReadPlan, space: SpacePlan, catalog: Catalog) -> dict[str, SpacePlan]:
    """Plan the members of `obsm` that a result has: name -> a plan with the layer `VALUES`.

    `space` is the one in X; for multimodal files, `obsm` of its modality is used. Members are dense matrices that have
    the same width in every dataset of the result that has one of the name; cells of the others have NaN. Names for
    which that does not hold, or whose types have no common one that is exact, are left to the datasets.
    """
    part = space.parts[0]
    used = np.unique(part.code[part.code >= 0]).tolist()
    datasets = group_by_dataset(read_records(catalog))
    by_path = {record.zarr_group: record for records in datasets.values() for record in records}
    if any(part.groups[code].path not in by_path for code in used):
        return {}  # X is a model's result, which is no file's
    offered: dict[str, dict[int, tuple[ArrayReader, np.dtype[Any]]]] = {}
    for code in used:
        record = by_path[part.groups[code].path]
        for name, member in _members(catalog, record, datasets[record.uid]).items():
            offered.setdefault(name, {})[code] = member
    rows: NDArray[np.int64] | None = None
    found = {}
    for name, members in offered.items():
        lacking = len(members) < len(used) or bool((part.code < 0).any())
        dtype = join_dtypes({dtype for _, dtype in members.values()}, nan=lacking)
        widths = {reader.spec.shape[1] for reader, _ in members.values()}
        if dtype is None or len(widths) > 1:
            continue
        # Sparse groups need another read of the cell table for this, so it is done once and only if a member joins.
        if rows is None:
            rows = part.start if space.space.kind is PointerKind.DENSE else _rows_of(plan, part, by_path, catalog)
        groups = tuple(
            GroupPlan(part.groups[code].path, "", None, {VALUES: reader}) for code, (reader, _) in members.items()
        )
        moved = np.full(len(part.groups) + 1, -1, np.int32)
        moved[list(members)] = np.arange(len(groups))
        code = moved[part.code]
        own = PartPlan((VALUES,), groups, code, rows, rows + (code >= 0))
        found[name] = _plan_member(name, own, widths.pop(), dtype, nan=lacking)
    return found


def _members(
    catalog: Catalog, record: DatasetRecord, records: Sequence[DatasetRecord]
) -> dict[str, tuple[ArrayReader, np.dtype[Any]]]:
    """Return the dense members of `obsm` of a dataset for the modality of one group, and the types that they had in the file."""
    first = next((fact.key for fact in record.file_facts.layers.values()), "")
    prefix = "/".join(first.split("/")[:2]) + "/obsm/" if first.startswith("mod/") else "obsm/"
    specs, extras = read_specs(records[0]), records[0].file_facts.extras
    offered = [(key, specs.get(f"{e.path}/data"), e.dtype) for key, e in extras.items() if e.form == "dense"]
    # Those that are stored as embeddings have groups of their own.
    for other in records:
        if other.zarr_group != record.zarr_group:
            specs = read_specs(other)
            offered += [(f.key, specs.get(f"layers/{layer}"), f.dtype) for layer, f in other.file_facts.layers.items()]
    return {
        key.removeprefix(prefix): (open_array(catalog, record, spec), np.dtype(dtype))
        for key, spec, dtype in offered
        if key.startswith(prefix) and spec is not None and len(spec.shape) == 2
    }


def _rows_of(
    plan: ReadPlan, part: PartPlan, by_path: Mapping[str, DatasetRecord], catalog: Catalog
) -> NDArray[np.int64]:
    """Look up which row of its group each cell is, (n_cells,) int64."""
    rows = np.zeros(plan.n_cells, np.int64)
    uids = plan.obs.column("uid")
    pointers: dict[str, list[int]] = {}
    for code in np.unique(part.code[part.code >= 0]).tolist():
        pointers.setdefault(pointer_column(by_path[part.groups[code].path]), []).append(code)
    for pointer, codes in pointers.items():
        wanted = [by_path[part.groups[code].path].uid for code in codes]
        column = f"{pointer}.zarr_row"
        table = catalog.tables.read(CELLS, ["uid", column], in_list(DATASET_UID, wanted))
        here = np.flatnonzero(np.isin(part.code, codes))
        at = pc.index_in(uids.take(pa.array(here)), value_set=table.column("uid").combine_chunks())
        if at.null_count:
            raise CorruptError(
                f"{at.null_count:,} cells are not among those of the datasets {wanted}; run validate('deep'), and restore the atlas from a "
                "copy or a snapshot with restore()."
            )
        rows[here] = table.column(column).fill_null(0).to_numpy()[at.to_numpy()]
    return rows


def plan_colors(plan: ReadPlan, catalog: Catalog) -> dict[str, NDArray[np.object_]]:
    """Return ``<column>_colors`` for every categorical column of a result whose colors are known and agree.

    There is one color for each category that occurs, in the order of the categories. The colors of the newest
    annotation of a column come first. Where two datasets of the result have different colors for one category, the
    column has none. Other categories take the color of the first dataset of the atlas that has one.
    """
    datasets = group_by_dataset(read_records(catalog))
    names = {records[0].name or uid: uid for uid, records in datasets.items()}
    used = set(pc.unique(plan.obs.column("dataset")).to_pylist()) if "dataset" in plan.obs.column_names else set()
    near = [names[name] for name in names if name in used]
    colors = {uid: datasets[uid][0].file_facts.colors for uid in [*near, *(uid for uid in datasets if uid not in near)]}
    schema = catalog.tables.schema(CELLS)
    stacks, annotated = column_stacks(schema), annotation_columns(schema)
    found = {}
    for i, field in enumerate(plan.obs.schema):
        facts = facts_of(field)
        if facts is None or facts.kind != "categorical" or not facts.categories:
            continue
        stack = stacks.get(field.name, (field.name,))
        merged: dict[str, str] = {}
        agree = True
        for known in (colors[uid].get(stack[-1], {}) for uid in near):
            agree = agree and all(merged.get(c, color).lower() == color.lower() for c, color in known.items())
            merged = {**known, **merged}
        own: dict[str, str] = {}
        # Newest first in `stack`, so the newest annotation comes last here and its colors stay.
        for column in reversed([column for column in stack if column in annotated]):
            own |= annotated[column].columns[field.name].colors
        if not agree and not own:
            continue
        merged = {**(merged if agree else {}), **own}
        for uid in datasets:
            merged = {**colors[uid].get(stack[-1], {}), **merged}
        if not merged:
            continue
        # The categories that occur, as `obs_frame` has them.
        chunks = plan.obs.chunks(i) if isinstance(plan.obs, LazyTable) else plan.obs.column(i).chunks
        few = pa.chunked_array([pc.unique(chunk) for chunk in chunks], field.type)
        occurring = remove_unused_categories(arrow_to_series(few, facts)).cat.categories.tolist()
        listed = [merged.get(str(category)) for category in occurring]
        if listed and None not in listed:
            found[f"{field.name}_colors"] = np.array(listed, dtype=object)
    return found


def centroid_columns(catalog: Catalog, asked: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Name the parts of pointer columns that hold the asked centroids."""
    columns = dict.fromkeys(one.column for name, _ in asked for one in asset_kind("geometry").find(catalog, name))
    return tuple(f"{column}.{part}" for column in columns for part in ("zarr_group", *AXES))


def centroid_plans(catalog: Catalog, asked: Sequence[tuple[str, str]], cells: Cells) -> dict[str, SpacePlan]:
    """Plan centroids that were read with the cells: name in `obsm` -> plan, NaN where a cell has no shape."""
    present = np.ones(cells.n, bool)
    return {
        key: _plan_held(key, answer("read_centroids")(catalog, name, cells), present, np.dtype(np.float64), catalog)
        for name, key in asked
    }


def _plan_held(
    name: str, values: NDArray[Any], present: NDArray[np.bool_], dtype: np.dtype[Any], catalog: Catalog
) -> SpacePlan:
    """Plan vectors that were read with the cells, one for each cell that is present, like those of a feature space."""
    group = GroupPlan(name, "", None, {VALUES: InMemoryRows.of(values, catalog.arrays)})
    # The number of the row of a cell is how many others come before.
    start = np.maximum(np.cumsum(present) - 1, 0)
    part = PartPlan((VALUES,), (group,), np.where(present, 0, -1).astype(np.int32), start, start + present)
    return _plan_member(name, part, values.shape[1], dtype, nan=False)


def _plan_member(name: str, part: PartPlan, width: int, dtype: np.dtype[Any], *, nan: bool) -> SpacePlan:
    """Plan a member of `obsm`: dense vectors without features."""
    space = FeatureSpace(name, PointerKind.DENSE, has_features=False, is_counts=False)
    nothing = np.full(len(part.code), -1, np.int32)
    return SpacePlan(
        name, space, np.empty(0, object), width, (), np.empty((0, 0), bool), {}, (part,), {VALUES: dtype}, nothing, part.code >= 0, nan,
    )  # fmt: skip

"""Planning: a query and a catalog become a frozen `ReadPlan`; every error that needs no values is raised here."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.catalog.assets import find_result, read_records
from raggedatlas.catalog.catalog import CELLS, DATASETS, IDENTITY, LAYOUTS, Catalog
from raggedatlas.catalog.features import OrthologFeatures, Registry, map_to_orthologs, read_registry
from raggedatlas.catalog.identity import GENE_SPACE, IDENTITY_SCHEMA
from raggedatlas.catalog.layouts import read_layouts
from raggedatlas.catalog.versions import find_version, registry_tables
from raggedatlas.errors import FeatureError, QueryError
from raggedatlas.model.assets import VALUES, ResultRecord
from raggedatlas.model.frames import DATASET
from raggedatlas.model.terms import Expansion
from raggedatlas.query.cells import (
    CellRows,
    Cells,
    LazyTable,
    cell_columns,
    centroid_columns,
    centroid_plans,
    metadata_names,
    plan_colors,
    plan_obsm,
    plan_vectors,
    read_cells,
    warn_of_values,
    with_nan,
)
from raggedatlas.query.modalities import (
    DEFAULT_SPACE,
    CellPointers,
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
from raggedatlas.query.read import choose_column_copies, is_one_block
from raggedatlas.query.read_plan import AS_GIVEN, DEFAULT, PartPlan, QuerySpec, ReadPlan, SpacePlan, refuse_arrays
from raggedatlas.query.search import rank_cells, search_columns
from raggedatlas.query.selection import arrange, choose_rows, needed_columns
from raggedatlas.store.arrays import ArraySpec
from raggedatlas.store.filters import Columns, UnderTerm, calling_level
from raggedatlas.store.sql_parser import to_sql
from raggedatlas.store.tables import ROW_ID

_DATASET_TYPE = pa.dictionary(pa.int32(), pa.string())


def plan_read(
    spec: QuerySpec, catalog: Catalog, *, spaces: Sequence[str] | None = None, deferred: bool = False
) -> ReadPlan:
    """Turn a query into a plan: which cells, which columns, from which arrays.

    Parameters
    ----------
    spec : QuerySpec
        What is asked.
    catalog : Catalog
        At a version.
    spaces : sequence of str or None
        Feature spaces to read; None takes those that the query names, or the usual one.
    deferred : bool
        Whether the columns of `obs` may wait until they are asked for, in a `LazyTable`.

    Returns
    -------
    ReadPlan
        Its cells are those chosen that have at least one of the spaces; all where no space is read.

    Raises
    ------
    QueryError
        For unknown columns, spaces and layers, clashing dtypes or widths.
    FeatureError
        For unknown, ambiguous or repeated features.
    """
    _open_tables(catalog)
    known = read_modalities(catalog)
    names = default_spaces(spec, known, catalog) if spaces is None else tuple(spaces)
    chosen = [find_modality(known, name, catalog) for name in names]
    columns = cell_columns(catalog)
    results = [find_result(catalog, name) for name in spec.results]
    pointing = [r.column for r in results if r.kind == "space"]
    wanted = tuple(dict.fromkeys([*(p for m in chosen for p in m.pointers), *pointing]))
    held = tuple(r.column for r in results if r.kind == "vector") + centroid_columns(catalog, spec.centroids)
    cells, obs = plan_rows(spec, catalog, columns, wanted, held, deferred=deferred)
    pointers = cells.pointers(columns.schema)
    kept = np.flatnonzero(pointers.having(chosen))
    n_without = cells.n - len(kept)
    if n_without:
        cells, obs = cells.take(kept), obs.take(pa.array(kept))
        pointers = cells.pointers(columns.schema)
    if deferred:
        # The positions are in `pointers` and `obs` reads for itself; only vectors and centroids are still needed.
        cells = replace(cells, table=cells.table.select([*held]))
    planned, made = plan_spaces(spec, catalog, chosen, results, pointers, cells)
    return ReadPlan(
        obs, planned, n_without, provenance(spec, catalog), made | centroid_plans(catalog, spec.centroids, cells)
    )


def _open_tables(catalog: Catalog) -> None:
    """Open the tables of a snapshot in an object store side by side, each of which takes two requests; they stay open."""
    tables = catalog.tables
    if tables.pinned is not None and not tables.location.is_local:
        tables.open_all([DATASETS, CELLS, LAYOUTS, IDENTITY, *registry_tables(catalog).values()])


def plan_spaces(
    spec: QuerySpec,
    catalog: Catalog,
    chosen: Sequence[SpacePointers],
    results: Sequence[ResultRecord],
    pointers: CellPointers,
    cells: Cells | None = None,
) -> tuple[dict[str, SpacePlan], dict[str, SpacePlan]]:
    """Plan the spaces and results of cells that point into arrays; `cells` holds the vectors of results that lie in the cell table.

    Returns
    -------
    (dict of str to SpacePlan, dict of str to SpacePlan)
        Spaces, and results, by name.
    """
    known = read_modalities(catalog)
    asked = requested_features(spec, chosen)
    planned = {}
    for modality in chosen:
        layers = _layers_for(spec, modality, known, len(chosen))
        planned[modality.name] = _plan_space(spec, catalog, modality, pointers, asked.get(modality.name), layers)
    # The choice of `missing` is about features; `_beside` marks cells without a result by NaN in any case.
    plain = replace(spec, missing="zero")
    made = [
        plan_vectors(record, cells, catalog)
        if record.kind == "vector" and cells is not None
        else _plan_space(plain, catalog, known[record.name], pointers, None, ())
        for record in results
    ]
    return planned, _beside(results, made)


def _beside(records: Sequence[ResultRecord], made: Sequence[SpacePlan]) -> dict[str, SpacePlan]:
    """Return the requested results by name, in their own dtypes, NaN for cells without."""
    found = {}
    for record, space in zip(records, made, strict=True):
        refuse_arrays(space, "obsm")
        # A result keeps its dtype, which `_plan_space` may have widened: `join_dtypes` makes float32 of float16.
        stored = np.dtype(record.dtype)
        largest = space.parts[0].groups[0].layers[VALUES].spec.largest
        held = join_dtypes({stored}, nan=True, largest=largest)
        found[record.name] = with_nan(replace(space, dtypes={VALUES: stored}), held)
    return found


def plan_elements(plan: ReadPlan, catalog: Catalog, *, multimodal: bool = False) -> ReadPlan:
    """Add to a plan what an AnnData or MuData holds besides values: `obsm` of the datasets, colors, and `var`.

    Outputs read the returned plan without the catalog. Plans for batches and training do without: members of `obsm` of sparse
    spaces take one more read of the cell table.

    Parameters
    ----------
    plan : ReadPlan
        From `plan_read`.
    catalog : Catalog
        At the version of the plan.
    multimodal : bool
        Plan each space as a modality of a MuData, of the cells that have it, instead of one space as an AnnData.
    """
    colors = plan_colors(plan, catalog)
    if not multimodal:
        space = plan.single()
        return replace(plan, obsm=plan_obsm(plan, space, catalog), colors=colors, var=make_var(space, catalog))
    modalities = {}
    for name, space in plan.spaces.items():
        rows = np.flatnonzero(space.present)
        # Without results: in a MuData these are in `obsm` of all cells, not of a modality.
        part = ReadPlan(plan.obs.take(pa.array(rows)), {name: space.take(rows)}, plan.n_without, plan.provenance)
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

    Returns
    -------
    (Cells, pyarrow.Table or LazyTable)
        The cells with what was read of them, and their `obs`: `uid`, `cell_name`, `dataset`, the asked columns with their
        facts, and what a search found. Only a pinned catalog lets columns wait: the tip may change before they are read.
    """
    deferred = deferred and catalog.tables.pinned is not None
    metadata = metadata_names(columns, spec.obs)
    known = read_modalities(catalog)
    sought, extra = search_columns(spec.search, columns, known, vector_results(catalog))
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
            cells = rank_cells(cells, spec, catalog, columns, known)
        cells = arrange(cells, spec, columns)
    if deferred:
        schema, stored = obs_schema(cells, columns, metadata)
        ids = cells.table.column(ROW_ID).to_numpy()
        rows = CellRows.of(catalog.tables, to_sql(spec.filters, columns), ids)
        return cells, LazyTable(schema, rows, stored, _held(cells))
    return cells, cells_table(cells, columns, metadata)


def cells_table(cells: Cells, columns: Columns, metadata: Sequence[str]) -> pa.Table:
    """Return the `obs` of cells of which the metadata was read, of ids only those that were."""
    schema, stored = obs_schema(cells, columns, metadata)
    read = {name: cells.table.column(at) for name, at in stored.items() if at in cells.table.column_names} | _held(
        cells
    )
    shown = pa.schema([field for field in schema if field.name in read])
    return pa.Table.from_arrays([read[name] for name in shown.names], schema=shown)


def _held(cells: Cells) -> dict[str, pa.ChunkedArray]:
    """Return the columns of `obs` that the cell table does not store."""
    return {DATASET: pa.chunked_array([cells.names()]), **{n: cells.rank.column(n) for n in cells.rank.column_names}}


def pin_cells(catalog: Catalog) -> Catalog:
    """Return a catalog whose cell table stays at one version, for what reads it more than once."""
    tables = catalog.tables
    if tables.pinned is not None:
        return catalog
    return replace(catalog, tables=replace(tables, pinned={CELLS: tables.version(CELLS)}, _opened={}))


def obs_schema(cells: Cells, columns: Columns, metadata: Sequence[str]) -> tuple[pa.Schema, dict[str, str]]:
    """Put the metadata of cells under the names of their files.

    Returns
    -------
    (pyarrow.Schema, dict of str to str)
        The columns of `obs` in order, with their facts, and what those that the cell table has are called there.
    """
    fields = [pa.field("uid", pa.string()), pa.field("cell_name", pa.string()), pa.field(DATASET, _DATASET_TYPE)]
    found = {"uid": "uid", "cell_name": "cell_name"}
    for stored in metadata:
        name = columns.shown.get(stored, stored)
        found[name] = stored
        kept = columns.facts[stored].to_metadata() if stored in columns.facts else None
        fields.append(pa.field(name, columns.schema.field(stored).type, metadata=kept))
    fields += [cells.rank.schema.field(name) for name in cells.rank.column_names]
    return pa.schema(fields), found


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
    if DEFAULT_SPACE in known:
        return (DEFAULT_SPACE,)
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
            fitting = [m for m in fitting if m.name == DEFAULT_SPACE] or fitting[:1]
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


def _layers_for(
    spec: QuerySpec, modality: SpacePointers, known: Mapping[str, SpacePointers], n_spaces: int
) -> tuple[str, ...]:
    """Return the requested layers that a space has; with one space, all of them, so that a missing one is refused."""
    if n_spaces == 1:
        return spec.layers
    # Each space takes the layers that it has; a name is wrong only if no dataset has it in any space.
    every = {layer for m in known.values() for uid in m.records for layer in m.layers(uid)}
    unknown = [layer for layer in spec.layers if layer not in every]
    if unknown:
        raise QueryError(f"No dataset has the layer {unknown[0]!r}; there are {sorted(every)}.")
    own = {layer for uid in modality.records for layer in modality.layers(uid)}
    return tuple(layer for layer in spec.layers if layer in own)


def _plan_space(
    spec: QuerySpec,
    catalog: Catalog,
    modality: SpacePointers,
    cells: CellPointers,
    asked: Sequence[str] | None,
    layers: tuple[str, ...],
) -> SpacePlan:
    datasets = chosen_datasets(modality, cells, layers)
    chosen = choose_layers(modality, datasets, layers)
    parts = plan_parts(modality, datasets, chosen, cells, catalog)
    axis = _axis(spec, catalog, modality, parts, asked)
    nan = spec.missing == "nan" and _any_missing(axis, parts)
    # Before the dtypes are joined: for sums that are refused here, `sum_dtype` gives None.
    if axis.added:
        _refuse_sums(spec, catalog, modality, parts, axis)
    dtypes = {layer: _joined_dtype(catalog, modality.name, layer, parts, axis.added, nan=nan) for layer in chosen}
    main = parts[0]
    return SpacePlan(
        modality.name, modality.space, axis.features, len(axis.features) or _width(modality, parts), axis.layouts, axis.measured,
        axis.column_maps, parts, dtypes, layout_codes(axis.layouts, main), cells.present(modality), nan, axis.merged, axis.repeated,
    )  # fmt: skip


def layout_codes(layouts: Sequence[str], part: PartPlan) -> NDArray[np.int32]:
    """Return the position in `layouts` of the layout of each cell of a part, -1 where there is none."""
    position = {uid: i for i, uid in enumerate(layouts)}
    # The last entry is for code -1: cells without the space have layout -1.
    return np.array([*(position.get(g.layout_uid, -1) for g in part.groups), -1], np.int32)[part.code]


def chosen_datasets(modality: SpacePointers, cells: CellPointers, layers: Sequence[str]) -> tuple[str, ...]:
    """Return the datasets whose layers are read: those that the cells touch, or without cells those that stand in for them."""
    return cells.touched(modality) or _standing_in(modality, layers)


def _standing_in(modality: SpacePointers, layers: Sequence[str]) -> tuple[str, ...]:
    """Choose the datasets whose features an empty result has: those that have the layers."""
    held = {uid: modality.layers(uid) for uid in modality.records}
    if layers:
        return tuple(uid for uid in held if all(layer in held[uid] for layer in layers)) or tuple(held)
    usual = tuple(uid for uid in held if "counts" in held[uid])
    first = next(iter(held))
    return usual or tuple(uid for uid in held if set(held[uid]) == set(held[first]))


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
    if orthologs is not None and asked is not None:
        _refuse_several(orthologs, asked)
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
    registry, then = _identified(read_registry(catalog, space), spec.identity, catalog)
    if spec.orthologs is None or space != GENE_SPACE:
        return registry, None
    organism, as_given = spec.orthologs, spec.identity == AS_GIVEN or isinstance(spec.identity, tuple)
    found = catalog.remember(
        "orthologs", (organism, spec.identity), lambda: map_to_orthologs(registry, then, organism, as_given=as_given)
    )
    return found.registry, found


def _identified(
    registry: Registry, identity: str | int | tuple[tuple[str, str], ...], catalog: Catalog
) -> tuple[Registry, Catalog]:
    """Return a registry whose features count as others by the asked mapping, and the atlas at the version that says so."""
    # Given pairs are uids of genes; in other spaces the mapping of the queried snapshot holds.
    if identity == DEFAULT or (isinstance(identity, tuple) and registry.space != GENE_SPACE):
        return registry, catalog
    if isinstance(identity, tuple):
        given = [pa.array(uids, pa.string()) for uids in zip(*identity, strict=True)]
        return replace(registry, identity=pa.table(given, names=["feature_uid", "target_uid"])), catalog
    if identity == AS_GIVEN:
        return replace(registry, identity=IDENTITY_SCHEMA.empty_table()), catalog
    then = catalog.at(find_version(catalog, identity))

    def build() -> Registry:
        redirects = read_registry(then, registry.space).redirects if registry.space in then.spaces() else {}
        pairs = pa.table({"feature_uid": list(redirects), "target_uid": list(redirects.values())})
        return replace(registry, identity=pairs.cast(pa.schema([(n, pa.string()) for n in pairs.column_names])))

    return catalog.remember("identity", (registry.space, identity), build), then


def _refuse_several(orthologs: OrthologFeatures, asked: Sequence[str]) -> None:
    """Refuse names that only features have which are orthologs of the gene, but not one to one."""
    for name in orthologs.registry.resolve(list(asked)).unknown:
        several = orthologs.named(name)
        if several:
            raise FeatureError(
                f"{name!r} has no ortholog one to one here; its orthologs are {', '.join(orthologs.registry.describe_all(several))}. Ask for "
                "these by their own names, or leave it out."
            )


def _refuse_sums(
    spec: QuerySpec, catalog: Catalog, modality: SpacePointers, parts: Sequence[PartPlan], axis: FeatureAxis
) -> None:
    """Refuse columns of one dataset that are one feature, where the query or the type of a layer does not let them be added."""
    groups = ((part, group) for part in parts for group in part.groups if group.layout_uid in axis.added)
    whys = (
        (group, _why_not(spec, layer, group.layers[layer].spec, axis.added[group.layout_uid]))
        for part, group in groups
        for layer in part.layers
    )
    found = next(((group, why) for group, why in whys if why), None)
    if found is None:
        return
    group, why = found
    [layout] = read_layouts(catalog, {group.layout_uid}).values()
    sums = merged_columns(axis.column_maps[layout.uid], axis.merged, len(axis.features))
    column, local = next(iter(sums.items()))
    names = read_registry(catalog, modality.space.name).names_of([axis.features[column], *layout.features[local]])
    holds = (r for records in modality.records.values() for r in records if r.zarr_group == group.path)
    record = next(holds)
    ways = "" if spec.on_merge == "sum" else ", and on_merge='sum' adds them up"
    raise QueryError(
        f"Dataset {record.name or record.uid!r} has several columns for one feature of {modality.name!r} ({len(sums):,} such "
        f"feature{'s' if len(sums) > 1 else ''}, e.g. {names[0]}: {', '.join(names[1:])}), and {why}. In a query, "
        f"on_merge='apart' keeps the columns as they are, identity='as-given' joins nothing{ways}."
    )


def _why_not(spec: QuerySpec, layer: str, array: ArraySpec, n: int) -> str:
    """Return why n columns of a layer cannot be summed; empty if they can."""
    stored = np.dtype(array.dtype)
    if spec.on_merge == "refuse":
        return "on_merge='refuse' does not add them up"
    if spec.on_merge == "counts" and stored.kind == "f":
        return f"the values of layer {layer!r} are {stored}, which are not counts to add up"
    return "" if sum_dtype(stored, n, array.largest) else f"no type holds every sum of the {stored} of layer {layer!r}"


def _any_missing(axis: FeatureAxis, parts: Sequence[PartPlan]) -> bool:
    n = len(axis.features)
    maps = [axis.column_maps[g.layout_uid] for part in parts for g in part.groups if g.layout_uid in axis.column_maps]
    # Columns from n on are added to a column that the layout has anyway, so they measure no further feature.
    absent = any(len(np.unique(m[(m >= 0) & (m < n)])) < n for m in maps)
    return absent or any(bool((part.code < 0).any()) for part in parts)


def _width(modality: SpacePointers, parts: Sequence[PartPlan]) -> int:
    """Return the number of columns of a space without features; every group must agree."""
    if modality.space.has_features:
        return 0
    shapes = {r.spec.row_shape for part in parts for g in part.groups for r in g.layers.values()}
    if len(shapes) > 1:
        raise QueryError(
            f"The touched datasets have rows of different shapes in {modality.name!r}: {sorted(shapes)}; "
            "choose datasets that agree with .where({'dataset': [...]})."
        )
    shape = next(iter(shapes), ())
    return shape[0] if len(shape) == 1 else 0


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


_SHOWN = 5
"""How many names are listed."""


def explain(spec: QuerySpec, catalog: Catalog) -> str:
    """Describe the cells, groups, arrays and columns that a query reads, with an estimate of bytes.

    Returns
    -------
    str
        Several lines.
    """
    try:
        plan, refusal = plan_read(spec, catalog), []
    except QueryError as error:
        if spec.layers or spec.features:
            raise
        # What is wrong with the values is what a person wants to be told here, beside the cells.
        bare = replace(spec, spaces=(), features=(), layers=(), results=())
        plan, refusal = plan_read(bare, catalog), [f"values cannot be read: {error}"]
    at = f"snapshot {plan.provenance['snapshot']}" if plan.provenance["snapshot"] else "the tip"
    lines = [
        f"{catalog.location.uri} at {at}",
        f"asked: {spec.describe()}",
        f"filter: {to_sql(spec.filters, cell_columns(catalog)) or 'none'}",
        *(one.describe() for several in expansions(spec, catalog).values() for one in several),
        f"cells: {plan.n_cells:,}"
        + (f" ({plan.n_without:,} more have none of these spaces)" if plan.n_without else ""),
    ]
    for space in plan.spaces.values():
        lines += _space_lines(space, spec)
        if len(space.repeated):
            lines.append(_merged_line(space, spec, catalog))
        if spec.orthologs is not None and space.space.has_features:
            _, orthologs = apply_identity(spec, catalog, space.space.name)
            lines += [] if orthologs is None else [_orthologs_line(orthologs, space, spec.orthologs)]
    return "\n".join([*lines, *refusal])


def _space_lines(space: SpacePlan, spec: QuerySpec) -> list[str]:
    form = "CSR" if space.sparse else "dense"
    join = spec.join if isinstance(spec.join, str) else f"in at least {spec.join} datasets"
    layers = ", ".join(f"{layer} ({dtype})" for layer, dtype in space.dtypes.items())
    chosen = "asked for" if spec.layers else "chosen by rule"
    lines = [
        f"space {space.name}: {int(space.present.sum()):,} cells, {space.n_cols:,} columns ({join}), {form}",
        f"  layers: {layers}, {chosen}; what was not measured: {spec.missing}",
    ]
    lines += [_part_line(space, part) for part in space.parts]
    lines.append(f"  result: at most {int(space.row_bytes().sum()):,} bytes")
    return lines


def _part_line(space: SpacePlan, part: PartPlan) -> str:
    read = np.bincount(
        part.code[part.code >= 0], weights=(part.end - part.start)[part.code >= 0], minlength=len(part.groups)
    )
    touched = np.unique(part.code[part.code >= 0])
    arrays = len(touched) * (len(part.layers) + (1 if space.sparse else 0))
    n_bytes = sum(int(read[g]) * part.groups[g].entry_bytes for g in touched.tolist())
    what = "entries" if space.sparse else "rows"
    copies = len(choose_column_copies(space, part))
    by_column = f"; {copies:,} groups by column, from their column-sorted copies" if copies else ""
    if copies and not is_one_block(space):
        by_column += ", for a result in memory only"
    return (
        f"  reads {', '.join(part.layers)}: {len(touched):,} groups, {arrays:,} arrays, {int(read.sum()):,} {what}, "
        f"{n_bytes:,} bytes decoded{by_column}"
    )


def _orthologs_line(orthologs: OrthologFeatures, space: SpacePlan, organism: str) -> str:
    """Describe how many columns are joined by orthologs, and how many genes have no one-to-one ortholog."""
    row_of, targets = orthologs.registry.row_of, orthologs.registry.targets
    ends = {orthologs.registry.uids[targets[row_of[uid]]] for uid in orthologs.joined}
    n_columns = sum(uid in ends for uid in space.features.tolist())
    n_left = sum(uid in orthologs.several for uid in space.features.tolist())
    return f"  orthologs: {n_columns:,} columns are genes of {organism} by orthologs one to one; {n_left:,} are genes with others, and stand alone"


def _merged_line(space: SpacePlan, spec: QuerySpec, catalog: Catalog) -> str:
    """Describe the features with several columns in one dataset."""
    names = read_registry(catalog, space.space.name).names_of(space.features[space.repeated[:_SHOWN]])
    shown = ", ".join(names) + (", ..." if len(space.repeated) > _SHOWN else "")
    if spec.on_merge == "apart":
        return f"  kept apart: {len(space.repeated):,} columns that are the same feature as another one of their dataset ({shown})"
    used = {uid: merged_columns(m, space.merged, space.n_cols) for uid, m in space.column_maps.items()}
    n_columns = sum(len(local) for sums in used.values() for local in sums.values())
    n_layouts = sum(map(bool, used.values()))
    return f"  added up: {n_columns:,} columns of {n_layouts:,} feature lists in {len(space.repeated):,} features ({shown})"

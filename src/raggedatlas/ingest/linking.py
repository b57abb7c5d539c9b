"""Link the matrices of a source: references in place of values, decided before anything is written."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.linked_values import beyond
from raggedatlas.errors import SourceError
from raggedatlas.formats.linking import Linker
from raggedatlas.ingest.plan import COUNTS, IngestPlan, LayerPlan, NewGroup
from raggedatlas.ingest.values import LayerFit, to_csr
from raggedatlas.model.arrays import ArraySpec
from raggedatlas.model.batch import DenseBlock
from raggedatlas.model.ids import free_name
from raggedatlas.model.protocols import Source
from raggedatlas.model.records import Link, SourceFacts, Span
from raggedatlas.model.spaces import PointerKind
from raggedatlas.store.bundle import Bundle
from raggedatlas.store.linked import LinkedSource, keep_references
from raggedatlas.store.location import as_location
from raggedatlas.store.read import ArrayReader, iterate_slices, read_ranges
from raggedatlas.store.references import References, SourceObjects, references_file
from raggedatlas.store.sources import recorded_address
from raggedatlas.store.sparse import canonicalize

SAMPLES = 3
"""Places of a matrix, spread evenly, whose values are looked at."""

SAMPLE_ROWS = 16
"""Rows that are looked at in each place."""

SAMPLE_ENTRIES = 2**16
"""Most entries that are looked at in each place of a CSC matrix."""

WALKED_BYTES = 2**23
"""Bytes of the rows of entries of a CSC matrix that are read at once; they are counted as wider integers."""

SMALL_BYTES = 2**20
"""Smaller matrices that no query reads by rows, such as those of `varm`, are copied: references would take as many requests."""


@dataclass(frozen=True)
class LinkedGroup:
    """The arrays of one group in the source.

    `bounds` has, by path below the group, the bounds of the entries of the rows, and of the columns where these are
    linked, (n + 1,); it is empty for dense groups.
    """

    layers: Mapping[str, LayerPlan]  # layer name -> its matrix
    stored: Mapping[str, np.dtype[Any]]  # layer name -> dtype in the file
    specs: Mapping[str, ArraySpec]  # path below the group -> the array, still without its link
    sampled: frozenset[str]  # paths of the layers that only a sample shows to be counts
    bounds: Mapping[str, NDArray[np.int64]]

    @property
    def indptr(self) -> NDArray[np.int64] | None:
        """Bounds of the entries of the rows; None for dense groups."""
        return self.bounds.get("csr/indptr")


@dataclass
class FileReferences:
    """The references to arrays of one source."""

    content: bytes  # the references, as they are stored
    facts: SourceFacts  # what is recorded of the file
    _place: Span | None = field(default=None, init=False, repr=False)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content."""
        return hashlib.sha256(self.content).hexdigest()

    def write(self, catalog: Catalog, uid: str, bundle: Bundle) -> None:
        """Put the references into the bundle of the dataset, or beside it if they are large."""
        path = references_file(uid, self.digest)
        added = bundle.add({path: self.content})
        if added is None:
            catalog.arrays.write_bytes(path, self.content)
        self._place = Span(path, 0, len(self.content)) if added is None else added[path]

    def link(self, spec: ArraySpec, path: str, *, sampled: bool = False, entries: bool = False) -> ArraySpec:
        """Return the description of an array at a path of the store, whose bytes are in the source.

        `write` comes first. With `entries`, a dense matrix is described as the entries of its rows, one row after the
        other.
        """
        assert self._place is not None
        link = Link(self.facts.address, spec.path, self._place, self.digest, sampled)
        if entries and len(spec.shape) == 2:
            (n_rows, n_columns), (chunk_rows, chunk_columns) = spec.shape, spec.chunk_shape
            link = replace(link, matrix=(n_rows, n_columns), chunks=(chunk_rows, chunk_columns))
            # The entries of one row of chunks.
            spec = replace(spec, shape=(n_rows * n_columns,), chunk_shape=(chunk_rows * n_columns,))
        return replace(spec, path=path, linked=link)


@dataclass
class LinkPlan(FileReferences):
    """What is linked of a source whose matrices stay in the file."""

    groups: tuple[LinkedGroup, ...]  # one for each group of the plan
    # Of each group, the cell of each row, (n_rows,); None when row i is cell i.
    present: tuple[NDArray[np.int64] | None, ...]
    extras: Mapping[str, Mapping[str, ArraySpec]]  # key of each other matrix that is linked -> its arrays
    # Key of each sparse one of them -> bounds of its rows' entries, (n_rows + 1,).
    extra_indptr: Mapping[str, NDArray[np.int64]]
    content_hash: str  # of features, cells, and all values, or else the places of the chunks


@dataclass
class ColumnLinks(FileReferences):
    """What is linked of a source whose CSC matrices are copied row by row."""

    # Key of each CSC matrix -> its arrays "data" and "indices", still without their links.
    matrices: Mapping[str, Mapping[str, ArraySpec]]
    # Key of each CSC matrix -> bounds of its columns' entries, (n_columns + 1,).
    indptr: Mapping[str, NDArray[np.int64]]


def plan_column_links(catalog: Catalog, source: Source, plan: IngestPlan) -> ColumnLinks:
    """Find where the CSC matrices of a source are, and sort their entries by row; nothing is written to the atlas."""
    where, linker = plan.schema.uri or plan.name, _linker(source, plan)
    groups = [group for group in plan.groups if group.space.kind is PointerKind.SPARSE]
    keys = [layer.info.key for group in groups for layer in group.layers if layer.info.form == "csc"]
    if not keys:
        raise SourceError(
            f"{where} has no CSC matrix whose columns copy='rows' could link; add it with copy=False, which links what is stored by row, or "
            "with copy=True."
        )
    matrices = {key: linker.add(key) for key in keys}
    for key in keys:
        # Then layers with the same entries have them in the same order.
        if not source.rows_ascend(key):  # type: ignore[attr-defined]
            raise _unordered(key, where)
    content, facts = _collect(catalog, plan, linker, hashed=True)[1:]
    return ColumnLinks(content, facts, matrices, {key: read_indptr(source, key) for key in keys})


def plan_links(catalog: Catalog, source: Source, plan: IngestPlan, full_hash: str) -> LinkPlan:
    """Find where the matrices of a source are, and look at samples of their values; nothing is written.

    `full_hash` is the hash of all values, where they were read; else empty. A matrix that cannot be linked, and values
    in a sample that are not stored, are refused.
    """
    linker = _linker(source, plan)
    taken: dict[str, set[str]] = {}
    for group in plan.groups:
        taken.setdefault(group.space.name, set()).update(p.name for p in group.layers if p.name)
    groups = tuple(
        _link_group(catalog, source, plan, linker, n, taken[g.space.name]) for n, g in enumerate(plan.groups)
    )
    # What cannot be linked is copied, and so is what is small.
    extras: dict[str, Mapping[str, ArraySpec]] = {}
    for info in plan.extras.arrays:
        n_values = int(np.prod(info.shape, dtype=object)) if info.n_entries is None else info.n_entries
        if n_values * info.dtype.itemsize >= SMALL_BYTES and info.form != "csc":
            with suppress(SourceError):
                extras[info.key] = linker.add(info.key)
    present = tuple(source.present(group.layers[0].info.key) for group in plan.groups)
    extra_indptr = {key: read_indptr(source, key) for key, arrays in extras.items() if "indices" in arrays}
    references, content, facts = _collect(catalog, plan, linker, hashed=bool(full_hash))
    text = full_hash or _hash_places(plan, groups, references)
    return LinkPlan(content, facts, groups, present, extras, extra_indptr, text)


def _linker(source: Source, plan: IngestPlan) -> Linker:
    if plan.place is None:
        where = plan.schema.uri or plan.name
        raise SourceError(f"{where} is an object in memory, and only files are linked; add it with copy=True.")
    return Linker(source, plan.place)


def _collect(
    catalog: Catalog, plan: IngestPlan, linker: Linker, *, hashed: bool
) -> tuple[References, bytes, SourceFacts]:
    """Return the references, as they are stored too, and what is recorded of the file, of which all values are hashed or not."""
    assert plan.place is not None
    references = linker.references()
    address = recorded_address(plan.place, catalog.location)
    facts = describe_source(address, references.objects, "full" if hashed else "metadata")
    return references, references.to_bytes(), facts


def describe_source(address: str, objects: SourceObjects, hashed: Literal["metadata", "full"]) -> SourceFacts:
    """Return what is recorded of a source, as it is now."""
    modified = int(objects.modified.max(initial=0))
    return SourceFacts(
        address=address,
        n_bytes=int(objects.n_bytes.sum()),
        n_objects=len(objects.keys),
        modified=datetime.fromtimestamp(modified / 1e9, UTC).isoformat(timespec="microseconds") if modified else "",
        etag=objects.etags[0] if len(objects.keys) == 1 else "",
        hashed=hashed,
    )


def _unordered(key: str, where: str) -> SourceError:
    return SourceError(
        f"{key} of {where} has columns whose rows do not ascend, or that name a row twice; entries of a linked file are read as they "
        "are. Add it with copy=True, or call sum_duplicates() on the matrix first."
    )


def _link_group(
    catalog: Catalog, source: Source, plan: IngestPlan, linker: Linker, number: int, taken: set[str]
) -> LinkedGroup:
    group = plan.groups[number]
    sparse = group.space.kind is PointerKind.SPARSE
    layers, stored = dict[str, LayerPlan](), dict[str, np.dtype[Any]]()
    specs, sampled = dict[str, ArraySpec](), set[str]()
    bounds = dict[str, NDArray[np.int64]]()
    for layer in group.layers:
        info = layer.info
        if not sparse and info.form != "dense":
            raise SourceError(
                f"{info.key} is stored as {info.form}, and the feature space {group.space.name!r} has dense rows, which cannot be read from it. "
                "Add the file with copy=True, or store the matrix as a dense array."
            )
        arrays = linker.add(info.key)
        folder = ("csc/" if info.form == "csc" else "csr/") if sparse else ""
        # Layers of a group have the same entries, so those of the first are those of all.
        if folder and info.form != "dense":
            specs.setdefault(f"{folder}indices", arrays["indices"])
            if f"{folder}indptr" not in bounds:
                bounds[f"{folder}indptr"] = read_indptr(source, info.key)
        elif folder:
            bounds["csr/indptr"] = np.arange(info.shape[0] + 1) * info.shape[1]
        if folder == "csc/":
            opened = _open_unrecorded(catalog, plan, linker, arrays)
            bounds["csr/indptr"], fit = _walk_columns(opened, layer, group, bounds["csc/indptr"], plan)
        else:
            fit = _sample(source, layer, group)
        counts = group.space.is_counts and fit.counts
        name = layer.name or free_name(COUNTS if counts and COUNTS not in taken else layer.otherwise, taken)
        taken.add(name)
        path = f"{folder}layers/{name}"
        if name == COUNTS and arrays["data"].dtype[0] not in "bu":
            sampled.add(path)
        specs[path] = arrays["data"]
        layers[name], stored[name] = layer, np.dtype(arrays["data"].dtype)
    return LinkedGroup(layers, stored, specs, frozenset(sampled), bounds)


def _open_unrecorded(
    catalog: Catalog, plan: IngestPlan, linker: Linker, arrays: Mapping[str, ArraySpec]
) -> dict[str, ArrayReader]:
    """Open arrays of a source whose references are not stored yet."""
    place = plan.place
    assert place is not None
    references = linker.references()
    digest = hashlib.sha256(references.to_bytes()).hexdigest()
    keep_references(digest, references)
    there = LinkedSource(as_location(place), plan.name)
    links = {name: Link(str(place), spec.path, Span("", 0, 0), digest) for name, spec in arrays.items()}
    return {
        name: ArrayReader(catalog.arrays, replace(spec, linked=links[name]), source=there)
        for name, spec in arrays.items()
    }


def _walk_columns(
    opened: Mapping[str, ArrayReader], layer: LayerPlan, group: NewGroup, indptr: NDArray[np.int64], plan: IngestPlan
) -> tuple[NDArray[np.int64], LayerFit]:
    """Read which rows the entries of a CSC matrix are in, and samples of its values.

    Returns the bounds of the entries of the rows, (n_rows + 1,), and what the samples show.
    """
    info, where, start, last = layer.info, plan.schema.uri or plan.name, 0, -1
    n_rows, n_entries = info.shape[0], int(indptr[-1])
    counts = np.zeros(n_rows, np.int64)
    for rows in iterate_slices(opened["indices"], WALKED_BYTES):
        outside = beyond(rows, n_rows)
        if outside.any():
            raise SourceError(
                f"{info.key} of {where} has an entry for row {int(rows[outside][0]):,}, outside its {n_rows:,} cells; the file is damaged. Write it again."
            )
        counts += np.bincount(rows.astype(np.int64, copy=False), minlength=n_rows)
        ascends = np.diff(rows.astype(np.int64, copy=False), prepend=last) > 0
        # Where a column begins, any row may follow.
        first, after = np.searchsorted(indptr, [start, start + len(rows)])
        ascends[indptr[first:after] - start] = True
        if not ascends.all():
            raise _unordered(info.key, where)
        start, last = start + len(rows), int(rows[-1])
    n_sampled = min(max(1, SAMPLE_ROWS * n_entries // max(1, n_rows)), n_entries, SAMPLE_ENTRIES)
    starts = np.unique(np.linspace(0, n_entries - n_sampled, SAMPLES).astype(np.int64))
    entries = np.concatenate([np.arange(n_sampled) + begin for begin in starts])
    values, rows = (read_ranges(opened[name], starts, starts + n_sampled) for name in ("data", "indices"))
    columns = np.searchsorted(indptr, entries, side="right") - 1

    def place(at: int, _: int) -> str:
        return f"cell {rows[at]}, feature {columns[at]} (both counted from 0)"

    fit = replace(_fit_of(layer, group), place=place)
    fit.observe(DenseBlock({"values": values[:, None]}), 0)
    fit.judge()
    return np.concatenate([[0], np.cumsum(counts)]), fit


def read_indptr(source: Source, key: str) -> NDArray[np.int64]:
    """Read the bounds of the rows of a CSR matrix of a file, or of the columns of a CSC matrix."""
    indptr: NDArray[np.int64] = source.indptr(key)  # type: ignore[attr-defined]
    return indptr


def _fit_of(plan: LayerPlan, group: NewGroup) -> LayerFit:
    return LayerFit(
        plan.info.key, plan.info.dtype, must_count=plan.name == COUNTS, may_be_signed=not group.space.is_counts or bool(plan.name),
        keep_nonfinite=not group.space.is_counts,
    )  # fmt: skip


def _sample(source: Source, plan: LayerPlan, group: NewGroup) -> LayerFit:
    """Look at the values of some rows, spread evenly."""
    info, fit = plan.info, _fit_of(plan, group)
    starts = np.unique(np.linspace(0, max(0, info.shape[0] - SAMPLE_ROWS), SAMPLES).astype(np.int64))
    for start in starts.tolist():
        stop = min(info.shape[0], start + SAMPLE_ROWS)
        row = start
        for (block,) in source.blocks((info.key,), SAMPLE_ROWS, (start, stop)):
            if info.form != "dense":
                _, n_summed = canonicalize(to_csr(block), info.key, row, sum_duplicates=True)
                if n_summed:
                    raise SourceError(
                        f"{info.key} names a feature twice in one of the cells {row:,} to {row + block.n_rows:,}; entries of a linked file "
                        "are read as they are. Add it with copy=True, which sums them, or call sum_duplicates() on the matrix first."
                    )
            fit.observe(block, row)
            row += block.n_rows
    fit.judge()
    return fit


def _hash_places(plan: IngestPlan, groups: Sequence[LinkedGroup], references: References) -> str:
    """Hash what is known of the content without its values: cells, features, descriptions of the arrays, places of the chunks."""
    digest = hashlib.sha256(references.objects.probe.encode())
    features = plan.groups[0].features
    digest.update("\0".join([plan.cell_names, *(() if features is None else features.uids)]).encode())
    for group in groups:
        for path, spec in sorted(group.specs.items()):
            digest.update(f"{path} {spec.to_json()}".encode())
    # Files of equal sizes and places may differ in values, so that time and ETag are part of it.
    for stamps in (references.objects.n_bytes, references.objects.modified):
        digest.update(np.ascontiguousarray(stamps).tobytes())
    digest.update("\0".join(references.objects.etags).encode())
    for name, table in sorted(references.arrays.items()):
        digest.update(name.encode())
        for values in (table.objects, table.offsets, table.sizes):
            digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:32]

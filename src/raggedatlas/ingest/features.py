"""Registering features by hand: frames, tables or schema objects become registry rows."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.features import read_registry
from raggedatlas.catalog.identity import change_links, update_identity
from raggedatlas.catalog.layouts import BY_HAND, register_features
from raggedatlas.catalog.versions import registry_tables
from raggedatlas.errors import SchemaError
from raggedatlas.model.schemas import FeatureBaseSchema


def register(catalog: Catalog, features: Any, space: str, redirects: Mapping[str, str]) -> int:  # noqa: ANN401  (several forms)
    """Add or correct features, and link features that are the same.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    features : pandas.DataFrame, pyarrow.Table, sequence of FeatureBaseSchema, or None
        Rows with `uid`.
    space : str
        Feature space.
    redirects : mapping of str to str
        Name -> name of the feature that it counts as from now on.

    Returns
    -------
    int
        How many features were new.

    Raises
    ------
    SchemaError
        If the rows are of no known form, give a registered feature another id, or any feature another `global_index`.
    """
    catalog.require_tip("register_features()")
    catalog.add_space(catalog.space(space))
    n_new = 0
    if features is not None:
        rows = _rows(features)
        if "redirect" in rows.column_names:
            raise SchemaError(
                "register_features() takes no column 'redirect'; leave it out, and link features with atlas.identity.link(feature, target)."
            )
        if "symbol" in rows.column_names:
            # `register_features` ranks a symbol by this source: no symbol of a file replaces one given by hand.
            by_hand = pc.if_else(rows.column("symbol").is_valid(), BY_HAND, pa.scalar(None, pa.string()))
            kept = rows.drop_columns([name for name in ("symbol_source",) if name in rows.column_names])
            rows = kept.append_column("symbol_source", by_hand)
        _refuse_other_ids(catalog, space, rows)
        n_new = register_features(catalog, space, rows)
    if redirects:
        registry = read_registry(catalog, space)
        sources = registry.require([*redirects], follow=False, once=False)
        links = dict(zip(sources, registry.require([*redirects.values()], once=False), strict=True))
        change_links(catalog, space, registry.table, links)
    update_identity(catalog, registry_tables(catalog))
    return n_new


def _rows(features: Any) -> pa.Table:  # noqa: ANN401  (several forms)
    if isinstance(features, pa.Table):
        return features
    if isinstance(features, list | tuple) and all(isinstance(f, FeatureBaseSchema) for f in features):
        if not features:
            raise SchemaError("register_features() got no features; pass at least one.")
        rows = [f.model_dump(exclude={"global_index", "redirect"}) for f in features]
        return pa.Table.from_pylist(rows, schema=_without(type(features[0]).arrow_schema()))
    if hasattr(features, "columns") and hasattr(features, "index"):
        frame = features if "uid" in features.columns else features.rename_axis("uid").reset_index()
        table = pa.Table.from_pandas(frame, preserve_index=False)
        return table.replace_schema_metadata(None)
    raise SchemaError(
        f"register_features() takes a pandas frame, an Arrow table, or a list of FeatureBaseSchema objects; got {type(features).__name__}."
    )


def _refuse_other_ids(catalog: Catalog, space: str, rows: pa.Table) -> None:
    """Refuse to give a registered feature another id: it is what its file said, and others may be joined with it by that."""
    if not {"uid", "feature_id"} <= {*rows.column_names}:
        return
    types = {name: rows.schema.field(name).type for name in ("uid", "feature_id")}
    if any(not (pa.types.is_string(t) or pa.types.is_large_string(t) or pa.types.is_null(t)) for t in types.values()):
        raise SchemaError(
            f"Uids and ids of features are texts, as atlas.features() shows them; got uid {types['uid']} and feature_id {types['feature_id']}."
        )
    known = read_registry(catalog, space).table
    at = pc.index_in(rows.column("uid"), value_set=known.column("uid").combine_chunks())
    own, given = known.column("feature_id").take(at), rows.column("feature_id")
    # For a uid that is not registered `at` is null, and so is the comparison: new features pass.
    differs = np.flatnonzero(pc.fill_null(pc.not_equal(own, given), fill_value=False).to_numpy())
    if len(differs):
        first = int(differs[0])
        raise SchemaError(
            f"{len(differs):,} registered features of {space!r} are given another feature_id, for instance {given[first].as_py()!r} in place of "
            f"{own[first].as_py()!r}; a feature keeps its id. Give the name as symbol or aliases, or use atlas.identity.link(feature, target)."
        )


def _without(schema: pa.Schema) -> pa.Schema:
    return pa.schema([f for f in schema if f.name not in ("global_index", "redirect")])

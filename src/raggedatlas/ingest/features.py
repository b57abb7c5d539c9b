"""Registering features by hand: frames, tables or schema objects become registry rows."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.registering import merge_features, register_features
from raggedatlas.errors import SchemaError
from raggedatlas.model.schemas import FeatureBaseSchema


def register(catalog: Catalog, features: Any, space: str, redirects: Mapping[str, str]) -> int:  # noqa: ANN401  (several forms)
    """Add or correct features, and redirect merged ones.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    features : pandas.DataFrame, pyarrow.Table, sequence of FeatureBaseSchema, or None
        Rows with `uid`.
    space : str
        Feature space.
    redirects : mapping of str to str
        Name -> name of the feature that it is to mean from now on.

    Returns
    -------
    int
        How many features were new.

    Raises
    ------
    SchemaError
        If the rows are of no known form.
    """
    catalog.require_tip("register_features()")
    catalog.add_space(catalog.space(space))
    n_new = 0 if features is None else register_features(catalog, space, _rows(features))
    if redirects:
        merge_features(catalog, space, redirects)
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


def _without(schema: pa.Schema) -> pa.Schema:
    return pa.schema([f for f in schema if f.name not in ("global_index", "redirect")])

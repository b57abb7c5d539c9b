"""Schemas for homeobox, in a file of their own because their annotations must be real objects."""

import homeobox as hox

SPACE = "gene_expression"


class GeneFeature(hox.FeatureBaseSchema):
    """A gene, its uid derived from its id."""

    gene_id: str = hox.StableUIDField.declare(default=...)
    gene_symbol: str = ""


class CellSchema(hox.HoxBaseSchema):
    """A cell with the three columns the maker writes."""

    cell_type: str | None = None
    donor: str | None = None
    n_counts: float | None = None
    gene_expression: hox.SparseZarrPointer | None = hox.PointerField.declare(feature_space=SPACE)

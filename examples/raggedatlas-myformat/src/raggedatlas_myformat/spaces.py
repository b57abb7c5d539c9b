"""The feature space of guide counts; a module of its own, because it is imported whenever spaces are listed."""

import raggedatlas as ra

GUIDE_COUNTS = ra.FeatureSpace("guide_counts", ra.PointerKind.SPARSE, description="Counts per CRISPR guide.")

"""The feature space of guide counts; it is in its own module because raggedatlas loads it whenever spaces are listed."""

import raggedatlas as ra

GUIDE_COUNTS = ra.FeatureSpace("guide_counts", ra.PointerKind.SPARSE, description="Counts per CRISPR guide.")

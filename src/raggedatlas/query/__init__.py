"""Catalog at a version to a frozen plan, to batches, to AnnData, MuData, Arrow or a file."""

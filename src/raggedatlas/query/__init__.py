"""Catalog at a version to a frozen read plan, to batches, to AnnData, MuData, Arrow or a file."""

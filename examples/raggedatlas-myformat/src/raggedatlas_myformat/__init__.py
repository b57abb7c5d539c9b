"""Example of an extension of raggedatlas: CRISPR guide counts."""

"""AnnData on disk and in memory, read and written in row blocks."""

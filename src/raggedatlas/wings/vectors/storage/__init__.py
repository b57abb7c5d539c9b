"""Storage of geometry in Zarr: byte codecs, arrays of chunks, both layouts, and readers of one level."""

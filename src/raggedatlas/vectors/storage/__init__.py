"""How a geometry store is kept in Zarr: byte codecs, arrays of chunks, both layouts, and the readers of one level."""

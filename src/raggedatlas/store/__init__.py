"""Storage of bytes: locations, Lance tables, Zarr arrays, codecs, SQL text, threads and row reads."""

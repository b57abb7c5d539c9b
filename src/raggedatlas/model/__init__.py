"""Data types without I/O: ids, pointers, schemas, records, feature spaces, blocks, `Source` and `Sink`."""

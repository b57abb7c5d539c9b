"""What things are: ids, pointers, schemas, records, feature spaces, batches and the two protocols. No I/O."""

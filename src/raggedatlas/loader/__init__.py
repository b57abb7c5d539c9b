"""A query becomes training batches: an order made of sizes and seeds, and reads that run ahead."""

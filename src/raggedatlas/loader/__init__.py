"""A query to training batches: an order computed from sizes and seeds, with prefetched reads."""

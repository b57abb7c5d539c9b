"""Where bytes live: a location, its Lance tables, its Zarr arrays, batched range reads. The only concurrency."""

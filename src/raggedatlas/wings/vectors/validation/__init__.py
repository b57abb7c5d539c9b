"""The rules of zarr-vectors, and the validator that checks a store once and lists every rule that it breaks."""

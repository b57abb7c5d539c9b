"""zarr-vectors: points, lines, graphs, skeletons and meshes in Zarr, cut by space, whole in memory (seed 002)."""

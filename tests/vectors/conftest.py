"""What stands here for the environments of other packages is no test of this one."""

collect_ignore = ["peer_geometry.py", "peer_zarr_vectors.py"]

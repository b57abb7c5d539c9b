"""CXG, the format of CELLxGENE Explorer on TileDB: read in every version, written in the two that are served."""

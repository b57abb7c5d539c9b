"""Model outputs as Lance tables: writer, dataset, and conversion of `.npy` results."""

"""The tables of one atlas: cells, datasets, layouts, features, snapshots, checks, maintenance."""

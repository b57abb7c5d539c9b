"""Other people's files of geometry, in and out: one file for each family, one dictionary in ``registry.py``."""

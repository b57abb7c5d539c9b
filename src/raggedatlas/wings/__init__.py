"""The wings of this package: each of its folders is one system, whole, behind the door in its ``__init__.py``."""

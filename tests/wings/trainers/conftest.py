"""The small atlas of the tests of the loader."""

from tests.loader.conftest import small

__all__ = ["small"]

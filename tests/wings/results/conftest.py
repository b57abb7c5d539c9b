"""A way to let a process die before any of its writes, as in the tests of the catalog."""

from tests.catalog.conftest import dying

__all__ = ["dying"]

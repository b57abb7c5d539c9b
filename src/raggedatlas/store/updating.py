"""Values of some columns in rows that are there already, in one commit."""

import pyarrow as pa

from raggedatlas.store.tables import Tables


def update_columns(tables: Tables, name: str, key: str, rows: pa.Table, read_version: int) -> None:
    """Overwrite some columns of the rows whose key is given, in one commit; rows whose key is not there are no matter.

    Row ids, and so the order of the table, stay.

    Parameters
    ----------
    tables : Tables
        At the tip.
    name : str
        Table.
    key : str
        Column by which rows are told.
    rows : pyarrow.Table
        The key and the columns.
    read_version : int
        The version that `rows` were made from: whatever was committed to the same rows since is a lost race.

    Raises
    ------
    ConflictError
        If another writer changed the same rows; nothing is written then.
    """
    import lance

    from raggedatlas.store.lance_errors import lance_errors

    uri = tables.uri(name)
    with lance_errors(uri):
        target = lance.dataset(uri, version=read_version, storage_options=tables.location.lance_options())
        target.merge_insert([key]).when_matched_update_all().use_index(use_index=False).conflict_retries(0).execute(
            rows
        )

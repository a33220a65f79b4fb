"""Insert rows, or replace those of the same key, in the words of whichever database it is."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite

# Both databases understand ON CONFLICT; SQLAlchemy keeps it in the dialects.
_INSERT = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


def upsert(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]], *, keep: bool = False) -> None:
    """Write rows that all have the same columns. A row of an existing key replaces it, or with `keep` is left out.

    Columns that the rows do not name keep their value.
    """
    if not rows:
        return
    statement: Any = _INSERT[connection.dialect.name](table)
    key = [column.name for column in table.primary_key]
    replaced = {name: statement.excluded[name] for name in rows[0] if name not in key}
    if keep or not replaced:
        statement = statement.on_conflict_do_nothing(index_elements=key)
    else:
        statement = statement.on_conflict_do_update(index_elements=key, set_=replaced)
    connection.execute(statement, [dict(row) for row in rows])

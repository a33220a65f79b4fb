"""The history of the schema, run by `sentinel.store.schema`; there is no alembic.ini."""

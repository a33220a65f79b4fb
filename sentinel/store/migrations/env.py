"""Run the migrations inside the transaction that `sentinel.store.schema` began; nothing is committed here."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], transactional_ddl=True)
context.run_migrations()

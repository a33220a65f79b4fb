"""The run database: what the daemon writes, and what the postmortem reads. One schema, SQLite now, PostgreSQL too."""

"""Bring a run database to the schema of this version, once, however many processes open it at the same time."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from sentinel.errors import PermanentError, SchemaTooNewError, SchemaTooOldError, TemporaryError
from sentinel.store import engine as engines
from sentinel.store.tables import metadata

# Every revision in migrations/versions, oldest first; a test compares. With them at hand alembic is loaded only
# when there is something to migrate.
REVISIONS = ("0001", "0002", "0003")
MIGRATIONS = Path(__file__).with_name("migrations")
LOCK_SECONDS = 60.0  # most time to wait for another process that migrates
_LOCK_KEY = 0x53454E54  # "SENT", the number of our advisory lock on a database server


def open_writer(url: str) -> Engine:
    """An engine on a database of the newest schema, created or migrated under a lock.

    Raises SchemaTooNewError, without touching the file, for the schema of a newer version; PermanentError for a
    damaged, foreign or unwritable database; TemporaryError when another process holds the lock for too long.
    """
    path = engines.sqlite_file(url)
    with engines.plain_errors(url), _alone(path):
        if path is not None:
            _make_file(path)
            _refuse_newer(url)
        engine = engines.writer(url)
        with engine.connect() as connection, connection.begin():
            _lock_server(connection)
            found = version_of(connection)
            _check(found, url)
            if found != REVISIONS[-1]:
                _migrate(connection)
    return engine


def revision_of(url: str) -> str | None:
    """The revision that a database is at, None where there is none yet; nothing is created or changed.

    Raises PermanentError for a damaged database or somebody else's tables, TemporaryError for a silent server.
    """
    path = engines.sqlite_file(url)
    if path is not None and not path.exists():
        return None
    with engines.plain_errors(url), engines.reader(url).connect() as connection:
        return version_of(connection)


def version_of(connection: Connection) -> str | None:
    """The revision a database is at, None before the first. Raises PermanentError for somebody else's tables."""
    tables = set(inspect(connection).get_table_names())
    if "alembic_version" not in tables:
        taken = sorted(tables & set(metadata.tables))
        if taken:
            raise PermanentError(f"the database has a table {taken[0]!r} that is not ours; set store.url to another")
        return None
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return None if found is None else str(found)


def _check(found: str | None, url: str) -> None:
    if found is not None and found not in REVISIONS:
        raise SchemaTooNewError(
            f"the run database {engines.shown(url)} has schema {found!r}, newer than our {REVISIONS[-1]!r};"
            " upgrade sentinel, or set store.url to another database"
        )


def check_readable(connection: Connection, url: str) -> bool:
    """Whether there is a schema to read. Raises SchemaTooNewError and SchemaTooOldError: readers upgrade nothing."""
    found = version_of(connection)
    _check(found, url)
    if found is not None and found != REVISIONS[-1]:
        raise SchemaTooOldError(
            f"the run database {engines.shown(url)} has schema {found!r}, this version reads {REVISIONS[-1]!r};"
            " run `sentinel db upgrade`, or start a daemon, which upgrades by itself"
        )
    return found is not None


def _refuse_newer(url: str) -> None:
    # Read-only, because opening for writing switches the journal mode, and that would already touch the file.
    reading = engines.reader(url)
    with reading.connect() as connection:
        _check(version_of(connection), url)


def _migrate(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _make_file(path: Path) -> None:
    # 0600: command lines and configurations may hold what is nobody else's business.
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise PermanentError(
            f"the run database {path} cannot be opened for writing ({error.strerror});"
            " make it writable, or set store.url"
        ) from None


@contextmanager
def _alone(path: Path | None) -> Iterator[None]:
    """Hold the folder of a SQLite file; the file must not be locked, closing it would drop SQLite's own locks."""
    if path is None:
        yield
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise PermanentError(f"the folder {path.parent} of the run database is unusable: {error.strerror}") from None
    try:
        _wait_for(folder, path)
        yield
    finally:
        os.close(folder)


def _wait_for(folder: int, path: Path) -> None:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TemporaryError(f"another process has held {path.parent} for {LOCK_SECONDS:.0f} s") from None
            time.sleep(0.02)
        else:
            return


def _lock_server(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})

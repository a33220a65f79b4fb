"""Connect to the run database: one writer that chooses how durable a commit is, and readers that never write."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.pool import NullPool

from sentinel.errors import MisuseError, PermanentError, TemporaryError

BUSY_SECONDS = 10.0  # how long a connection waits for another writer's lock

# What a server's URL may say in its query and nobody should read.
_SECRET_PARAMETERS = ("password", "passfile", "sslpassword", "sslkey", "options")

# SQLite's names of results that a later try may not meet again.
_MAY_PASS = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_IOERR", "SQLITE_NOMEM", "SQLITE_INTERRUPT")

# The same of PostgreSQL: connection lost, conflicts, no room, lock not had, shutting down or starting, I/O.
_STATES_MAY_PASS = ("08", "40", "53", "55P03", "57", "58")

# A server that does not let us in: its SQLSTATE, and its words, because libpq keeps the state of a connection that
# was never made to itself. The words are English unless the server's lc_messages says otherwise; then we try again.
_NO_LOGIN = (
    "28",
    re.compile(
        r"authentication failed|no password supplied|no pg_hba\.conf entry|pg_hba\.conf rejects"
        r'|role ".*" (does not exist|is not permitted to log in)|permission denied for database'
    ),
)
_NO_PRIVILEGE = "42501"
_NO_DATABASE = ("3D000", re.compile(r'database ".*" does not exist'))

_PSYCOPG = "postgresql+psycopg"
# A server that does not answer must not hold the writer; keepalives notice a peer that vanished.
_CONNECT_ARGUMENTS = {
    _PSYCOPG: {
        "connect_timeout": int(BUSY_SECONDS),
        "application_name": "sentinel",
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 30_000,
    }
}


def writer(url: str) -> Engine:
    """An engine whose transactions are FULL-synced unless `set_durability` said otherwise."""
    engine = _engine(url)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    else:
        event.listen(engine, "begin", _begin_server)
    return engine


def set_durability(connection: Connection, *, critical: bool) -> None:
    """Of the next transactions. SQLite in WAL mode with NORMAL may lose its last commits when the power fails."""
    connection.execution_options(sentinel_critical=critical)


def reader(url: str) -> Engine:
    """An engine that cannot write; it works beside the writer, and on a file or folder that is read-only."""
    path = sqlite_file(url)
    if path is None:
        engine = _engine(url)
        event.listen(engine, "begin", _begin_reading)
        return engine
    engine = create_engine("sqlite://", creator=lambda: _open_read_only(path), poolclass=NullPool)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return engine


def sqlite_file(url: str) -> Path | None:
    """The file of a SQLite URL; None for a database server. Raises MisuseError for a URL that names no database."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        example = "sqlite:////folder/sentinel.db or postgresql+psycopg://user@host/database"
        raise MisuseError(f"store.url is {_without_login(url)!r}; it must look like {example}") from None
    if parsed.get_backend_name() != "sqlite":
        return None
    if parsed.database in {None, "", ":memory:"}:
        raise MisuseError(
            f"store.url is {url!r}; the run database must be a file, e.g. sqlite:////folder/sentinel.db"
        )
    return Path(str(parsed.database)).absolute()


def shown(url: str) -> str:
    """The URL as a person may see it: a path for SQLite, no password for a server."""
    path = sqlite_file(url)
    if path:
        return str(path)
    parsed = make_url(url)
    return parsed.difference_update_query(_SECRET_PARAMETERS).render_as_string(hide_password=True)


@contextmanager
def plain_errors(url: str, *, opened: bool = False) -> Iterator[None]:
    """Turn a driver's exceptions into TemporaryError or PermanentError, naming the database and a remedy.

    `opened`: this process has been in the database before. A server that lets it in no longer, as while a password is
    changed, is then waited for: whatever is in hand must not be lost.
    """
    try:
        yield
    except DBAPIError as error:
        raise _plain(error.orig, url, lost=error.connection_invalidated, opened=opened) from error
    except (sqlite3.Error, OverflowError) as error:
        raise _plain(error, url) from error


def _engine(url: str) -> Engine:
    sqlite_file(url)
    parsed = _with_driver(make_url(url))
    try:
        engine = create_engine(parsed, poolclass=NullPool, connect_args=_CONNECT_ARGUMENTS.get(parsed.drivername, {}))
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        remedy = "pip install 'train-sentinel[postgres]'" if "postgres" in parsed.drivername else "install it"
        raise MisuseError(f"store.url is {shown(url)!r}, but its driver is missing ({error}); {remedy}") from None
    if parsed.drivername == _PSYCOPG:
        event.listen(engine, "connect", _prepare_psycopg)
    return engine


def _with_driver(url: URL) -> URL:
    # SQLAlchemy takes these names for another driver, which we do not ship, or for no database at all.
    return url.set(drivername=_PSYCOPG) if url.drivername in {"postgresql", "postgres"} else url


def _without_login(url: str) -> str:
    before, at, after = url.rpartition("@")
    return f"{before.partition('//')[0] if '//' in before else ''}***{at}{after}" if at else url


def _prepare_psycopg(connection: Any, _record: Any) -> None:
    from sentinel.store.postgres_text import NoNulDumper

    connection.adapters.register_dumper(str, NoNulDumper)


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    # None: we say BEGIN ourselves, so that schema changes are part of the transaction too.
    connection.isolation_level = None
    connection.execute(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000)}")
    connection.execute("PRAGMA journal_mode = WAL")


def _begin_sqlite(connection: Connection) -> None:
    # The level cannot change inside a transaction, so it is set right before.
    level = "FULL" if _is_critical(connection) else "NORMAL"
    if connection.info.get("synchronous") != level:
        connection.exec_driver_sql(f"PRAGMA synchronous = {level}")
        connection.info["synchronous"] = level
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _begin_server(connection: Connection) -> None:
    if connection.dialect.name == "postgresql" and not _is_critical(connection):
        connection.exec_driver_sql("SET LOCAL synchronous_commit = off")


def _begin_reading(connection: Connection) -> None:
    # As with SQLite: all questions of a transaction see the same rows, and nothing can be written.
    connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")


def _is_critical(connection: Connection) -> bool:
    return bool(connection.get_execution_options().get("sentinel_critical", True))


def _open_read_only(path: Path) -> sqlite3.Connection:
    try:
        return _try_read_only(path, "mode=ro")
    except sqlite3.OperationalError:
        log = path.with_name(path.name + "-wal")
        if not path.exists() or (log.exists() and log.stat().st_size):
            raise
    # In a folder that we may not write to SQLite cannot make its index of the log; without a log there is no need.
    return _try_read_only(path, "mode=ro&immutable=1")


def _try_read_only(path: Path, query: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?{query}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        connection.execute("SELECT count(*) FROM sqlite_master")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _plain(
    error: BaseException | None, url: str, *, lost: bool = False, opened: bool = False
) -> TemporaryError | PermanentError:
    where = f"the run database {shown(url)}"
    name = getattr(error, "sqlite_errorname", None) or ""
    state = str(getattr(error, "sqlstate", None) or "")
    if not name and (refused := _refused(error, state)) is not None:
        return (TemporaryError if opened else PermanentError)(f"{where} {refused}")
    if lost or name.startswith(_MAY_PASS) or state.startswith(_STATES_MAY_PASS):
        return TemporaryError(f"{where} does not take this now: {error}")
    if not name and type(error).__name__ == "OperationalError":
        return TemporaryError(f"{where} does not answer: {error}")
    return PermanentError(f"{where} {_for_good(error, name, state)}")


def _for_good(error: BaseException | None, name: str, state: str) -> str:
    if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
        return f"is damaged or no database ({error}); move it away, or set store.url to another"
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return f"cannot be opened for writing ({error}); make it writable, or set store.url"
    if state == _NO_PRIVILEGE:
        return f"grants its user too little; grant more, or let one who may run `sentinel db upgrade`: {error}"
    return f"refused a statement: {type(error).__name__}: {error}"


def _refused(error: BaseException | None, state: str) -> str | None:
    """Why a server did not let us in, and the remedy; None if that is not what happened."""

    def is_of(sort: tuple[str, re.Pattern[str]]) -> bool:
        if state:
            return state.startswith(sort[0])
        return type(error).__name__ == "OperationalError" and sort[1].search(str(error)) is not None

    if is_of(_NO_DATABASE):
        return f"does not exist ({error}); create it, for example with createdb, or set store.url to another"
    if is_of(_NO_LOGIN):
        return (
            f"refuses the login ({error}); put user and password right in store.url, the file store.url_file or"
            " PGPASSFILE, or let the server's pg_hba.conf admit this host"
        )
    return None

"""A database server that refuses, vanishes and comes back: named with a remedy, retried where that can help."""

import re
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url

from sentinel.errors import PermanentError, TemporaryError
from sentinel.store import engine, schema
from sentinel.store.database import Store
from sentinel.store.history import History
from tests.daemon.daemon_process import DaemonProcess
from tests.postgres_server import Server
from tests.store.building import RUN, START, entries, hello, record, start

pytestmark = pytest.mark.service


@pytest.fixture
def url(postgres: Server):
    with postgres.database() as url:
        yield url


def test_a_connection_that_the_server_closed_is_temporary_and_nothing_of_the_batch_stays(
    postgres: Server, url: str
) -> None:
    store = Store.open(url)
    store.register_rank(hello(), "box", START)
    with store.transaction(critical=True):
        pid = store._connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
    assert postgres.execute(f"SELECT pg_terminate_backend({pid})") == [(True,)]
    with pytest.raises(TemporaryError, match="does not take this now"):
        store.write(entries(start(), record(2, 1)), critical=True)
    store.write(entries(start(), record(2, 1)), critical=True)
    with History(url) as history:
        (books,) = history.conservation(RUN)
    assert (books["stored"], books["dropped"], books["in_flight"]) == (2, 0, 0)


def test_a_server_that_is_not_there_is_temporary_and_named_without_its_password(postgres: Server) -> None:
    url = f"postgresql://tester:{postgres.password}@127.0.0.1:1/nothing"
    with pytest.raises(TemporaryError, match=r"127\.0\.0\.1:1/nothing does not answer") as caught:
        Store.open(url)
    assert postgres.password not in str(caught.value)


@pytest.mark.parametrize(
    "open_database", [Store.open, History, schema.revision_of], ids=["writer", "reader", "status"]
)
def test_a_wrong_password_is_permanent_said_and_not_shown(url: str, open_database: Callable[[str], object]) -> None:
    wrong = make_url(url).set(password="wrong-one").render_as_string(hide_password=False)
    with pytest.raises(PermanentError, match=r"authentication failed.*store\.url_file.*PGPASSFILE") as caught:
        open_database(wrong)
    assert "wrong-one" not in str(caught.value)
    assert engine.shown(url) in str(caught.value)


@pytest.mark.parametrize(
    "open_database", [Store.open, History, schema.revision_of], ids=["writer", "reader", "status"]
)
def test_a_database_that_does_not_exist_is_permanent_and_the_remedy_is_to_create_it(
    postgres: Server, url: str, open_database: Callable[[str], object]
) -> None:
    wrong = make_url(url).set(database="nowhere").render_as_string(hide_password=False)
    with pytest.raises(PermanentError, match=r'/nowhere does not exist.*"nowhere".*createdb') as caught:
        open_database(wrong)
    assert postgres.password not in str(caught.value)


def test_a_user_that_may_not_log_in_or_connect_is_permanent(postgres: Server, url: str) -> None:
    name = make_url(url).database
    postgres.execute("CREATE ROLE stranger NOLOGIN PASSWORD 'knows-it'")
    strange = make_url(url).set(username="stranger", password="knows-it").render_as_string(hide_password=False)
    try:
        with pytest.raises(PermanentError, match="not permitted to log in"):
            Store.open(strange)
        postgres.execute("ALTER ROLE stranger LOGIN")
        postgres.execute(f'REVOKE CONNECT ON DATABASE "{name}" FROM PUBLIC')
        with pytest.raises(PermanentError, match=r"refuses the login .*permission denied for database"):
            Store.open(strange)
    finally:
        postgres.execute("DROP ROLE stranger")


def test_a_daemon_that_may_not_log_in_ends_at_once_and_says_why(url: str, tmp_path: Path) -> None:
    wrong = make_url(url).set(password="wrong-one").render_as_string(hide_password=False)
    daemon = DaemonProcess(tmp_path / "home", SENTINEL_STORE__URL=wrong)
    daemon.launch()
    try:
        assert daemon.wait(30) == 1
    finally:
        daemon.end()
    assert "refuses the login" in daemon.log_text()
    assert "wrong-one" not in daemon.log_text()


def test_a_password_that_is_changed_while_a_store_is_open_is_waited_for_and_loses_nothing(
    postgres: Server, url: str
) -> None:
    name = make_url(url).database
    postgres.execute("CREATE ROLE changing LOGIN PASSWORD 'first-one'")
    postgres.execute(f'ALTER DATABASE "{name}" OWNER TO changing')
    store = Store.open(make_url(url).set(username="changing", password="first-one").render_as_string(False))
    try:
        store.register_rank(hello(), "box", START)
        postgres.execute("ALTER ROLE changing PASSWORD 'second-one'")
        postgres.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'changing'")
        with pytest.raises(TemporaryError, match="does not take this now"):
            store.write(entries(start()), critical=True)
        with pytest.raises(TemporaryError, match="refuses the login"):
            store.write(entries(start()), critical=True)
        postgres.execute("ALTER ROLE changing PASSWORD 'first-one'")
        store.write(entries(start()), critical=True)
    finally:
        store.close()
        postgres.execute(f'ALTER DATABASE "{name}" OWNER TO {postgres.user}')
        postgres.execute("REASSIGN OWNED BY changing TO " + postgres.user, name)
        postgres.execute("DROP ROLE changing")
    with History(url) as history:
        (books,) = history.conservation(RUN)
    assert (books["stored"], books["in_flight"]) == (1, 0)


def test_a_user_without_the_right_to_make_tables_is_permanent(postgres: Server, url: str) -> None:
    name = make_url(url).database
    postgres.execute("CREATE ROLE reader LOGIN PASSWORD 'only-reads'")
    limited = make_url(url).set(username="reader", password="only-reads").render_as_string(hide_password=False)
    try:
        with pytest.raises(PermanentError, match=r"sentinel db upgrade`: permission denied"):
            Store.open(limited)
    finally:
        postgres.execute("DROP ROLE reader")
    assert postgres.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'", str(name)) == [(0,)]


def test_the_password_may_come_from_the_drivers_own_file(
    postgres: Server, url: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pgpass"
    file.write_text(f"127.0.0.1:{postgres.port}:*:{postgres.user}:{postgres.password}\n")
    file.chmod(0o600)
    without = url.replace(f":{postgres.password}@", "@")
    assert postgres.password not in without
    with pytest.raises(PermanentError, match="no password supplied"):
        Store.open(without)
    monkeypatch.setenv("PGPASSFILE", str(file))
    Store.open(without).close()


@pytest.mark.parametrize("prefix", ["postgresql", "postgres", "postgresql+psycopg"])
def test_every_usual_name_of_the_database_finds_the_driver(url: str, prefix: str) -> None:
    store = Store.open(re.sub(r"^[^:]+", prefix, url))
    assert store._engine.driver == "psycopg"
    store.close()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (psycopg.errors.DiskFull("no space"), TemporaryError),
        (psycopg.errors.DeadlockDetected("deadlock"), TemporaryError),
        (psycopg.errors.AdminShutdown("terminating"), TemporaryError),
        (psycopg.errors.LockNotAvailable("lock"), TemporaryError),
        (psycopg.errors.UndefinedTable("steps"), PermanentError),
        (psycopg.errors.InvalidPassword("password authentication failed"), PermanentError),
        (psycopg.errors.InvalidAuthorizationSpecification("kein Zutritt"), PermanentError),
        (psycopg.errors.InvalidCatalogName("gibt es nicht"), PermanentError),
        (psycopg.OperationalError('FATAL:  no pg_hba.conf entry for host "10.0.0.1"'), PermanentError),
        (psycopg.OperationalError("FATAL:  sorry, too many clients already"), TemporaryError),
        (psycopg.OperationalError("FATAL:  the database system is starting up"), TemporaryError),
        (psycopg.errors.InsufficientPrivilege("permission denied"), PermanentError),
    ],
)
def test_what_may_pass_is_tried_again_and_what_may_not_is_not(error: Exception, kind: type[Exception]) -> None:
    assert isinstance(engine._plain(error, "postgresql://u@h/d"), kind)

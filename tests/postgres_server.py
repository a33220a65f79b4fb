"""Run a PostgreSQL server of the tests' own: on 127.0.0.1, with passwords, a new database for each test."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

from tests.conftest import missing
from tests.waiting import until

OWNER = "postgres"  # the server refuses to run as root
# Tests lose nothing with the power, so the server need not wait for the disk.
OPTIONS = ("fsync=off", "full_page_writes=off", "max_connections=50", "shared_buffers=16MB", "autovacuum=off")


class Server(NamedTuple):
    """A running server and how to get in."""

    port: int
    user: str
    password: str
    numbers: Iterator[int]

    @contextmanager
    def database(self) -> Iterator[str]:
        """The URL, with its password, of a new and empty database that is gone afterwards."""
        name = f"test_{next(self.numbers)}"
        self.execute(f'CREATE DATABASE "{name}"')
        try:
            yield f"postgresql+psycopg://{self.user}:{self.password}@127.0.0.1:{self.port}/{name}"
        finally:
            self.execute(f'DROP DATABASE "{name}" WITH (FORCE)')

    def execute(self, statement: Any, database: str = "postgres") -> list[tuple[Any, ...]]:
        """One statement in a connection and transaction of its own, or outside of any."""
        connected = psycopg.connect(
            host="127.0.0.1",
            port=self.port,
            user=self.user,
            password=self.password,
            dbname=database,
            autocommit=True,
        )
        with closing(connected) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []


@contextmanager
def running() -> Iterator[Server]:
    """Make a cluster in a temporary folder, start it, end it. Skips, in CI fails, where PostgreSQL is missing."""
    programs = _programs()
    folder = Path(tempfile.mkdtemp(prefix="sentinel-postgres-"))
    try:
        server = Server(_free_port(), "tester", secrets.token_urlsafe(12), count(1))
        _give_to_owner(folder)
        _make_cluster(programs, folder, server)
        with _started(programs, folder, server):
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _programs() -> Path:
    """The folder of Debian's newest PostgreSQL, else of the one on the path."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    found = str(debian[-1]) if debian else shutil.which("initdb")
    if found is None:
        missing("PostgreSQL (initdb) is not installed")
    return Path(found).parent


def _make_cluster(programs: Path, folder: Path, server: Server) -> None:
    password = folder / "password"
    password.write_text(server.password, encoding="utf-8")
    _give_to_owner(password)
    line = [str(programs / "initdb"), "-A", "scram-sha-256", "-U", server.user, f"--pwfile={password}"]
    made = subprocess.run(
        [*line, "-E", "UTF8", "--locale=C.UTF-8", "--no-sync", "-D", str(folder / "data")],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        **_as_owner(),
    )
    assert made.returncode == 0, made.stderr
    password.unlink()


@contextmanager
def _started(programs: Path, folder: Path, server: Server) -> Iterator[None]:
    line = [str(programs / "postgres"), "-D", str(folder / "data"), "-p", str(server.port), "-h", "127.0.0.1"]
    options = [word for option in (*OPTIONS, f"unix_socket_directories={folder}") for word in ("-c", option)]
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen([*line, *options], stdout=out, stderr=out, cwd=folder, **_as_owner())
    try:
        until(lambda: process.poll() is not None or _answers(server), 30.0, "PostgreSQL answers")
        assert process.poll() is None, log.read_text(encoding="utf-8", errors="replace")
        yield
    finally:
        process.send_signal(signal.SIGINT)  # fast shutdown
        process.wait(30)


def _answers(server: Server) -> bool:
    try:
        return server.execute("SELECT 1") == [(1,)]
    except psycopg.OperationalError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _as_owner() -> dict[str, Any]:
    return {"user": OWNER, "group": OWNER, "extra_groups": []} if os.geteuid() == 0 else {}


def _give_to_owner(path: Path) -> None:
    if os.geteuid() == 0:
        shutil.chown(path, OWNER, OWNER)

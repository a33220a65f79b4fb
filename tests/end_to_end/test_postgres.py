"""A whole run whose database is a PostgreSQL server, and the commands that read it afterwards."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests import postgres_server
from tests.end_to_end.jobs import Home
from tests.waiting import until

pytestmark = pytest.mark.service


class Left(NamedTuple):
    """A finished run, and how to ask for it."""

    home: Home
    end: dict[str, Any]
    password: str
    url_file: Path

    def ask(self, *words: str) -> str:
        """What a command prints that gets the URL, with its password, from a file."""
        environ = {**self.home.environ, "SENTINEL_STORE__URL_FILE": str(self.url_file)}
        del environ["SENTINEL_STORE__URL"], environ["PGPASSFILE"]
        line = [sys.executable, "-m", "sentinel.cli", *words]
        done = subprocess.run(line, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Left]:
    """The run itself gets the URL without the password, which the driver takes from a file of its own."""
    folder = tmp_path_factory.mktemp("postgres")
    with postgres_server.running() as server, server.database() as url:
        passwords = folder / "pgpass"
        passwords.write_text(f"127.0.0.1:{server.port}:*:{server.user}:{server.password}\n")
        passwords.chmod(0o600)
        (folder / "url").write_text(url + "\n")
        without = url.replace(f":{server.password}@", "@")
        with Home(folder, SENTINEL_STORE__URL=without, PGPASSFILE=str(passwords)) as home:
            job = home.start("steady", "--break-every", "15")
            job.said("trains")
            until(lambda: _address(home), 60.0, "the daemon has the run")
            job.tell("stop")
            end = job.finish()
            until(lambda: not home.daemons(), 30.0, "the daemon has left")
            yield Left(home, end, server.password, folder / "url")


def test_the_postmortem_reads_the_whole_run(left: Left) -> None:
    found = json.loads(left.ask("postmortem", "--json"))
    assert left.end["broken"], "the fault was injected"
    assert (found["run"]["status"], found["run"]["steps"]) == ("completed", left.end["step"])
    skipped = [incident for incident in found["incidents"] if incident["kind"] == "nonfinite_gradient"]
    assert [incident["first_step"] for incident in skipped][:1] == left.end["broken"][:1]
    (books,) = found["conservation"]
    assert books["produced"] == books["stored"] > left.end["step"]
    assert books["dropped"] == 0


def test_every_step_is_exported(left: Left) -> None:
    rows = [json.loads(line) for line in left.ask("export", "latest", "--format", "jsonl").splitlines()]
    assert [row["step"] for row in rows] == list(range(1, left.end["step"] + 1))


def test_nothing_was_kept_in_a_file(left: Left) -> None:
    assert not left.home.places.database.exists()
    assert left.home.places.daemon_log.exists(), "the home is in use all the same"


def test_the_password_is_shown_nowhere(left: Left) -> None:
    said = [left.ask(*words) for words in (["postmortem"], ["doctor"], ["db", "status"], ["runs"])]
    assert "postgresql+psycopg://tester:***@127.0.0.1" in said[0]
    assert all("tester:***@127.0.0.1" in text for text in said[:3])
    files = [path for path in left.home.path.rglob("*") if path.is_file()]
    written = [path.read_text(errors="replace") for path in files]
    assert not [text for text in (*said, *written) if left.password in text]


def test_a_database_that_goes_away_for_a_while_costs_no_record(tmp_path: Path) -> None:
    with postgres_server.running() as server, server.database() as url:
        (tmp_path / "url").write_text(url)
        name = url.rpartition("/")[2]
        with Home(tmp_path, SENTINEL_STORE__URL_FILE=str(tmp_path / "url")) as home:
            job = home.start("steady")
            job.said("trains")
            daemon = until(lambda: _address(home), 60.0, "the daemon has the run")
            server.execute(f'ALTER DATABASE "{name}" WITH ALLOW_CONNECTIONS false')
            server.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
            until(lambda: _is_ready(daemon) == 503, 20.0, "the daemon says that it cannot write")
            server.execute(f'ALTER DATABASE "{name}" WITH ALLOW_CONNECTIONS true')
            until(lambda: _is_ready(daemon) == 200, 20.0, "the daemon writes again")
            job.tell("stop")
            end = job.finish()
            until(lambda: not home.daemons(), 30.0, "the daemon has left")
            found = json.loads(home.cli("postmortem", "--json").stdout)
    (books,) = found["conservation"]
    assert (found["run"]["status"], found["run"]["steps"]) == ("completed", end["step"])
    assert books["produced"] == books["stored"] > end["step"]
    assert [action for incident in found["incidents"] for action in incident["actions"]] == []


def _is_ready(daemon: str) -> int:
    return httpx.get(f"{daemon}/-/ready", timeout=30.0).status_code


def _address(home: Home) -> str:
    runs = json.loads(home.cli("runs", "--json").stdout)
    return runs[0]["url"] or "" if runs else ""

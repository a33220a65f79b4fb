"""Trouble of the environment is said once, and the loop trains on as if nothing were."""

import json
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel import places
from sentinel.postmortem.report import report
from sentinel.store.database import Store
from sentinel.store.history import History
from tests.end_to_end.jobs import ROOT, START_SECONDS, Home, must_balance
from tests.end_to_end.scripts.troubles import STEPS
from tests.waiting import until

BLOCKED_SECONDS = 0.5
DETACH_SECONDS = 2.0
TROUBLES = {
    # name: what the one line about it must say
    "no port": "http.port",
    "no daemon": "daemon.autostart",
    "newer database": "newer",
    "long home": "",
    "unwritable home": "SENTINEL_HOME",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with Home(tmp_path_factory.mktemp("troubles")) as opened:
        yield opened


@pytest.fixture(scope="module")
def variables(home: Home) -> Iterator[dict[str, dict[str, str]]]:
    """What makes each trouble, on top of the home's own variables."""
    newer = home.folder / "home-newer"
    newer.mkdir()
    Store.open(f"sqlite:///{newer}/sentinel.db").close()
    with sqlite3.connect(newer / "sentinel.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999_future'")
    connection.close()
    (home.folder / "home-file").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        yield {
            "no port": {
                "SENTINEL_HOME": str(home.folder / "home-port"),
                "SENTINEL_HTTP__PORT": str(port),
                "SENTINEL_HTTP__PORTS": "1",
            },
            "no daemon": {
                "SENTINEL_HOME": str(home.folder / "home-alone"),
                "SENTINEL_DAEMON__AUTOSTART": "false",
            },
            "newer database": {"SENTINEL_HOME": str(newer)},
            "long home": {"SENTINEL_HOME": _long(home.folder)},
            "unwritable home": {"SENTINEL_HOME": str(home.folder / "home-file" / "home")},
        }


@pytest.fixture(scope="module")
def told(home: Home, variables: dict[str, dict[str, str]]) -> dict[str, Any]:
    """What the script said of each trouble, with sentinel's lines on stderr beside it."""
    file = home.folder / "troubles.json"
    file.write_text(json.dumps({name: {"variables": variables[name], "says": TROUBLES[name]} for name in variables}))
    job = home.start("troubles", str(file))
    job.finish(120)
    assert "Traceback" not in job.errors
    parts = job.errors.split("== ")
    lines = {part.partition("\n")[0]: part.splitlines()[1:] for part in parts}
    return {name: {**job.said(name), "lines": lines[name]} for name in variables}


@pytest.fixture(scope="module")
def quiet(home: Home) -> str:
    """The digest of the same training without sentinel."""
    code = "from tests.end_to_end.scripts import troubles; print(troubles.clean())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=home.environ, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("name", TROUBLES)
def test_the_loop_trains_on_undisturbed(told: dict[str, Any], quiet: str, name: str) -> None:
    assert told[name]["digest"] == quiet
    assert told[name]["slowest"] < BLOCKED_SECONDS
    assert told[name]["detach_seconds"] < DETACH_SECONDS


@pytest.mark.parametrize("name", TROUBLES)
def test_the_trouble_is_said_once_with_its_remedy(told: dict[str, Any], name: str) -> None:
    greeting, *warnings = told[name]["lines"]
    assert greeting.startswith("sentinel: run ")
    expected = TROUBLES[name]
    if not expected:
        assert warnings == []
        return
    assert len(warnings) == len(set(warnings)), "said twice"
    about = [line for line in warnings if expected in line]
    assert len(about) == 1, warnings
    assert all(line.startswith("sentinel: ") for line in warnings)
    assert len(warnings) <= 2, warnings


def test_without_a_port_the_run_is_watched_without_metrics(home: Home, told, variables) -> None:
    assert told["no port"]["url"] == ""
    _must_be_stored(Path(variables["no port"]["SENTINEL_HOME"]), told["no port"]["run_id"])


def test_a_long_home_works_whole(home: Home, told, variables) -> None:
    path = Path(variables["long home"]["SENTINEL_HOME"])
    assert len(str(path)) >= 200
    assert told["long home"]["url"].startswith("http://127.0.0.1:")
    _must_be_stored(path, told["long home"]["run_id"])


def test_a_newer_database_is_left_alone(home: Home, told, variables) -> None:
    path = Path(variables["newer database"]["SENTINEL_HOME"]) / "sentinel.db"
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM runs").fetchone() == (0,)
    connection.close()


def test_what_no_daemon_took_waits_in_the_spool(home: Home, told, variables) -> None:
    spools = list((Path(variables["no daemon"]["SENTINEL_HOME"]) / "spool").iterdir())
    assert [path.name.partition(".")[0] for path in spools] == [told["no daemon"]["run_id"]]


def test_a_pipe_behind_the_training_ends_with_it(home: Home) -> None:
    """`python train.py | tee log`: the daemon that `attach` started holds no end of the pipe."""
    log = home.folder / "log"
    command = f"'{sys.executable}' -m tests.end_to_end.scripts.piped 2>&1 | tee '{log}'"
    environ = {**home.environ, "SENTINEL_HOME": str(home.folder / "home-piped")}
    began = time.monotonic()
    done = subprocess.run(
        ["sh", "-c", command], cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, timeout=START_SECONDS, check=False
    )
    ended_at = time.monotonic()
    assert done.returncode == 0
    left_at = float(log.read_text().rsplit("left at ", 1)[1])
    assert ended_at - left_at < DETACH_SECONDS + 1.0, f"tee held on; the whole took {ended_at - began:.1f} s"
    socket_path = places.find(environ).socket
    assert socket_path.exists(), "no daemon was running, so this proves nothing"
    until(lambda: not socket_path.exists(), 15.0, "the daemon leaves")


def _long(folder: Path) -> str:
    """A home whose own path has 200 characters."""
    start = str(folder / "home-long")
    rest = 200 - len(start) - 1
    return f"{start}/{'d' * (rest // 2)}/{'e' * (rest - rest // 2 - 1)}"


def _must_be_stored(path: Path, run_id: str) -> None:
    with History(f"sqlite:///{path}/sentinel.db") as history:
        until(lambda: history.run(run_id)["status"] == "completed", 10.0, "the run's end is stored")
        found = report(history, run_id)
    assert found["run"]["steps"] == STEPS
    must_balance(found, dropped=0)

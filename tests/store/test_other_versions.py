"""A database of an older or a newer version: whoever only reads says so, with the remedy; a daemon upgrades."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

from sentinel.cli import COMMANDS, main
from sentinel.store import engine, schema
from tests.daemon.daemon_process import DaemonProcess
from tests.store.building import make_older

OLDER, NEWEST = schema.REVISIONS[0], schema.REVISIONS[-1]
TO_GRAFANA = ("--url", "http://127.0.0.1:1", "--token-file", "token")
# Every command that reads the run database.
READING = {
    "runs": ("runs",),
    "postmortem": ("postmortem",),
    "postmortem --html": ("postmortem", "--html", "page.html"),
    "export": ("export", "latest"),
    "ctl": ("ctl", "latest", "status"),
    "alerts": ("alerts", "list"),
    "alerts of a run": ("alerts", "list", "latest"),
    "dashboards": ("dashboards", "annotate", "latest", *TO_GRAFANA),
}
Tell = Callable[..., str]


@pytest.fixture
def tell(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tell:
    """What a command says, all of it; it must exit as expected and never show the password."""
    monkeypatch.setenv("SENTINEL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("SENTINEL_STORE__URL", url)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token").write_text("glsa_1\n")

    def run(*words: str, code: int = 0) -> str:
        found = main(words)
        printed = capsys.readouterr()
        said = printed.out + printed.err
        assert found == code, said
        password = make_url(url).password
        assert not password or str(password) not in said
        return said

    return run


def test_the_list_of_reading_commands_is_complete() -> None:
    writing, own = {"daemon", "demo"}, {"db", "doctor"}  # these two have tests of their own
    assert set(COMMANDS) - writing - own == {words[0] for words in READING.values()}


@pytest.mark.parametrize("name", READING)
def test_a_reading_command_names_an_older_database_both_revisions_and_the_remedy(
    name: str, url: str, tell: Tell
) -> None:
    make_older(url, OLDER)
    said = tell(*READING[name], code=1)
    for word in (engine.shown(url), repr(OLDER), repr(NEWEST), "`sentinel db upgrade`"):
        assert word in said
    assert schema.revision_of(url) == OLDER, "reading has changed it"


@pytest.mark.parametrize("name", READING)
def test_a_reading_command_names_a_newer_database_and_the_remedy(name: str, url: str, tell: Tell) -> None:
    make_newer(url)
    said = tell(*READING[name], code=1)
    for word in (engine.shown(url), "'0999'", repr(NEWEST), "upgrade sentinel"):
        assert word in said
    assert "db upgrade" not in said
    assert schema.revision_of(url) == "0999"


def test_a_program_is_told_which_error_it_is(url: str, tell: Tell) -> None:
    make_older(url, OLDER)
    error = json.loads(tell("runs", "--json", code=1).splitlines()[0])["error"]
    assert (error["code"], error["kind"]) == (1, "SchemaTooOldError")


def test_the_remedy_helps(url: str, tell: Tell) -> None:
    make_older(url, OLDER)
    tell("runs", code=1)
    assert f"schema {OLDER}" in tell("db", "status")
    assert "`sentinel db upgrade`" in tell("db", "status")
    tell("db", "upgrade")
    assert "kept" in tell("runs")
    assert "kept" in tell("postmortem")


def test_doctor_warns_of_an_older_database_and_fails_for_a_newer_one(url: str, tell: Tell) -> None:
    make_older(url, OLDER)
    assert _database_check(tell("doctor", "--json")) == "warning"
    make_newer(url)
    assert _database_check(tell("doctor", "--json", code=1)) == "failed"


def test_a_daemon_upgrades_an_older_database_when_it_starts(url: str, tell: Tell, tmp_path: Path) -> None:
    make_older(url, OLDER)
    with DaemonProcess(tmp_path / "home", SENTINEL_STORE__URL=url) as daemon:
        assert schema.revision_of(url) == NEWEST
        assert "kept" in tell("runs")
        assert daemon.terminate() == 0


def test_a_daemon_does_not_start_on_a_newer_database_and_says_why(url: str, tmp_path: Path) -> None:
    make_newer(url)
    daemon = DaemonProcess(tmp_path / "home", SENTINEL_STORE__URL=url)
    daemon.launch()
    try:
        assert daemon.wait(30) == 1
    finally:
        daemon.end()
    assert "'0999'" in daemon.log_text()
    assert "upgrade sentinel" in daemon.log_text()


def make_newer(url: str) -> None:
    schema.open_writer(url).dispose()
    with create_engine(url).begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0999'"))


def _database_check(said: str) -> str:
    return next(check["status"] for check in json.loads(said)["checks"] if check["name"] == "database")

"""`sentinel db`: where the database is and at which schema; nothing changes unless it is asked to."""

import json
import sqlite3
from pathlib import Path

import pytest

from sentinel.cli import main
from sentinel.store.schema import REVISIONS


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SENTINEL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["db", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_status_makes_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "status")
    assert (found["state"], found["schema"], found["newest"]) == ("missing", None, REVISIONS[-1])
    assert found["database"] == str(home / "sentinel.db")
    assert not home.exists()
    assert main(["db", "status"]) == 0
    assert "no database yet" in capsys.readouterr().out


def test_upgrade_makes_the_database_and_a_second_one_changes_nothing(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(capsys, "upgrade")
    assert (found["state"], found["before"], found["schema"]) == ("current", None, REVISIONS[-1])
    assert told(capsys, "upgrade")["before"] == REVISIONS[-1]
    assert told(capsys, "status")["state"] == "current"
    assert main(["db", "status"]) == 0
    assert f"schema {REVISIONS[-1]}, the newest" in capsys.readouterr().out


def test_a_newer_database_is_told_by_status_and_refused_by_upgrade(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told(capsys, "upgrade")
    with sqlite3.connect(home / "sentinel.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0999'")
    connection.close()
    assert told(capsys, "status")["state"] == "newer"
    assert main(["db", "upgrade"]) == 1
    assert "upgrade sentinel" in capsys.readouterr().err


def test_the_password_of_a_server_is_not_shown(
    home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "url"
    file.write_text("postgresql://u:hunter2@127.0.0.1:1/d")
    monkeypatch.setenv("SENTINEL_STORE__URL_FILE", str(file))
    for command in (["db", "status"], ["doctor"], ["doctor", "--json"], ["runs"], ["postmortem"]):
        assert main(command) == 1, command
        said = capsys.readouterr()
        assert "127.0.0.1:1/d" in said.out + said.err, command
        assert "hunter2" not in said.out + said.err, command

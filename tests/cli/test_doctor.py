"""`sentinel doctor`: every check, in health and in each trouble that it exists for."""

import json
import os
from importlib import metadata

import pytest

from sentinel import places
from sentinel.cli import doctor_checks, doctor_signals, main
from sentinel.cli.doctor_checks import Check, Status, examine
from tests.daemon.daemon_process import DaemonProcess


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("SENTINEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SENTINEL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def checks(home) -> dict[str, Check]:
    return {check.name: check for check in examine(places.find({}, home))}


def test_a_healthy_machine_passes_and_nothing_is_changed(home, capsys):
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True
    names = {check["name"] for check in told["checks"]}
    assert {"sentinel", "python", "packages", "extra [torch]", "extra [daemon]", "name clash"} <= names
    assert {"settings", "home", "home local", "socket", "database", "memory", "daemon", "gpu"} <= names
    assert not home.exists()


def test_it_prints_one_line_per_check_for_a_person(home, capsys):
    assert main(["doctor"]) == 0
    found, signals = capsys.readouterr().out.split("\nSignals\n")
    assert all(line.split()[0] in ("ok", "warning", "failed") for line in found.splitlines())
    assert "extra [daemon]" in found
    assert all(line.split()[0] in ("available", "absent") for line in signals.splitlines())
    assert len(signals.splitlines()) == len(doctor_signals.find(places.find({}, home)))


def test_the_other_package_called_sentinel_is_found(home, monkeypatch):
    class Other:
        version = "1.0.0"
        files = ("sentinel/__init__.py",)

    monkeypatch.setattr(metadata, "distributions", lambda **names: [Other()] if names == {"name": "sentinel"} else [])
    clash = checks(home)["name clash"]
    assert clash.status is Status.FAILED
    assert "pip uninstall sentinel" in clash.text


def test_a_missing_extra_says_what_is_lost_and_how_to_get_it(home, monkeypatch):
    real = metadata.version

    def without_torch(name: str) -> str:
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", without_torch)
    extra = checks(home)["extra [torch]"]
    assert extra.status is Status.WARNING
    assert "pip install 'train-sentinel[torch]'" in extra.text


def test_a_home_that_cannot_be_written_fails(home, capsys):
    home.parent.joinpath("home").write_text("a file")
    assert checks(home)["home"].status is Status.FAILED
    assert main(["doctor"]) == 1
    assert "SENTINEL_HOME" in capsys.readouterr().out


def test_a_home_on_a_network_file_system_is_a_warning(home, monkeypatch):
    monkeypatch.setattr(doctor_checks, "is_network", lambda path: True)
    monkeypatch.setattr(doctor_checks, "file_system", lambda path: "nfs4")
    local = checks(home)["home local"]
    assert local.status is Status.WARNING
    assert "nfs4" in local.text


def test_settings_that_cannot_be_used_fail_with_the_key(home, monkeypatch):
    monkeypatch.setenv("SENTINEL_HTTP__PRT", "1")
    found = checks(home)["settings"]
    assert found.status is Status.FAILED
    assert "http.port" in found.text


def test_a_socket_path_that_is_too_long_fails(home):
    long = places.Places(home, home / ("x" * 100))
    found = {check.name: check for check in examine(long)}["socket"]
    assert found.status is Status.FAILED
    assert "107" in found.text


def test_a_running_daemon_is_reachable_and_a_dead_one_is_told(home):
    with DaemonProcess(home) as daemon:
        found = {check.name: check for check in examine(daemon.places)}
        assert found["daemon"] == Check("daemon", Status.OK, f"reachable at {daemon.url}")
        assert "holds 0 runs" in found["database"].text
        daemon.kill()
        found = {check.name: check for check in examine(daemon.places)}
        assert found["daemon"].status is Status.WARNING

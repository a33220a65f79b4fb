"""Where things live: found without touching the disk, private, and never a socket path that is too long."""

import os
import stat
from pathlib import Path

import pytest

from sentinel import places
from sentinel.errors import SettingsError


def test_an_argument_beats_sentinel_home_beats_the_state_directory(tmp_path) -> None:
    environ = {"SENTINEL_HOME": "/from/variable", "XDG_STATE_HOME": "/state", "HOME": "/me"}
    assert places.find(environ, tmp_path).home == tmp_path
    assert places.find(environ).home == Path("/from/variable")
    del environ["SENTINEL_HOME"]
    assert places.find(environ).home == Path("/state/sentinel")
    assert places.find({"HOME": "/me"}).home == Path("/me/.local/state/sentinel")


def test_finding_touches_nothing(tmp_path) -> None:
    found = places.find({"XDG_RUNTIME_DIR": str(tmp_path)}, tmp_path / "home")
    assert found.spool("run", 0, "n").name == "run.0.n.spool"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [10, 200, 2000])
def test_a_long_home_has_a_short_socket(tmp_path, length) -> None:
    home = "/" + "x" * length
    for runtime in ("", "/run/user/1000", "/" + "y" * 150):
        found = places.find({"XDG_RUNTIME_DIR": runtime}, home)
        assert len(os.fsencode(found.socket)) <= 107


def test_two_homes_have_two_sockets_and_one_home_has_one() -> None:
    first, second = places.find({}, "/a"), places.find({}, "/b")
    assert first.socket != second.socket
    assert first.socket == places.find({}, "/a").socket
    assert first.lock != first.socket


def test_a_runtime_directory_that_cannot_hold_a_socket_is_passed_over(tmp_path) -> None:
    short = places.find({"XDG_RUNTIME_DIR": "/tmp"}, "/h").runtime
    assert short == Path("/tmp/sentinel")
    long = tmp_path / ("r" * 80)
    long.mkdir()
    assert long not in places.find({"XDG_RUNTIME_DIR": str(long)}, "/h").runtime.parents
    assert places.find({"XDG_RUNTIME_DIR": "/missing"}, "/h").runtime.name == f"sentinel-{os.getuid()}"


def test_a_private_directory_is_made_and_accepted_again(tmp_path) -> None:
    for _ in range(2):
        places.make_private(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_directory_that_others_may_enter_is_refused(tmp_path, mode) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(SettingsError, match="0700"):
        places.make_private(tmp_path)


def test_a_link_to_somewhere_else_is_refused(tmp_path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(SettingsError, match="directory of yours"):
        places.make_private(tmp_path / "link")


def test_the_file_system_of_a_path_that_does_not_exist_yet_is_its_parents(tmp_path) -> None:
    assert places.file_system(tmp_path / "not" / "yet") == places.file_system(tmp_path) != ""


def test_a_network_file_system_is_recognised(tmp_path, monkeypatch) -> None:
    mounts = f"disk / ext4 rw 0 0\nserver:/x {tmp_path}/my\\040share nfs4 rw 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda self, **how: mounts)
    (tmp_path / "my share").mkdir()
    (tmp_path / "my share too").mkdir()
    assert places.is_network(tmp_path / "my share" / "home")
    assert not places.is_network(tmp_path / "my share too")

"""The launcher starts a daemon beside the trainer, cleanly, a bounded number of times, and says why one ended."""

import os
import stat
import sys
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from sentinel.client import launch
from sentinel.client.launch import Launcher, daemon_environment
from sentinel.testing import FakeDaemon
from tests.client.recording import make_link, short_places
from tests.client.test_outbox import critical
from tests.waiting import until


class Bench:
    """A launcher whose interpreter is a script of ours that writes down how it was started."""

    def __init__(self, places, monkeypatch) -> None:
        self.places = places
        self.troubles: list[tuple[str, str]] = []
        self.script = places.home.parent / "python"
        self.environ = {**os.environ, "MARK": "1"}
        monkeypatch.setattr(sys, "executable", str(self.script))
        self.launcher = Launcher(places, None, self.environ, self.told)

    def told(self, what: str, text: str) -> None:
        self.troubles.append((what, text))

    def becomes(self, *lines: str) -> None:
        self.script.write_text("\n".join(["#!/bin/sh", 'echo "$@" >> "$0.arguments"', *lines]) + "\n")
        self.script.chmod(0o755)

    def starts(self) -> list[str]:
        written = Path(f"{self.script}.arguments")
        return written.read_text().splitlines() if written.exists() else []

    def run_until_it_ends(self, now: float) -> None:
        self.launcher.start(now)
        until(lambda: self.launcher.look(now) or not self.launcher.starting(now))


@pytest.fixture
def bench(monkeypatch):
    with short_places() as places:
        places.home.parent.mkdir(exist_ok=True)
        yield Bench(places, monkeypatch)


def test_the_daemon_gets_a_session_of_its_own_and_none_of_our_descriptors(bench) -> None:
    facts = bench.places.home.parent / "facts"
    bench.becomes(
        f'ls -l /proc/$$/fd > "{facts}.fd"',
        f'readlink /proc/$$/cwd > "{facts}.cwd"',
        f'env > "{facts}.env"',
        "echo hello from the daemon",
        f'touch "{facts}"',
        "exec sleep 60",
    )
    inherited, other = os.pipe()
    os.set_inheritable(inherited, True)
    try:
        bench.launcher.start(0.0)
        until(facts.exists)
        child = bench.launcher._process
        assert os.getsid(child.pid) == child.pid
        assert Path(f"{facts}.cwd").read_text().strip() == "/"
        assert "MARK=1" in Path(f"{facts}.env").read_text()
        assert f"{inherited} -> pipe" not in Path(f"{facts}.fd").read_text()
        assert "0 -> /dev/null" in Path(f"{facts}.fd").read_text()
        assert bench.places.daemon_log.read_text() == "hello from the daemon\n"
        assert stat.S_IMODE(bench.places.home.stat().st_mode) == 0o700
        assert bench.starts() == [f"-m sentinel.cli daemon --auto --home {bench.places.home}"]
    finally:
        os.close(inherited)
        os.close(other)
        bench.launcher._process.kill()
        bench.launcher._process.wait()


def test_the_settings_file_is_handed_on_by_its_whole_path(bench, monkeypatch, tmp_path) -> None:
    bench.becomes("exit 0")
    monkeypatch.chdir(tmp_path)
    bench.launcher = Launcher(bench.places, "sentinel.toml", bench.environ, bench.told)
    bench.run_until_it_ends(0.0)
    assert bench.starts()[0].endswith(f"--settings {tmp_path / 'sentinel.toml'}")


def test_what_a_rank_is_told_the_daemon_is_not() -> None:
    ranks = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "CUDA_VISIBLE_DEVICES": "0",
        "COVERAGE_PROCESS_START": "x",
    }
    assert daemon_environment({**ranks, "PYTHONPATH": "/a", "HOME": "/h"}) == {"PYTHONPATH": "/a", "HOME": "/h"}


def test_one_daemon_at_a_time(bench) -> None:
    bench.becomes("exec sleep 60")
    bench.launcher.start(0.0)
    first = bench.launcher._process
    until(bench.starts)
    bench.launcher.start(100.0)
    assert bench.launcher._process is first
    assert bench.launcher.starting(1.0)
    assert not bench.launcher.starting(100.0), "a daemon that is mute for so long is not waited for"
    first.kill()
    first.wait()


def test_a_daemon_that_keeps_dying_is_started_five_times_with_growing_pauses(bench) -> None:
    bench.becomes("echo the schema is newer >&2", "exit 1")
    began = []
    for now in range(200):
        before = len(bench.starts())
        bench.run_until_it_ends(float(now))
        if len(bench.starts()) > before:
            began.append(now)
    assert len(began) == launch.MAX_STARTS
    pauses = [later - earlier for earlier, later in pairwise(began)]
    assert pauses == sorted(pauses)
    assert pauses[-1] >= 8
    assert bench.launcher.hopeless
    assert bench.troubles[0] == ("daemon_ended", "the daemon ended with code 1: the schema is newer")
    assert bench.troubles[-1][0] == "daemon"
    assert "5 times" in bench.troubles[-1][1]


def test_the_last_line_of_its_log_says_why_it_ended(bench) -> None:
    bench.places.home.mkdir()
    bench.places.daemon_log.write_text("an older daemon's words\n")
    bench.becomes("echo starting", "echo the database has schema 9, this version knows 1 >&2", "echo", "exit 1")
    bench.run_until_it_ends(0.0)
    assert bench.troubles == [
        ("daemon_ended", "the daemon ended with code 1: the database has schema 9, this version knows 1")
    ]


def test_a_json_log_line_is_told_in_plain_words(bench) -> None:
    bench.becomes("""echo '{"event": "cannot open the store", "error": "schema 9", "level": "error"}'""", "exit 1")
    bench.run_until_it_ends(0.0)
    assert bench.troubles[0][1] == "the daemon ended with code 1: cannot open the store: schema 9"


def test_a_killed_daemon_is_said_to_be_killed(bench) -> None:
    bench.becomes("echo all is well", "kill -9 $$")
    bench.run_until_it_ends(0.0)
    assert bench.troubles[0][1].startswith("the daemon was ended by signal 9 (Killed)")


@pytest.mark.parametrize("code", [0, 3])
def test_leaving_and_finding_another_daemon_are_no_trouble(bench, code) -> None:
    bench.becomes(f"exit {code}")
    bench.run_until_it_ends(0.0)
    assert len(bench.starts()) == 1
    assert bench.troubles == []


def test_no_zombie_is_left(bench) -> None:
    bench.becomes("exit 0")
    bench.launcher.start(0.0)
    pid = bench.launcher._process.pid
    until(lambda: bench.launcher.look(0.0) or not psutil.pid_exists(pid))
    assert bench.launcher._process is None


def test_without_the_daemons_packages_the_remedy_is_told_and_nothing_starts(bench, monkeypatch) -> None:
    bench.becomes("exit 0")
    monkeypatch.setattr(launch, "_NEEDED", ("sqlalchemy", "surely_not_installed"))
    bench.launcher.start(0.0)
    assert bench.starts() == []
    assert bench.launcher.hopeless
    assert "surely_not_installed" in bench.troubles[0][1]
    assert "train-sentinel[daemon]" in bench.troubles[0][1]


def test_an_unwritable_home_does_not_keep_the_daemon_from_starting(bench) -> None:
    bench.becomes("exit 0")
    bench.places.home.write_text("a file in the way")
    bench.run_until_it_ends(0.0)
    assert len(bench.starts()) == 1


def test_an_interpreter_that_cannot_be_started_is_told(bench) -> None:
    bench.launcher.start(0.0)
    assert "cannot be started" in bench.troubles[0][1]
    assert bench.launcher.hopeless


def test_the_link_starts_a_daemon_and_finds_it(bench) -> None:
    bench.becomes("exec sleep 60")
    link, outbox, recorder = make_link(bench.places, starts=True)
    outbox.push(critical())
    link.start()
    until(bench.starts)
    child = link._approach._launcher._process
    try:
        with FakeDaemon(bench.places.socket):
            until(lambda: link.connected)
            until(lambda: outbox.settled)
            link.close(2.0)
        assert len(bench.starts()) == 1
        assert recorder.troubles == {}
        assert child.poll() is None, "the daemon outlives the link"
    finally:
        child.kill()
        child.wait()


def test_a_daemon_that_was_started_and_died_is_started_again(bench) -> None:
    bench.becomes("echo boom >&2", "exit 1")
    link, _, recorder = make_link(bench.places, starts=True)
    link.start()
    until(lambda: len(bench.starts()) >= 2)
    until(lambda: "daemon_ended" in recorder.troubles)
    assert recorder.troubles["daemon_ended"].endswith("boom")
    began = time.monotonic()
    link.close(30.0)
    assert time.monotonic() - began < 10, "the end of training waited for a daemon that cannot start"

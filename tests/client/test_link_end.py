"""What the link leaves behind: nothing but the critical messages that nobody has acknowledged."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sentinel.client import keeper as keeper_module
from sentinel.records import Ack, Hello, RunStart
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import Reason
from tests.client.recording import make_link, short_places, spooled
from tests.client.test_outbox import critical, lasting, run_start, telemetry
from tests.waiting import until


@pytest.fixture
def places():
    with short_places() as found:
        yield found


@pytest.fixture
def linked(places):
    """(link, outbox, recorder), started; closed at the end."""
    link, outbox, recorder = make_link(places)
    outbox.push(run_start())
    link.start()
    yield link, outbox, recorder
    link.close(1.0)


def test_without_any_daemon_the_run_is_told_once_and_critical_messages_are_on_disk(places, linked) -> None:
    link, outbox, recorder = linked
    until(lambda: "daemon" in recorder.troubles)
    assert "sentinel daemon" in recorder.troubles["daemon"]
    outbox.push(critical())
    path = places.spool("run-1", 0, "n1")
    until(lambda: path.exists() and len(spooled(path)) == 3)
    found = spooled(path)
    assert [type(message) for message in found] == [Hello, RunStart, Ack]
    assert [message.seq for message in found[1:]] == [1, 2]
    assert link.record_kept
    assert not link.connected


def test_the_spool_goes_when_the_daemon_has_its_content(places, linked) -> None:
    link, outbox, _ = linked
    path = places.spool("run-1", 0, "n1")
    until(path.exists)
    with FakeDaemon(places.socket) as daemon:
        until(lambda: outbox.settled)
        until(lambda: len(spooled(path)) == 1)
        assert len(daemon.of(RunStart)) == 1
        link.close(2.0)
    assert not path.exists()


def test_a_daemon_that_acknowledges_at_once_needs_no_spool(places, monkeypatch) -> None:
    monkeypatch.setattr(keeper_module, "GRACE_SECONDS", 5.0)  # what is "at once" on a loaded machine
    link, outbox, _ = make_link(places)
    with FakeDaemon(places.socket):
        link.start()
        until(lambda: link.connected)
        for _ in range(50):
            outbox.push(critical())
            until(lambda: outbox.settled)
        link.close(2.0)
    assert not places.spools.exists()


def test_a_connected_daemon_that_does_not_acknowledge_is_not_trusted(places) -> None:
    link, outbox, _ = make_link(places)
    with FakeDaemon(places.socket, ack=False) as daemon:
        link.start()
        outbox.push(critical())
        daemon.wait_for(lambda: daemon.of(Ack))
        path = places.spool("run-1", 0, "n1")
        until(path.exists)
        link.close(0.2)
        assert [type(message) for message in spooled(path)] == [Hello, Ack]


def test_nobody_keeps_a_record_without_daemon_and_with_an_unwritable_home(places) -> None:
    places.home.parent.mkdir(exist_ok=True)
    places.home.write_text("a file where the home should be")
    link, outbox, recorder = make_link(places)
    assert link.record_kept
    link.start()
    outbox.push(critical())
    until(lambda: not link.record_kept)
    until(lambda: "spool" in recorder.troubles)
    assert str(places.spools) in recorder.troubles["spool"]
    with FakeDaemon(places.socket) as daemon:
        daemon.wait_for(lambda: daemon.of(Ack))
        assert link.record_kept
        link.close(2.0)


def test_a_critical_message_that_cannot_be_written_down_does_not_keep_the_disk_busy(
    places, linked, monkeypatch
) -> None:
    link, outbox, recorder = linked
    path = places.spool("run-1", 0, "n1")
    until(path.exists)
    real, synced = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(descriptor) or real(descriptor))
    outbox.push(Ack(0, 1.0, "c", "failed", Reason.ERROR, text="\udcff"))
    until(lambda: synced)
    for _ in range(5):
        tries = link._approach._failures
        link._approach.next_try = 0.0
        outbox.push(lasting())  # wakes the thread
        until(lambda before=tries: link._approach._failures > before)
    outbox.push(critical())
    until(lambda: len(spooled(path)) == 3)
    assert len(synced) <= 3
    assert "spool" not in recorder.troubles


def test_close_delivers_what_is_left_and_leaves_nothing_behind(places) -> None:
    def descriptors() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    with FakeDaemon(places.socket) as daemon:
        before, threads = descriptors(), threading.active_count()
        for number in range(1, 11):
            link, outbox, _ = make_link(places, nonce=f"n{number}")
            outbox.push(run_start())
            link.start()
            outbox.push(telemetry())
            link.close(5.0)
            daemon.wait_for(lambda wanted=number: len(daemon.of(RunStart)) == wanted)
            assert outbox.settled
        until(lambda: threading.active_count() == threads)
        until(lambda: descriptors() == before)
    assert list(places.spools.glob("*")) == []


def test_close_without_a_daemon_does_not_wait(places) -> None:
    link, outbox, recorder = make_link(places)
    outbox.push(critical())
    link.start()
    began = time.monotonic()
    link.close(30.0)
    assert time.monotonic() - began < 10
    assert places.spool("run-1", 0, "n1").exists()
    assert "daemon" in recorder.troubles


def test_close_gives_a_stopped_daemon_no_more_than_it_was_told(places, linked) -> None:
    link, outbox, _ = linked
    with FakeDaemon(places.socket) as daemon:
        until(lambda: link.connected)
        daemon.pause_reading()
        outbox.push(critical())
        began = time.monotonic()
        link.close(0.3)
        assert 0.2 < time.monotonic() - began < 5
        assert [type(message) for message in spooled(places.spool("run-1", 0, "n1"))][-1] is Ack


def test_a_forked_child_holds_none_of_our_descriptors(places, linked) -> None:
    link, _, _ = linked
    path = places.spool("run-1", 0, "n1")
    until(path.exists)
    with FakeDaemon(places.socket) as daemon:
        until(lambda: link.connected)
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            link.abandon()
            held = [os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()]
            link.close(1.0)
            os.write(theirs, b"held" if str(path) in held or link.connected else b"free")
            signal.pause()
            os._exit(0)
        try:
            assert os.read(ours, 4) == b"free"
            link.close(2.0)
            daemon.wait_for(lambda: not daemon._open)  # the end of our connection is seen although the child lives
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(ours)
            os.close(theirs)


CRASHING = """
import os, signal, sys
from pathlib import Path
from sentinel.places import Places
from tests.client.recording import make_link
from tests.client.test_outbox import critical, run_start
link, outbox, _ = make_link(Places(Path(sys.argv[1]), Path(sys.argv[2])))
link.start()
outbox.push(run_start())
outbox.push(critical())
print("pushed", flush=True)
signal.pause()
"""


def test_a_killed_trainer_leaves_its_critical_messages_on_disk(places) -> None:
    command = [sys.executable, "-c", CRASHING, str(places.home), str(places.runtime)]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(Path.cwd())})
    try:
        assert trainer.stdout.readline() == b"pushed\n"
        path = places.spool("run-1", 0, "n1")
        until(lambda: path.exists() and len(spooled(path)) == 3)
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()
    assert trainer.returncode == -signal.SIGKILL
    assert [type(message) for message in spooled(path)] == [Hello, RunStart, Ack]

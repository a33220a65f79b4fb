"""The link delivers, survives whatever the daemon does, and is never in the way."""

import os
import threading
import time

import pytest

from sentinel import wire
from sentinel.client import connection as connection_module
from sentinel.client import link as link_module
from sentinel.records import Ack, Gap, Heartbeat, Hello, Mark, RunStart, StepRecord, Welcome
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import Action, DropReason, Mode, Reason
from tests.client.recording import Recorder, make_link, short_places
from tests.client.test_outbox import critical, numbers, run_start, telemetry
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


def everything_arrived(daemon: FakeDaemon, last: int):
    """Each number up to `last` arrived, in messages or gaps."""

    def arrived() -> bool:
        kept = [m for m in daemon.messages if not isinstance(m, Hello | Heartbeat)]
        return set(numbers(kept)) >= set(range(1, last + 1))

    return arrived


def test_messages_arrive_in_order_and_are_acknowledged(places, linked) -> None:
    link, outbox, recorder = linked
    with FakeDaemon(places.socket) as daemon:
        until(lambda: link.connected)
        for step in range(1, 501):
            outbox.push(telemetry(step))
        daemon.wait_for(lambda: len(daemon.of(StepRecord)) == 500)
        assert [record.step for record in daemon.of(StepRecord)] == list(range(1, 501))
        until(lambda: outbox.settled)
        assert daemon.errors == []
        assert recorder.names() == ["welcome"]
        assert daemon.wait_for(lambda: daemon.of(Heartbeat))
        assert link.record_kept


def test_an_urgent_message_does_not_wait_for_company(places, linked) -> None:
    link, outbox, _ = linked
    with FakeDaemon(places.socket) as daemon:
        until(lambda: link.connected)
        waits = []
        for number in range(1, 21):
            began = time.monotonic()
            outbox.push(critical())
            daemon.wait_for(lambda wanted=number: len(daemon.of(Ack)) == wanted)
            waits.append(time.monotonic() - began)
        assert sorted(waits)[10] < link_module.TELEMETRY_SECONDS


def test_commands_words_marks_and_rosters_reach_the_run(places, linked) -> None:
    link, outbox, recorder = linked
    with FakeDaemon(places.socket) as daemon:
        until(lambda: link.connected)

        def obey() -> None:
            until(lambda: "command" in recorder.names())
            outbox.push(Ack(0, 1.0, "command-1", "prepared", Reason.OK))
            until(lambda: "word" in recorder.names())
            outbox.push(Ack(0, 1.0, "command-1", "applied", Reason.OK, target_step=7))

        rank = threading.Thread(target=obey)
        rank.start()
        ack = daemon.turn(daemon.command(Action.ROLLBACK, apply_at=9, target_step=7))
        rank.join()
        assert (ack.state, ack.target_step) == ("applied", 7)
        daemon.send(Mark(0, 3))
        daemon.roster(1, 1)
        until(lambda: "roster" in recorder.names())
        assert recorder.names() == ["welcome", "command", "word", "mark", "roster"]


def test_a_killed_daemon_that_returns_gets_the_rest_once(places, linked) -> None:
    link, outbox, recorder = linked
    with FakeDaemon(places.socket) as daemon:
        until(lambda: link.connected)
        for step in range(100):
            outbox.push(telemetry(step))
        daemon.wait_for(lambda: len(daemon.of(StepRecord)) >= 50)
        until(lambda: outbox.settled)
        daemon.kill()
        until(lambda: not link.connected)
        until(lambda: "lost" in recorder.names())
        for step in range(100):
            outbox.push(telemetry(step))
    with FakeDaemon(places.socket, stored_seq=101) as daemon:
        daemon.wait_for(lambda: numbers(daemon.of(StepRecord))[-1:] == [201])
        assert numbers(daemon.of(StepRecord)) == list(range(102, 202))
        assert daemon.errors == []
        assert daemon.of(RunStart) == []


def test_a_daemon_with_an_empty_database_gets_the_run_start_again(places, linked) -> None:
    link, outbox, _ = linked
    with FakeDaemon(places.socket):
        until(lambda: link.connected)
        outbox.push(telemetry())
        until(lambda: outbox.settled)
    until(lambda: not link.connected)
    outbox.push(telemetry())
    with FakeDaemon(places.socket) as fresh:
        fresh.wait_for(everything_arrived(fresh, 3))
        assert [start.seq for start in fresh.of(RunStart)] == [1]
        assert fresh.of(Gap) == [Gap(2, 2, DropReason.UNEXPLAINED)]


def test_a_stopped_daemon_blocks_nobody_and_every_drop_is_announced(places, linked) -> None:
    link, outbox, _ = linked
    with FakeDaemon(places.socket) as daemon:
        until(lambda: link.connected)
        daemon.pause_reading()
        until(lambda: outbox.settled)
        slowest = 0.0
        padding = {f"value{number}": float(number) for number in range(60)}
        for step in range(5000):
            began = time.perf_counter()
            outbox.push(StepRecord(0, 0, step, 1.0, "applied", reported=padding))
            slowest = max(slowest, time.perf_counter() - began)
        until(lambda: outbox.dropped)
        assert len(outbox) <= 1024
        daemon.resume_reading()
        daemon.wait_for(everything_arrived(daemon, outbox.last_seq), 20.0)
        until(lambda: outbox.settled)
        assert sum(gap.count for gap in daemon.of(Gap)) == sum(outbox.dropped.values()) > 0
        assert daemon.errors == []
        assert slowest < 0.5, "a push waited for the daemon"


def test_a_daemon_that_never_greets_is_left_and_tried_again(places, monkeypatch) -> None:
    monkeypatch.setattr(link_module, "WELCOME_SECONDS", 0.2)
    link, _, recorder = make_link(places)
    with FakeDaemon(places.socket, silent=True) as daemon:
        link.start()
        daemon.wait_for(lambda: daemon.connections >= 3)
        assert "is it stopped" in recorder.troubles["daemon"]
        assert "welcome" not in recorder.names()
        link.close(0.1)


@pytest.mark.parametrize(
    "nonsense",
    [b"\xff" * 64, b"\x00\x00\x00\x05hello", wire.encode(Welcome(1, "r", 1, 0, "", True, Mode.OFF))[:-1] + b"\xc1"],
)
def test_bytes_that_are_no_messages_cost_the_connection_only(places, linked, nonsense) -> None:
    link, outbox, recorder = linked
    with FakeDaemon(places.socket) as daemon:
        until(lambda: link.connected)
        daemon.send_bytes(nonsense)
        daemon.wait_for(lambda: daemon.connections >= 2)
        until(lambda: link.connected)
        outbox.push(telemetry())
        until(lambda: outbox.settled)
        assert "make no sense" in recorder.troubles["wire"]


def test_a_daemon_of_another_version_is_refused_and_named(places) -> None:
    link, _, recorder = make_link(places)
    with FakeDaemon(places.socket, silent=True) as daemon:
        link.start()
        daemon.wait_for(lambda: daemon.of(Hello))
        daemon.send(Welcome(wire.VERSION + 1, "run-1", 1, 0, "", True, Mode.PROTECT))
        until(lambda: "daemon" in recorder.troubles)
        assert f"version {wire.VERSION + 1}" in recorder.troubles["daemon"]
        assert not link.connected
        link.close(0.1)


def test_what_cannot_be_sent_becomes_a_counted_gap(places, linked) -> None:
    link, outbox, recorder = linked
    with FakeDaemon(places.socket) as daemon:
        until(lambda: link.connected)
        outbox.push(Ack(0, 1.0, "x" * (1 << 20), "prepared", Reason.OK))
        outbox.push(StepRecord(0, 0, 1, 1.0, "applied", loss="not a number"))
        outbox.push(telemetry(7))
        daemon.wait_for(lambda: [record.step for record in daemon.of(StepRecord)] == [7])
        assert daemon.of(Gap) == [Gap(2, 2, DropReason.TOO_LARGE), Gap(3, 3, DropReason.TOO_LARGE)]
        assert outbox.dropped == {"too_large": 2}
        until(lambda: "wire" in recorder.troubles)
        assert daemon.connections == 1


class Raising(Recorder):
    def on_mark(self, mark) -> None:
        raise RuntimeError("a bug of ours")


def test_an_error_of_our_own_is_told_and_the_thread_goes_on(places) -> None:
    link, outbox, recorder = make_link(places, receiver=Raising)
    link.start()
    with FakeDaemon(places.socket) as daemon:
        until(lambda: link.connected)
        daemon.send(Mark(0, 1))
        until(lambda: "link" in recorder.troubles)
        assert "a bug of ours" in recorder.troubles["link"]
        until(lambda: link.connected and daemon.connections == 2)
        outbox.push(telemetry())
        daemon.wait_for(lambda: daemon.of(StepRecord))
        link.close(2.0)


class Hopeless(Recorder):
    def on_welcome(self, welcome) -> None:
        raise RuntimeError("always")


def test_after_twenty_errors_of_our_own_the_link_gives_up_and_the_loop_goes_on(places, monkeypatch) -> None:
    monkeypatch.setattr("sentinel.client.approach.MAX_RETRY_SECONDS", 0.01)
    link, outbox, recorder = make_link(places, receiver=Hopeless)
    with FakeDaemon(places.socket) as daemon:
        link.start()
        thread = link._thread
        until(lambda: not thread.is_alive(), 20.0)
        assert daemon.connections == link_module.MAX_ERRORS
        assert "gave up" in recorder.troubles["gave_up"]
        for _ in range(3000):
            outbox.push(telemetry())
        outbox.push(critical())
        assert len(outbox) <= 1024
        assert not link.connected
        link.close(1.0)


def test_a_process_without_descriptors_trains_on(places, monkeypatch) -> None:
    def no_more(*arguments):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(link_module.socket, "socketpair", no_more)
    link, outbox, recorder = make_link(places)
    link.start()
    assert "Too many open files" in recorder.troubles["link"]
    outbox.push(critical())
    link.close(1.0)
    assert not link.connected


def test_a_socket_of_another_user_is_not_spoken_to(places, monkeypatch) -> None:
    monkeypatch.setattr(connection_module, "_CREDENTIALS", OtherUser())
    link, _, recorder = make_link(places)
    with FakeDaemon(places.socket) as daemon:
        link.start()
        daemon.wait_for(lambda: daemon.connections >= 2)
        assert "belongs to user" in recorder.troubles["daemon"]
        assert daemon.of(Hello) == []
        link.close(0.1)


class OtherUser:
    size = 12

    def unpack(self, raw: bytes) -> tuple[int, int, int]:
        return 1, os.geteuid() + 1, 1


def test_a_runtime_folder_that_others_may_enter_is_refused(places) -> None:
    places.runtime.mkdir(parents=True)
    places.runtime.chmod(0o777)
    link, _, recorder = make_link(places)
    link.start()
    until(lambda: "daemon" in recorder.troubles)
    assert "0700" in recorder.troubles["daemon"]
    link.close(0.5)

"""The double of the daemon that users get for their own tests."""

import socket

import pytest

from sentinel import wire
from sentinel.records import Ack, Gap, Heartbeat, Hello, PhaseNote, Stored, Welcome, Word
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import Action, DropReason, Quality, Reason
from tests.client.recording import short_places


class Rank:
    """A client that does exactly what it is told."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(5.0)
        self.socket.connect(str(daemon.path))
        self.reader = wire.FrameReader()
        self.say(Hello(wire.VERSION, "run-1", 0, 1, "n1", 1, 1.0, 0))

    def say(self, *messages) -> None:
        self.socket.sendall(b"".join(map(wire.encode, messages)))

    def hear(self) -> list:
        return [wire.decode_from_daemon(body) for body in self.reader.feed(self.socket.recv(65536))]


@pytest.fixture
def daemon():
    with short_places() as places, FakeDaemon(places.socket) as made:
        yield made


@pytest.fixture
def rank(daemon):
    made = Rank(daemon)
    yield made
    made.socket.close()


def note(seq: int) -> PhaseNote:
    return PhaseNote(seq, 1.0, 1, "eval", True)


def ack(seq: int, state: str, **more) -> Ack:
    return Ack(seq, 1.0, "command-1", state, Reason.OK, **more)


def test_it_greets_and_acknowledges(daemon, rank) -> None:
    greeting, *_ = rank.hear()
    assert isinstance(greeting, Welcome)
    assert greeting.may_act
    rank.say(note(1), Gap(2, 5, DropReason.OUTBOX_FULL), note(6))
    heard = []
    while Stored(6) not in heard:
        heard += rank.hear()
    assert daemon.errors == []


def test_a_hole_that_no_gap_explains_is_an_error(daemon, rank) -> None:
    rank.say(note(1), note(3))
    daemon.wait_for(lambda: daemon.errors)
    assert daemon.errors == ["number 3 came after 1, and no gap explains the hole"]


def test_bytes_that_are_no_message_are_an_error(daemon, rank) -> None:
    rank.socket.sendall(b"\xff" * 8)
    daemon.wait_for(lambda: daemon.errors)
    assert "announces" in daemon.errors[0]


def test_a_turn_commits_to_the_newest_snapshot_that_will_do(daemon, rank) -> None:
    candidates = [(9, Quality.PENDING, "a"), (6, Quality.GOOD, "b"), (3, Quality.GOOD, "c")]
    daemon.wait_for(lambda: daemon.of(Hello))
    rank.say(ack(1, "prepared", candidates=candidates), ack(2, "applied", target_step=6))
    final = daemon.turn(daemon.command(Action.ROLLBACK, apply_at=12, onset_step=10))
    assert (final.state, final.target_step) == ("applied", 6)
    heard = []
    while not any(isinstance(message, Word) for message in heard):
        heard += rank.hear()
    assert heard[-1] == Word("command-1", True, Reason.OK, 6)


def test_a_turn_that_is_refused_or_aborted_says_so(daemon, rank) -> None:
    daemon.wait_for(lambda: daemon.of(Hello))
    rank.say(ack(1, "refused"))
    assert daemon.turn(daemon.command(Action.PAUSE, apply_at=3)).state == "refused"
    again = daemon.command(Action.PAUSE, apply_at=3, id="command-2")
    rank.say(Ack(2, 1.0, again.id, "prepared", Reason.OK), Ack(3, 1.0, again.id, "aborted", Reason.NO_WORD))
    assert daemon.turn(again, commit=False).state == "aborted"
    assert again.sequence == 2


def test_what_does_not_come_fails_with_what_did(daemon, rank) -> None:
    rank.say(Heartbeat(1.0, 1, "train", 0, {}, 0.0))
    daemon.wait_for(lambda: daemon.of(Heartbeat))
    with pytest.raises(AssertionError, match=r"received so far: .*'Hello': 1, 'Heartbeat': 1"):
        daemon.wait_for(lambda: daemon.of(Ack), 0.05)


def test_a_killed_daemon_accepts_nobody_and_its_socket_stays_like_a_killed_processes(daemon) -> None:
    daemon.kill()
    assert daemon.path.exists()
    with pytest.raises(ConnectionRefusedError):
        Rank(daemon)

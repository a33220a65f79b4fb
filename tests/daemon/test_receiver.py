"""Whatever comes over the socket, the daemon lives, closes that connection, and counts why."""

import re
import socket
import struct
import urllib.request

import pytest

from sentinel import wire
from sentinel.daemon import connection
from sentinel.records import ControlReply, ControlRequest, Heartbeat
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.wire_client import WireClient
from tests.waiting import until


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with DaemonProcess(tmp_path_factory.mktemp("receiver") / "home") as running:
        yield running


def rejected(daemon: DaemonProcess, reason: str) -> float:
    with urllib.request.urlopen(f"{daemon.url}/metrics", timeout=5) as reply:
        text = reply.read().decode()
    found = re.search(rf'sentinel_rejected_connections_total{{reason="{reason}"}} (\S+)', text)
    assert found, text
    return float(found[1])


def still_serves(daemon: DaemonProcess) -> bool:
    client = WireClient(daemon.places.socket)
    client.dial()
    client.put(ControlRequest(wire.VERSION, "status", "nothing"))
    reply = client.expect(ControlReply)
    client.close()
    return reply.reason == "no_such_run"


@pytest.mark.parametrize(
    ("reason", "data"),
    [
        ("oversized", struct.pack(">I", wire.MAX_FRAME_BYTES + 1)),
        ("malformed", struct.pack(">I", 5) + b"hello"),
        ("malformed", struct.pack(">I", 0)),
        ("malformed", struct.pack(">I", 64) + b"\x91" * 64),
        ("unexpected", wire.encode(Heartbeat(0.0, 0, "train", 0, {}, 0.0))),
        ("other_version", wire.encode(ControlRequest(wire.VERSION + 1, "status", "latest"))),
    ],
)
def test_bad_bytes_close_their_connection_and_are_counted(daemon, reason, data):
    before = rejected(daemon, reason)
    client = WireClient(daemon.places.socket)
    client.dial()
    client.put_bytes(data)
    assert client.is_cut_off()
    client.close()
    assert rejected(daemon, reason) == before + 1
    assert still_serves(daemon)


def test_a_bad_frame_after_a_good_start_ends_that_rank_s_connection_only(daemon):
    with (
        WireClient(daemon.places.socket, "good-start") as client,
        WireClient(daemon.places.socket, "neighbour") as other,
    ):
        client.start()
        client.all_stored()
        client.put_bytes(struct.pack(">I", 3) + b"\xc1\xc1\xc1")
        assert client.is_cut_off()
        other.start()
        other.step(1)
        other.all_stored()


def test_a_client_that_drips_is_cut_off_after_ten_seconds(daemon, monkeypatch):
    before = rejected(daemon, "too_slow")
    silent = WireClient(daemon.places.socket)
    silent.dial()
    dripping = WireClient(daemon.places.socket)
    dripping.dial()
    half = wire.encode(ControlRequest(wire.VERSION, "status", "latest"))[:-1]
    assert dripping.socket is not None
    dripping.socket.settimeout(1.0)
    sent = 0
    while sent < len(half):  # one byte a second: each is news, and still the frame never gets whole
        dripping.put_bytes(half[sent : sent + 1])
        sent += 1
        try:
            if dripping.socket.recv(1) == b"":
                break
        except TimeoutError:
            continue
    assert 8 <= sent <= connection.PATIENCE_SECONDS + 3
    assert silent.is_cut_off(5)
    dripping.close()
    silent.close()
    assert rejected(daemon, "too_slow") == before + 2


def test_a_client_that_does_not_read_is_cut_off(daemon):
    before = rejected(daemon, "slow_consumer")
    client = WireClient(daemon.places.socket, "deaf")
    client.connect()
    client.start()
    record = client.step(1)
    client.all_stored()
    assert client.socket is not None
    client.socket.settimeout(5)
    again = wire.encode(record) * 500  # each repetition is acknowledged, and nobody reads it
    with pytest.raises(OSError):
        for _ in range(2000):
            client.socket.sendall(again)
    client.close()
    until(lambda: rejected(daemon, "slow_consumer") == before + 1)
    assert still_serves(daemon)


def test_the_socket_is_for_its_owner_only(daemon):
    assert daemon.places.socket.stat().st_mode & 0o777 == 0o600
    assert daemon.places.socket.parent.stat().st_mode & 0o777 == 0o700


def test_a_hundred_connections_leave_no_descriptor_behind(daemon):
    assert daemon.process is not None

    def descriptors() -> int:
        import psutil

        return psutil.Process(daemon.process.pid).num_fds()

    before = descriptors()
    sockets = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(100)]
    for each in sockets:
        each.connect(str(daemon.places.socket))
    until(lambda: descriptors() >= before + 100)
    for each in sockets:
        each.close()
    until(lambda: descriptors() <= before + 2)

"""Whatever comes over the socket, the daemon lives, closes that connection, and counts why."""

import asyncio
import re
import socket
import struct
import time
import urllib.request
from pathlib import Path

import pytest

from sentinel import wire
from sentinel.daemon.connection import Rejected
from sentinel.daemon.receiver import Receiver
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


def test_a_client_that_drips_or_says_nothing_is_cut_off_in_time(tmp_path):
    assert asyncio.run(_drip(tmp_path / "s")) == [Rejected.TOO_SLOW, Rejected.TOO_SLOW]


async def _drip(path: Path) -> list[Rejected]:
    counted: list[Rejected] = []
    receiver = Receiver(path, _never, _never, counted.append, patience_seconds=0.5)
    await receiver.start()
    silent, silent_writer = await asyncio.open_unix_connection(path)
    dripping, writer = await asyncio.open_unix_connection(path)
    began = time.monotonic()
    cut = asyncio.ensure_future(dripping.read())
    for byte in wire.encode(ControlRequest(wire.VERSION, "status", "latest"))[:-1]:
        writer.write(bytes([byte]))  # each is news, and still the frame never gets whole
        if (await asyncio.wait({cut}, timeout=0.1))[0]:
            break
    assert cut.done()
    assert 0.4 < time.monotonic() - began < 3
    assert await asyncio.wait_for(silent.read(), 3) == b""
    receiver.stop()
    await receiver.close()
    for each in (writer, silent_writer):
        each.close()
    return counted


async def _never(*message: object) -> None:
    raise AssertionError(f"nothing whole was sent, and yet {message} arrived")


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
        _send_for_ever(client.socket, again)
    client.close()
    until(lambda: rejected(daemon, "slow_consumer") == before + 1)
    assert still_serves(daemon)


def _send_for_ever(sock: socket.socket, data: bytes) -> None:
    while True:
        sock.sendall(data)


def test_the_socket_is_for_its_owner_only(daemon):
    assert daemon.places.socket.stat().st_mode & 0o777 == 0o600
    assert daemon.places.socket.parent.stat().st_mode & 0o777 == 0o700


def test_a_hundred_connections_leave_no_descriptor_behind(daemon):
    assert daemon.process is not None

    def descriptors() -> int:
        import psutil

        return psutil.Process(daemon.process.pid).num_fds()

    usual = 60  # far above what an idle daemon has open, far below a hundred more
    until(lambda: descriptors() < usual)
    sockets = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(100)]
    for each in sockets:
        each.connect(str(daemon.places.socket))
    until(lambda: descriptors() > 100)
    for each in sockets:
        each.close()
    assert until(lambda: descriptors() < usual)

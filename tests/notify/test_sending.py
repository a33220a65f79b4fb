"""One attempt ends within its deadline whatever the receiver does, and tells what to make of it."""

import asyncio
import socket
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sentinel.notify.channel import Delivery, Request
from sentinel.notify.patience import LONGEST_PAUSE_SECONDS
from sentinel.notify.sending import MOST_READ_BYTES, Sender
from sentinel.vocabulary import AlertOutcome
from tests.conftest import require_service
from tests.notify.receiver import HUGE_BYTES, Receiver, refusing_url

SECRET = "Bearer hush"  # a header that nobody else may see
DEADLINE = 1.0


def deliver(url: str) -> tuple[Delivery, float]:
    """The delivery and how long it took."""

    async def once() -> Delivery:
        async with Sender() as sender:
            return await sender.attempt(Request(url, {"authorization": SECRET}, b"{}"), DEADLINE)

    began = time.monotonic()
    delivery = asyncio.run(once())
    return delivery, time.monotonic() - began


@pytest.mark.parametrize(
    ("behaviour", "outcome"),
    [
        ("ok", AlertOutcome.SENT),
        ("huge", AlertOutcome.SENT),
        ("500", AlertOutcome.RETRIED),
        ("408", AlertOutcome.RETRIED),
        ("429", AlertOutcome.RETRIED),
        ("close", AlertOutcome.RETRIED),
        ("hang", AlertOutcome.RETRIED),
        ("drip", AlertOutcome.RETRIED),
        ("400", AlertOutcome.FAILED),
        ("401", AlertOutcome.FAILED),
        ("404", AlertOutcome.FAILED),
        ("410", AlertOutcome.FAILED),
    ],
)
def test_every_receiver_is_done_with_within_the_deadline(behaviour, outcome):
    with Receiver(behaviour) as receiver:
        delivery, seconds = deliver(receiver.url)
    assert delivery.outcome is outcome
    assert seconds < DEADLINE + 1.0
    if behaviour in {"hang", "drip"}:
        assert seconds >= DEADLINE * 0.9, "it gave up before the deadline"
    assert [one.behaviour for one in receiver.received] == [behaviour]


def test_of_a_huge_answer_only_the_beginning_is_read():
    with Receiver("huge") as receiver:
        deliver(receiver.url)
    # What the kernel's buffers hold on top of what was read is the receiver's business.
    assert MOST_READ_BYTES <= receiver.answered_bytes < HUGE_BYTES


def test_a_redirect_is_not_followed_and_its_target_gets_nothing():
    with Receiver() as target, Receiver("redirect", redirect_to=target.url) as receiver:
        delivery, _ = deliver(receiver.url)
        assert receiver.received[0].headers["authorization"] == SECRET
        assert target.received == []
    assert delivery.outcome is AlertOutcome.RETRIED
    assert "redirect" in delivery.reason


def test_nobody_listening_is_tried_again():
    delivery, seconds = deliver(refusing_url())
    assert delivery == Delivery(AlertOutcome.RETRIED, "no connection")
    assert seconds < DEADLINE


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/secret", "nonsense"])
def test_an_address_that_cannot_be_is_given_up_without_being_repeated(url):
    delivery, _ = deliver(url)
    assert delivery.outcome is AlertOutcome.FAILED
    assert "secret" not in delivery.reason
    assert "nonsense" not in delivery.reason


def test_cookies_of_one_answer_are_not_sent_with_the_next():
    class Baker(Receiver):
        def _answer(self, behaviour):
            yield b"HTTP/1.1 200 OK\r\nset-cookie: a=b\r\ncontent-length: 0\r\n\r\n"

    async def twice(url: str) -> None:
        async with Sender() as sender:
            for _ in range(2):
                await sender.attempt(Request(url, {}, b"{}"), DEADLINE)

    with Baker() as receiver:
        asyncio.run(twice(receiver.url))
    assert len(receiver.received) == 2
    assert all("cookie" not in one.headers for one in receiver.received)


@pytest.mark.parametrize(
    ("header", "wait"), [("7", 7.0), ("1e9", LONGEST_PAUSE_SECONDS), ("nan", 0.0), ("-3", 0.0), ("soon", 0.0)]
)
def test_a_receiver_that_asks_for_patience_gets_some(header, wait):
    class Busy(Receiver):
        def _answer(self, behaviour):
            yield f"HTTP/1.1 503 Busy\r\nretry-after: {header}\r\ncontent-length: 0\r\n\r\n".encode()

    with Busy() as receiver:
        delivery, _ = deliver(receiver.url)
    assert delivery == Delivery(AlertOutcome.RETRIED, "status 503", wait)


def test_a_server_that_cannot_prove_who_it_is_gets_nothing(tmp_path):
    openssl = require_service("openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    command = [openssl, *words.split(), "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with socket.create_server(("127.0.0.1", 0)) as plain, ThreadPoolExecutor(1) as pool:
        heard = pool.submit(_first_words, plain, context)
        delivery, _ = deliver(f"https://127.0.0.1:{plain.getsockname()[1]}/hook")
        assert heard.result(10) == b""
    assert delivery == Delivery(AlertOutcome.RETRIED, "no connection")


def _first_words(plain, context):
    """What a client says after the handshake; nothing if it leaves during it."""
    connection, _ = plain.accept()
    try:
        with context.wrap_socket(connection, server_side=True) as secure:
            return secure.recv(1 << 16)
    except OSError:
        return b""
    finally:
        connection.close()

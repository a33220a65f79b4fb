"""A receiver of alerts that behaves as badly as a test asks, one behaviour per request."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self

DRIP_SECONDS = 0.2  # between bytes: each read succeeds, only a total deadline ends it
HUGE_BYTES = 10 * 2**20


class Received(NamedTuple):
    """One request as it came."""

    path: str
    headers: dict[str, str]
    body: bytes
    behaviour: str
    began: float  # monotonic

    @property
    def json(self) -> Any:
        return json.loads(self.body, parse_constant=_no_constants)


class Receiver:
    """`with Receiver("500", "ok") as receiver:` answers the first request with 500, all later ones with ok.

    Behaviours: ok, 500, 429, 400, hang (no answer), drip (the answer's head byte by byte), redirect (307 to
    `redirect_to`), close (the connection ends without an answer), huge (200 and 10 MB).
    """

    def __init__(self, *behaviours: str, redirect_to: str = "") -> None:
        self.received: list[Received] = []  # in the order in which they came, noted before they are answered
        self.answered_bytes = 0  # before the other side went away
        self._behaviours = list(behaviours)
        self._redirect_to = redirect_to
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    @property
    def ids(self) -> list[str]:
        return [one.headers["webhook-id"] for one in self.received]

    def conditions(self) -> list[str]:
        """`firing` and `resolved` in the order in which they were answered with ok."""
        return [one.json["data"]["condition"] for one in self.received if one.behaviour == "ok"]

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        began = time.monotonic()
        with connection, contextlib.suppress(OSError):
            connection.settimeout(10)
            request = _read(connection)
            if request is None:
                return
            with self._lock:
                behaviour = self._behaviours.pop(0) if self._behaviours else "ok"
                self.received.append(Received(*request, behaviour, began))
            for part in self._answer(behaviour):
                connection.sendall(part)
                self.answered_bytes += len(part)

    def _answer(self, behaviour: str) -> Iterator[bytes]:
        if behaviour == "hang":
            self._over.wait(30)
        elif behaviour == "drip":
            for byte in b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nx-padding: " + b"p" * 500:
                yield bytes([byte])
                if self._over.wait(DRIP_SECONDS):
                    return
        elif behaviour == "redirect":
            yield f"HTTP/1.1 307 Go\r\nlocation: {self._redirect_to}\r\ncontent-length: 0\r\n\r\n".encode()
        elif behaviour == "huge":
            yield f"HTTP/1.1 200 OK\r\ncontent-length: {HUGE_BYTES}\r\n\r\n".encode()
            for _ in range(HUGE_BYTES // 2**14):
                yield b"h" * 2**14
        elif behaviour != "close":
            status = "200 OK" if behaviour == "ok" else f"{behaviour} As asked"
            yield f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode()


def _read(connection: socket.socket) -> tuple[str, dict[str, str], bytes] | None:
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(1 << 16)
        if not part:
            return None
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    while len(body) < int(headers.get("content-length", "0")):
        body += connection.recv(1 << 16)
    return first.split(" ")[1], headers, body


def _no_constants(word: str) -> Any:
    raise AssertionError(f"{word} is no JSON")


def refusing_url() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"

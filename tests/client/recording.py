"""A link with a receiver that writes down what it is told, in a home of its own."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sentinel import wire
from sentinel.client.link import Link
from sentinel.client.outbox import Outbox
from sentinel.config import build
from sentinel.places import Places
from sentinel.records import FromRank, Heartbeat, Hello


class Recorder:
    """Implements `link.Receiver`."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.told: list[tuple[str, Any]] = []
        self.troubles: dict[str, str] = {}

    def on_welcome(self, welcome) -> None:
        self.told.append(("welcome", welcome))

    def on_command(self, command) -> None:
        self.told.append(("command", command))

    def on_word(self, word) -> None:
        self.told.append(("word", word))

    def on_mark(self, mark) -> None:
        self.told.append(("mark", mark))

    def on_roster(self, roster) -> None:
        self.told.append(("roster", roster))

    def on_lost(self) -> None:
        self.told.append(("lost", None))

    def on_trouble(self, what: str, text: str) -> None:
        assert what not in self.troubles, f"{what} was told twice"
        self.troubles[what] = text

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(1.0, 0, "train", self.outbox.last_seq, self.outbox.dropped, 0.0)

    def names(self) -> list[str]:
        return [name for name, _ in self.told]


@contextlib.contextmanager
def short_places() -> Iterator[Places]:
    """Places whose socket path is short enough wherever the tests run."""
    folder = Path(tempfile.mkdtemp(prefix="sl-"))
    try:
        yield Places(home=folder / "home", runtime=folder / "run")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def hello(outbox: Outbox, nonce: str) -> Hello:
    return Hello(wire.VERSION, "run-1", 0, 1, nonce, 1, 1.0, outbox.last_seq)


def make_link(
    places: Places, *, nonce: str = "n1", receiver: Any = None, starts: bool = False
) -> tuple[Link, Outbox, Recorder]:
    """A link that is not started; without `starts` it may not start a daemon, and nobody else does."""
    outbox = Outbox(1024)
    recorder = receiver(outbox) if receiver else Recorder(outbox)
    settings = build({"outbox": {"retry_seconds": 0.05}, "daemon": {"autostart": starts}})
    link = Link(
        places=places,
        hello=lambda: hello(outbox, nonce),
        outbox=outbox,
        receiver=recorder,
        settings=settings,
        settings_path=None,
        may_start_daemon=starts,
    )
    return link, outbox, recorder


def spooled(path: Path) -> list[FromRank]:
    """The messages in a spool file."""
    return [wire.decode_from_rank(body) for body in wire.FrameReader().feed(path.read_bytes())]

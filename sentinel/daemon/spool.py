"""Read what a process left behind: its file of critical messages that nobody had acknowledged."""

from pathlib import Path
from typing import NamedTuple

from sentinel import wire
from sentinel.errors import WireError
from sentinel.records import ControlRequest, Gap, Heartbeat, Hello, Numbered


class Spool(NamedTuple):
    """One process's last words, in their order."""

    path: Path
    hello: Hello
    messages: tuple[Numbered, ...]


def read(path: Path) -> Spool:
    """The spool in a file. A frame torn by a crash ends it. Raises WireError for what was never a spool."""
    hello: Hello | None = None
    messages: list[Numbered] = []
    for body in wire.FrameReader().feed(path.read_bytes()):
        try:
            message = wire.decode_from_rank(body)
        except WireError:
            if hello is None:
                raise
            break  # a torn write: what stands before it counts
        if hello is None:
            if not isinstance(message, Hello):
                raise WireError(f"{path.name} begins with {type(message).__name__}; a spool begins with Hello")
            hello = message
        elif not isinstance(message, Hello | Gap | Heartbeat | ControlRequest):
            messages.append(message)
    if hello is None:
        raise WireError(f"{path.name} holds no complete frame")
    return Spool(path, hello, tuple(sorted(messages, key=lambda message: message.seq)))


def found(folder: Path) -> list[Path]:
    """Every spool of a home, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(folder.glob("*.spool"), key=lambda path: path.stat().st_mtime)

"""Turn records into bytes and bytes into records. No I/O, no clock.

A frame is a length of four bytes, big-endian, and that many bytes of msgpack: one tagged array. Limits hold before
anything is decoded: a frame is at most 1 MiB, nesting at most 8 deep. There is no pickle anywhere on the wire.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

from sentinel.errors import WireError
from sentinel.records import ControlReply, ControlRequest, FromDaemon, FromRank, Reflex, RunStart

VERSION = 1
MAX_FRAME_BYTES = 1 << 20
MAX_DEPTH = 8

_FREE_FORM: dict[type, tuple[str, ...]] = {
    RunStart: ("git", "config", "settings"),
    Reflex: ("evidence",),
    ControlRequest: ("arguments",),
    ControlReply: ("body",),
}
_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_from_rank = msgspec.msgpack.Decoder(FromRank)
_from_daemon = msgspec.msgpack.Decoder(FromDaemon)


def encode(message: FromRank | FromDaemon) -> bytes:
    """One frame. Raises WireError when the message is larger than a frame may be, or nested too deeply."""
    _check_depth(message)
    try:
        body = _encoder.encode(message)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"a {type(message).__name__} cannot be encoded: {error}") from None
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a {type(message).__name__} of {len(body)} bytes does not fit a frame of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def decode_from_rank(body: bytes) -> FromRank:
    """The message in a frame's body, as the daemon reads it. Raises WireError."""
    return _decode(_from_rank, body)


def decode_from_daemon(body: bytes) -> FromDaemon:
    """The message in a frame's body, as a rank reads it. Raises WireError."""
    return _decode(_from_daemon, body)


class FrameReader:
    """Cuts a stream of bytes into frame bodies; holds at most one incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield each frame body that `data` completes. Raises WireError as soon as a length is over the limit."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, start)
                if length > MAX_FRAME_BYTES:
                    raise WireError(f"a frame announces {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
                end = start + _LENGTH.size + length
                if len(self._buffer) < end:
                    break
                body = bytes(self._buffer[start + _LENGTH.size : end])
                start = end
                yield body
        finally:
            del self._buffer[:start]

    @property
    def pending_bytes(self) -> int:
        return len(self._buffer)


_Message = TypeVar("_Message")


def _decode(decoder: "msgspec.msgpack.Decoder[_Message]", body: bytes) -> _Message:
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(body)} bytes; at most {MAX_FRAME_BYTES} are allowed")
    try:
        message = decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a message of ours: {error}") from None
    _check_depth(message)
    return message


def _check_depth(message: object) -> None:
    # The decoder fixes the depth of every typed field; only free-form dictionaries can go deeper.
    for name in _FREE_FORM.get(type(message), ()):
        if _deeper_than(getattr(message, name), MAX_DEPTH - 1):
            raise WireError(f"{type(message).__name__}.{name} is nested deeper than {MAX_DEPTH} levels")


def _deeper_than(value: object, levels: int) -> bool:
    if isinstance(value, dict):
        children: Iterable[object] = value.values()
    elif isinstance(value, list):
        children = value
    else:
        return False
    return levels == 0 or any(_deeper_than(child, levels - 1) for child in children)
